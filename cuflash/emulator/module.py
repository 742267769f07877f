"""Compiled kernels in RawModule's calling form, and what a launch tells the runtime."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.errors import CuflashError

MAX_BUFFERS = 64
TRAFFIC = np.dtype([("read", "u8"), ("written", "u8"), ("added", "u8")])
TOTALS = ("shared", "async_shared", "exps", "tensor_flops", "barriers")
COUNTERS = np.dtype([("global", TRAFFIC, MAX_BUFFERS), *[(name, "u8") for name in TOTALS]])
EVENT = np.dtype(
    [
        *[("block", "u4", 3), ("warp", "i4"), ("array", "i4"), ("writes", "i4")],
        *[("step", "u4"), ("n_bytes", "u4"), ("low", "i8"), ("high", "i8")],
    ]
)


@dataclass(frozen=True)
class Options:
    """How launches run.

    seed: order of threads; 0 in order, odd one warp runs ahead, even random.  copies, products: "early" (when
    issued) or "late" (when waited for) for cp.async and TMA, and for wgmma; None: by the seed, each of the
    four combinations in turn.  stall_seconds: CPU time without a barrier that ends a launch.
    """

    seed: int = 0
    copies: str | None = None
    products: str | None = None
    workers: int | None = None
    stall_seconds: float = 60.0
    timeline: bool = False

    def late(self) -> tuple[bool, bool]:
        by_seed = (bool(self.seed & 1), bool(self.seed & 1) != bool(self.seed & 2))
        given = (self.copies, self.products)
        return tuple(s if g is None else g == "late" for g, s in zip(given, by_seed, strict=True))


@dataclass
class Record:
    """What one launch moved: array name -> bytes (read, written, added by atomics); bytes; counts."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem: int
    arrays: dict[str, tuple[int, int, int]]
    shared: int
    async_shared: int
    exps: int
    tensor_flops: int
    barriers: int
    names: tuple[str, ...] = ()
    events: np.ndarray = field(default_factory=lambda: np.empty(0, EVENT))


_options: ContextVar[Options | None] = ContextVar("cuflash_emulator_options", default=None)
_arrays: ContextVar[dict[str, Any] | None] = ContextVar("cuflash_emulator_arrays", default=None)
_records: ContextVar[list[Record] | None] = ContextVar("cuflash_emulator_records", default=None)


@contextlib.contextmanager
def options(**changes: Any) -> Iterator[Options]:
    """Launches inside run with these Options: `with emulator.options(seed=3, copies="late"):`"""
    chosen = replace(_options.get() or Options(), **changes)
    token = _options.set(chosen)
    try:
        yield chosen
    finally:
        _options.reset(token)


@contextlib.contextmanager
def arrays(named: Mapping[str, Any]) -> Iterator[None]:
    """Launches inside may touch these NumPy arrays (None is skipped), and no other memory."""
    token = _arrays.set({**(_arrays.get() or {}), **named})
    try:
        yield
    finally:
        _arrays.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """Collects a Record of each launch inside, in order."""
    records: list[Record] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """np.empty, filled with bytes 0xff: NaN in every float dtype."""
    array = np.empty(shape, ml_dtypes.bfloat16 if str(dtype) == "bfloat16" else dtype)
    array.view(np.uint8).fill(255) if array.ndim else array.fill(np.nan)
    return array


