"""Plan and arrays -> outputs: fill one Args struct, start the kernels on the current stream, never wait.

A call goes two ways.  run(plan, operands) prepares a call and makes it.  A prepared call remembers everything
but the addresses (prepared.py): the next call with the same shapes, strides, dtypes and options only fills in
pointers and launches (`key`, `cached`, the call).  attention.py tries that way first:

    key = launch.key(arrays, options)             # arrays in ORDER[direction], None where there is none
    call = launch.cached(key, arrays)
    if call is not None:
        return call(arrays, seed)                 # name -> result, in the caller's axis order
    ... check, plan, run ...
    launch.remember(key, plan, operands)          # keeps only what the fast way can repeat
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cuflash import backends
from cuflash import results as results_
from cuflash.plan import Plan, make
from cuflash.prepared import ORDER, Prepared, arrays_of, host_lengths
from cuflash.problem import Operands

__all__ = ["ORDER", "Prepared", "cached", "forget", "key", "prepare", "remember", "run"]
MAX_PREPARED = 4096  # prepared calls kept by key; at more, all are forgotten
MAX_KEPT = 64  # the same of one plan: with other block masks, other shifts of dropout

_prepared: dict[Any, Prepared] = {}
_ndarray: type | None = None  # cupy.ndarray, once CuPy has been imported


def run(plan: Plan, operands: Operands) -> dict[str, Any]:
    """Run a plan on its operands: name -> result in canonical axis order (problem.Operands).

    forward: out, lse.  backward: the problem's gradients.  Results that operands bring along are written in
    place; new ones are C-contiguous in the problem's layout.
    """
    if plan.device.kind == "host":
        from cuflash import tiled

        if plan.problem.direction == "forward":
            return dict(zip(("out", "lse"), tiled.forward(plan.problem, operands), strict=True))
        return tiled.backward(plan.problem, operands)
    call = prepare(plan, operands)
    seed = operands.seed if isinstance(operands.seed, int) else 0
    results = call(arrays_of(operands, call.order), seed, operands)
    return {
        name: array if name in call.given else results_.canonical(plan.problem, name, array)
        for name, array in results.items()
    }


def key(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a prepared call depends on; None when an array is not a plain cupy.ndarray.

    arrays: the caller's, in ORDER, or (q, k, v) where there is no other; lengths on the host as int64 NumPy
    arrays, of which the number counts.
    options: direction and every other argument; dropout without its seed.
    """
    global _ndarray
    if _ndarray is None:
        _ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
    if len(arrays) == 3:  # most calls; a loop would cost them a microsecond
        q, k, v = arrays
        if type(q) is type(k) is type(v) is _ndarray:
            return options, _description(q), _description(k), _description(v)
        return None
    parts = [options]
    for array in arrays:
        if array is None:
            parts.append(None)
        elif type(array) is _ndarray:
            parts.append(_description(array))
        elif type(array) is np.ndarray and array.ndim == 1 and array.dtype == np.int64:
            parts.append(array.size)
        else:
            return None
    return tuple(parts)


def _description(array: Any) -> tuple[Any, ...]:
    """Of a plain cupy.ndarray: all but its numbers and where they lie."""
    memory = array.data
    return array.shape, array.strides, array.dtype, memory.ptr & 15, memory.device_id


def cached(key: tuple[Any, ...] | None, arrays: tuple[Any, ...]) -> Prepared | None:
    """The prepared call of a key, or None: unknown, unhashable, or check.py must look at what arrays hold."""
    if key is None:
        return None
    try:
        call = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed: check.py says what is wrong with it
        return None
    if call is not None and call.looks and (call.overlaps(arrays) or not call.fit(arrays)):
        return None
    return call


def remember(key: tuple[Any, ...] | None, plan: Plan, operands: Operands) -> None:
    """Keep a prepared call for the next one with the same key, when only addresses and lengths can change."""
    if key is None or plan.device.kind != "cuda" or plan.copies:
        return
    reaches = plan.problem.bias or plan.problem.has_mask or operands.block_mask is not None
    if reaches and plan.problem.packed and host_lengths(operands):
        return  # do they reach the longest sequence?  check.py looks each time
    call = prepare(plan, operands)
    if len(_prepared) >= MAX_PREPARED:
        _prepared.clear()
    _prepared[key] = call


def forget() -> None:
    """Drop every prepared call (after a kernel was edited in a running process)."""
    _prepared.clear()
    make.cache_clear()
    backends.forget()


def prepare(plan: Plan, operands: Operands) -> Prepared:
    """The prepared call of a plan, kept with it: a plan's problem says all but what this key holds."""
    is_array = hasattr(operands.seed, "dtype")
    others = (
        tuple(host_lengths(operands)), operands.counter_shift, operands.block_mask, is_array,
        operands.workspace is None,
    )  # fmt: skip
    call = plan.calls.get(others)
    if call is None:
        if len(plan.calls) >= MAX_KEPT:
            plan.calls.clear()
        call = plan.calls[others] = Prepared(plan, operands)
    return call
