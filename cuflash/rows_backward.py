"""Plan rows without tensor cores, backward: bwd_01_naive, bwd_02_tiled, and the passes every backward shares.

Each row's shared memory, grid, workspace and traffic are small functions that say what the header says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cuflash import cost
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
    dbias_case,
    delta_rows,
    n_slots,
    shared_bytes,
)
from cuflash.rows_forward import (
    DELTA_USES,
    LENGTHS,
    Traffic,
    accumulator_bytes,
    is_data_dependent,
    kept_blocks_bytes,
    keys_of,
    offset_of,
)

# ---- passes


def row_shape(problem: Problem) -> tuple[int, int, int]:
    """Shape of delta and lse_log2: one number per query row of the arrays."""
    return (1 if problem.packed else problem.batch), problem.heads, problem.len_q


def delta_slot(problem: Problem) -> Slot:
    """What pass_delta writes; a row that also wants the scaled lse has a second slot, "lse_log2"."""
    return Slot("delta", problem.accumulator, row_shape(problem))


def dq_sum_slot(problem: Problem) -> Slot:
    """The sums of dS K, which pass_convert__dq turns into dq."""
    batch, heads, len_q = row_shape(problem)
    return Slot("dQ_sum", problem.accumulator, (batch, len_q, heads, problem.head_dim), zero=True)


def _dq_rows(problem: Problem, p: Params) -> Grid:
    batch, heads, len_q = row_shape(problem)
    return ceil_div(batch * len_q * heads, p["N_WARPS"]), 1, 1


def _bias_shape(problem: Problem) -> tuple[int, ...]:
    return problem.spec("bias").shape


def _dbias_rows(problem: Problem, p: Params) -> Grid:
    return ceil_div(problem.batch * problem.heads * _bias_shape(problem)[2], p["N_WARPS"]), 1, 1


def _dbias_entries(problem: Problem, p: Params) -> Grid:
    batch, heads, rows, cols = _bias_shape(problem)
    is_one_block_each = dbias_case(problem) == 3 and rows == 1
    entries = batch * heads * rows * cols
    return (entries if is_one_block_each else ceil_div(entries, 32 * p["N_WARPS"])), 1, 1


def _dbias_tile(p: Params) -> int:
    return 32 if p["DTYPE"] == 3 else 64


def _dbias_tiles(problem: Problem, p: Params) -> Grid:
    batch, heads, rows, cols = _bias_shape(problem)
    tile = _dbias_tile(p)
    return ceil_div(rows, tile) * ceil_div(cols, tile) * batch * heads, 1, 1


def _dbias_row_tiles(problem: Problem, p: Params) -> Grid:
    return n_slots(problem, problem.len_q, _dbias_tile(p)) * problem.heads, 1, 1


def _dbias_smem(p: Params) -> int:
    size, tile = accumulator_bytes(p), _dbias_tile(p)
    kept = kept_blocks_bytes(tile, tile, p["BLOCK_Q"], p["BLOCK_KV"]) if p["BLOCK_MASK"] else 0
    return kept + shared_bytes(*4 * [(size, tile, 32)], *2 * [(size, 1, tile)])


def _sum_smem(p: Params) -> int:
    return shared_bytes((8, 1, p["N_WARPS"]))


def _heads(problem: Problem, p: Params) -> Grid:
    return problem.heads, 1, 1


def _slopes(problem: Problem, p: Params) -> Grid:
    slopes = problem.spec("alibi_slopes")
    return problem.heads * (1 if slopes is None else slopes.shape[0]), 1, 1


def _case(number: int):
    return lambda problem: dbias_case(problem) == number


def _wants(name: str):
    return lambda problem: name in problem.gradients


DSINK_USES = ("DTYPE", "N_WARPS", "LENGTHS_Q", "PACKED")
CONVERT_USES = ("DTYPE", "OUT_DTYPE", "N_WARPS", "PACKED")
DELTA = Step("pass_delta", delta_rows, uses=DELTA_USES)
CONVERT_DQ = Step(
    "pass_convert__dq",
    _dq_rows,
    when=lambda problem: not problem.deterministic,
    uses=CONVERT_USES,
)
# Gradients of the options: before and after the kernel that makes dq, dk and dv.
OPTIONS_BEFORE = (Step("pass_dbias__zero", _dbias_rows, _dbias_smem, when=_case(1)),)
OPTIONS_AFTER = (
    Step("pass_dbias__keys", _dbias_entries, _dbias_smem, when=_case(2)),
    Step("pass_dbias__row_sums", _dbias_row_tiles, _dbias_smem, when=_case(3)),
    Step("pass_dbias__rows", _dbias_entries, _dbias_smem, when=_case(3)),
    Step("pass_dbias", _dbias_tiles, _dbias_smem, when=_case(4)),
    Step(
        "pass_dsink",
        _heads,
        _sum_smem,
        when=_wants("dsink"),
        uses=("DTYPE", "N_WARPS", "LENGTHS_Q", "PACKED"),
    ),
    Step(
        "pass_dalibi",
        _slopes,
        _sum_smem,
        when=_wants("dalibi_slopes"),
        uses=("DTYPE", "N_WARPS", "PACKED", "TILE_KV"),
    ),
)


def option_slots(problem: Problem, p: Params) -> tuple[Slot, Slot]:
    """Slots 0 and 1 of a backward row: parts of dalibi_slopes by key tile, sums of dbias over one axis."""
    batch, heads, len_q = row_shape(problem)
    parts = (n_slots(problem, problem.len_k, p["TILE_KV"]), heads) if p["DALIBI"] else (0,)
    length = {2: problem.len_k, 3: len_q}.get(p["DBIAS"])
    sums = (0,) if length is None else (batch, heads, length)
    return (
        Slot("dalibi_parts", problem.accumulator, parts, zero=True),
        Slot("dbias_sums", problem.accumulator, sums, zero=True),
    )


# ---- blocks that share the query heads of a key head, for every row that keeps a key tile


def group_shares(problem: Problem, blocks: int, enough: int) -> int:
    """Among how many blocks the query heads of a key head are shared: more where blocks are few."""
    return 1 if problem.deterministic else max(1, min(problem.group, enough // max(blocks, 1)))


def key_sum_slots(problem: Problem, shares: int) -> tuple[Slot, ...]:
    """dK_sum and dV_sum; none where blocks store dk and dv themselves."""
    if shares <= 1:
        return ()
    shape = (1 if problem.packed else problem.batch), problem.len_k, problem.heads_k
    return (
        Slot("dK_sum", problem.accumulator, (*shape, problem.head_dim), zero=True),
        Slot("dV_sum", problem.accumulator, (*shape, problem.head_dim_v), zero=True),
    )


def convert_keys(
    shares: Callable[[Problem, Params], int], fixed: tuple[tuple[str, int], ...] = ()
) -> tuple[Step, Step]:
    """The passes from dK_sum to dk and from dV_sum to dv: a warp per row."""

    def grid(problem: Problem, p: Params) -> Grid:
        rows = problem.len_k * problem.heads_k * (1 if problem.packed else problem.batch)
        return (ceil_div(rows, p["N_WARPS"]) if shares(problem, p) > 1 else 0), 1, 1

    return (
        Step("pass_convert__dk", grid, uses=CONVERT_USES, fixed=fixed),
        Step("pass_convert__dv", grid, uses=CONVERT_USES, fixed=fixed),
    )


def dO_parts(p: Params) -> int:
    """Numbers of q's 16-bit dtype that make one of dout: = dO_parts of shares.cuh and query_tiles.cuh."""
    if p["DOUT_DTYPE"] == p["DTYPE"] or p["DTYPE"] == 2:
        return 1
    return 3 if p["DALIBI"] and p["DTYPE"] == 1 else 2


