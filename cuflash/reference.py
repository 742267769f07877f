"""The specification of attention: every path of cuflash is tested against this file.

Read reference_scores.py first: it says what a score is.  Here, for one (sequence, head),

    forward                                           backward, given dO and dlse
    l = sum_j exp(S[i, j]) + exp(sink)                P = exp(S - lse)
    lse = log l                                       dV = (Z P)^T dO
    P = exp(S - lse)          softmax, with sink      dP = Z (dO V^T)
    O = (Z P) V               Z: dropout              delta = rowsum(dO * O) - dlse
                                                      dS = P (dP - delta)
    with Z[i, j] = 0 where dropped,                   dbias = dS, summed over broadcast axes
    1 / (1 - p) where kept                            dslope = -sum dS * distance
                                                      dsink = -sum exp(sink - lse) * delta
                                                      dQ = scale * (dS dcap) K,   dK = scale * (dS dcap)^T Q

A row that sees nothing gives O = 0, lse = -inf (or its sink) and no gradient, except to its sink.  Sums
run over visible pairs only, so what stands in a hidden row is never read, NaN included.  A row that sees
something and whose l is not finite is NaN, whichever of its weights are dropped.

The public functions have the signatures of cuflash.attention, attention_backward and attention_vjp.  They
take NumPy or CuPy arrays, work in float64 in blocks of query rows, and give float64.  `unfused(dtype)` is
the same mathematics as a plain library computes it in dtype: the error that a kernel is measured by.
"""

# ruff: noqa: E741  (O and l are the papers' names)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuflash import results
from cuflash.arrays import device_of, module_of
from cuflash.check import check
from cuflash.errors import CuflashError
from cuflash.philox import dropout_keep
from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Arithmetic, Sequence, scores, sequences, slope_index, to_host

FLOAT64 = Arithmetic("float64")
LONGDOUBLE = Arithmetic("longdouble")  # judges float64 kernels; NumPy only, small sizes only
MAX_BLOCK = {"numpy": 2**19, "cupy": 2**25}  # scores held at once


# ---- the public functions


def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, out: Any = None, rows: Any = None,
    arithmetic: Arithmetic = FLOAT64, **options: Any,
) -> Any:  # fmt: skip
    """`cuflash.attention` in float64.

    | argument | meaning |
    |---|---|
    | q, k, v, return_lse, out, options | as in `cuflash.attention` |
    | rows | compute these array rows of q only: integers (n,), or (batch or 1, heads or 1, n) |
    | arithmetic | the precision |

    Returns out, or (out, lse), in float64; with rows=, out and lse have n rows in place of len_q.

        >>> attention(q, k, v, causal=True).shape                     # (batch, len_q, heads, head_dim_v)
        >>> attention(q, k, v, causal=True, rows=[0, 99]).shape       # (batch, 2, heads, head_dim_v)

    Raises CuflashError as `cuflash.attention` does.
    """
    options |= {"return_lse": return_lse, "out": out}
    problem, operands = check("forward", {"q": q, "k": k, "v": v}, options)
    with device_of(operands.q):
        O, lse = forward(problem, operands, arithmetic, rows)
        for target, value in ((operands.out, O), (operands.lse, lse)):
            if target is not None:
                target[...] = value
    O, lse = results.in_layout(problem, "out", O), results.in_layout(problem, "lse", lse)
    return results.returned(out, return_lse, O, lse)


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, deterministic: bool = False,
    grads: Any = None, rows: Any = None, keys: Any = None, arithmetic: Arithmetic = FLOAT64, **options: Any,
) -> Any:  # fmt: skip
    """`cuflash.attention_backward` in float64.

    | argument | meaning |
    |---|---|
    | dout, q, k, v, out, lse, dlse, grads, options | as in `cuflash.attention_backward` |
    | rows | compute dq of these array rows of q only: (n,), or (batch or 1, heads or 1, n); nothing else |
    | keys | compute dk and dv of these array rows of k only: (n,), or (batch or 1, heads_k or 1, n) |

    Returns Gradients in float64.  The gradients are those of the `out` and `lse` given: rounded ones give
    what a kernel that was handed them should give.  Raises CuflashError as `cuflash.attention_backward`
    does.
    """
    options |= {"deterministic": deterministic, "grads": grads}
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    problem, operands = check("backward", arrays, options)
    with device_of(operands.q):
        found = backward(problem, operands, arithmetic, rows, keys)
        for name, target in operands.grads.items():
            target[...] = found[name]
    return results.gradients(replace(problem, gradients=tuple(found)), found, options, grads)


