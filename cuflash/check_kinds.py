"""Devices and dtypes of the arrays of a call: one device, and each array the dtype its role allows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuflash import check_options
from cuflash.arrays import HOST, SPEC
from cuflash.messages import Call, device_text
from cuflash.problem import FLOAT_DTYPES


def check_devices(call: Call) -> Any:
    """The one device of all arrays: HOST, SPEC or a CUDA device number."""
    device = call.devices["q"]
    for name, other in call.devices.items():
        if device == SPEC:
            device = other
        if other in (device, SPEC):
            continue
        show, mark = tuple(dict.fromkeys(("q", name))), ((name, "device"),)
        if HOST in (other, device):
            call.fail(
                f"{name} is on {device_text(other)}, q on {device_text(device)}",
                "All arrays of a call live on one device: cupy.asarray copies to the GPU, cupy.asnumpy back.",
                show=show, mark=mark,
            )  # fmt: skip
        call.fail(
            f"{name} is on {device_text(other)}, q on {device_text(device)}",
            "All arrays of a call live on one device; one call over several GPUs is planned, not there yet.",
            show=show, mark=mark,
        )  # fmt: skip
    return device


@functools.lru_cache
def _name_of(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name} in the other byte order"


def check_dtypes(call: Call, direction: str, options: dict, targets: dict) -> tuple[str, str]:
    """(dtype, out_dtype), every array's dtype checked against what its role allows."""
    given = {name: _name_of(array.dtype) for name, array in call.arrays.items()}
    dtype = given["q"]
    accumulator = "float64" if dtype == "float64" else "float32"
    out_dtype = check_options.out_dtype(call, options["out_dtype"]) or dtype
    fixed = {name: accumulator for name in ("lse", "dlse", "alibi_slopes", "sink", "dsink", "dalibi_slopes")}
    fixed |= {"mask": "bool", "workspace": "uint8", "dbias": given.get("bias"), "k": dtype, "v": dtype}
    fixed |= {name: out_dtype for name in ("dq", "dk", "dv")}
    if direction == "forward":
        fixed["out"] = out_dtype
    for name, got in given.items():
        wants = fixed.get(name)
        if name in ("mask", "workspace") or got in FLOAT_DTYPES:
            if wants in (None, got):
                continue
            _fail_dtype(call, name, got, wants, targets)
        if got.startswith("float8"):
            do = "float8 is planned, not there yet: give float16 or bfloat16."
        elif name == "bias" and got == "bool":
            do = "A boolean array is a mask: give it as mask= (True = attend)."
        elif got.startswith(("int", "uint", "bool")):
            do = f"Give {wants or 'one of ' + ', '.join(FLOAT_DTYPES)}; nothing is converted."
        else:
            do = f"Give {wants or 'one of ' + ', '.join(FLOAT_DTYPES)}."
        call.fail(f"{name} is {got}", do, show=(name,), mark=((name, "dtype"),))
    return dtype, out_dtype


def _fail_dtype(call: Call, name: str, got: str, wants: str, targets: dict) -> None:
    """An array has a dtype that is none of its business."""
    mark = ((name, "dtype"),)
    if name in ("k", "v"):
        call.fail(
            f"{name} is {got}, q is {wants}",
            "q, k and v need the same dtype.",
            show=("q", "k", "v"),
            mark=mark,
        )
    if name == "mask":
        call.fail(
            f"mask is {got}, needs bool", "mask is boolean, True = attend; what is added to scores is bias=.",
            show=("mask",), mark=mark,
        )  # fmt: skip
    if name in targets and name in ("out", "dq", "dk", "dv"):
        call.fail(
            f"{name} is {got}, the result is {wants}",
            f'Give a {wants} array, or out_dtype="{got}".', show=("q", name), mark=mark,
        )  # fmt: skip
    if name == "dbias":
        call.fail(
            f"dbias is {got}, bias is {wants}",
            "dbias has the dtype of bias.",
            show=("bias", "dbias"),
            mark=mark,
        )
    if name == "workspace":
        call.fail(
            f"workspace is {got}, needs uint8", "Give plan.workspace_bytes of uint8.", show=(name,), mark=mark
        )
    call.fail(
        f"{name} is {got}, needs {wants}",
        f"{name} is float32, and float64 when q, k and v are float64.", show=("q", name), mark=mark,
    )  # fmt: skip