# ---- bwd_02_tiled

ENOUGH_BLOCKS = 400  # three on every SM of the largest GPU of its time


def _chunks(problem: Problem, p: Params) -> int:
    return max(ceil_div(problem.head_dim, p["HEAD_DIM"]), ceil_div(problem.head_dim_v, p["HEAD_DIM_V"]))


def _tiled_blocks(problem: Problem, p: Params) -> int:
    return _chunks(problem, p) * n_slots(problem, problem.len_k, p["TILE_KV"]) * problem.heads_k


def _splits(problem: Problem, p: Params) -> int:
    return group_shares(problem, _tiled_blocks(problem, p), ENOUGH_BLOCKS)


def _tiled_grid(problem: Problem, p: Params) -> Grid:
    return _tiled_blocks(problem, p) * _splits(problem, p), 1, 1


def _tiled_dq_grid(problem: Problem, p: Params) -> Grid:
    chunks = ceil_div(problem.head_dim, p["HEAD_DIM"])
    return chunks * n_slots(problem, problem.len_q, p["TILE_Q"]) * problem.heads, 1, 1


def _tiled_smem(p: Params) -> int:
    size, tile_q, tile_kv = accumulator_bytes(p), p["TILE_Q"], p["TILE_KV"]
    by_keys = kept_blocks_bytes(tile_kv, tile_q, p["BLOCK_KV"], p["BLOCK_Q"])
    by_queries = kept_blocks_bytes(tile_q, tile_kv, p["BLOCK_Q"], p["BLOCK_KV"])  # __dq
    kept = max(by_keys, by_queries) if p["BLOCK_MASK"] else 0
    return kept + shared_bytes(
        (size, tile_q, p["HEAD_DIM"]),
        (size, tile_q, p["HEAD_DIM_V"]),
        (size, tile_kv, p["HEAD_DIM"]),
        (size, tile_kv, p["HEAD_DIM_V"]),
        (size, 1, tile_q),
        (size, 1, tile_q),
        (size, tile_q, tile_kv),
        (size, tile_q, tile_kv),
    )


