"""Arrays that a call writes: out=, grads= and workspace=."""

from __future__ import annotations

from typing import Any

from cuflash import arrays as arrays_
from cuflash.arrays import SPEC
from cuflash.messages import Call
from cuflash.results import Gradients


def take(call: Call, direction: str, options: dict[str, Any], specs: bool) -> dict[str, Any]:
    """The targets of a call by name, taken into call.arrays: out and lse, or the gradients."""
    given = {}
    if direction == "forward" and options["out"] is not None:
        out = options["out"]
        if isinstance(out, (tuple, list)):
            if len(out) != 2:
                call.fail(
                    f"out= has {len(out)} arrays", "out= is an array, or (out, lse) with return_lse=True."
                )
            given = {
                name: value for name, value in zip(("out", "lse"), out, strict=True) if value is not None
            }
            if not options["return_lse"]:
                call.fail("out=(out, lse) without return_lse=True", "Give return_lse=True, or out= alone.")
        else:
            given = {"out": out}
    if direction == "backward" and options["grads"] is not None:
        given = _gradients(call, options["grads"])
    for name, value in given.items():
        call.take(name, value, specs)
    if options["workspace"] is not None:
        call.take("workspace", options["workspace"], specs)
    return given


def _gradients(call: Call, grads: Any) -> dict[str, Any]:
    if not isinstance(grads, Gradients):
        call.fail(
            f"grads has the type {type(grads).__name__}",
            "grads= is a cuflash.Gradients; its arrays are written.",
        )
    given = {name: value for name, value in grads._asdict().items() if value is not None}
    for name in given:
        if name not in ("dq", "dk", "dv") and name[1:] not in call.arrays:
            call.fail(f"grads has {name}, the call has no {name[1:]}", f"Leave {name} None.")
    return given


def check(call: Call, targets: dict[str, Any], options: dict[str, Any], device: Any) -> None:
    """Every target can be written without touching an input or another target."""
    if "workspace" in call.arrays:
        workspace = call.arrays["workspace"]
        if not workspace.flags.c_contiguous:
            call.fail("workspace is not contiguous", "Give one contiguous run of bytes.", show=("workspace",))
    if device == SPEC:
        return
    written = [*targets, *(["workspace"] if "workspace" in call.arrays else [])]
    for name in written:
        array = call.arrays[name]
        if not getattr(array.flags, "writeable", True):
            call.fail(f"{name} is read-only", "Give an array that may be written.", show=(name,))
        zero = [
            axis
            for axis, (n, s) in enumerate(zip(array.shape, array.strides, strict=True))
            if n > 1 and s == 0
        ]
        if zero and array.size:
            call.fail(
                f"{name} has stride 0 along {call.axes[name][zero[0]]}",
                "Give an array whose elements lie apart, not a broadcast view.",
                show=(name,), mark=((name, zero[0]),),
            )  # fmt: skip
        if arrays_.overlaps_itself(array):
            call.fail(
                f"{name} overlaps itself", f"strides in bytes {array.strides}",
                "Give an array whose elements lie apart.", show=(name,),
            )  # fmt: skip
        check_overlap(call, name, written)


def check_overlap(call: Call, name: str, written: list[str]) -> None:
    """Refuse a target whose memory bounds meet those of an input, or of a target before it."""
    array = call.arrays[name]
    for other, value in call.arrays.items():
        if other in written and written.index(other) >= written.index(name):
            continue
        if arrays_.overlaps(array, value):
            call.fail(
                f"{name} overlaps {other} in memory",
                "Results are written while inputs are read: give an array of its own.", show=(other, name),
            )  # fmt: skip
