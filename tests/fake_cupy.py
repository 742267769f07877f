"""A CuPy of two GPUs without a GPU: NumPy arrays that know their device, and refuse to work on another.

    fake = install(monkeypatch)          # sys.modules["cupy"] is the fake until the test ends

CuPy computes, and makes new arrays, on the current device.  So does this one, and it raises where an array
of the other device takes part: with CuPy that is memory of a foreign GPU, or an error.  `fake.launches` holds
(current device, stream) of every kernel that was started; kernels do nothing.
"""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np

from cuflash import backends, build, devices, launch

H200 = dict(
    name=b"NVIDIA H200", major=9, minor=0, multiProcessorCount=132, sharedMemPerBlockOptin=232448,
    sharedMemPerMultiprocessor=233472, maxThreadsPerMultiProcessor=2048,
)  # fmt: skip
CURRENT = [0]  # the current device, as the runtime keeps it


class Device:
    def __init__(self, number=None):
        self.id, self.before = CURRENT[0] if number is None else number, []

    def __enter__(self):
        self.before.append(CURRENT[0])
        CURRENT[0] = self.id

    def __exit__(self, *_):
        CURRENT[0] = self.before.pop()


class Array(np.ndarray):
    """cupy.ndarray: views stay on their device, new arrays come to the current one."""

    def __array_finalize__(self, parent):
        self.number = parent.number if isinstance(parent, Array) else CURRENT[0]

    device = property(lambda self: Device(self.number))
    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data, device_id=self.number))

    def get(self):
        return np.array(self.view(np.ndarray))

    def __getitem__(self, index):
        if type(index) is Array or (type(index) is tuple and any(isinstance(x, Array) for x in index)):
            return new(super().__getitem__(on_host(index)))
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        on_host(self)
        super().__setitem__(on_host(index), on_host(value))

    def astype(self, *args, **options):
        return new(on_host(self).astype(*args, **options))

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if out is not None:
            options["out"] = on_host(out)
        found = getattr(ufunc, method)(*on_host(inputs), **on_host(options))
        return found if out is not None and found is None else out[0] if out is not None else new(found)

    def __array_function__(self, function, _types, args, options):
        return new(function(*on_host(args), **on_host(options)))


def on_host(value):
    """value with plain arrays in place of Arrays, all of which must be on the current device."""
    if isinstance(value, Array):
        assert value.number == CURRENT[0], f"an array of device {value.number} while {CURRENT[0]} is current"
        return value.view(np.ndarray)
    if isinstance(value, (tuple, list)):
        return type(value)(on_host(x) for x in value)
    return {name: on_host(x) for name, x in value.items()} if isinstance(value, dict) else value


def new(value):
    """NumPy's results as Arrays of the current device."""
    if isinstance(value, (tuple, list)):
        return type(value)(new(x) for x in value)
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value).view(Array)
    array.number = CURRENT[0]
    return array


class Cupy(ModuleType):
    """The functions of NumPy, for Arrays."""

    ndarray = Array

    def __getattr__(self, name):
        function = getattr(np, name)
        if isinstance(function, type) or not callable(function):
            return function
        return lambda *args, **options: new(function(*on_host(args), **on_host(options)))


class Stream:
    """Also a memory allocation of CuPy: whatever has an address."""

    def __init__(self, ptr=5, **_):
        self.ptr = ptr

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass


def install(monkeypatch):
    """The fake in place of CuPy until the test ends; returns it."""
    fake, cuda = Cupy("cupy"), ModuleType("cupy.cuda")
    fake.launches, fake.cuda = [], cuda
    cuda.Device, cuda.Stream = Device, Stream
    cuda.get_current_stream = lambda number: Stream(100 + number)
    cuda.alloc = lambda n_bytes: Stream(1 << 20)
    cuda.runtime = SimpleNamespace(
        getDevice=lambda: CURRENT[0],
        setDevice=lambda number: CURRENT.__setitem__(0, number),
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda _: H200,
        memsetAsync=lambda address, value, n_bytes, stream: fake.launches.append((CURRENT[0], stream)),
    )
    cuda.driver = SimpleNamespace(
        launchKernel=lambda *args: fake.launches.append((CURRENT[0], args[8])), CUDADriverError=OSError
    )
    cuda.function = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(build, "target_of", lambda *_, **__: "sm_90a")
    monkeypatch.setattr(backends.Cuda, "_entry", lambda *_: 7)
    monkeypatch.setattr(backends, "Overlapping", lambda loaded: loaded)
    monkeypatch.setattr(launch, "_ndarray", Array)
    return fake


def forget():
    """What was kept of devices that are not there, and the current device."""
    CURRENT[0] = 0
    devices.gpu.cache_clear()
    launch.forget()
