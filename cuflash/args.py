"""kernels/lib/args.cuh as a NumPy dtype, and a record of it filled from a plan and its operands.

The C++ files are the only place where the layout is written down: this module reads them.  maps.cuh puts
tensor maps behind Args; maps.py fills them in.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from cuflash import tensormap
from cuflash.build import kernels_directory, strip_comments
from cuflash.errors import CuflashError
from cuflash.problem import Operands, Problem

UNBOUNDED = 1 << 61  # = positions.cuh: a window side of None; query_offset is clamped to it
BROADCAST = 1 << 62  # = args.cuh: rows or cols of a score array along a broadcast axis
_SCALARS = {
    "u8": "u1", "u16": "u2", "u32": "u4", "u64": "u8", "i32": "i4", "i64": "i8",
    "float": "f4", "double": "f8",
}  # fmt: skip
_STRUCT = re.compile(r"struct\s+(?:alignas\((\d+)\)\s+)?(\w+)\s*\{(.*?)\};", re.S)
_MAP = re.compile(r"^\s*TensorMap\s+(\w+);", re.M)
_FIELD = re.compile(r"^(?:const\s+)?(\w+)\s*(\*?)\s*(\w+)(?:\[(\d+)\])?$")

# Field of Args -> name of the operand it describes.
TENSORS = {"Q": "q", "K": "k", "V": "v", "O": "out", "dO": "dout", "dQ": "dq", "dK": "dk", "dV": "dv"}
PER_ROW = {"lse": "lse", "dlse": "dlse"}
SCORES = {"bias": "bias", "mask": "mask", "dbias": "dbias"}
PER_HEAD = {"alibi": "alibi_slopes", "dalibi": "dalibi_slopes", "sink": "sink", "dsink": "dsink"}
LENGTHS = ("query_lengths", "key_lengths", "cu_seqlens_q", "cu_seqlens_k")
# Fields that describe a slot of the workspace of the same name, in canonical axes.
TENSOR_SLOTS = ("dQ_sum", "dK_sum", "dV_sum")
PER_ROW_SLOTS = ("delta", "lse_log2")
SLOTS = (*TENSOR_SLOTS, *PER_ROW_SLOTS)
OPERANDS = TENSORS | PER_ROW | SCORES | PER_HEAD | {name: name for name in LENGTHS}
_FIELD_OF = {name: field for field, name in OPERANDS.items()} | {name: name for name in SLOTS}


def parse(text: str) -> dict[str, np.dtype]:
    """Every struct of a header, as a dtype with C's padding.

    One field a line; scalars of platform.cuh, pointers, arrays, and structs defined before.
    """
    structs: dict[str, np.dtype] = {}
    for _, name, body in _STRUCT.findall(strip_comments(text)):
        fields: list[Any] = []
        for statement in filter(None, (line.strip() for line in body.split(";"))):
            match = _FIELD.match(statement)
            if not match or not (match[2] or match[1] in _SCALARS or match[1] in structs):
                raise CuflashError(f"args.cuh: struct {name}: {statement!r} is not a field this reader knows")
            kind, pointer, field, count = match.groups()
            dtype = np.dtype("u8") if pointer else structs.get(kind, np.dtype(_SCALARS.get(kind, "u8")))
            fields.append((field, dtype, (int(count),)) if count else (field, dtype))
        structs[name] = np.dtype(fields, align=True)
    return structs


@functools.cache
def args_dtype() -> np.dtype:
    """struct Args."""
    return parse((kernels_directory() / "lib" / "args.cuh").read_text())["Args"]


def args_bytes() -> int:
    """sizeof(Args)."""
    return args_dtype().itemsize


@functools.cache
def map_offsets() -> dict[str, int]:
    """Name of a tensor map -> its byte offset in struct MappedArgs; "mapped": of the bits behind them."""
    names = _MAP.findall(strip_comments((kernels_directory() / "lib" / "maps.cuh").read_text()))
    start = -(-args_bytes() // 64) * 64
    return {name: start + tensormap.BYTES * number for number, name in enumerate((*names, "mapped"))}


def mapped_args_bytes() -> int:
    """sizeof(MappedArgs)."""
    return map_offsets()["mapped"] + 64  # a u64, and up to the next multiple of 64


@functools.cache
def offset_of(path: str) -> int:
    """Byte offset of a field: offset_of("Q.data"), offset_of("workspace")."""
    dtype, offset = args_dtype(), 0
    for name in path.split("."):
        dtype, start = dtype.fields[name][:2]
        offset += start
    return offset


def strides_of(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(stride // array.itemsize for stride in array.strides)


def record_of(problem: Problem, operands: Operands) -> np.ndarray:
    """Args of a call, all but the addresses: sizes, strides, numbers.  A 0-d array of args_dtype().

    operands: canonical views; every result array is there.  Strides count elements; 0 along axes of length 1.
    """
    record = np.zeros((), args_dtype())
    for name in ("batch", "len_q", "len_k", "heads", "heads_k", "head_dim", "head_dim_v", "scale"):
        record[name] = getattr(problem, name)
    record["softcap"] = problem.softcap or 0.0
    left, right = problem.window
    record["window_left"] = UNBOUNDED if left is None else min(left, UNBOUNDED)
    record["window_right"] = UNBOUNDED if right is None else min(right, UNBOUNDED)
    record["offset_is_given"] = problem.query_offset is not None
    record["query_offset"] = max(-UNBOUNDED, min(problem.query_offset or 0, UNBOUNDED))
    record["n_splits"] = 1
    if problem.dropout is not None:
        record["dropout_threshold"] = dropout_threshold(problem.dropout)
        record["dropout_scale"] = 1.0 / (1.0 - problem.dropout)
        for name, shift in zip(("batch0", "head0", "i0", "j0"), operands.counter_shift, strict=True):
            record[f"dropout_{name}"] = shift
    for name in OPERANDS.values():
        array = operand(operands, name)
        if array is not None:
            fill(record, name, array)
    return record


def operand(operands: Operands, name: str) -> Any:
    """An array of the call by name, gradients included; None when it is not there."""
    return getattr(operands, name) if hasattr(operands, name) else operands.grads.get(name)


def dropout_threshold(p: float) -> int:
    """A weight is kept when its Philox word is at least this."""
    return min(round(p * 2**32), 2**32 - 1)


def fill(record: np.ndarray, name: str, array: Any) -> None:
    """Strides and sizes of one operand or result, a canonical view, into its field of Args."""
    field = record[_FIELD_OF[name]]
    strides = [0 if n == 1 else s for s, n in zip(strides_of(array), array.shape, strict=True)]
    if name in TENSORS.values() or name in TENSOR_SLOTS:
        field["batch"], field["row"], field["head"] = strides[:3]
        steps = [s * array.itemsize for s in strides[:3]]
        is_whole = all(n % 16 == 0 for n in (*steps, array.shape[3] * array.itemsize, address(array)))
        field["vector_bytes"] = 16 if is_whole else 0
    elif name in PER_ROW.values() or name in PER_ROW_SLOTS:
        field["batch"], field["head"], field["row"] = strides
    elif name in SCORES.values():
        field["batch"], field["head"], field["row"], field["col"] = strides
        field["rows"] = BROADCAST if array.shape[2] == 1 else array.shape[2]
        field["cols"] = BROADCAST if array.shape[3] == 1 else array.shape[3]
    elif name in PER_HEAD.values():
        field["batch"] = strides[0] if array.ndim == 2 else 0
        field["head"] = strides[-1]
    else:
        field["stride"], field["bytes"] = strides_of(array)[0], array.itemsize


def address(array: Any) -> int:
    """Address of the first element."""
    interface = getattr(array, "__array_interface__", None)
    return interface["data"][0] if interface is not None else array.data.ptr