def attention_vjp(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, deterministic: bool = False,
    arithmetic: Arithmetic = FLOAT64, **options: Any,
) -> Any:  # fmt: skip
    """`cuflash.attention_vjp` in float64: (out, vjp) or (out, lse, vjp), vjp(dout, dlse=None) -> Gradients.

    Nothing is rounded between the forward and the backward.  Raises CuflashError as
    `cuflash.attention_vjp` does.
    """
    options |= {"deterministic": deterministic}
    problem, operands = check("forward", {"q": q, "k": k, "v": v}, options, where="attention_vjp")
    with device_of(operands.q):
        O, lse = forward(problem, operands, arithmetic)
    out, saved_lse = results.in_layout(problem, "out", O), results.in_layout(problem, "lse", lse)

    def vjp(dout: Any, dlse: Any = None) -> Any:
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "dlse": dlse}
        with device_of(O):
            # dtypes of the contract for check; the backward itself gets all digits
            arrays |= {"out": out.astype(problem.accumulator), "lse": saved_lse.astype(problem.accumulator)}
            again, with_results = check("backward", arrays, options, where="vjp")
            with_results.out, with_results.lse = O, lse
            found = backward(again, with_results, arithmetic)
        return results.gradients(again, found, options, None)

    return (out, saved_lse, vjp) if return_lse else (out, vjp)


def unfused(dtype: str, noise: Any = None) -> SimpleNamespace:
    """The baseline in dtype: `.attention`, `.attention_backward` and `.attention_vjp` of unfused attention.

    Products are accumulated in float32 (float64 for float64); S, P, O, dP, dS and the gradients are each
    rounded to dtype ("float16", "bfloat16", "float32", "float64", or "tf32", which rounds the inputs too),
    and so is a dout of another dtype before it is multiplied.  Results that leave (out, gradients) are
    rounded to out_dtype where one is given.  noise: a numpy.random.Generator that draws other roundings of
    the same size, for small arrays on which one draw may be lucky.
    """
    arithmetic = Arithmetic("float64" if dtype == "float64" else "float32", dtype, noise)
    functions = (attention, attention_backward, attention_vjp)
    return SimpleNamespace(**{f.__name__: partial(f, arithmetic=arithmetic) for f in functions})


# ---- forward


