"""Tensor maps: how TMA (kernels/lib/tma.cuh) is told about an array.

A map is 128 bytes: element type, address, up to five axes with strides, the box one instruction copies, and
its swizzle.  Only the address changes from call to call, so a Layout keeps everything else ready: encoding
one costs 2 us, and the newest addresses are remembered.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from cuflash import driver
from cuflash.errors import CuflashError

BYTES = 128
_DRIVER_DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "int32": 3, "uint8": 0}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes of a line -> the driver's code
_EMULATED_MAGIC = 0x50414D54
_REMEMBERED = 256


AXES = ("batch", "row", "head", "dim")  # of a canonical view


def why_not(shape: Sequence[int], strides: Sequence[int], itemsize: int, align: int) -> str | None:
    """Why TMA cannot address an array, a canonical view; None: it can.

    strides count elements; align: what the address is a multiple of, in bytes.

    >>> why_not((1, 100, 3, 20), (6000, 60, 20, 1), 2, 256)
    'the stride of its head axis is 40 bytes, no multiple of 16'
    """
    if align % 16:
        return "its address is no multiple of 16 bytes"
    for axis, length, stride in zip(AXES, shape, strides, strict=True):
        n_bytes = stride * itemsize
        if length <= 1 or axis == "dim":
            continue
        if n_bytes < 0:
            return f"the stride of its {axis} axis is negative"
        if n_bytes % 16:
            return f"the stride of its {axis} axis is {n_bytes} bytes, no multiple of 16"
        if n_bytes >= 2**40:
            return f"the stride of its {axis} axis is {n_bytes} bytes, more than TMA counts"
    if shape[-1] > 1 and strides[-1] != 1:
        return f"the stride of its last axis is {strides[-1]} elements, not 1"
    return None


class Layout:
    """Everything of a tensor map but the address.

    dtype: element type.  dims: axis lengths in elements, contiguous axis first.  strides: bytes from one
    index to the next, of all axes but the first.  box: elements one instruction copies, per axis.  swizzle:
    128, 64, 32 or 0 bytes; a swizzled box's first axis is at most that wide.  emulated: the map is for the
    emulator; else the driver encodes it.

    >>> rows = Layout("bfloat16", dims=(64, 4096), strides=(128,), box=(64, 128), swizzle=128)
    >>> rows.encode(array.data.ptr)                        # 128 bytes for a kernel parameter
    """

    def __init__(
        self,
        dtype: str,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int = 128,
        emulated: bool = False,
    ):
        self.dtype, self.dims, self.strides = dtype, tuple(dims), tuple(strides)
        self.box, self.swizzle, self.emulated = tuple(box), swizzle, emulated
        self.itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        why = self._refuse()
        if why:
            raise CuflashError(f"tensor map: {why}\n  {self!r}")
        self._known: dict[int, bytes] = {}
        if not emulated:
            self._prepare()

    def __repr__(self) -> str:
        return (
            f"Layout({self.dtype!r}, dims={self.dims}, strides={self.strides}, box={self.box}, "
            f"swizzle={self.swizzle})"
        )

    @property
    def box_bytes(self) -> int:
        """What one load credits to its mbarrier, in bounds or not."""
        return int(np.prod(self.box, dtype=np.int64)) * self.itemsize

    def encode(self, address: int) -> bytes:
        """The 128 bytes for an array whose element 0 is at `address`, a multiple of 16."""
        known = self._known.get(address)
        if known is None:
            if address % 16:
                raise CuflashError(f"tensor map: address {address:#x} is no multiple of 16\n  {self!r}")
            known = self._describe(address) if self.emulated else self._ask_driver(address)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[address] = known
        return known

    def _refuse(self) -> str | None:
        rank = len(self.dims)
        if self.dtype not in _DRIVER_DTYPES:
            return f"dtype {self.dtype}; needs one of {', '.join(_DRIVER_DTYPES)}"
        if not 2 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            return "needs 2 to 5 axes, a box of as many, and one stride fewer"
        if self.swizzle not in _SWIZZLES:
            return f"swizzle {self.swizzle}; needs 0, 32, 64 or 128 bytes"
        if any(not 1 <= n <= 2**32 for n in self.dims):
            return "an axis is shorter than 1 or longer than 2^32"
        if any(s % 16 or not 0 <= s < 2**40 for s in self.strides):
            return "strides must be multiples of 16 bytes from 0 to 2^40"
        if any(not 1 <= n <= 256 for n in self.box):
            return "a box has 1 to 256 elements an axis"
        inner = self.box[0] * self.itemsize
        if inner % 16 or (self.swizzle and inner > self.swizzle):
            return f"a box line of {inner} bytes; needs a multiple of 16, at most the swizzle"
        return None

    def _describe(self, address: int) -> bytes:
        """What copies.cpp reads (TensorMapData)."""
        rank = len(self.dims)
        is_float = self.dtype in ("float16", "float32", "bfloat16")
        head = struct.pack(
            "<IBBBBQ", _EMULATED_MAGIC, self.itemsize, rank, _SWIZZLES[self.swizzle], is_float, address
        )
        dims = struct.pack("<5Q", *self.dims, *[1] * (5 - rank))
        strides = struct.pack("<4Q", *self.strides, *[0] * (5 - rank))
        box = struct.pack("<5H", *self.box, *[1] * (5 - rank))
        return (head + dims + strides + box).ljust(BYTES, b"\0")

    def _prepare(self) -> None:
        rank = len(self.dims)
        room = np.zeros(BYTES + 64, np.uint8)  # the driver wants a 64-byte aligned place
        self._room = room[-room.ctypes.data % 64 :][:BYTES]
        self._address = ctypes.c_void_p()
        self._arguments = (
            ctypes.c_void_p(self._room.ctypes.data),
            ctypes.c_int(_DRIVER_DTYPES[self.dtype]),
            ctypes.c_uint32(rank),
            self._address,
            (ctypes.c_uint64 * rank)(*self.dims),
            (ctypes.c_uint64 * (rank - 1))(*self.strides),
            (ctypes.c_uint32 * rank)(*self.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),  # not interleaved
            ctypes.c_int(_SWIZZLES[self.swizzle]),
            ctypes.c_int(3),  # L2 fetches 256 bytes
            ctypes.c_int(0),  # zeros outside the array
        )

    def _ask_driver(self, address: int) -> bytes:
        self._address.value = address
        status = driver.function("cuTensorMapEncodeTiled")(*self._arguments)
        if status:
            raise CuflashError(f"tensor map: cuTensorMapEncodeTiled returned {status}\n  {self!r}")
        return self._room.tobytes()
