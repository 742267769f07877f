"""Kernels that answer a question of their own, apart from attention and its gradients: kernels/pass_*.cu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cuflash import args, backends, launch, plan
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


def _rows_grid(problem: Problem, p: Params) -> Grid:
    """One warp per query row of each head."""
    return -(-problem.batch * problem.heads * problem.len_q // _WARPS), 1, 1


def _row_of(name: str, teaches: str, *uses: str) -> Row:
    step = Step(name, _rows_grid, uses=("N_WARPS", *uses))
    return Row(name, False, 75, (Tile(1, 1, _WARPS, chunk=32),), (step,), teaches)


MERGE = _row_of("pass_merge", "attention over disjoint keys, put together", "DTYPE", "OUT_DTYPE")
DROPOUT_MASK = _row_of("pass_dropout_mask", "which weights dropout keeps", "DROPOUT")
ROWS = (COLUMNS, MERGE, DROPOUT_MASK)


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
    backend = backends.of(device)
    with backend.device:
        workspace = backend.empty((found.workspace_bytes,), np.dtype(np.uint8))
    launch.run(found, replace(operands, workspace=workspace, grads={}))
    (slot, *_) = found.slots
    return workspace[: slot.n_bytes].view(numpy_dtype(slot.dtype)).reshape(slot.shape)


def merge(outs: list[Any], lses: list[Any], out: Any, lse: Any, device: Device) -> None:
    """merge.merge on a GPU, one kernel after the copies, on the current stream.

    outs: (batch, len_q, heads, head_dim_v) each, lses: (batch, heads, len_q), any strides and float dtypes.
    out, lse: where the results go, float32 or float64: the dtype of all arithmetic.
    """
    backend = backends.of(device)
    batch, len_q, heads, head_dim_v = out.shape
    with backend.device:
        parts, part_lses = (
            backend.empty((len(given), *target.shape), out.dtype)
            for given, target in ((outs, out), (lses, lse))
        )
        for number, (one, its_lse) in enumerate(zip(outs, lses, strict=True)):
            parts[number], part_lses[number] = one, its_lse
        problem = _problem(batch, len_q, heads, 0, out.dtype.name, head_dim_v)
        record = args.record_of(problem, Operands(out=out, lse=lse))
        record["n_splits"] = len(outs)
        record["workspace"][:2] = backend.pointer(parts), backend.pointer(part_lses)
        _launch(problem, device, MERGE, record, out=out, lse=lse, parts=parts, part_lses=part_lses)


def dropout_mask(shape: tuple[int, ...], p: float, seed: Any, shift: tuple, device: Device) -> Any:
    """philox.dropout_mask on a GPU: bool (batch, heads, len_q, len_k), on the current stream.

    seed: an int, or a uint64 array without axes on the device.
    """
    batch, heads, len_q, len_k = shape
    backend = backends.of(device)
    with backend.device:
        keep = backend.empty(shape, np.dtype(bool))
        problem = replace(_problem(batch, len_q, heads, len_k, "float32"), dropout=p)
        record = args.record_of(problem, Operands(mask=keep, counter_shift=shift))
        if isinstance(seed, int):
            record["seed"] = seed
            _launch(problem, device, DROPOUT_MASK, record, mask=keep)
        else:
            record["seed_pointer"] = backend.pointer(seed)
            _launch(problem, device, DROPOUT_MASK, record, mask=keep, seed=seed)
    return keep


def _problem(batch: int, len_q: int, heads: int, len_k: int, dtype: str, head_dim_v: int = 1) -> Problem:
    """Sizes for a pass that does no attention."""
    return Problem(
        "forward",
        dtype,
        dtype,
        batch,
        len_q,
        len_k,
        heads,
        heads,
        head_dim=1,
        head_dim_v=head_dim_v,
        scale=1.0,
    )


def _launch(problem: Problem, device: Device, row: Row, record: np.ndarray, **arrays: Any) -> None:
    """Start the one kernel of a row; addresses of `arrays` go into the fields of those operands."""
    found = plan.consider(problem, device, row)
    if not isinstance(found, plan.Plan):
        raise CuflashError(f"{row.name} {found}")
    backend = backends.of(device)
    for field, name in args.OPERANDS.items():
        if name in arrays:
            record[field]["data"] = backend.pointer(arrays[name])
    loaded = [backend.load(one) for one in found.launches]
    backend.launch_all(loaded, backends.ArgsBuffer(bytearray(record.tobytes())), arrays)
