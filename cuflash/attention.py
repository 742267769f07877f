"""The public functions: check -> plan -> launch on a GPU, check -> tiled in NumPy, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import numpy as np

from cuflash import arrays as arrays_
from cuflash import launch, results, warm
from cuflash.blockmask import BlockMask
from cuflash.check import check
from cuflash.errors import CuflashError
from cuflash.problem import Operands, Problem
from cuflash.results import Gradients

__all__ = ["Gradients", "Options", "attention", "attention_backward", "attention_vjp", "explain"]

log = logging.getLogger("cuflash")


class Options(TypedDict, total=False):
    """The keyword options that all functions share; `attention` says what they mean."""

    causal: bool
    window: tuple[int | None, int | None]
    query_offset: int | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Any
    bias: Any
    mask: Any
    query_lengths: Any
    key_lengths: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    block_mask: BlockMask | None
    sink: Any
    dropout: tuple | None
    layout: str
    precision: str | None
    out_dtype: Any
    workspace: Any
    progress: Callable[[int, int], None] | None


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int | None, int | None] = (None, None),
    query_offset: int | None = None, scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Any = None, bias: Any = None, mask: Any = None, query_lengths: Any = None,
    key_lengths: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    block_mask: BlockMask | None = None, sink: Any = None,
    dropout: tuple | None = None, layout: str = "bshd", precision: str | None = None,
    out_dtype: Any = None, kernel: str | None = None, workspace: Any = None,
    progress: Callable[[int, int], None] | None = None, return_lse: bool = False, out: Any = None,
    **unknown: Any,
) -> Any:  # fmt: skip
    """softmax(scale q k^T + ...) v, exactly, in memory linear in the lengths.

    | argument | shape, default layout | meaning |
    |---|---|---|
    | q | (batch, len_q, heads, head_dim) | float16, bfloat16, float32 or float64; NumPy, CuPy, or DLPack |
    | k | (batch, len_k, heads_k, head_dim) | heads is a multiple of heads_k (GQA, MQA) |
    | v | (batch, len_k, heads_k, head_dim_v) | head_dim_v may differ from head_dim |
    | causal | | query i sees keys j <= i + query_offset |
    | window | (left, right) | i + query_offset - left <= j <= i + query_offset + right; None: unbounded |
    | query_offset | | key position of query 0; None: len_k - len_q (bottom-right); 0: top-left |
    | scale | | any finite number; None: 1/sqrt(head_dim) |
    | softcap | | scores become softcap * tanh(score / softcap) |
    | alibi_slopes | (heads,) or (batch, heads) | -slope * abs(i + query_offset - j) is added; float32 |
    | bias | broadcasts to (batch, heads, len_q, len_k) | added to the scores; any float dtype |
    | mask | broadcasts to (batch, heads, len_q, len_k) | boolean, True = attend |
    | query_lengths, key_lengths | (batch,) | the first n rows are valid; list, NumPy or device array |
    | cu_seqlens_q, cu_seqlens_k | (n + 1,) | packed: q (tokens, heads, head_dim), lse (heads, tokens) |
    | block_mask | | a BlockMask: blocks not kept cost nothing |
    | sink | (heads,) | a logit in the softmax's denominator only; float32 |
    | dropout | (p, seed[, shift]) | 0 <= p < 1; the same mask on every path: `dropout_mask` |
    | layout | | "bshd", or "bhsd" for (batch, heads, len, dim); read in place either way |
    | precision | | float32 inputs: "tf32": products of 11 bits on tensor cores; None, "float32": of all 24 |
    | out_dtype | | of out; None: that of q |
    | kernel | | name of a row, see `explain`; on NumPy arrays it runs in the emulator |
    | workspace | (bytes,) uint8 | scratch of plan.workspace_bytes, for calls that must not allocate |
    | progress | | called with (done, total) on the NumPy and emulated paths |
    | return_lse | | return (out, lse) |
    | out | that of the result | an array, or (out, lse), to write; None in its place: a new one |

    Masks compose by AND.  The order is scale, softcap, ALiBi, bias, masks, softmax with sink, dropout.

    Returns out (batch, len_q, heads, head_dim_v), or (out, lse) with lse (batch, heads, len_q).

        >>> q = k = v = np.ones((2, 5, 4, 8), np.float32)
        >>> attention(q, k, v).shape
        (2, 5, 4, 8)
        >>> attention(q, k[:, :, :1], v[:, :, :1], causal=True, key_lengths=[5, 3]).shape  # MQA, padded keys
        (2, 5, 4, 8)
        >>> packed = dict(cu_seqlens_q=[0, 2, 5], cu_seqlens_k=[0, 2, 5])              # lengths 2 and 3
        >>> out, lse = attention(q[0], k[0], v[0], return_lse=True, **packed)
        >>> out.shape, lse.shape
        ((5, 4, 8), (4, 5))

    Numerics: products accumulate and softmax runs in float32 (float64 for float64).  lse is the natural
    log-sum-exp of the scores, masks and sink included, dropout not; float32 (float64).  A row that sees
    nothing gives out 0 and lse -inf, or its sink.  The result is bitwise repeatable for the same inputs,
    plan, GPU model and version.  Kernels hold scores in units of ln 2: on a GPU a finite bias beyond 2.3e38
    counts as infinite, finfo(float32).min too, so that a row of nothing else sees nothing.  Scores beyond
    1e8 in size lie 8 and more apart in float32: gradients made from such a lse may be wrong or infinite.

    NumPy arrays are computed on the CPU and give NumPy arrays.  Arrays on a CUDA device give CuPy arrays, on
    that device's current stream, without synchronizing.

    Raises CuflashError, before anything runs or is written, when the arrays and options do not fit together.

    Source: Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), algorithm 1.
    """
    # The warm way: a call like one before is made again, arrays in launch.ORDER and options in warm.PLAIN.
    if type(q) is not np.ndarray and progress is None and not unknown:
        plain = (
            "forward", causal, window, query_offset, scale, softcap, block_mask, layout, precision,
            out_dtype, kernel, return_lse, False,
        )  # fmt: skip
        given: Any = q, k, v
        if not (
            out is bias is mask is alibi_slopes is sink is query_lengths is key_lengths is cu_seqlens_q
            is cu_seqlens_k is workspace is None
        ):  # fmt: skip
            pair = out if type(out) is tuple and len(out) == 2 else (out, None)
            given += (
                *pair, bias, mask, alibi_slopes, sink, query_lengths, key_lengths, cu_seqlens_q, cu_seqlens_k,
                workspace, None,
            )  # fmt: skip
        key, given, seed = warm.of_values("forward", given, plain, dropout)
        call = launch.cached(key, given)
        if call is not None:
            if len(given) == 3 and dropout is None:
                return call.results_of(given, return_lse)
            found = call.run(given, seed, None, return_lse)
            return results.returned(out, return_lse, found["out"], found.get("lse"))
    options = dict(
        causal=causal, window=window, query_offset=query_offset, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, bias=bias, mask=mask, query_lengths=query_lengths, key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_mask=block_mask, sink=sink,
        dropout=dropout, layout=layout, precision=precision, out_dtype=out_dtype, kernel=kernel,
        workspace=workspace, progress=progress, return_lse=return_lse, out=out, **unknown,
    )  # fmt: skip
    found_out, found_lse = _forward("attention", {"q": q, "k": k, "v": v}, options, kernel)
    return results.returned(out, return_lse, found_out, found_lse)


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, deterministic: bool = False,
    grads: Gradients | None = None, kernel: str | None = None, **options: Unpack[Options],
) -> Gradients:  # fmt: skip
    """Gradients of `attention`, from its inputs and results, with P computed again tile by tile.

    | argument | shape, default layout | meaning |
    |---|---|---|
    | dout | (batch, len_q, heads, head_dim_v) | gradient of out; any float dtype |
    | q, k, v | as in `attention` | the inputs of the forward |
    | out, lse | (batch, len_q, heads, head_dim_v), (batch, heads, len_q) | its results |
    | dlse | (batch, heads, len_q) | gradient of lse, or None for 0; float32 (float64) |
    | deterministic | | every gradient bitwise repeatable, or the kernel refuses |
    | grads | | Gradients whose arrays are written in place |
    | kernel, options | | those of `attention`, the same as in the forward; out_dtype is that of dq, dk, dv |

    Returns Gradients: dq, dk, dv, and dbias, dsink, dalibi_slopes where bias, sink, alibi_slopes are given.

        >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
        >>> attention_backward(dout, q, k, v, out, lse, causal=True).dq.shape          # that of q
        >>> attention_backward(dout, q, k, v, out, lse, causal=True, dlse=dlse).dk.shape
        >>> attention_backward(dout, q, k, v, out, lse, bias=bias, grads=Gradients(dq=buffer)).dbias.shape

    Numerics: as in `attention`; sums over broadcast axes run in float32 (float64).  Rows that see nothing
    give and get no gradient, except that dsink receives dlse * P_sink.

    Raises CuflashError as `attention` does.

    Source: Dao et al., "FlashAttention" (2022), algorithm 4; delta = rowsum(dO * O) - dlse.
    """
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    settings = dict(options, kernel=kernel, deterministic=deterministic, grads=grads)
    return _backward("attention_backward", arrays, settings, kernel)


def attention_vjp(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, deterministic: bool = False,
    kernel: tuple[str | None, str | None] | None = None, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """`attention`, and the function from gradients of its results to those of its inputs.

    | argument | meaning |
    |---|---|
    | q, k, v, options | as in `attention`, but for out=; out_dtype is that of out and of dq, dk, dv |
    | return_lse | return lse too |
    | deterministic | as in `attention_backward` |
    | kernel | (forward, backward): a row's name or None each |

    Returns (out, vjp), or (out, lse, vjp); vjp(dout, dlse=None) gives Gradients.  It holds on to q, k, v, the
    array options, out and lse, without copies: leave them unchanged until it is called.

        >>> out, vjp = attention_vjp(q, k, v, causal=True)
        >>> dq, dk, dv, *_ = vjp(dout)
        >>> out, lse, vjp = attention_vjp(q, k, v, sink=sink, return_lse=True)
        >>> vjp(dout, dlse).dsink.shape                                                # (heads,)
        >>> attention_vjp(q, k, v, kernel=("fwd_02_tiled", "bwd_02_tiled"))

    Numerics and errors as in `attention` and `attention_backward`.
    """
    settings = dict(options, kernel=kernel, return_lse=return_lse, deterministic=deterministic)
    rows = kernel if isinstance(kernel, tuple) and len(kernel) == 2 else (None, None)
    out, lse = _forward("attention_vjp", {"q": q, "k": k, "v": v}, settings, rows[0])

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        """Gradients for dout, and dlse where lse was used."""
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
        return _backward("vjp", arrays, dict(options, kernel=rows[1], deterministic=deterministic), rows[1])

    return (out, lse, vjp) if return_lse else (out, vjp)


def explain(
    q: Any, k: Any, v: Any, *, backward: bool = False, deterministic: bool = False, device: Any = None,
    kernel: str | None = None, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """The Plan of a call: which kernel runs, why the others do not, tile, memory and cost.  Nothing runs.

    | argument | meaning |
    |---|---|
    | q, k, v, options | as in `attention`; every array may be a `spec(shape, dtype)` |
    | backward | the plan of the backward; dout, out and lse are taken as contiguous |
    | deterministic | as in `attention_backward` |
    | device | "sm_90a", "cuda:1", a number, "emulated", "host"; None: that of q; for specs the current GPU |
    | kernel | name of a row |

        >>> print(explain(q, k, v, causal=True))
        >>> x = spec((2, 4096, 16, 128), "bfloat16")
        >>> explain(x, x, x, device="sm_90a").kernel
        'fwd_10_persistent'
        >>> explain(x, x, x, backward=True, device="sm_80").workspace_bytes

    Raises CuflashError as `attention` does.
    """
    from cuflash import devices, plan

    if not isinstance(backward, (bool, np.bool_)):
        raise CuflashError(f"explain: backward is {backward!r}\n  backward is True or False.")
    options = dict(options, kernel=kernel, deterministic=deterministic)
    arrays = {"q": q, "k": k, "v": v}
    problem, operands = check("forward", arrays, options, where="explain", specs=True)
    if backward:
        for name in ("out", "lse"):
            shape, dtype = results.shape_and_dtype(problem, name)
            if problem.packed:
                shape = shape[1:]
            elif problem.layout == "bhsd" and name == "out":
                shape = (shape[0], shape[2], shape[1], shape[3])
            arrays[name] = arrays_.spec(shape, dtype)
        arrays["dout"] = arrays["out"]
        problem, operands = check("backward", arrays, options, where="explain", specs=True)
    if device is None and not isinstance(q, arrays_.ArraySpec):
        device = operands.q.device.id if arrays_.is_cupy(operands.q) else devices.HOST
    return plan.make(problem, devices.find(device), kernel)


def _forward(
    where: str, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
) -> tuple[Any, Any]:
    """(out, lse) in the caller's axis order."""
    out = options.get("out")
    pair = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    _, found = _run("forward", where, arrays, {"out": pair[0], "lse": pair[1]}, options, kernel)
    return found["out"], found["lse"]


