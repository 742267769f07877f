"""Attention over a whole set of keys from attention over its parts, and gradients back to the parts.

Each part attends to its own keys; parts share no key and together hold all of them.  A part's lse says
how much of the softmax it holds:

    lse = log sum_part exp(lse_part)        w_part = exp(lse_part - lse)        out = sum_part w_part out_part

A sink belongs to exactly one part.  With dropout every part needs the shift of its first key, so that it
draws its piece of the whole mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cuflash import arrays as arrays_
from cuflash.errors import CuflashError
from cuflash.messages import device_text
from cuflash.problem import FLOAT_DTYPES


def merge(outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bshd") -> tuple[Any, Any]:
    """(out, lse) of the whole from those of its parts.

    | argument | shape of each part, default layout | meaning |
    |---|---|---|
    | outs | (batch, len_q, heads, head_dim_v) | outputs of any float dtype (float32 loses least) |
    | lses | (batch, heads, len_q) | natural log-sum-exp of the scores, float32 or float64 |
    | layout | | "bshd", or "bhsd" for outs (batch, heads, len_q, head_dim_v) |

    Packed parts are (tokens, heads, head_dim_v) and (heads, tokens).  Any number of parts from 1, in any
    order: the order changes no more than rounding.

    Returns out and lse in float32, in float64 where an lse is float64.

        >>> parts = [attention(q, k[:, j:j + 512], v[:, j:j + 512], return_lse=True) for j in (0, 512)]
        >>> out, lse = merge(*zip(*parts))          # = attention(q, k, v) of all 1024 keys
        >>> merge([out, out_of_sink_part], [lse, lse_of_sink_part])       # merged again

    A row that is empty in one part (lse -inf) takes nothing from it; empty in all, it is out 0, lse -inf.
    NaN and +inf of a lse propagate as NaN, but for a row that saw nothing but a sink of NaN or +inf: its part
    is 0, all others are empty, and so out is 0 and lse NaN.

    Raises CuflashError when parts are missing or differ in shape or device.
    """
    outs, lses, xp = _parts("merge", *_lists("merge", outs, lses), layout)
    dtype = _accumulator(lses)
    if xp is not np:
        return _by_kernel(xp, outs, lses, layout, dtype)
    lses = [part.astype(dtype) for part in lses]
    weights, lse = _weights(xp, lses)
    out = None
    for part, part_lse, w in zip(outs, lses, weights, strict=True):
        saw_a_key = _on_axes_of_out(xp.isfinite(part_lse), layout) | (part != 0)
        w = xp.where(saw_a_key, _on_axes_of_out(w, layout), 0)
        weighted = _times(xp, w, part.astype(dtype))
        out = weighted if out is None else out + weighted
    return out, lse


def _by_kernel(xp: Any, outs: list, lses: list, layout: str, dtype: str, device: Any = None) -> tuple:
    """The same by kernels/pass_merge.cu.  device: None is that of the parts."""
    from cuflash import devices, passes

    with contextlib.nullcontext() if device else outs[0].device:
        out, lse = xp.empty(outs[0].shape, dtype), xp.empty(lses[0].shape, dtype)

    def canonical(array: Any) -> Any:
        array = array[None] if out.ndim == 3 else array
        return array.swapaxes(1, 2) if layout == "bhsd" and array.ndim == 4 else array

    def with_batch(array: Any) -> Any:
        return array[None] if out.ndim == 3 else array

    passes.merge(
        [canonical(part) for part in outs], [with_batch(part) for part in lses],
        canonical(out), with_batch(lse), device or devices.gpu(out.device.id),
    )  # fmt: skip
    return out, lse


def merge_backward(
    dout: Any, dlse: Any, outs: Sequence[Any], lses: Sequence[Any], out: Any, lse: Any, *,
    layout: str = "bshd",
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """(douts, dlses): gradients of the parts' results, each ready for `attention_backward` of its part.

    | argument | shape, default layout | meaning |
    |---|---|---|
    | dout | (batch, len_q, heads, head_dim_v) | gradient of merge's out; any float dtype |
    | dlse | (batch, heads, len_q) | gradient of merge's lse, or None for 0 |
    | outs, lses | | the parts, as given to `merge` |
    | out, lse | | what `merge` returned |

        w = exp(lse_part - lse)      dout_part = w dout      dlse_part = w (dlse + dout . (out_part - out))

    Returns two lists with one array a part, float32, float64 where an lse is float64.

        >>> douts, dlses = merge_backward(dout, None, outs, lses, out, lse)
        >>> attention_backward(douts[0], q, k[:, :512], v[:, :512], outs[0], lses[0], dlse=dlses[0]).dk

    dq, and the gradients of sink, bias and slopes that parts share, are the sums over the parts.  A row
    that is empty in a part gets 0 there.  Raises CuflashError as `merge` does.
    """
    outs, lses = _lists("merge_backward", outs, lses)
    _same_number("merge_backward", outs, lses)
    outs, lses = [*outs, out, dout], [*lses, lse, lse if dlse is None else dlse]
    whole = (("out", "dout"), ("lse", "lse" if dlse is None else "dlse"))
    outs, lses, xp = _parts("merge_backward", outs, lses, layout, whole)
    dtype = _accumulator(lses)
    with arrays_.device_of(outs[0]):
        *outs, out, dout = (array.astype(dtype) for array in outs)
        *lses, lse, given_dlse = (array.astype(dtype) for array in lses)
        dlse = xp.zeros_like(lse) if dlse is None else given_dlse
        weights, _ = _weights(xp, lses)
        douts, dlses = [], []
        with np.errstate(invalid="ignore"):
            for part, w in zip(outs, weights, strict=True):
                douts.append(_times(xp, _on_axes_of_out(w, layout), dout))
                towards = (dout * (part - out)).sum(axis=-1)  # what out gains as this part's weight grows
                dlses.append(
                    _times(xp, w, dlse + (towards if layout == "bhsd" else towards.swapaxes(-1, -2)))
                )
    return douts, dlses


def _weights(xp: Any, lses: list[Any]) -> tuple[list[Any], Any]:
    """(weights of the parts, lse of the whole), each with the axes of a lse.

    The weights sum to 1, to 0 where all parts are empty; an empty part has 0 beside any other.  They are not
    taken from exp(lse_part - lse): a large lse has no digits left for the log of a sum of few terms.
    """
    with np.errstate(all="ignore"):
        m = lses[0]
        for part in lses[1:]:
            m = xp.maximum(m, part)
        m = xp.where(xp.isneginf(m), 0, m)
        terms = [xp.where(xp.isneginf(part), 0, xp.exp(part - m)) for part in lses]  # m may be NaN
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        total_or_1 = xp.where(total == 0, 1, total)
        weights = [xp.where(term == 0, 0, term / total_or_1) for term in terms]  # total may be NaN
        return weights, m + xp.log(total)


def _on_axes_of_out(w: Any, layout: str) -> Any:
    """Weights (..., heads, len_q) with the axes of out."""
    return (w if layout == "bhsd" else w.swapaxes(-1, -2))[..., None]


def _times(xp: Any, w: Any, values: Any) -> Any:
    """w * values, 0 where w is 0: a row that is empty in a part takes nothing from it, NaN included."""
    with np.errstate(invalid="ignore"):
        return xp.where(w == 0, 0, w * values)


def _accumulator(lses: list[Any]) -> str:
    return "float64" if any(part.dtype == np.float64 for part in lses) else "float32"


def _lists(where: str, outs: Any, lses: Any) -> list[list]:
    """outs and lses as lists of parts."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Iterable) or getattr(parts, "ndim", 1) == 0:
            raise CuflashError(
                f"{where}: {name} has the type {type(parts).__name__}\n  Give a list of arrays, one a part."
            )
    return [list(outs), list(lses)]


