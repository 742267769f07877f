"""Plan rows on tensor cores by mma.sync, forward: fwd_03_mma, fwd_04_swizzle, fwd_05_pipeline.

Shared memory and grids are what the kernels' headers say; traffic is that of fwd_02_tiled with one chunk.
"""

from __future__ import annotations

from typing import Any

from cuflash.problem import Problem
from cuflash.row import (
    CORE,
    ITEMSIZE,
    Grid,
    Params,
    Row,
    Slot,
    Step,
    Tile,
    ceil_div,
    n_slots,
    query_tiles,
    round_up,
    shared_bytes,
)
from cuflash.rows_forward import LENGTHS, Traffic, kept_blocks_bytes, keys_of, tiled_bytes

DTYPES = ("float16", "bfloat16")
LIMITS = (*LENGTHS, ("head_dim", 256), ("head_dim_v", 256))
FLOAT32 = 2  # DTYPE of params.cuh
KB = 1024
HALVES: dict[str, Any] = {"itemsizes": (2,)}
FLOATS: dict[str, Any] = {"itemsizes": (4,), "least": 32}


def _span(p: Params) -> int:
    """Keys that come together: kernels/lib/parts.cuh."""
    return p["TILE_KV"] * p.get("PARTS", 1)


def _tiles_bytes(p: Params) -> int:
    size, stages = (4 if p["DTYPE"] == FLOAT32 else 2), p["N_STAGES"]
    return shared_bytes(
        (size, p["TILE_Q"], p["HEAD_DIM"]),
        (size, stages * _span(p), p["HEAD_DIM"]),
        (size, stages * _span(p), p["HEAD_DIM_V"]),
    )


def _pipeline_smem(p: Params) -> int:
    blocks = p["BLOCK_Q"], p["BLOCK_KV"]
    kept = kept_blocks_bytes(p["TILE_Q"], _span(p), *blocks, 2) if p["BLOCK_MASK"] else 0
    return _tiles_bytes(p) + kept + 16 + round_up(4 * p["N_WARPS"], 16)


FWD_03 = Row(
    "fwd_03_mma",
    False,
    75,
    (
        Tile(64, 64, 4, up_to=128),  # 48 KB at 128
        Tile(64, 32, 4, up_to=256),  # 64 KB at 256: what sm_75 has
    ),
    (Step("fwd_03_mma", query_tiles, _tiles_bytes),),
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
    (Step("fwd_04_swizzle", query_tiles, _tiles_bytes),),
    "XOR the chunk index: no bank conflicts",
    dtypes=DTYPES,
    features=CORE,
    limits=LIMITS,
    bytes=tiled_bytes,
    flops_per_clock=2048,
)

# ---- fwd_05_pipeline: blocks that share the keys of a query tile; floats

N_SMS = 132  # of a large GPU
LEAST_KEYS = 256  # for one block: below, merging costs more than it brings
FEW = 64  # queries: the rows of the tiles that are for them


def heads_together(problem: Problem) -> int:
    """How many query heads of a group are rows of one tile, so that K and V are read once for them: the whole
    group where that saves tiles, else 1."""
    modifies = problem.softcap is not None or problem.has_alibi or problem.bias is not None
    modifies = modifies or problem.has_mask or problem.block_mask is not None or problem.dropout is not None
    if modifies or problem.packed or ITEMSIZE[problem.dtype] != 2 or problem.len_q == 0:
        return 1
    group = problem.group
    fewer = ceil_div(problem.len_q * group, FEW) < group * ceil_div(problem.len_q, FEW)
    return group if fewer and problem.len_q <= FEW else 1


def splits(problem: Problem, p: Params) -> int:
    """Among how many blocks the keys of a query tile are shared: 2 to 32; 0: one has them all."""
    together = heads_together(problem)
    blocks = n_slots(problem, problem.len_q * together, p["TILE_Q"]) * problem.heads // together
    if problem.packed or blocks == 0:
        return 0
    begin, end = keys_of(problem, max(problem.len_q - p["TILE_Q"], 0), problem.len_q)  # of the last tile
    for shares in (32, 16, 8, 4, 2):
        per_sm = ceil_div(blocks * shares, N_SMS)  # two on an SM help less than one where none was
        if per_sm <= 2 and end - begin >= per_sm * LEAST_KEYS * shares:
            return shares
    return 0


