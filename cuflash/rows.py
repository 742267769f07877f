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
)
from cuflash.rows_forward import DELTA_USES, FWD_01, FWD_02, STD_00

# backward


def _rows_of(problem: Problem) -> tuple[int, int, int]:
    return (1 if problem.packed else problem.batch), problem.heads, problem.len_q


def _delta(problem: Problem, params: Params) -> tuple[Slot, ...]:
    return (Slot("delta", problem.accumulator, _rows_of(problem)),)


FORWARD = (FWD_02, FWD_01, STD_00)

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
