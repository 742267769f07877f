"""Plan rows of the Hopper backward: bwd_06_specialize, bwd_05_wgmma, and the passes around them.

What the workspace holds per query tile is what kernels/lib/query_tiles.cuh says.
"""

from __future__ import annotations

from dataclasses import replace

from cuflash.hopper_bytes import walked_bytes
from cuflash.problem import Problem
from cuflash.row import (
    CORE,
    Grid,
    Map,
    Params,
    Row,
    Slot,
    Step,
    Tile,
    n_slots,
    round_up,
    shared_bytes,
)
from cuflash.rows_backward import (
    DELTA,
    OPTIONS_AFTER,
    OPTIONS_BEFORE,
    convert_keys,
    delta_slot,
    dO_parts,
    group_shares,
    key_sum_slots,
    option_slots,
)
from cuflash.rows_forward import LENGTHS, Traffic, kept_blocks_bytes

DTYPES = ("float16", "bfloat16")
LIMITS = (*LENGTHS, ("head_dim", 128), ("head_dim_v", 128))
PIECES = 4
LONG_WALK = 32  # query tiles
ENOUGH_BLOCKS = 132  # one on every SM of a large GPU
QUERY_TILE_USES = (
    "DTYPE", "OUT_DTYPE", "O_DTYPE", "DOUT_DTYPE", "HEAD_DIM", "HEAD_DIM_V", "TILE_Q", "LENGTHS_Q", "PACKED",
    "DLSE", "SOFTCAP", "ALIBI", "BIAS_DTYPE", "DALIBI", "IN_TURN",
)  # fmt: skip


# The passes of the options count on a block's warps: as many as bwd_02_tiled has.
FOUR_WARPS = (("N_WARPS", 4),)


