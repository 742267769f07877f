"""Where a plan's kernels run: on a GPU through CuPy, or on the CPU in the emulator.

launch.py knows only this interface, so that the emulator runs the same code as a GPU:

| member | meaning |
|---|---|
| is_current(), device | whether launches may be made right now; a context manager in which they may |
| empty(shape, dtype) | a new C-contiguous array; dtype is a np.dtype |
| scratch(n_bytes) | on a GPU: new memory without an array around it; .ptr is its address |
| pointer(array) | address of its first element |
| load(launch) | what `launch_all` takes for a launch; compiled and loaded once |
| launch_all(loaded, args, buffers, progress) | start every kernel with one Args struct |
| zero(address, n_bytes) | set to zero bytes, in stream order |
| copy(source, target) | elementwise, equal shapes, in stream order |
| copy_lengths(values, address) | host int64 numbers to an address, in stream order, capture-safe |
| blocks(mask) | (indptr, indices) of a BlockMask where kernels can read them |
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from typing import Any

import numpy as np

from cuflash import build, driver
from cuflash.devices import Device
from cuflash.errors import CuflashError
from cuflash.plan import Launch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 * 1024  # what a kernel may use without asking
_OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_LENGTHS_AT_ONCE = 480  # = kernels/pass_lengths.cu: numbers that fit into 4 KiB of kernel arguments


class Cuda:
    """One GPU: its loaded modules and CuPy's current stream of it, be it the current device or not."""

    def __init__(self, device: Device) -> None:
        import cupy
        from cupy.cuda import driver, function, runtime

        self._cupy, self._driver, self._function, self._runtime = cupy, driver, function, runtime
        self._ndarray, self.scratch = cupy.ndarray, cupy.cuda.alloc
        self.index = device.index
        self.device = _Entered(cupy, self.index)
        self._arch = device.arch
        self._current_device, self._current_stream = runtime.getDevice, cupy.cuda.get_current_stream
        self._modules: dict[build.Job, Any] = {}
        self._functions: dict[Any, int] = {}
        self._lock = threading.Lock()

    def is_current(self) -> bool:
        return self._current_device() == self.index

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return self._ndarray(shape, dtype)

    @staticmethod
    def pointer(array: Any) -> int:
        return array.data.ptr

    def load(self, launch: Launch) -> tuple[int, ...] | Overlapping:
        """(CUfunction, grid, block, shared bytes) as cuLaunchKernel takes them; or what overlaps."""
        known = launch.step.file, launch.params, launch.name
        function = self._functions.get(known)
        if function is None:
            function = self._functions[known] = self._entry(launch.job, launch.name, launch.smem_bytes)
        loaded = function, *launch.grid, *launch.block, launch.smem_bytes
        return Overlapping(loaded) if launch.overlaps else loaded

    def _entry(self, job: build.Job, name: str, smem_bytes: int) -> int:
        """An entry point of a module that is loaded once on this GPU."""
        built = build.compile(job)
        with self._lock, self.device:
            module = self._modules.get(job)
            if module is None:
                module = self._function.Module()
                module.load(built.path.read_bytes())
                self._modules[job] = module
            pointer = module.get_function(name).ptr
            if smem_bytes > _DEFAULT_SHARED:
                self._driver.funcSetAttribute(pointer, _MAX_DYNAMIC_SHARED, smem_bytes)
        return pointer

    def stream(self) -> int:
        return self._current_stream(self.index).ptr

    def launch_all(
        self, loaded: list[tuple[int, ...]], args: ArgsBuffer, buffers: Any = None, progress: Any = None
    ) -> None:
        """The driver copies the struct of args during each call, so it may be reused at once."""
        stream, launch_kernel = self.stream(), self._driver.launchKernel
        for one in loaded:
            try:
                if type(one) is tuple:
                    launch_kernel(*one, stream, args.parameters, 0)
                elif code := one(stream, args.parameters):
                    raise self._driver.CUDADriverError(code)
            except self._driver.CUDADriverError as error:
                _, *sizes, shared = one if type(one) is tuple else one.loaded
                raise CuflashError(
                    f"a kernel could not be launched on device {self.index}: {error}\n"
                    f"  grid {tuple(sizes[:3])}, block {tuple(sizes[3:])}, {shared} bytes of shared memory"
                ) from None

    def zero(self, address: int, n_bytes: int) -> None:
        self._runtime.memsetAsync(address, 0, n_bytes, self.stream())

    def copy(self, source: Any, target: Any) -> None:
        bits = (
            f"uint{8 * source.itemsize}"  # no conversion: bits are copied, and 16-bit floats need no header
        )
        target.view(bits)[...] = source.view(bits)

    def copy_lengths(self, values: np.ndarray, address: int) -> None:
        """By kernel arguments: no pinned memory to keep alive, nothing that a capture could not hold."""
        handle = self._lengths_entry()
        for start in range(0, values.size, _LENGTHS_AT_ONCE):
            part = values[start : start + _LENGTHS_AT_ONCE]
            words = np.zeros(2 + _LENGTHS_AT_ONCE, np.int64)
            words[0], words[1] = address + 8 * start, part.size
            words[2 : 2 + part.size] = part
            struct = ArgsBuffer(bytearray(words.tobytes()))
            self._driver.launchKernel(handle, 1, 1, 1, 128, 1, 1, 0, self.stream(), struct.parameters, 0)

    @functools.cache  # noqa: B019  (backends live as long as the process)
    def _lengths_entry(self) -> int:
        return self._entry(build.Job("pass_lengths", (), build.target_of(self._arch)), "pass_lengths", 0)

    def blocks(self, mask: Any) -> tuple[Any, Any]:
        with self.device:
            return mask.on_device(self._cupy)


