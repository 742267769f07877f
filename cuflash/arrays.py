"""Any array a caller may have, brought to NumPy or CuPy without copying; devices, bounds and dtypes.

CuPy is imported only when a CUDA array is met: on a machine without it every NumPy call works.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import sys
from typing import Any

import numpy as np

from cuflash.errors import CuflashError
from cuflash.problem import FLOAT_DTYPES, ArraySpec

HOST = "host"  # device of NumPy arrays; CUDA devices are their number
SPEC = "spec"  # device of arrays that need not exist (cuflash.spec); agrees with every device

# DLPack's DLDeviceType
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13
_DL_BFLOAT = 4  # DLDataTypeCode
_MOST_BYTES = 2**63 - 1  # that strides can reach


def spec(shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> ArraySpec:
    """An array that need not exist, for `explain` and `warmup`.

    | argument | meaning |
    |---|---|
    | shape | in the order the array itself would have |
    | dtype | a name ("bfloat16") or anything np.dtype takes |
    | strides | in elements; None is C-contiguous |

        >>> spec((2, 1024, 8, 64), "bfloat16").strides
        (524288, 512, 64, 1)
    """
    do = "Give one stride per axis, whole numbers, and lengths from 0."
    try:
        lengths = tuple(operator.index(n) for n in shape)
        if strides is None:
            strides = tuple(math.prod(lengths[axis + 1 :]) for axis in range(len(lengths)))
        steps = tuple(operator.index(s) for s in strides)
    except TypeError:
        raise CuflashError(f"spec: shape {shape!r} with strides {strides!r}\n  {do}") from None
    if len(steps) != len(lengths) or any(n < 0 for n in lengths):
        raise CuflashError(f"spec: shape {lengths} with strides {steps}\n  {do}")
    if _n_bytes(lengths, steps) > _MOST_BYTES:
        do = "Strides count bytes in 64 bits: no array is larger than 2^63 bytes."
        raise CuflashError(f"spec: shape {lengths} with strides {steps} is too large\n  {do}")
    return ArraySpec(lengths, dtype_name(dtype), steps)


def _n_bytes(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The most that NumPy would have to count, in elements of 8 bytes: reach, size, and each stride."""
    reach = 1 + sum((n - 1) * abs(stride) for n, stride in zip(shape, strides, strict=True) if n)
    return 8 * max(reach, math.prod(shape), *shape, *(abs(stride) for stride in strides))


def dtype_name(dtype: Any) -> str:
    """Name of anything that means a dtype ("bfloat16", np.float32); CuflashError when it means none."""
    if isinstance(dtype, str) and dtype in FLOAT_DTYPES:
        return dtype
    try:
        if dtype is None:  # float64 to NumPy
            raise TypeError
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        raise CuflashError(f"{dtype!r} is no dtype\n  Give one of {', '.join(FLOAT_DTYPES)}.") from None


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """np.dtype of a name; bfloat16 is ml_dtypes' (CuPy knows it too)."""
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def is_cupy(value: Any) -> bool:
    """Whether value is a cupy.ndarray; never imports CuPy."""
    # another thread may be importing CuPy right now: then nobody has an array of it yet
    return isinstance(value, getattr(sys.modules.get("cupy"), "ndarray", ()))


def module_of(array: Any) -> Any:
    """numpy or cupy: the module whose functions take this array."""
    return sys.modules["cupy"] if is_cupy(array) else np


def device_of(array: Any) -> Any:
    """A context manager in which the functions of `module_of` run where this array is: CuPy's run, and make
    new arrays, on the current device, whichever theirs is."""
    return array.device if is_cupy(array) else contextlib.nullcontext()


def convert(value: Any) -> tuple[Any, Any]:
    """(array, device): value as a NumPy or CuPy array on the same memory; HOST, SPEC or the CUDA device.

    Raises TypeError with the reason, without the array's name, when value cannot be read in place.
    """
    if type(value) is np.ndarray:
        return value, HOST
    if is_cupy(value):
        return value, value.device.id
    if isinstance(value, ArraySpec):
        return _hollow(value), SPEC
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("is a masked array, whose mask would be ignored: give its .data, and mask=")
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray), HOST
    kind = type(value).__module__ + "." + type(value).__qualname__
    try:
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            return _from_dlpack(value)
        if hasattr(value, "__cuda_array_interface__"):
            array = _import_cupy().asarray(value)
            return array, array.device.id
        if hasattr(value, "__array_interface__"):
            return np.asarray(value), HOST
    except (BufferError, RuntimeError, ValueError, AttributeError, LookupError) as error:
        raise TypeError(f"({kind}) cannot be read in place: {error}") from error
    raise TypeError("is None" if value is None else f"has the type {kind.removeprefix('builtins.')}")


def brought(values: list[Any]) -> list[Any]:
    """The same list, arrays of other libraries replaced by NumPy or CuPy arrays on their memory.

    What cannot be converted stays as it is, for check.py to say why.
    """
    found = []
    for value in values:
        is_foreign = type(value) is not np.ndarray and not is_cupy(value)
        if is_foreign and (hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")):
            with contextlib.suppress(TypeError):
                value, _ = convert(value)
        found.append(value)
    return found


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f'is on a CUDA device, and CuPy cannot be imported ({error}): pip install "cuflash[cuda12]"'
        ) from error
    return cupy


