"""Lengths of a call: query_lengths, key_lengths and the cumulative lengths of packed sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import arrays as arrays_
from cuflash.arrays import HOST, SPEC
from cuflash.messages import Call, device_text

LENGTHS = ("query_lengths", "key_lengths", "cu_seqlens_q", "cu_seqlens_k")


def take_lengths(call: Call, options: dict, device: Any) -> dict[str, Any]:
    """The lengths given, as integer arrays of one axis, NumPy or on the call's device."""
    lengths = {}
    for name in LENGTHS:
        value = options[name]
        if value is None:
            continue
        do = f"{name} is a list, a NumPy or a device array of whole numbers."
        if isinstance(value, (list, tuple, range)):
            try:
                array, where = np.asarray(value if len(value) else np.zeros(0, np.int64)), HOST
            except (ValueError, OverflowError, TypeError):
                call.fail(f"{name} is no list of whole numbers", do)
        else:
            try:
                array, where = arrays_.convert(value)
            except TypeError as error:
                call.fail(f"{name} {error}", do)
        call.arrays[name], call.devices[name] = array, where
        call.axes[name] = ("batch + 1",) if name.startswith("cu_") else ("batch",)
        if array.ndim != 1:
            call.fail(f"{name} has {array.ndim} axes, needs 1", do, show=(name,), mark=((name, "rank"),))
        if array.dtype.kind not in "iu":
            call.fail(f"{name} is {array.dtype.name}", do, show=(name,), mark=((name, "dtype"),))
        if where not in (HOST, SPEC, device) and device != SPEC:
            call.fail(
                f"{name} is on {device_text(where)}, q on {device_text(device)}",
                "Lengths live on the host or on the device of q.", show=("q", name), mark=((name, "device"),),
            )  # fmt: skip
        if where not in (HOST, SPEC) and array.dtype.name not in ("int32", "int64"):
            call.fail(
                f"{name} on the device is {array.dtype.name}",
                f"Give int32 or int64: {name}.astype(cupy.int32).", show=(name,), mark=((name, "dtype"),),
            )  # fmt: skip
        if name.startswith("cu_") and array.shape[0] == 0:
            call.fail(f"{name} is empty", "Cumulative lengths of n sequences are n + 1 numbers, the first 0.")
        lengths[name] = array
        del call.arrays[name]
    if "cu_seqlens_q" in lengths and lengths["cu_seqlens_q"].shape != lengths["cu_seqlens_k"].shape:
        n_q, n_k = (lengths[name].shape[0] for name in ("cu_seqlens_q", "cu_seqlens_k"))
        call.fail(
            f"cu_seqlens_q has {n_q} numbers, cu_seqlens_k has {n_k}",
            "Both hold one number per sequence and one more: the same sequences in q and in k.",
        )
    return lengths


def check_lengths(call: Call, lengths: dict[str, Any], packed: bool) -> tuple[int, int]:
    """Check host lengths; returns the longest (query, key) length that can occur, as far as the host knows.

    With cumulative lengths on the device nothing is known: 0.
    """
    longest = {"q": 0, "k": 0}
    for side in "qk":
        if not packed:
            longest[side] = call.sizes[f"len_{side}"][0]
    batch = call.sizes["batch"][0]
    for name, value in lengths.items():
        side = "q" if name in ("query_lengths", "cu_seqlens_q") else "k"
        axis = f"{'tokens' if packed else 'len'}_{side}"
        limit, by = call.sizes[axis]
        if not packed and value.shape[0] != batch:
            call.fail(
                f"{name} has {value.shape[0]} entries, q has batch {batch}",
                "Give one length per batch entry.",
                show=("q",),
            )
        if type(value) is not np.ndarray or call.devices[name] == SPEC:
            continue  # device values are trusted, and clamped by the kernels
        wrong = (value < 0) | (value > limit)
        if wrong.any():
            at = int(wrong.argmax())
            call.fail(
                f"{name}[{at}] is {value[at]}, {by} has {axis} {limit}",
                f"Every entry lies between 0 and {axis}.",
                show=(by,), mark=((by, call.axes[by].index(axis)),),
            )  # fmt: skip
        if packed:
            longest[side] = _check_cumulative(call, name, value)
        if value.dtype.name not in ("int32", "int64"):
            lengths[name] = value.astype(np.int64)
    return longest["q"], longest["k"]


def _check_cumulative(call: Call, name: str, value: np.ndarray) -> int:
    """Longest sequence of cumulative lengths that start at 0 and do not decrease."""
    if value[0] != 0:
        call.fail(f"{name}[0] is {value[0]}", "Cumulative lengths start at 0.")
    steps = np.diff(value.astype(np.int64))
    if (steps < 0).any():
        at = int((steps < 0).argmax()) + 1
        call.fail(
            f"{name} decreases: {name}[{at}] is {value[at]} after {value[at - 1]}",
            "Cumulative lengths never decrease.",
        )
    return int(steps.max(initial=0))
