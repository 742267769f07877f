"""Plan rows on tensor cores by mma.sync, backward: bwd_03_mma, bwd_04_pipeline.

Shared memory is what the kernels' headers say; grids, workspace and traffic are those of bwd_02_tiled with
one chunk.
"""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.row import (
    CORE,
    Grid,
    Params,
    Row,
    Slot,
    Step,
    Tile,
    ceil_div,
    key_head_tiles,
    n_slots,
    query_tiles,
    shared_bytes,
)
from cuflash.rows_backward import (
    CONVERT_DQ,
    DELTA,
    OPTIONS_AFTER,
    OPTIONS_BEFORE,
    convert_keys,
    delta_slot,
    dO_parts,
    dq_sum_slot,
    group_shares,
    key_sum_slots,
    option_slots,
    row_shape,
    tile_pairs,
    tiled_bytes,
)
from cuflash.rows_forward import Traffic, kept_blocks_bytes
from cuflash.rows_mma import DTYPES, LIMITS

KB = 1024


def _tiles_bytes(p: Params, stages: int, score_tiles: int) -> int:
    size, tile_q, tile_kv = 4 if p["DTYPE"] == 2 else 2, p["TILE_Q"], p["TILE_KV"]
    return shared_bytes(
        (size, tile_kv, p["HEAD_DIM"]),
        (size, tile_kv, p["HEAD_DIM_V"]),
        (size, stages * tile_q, p["HEAD_DIM"]),
        (size, stages * dO_parts(p) * tile_q, p["HEAD_DIM_V"]),
        (size, score_tiles * tile_kv, tile_q),
        *2 * [(4, stages, tile_q)],
    )


# ---- bwd_03_mma


def _one_stage(p: Params) -> int:
    return _tiles_bytes(p, 1, 2)


def _lse_log2_slot(problem: Problem) -> Slot:
    return Slot("lse_log2", problem.accumulator, row_shape(problem))


def _sums(problem: Problem, p: Params) -> tuple[Slot, ...]:
    return delta_slot(problem), _lse_log2_slot(problem), dq_sum_slot(problem)


def _traffic(problem: Problem, p: Params, shares: int) -> Traffic:
    """That of bwd_02_tiled; where nothing but the scale changes a score, lse is read in base 2."""
    traffic = tiled_bytes(problem, p, shares)
    if not traffic:
        return {}
    rows = problem.batch * problem.heads * problem.len_q * 4
    reads = 0
    if problem.softcap is None and problem.dropout is None and problem.dtype in DTYPES:
        reads, traffic["lse"] = traffic["lse"][0] - rows, (rows, 0)
    return traffic | {"lse_log2": (reads, rows)}


def _unshared_bytes(problem: Problem, p: Params) -> Traffic:
    return _traffic(problem, p, 1)


BWD_03 = Row(
    "bwd_03_mma",
    False,
    75,
    (
        Tile(32, 64, 4, up_to=128),  # 56 KB at 128
        Tile(32, 32, 4, up_to=192),  # 53 KB at 192
        Tile(16, 32, 4, up_to=256, least=128),  # 51 KB at 256: sm_75 has 64
    ),
    (DELTA, Step("bwd_03_mma", key_head_tiles, _one_stage), CONVERT_DQ),
    "five tensor-core products; which operand needs a transpose",
    dtypes=DTYPES,
    dtype_archs=(("bfloat16", 80),),
    features=CORE - {"deterministic"},
    limits=LIMITS,
    workspace=_sums,
    bytes=_unshared_bytes,
    flops_per_clock=2048,
)


# ---- bwd_04_pipeline

ENOUGH_BLOCKS = 264  # two on every SM of a large GPU