def _same_number(where: str, outs: list, lses: list) -> None:
    if not outs or len(outs) != len(lses):
        raise CuflashError(f"{where}: {len(outs)} outs, {len(lses)} lses\n  Give one out and one lse a part.")


def _parts(
    where: str, outs: list, lses: list, layout: str, whole: tuple[tuple, tuple] = ((), ())
) -> tuple[list, list, Any]:
    """The parts as NumPy or CuPy arrays of one shape on one device, and that module.

    whole: names of the outs and lses behind those of the parts.
    """
    if not isinstance(layout, str) or layout not in ("bshd", "bhsd"):
        raise CuflashError(f'{where}: layout is {layout!r}\n  Give "bshd" or "bhsd".')
    _same_number(where, outs, lses)
    n_parts = len(outs) - len(whole[0])
    names = {
        name: [*(f"{name} of part {number}" for number in range(n_parts)), *behind]
        for name, behind in zip(("out", "lse"), whole, strict=True)
    }
    found: dict[str, list] = {"out": [], "lse": []}
    devices = set()
    for name, values in (("out", outs), ("lse", lses)):
        for number, value in enumerate(values):
            try:
                array, device = arrays_.convert(value)
            except TypeError as error:
                raise CuflashError(f"{where}: {names[name][number]} {error}\n  Give an array.") from None
            if array.dtype.name not in FLOAT_DTYPES:
                raise CuflashError(
                    f"{where}: {names[name][number]} is {array.dtype.name}\n"
                    f"  Give one of {', '.join(FLOAT_DTYPES)}."
                )
            found[name].append(array)
            devices.add(device)
    if len(devices) > 1:
        names = ", ".join(sorted(device_text(device) for device in devices))
        raise CuflashError(f"{where}: parts on several devices: {names}\n  Bring all parts to one device.")
    shape = found["out"][0].shape
    rows = shape[:-1] if layout == "bhsd" else (*shape[:-3], *shape[-3:-1][::-1])
    for number, (out, lse) in enumerate(zip(found["out"], found["lse"], strict=True)):
        if out.shape != shape or lse.shape != rows or len(shape) not in (3, 4):
            raise CuflashError(
                f"{where}: {names['out'][number]} has shape {out.shape}, {names['lse'][number]} {lse.shape}; "
                f"out of part 0 {shape}\n"
                "  All parts need one shape: out (batch, len_q, heads, head_dim_v), "
                "lse (batch, heads, len_q);\n  packed out (tokens, heads, head_dim_v), lse (heads, tokens)."
            )
    return found["out"], found["lse"], arrays_.module_of(found["out"][0])