def _parts(
    parts: int = 1, blocks: int = 1, kept: int = 0, noted: bool = False
) -> tuple[tuple[str, int], ...]:
    """See kernels/lib/parts.cuh."""
    return ("PARTS", parts), ("BLOCKS", blocks), ("KEPT", kept), ("NOTED", int(noted))


def _shared_tiles(problem: Problem, p: Params) -> Grid:
    together = p.get("TOGETHER", 1)
    tiles = n_slots(problem, problem.len_q * together, p["TILE_Q"]) * problem.heads // together
    return tiles * max(p["SPLIT"], 1), 1, 1


def _merged_rows(problem: Problem, p: Params) -> Grid:
    rows = problem.batch * problem.len_q * problem.heads
    return (ceil_div(rows, p["N_WARPS"]) if p["SPLIT"] else 0), 1, 1


def _in_three_products(problem: Problem) -> bool:
    return problem.dtype == "float32" and problem.precision != "tf32"


def _more(problem: Problem, p: Params) -> Params:
    precision = {"PRECISION": 2} if _in_three_products(problem) else {}
    together = heads_together(problem)
    return precision | ({"TOGETHER": together} if together > 1 else {})


def _pipeline_slots(problem: Problem, p: Params) -> tuple[Slot, ...]:
    slots: tuple[Slot, ...] = ()
    if p["SPLIT"]:
        lead, rows = (p["SPLIT"], problem.batch), (problem.heads, problem.len_q)
        slots = (
            Slot("O_parts", "float32", (*lead, problem.len_q, problem.heads, problem.head_dim_v)),
            Slot("lse_parts", "float32", (*lead, *rows)),
        )
    if _in_three_products(problem):
        slots += (Slot("odd_warps", "int32", (_shared_tiles(problem, p)[0] * p["N_WARPS"],)),)
    return slots


def _pipeline_bytes(problem: Problem, p: Params) -> Traffic:
    """{} too where keys are shared: what pass_merge reads depends on which parts saw anything; and of heads
    together."""
    if p["SPLIT"] or "TOGETHER" in p:
        return {}
    traffic = tiled_bytes(problem, p | {"TILE_KV": _span(p)})
    if traffic and _in_three_products(problem):  # and none of them is odd
        written = _shared_tiles(problem, p)[0] * p["N_WARPS"] * 4
        traffic |= {"odd_warps": (written * p["N_WARPS"], written)}
    return traffic