def queries_of(problem: Problem, j0: int, j1: int) -> tuple[int, int]:
    """Queries [begin, end) that may see keys [j0, j1): = visible_queries of positions.cuh."""
    left, right = cost.bounds(problem)
    begin = 0 if right is None else min(max(j0 - offset_of(problem) - right, 0), problem.len_q)
    end = problem.len_q if left is None else min(j1 - offset_of(problem) + left, problem.len_q)
    return begin, max(begin, end)


def tile_pairs(problem: Problem, own: int, walked: int, by_keys: bool) -> Iterator[tuple[int, int, int]]:
    """(own rows, walked tiles, walked rows) of each own tile of one head; by_keys: own tiles are keys."""
    length, other = problem.len_k, problem.len_q
    if not by_keys:
        length, other = other, length
    for start in range(0, length, own):
        stop = min(start + own, length)
        begin, end = (queries_of if by_keys else keys_of)(problem, start, stop)
        if begin < end:
            begin = begin // walked * walked
            steps = ceil_div(end - begin, walked)
            yield stop - start, steps, min(begin + steps * walked, other) - begin


def tiled_bytes(problem: Problem, p: Params, splits: int | None = None) -> Traffic:
    """Additions to dQ_sum count as a read and a write.  {} where gradients of options are wanted too.

    splits: blocks that share the query heads of a key head, where it is not what bwd_02_tiled takes.
    """
    if is_data_dependent(problem) or len(problem.gradients) > 3:
        return {}
    chunks, splits = _chunks(problem, p), splits or _splits(problem, p)
    acc, size = accumulator_bytes(p), ITEMSIZE[problem.dtype]
    heads, heads_k = problem.batch * problem.heads, problem.batch * problem.heads_k
    rows = problem.len_q * heads
    d, dv = problem.head_dim, problem.head_dim_v
    walks = [(True, chunks, list(tile_pairs(problem, p["TILE_KV"], p["TILE_Q"], True)))]
    if problem.deterministic:
        own_chunks = ceil_div(d, p["HEAD_DIM"])
        walks.append((False, own_chunks, list(tile_pairs(problem, p["TILE_Q"], p["TILE_KV"], False))))
    q_rows = k_rows = 0  # rows of all blocks, a block's chunk of columns apart
    for by_keys, blocks, pairs in walks:
        own = sum(n * (steps if chunks > 1 else 1) for n, steps, _ in pairs) * blocks
        walked = sum(n for _, _, n in pairs) * blocks
        # With one chunk a block loads its keys once for all the heads it walks.
        own *= heads_k * splits if by_keys and chunks == 1 else heads
        q_rows, k_rows = (
            q_rows + (walked * heads if by_keys else own),
            k_rows + (own if by_keys else walked * heads),
        )
    added = sum(n for _, _, n in walks[0][2]) * heads * d * acc
    o_size, do_size = (ITEMSIZE[problem.spec(name).dtype] for name in ("out", "dout"))
    out_size = ITEMSIZE[problem.out_dtype]
    masked = cost.visible_pairs(problem) * heads * sum(blocks for _, blocks, _ in walks)
    traffic = {
        "q": (q_rows * d * size, 0),
        "k": (k_rows * d * size, 0),
        "v": (k_rows * dv * size, 0),
        "out": (rows * dv * o_size, 0),
        "dout": (q_rows * dv * do_size + rows * dv * do_size, 0),
        "lse": (q_rows * chunks * acc + rows * acc, 0),
        "delta": (q_rows * chunks * acc, rows * acc),
        "dq": (0, rows * d * out_size),
        "dk": (0, problem.len_k * heads_k * d * out_size),
        "dv": (0, problem.len_k * heads_k * dv * out_size),
    }
    if problem.has_dlse:
        traffic["dlse"] = (rows * acc, 0)
    if problem.has_mask:
        traffic["mask"] = (masked, 0)
    if splits > 1:
        seen = sum(n for n, _, _ in walks[0][2]) * heads_k * splits * acc
        rows_k = problem.len_k * heads_k * acc
        traffic["dK_sum"] = (seen * d + rows_k * d, seen * d)
        traffic["dV_sum"] = (seen * dv + rows_k * dv, seen * dv)
    if not problem.deterministic:
        traffic["dQ_sum"] = (added + rows * d * acc, added)
    return traffic


