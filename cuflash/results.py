"""What a call returns: shapes and dtypes, new arrays for it, and views in the caller's axis order."""

from __future__ import annotations

from typing import Any, NamedTuple

from cuflash.arrays import numpy_dtype
from cuflash.problem import Operands, Problem

_SWAPPED = ("out", "dq", "dk", "dv")  # laid out as (batch, heads, len, dim) under layout="bhsd"


class Gradients(NamedTuple):
    """What `attention_backward` and vjp return; None where there is nothing to differentiate.

    | field | shape | dtype |
    |---|---|---|
    | dq, dk, dv | those of q, k, v | out_dtype, by default that of q |
    | dbias | that of bias, summed over its broadcast axes | that of bias |
    | dsink | (heads,) | float32, float64 with float64 inputs |
    | dalibi_slopes | that of alibi_slopes | float32, float64 with float64 inputs |

    As grads= of `attention_backward` it holds the arrays to write; fields that are None are allocated.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink: Any = None
    dalibi_slopes: Any = None


def shape_and_dtype(problem: Problem, name: str) -> tuple[tuple[int, ...], str]:
    """Canonical shape (see Operands) and dtype of one result: "out", "lse" or a gradient."""
    p, batch = problem, 1 if problem.packed else problem.batch
    if name == "out":
        return (batch, p.len_q, p.heads, p.head_dim_v), p.out_dtype
    if name == "lse":
        return (batch, p.heads, p.len_q), p.accumulator
    if name == "dq":
        return (batch, p.len_q, p.heads, p.head_dim), p.out_dtype
    if name in ("dk", "dv"):
        return (batch, p.len_k, p.heads_k, p.head_dim if name == "dk" else p.head_dim_v), p.out_dtype
    argument = p.spec(name[1:])
    return argument.shape, argument.dtype


def allocate(problem: Problem, name: str, xp: Any) -> Any:
    """A new array for one result, C-contiguous in the caller's axis order, as a canonical view; unfilled."""
    shape, dtype = shape_and_dtype(problem, name)
    if problem.layout == "bhsd" and name in _SWAPPED:
        batch, length, heads, dim = shape
        return xp.empty((batch, heads, length, dim), numpy_dtype(dtype)).swapaxes(1, 2)
    return xp.empty(shape, numpy_dtype(dtype))


def allocate_missing(problem: Problem, operands: Operands, xp: Any) -> None:
    """Give every result that the caller brings no array for a new one, in operands."""
    if problem.direction == "forward":
        for name in ("out", "lse"):
            if getattr(operands, name) is None:
                setattr(operands, name, allocate(problem, name, xp))
    else:
        for name in problem.gradients:
            if name not in operands.grads:
                operands.grads[name] = allocate(problem, name, xp)


def in_layout(problem: Problem, name: str, array: Any) -> Any:
    """A canonical view in the caller's axis order: no copy."""
    if problem.packed and name in (*_SWAPPED, "lse"):
        return array[0]
    if problem.layout == "bhsd" and name in _SWAPPED:
        return array.swapaxes(1, 2)
    return array


def canonical(problem: Problem, name: str, array: Any) -> Any:
    """A new result in the caller's axis order -> canonical order, a view."""
    if problem.packed and name in ("out", "dq", "dk", "dv", "lse"):
        return array[None]
    if problem.layout == "bhsd" and name in ("out", "dq", "dk", "dv"):
        return array.transpose(0, 2, 1, 3)
    return array


def returned(out: Any, return_lse: bool, found_out: Any, found_lse: Any) -> Any:
    """out, or (out, lse): the caller's own arrays where out= brought them, else the new ones."""
    given = out if isinstance(out, (tuple, list)) else (out, None)
    if not return_lse:
        return found_out if given[0] is None else given[0]
    if given[0] is not None and given[1] is not None:
        return out
    return tuple(new if old is None else old for old, new in zip(given, (found_out, found_lse), strict=True))


def gradients(problem: Problem, found: dict[str, Any], options: dict[str, Any], grads: Any) -> Gradients:
    """Gradients in the caller's axis order, from canonical arrays by name; options hold bias and slopes.

    A field for which grads, the caller's Gradients or None, has an array is that array.
    """
    found = {name: in_layout(problem, name, array) for name, array in found.items()}
    return as_fields(problem, found, options, grads)


def as_fields(problem: Problem, found: dict[str, Any], options: dict[str, Any], grads: Any) -> Gradients:
    """`gradients` from arrays that are in the caller's axis order; dbias and dalibi_slopes in any shape."""
    fields = {}
    for name in problem.gradients:
        given = getattr(grads, name, None)
        if given is not None:
            fields[name] = given
        elif name in ("dbias", "dalibi_slopes"):
            fields[name] = found[name].reshape(tuple(options[name[1:]].shape))
        else:
            fields[name] = found[name]
    return Gradients(**fields)