# The first that takes the problem and fits wins.  Two blocks of 4 warps on an SM hide each other's softmax,
# and 32 rows a warp read K and V half as often as 16: so 128 rows while O of 32 rows fits the registers (to
# head_dim 128), then as many keys as still fit.  Above, 16 rows a warp, and shared memory is the limit.
# HOPPER, 228 KB an SM: measured on an H200 beside PyTorch's FlashAttention-2, see kernels/ATTEMPTS.md.
# AMPERE, 164 KB (sm_80, 87), and the rest, 100 KB (sm_86, 89, 120): the same where two blocks fit, by
# arithmetic.
HOPPER, AMPERE = 227 * KB, 163 * KB
SHORT = 1024  # keys: such blocks are soon done, and what it takes to begin and end one counts
PIPELINE_TILES = (
    # few queries: a warp without rows copies and does not multiply, and 4 warps of 16 rows waste least
    Tile(64, 64, 4, 2, up_to=128, most_queries=FEW, room=AMPERE, **HALVES),
    Tile(64, 32, 4, 2, up_to=256, most_queries=FEW, **HALVES),
    # 16 bits.  Three blocks, so that the ends of a block cost less
    Tile(128, 32, 4, 2, up_to=64, longest=SHORT, room=HOPPER, options=_parts(2, 3, noted=True), **HALVES),
    # fewest barriers, and registers for all of Q
    Tile(128, 64, 4, 2, up_to=64, room=HOPPER, options=_parts(2, kept=4), **HALVES),
    # 64 keys at once: fewer steps; but two of 48 for a barrier are faster when there are many
    Tile(128, 64, 4, 2, up_to=96, longest=SHORT, room=HOPPER, options=_parts(noted=True), **HALVES),
    Tile(128, 48, 4, 2, up_to=96, room=HOPPER, options=_parts(2), **HALVES),
    Tile(128, 32, 4, 2, up_to=128, room=HOPPER, options=_parts(2, noted=True), **HALVES),  # 48 would spill
    # one stage leaves room for two blocks; all of Q in registers: 11 % less to read from shared memory
    Tile(64, 64, 4, 1, up_to=192, room=HOPPER, options=_parts(kept=12), **HALVES),
    Tile(64, 64, 4, 1, up_to=256, longest=SHORT, room=HOPPER, options=_parts(kept=6), **HALVES),
    # one block of 8 warps with two stages: K and V are written once for 128 rows
    Tile(128, 64, 8, 2, up_to=256, room=HOPPER, options=_parts(kept=6, noted=True), **HALVES),
    Tile(128, 64, 4, 2, up_to=64, **HALVES),  # 48 KB
    Tile(128, 48, 4, 2, up_to=96, room=AMPERE, **HALVES),  # 60 KB
    Tile(128, 32, 4, 2, up_to=128, room=AMPERE, options=_parts(noted=True), **HALVES),  # 64 KB
    Tile(64, 64, 4, 1, up_to=192, room=AMPERE, **HALVES),  # 72 KB
    Tile(128, 64, 8, 1, up_to=256, room=AMPERE, **HALVES),  # 128 KB: one block, so 8 warps
    Tile(128, 32, 4, 1, up_to=128, **HALVES),  # 48 KB with one stage; two would leave one block
    Tile(64, 32, 4, 1, up_to=192, **HALVES),  # 48 KB
    Tile(64, 64, 4, 1, up_to=256, **HALVES),  # 96 KB: one block in any case, so 64 keys
    # float32 as one TF32 product: 4 bytes a number, half the keys
    Tile(128, 32, 4, 2, up_to=64, tf32=True, room=HOPPER, options=_parts(2), **FLOATS),
    Tile(64, 32, 4, 2, up_to=96, tf32=True, **FLOATS),
    Tile(128, 32, 8, 2, up_to=128, tf32=True, room=HOPPER, **FLOATS),
    Tile(64, 32, 4, 2, up_to=128, tf32=True, **FLOATS),
    Tile(128, 16, 8, 2, up_to=256, tf32=True, room=HOPPER, **FLOATS),
    # float32 as three: parts of S's operands need as many registers as S, so 16 rows a warp
    Tile(64, 32, 4, 2, up_to=64, room=HOPPER, options=_parts(2), **FLOATS),
    Tile(64, 32, 4, 2, up_to=96, room=HOPPER, **FLOATS),
    Tile(64, 16, 4, 2, up_to=128, room=HOPPER, options=_parts(2), **FLOATS),
    Tile(128, 16, 8, 2, up_to=192, room=AMPERE, options=_parts(noted=True), **FLOATS),  # 144 KB
    Tile(64, 32, 4, 2, up_to=64, **FLOATS),
    Tile(64, 16, 4, 2, up_to=128, spills=28, **FLOATS),  # on sm_120
    Tile(64, 16, 4, 2, up_to=192, spills=40, **FLOATS),  # on sm_89, sm_120
    # 96 KB, two blocks of HOPPER; there, causal, 8 bytes: a number that is read once a key tile
    Tile(64, 16, 4, 1, up_to=256, spills=20, options=_parts(noted=True), **FLOATS),
)  # fmt: skip

FWD_05 = Row(
    "fwd_05_pipeline",
    True,
    80,
    PIPELINE_TILES,
    (
        Step("fwd_05_pipeline", _shared_tiles, _pipeline_smem),
        Step(
            "fwd_05_pipeline__careful",
            _shared_tiles,
            _pipeline_smem,
            when=_in_three_products,
            fixed=(("PRECISION", 3),),
        ),
        Step("pass_merge", _merged_rows, uses=("DTYPE", "OUT_DTYPE", "N_WARPS", "PACKED", "SPLIT")),
    ),
    "ask for tile j+1 before using tile j; mask only the tiles that need it",
    dtypes=(*DTYPES, "float32"),
    limits=LIMITS,
    workspace=_pipeline_slots,
    bytes=_pipeline_bytes,
    splits=splits,
    more=_more,
    flops_per_clock=2048,
)