def with_four_warps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same passes for rows with other blocks."""
    return tuple(replace(step, fixed=FOUR_WARPS) for step in steps)


# ---- query tiles


def places(problem: Problem, p: Params) -> int:
    """Query tiles of all heads and sequences, as query_tiles.cuh numbers them."""
    return n_slots(problem, problem.len_q, p["TILE_Q"]) * problem.heads


def _place_grid(problem: Problem, p: Params) -> Grid:
    return places(problem, p), 1, 1


def _close_grid(problem: Problem, p: Params) -> Grid:
    return (0, 1, 1) if p.get("FINISHES") else _place_grid(problem, p)


def _open_grid(problem: Problem, p: Params) -> Grid:
    """Where keys have no queries, too, somebody sets the counter of the key tiles to 0."""
    has_keys = problem.batch * problem.heads_k * problem.len_k > 0
    return max(int(has_keys), places(problem, p)), 1, 1


OPEN = Step("pass_query_tiles__open", _open_grid, threads=256, uses=QUERY_TILE_USES)
CLOSE = Step("pass_query_tiles__close", _close_grid, threads=256, uses=QUERY_TILE_USES, overlaps=True)
# Gradients of the options read delta as the rungs before keep it.
OPTION_DELTA = Step(
    DELTA.entry,
    DELTA.grid,
    when=lambda problem: len(problem.gradients) > 3,
    uses=DELTA.uses,
    fixed=FOUR_WARPS,
)


def dO_is_mapped(problem: Problem) -> bool:
    """TMA reads dout as it is; of another dtype than q, pass_query_tiles__open writes it in 16 bits."""
    dout = problem.spec("dout")
    return dout is None or dout.dtype == problem.dtype


def query_tile_slots(problem: Problem, p: Params) -> tuple[Slot, ...]:
    """Slots 2 to 5: rows, dQ, dO in 16 bits; turns of a deterministic backward."""
    n, tile = places(problem, p), p["TILE_Q"]
    slots = (
        Slot("query_rows", "float32", (n + 1, 2, tile)),  # the last is counters
        Slot("dQ_tiles", "float32", (n, tile * p["HEAD_DIM"])),
        Slot("dO_tiles", problem.dtype, (dO_parts(p), n if dO_parts(p) > 1 else 0, tile * p["HEAD_DIM_V"])),
    )
    in_turn = p.get("IN_TURN", 0)
    if not problem.deterministic and not in_turn:
        return slots
    return (*slots, Slot("turns", "int32", (n, 2), zero=not in_turn))


# ---- key tiles


def _key_blocks(problem: Problem, p: Params) -> int:
    return n_slots(problem, problem.len_k, p["TILE_KV"]) * problem.heads_k


def _splits(problem: Problem, p: Params) -> int:
    return group_shares(problem, _key_blocks(problem, p), ENOUGH_BLOCKS)


def _stays(p: Params) -> bool:
    """A block takes one tile of keys after another."""
    return True


def _key_grid(problem: Problem, p: Params) -> Grid:
    return _key_blocks(problem, p) * _splits(problem, p), 1, 1


def _workspace(problem: Problem, p: Params) -> tuple[Slot, ...]:
    delta = (delta_slot(problem),) if len(problem.gradients) > 3 else ()
    sums = key_sum_slots(problem, _splits(problem, p))
    return (*option_slots(problem, p), *query_tile_slots(problem, p), *delta, *sums)


def _bytes(problem: Problem, p: Params) -> Traffic:
    return walked_bytes(problem, p, _splits(problem, p))


def _resident_bytes(problem: Problem, p: Params) -> Traffic:
    return walked_bytes(problem, p, _splits(problem, p), asks=ENOUGH_BLOCKS)


def panel(size: int) -> int:
    """Columns of a panel: = PanelTile of panels.cuh."""
    return 64 if size % 64 == 0 else 32 if size % 32 == 0 else 16


def _K_panel(p: Params) -> int:
    """Whole panels make the columns of K that a warpgroup's dQ takes: all, or a half."""
    return panel(p["HEAD_DIM"] if p["TILE_Q"] == 128 else p["HEAD_DIM"] // 2)


def _K_line(p: Params) -> int:
    return 2 * _K_panel(p)


def _columns(name: str):
    return lambda p: panel(p[name])


def _line(name: str):
    return lambda p: 2 * panel(p[name])


MAPS = (
    Map("K", "TILE_KV", _K_panel, _K_line),
    Map("V", "TILE_KV", _columns("HEAD_DIM_V"), _line("HEAD_DIM_V")),
    Map("Q", "TILE_Q", _columns("HEAD_DIM"), _line("HEAD_DIM")),
    Map("dO", "TILE_Q", _columns("HEAD_DIM_V"), _line("HEAD_DIM_V"), dO_is_mapped),
)


def _tiles_bytes(p: Params, stages: int, dS_stages: int, barriers: int, works: int = 0) -> int:
    q, kv, d, dv = p["TILE_Q"], p["TILE_KV"], p["HEAD_DIM"], p["HEAD_DIM_V"]
    tiles = shared_bytes(
        (2, kv, d), (2, kv, dv), (2, stages * q, d), (2, stages * dO_parts(p) * q, dv),
        (2, dS_stages * kv, q), (4, 2 * stages, q), (8, 1, barriers), (4, 1, 8), (32, 1, works),
    )  # fmt: skip
    return round_up(tiles, 1024)


def _wgmma_smem(p: Params) -> int:
    return _tiles_bytes(p, 2, 1, 3)


def _specialize_smem(p: Params) -> int:
    kept, stages = 0, p["N_STAGES"]
    if p["BLOCK_MASK"]:
        kept = kept_blocks_bytes(p["TILE_KV"], p["TILE_Q"], p["BLOCK_KV"], p["BLOCK_Q"], stages)
        if kept == 0 and p["DETERMINISTIC"]:  # tiles that are kept as a whole or not at all are visited too
            kept = shared_bytes((4, stages, 1))
    return round_up(_tiles_bytes(p, stages, stages, 8 * stages + 6, 2) + kept, 1024)


def _steps(*own: Step) -> tuple[Step, ...]:
    """A row's kernel among the passes around it."""
    return (
        OPEN,
        OPTION_DELTA,
        *with_four_warps(OPTIONS_BEFORE),
        *own,
        CLOSE,
        *convert_keys(_splits, FOUR_WARPS),
        *with_four_warps(OPTIONS_AFTER),
    )


BWD_05 = Row(
    "bwd_05_wgmma",
    False,
    90,
    (
        Tile(128, 128, 8, 2, up_to=64, least=64),
        Tile(64, 128, 8, 2, up_to=128, least=128),
    ),
    _steps(Step("bwd_05_wgmma", _key_grid, _wgmma_smem, maps=MAPS)),
    "wgmma and TMA; dQ leaves by reduce-add",
    dtypes=DTYPES,
    exact_arch=True,
    features=CORE,
    limits=LIMITS,
    workspace=_workspace,
    bytes=_bytes,
    flops_per_clock=4096,
)


MANY_BLOCKS = 4 * ENOUGH_BLOCKS
SHORT = 2048  # up to this length waiting for turns costs less than zeros and a pass that makes dq


def _more(problem: Problem, p: Params) -> Params:
    """IN_TURN: blocks add to dQ in turn: if they must, or in short walks of many blocks, where none waits.  A
    walk of all heads of a group is not short: 32 heads over 8, 2,048 causal, lose 28 % in turn.
    FINISHES: the last of them makes dq, where every query sees a key.  PIECES: of walks that are as long, the
    last few are cut (key_pieces.cuh)."""
    hides = problem.packed or any(p[name] for name in ("WINDOW", "LENGTHS_Q", "LENGTHS_K"))
    offset = problem.len_k - problem.len_q if problem.query_offset is None else problem.query_offset
    sees = problem.len_k > 0 and not hides and (not problem.causal or offset >= 0)
    finishes = sees and max(problem.len_q, problem.len_k) <= SHORT
    is_large = _key_blocks(problem, p) >= MANY_BLOCKS
    is_short = finishes and problem.heads == problem.heads_k
    chooses = is_short and is_large and not p["BLOCK_MASK"] and len(problem.gradients) <= 3
    in_turn = problem.deterministic or chooses
    is_long = sees and not problem.causal and problem.len_q >= LONG_WALK * p["TILE_Q"]
    is_one = _key_blocks(problem, p) >= ENOUGH_BLOCKS and _splits(problem, p) == 1 and not p["BLOCK_MASK"]
    cuts = is_long and is_one and not in_turn and len(problem.gradients) <= 3
    pieces = PIECES if cuts else 1
    return {"IN_TURN": int(in_turn), "FINISHES": int(in_turn and finishes), "PIECES": pieces}


BWD_06 = Row(
    "bwd_06_specialize",
    True,
    90,
    (
        Tile(128, 128, 12, 2, up_to=64, least=64, plain=True),
        Tile(64, 128, 12, 3, up_to=128, least=64),
        Tile(64, 128, 12, 2, up_to=128, least=64),  # where dout of another dtype takes the room
    ),
    _steps(Step("bwd_06_specialize", _key_grid, _specialize_smem, maps=MAPS, resident=_stays, overlaps=True)),
    "a producer warp, two consumer warpgroups, one tile of keys after another; dQ a step late",
    dtypes=DTYPES,
    exact_arch=True,
    limits=LIMITS,
    workspace=_workspace,
    bytes=_resident_bytes,
    more=_more,
    flops_per_clock=4096,
)