def _backward(where: str, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None) -> Gradients:
    """Gradients in the caller's axis order; those that options["grads"] has an array for are that array."""
    grads = options.get("grads")
    targets = grads._asdict() if isinstance(grads, Gradients) else {}
    problem, found = _run("backward", where, arrays, targets, options, kernel)
    return results.as_fields(problem, found, options, grads)


def _run(
    direction: str, where: str, arrays: dict[str, Any], targets: dict[str, Any], options: dict[str, Any],
    kernel: str | None,
) -> tuple[Problem, dict[str, Any]]:  # fmt: skip
    """Problem, and every result by name in the caller's axis order."""
    key = None
    if type(arrays["q"]) is not np.ndarray:
        key, given, seed = warm.key(direction, arrays | targets, options)
        call = launch.cached(key, given)
        if call is not None:
            return call.plan.problem, call(given, seed)
    problem, operands = check(direction, arrays, options, where=where)
    if kernel is None and not arrays_.is_cupy(operands.q):
        found = _run_in_numpy(problem, operands)
    else:
        from cuflash import devices, plan

        device = devices.gpu(operands.q.device.id) if arrays_.is_cupy(operands.q) else devices.HOST
        chosen = plan.make(problem, device, kernel)
        found = launch.run(chosen, operands)
        launch.remember(key, chosen, operands)
    return problem, {name: results.in_layout(problem, name, array) for name, array in found.items()}


def _run_in_numpy(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Every result by name, in canonical views."""
    from cuflash import tiled

    log.debug("plan: tiled for %s on CPU (NumPy)", problem.direction)
    results.allocate_missing(problem, operands, np)
    if problem.direction == "forward":
        tiled.forward(problem, operands)
        return {"out": operands.out, "lse": operands.lse}
    tiled.backward(problem, operands)
    return operands.grads
