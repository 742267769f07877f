"""Kernels that answer a question of their own, apart from attention and its gradients: kernels/pass_*.cu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cuflash import backends, launch, plan
from cuflash.arrays import numpy_dtype
from cuflash.devices import Device
from cuflash.errors import CuflashError
from cuflash.problem import Operands, Problem
from cuflash.row import Grid, Params, Row, Slot, Step, Tile, n_slots, shared_bytes
from cuflash.rows_backward import row_shape
from cuflash.rows_forward import LENGTHS, accumulator_bytes, kept_blocks_bytes

_WARPS = 4
_PARTS = 8  # threads that share a column of a tile x tile result: Partition of products.cuh at 4 warps


def _tile(p: Params) -> int:
    return 32 if p["DTYPE"] == 3 else 64


def _columns_grid(problem: Problem, p: Params) -> Grid:
    return n_slots(problem, problem.len_k, _tile(p)) * problem.heads, 1, 1


def _columns_smem(p: Params) -> int:
    size, tile = accumulator_bytes(p), _tile(p)
    kept = kept_blocks_bytes(tile, tile, p["BLOCK_KV"], p["BLOCK_Q"]) if p["BLOCK_MASK"] else 0
    return kept + shared_bytes((size, tile, 32), (size, tile, 32), (size, 1, tile), (size, _PARTS, tile))


def _columns_slots(problem: Problem, p: Params) -> tuple[Slot, ...]:
    batch, heads, _ = row_shape(problem)
    return (Slot("columns", problem.accumulator, (batch, heads, problem.len_k)),)


COLUMNS = Row(
    "pass_columns",
    False,
    75,
    (Tile(1, 1, _WARPS, chunk=32),),
    (Step("pass_columns", _columns_grid, _columns_smem),),
    "column sums of P, without P in memory",
    limits=LENGTHS,
    workspace=_columns_slots,
)


def column_sums(problem: Problem, operands: Operands, device: Device) -> Any:
    """How much weight each key receives from all queries: P summed over the queries, dropout left out.

    problem: of the attention; operands: canonical views of q, k, the options' arrays, and lse (batch, heads,
    len_q) as the forward gave it.  device: the GPU of the arrays, or devices.EMULATED for NumPy arrays.
    Returns (batch, heads, len_k) in canonical axes, in the accumulation dtype.  Runs on the current stream.
    """
    problem = replace(problem, direction="backward", gradients=(), deterministic=False, has_dlse=False)
    found = plan.consider(problem, device, COLUMNS)
    if not isinstance(found, plan.Plan):
        raise CuflashError(f"pass_columns {found}")
    workspace = backends.of(device).empty((found.workspace_bytes,), np.dtype(np.uint8))
    launch.run(found, replace(operands, workspace=workspace, grads={}))
    (slot, *_) = found.slots
    return workspace[: slot.n_bytes].view(numpy_dtype(slot.dtype)).reshape(slot.shape)