class Emulated:
    """The CPU.  Arrays are NumPy's; each is registered by name, so that every access is checked and counted.

    progress counts the blocks of all kernels of a call.  New arrays start as all-ones bytes, NaN in every
    float dtype: what a kernel forgets to write shows.
    """

    index = None
    device = contextlib.nullcontext()

    def is_current(self) -> bool:
        return True

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    @staticmethod
    def pointer(array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]

    def load(self, launch: Launch) -> tuple[Any, Launch]:
        from cuflash import emulator

        text = build.expand(launch.step.file, emulated=True)
        return emulator.compile(text, dict(launch.params), launch.name).get_function(launch.name), launch

    def launch_all(
        self, loaded: list[tuple[Any, Launch]], args: ArgsBuffer, buffers: Any = None, progress: Any = None
    ) -> None:
        memory = bytes(args.memory)
        blocks = [math.prod(launch.grid) for _, launch in loaded]
        for number, (function, launch) in enumerate(loaded):
            report = None
            if progress is not None:
                before, total = sum(blocks[:number]), sum(blocks)
                report = functools.partial(_report, progress, before, total)
            struct, smem = (memory[: launch.args_bytes],), launch.smem_bytes
            function(launch.grid, launch.block, struct, shared_mem=smem, buffers=buffers, progress=report)

    def zero(self, address: int, n_bytes: int) -> None:
        ctypes.memset(address, 0, n_bytes)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        np.copyto(target, source)

    def copy_lengths(self, values: np.ndarray, address: int) -> None:
        ctypes.memmove(address, values.ctypes.data, values.nbytes)

    def blocks(self, mask: Any) -> tuple[Any, Any]:
        return mask.on_device(np)


def _report(progress: Any, before: int, total: int, done: int, _of: int) -> None:
    progress(before + done, total)


class ArgsBuffer:
    """One kernel argument in host memory.

    memory: its bytes; words: the same bytes as 8-byte integers; parameters: what cuLaunchKernel takes, the
    address of an array of one pointer to them.
    """

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("Q")
        self._struct = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._pointer = (ctypes.c_void_p * 1)(ctypes.addressof(self._struct))
        self.parameters = ctypes.addressof(self._pointer)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a number as its value."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("id", "pad", "value")),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


class Overlapping:
    """A launch that may start before the one before it on the stream has ended.

    loaded: as cuLaunchKernel takes it.  call(stream, parameters) -> a CUresult, 0 for success.  One thread at
    a time: the stream is written into a struct that the call keeps.
    """

    def __init__(self, loaded: tuple[int, ...]) -> None:
        self.loaded = loaded
        self._launch = driver.function("cuLaunchKernelEx")  # only it takes attributes
        self._attribute = _Attribute(_OVERLAPS, 0, 1)
        self._config = _Config(*loaded[1:], None, ctypes.pointer(self._attribute), 1)
        self._reference = ctypes.byref(self._config)
        self._function = ctypes.c_void_p(loaded[0])

    def __call__(self, stream: int, parameters: int) -> int:
        self._config.stream = stream
        return self._launch(self._reference, self._function, ctypes.c_void_p(parameters), None)


class _Entered:
    """`with` for one GPU, by any number of threads at once, nested or not."""

    def __init__(self, cupy: Any, index: int) -> None:
        self._runtime, self._index = cupy.cuda.runtime, index
        self._before = threading.local()

    def __enter__(self) -> None:
        stack = self._before.__dict__.setdefault("stack", [])
        stack.append(self._runtime.getDevice())
        self._runtime.setDevice(self._index)

    def __exit__(self, *_: Any) -> None:
        self._runtime.setDevice(self._before.stack.pop())


_EMULATED = Emulated()


@functools.cache
def _cuda(device: Device) -> Cuda:
    return Cuda(device)


def forget() -> None:
    """New calls load their kernels anew; prepared calls keep the ones they have."""
    _cuda.cache_clear()


def of(device: Device) -> Cuda | Emulated:
    """The backend of a device.  Raises CuflashError for a GPU that is not there."""
    if device.kind == "emulated":
        return _EMULATED
    if device.kind == "cuda" and device.index is not None:
        return _cuda(device)
    raise CuflashError(f"a plan for {device.label} cannot run here: {_why(device)}")


def _why(device: Device) -> str:
    return "NumPy arrays go through cuflash/tiled.py" if device.kind == "host" else "this GPU is not there"