def _tiled_slots(problem: Problem, p: Params) -> tuple[Slot, ...]:
    sums = () if problem.deterministic else (dq_sum_slot(problem),)
    sums += key_sum_slots(problem, _splits(problem, p))
    return (*option_slots(problem, p), delta_slot(problem), *sums)


BWD_02 = Row(
    "bwd_02_tiled",
    True,
    75,
    (
        Tile(32, 64, 4, up_to=96, itemsizes=(2, 4), least=32),
        Tile(32, 128, 8, up_to=128, itemsizes=(2, 4), least=32),
        Tile(32, 64, 4, up_to=128, itemsizes=(2, 4), least=32),
        Tile(32, 32, 4, up_to=64, itemsizes=(2, 4), least=64),
        Tile(32, 32, 4, up_to=128, itemsizes=(2, 4), least=128),
        Tile(32, 64, 4, up_to=192, chunk=96, itemsizes=(2, 4)),
        Tile(32, 128, 8, chunk=128, itemsizes=(2, 4)),
        Tile(32, 64, 4, chunk=128, itemsizes=(2, 4)),
        Tile(32, 32, 4, up_to=32, chunk=32, itemsizes=(8,)),
        Tile(32, 32, 4, chunk=64),
        Tile(32, 32, 4, chunk=32, itemsizes=(8,)),
    ),
    (
        DELTA,
        *OPTIONS_BEFORE,
        Step("bwd_02_tiled", _tiled_grid, _tiled_smem),
        Step("bwd_02_tiled__dq", _tiled_dq_grid, _tiled_smem, when=lambda problem: problem.deterministic),
        CONVERT_DQ,
        *convert_keys(_splits),
        *OPTIONS_AFTER,
    ),
    "one pass over key tiles: dK and dV stay put",
    limits=LENGTHS,
    workspace=_tiled_slots,
    bytes=tiled_bytes,
)


# ---- bwd_01_naive


def _naive_rows(problem: Problem, p: Params, length: int, heads: int) -> Grid:
    threads = length * heads * problem.batch * _chunks(problem, p)
    return ceil_div(threads, 32 * p["N_WARPS"]), 1, 1


def _naive_grid(problem: Problem, p: Params) -> Grid:
    return _naive_rows(problem, p, problem.len_k, problem.heads_k)


def _naive_dq_grid(problem: Problem, p: Params) -> Grid:
    return _naive_rows(problem, p, problem.len_q, problem.heads)


def _naive_bytes(problem: Problem, p: Params) -> Traffic:
    heads, heads_k = problem.batch * problem.heads, problem.batch * problem.heads_k
    rows, pairs = problem.len_q * heads, cost.visible_pairs(problem) * heads
    d, dv, acc, size = problem.head_dim, problem.head_dim_v, accumulator_bytes(p), ITEMSIZE[problem.dtype]
    o_size, do_size = (ITEMSIZE[problem.spec(name).dtype] for name in ("out", "dout"))
    out_size = ITEMSIZE[problem.out_dtype]
    scores = pairs * (
        _chunks(problem, p) + ceil_div(d, p["HEAD_DIM"])
    )  # each pass and chunk makes them again
    return {
        "q": ((scores + pairs) * d * size, 0),
        "k": ((scores + pairs) * d * size, 0),
        "v": (scores * dv * size, 0),
        "out": (rows * dv * o_size, 0),
        "dout": ((scores + pairs + rows) * dv * do_size, 0),
        "lse": ((scores + rows) * acc, 0),
        "dlse": (rows * acc * problem.has_dlse, 0),
        "delta": (scores * acc, rows * acc),
        "dq": (0, rows * d * out_size),
        "dk": (0, problem.len_k * heads_k * d * out_size),
        "dv": (0, problem.len_k * heads_k * dv * out_size),
    }


def _naive_slots(problem: Problem, p: Params) -> tuple[Slot, ...]:
    return (delta_slot(problem),)


BWD_01 = Row(
    "bwd_01_naive",
    False,
    75,
    (Tile(1, 1, 4, chunk=32, itemsizes=(2, 4)), Tile(1, 1, 4, chunk=16)),
    (
        DELTA,
        Step("bwd_01_naive", _naive_grid),
        Step("bwd_01_naive__dq", _naive_dq_grid),
    ),
    "P again from lse; one pass owns dQ rows, one owns dK and dV rows",
    features=CORE,
    limits=LENGTHS,
    workspace=_naive_slots,
    bytes=_naive_bytes,
)