class _Request(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("n_buffers", ctypes.c_int64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("late_copies", ctypes.c_uint32),
        ("late_products", ctypes.c_uint32),
        ("n_workers", ctypes.c_uint32),
        ("timeline", ctypes.c_uint32),
        ("async_proxy", ctypes.c_uint32),
        ("blocks_per_sm", ctypes.c_uint32),
        ("stall_seconds", ctypes.c_double),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("number", ctypes.c_int64),
        ("data", ctypes.c_uint64),
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
    ]


@functools.cache
def load_runtime(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer = ctypes.c_void_p
    for name, result, types in (
        ("start", pointer, [pointer]),
        ("wait", ctypes.c_int, [pointer, ctypes.c_int]),
        ("stop", None, [pointer]),
        ("blocks_done", ctypes.c_uint64, [pointer]),
        ("n_events", ctypes.c_uint64, [pointer]),
        ("finish", None, [pointer, pointer, pointer, ctypes.c_char_p, ctypes.c_uint64]),
    ):
        function = getattr(library, f"emulator_{name}")
        function.restype, function.argtypes = result, types
    return library


class Module:
    """A compiled kernel file; get_function as cupy.RawModule has it."""

    def __init__(self, path: Path, runtime: Path):
        self.path = path
        self._runtime = load_runtime(runtime)
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise CuflashError(f"the emulator cannot load {path}: {error}") from error

    def get_function(self, name: str) -> Function:
        try:
            return Function(name, self._library, self._runtime)
        except AttributeError:
            raise CuflashError(f"{name} is not in {self.path.name}") from None


class Function:
    """One kernel: call it as a cupy.RawKernel, `kernel(grid, block, (args,), shared_mem=n_bytes)`.

    Each element of args is the bytes of one parameter: a NumPy scalar, a structured scalar, an array of one
    element or bytes.  buffers: name -> array the kernel may touch, besides those of `emulator.arrays`.
    progress(blocks done, blocks) is called now and then.  It returns when the launch is over, and raises
    CuflashError when a thread did something wrong.
    """

    def __init__(self, name: str, library: ctypes.CDLL, runtime: ctypes.CDLL):
        self.name = name
        self.max_dynamic_shared_size_bytes = 0  # as RawKernel has it; every launch may use what it asks for
        self._runtime = runtime
        self._entry = ctypes.cast(getattr(library, f"cuflash_call_{name}"), ctypes.c_void_p).value
        sizes = (ctypes.c_uint64 * 64)()
        count = getattr(library, f"cuflash_sizes_{name}")(sizes)
        self.parameter_bytes = tuple(sizes[:count])
        self._async_proxy = ctypes.c_int.in_dll(library, "cuflash_async_proxy").value
        self._blocks_per_sm = ctypes.c_int.in_dll(library, f"cuflash_blocks_{name}").value
        try:
            self.cluster = ctypes.c_int.in_dll(library, f"{name}_cluster").value
        except ValueError:
            self.cluster = 1

    def __call__(
        self,
        grid: Any,
        block: Any,
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        buffers: Mapping[str, Any] | None = None,
        progress: Any = None,
    ) -> None:
        grid, block = _three(grid), _three(block)
        chosen = _options.get() or Options()
        self._refuse(grid, block, shared_mem)
        parameters, _keep = self._parameters(args)
        memory, names = _buffers({**(_arrays.get() or {}), **(buffers or {})})
        late_copies, late_products = chosen.late()
        request = _Request(
            kernel=self.name.encode(),
            entry=self._entry,
            parameters=ctypes.addressof(parameters),
            buffers=ctypes.addressof(memory),
            n_buffers=len(names),
            grid=(ctypes.c_uint32 * 3)(*grid),
            block=(ctypes.c_uint32 * 3)(*block),
            shared_bytes=shared_mem,
            cluster=self.cluster,
            seed=chosen.seed,
            late_copies=late_copies,
            late_products=late_products,
            n_workers=chosen.workers or len(os.sched_getaffinity(0)),
            timeline=chosen.timeline,
            async_proxy=self._async_proxy,
            blocks_per_sm=self._blocks_per_sm,
            stall_seconds=chosen.stall_seconds,
        )
        counters, events, error = self._run(request, progress)
        if error:
            raise CuflashError(error)
        records = _records.get()
        if records is not None:
            records.append(_record(self.name, grid, block, shared_mem, names, counters, events))

    def _run(self, request: _Request, progress: Any) -> tuple[np.ndarray, np.ndarray, str]:
        runtime = self._runtime
        total = int(np.prod(request.grid[:], dtype=np.int64))
        handle = runtime.emulator_start(ctypes.byref(request))
        try:
            while not runtime.emulator_wait(handle, 50):  # between two waits Python sees Ctrl-C
                if progress is not None:
                    progress(runtime.emulator_blocks_done(handle), total)
            if progress is not None:
                progress(total, total)
        except BaseException:
            runtime.emulator_stop(handle)
            raise
        finally:
            counters = np.zeros((), COUNTERS)
            events = np.empty(runtime.emulator_n_events(handle), EVENT)
            message = ctypes.create_string_buffer(16384)
            runtime.emulator_finish(handle, counters.ctypes.data, events.ctypes.data, message, len(message))
        return counters, events, message.value.decode(errors="replace")

    def _refuse(self, grid, block, shared_mem) -> None:
        n_threads = block[0] * block[1] * block[2]
        limits = (2**31 - 1, 65535, 65535)
        if min(grid) < 1 or any(g > limit for g, limit in zip(grid, limits, strict=True)):
            raise CuflashError(f"{self.name}: grid {grid} is outside (1, 1, 1) to {limits}")
        if min(block) < 1 or n_threads > 1024:
            raise CuflashError(f"{self.name}: block {block} has {n_threads} threads; needs 1 to 1024")
        if not 0 <= shared_mem <= 232448:
            raise CuflashError(f"{self.name}: {shared_mem} bytes of shared memory; needs at most 232448")
        if grid[0] % self.cluster:
            raise CuflashError(f"{self.name}: grid {grid} is no multiple of its cluster, {self.cluster}")

    def _parameters(self, args):
        blobs = [a if isinstance(a, bytes) else np.asarray(a).tobytes() for a in args]
        if tuple(map(len, blobs)) != self.parameter_bytes:
            raise CuflashError(
                f"{self.name}: arguments of {tuple(map(len, blobs))} bytes; needs {self.parameter_bytes}"
            )
        pointers = (ctypes.c_void_p * max(1, len(blobs)))()
        keep = []
        for i, blob in enumerate(blobs):
            room = np.empty(len(blob) + 128, np.uint8)  # 128-aligned, for any type
            start = -room.ctypes.data % 128
            room[start : start + len(blob)] = np.frombuffer(blob, np.uint8)
            pointers[i] = room.ctypes.data + start
            keep.append(room)
        return pointers, keep


def _three(sizes: Any) -> tuple[int, int, int]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(int(s) for s in sizes)
    return (*sizes, 1, 1, 1)[:3]


def _buffers(named: dict[str, Any]):
    """Arrays that are one and the same memory get one name, "k = v": their bytes cannot be told apart."""
    ranges: dict[tuple[int, int, int], list[str]] = {}
    for name, array in named.items():
        if array is not None and array.size:
            low, high = np.lib.array_utils.byte_bounds(array)
            ranges.setdefault((array.ctypes.data, low, high), []).append(name)
    if len(ranges) > MAX_BUFFERS:
        raise CuflashError(f"{len(ranges)} arrays; the emulator keeps track of at most {MAX_BUFFERS}")
    names = [" = ".join(same) for same in ranges.values()]
    buffers = (_Buffer * max(1, len(ranges)))()
    for i, ((data, low, high), name) in enumerate(zip(ranges, names, strict=True)):
        buffers[i] = _Buffer(name.encode(), i, data, low, high)
    return buffers, names


def _record(name, grid, block, shared_mem, names, counters, events) -> Record:
    moved = {n: tuple(int(x) for x in counters["global"][i]) for i, n in enumerate(names)}
    totals = {n: int(counters[n]) for n in TOTALS}
    return Record(name, grid, block, shared_mem, moved, **totals, names=tuple(names), events=events)