def _warps_across(rows: int, cols: int, warps: int) -> int:
    """= warps_across of mma_gradient.cuh."""
    cuts = [(2**20, 1)]
    for across in (1, 2, 4, 8):
        down = warps // across
        if down and rows % (16 * down) == 0 and (cols % (16 * across) == 0 or cols == 8 * across):
            cuts.append((rows // down + cols // across, across))
    return min(cuts)[1]


def _step_q(p: Params) -> int:
    tile_q = p["TILE_Q"]
    return tile_q // 2 if 2 * p["TILE_KV"] * tile_q > 64 * 32 * p["N_WARPS"] else tile_q


def _keeps_scores(p: Params) -> bool:
    """keeps_P of the kernel: does every warp make whole rows of P^T, dV and dK?"""
    widths = _step_q(p), p["HEAD_DIM"], p["HEAD_DIM_V"]
    return p["DTYPE"] != 2 and all(_warps_across(p["TILE_KV"], cols, p["N_WARPS"]) == 1 for cols in widths)


def _traded_bytes(p: Params) -> int:
    """sizeof(Trades): what pairs of warps give each other, where a warp alone would have little."""
    rows, cols, half = p["TILE_KV"], _step_q(p), p["N_WARPS"] // 2
    across = _warps_across(rows, cols, half)
    row_blocks, n = rows // (half // across) // 16, cols // across // 8
    has_halves = n % 4 == 0 or (n == 2 and p["DTYPE"] == 2)
    trades = has_halves and row_blocks * n <= 12 and p["HEAD_DIM"] + p["HEAD_DIM_V"] >= 256
    return shared_bytes((4, half * row_blocks * n, 128)) if trades else 0


def _two_stages(p: Params) -> int:
    tiles = p["TILE_KV"], p["TILE_Q"]
    blocks = p["BLOCK_KV"], p["BLOCK_Q"]
    kept = 0
    if p["BLOCK_MASK"]:
        kept = kept_blocks_bytes(*tiles, *blocks, 2)
        if p["DETERMINISTIC"] and not kept:
            kept = shared_bytes((4, 2, 1))  # a tile inside one block: is it kept?
    return _tiles_bytes(p, 2, 1 if _keeps_scores(p) else 2) + _traded_bytes(p) + kept


def _blocks(problem: Problem, p: Params) -> int:
    return n_slots(problem, problem.len_k, p["TILE_KV"]) * problem.heads_k


def _shares(problem: Problem, p: Params) -> int:
    return group_shares(problem, _blocks(problem, p), ENOUGH_BLOCKS)


def _grid(problem: Problem, p: Params) -> Grid:
    return _blocks(problem, p) * _shares(problem, p), 1, 1


def _in_three_products(problem: Problem) -> bool:
    return problem.dtype == "float32" and problem.precision != "tf32"


def _precision(problem: Problem, p: Params) -> Params:
    return {"PRECISION": 2} if _in_three_products(problem) else {}


def _all_rows(problem: Problem, p: Params) -> Grid:
    """A warp per row of all heads of q, dout, k and v."""
    batch = 1 if problem.packed else problem.batch
    rows = 2 * batch * (problem.len_q + problem.len_k)
    return ceil_div(rows, p["N_WARPS"]), 1, 1


def _slots(problem: Problem, p: Params) -> tuple[Slot, ...]:
    tiles = n_slots(problem, problem.len_q, p["TILE_Q"]) * problem.heads
    counts = 1 + tiles if problem.deterministic else 1 if _in_three_products(problem) else 0
    return (
        *option_slots(problem, p),
        Slot("counts", "int32", (counts,), zero=True),
        Slot("dQ_tiles", problem.accumulator, (tiles, p["TILE_Q"] * p["HEAD_DIM"]), zero=True),
        delta_slot(problem),
        _lse_log2_slot(problem),
        *key_sum_slots(problem, _shares(problem, p)),
    )


def _bytes(problem: Problem, p: Params) -> Traffic:
    """That of bwd_02_tiled, with sums of dQ in whole tiles.  {} too where blocks wait for their turn."""
    is_modelled = not problem.deterministic and problem.dtype in DTYPES
    traffic = {} if not is_modelled else _traffic(problem, p, _shares(problem, p))
    if traffic:
        del traffic["dQ_sum"]
        tile = p["TILE_Q"] * p["HEAD_DIM"] * 4
        steps = sum(n for _, n, _ in tile_pairs(problem, p["TILE_KV"], p["TILE_Q"], True))
        added = steps * problem.batch * problem.heads * tile
        tiles = n_slots(problem, problem.len_q, p["TILE_Q"]) * problem.heads
        traffic["dQ_tiles"] = (added + tiles * tile, added)
    return traffic


ODD_USES = ("DTYPE", "DOUT_DTYPE", "N_WARPS", "PACKED")
DQ_TILES_USES = (
    *("DTYPE", "OUT_DTYPE", "HEAD_DIM", "HEAD_DIM_V", "TILE_Q", "TILE_KV", "N_WARPS"),
    *("DOUT_DTYPE", "LENGTHS_Q", "PACKED"),
)
BWD_04 = Row(
    "bwd_04_pipeline",
    True,
    80,
    (
        # The more keys a block has, the less it adds to dQ; as many as dK and dV leave registers for.
        # Up to 64 a warp keeps its rows of P^T and dS^T in registers: 32 rows of 128.
        # Where `least` is 128, the warps cannot share a product of 96 columns, or one narrower than they are.
        Tile(64, 128, 4, up_to=64, itemsizes=(2,), room=163 * KB),  # 81 KB at 64, two blocks an SM
        Tile(64, 128, 8, up_to=64, itemsizes=(2,)),  # 97 KB at 64, of the 99 that smaller GPUs have
        Tile(64, 96, 4, up_to=96, itemsizes=(2,), room=225 * KB),  # 109 KB at 96, two blocks an SM
        Tile(64, 64, 4, up_to=128, itemsizes=(2,), room=225 * KB),  # 113 KB at 128, two blocks an SM
        Tile(64, 128, 8, up_to=128, itemsizes=(2,), room=163 * KB),  # 161 KB at 128
        Tile(32, 64, 8, up_to=128, itemsizes=(2,), least=128),  # 80 KB
        Tile(64, 96, 8, up_to=192, itemsizes=(2,), least=128, room=225 * KB),  # 193 KB at 192
        Tile(64, 64, 8, up_to=256, itemsizes=(2,), room=225 * KB),  # 225 KB at 256
        Tile(32, 64, 8, up_to=256, itemsizes=(2,), least=128, room=163 * KB),  # 145 KB at 256
        Tile(32, 32, 4, up_to=192, itemsizes=(2,)),  # 77 KB at 192
        Tile(16, 32, 4, up_to=256, itemsizes=(2,), least=128, spills=128),  # 66 KB at 256; spills on sm_120
        # float32 as TF32
        Tile(32, 64, 4, up_to=64, itemsizes=(4,)),  # 80 KB at 64, two blocks an SM
        Tile(32, 64, 4, up_to=96, itemsizes=(4,), room=225 * KB),  # 113 KB at 96, two blocks an SM
        Tile(32, 64, 8, up_to=128, itemsizes=(4,), least=128),  # 153 KB
        Tile(32, 64, 8, up_to=192, itemsizes=(4,), least=128),  # 209 KB at 192
        Tile(16, 64, 8, up_to=256, itemsizes=(4,), least=256, tf32=True),  # 204 KB: 16 x 192 has no even cut
        Tile(32, 32, 8, up_to=256, itemsizes=(4,), least=128),  # 204 KB at 256, 156 KB at 192
        Tile(16, 32, 4, up_to=128, itemsizes=(4,), least=128),  # 68 KB
    ),
    (
        DELTA,
        *OPTIONS_BEFORE,
        Step("pass_odd", _all_rows, when=_in_three_products, uses=ODD_USES),
        Step("bwd_04_pipeline", _grid, _two_stages),
        Step(
            "bwd_04_pipeline__careful",
            _grid,
            _two_stages,
            when=_in_three_products,
            fixed=(("PRECISION", 3),),
        ),
        Step("pass_dq_tiles", query_tiles, uses=DQ_TILES_USES),
        *convert_keys(_shares),
        *OPTIONS_AFTER,
    ),
    "Q and dO double-buffered",
    dtypes=(*DTYPES, "float32"),
    limits=LIMITS,
    workspace=_slots,
    bytes=_bytes,
    flops_per_clock=2048,
    more=_precision,
)
