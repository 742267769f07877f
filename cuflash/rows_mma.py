"""Plan rows on tensor cores by mma.sync, forward: fwd_03_mma, fwd_04_swizzle, fwd_05_pipeline.

Shared memory and grids are what the kernels' headers say; traffic is that of fwd_02_tiled with one chunk.
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
    n_slots,
    query_tiles,
    shared_bytes,
)
from cuflash.rows_forward import LENGTHS, Traffic, kept_blocks_bytes, keys_of, tiled_bytes

DTYPES = ("float16", "bfloat16")
LIMITS = (*LENGTHS, ("head_dim", 256), ("head_dim_v", 256))
KB = 1024


def _tiles_bytes(p: Params, stages: int) -> int:
    return shared_bytes(
        (2, p["TILE_Q"], p["HEAD_DIM"]),
        (2, stages * p["TILE_KV"], p["HEAD_DIM"]),
        (2, stages * p["TILE_KV"], p["HEAD_DIM_V"]),
    )


def _one_stage(p: Params) -> int:
    return _tiles_bytes(p, 1)


def _two_stages(p: Params) -> int:
    blocks = p["BLOCK_Q"], p["BLOCK_KV"]
    kept = kept_blocks_bytes(p["TILE_Q"], p["TILE_KV"], *blocks, 2) if p["BLOCK_MASK"] else 0
    return _tiles_bytes(p, 2) + kept


FWD_03 = Row(
    "fwd_03_mma",
    False,
    75,
    (
        Tile(64, 64, 4, up_to=128),  # 48 KB at 128
        Tile(64, 32, 4, up_to=256),  # 64 KB at 256: what sm_75 has
    ),
    (Step("fwd_03_mma", query_tiles, _one_stage),),
    "tensor cores; P is S's registers repacked",
    dtypes=DTYPES,
    dtype_archs=(("bfloat16", 80),),
    features=CORE,
    limits=LIMITS,
    bytes=tiled_bytes,
    flops_per_clock=2048,
)

FWD_04 = Row(
    "fwd_04_swizzle",
    False,
    80,
    FWD_03.tiles,
    (Step("fwd_04_swizzle", query_tiles, _one_stage),),
    "XOR the chunk index: no bank conflicts",
    dtypes=DTYPES,
    features=CORE,
    limits=LIMITS,
    bytes=tiled_bytes,
    flops_per_clock=2048,
)

# ---- fwd_05_pipeline: blocks that share the keys of a query tile

ENOUGH_BLOCKS = 132  # one on every SM of a large GPU
LEAST_KEYS = 512  # for one block: below, merging costs more than it brings


def splits(problem: Problem, p: Params) -> int:
    """Among how many blocks the keys of a query tile are shared: 2, 4 or 8; 0: one has them all."""
    blocks = n_slots(problem, problem.len_q, p["TILE_Q"]) * problem.heads
    if problem.packed or blocks == 0:
        return 0
    begin, end = keys_of(problem, max(problem.len_q - p["TILE_Q"], 0), problem.len_q)  # of the last tile
    most = min(8, ENOUGH_BLOCKS // blocks, (end - begin) // LEAST_KEYS)
    return 1 << most.bit_length() - 1 if most > 1 else 0


def _shared_tiles(problem: Problem, p: Params) -> Grid:
    return query_tiles(problem, p)[0] * max(p["SPLIT"], 1), 1, 1


def _merged_rows(problem: Problem, p: Params) -> Grid:
    rows = problem.batch * problem.len_q * problem.heads
    return (ceil_div(rows, p["N_WARPS"]) if p["SPLIT"] else 0), 1, 1


def _part_slots(problem: Problem, p: Params) -> tuple[Slot, ...]:
    if not p["SPLIT"]:
        return ()
    lead, rows = (p["SPLIT"], problem.batch), (problem.heads, problem.len_q)
    return (
        Slot("O_parts", "float32", (*lead, problem.len_q, problem.heads, problem.head_dim_v)),
        Slot("lse_parts", "float32", (*lead, *rows)),
    )


def _pipeline_bytes(problem: Problem, p: Params) -> Traffic:
    """{} too where keys are shared: what pass_merge reads depends on which parts saw anything."""
    return {} if p["SPLIT"] else tiled_bytes(problem, p)


FWD_05 = Row(
    "fwd_05_pipeline",
    True,
    80,
    (
        Tile(128, 64, 4, up_to=64),
        Tile(128, 32, 4, up_to=128),
        Tile(64, 32, 4, up_to=256),
    ),
    (
        Step("fwd_05_pipeline", _shared_tiles, _two_stages),
        Step("pass_merge", _merged_rows, uses=("DTYPE", "OUT_DTYPE", "N_WARPS", "PACKED", "SPLIT")),
    ),
    "ask for tile j+1 before using tile j; mask only the tiles that need it",
    dtypes=DTYPES,
    limits=LIMITS,
    workspace=_part_slots,
    bytes=_pipeline_bytes,
    splits=splits,
    flops_per_clock=2048,
)