@np.errstate(all="ignore")
def forward(
    problem: Problem, operands: Operands, arithmetic: Arithmetic = FLOAT64, rows: Any = None
) -> tuple[Any, Any]:
    """(O, lse) in canonical axes: (batch, len_q, heads, head_dim_v) and (batch, heads, len_q)."""
    xp = module_of(operands.q)
    rows = chosen(rows, operands.q.shape[0], problem.heads, problem.len_q)
    batch, _, n_rows = rows.shape
    O = xp.zeros((batch, n_rows, problem.heads, problem.head_dim_v), arithmetic.accumulate)
    lse = xp.full((batch, problem.heads, n_rows), -np.inf, arithmetic.accumulate)
    for sequence, h in every_head(problem, operands):
        b = sequence.array_b
        j = xp.arange(sequence.len_k)
        V = arithmetic.widen(operands.v[b, sequence.k_start + j, h // problem.group])
        for place, i in blocks(xp, rows[b, h], sequence.q_start, sequence.len_q, sequence.len_k):
            S, visible, _, _ = scores(problem, operands, sequence, h, i, j, arithmetic)
            P, lse[b, h, place] = softmax(S, sink_of(operands, h, arithmetic))
            P = arithmetic.round(xp.where(visible, P, 0))
            Z = dropout_factor(problem, operands, sequence, h, i, j, arithmetic)
            O_rows = sum_over_visible(Z * P, V, visible, arithmetic)  # NaN weights stay so where dropped
            O[b, place, h] = arithmetic.round_result(O_rows, result_dtype(problem, arithmetic))
    return O, lse


def softmax(S: Any, sink: Any) -> tuple[Any, Any]:
    """(P, lse) of rows of scores; sink is a logit of the denominator, or None."""
    xp = module_of(S)
    S = with_sink(S, sink)
    m = S.max(axis=1)
    m = xp.where(xp.isneginf(m), 0, m)  # a row that sees nothing: exp(-inf - 0) = 0, and log(0) = -inf
    P = xp.exp(S - m[:, None])  # the largest is exp(0): nothing overflows
    l = P.sum(axis=1)
    return P[:, :-1] / xp.where(l == 0, 1, l)[:, None], m + xp.log(l)


def with_sink(S: Any, sink: Any) -> Any:
    """S and one more column: the sink is a key whose value vector is zero, hidden where there is none."""
    xp = module_of(S)
    column = xp.full((len(S), 1), -np.inf, S.dtype) if sink is None else xp.broadcast_to(sink, (len(S), 1))
    return xp.concatenate([S, column], axis=1)


# ---- backward


@np.errstate(all="ignore")
def backward(
    problem: Problem, operands: Operands, arithmetic: Arithmetic = FLOAT64, rows: Any = None, keys: Any = None
) -> dict[str, Any]:
    """Gradients by name in canonical axes (see Operands), of the out and lse in operands.

    With rows: dq of those rows alone.  With keys: dk and dv of those rows alone.
    """
    xp = module_of(operands.q)
    names = problem.gradients if rows is None else ("dq",)
    names = names if keys is None else ("dk", "dv")
    rows = chosen(rows, operands.q.shape[0], problem.heads, problem.len_q)
    keys = chosen(keys, operands.q.shape[0], problem.heads_k, problem.len_k, "reference", "keys")
    grads = zero_gradients(problem, operands, rows.shape[2], keys.shape[2], arithmetic)
    for sequence, h in every_head(problem, operands):
        b, h_k = sequence.array_b, h // problem.group
        key_place, j = within(xp, keys[b, h_k], sequence.k_start, sequence.len_k)
        K = arithmetic.widen(operands.k[b, sequence.k_start + j, h_k])
        V = arithmetic.widen(operands.v[b, sequence.k_start + j, h_k])
        for place, i in blocks(xp, rows[b, h], sequence.q_start, sequence.len_q, len(j)):
            tokens = sequence.q_start + i
            Q = arithmetic.widen(operands.q[b, tokens, h])
            dO = arithmetic.widen(operands.dout[b, tokens, h])
            O = operands.out[b, tokens, h].astype(arithmetic.accumulate)
            lse = operands.lse[b, h, tokens].astype(arithmetic.accumulate)
            lse = xp.where(xp.isneginf(lse), np.inf, lse)  # a row that sees nothing: exp(S - inf) = 0
            delta = arithmetic.total(xp.where(O == 0, 0, dO * O), 1)  # its O is 0, and its dO may be anything
            if operands.dlse is not None:
                delta = delta - operands.dlse[b, h, tokens].astype(arithmetic.accumulate)
            dO = arithmetic.round_result(dO, arithmetic.rounds_to)  # products take operands of their dtype

            S, visible, dcap, distance = scores(problem, operands, sequence, h, i, j, arithmetic)
            P = arithmetic.round(xp.where(visible, arithmetic.exp(S - lse[:, None]), 0))
            Z = dropout_factor(problem, operands, sequence, h, i, j, arithmetic)
            dP = arithmetic.round(arithmetic.product(dO, V.T))
            dP = xp.where(Z == 0, 0, Z * dP)
            dS = arithmetic.round(xp.where(visible, P * (dP - delta[:, None]), 0))

            ZP = xp.where(Z == 0, 0, Z * P)
            dv = grads["dv"][b, key_place, h_k]
            grads["dv"][b, key_place, h_k] = sum_over_visible(ZP.T, dO, visible.T, arithmetic, dv)
            if problem.bias is not None:
                add_to_bias(grads["dbias"], sequence, h, i, j, dS, arithmetic)
            if problem.has_alibi:
                index = slope_index(operands.alibi_slopes, sequence, h)
                grads["dalibi_slopes"][index] -= arithmetic.total((dS * distance).ravel())
            if problem.has_sink:
                P_sink = arithmetic.exp(sink_of(operands, h, arithmetic) - lse)
                grads["dsink"][h] -= arithmetic.total(P_sink * delta)
            dS = dS * (problem.scale * dcap)
            grads["dq"][b, place, h] = sum_over_visible(dS, K, visible, arithmetic)
            dk = grads["dk"][b, key_place, h_k]
            grads["dk"][b, key_place, h_k] = sum_over_visible(dS.T, Q, visible.T, arithmetic, dk)
    dtypes = dict.fromkeys(("dq", "dk", "dv"), result_dtype(problem, arithmetic))
    dtypes |= {"dbias": problem.bias, "dsink": problem.accumulator, "dalibi_slopes": problem.accumulator}
    return {name: arithmetic.round_result(grads[name], dtypes[name]) for name in names}


def zero_gradients(
    problem: Problem, operands: Operands, n_rows: int, n_keys: int, arithmetic: Arithmetic
) -> dict[str, Any]:
    """Zeros to add to, by name, in the accumulation dtype."""
    batch = operands.q.shape[0]
    shapes = {
        "dq": (batch, n_rows, problem.heads, problem.head_dim),
        "dk": (batch, n_keys, problem.heads_k, problem.head_dim),
        "dv": (batch, n_keys, problem.heads_k, problem.head_dim_v),
    }
    for name in ("bias", "sink", "alibi_slopes"):
        if getattr(operands, name) is not None:
            shapes["d" + name] = getattr(operands, name).shape
    xp = module_of(operands.q)
    return {name: xp.zeros(shape, arithmetic.accumulate) for name, shape in shapes.items()}


def add_to_bias(
    dbias: Any, sequence: Sequence, h: int, i: Any, j: Any, dS: Any, arithmetic: Arithmetic
) -> None:
    """dbias += dS of one block, summed over the axes along which bias was broadcast."""
    xp = module_of(dS)
    batch, heads, rows, keys = dbias.shape
    plane = dbias[sequence.b if batch != 1 else 0, h if heads != 1 else 0]
    if rows == 1:
        dS, i = arithmetic.total(dS, 0)[None], xp.zeros(1, int)
    if keys == 1:
        dS, j = arithmetic.total(dS, 1)[:, None], xp.zeros(1, int)
    dS = dS[i < rows][:, j < keys]  # positions that bias does not reach are hidden
    plane[i[i < rows][:, None], j[j < keys][None, :]] += dS


# ---- shared by both


def sum_over_visible(
    weights: Any, values: Any, visible: Any, arithmetic: Arithmetic, onto: Any = 0
) -> Any:  # fmt: skip
    """onto + weights (n, m) @ values (m, d), visible pairs alone: a hidden pair's 0 never meets a NaN."""
    xp = module_of(values)
    weights = xp.where(visible, weights, 0)
    finite = xp.isfinite(values).all(axis=1)
    if bool(finite.all()):
        return arithmetic.product(weights, values, onto)
    total = arithmetic.product(weights, xp.where(finite[:, None], values, 0), onto)
    for m in np.flatnonzero(~to_host(finite)):
        total = total + xp.where(visible[:, m, None], weights[:, m, None] * values[m], 0)
    return total


def dropout_factor(
    problem: Problem, operands: Operands, sequence: Sequence, h: int, i: Any, j: Any, arithmetic: Arithmetic
) -> Any:
    """Z, what dropout multiplies weights by: 0 where dropped, 1 / (1 - p) where kept; 1 without."""
    if problem.dropout is None:
        return module_of(j).ones((), arithmetic.accumulate)
    keep = dropout_keep(operands.seed, problem.dropout, sequence.b, h, i, j, operands.counter_shift)
    return keep.astype(arithmetic.accumulate) / (1 - problem.dropout)


def every_head(problem: Problem, operands: Operands) -> Iterator[tuple[Sequence, int]]:
    """Every (sequence, query head)."""
    for sequence in sequences(problem, operands):
        for h in range(problem.heads):
            yield sequence, h


def chosen(
    rows: Any, batch: int, heads: int, length: int, where: str = "reference", name: str = "rows"
) -> np.ndarray:
    """Array rows to compute, (batch, heads, n): those asked for, or all; negative ones count from the end.

    where and name are what messages say.
    """
    if rows is None:
        return np.broadcast_to(np.arange(length), (batch, heads, length))
    do = f"Give whole numbers (n,), or (batch or 1, heads or 1, n): batch {batch}, heads {heads}."
    try:
        rows = to_host(rows)
        if not rows.size:
            rows = rows.astype(np.int64)
        found = np.broadcast_to(rows, (batch, heads, rows.shape[-1]))
    except (ValueError, IndexError, TypeError, AttributeError):
        found = None
    if found is None or found.dtype.kind not in "iu":
        got = f"shape {rows.shape} and dtype {rows.dtype}" if hasattr(rows, "dtype") else f"type {type(rows)}"
        raise CuflashError(f"{where}: {name} has {got}\n  {do}")
    if found.size and not (-length <= found.min() and found.max() < length):
        raise CuflashError(
            f"{where}: {name} reach from {found.min()} to {found.max()}\n"
            f"  There are {length}: give {-length} to {length - 1}."
        )
    found = found.astype(np.int64)
    return np.where(found < 0, found + length, found)


def within(xp: Any, rows: np.ndarray, start: int, length: int) -> tuple[np.ndarray, Any]:
    """(place in rows, position in the sequence) of the rows that lie in [start, start + length)."""
    place = np.flatnonzero((rows >= start) & (rows < start + length))
    return xp.asarray(place), xp.asarray(rows[place] - start)


def blocks(xp: Any, rows: np.ndarray, start: int, length: int, n_keys: int) -> Iterator[tuple[Any, Any]]:
    """`within`, in blocks small enough to hold their scores."""
    place, i = within(xp, rows, start, length)
    step = max(1, MAX_BLOCK[xp.__name__] // max(n_keys, 1))
    for first in range(0, len(i), step):
        yield place[first : first + step], i[first : first + step]


def sink_of(operands: Operands, h: int, arithmetic: Arithmetic) -> Any:
    """The sink's logit of one head, or None."""
    return None if operands.sink is None else operands.sink[h].astype(arithmetic.accumulate)


def result_dtype(problem: Problem, arithmetic: Arithmetic) -> str | None:
    """dtype to which out and the gradients are rounded."""
    if problem.out_dtype == problem.dtype and arithmetic.rounds_to != "tf32":
        return arithmetic.rounds_to
    return problem.out_dtype
