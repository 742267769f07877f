"""Plan rows without tensor cores, forward: std_00_unfused (both directions), fwd_01_naive, fwd_02_tiled.

Each row's shared memory, grid, workspace and traffic are small functions that say what the kernel's header
says.  Traffic is exact: the emulator counts the same numbers.  It is {} where it depends on what arrays hold
(lengths, packed sequences, block masks, a boolean mask over a bias).
"""

from __future__ import annotations

from collections.abc import Iterator

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
    delta_rows,
    n_slots,
    shared_bytes,
)

Traffic = dict[str, tuple[int, int]]  # operand or slot -> (bytes read, bytes written)
# Positions are 32-bit inside a sequence, and a tile may reach past its end.
LENGTHS = (("len_q", 2**31 - 2**16), ("len_k", 2**31 - 2**16))


def accumulator_bytes(params: Params) -> int:
    """sizeof(acc)."""
    return 8 if params["DTYPE"] == 3 else 4


def _heads_of(problem: Problem) -> int:
    return problem.batch * problem.heads


def offset_of(problem: Problem) -> int:
    return problem.len_k - problem.len_q if problem.query_offset is None else problem.query_offset


def keys_of(problem: Problem, i0: int, i1: int) -> tuple[int, int]:
    """Keys [begin, end) that rows [i0, i1) may see: = visible_keys of positions.cuh."""
    left, right = cost.bounds(problem)
    begin = 0 if left is None else min(max(i0 + offset_of(problem) - left, 0), problem.len_k)
    end = problem.len_k if right is None else min(i1 + offset_of(problem) + right, problem.len_k)
    return begin, max(begin, end)


def is_data_dependent(problem: Problem) -> bool:
    has_lengths = problem.has_query_lengths or problem.has_key_lengths
    hidden_bias = problem.has_mask and problem.bias is not None
    return problem.packed or has_lengths or problem.block_mask is not None or hidden_bias


# ---- fwd_02_tiled


