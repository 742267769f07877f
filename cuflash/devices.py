"""What a plan needs to know of a device: a GPU that is here, one that is not, the CPU, or the emulator."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from cuflash.errors import CuflashError


@dataclass(frozen=True)
class Device:
    """A place where a plan runs.

    kind: "cuda"; "emulated" (CUDA kernels on the CPU: any architecture); "host" (the NumPy path, no kernels).
    arch: 10 x major + minor.  shared_bytes: the most dynamic shared memory one block can have.
    float32_per_clock, float64_per_clock: FLOPs of one SM; clock in Hz; bandwidth in bytes/s.  Approximate:
    they decide only whether a copy is worth it.  index: number of a GPU that is here, else None.
    """

    kind: str
    name: str
    arch: int
    n_sms: int
    shared_bytes: int
    shared_bytes_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    float32_per_clock: int
    float64_per_clock: int
    clock: float
    bandwidth: float
    index: int | None = None

    @property
    def label(self) -> str:
        return f"{self.name} (sm_{self.arch})" if self.kind == "cuda" else self.name

    def seconds(self, flops: float, n_bytes: float, dtype: str, flops_per_clock: int = 0) -> float:
        """The least time that arithmetic and memory allow.  flops_per_clock: of an SM's tensor cores."""
        plain = self.float64_per_clock if dtype == "float64" else self.float32_per_clock
        per_clock = flops_per_clock or plain
        return max(flops / (per_clock * self.n_sms * self.clock), n_bytes / self.bandwidth)


_KB = 1024
# One usual card per architecture: for explain(device="sm_86") and as figures for GPUs of that architecture.
#    arch  name         SMs  shared/block  shared/SM  threads blocks fp32 fp64   clock  bandwidth
_TABLE = (
    (75, "Tesla T4", 40, 64 * _KB, 64 * _KB, 1024, 16, 128, 4, 1.6e9, 0.32e12),
    (80, "A100", 108, 163 * _KB, 164 * _KB, 2048, 32, 128, 64, 1.41e9, 2.0e12),
    (86, "RTX 3090", 82, 99 * _KB, 100 * _KB, 1536, 16, 256, 4, 1.7e9, 0.94e12),
    (87, "Jetson Orin", 16, 163 * _KB, 164 * _KB, 1536, 16, 256, 4, 1.3e9, 0.2e12),
    (89, "RTX 4090", 128, 99 * _KB, 100 * _KB, 1536, 24, 256, 4, 2.5e9, 1.0e12),
    (90, "H200", 132, 227 * _KB, 228 * _KB, 2048, 32, 256, 128, 1.75e9, 4.8e12),
    (100, "B200", 148, 227 * _KB, 228 * _KB, 2048, 32, 256, 128, 1.85e9, 8.0e12),
    (103, "B300", 148, 227 * _KB, 228 * _KB, 2048, 32, 256, 4, 1.9e9, 8.0e12),
    (120, "RTX 5090", 170, 99 * _KB, 100 * _KB, 1536, 24, 256, 4, 2.4e9, 1.8e12),
    (121, "GB10", 48, 99 * _KB, 100 * _KB, 1536, 24, 256, 4, 2.5e9, 0.27e12),
)

HOST = Device("host", "CPU (NumPy)", 0, 1, 0, 0, 0, 0, 32, 16, 3e9, 2e10)
# Blocks are spread over a few cores and every row may run; memory as on the largest GPU.
EMULATED = Device("emulated", "CPU (emulator)", 90, 4, 227 * _KB, 228 * _KB, 2048, 32, 256, 128, 3e9, 2e10)


def named(name: str) -> Device:
    """A usual GPU of an architecture: "sm_90", "sm_90a", "90", or one of "host" and "emulated".

    >>> named("sm_86").shared_bytes
    101376
    """
    if name in ("host", "emulated"):
        return HOST if name == "host" else EMULATED
    match = re.fullmatch(r"(?:sm_?)?(\d+)[af]?", name.strip().lower())
    for row in _TABLE:
        if match and row[0] == int(match[1]):
            return Device("cuda", *_reordered(row))
    known = ", ".join(f"sm_{row[0]}" for row in _TABLE)
    raise CuflashError(
        f"device {name!r} is not known\n  Known are {known}, emulated, host, or a GPU's number."
    )


def _reordered(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row[1], row[0], *row[2:]


@functools.cache
def gpu(index: int) -> Device:
    """The GPU with this CUDA device number.  Raises CuflashError when it is not there."""
    count = gpu_count()  # 0 without CuPy
    if not 0 <= index < count:
        do = "Numbers count from 0; `cuflash info` lists them."
        raise CuflashError(f"CUDA device {index} is not there; this machine has {count}\n  {do}")
    properties = _cupy().cuda.runtime.getDeviceProperties(index)
    arch = 10 * properties["major"] + properties["minor"]
    figures = max((row for row in _TABLE if row[0] <= arch), default=_TABLE[0])
    name = properties["name"]
    return Device(
        "cuda",
        name.decode() if isinstance(name, bytes) else name,
        arch,
        properties["multiProcessorCount"],
        properties["sharedMemPerBlockOptin"],
        properties["sharedMemPerMultiprocessor"],
        properties["maxThreadsPerMultiProcessor"],
        figures[6],
        *figures[7:],
        index=index,
    )


def gpu_count() -> int:
    """How many CUDA devices CuPy sees; 0 without CuPy or driver."""
    try:
        return _cupy().cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver, no device: each raises its own class, and each means none
        return 0


def find(device: Any) -> Device:
    """A Device from what a user writes: a Device, a number, "sm_90a", "cuda:1", a cupy.cuda.Device, or None.

    None is the first GPU where there is one, else the CPU.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        return gpu(_cupy().cuda.runtime.getDevice()) if gpu_count() else HOST
    if isinstance(device, str):
        match = re.fullmatch(r"cuda(?::(\d+))?", device)
        return gpu(int(match[1] or 0)) if match else named(device)
    index = getattr(device, "id", device)
    if isinstance(index, int) and not isinstance(index, bool):
        return gpu(index)
    raise CuflashError(f'device is {device!r}\n  Give a CUDA device number, "sm_90a" or "emulated".')


def _cupy() -> Any:
    import cupy

    return cupy