def _from_dlpack(value: Any) -> tuple[Any, Any]:
    if getattr(value, "is_neg", bool)():  # PyTorch hands over the numbers without their pending minus
        raise TypeError("is a tensor with its negative bit set: give tensor.resolve_neg()")
    device, number = value.__dlpack_device__()
    if device in (_DL_CUDA, _DL_CUDA_MANAGED):
        cupy = _import_cupy()
        with cupy.cuda.Device(number):  # the exporter orders its work before this device's current stream
            array = cupy.from_dlpack(value)
        return array, number
    if device not in (_DL_CPU, _DL_CUDA_HOST):
        raise TypeError(
            f"is on a device that is neither the CPU nor a CUDA device (DLPack device type {device})"
        )
    if device == _DL_CPU:
        try:
            return np.from_dlpack(value), HOST
        except (BufferError, RuntimeError):
            pass  # perhaps bfloat16, which NumPy does not read; an exporter's refusal comes again below
    return _from_capsule(value.__dlpack__()), HOST


class _DLTensor(ctypes.Structure):
    """DLPack's DLTensor, also the first member of DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _HostMemory:
    """What np.asarray reads; owner lives as long as the array does."""

    def __init__(self, address: int, shape: tuple, strides: tuple | None, typestr: str, owner: Any):
        self.owner = owner
        self.__array_interface__ = dict(
            version=3, data=(address, False), shape=shape, strides=strides, typestr=typestr
        )


def _from_capsule(capsule: Any) -> np.ndarray:
    """A CPU DLPack capsule as a NumPy array; unlike np.from_dlpack it knows bfloat16.

    The capsule is not consumed: it stays the array's base, and calls its own deleter when the array dies.
    """
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    kinds = {0: "i", 1: "u", 2: "f", _DL_BFLOAT: "u", 6: "b"}
    if tensor.code not in kinds or tensor.lanes != 1 or tensor.bits % 8:
        raise TypeError(
            f"has a dtype that NumPy cannot hold (DLPack code {tensor.code}, {tensor.bits} bits); "
            "float8 is planned, not there yet"
        )
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * tensor.bits // 8 for axis in range(tensor.ndim))
    address = (tensor.data or 0) + tensor.byte_offset
    if 0 in shape or not address:
        array = np.empty(shape, f"<{kinds[tensor.code]}{tensor.bits // 8}")
    else:
        typestr = f"<{kinds[tensor.code]}{tensor.bits // 8}"
        array = np.asarray(_HostMemory(address, shape, strides, typestr, capsule))
    return array.view(numpy_dtype("bfloat16")) if tensor.code == _DL_BFLOAT else array


_HOLLOW = np.zeros(1024, np.uint8)
_HOLLOW_START = -_HOLLOW.__array_interface__["data"][0] % 512


def _hollow(spec: ArraySpec) -> np.ndarray:
    """An array with the shape, dtype, strides and alignment of a spec, over a few bytes: never read."""
    dtype = numpy_dtype(spec.dtype)
    start = _HOLLOW_START + (spec.align if spec.align < 256 else 0)
    one = _HOLLOW[start : start + dtype.itemsize].view(dtype)
    strides = tuple(s * dtype.itemsize for s in spec.strides)
    return np.lib.stride_tricks.as_strided(one, spec.shape, strides)


def address(array: Any) -> int:
    """Address of the element at index (0, 0, ...), in bytes."""
    return array.data.ptr if is_cupy(array) else array.__array_interface__["data"][0]


def array_spec(array: Any) -> ArraySpec:
    """Shape, dtype, strides in elements and alignment of a NumPy or CuPy array."""
    itemsize = array.dtype.itemsize
    where = address(array)
    return ArraySpec(
        array.shape,
        array.dtype.name,
        tuple(s // itemsize for s in array.strides),
        min(where & -where, 256) or 256,
    )


def bounds(array: Any) -> tuple[int, int]:
    """[low, high): bytes from the first to past the last element in memory; equal when empty."""
    low = high = address(array)
    if array.size == 0:
        return low, low
    for n, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (n - 1) * stride
        else:
            high += (n - 1) * stride
    return low, high + array.dtype.itemsize


def overlaps(one: Any, other: Any) -> bool:
    """Whether the memory bounds of two arrays on one device meet."""
    low, high = bounds(one)
    other_low, other_high = bounds(other)
    return low < other_high and other_low < high and low < high and other_low < other_high


def overlaps_itself(array: Any) -> bool:
    """Whether two indices of the array lie on one element (strides are whole elements)."""
    axes = sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    if array.size < 2:
        return False
    reach = array.dtype.itemsize
    for stride, n in axes:
        if stride < reach:
            break
        reach += (n - 1) * stride
    else:
        return False
    if axes[0][0] == 0 or array.size > 1 << 22:
        return True
    offsets = np.zeros(1, np.int64)  # interleaved axes: rare, so it is counted
    for stride, n in axes:
        offsets = (offsets[:, None] + stride * np.arange(n)).ravel()
    return np.unique(offsets).size < offsets.size
