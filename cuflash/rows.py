"""The kernels as data: one Row per kernel, best first.  plan.py takes the first row that accepts.

A row's name is its file (kernels/<name>.cu), its entry point and its line in every report.  What a row
cannot say in numbers (its shared-memory map, its workspace) is a small function here, beside the table.
"""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.row import (
    CORE,
    Params,
    Row,
    Slot,
    Step,
    Tile,
    key_tiles,
    query_rows,
    query_tiles,
    shared_bytes,
)

# What pass_delta.cu depends on.
DELTA_USES = ("DTYPE", "O_DTYPE", "DOUT_DTYPE", "HEAD_DIM_V", "N_WARPS", "LENGTHS_Q", "PACKED", "DLSE")


# fwd_02_tiled


def _fwd_02_smem(p: Params) -> int:
    size = 8 if p["DTYPE"] == 3 else 4
    return shared_bytes((size, p["TILE_Q"], p["HEAD_DIM"]), (size, p["TILE_KV"], p["HEAD_DIM"]))


# backward


def _rows_of(problem: Problem) -> tuple[int, int, int]:
    return (1 if problem.packed else problem.batch), problem.heads, problem.len_q


def _delta(problem: Problem, params: Params) -> tuple[Slot, ...]:
    return (Slot("delta", problem.accumulator, _rows_of(problem)),)


STD_00 = Row(
    "std_00_unfused",
    False,
    75,
    (Tile(16, 16, 4, chunk=16),),
    (Step("std_00_unfused", query_tiles),),
    "what attention costs without tiling: scores written to memory, softmax, read back",
    features=CORE,
)

FORWARD = (
    Row(
        "fwd_02_tiled",
        True,
        75,
        (
            Tile(64, 32, 4, up_to=64, itemsizes=(2, 4)),
            Tile(32, 32, 4, up_to=128, itemsizes=(2, 4)),
            Tile(32, 32, 4, chunk=64),
        ),
        (Step("fwd_02_tiled", query_tiles, _fwd_02_smem),),
        "a K/V tile in shared memory serves a whole query tile",
    ),
    Row(
        "fwd_01_naive",
        False,
        75,
        (Tile(1, 1, 4, chunk=16),),
        (Step("fwd_01_naive", query_rows),),
        "online softmax, one thread per query row",
        features=CORE,
    ),
    STD_00,
)

BACKWARD = (
    Row(
        "bwd_02_tiled",
        True,
        75,
        (
            Tile(32, 32, 4, up_to=64, itemsizes=(2, 4)),
            Tile(32, 32, 4, chunk=64),
        ),
        (Step("pass_delta", query_rows, uses=DELTA_USES), Step("bwd_02_tiled", key_tiles)),
        "one pass over key tiles: dK and dV stay put",
        workspace=_delta,
    ),
    Row(
        "bwd_01_naive",
        False,
        75,
        (Tile(1, 1, 4, chunk=16),),
        (Step("pass_delta", query_rows, uses=DELTA_USES), Step("bwd_01_naive", query_rows)),
        "P again from lse; one pass owns dQ rows, one owns dK and dV rows",
        features=CORE,
        workspace=_delta,
    ),
    STD_00,
)