def kept_blocks_bytes(tile: int, walked: int, block: int, walked_block: int, stages: int = 1) -> int:
    """sizeof(KeptBlocks) of blocks.cuh: a bit for every block that a tile x walked tile touches."""
    if block % tile == 0 and walked_block % walked == 0:
        return 0
    n_own, n_walk = ((size + step - 2) // step + 1 for size, step in ((tile, block), (walked, walked_block)))
    return shared_bytes((4, stages * n_own, ceil_div(n_walk, 32)))


def _tiled_smem(p: Params) -> int:
    size = accumulator_bytes(p)
    tile_q, tile_kv = p["TILE_Q"], p["TILE_KV"]
    kept = kept_blocks_bytes(tile_q, tile_kv, p["BLOCK_Q"], p["BLOCK_KV"]) if p["BLOCK_MASK"] else 0
    return kept + shared_bytes(
        (size, tile_q, p["HEAD_DIM"]),
        (size, tile_kv, p["HEAD_DIM"]),
        (size, tile_kv, p["HEAD_DIM_V"]),
        (size, tile_q, tile_kv),
    )


def _tiled_grid(problem: Problem, p: Params) -> Grid:
    chunks = ceil_div(problem.head_dim_v, p["HEAD_DIM_V"])
    return n_slots(problem, problem.len_q, p["TILE_Q"]) * problem.heads * chunks, 1, 1


def tiles_of_queries(problem: Problem, p: Params) -> Iterator[tuple[int, int, int]]:
    """(rows, first key, end of keys) of each query tile of one head; keys start at a whole tile."""
    for i0 in range(0, problem.len_q, p["TILE_Q"]):
        i1 = min(i0 + p["TILE_Q"], problem.len_q)
        begin, end = keys_of(problem, i0, i1)
        yield i1 - i0, begin // p["TILE_KV"] * p["TILE_KV"], end if end > begin else 0


def tiled_bytes(problem: Problem, p: Params) -> Traffic:
    if is_data_dependent(problem):
        return {}
    q_rows = k_rows = 0
    for rows, begin, end in tiles_of_queries(problem, p):
        steps = ceil_div(max(end - begin, 0), p["TILE_KV"])
        q_rows += rows * (steps if problem.head_dim > p["HEAD_DIM"] else min(steps, 1))
        k_rows += max(end - begin, 0)
    chunks = ceil_div(problem.head_dim_v, p["HEAD_DIM_V"])
    heads, acc = _heads_of(problem), accumulator_bytes(p)
    size, threads = ITEMSIZE[problem.dtype], 32 * p["N_WARPS"] * _tiled_grid(problem, p)[0]
    pairs = cost.visible_pairs(problem) * heads * chunks
    traffic = {
        "q": (q_rows * heads * problem.head_dim * size * chunks, 0),
        "k": (k_rows * heads * problem.head_dim * size * chunks, 0),
        "v": (k_rows * heads * problem.head_dim_v * size, 0),
        "out": (0, problem.len_q * heads * problem.head_dim_v * ITEMSIZE[problem.out_dtype]),
        "lse": (0, problem.len_q * heads * acc),
    }
    if problem.bias is not None:
        traffic["bias"] = (pairs * ITEMSIZE[problem.bias], 0)
    if problem.has_mask:
        traffic["mask"] = (pairs, 0)
    if problem.has_alibi:
        traffic["alibi_slopes"] = (threads * acc, 0)  # every thread reads its head's
    if problem.has_sink:
        traffic["sink"] = (threads * acc, 0)
    return traffic


FWD_02 = Row(
    "fwd_02_tiled",
    True,
    75,
    (
        # TFLOP/s on an H200, in float32 (float64), at the largest head_dim that is up to 256
        Tile(128, 64, 4, up_to=64, itemsizes=(2, 4)),  # 40.1
        Tile(64, 64, 4, up_to=96, itemsizes=(2, 4)),  # 37.4
        Tile(128, 64, 8, up_to=128, itemsizes=(2, 4)),  # 38.4
        Tile(64, 64, 4, up_to=128, itemsizes=(2, 4)),
        Tile(128, 64, 8, up_to=64),  # (16.4)
        Tile(64, 32, 4, up_to=64),
        Tile(64, 32, 4, up_to=128, itemsizes=(2, 4)),
        Tile(128, 64, 8, chunk=128, chunk_v=256, itemsizes=(2, 4)),  # 34.6
        Tile(64, 64, 4, chunk=64, chunk_v=256, itemsizes=(2, 4)),
        Tile(64, 32, 4, chunk=128, chunk_v=256, itemsizes=(2, 4)),
        Tile(64, 64, 8, chunk=64, chunk_v=128, itemsizes=(8,)),  # (14.6 at 128)
        Tile(32, 32, 4, chunk=64),
    ),
    (Step("fwd_02_tiled", _tiled_grid, _tiled_smem),),
    "a K/V tile in shared memory serves a whole query tile",
    limits=LENGTHS,
    bytes=tiled_bytes,
)


# ---- fwd_01_naive


def _naive_grid(problem: Problem, p: Params) -> Grid:
    threads = problem.len_q * _heads_of(problem) * ceil_div(problem.head_dim_v, p["HEAD_DIM_V"])
    return ceil_div(threads, 32 * p["N_WARPS"]), 1, 1


def _naive_bytes(problem: Problem, p: Params) -> Traffic:
    heads, size = _heads_of(problem), ITEMSIZE[problem.dtype]
    pairs = cost.visible_pairs(problem) * heads
    scores = pairs * problem.head_dim * size * ceil_div(problem.head_dim_v, p["HEAD_DIM_V"])
    return {
        "q": (scores, 0),  # once per key: nothing is kept
        "k": (scores, 0),
        "v": (pairs * problem.head_dim_v * size, 0),
        "out": (0, problem.len_q * heads * problem.head_dim_v * ITEMSIZE[problem.out_dtype]),
        "lse": (0, problem.len_q * heads * accumulator_bytes(p)),
    }


FWD_01 = Row(
    "fwd_01_naive",
    False,
    75,
    (Tile(1, 1, 4, up_to=64), Tile(1, 1, 4, chunk=64)),
    (Step("fwd_01_naive", _naive_grid),),
    "online softmax, one thread per query row",
    features=CORE,
    limits=LENGTHS,
    bytes=_naive_bytes,
)


# ---- std_00_unfused


def _score_tiles(problem: Problem, p: Params) -> Grid:
    across, down = ceil_div(problem.len_k, p["TILE_KV"]), ceil_div(problem.len_q, p["TILE_Q"])
    return across * down * _heads_of(problem), 1, 1


def _score_rows(problem: Problem, p: Params) -> Grid:
    return ceil_div(problem.len_q * _heads_of(problem), p["N_WARPS"]), 1, 1


def _output_tiles(problem: Problem, p: Params) -> Grid:
    across, down = ceil_div(problem.head_dim_v, p["HEAD_DIM_V"]), ceil_div(problem.len_q, p["TILE_Q"])
    return across * down * _heads_of(problem), 1, 1


def _dq_tiles(problem: Problem, p: Params) -> Grid:
    across, down = ceil_div(problem.head_dim, p["HEAD_DIM"]), ceil_div(problem.len_q, p["TILE_Q"])
    return across * down * _heads_of(problem), 1, 1


def _dk_tiles(problem: Problem, p: Params) -> Grid:
    across, down = ceil_div(problem.head_dim, p["HEAD_DIM"]), ceil_div(problem.len_k, p["TILE_KV"])
    return across * down * problem.batch * problem.heads_k, 1, 1


def _dv_tiles(problem: Problem, p: Params) -> Grid:
    across, down = ceil_div(problem.head_dim_v, p["HEAD_DIM_V"]), ceil_div(problem.len_k, p["TILE_KV"])
    return across * down * problem.batch * problem.heads_k, 1, 1


def _score_smem(p: Params) -> int:
    size, d = accumulator_bytes(p), p["HEAD_DIM"]
    return shared_bytes((size, p["TILE_Q"], d), (size, p["TILE_KV"], d))


def _row_smem(p: Params) -> int:
    size = accumulator_bytes(p)
    return shared_bytes((size, p["TILE_Q"], p["TILE_KV"]), (size, p["TILE_KV"], p["HEAD_DIM"]))


def _column_smem(p: Params) -> int:
    size = accumulator_bytes(p)
    return shared_bytes((size, p["TILE_Q"], p["TILE_KV"]), (size, p["TILE_Q"], p["HEAD_DIM"]))


def _unfused_slots(problem: Problem, params: Params) -> tuple[Slot, ...]:
    shape = (problem.batch, problem.heads, problem.len_q, problem.len_k)
    S = Slot("S", problem.accumulator, shape)
    if problem.direction == "forward":
        return (S,)
    return S, Slot("dS", problem.accumulator, shape), Slot("delta", problem.accumulator, shape[:3])


def _unfused_bytes(problem: Problem, p: Params) -> Traffic:
    """Of the forward; the backward's is not modelled."""
    if problem.direction == "backward":
        return {}
    heads, size, acc = _heads_of(problem), ITEMSIZE[problem.dtype], accumulator_bytes(p)
    down, across = ceil_div(problem.len_q, p["TILE_Q"]), ceil_div(problem.len_k, p["TILE_KV"])
    scores = problem.len_q * problem.len_k * heads * acc
    columns = ceil_div(problem.head_dim_v, p["HEAD_DIM_V"])
    return {
        "q": (problem.len_q * problem.head_dim * size * heads * across, 0),
        "k": (problem.len_k * problem.head_dim * size * heads * down, 0),
        "v": (problem.len_k * problem.head_dim_v * size * heads * down, 0),
        "S": (scores * (2 + columns), 2 * scores),
        "out": (0, problem.len_q * heads * problem.head_dim_v * ITEMSIZE[problem.out_dtype]),
        "lse": (0, problem.len_q * heads * acc),
    }


def _is_forward(problem: Problem) -> bool:
    return problem.direction == "forward"


def _is_backward(problem: Problem) -> bool:
    return problem.direction == "backward"


# What pass_delta.cu depends on.
DELTA_USES = ("DTYPE", "O_DTYPE", "DOUT_DTYPE", "HEAD_DIM_V", "N_WARPS", "LENGTHS_Q", "PACKED", "DLSE")

STD_00 = Row(
    "std_00_unfused",
    False,
    75,
    (Tile(64, 64, 2, chunk=64, itemsizes=(2, 4)), Tile(64, 64, 4, chunk=64)),
    (
        Step("std_00_unfused__scores", _score_tiles, _score_smem),
        Step("std_00_unfused__softmax", _score_rows, when=_is_forward),
        Step("std_00_unfused__output", _output_tiles, _row_smem, when=_is_forward),
        Step("pass_delta", delta_rows, when=_is_backward, uses=DELTA_USES),
        Step("std_00_unfused__probabilities", _score_rows, when=_is_backward),
        Step("std_00_unfused__dscores", _score_tiles, _score_smem, when=_is_backward),
        Step("std_00_unfused__dq", _dq_tiles, _row_smem, when=lambda problem: "dq" in problem.gradients),
        Step("std_00_unfused__dk", _dk_tiles, _column_smem, when=lambda problem: "dk" in problem.gradients),
        Step("std_00_unfused__dv", _dv_tiles, _column_smem, when=lambda problem: "dv" in problem.gradients),
    ),
    "what attention costs without tiling: scores written to memory, softmax, read back",
    features=CORE,
    limits=LENGTHS,
    workspace=_unfused_slots,
    bytes=_unfused_bytes,
)
