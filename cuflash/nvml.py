"""What the driver says of the GPU while it works: SM clock, temperature, power.  NVML through ctypes.

Every function gives None where NVML is missing or refuses; nothing here is needed to run a kernel.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_SM_CLOCK = 1  # NVML_CLOCK_SM
_TEXT_BYTES = 96


@functools.cache
def _library() -> Any:
    """NVML, started; None without it."""
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            library = ctypes.CDLL(name)
            return library if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def _handle(bus_id: str) -> Any:
    library = _library()
    handle = ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)):
        return None
    return handle


def bus_id_of(index: int) -> str:
    """PCI address of a CUDA device: NVML counts GPUs in another order than CUDA."""
    import cupy

    return cupy.cuda.Device(index).pci_bus_id


def _number(function: str, bus_id: str, *arguments: int) -> int | None:
    handle = _handle(bus_id)
    if handle is None:
        return None
    value = ctypes.c_uint()
    failed = getattr(_library(), function)(handle, *arguments, ctypes.byref(value))
    return None if failed else value.value


def sm_clock(bus_id: str) -> int | None:
    """The SM clock at this moment, MHz."""
    return _number("nvmlDeviceGetClockInfo", bus_id, _SM_CLOCK)


def max_sm_clock(bus_id: str) -> int | None:
    """The highest SM clock, MHz."""
    return _number("nvmlDeviceGetMaxClockInfo", bus_id, _SM_CLOCK)


def temperature(bus_id: str) -> int | None:
    """Degrees Celsius."""
    return _number("nvmlDeviceGetTemperature", bus_id, 0)


def power(bus_id: str) -> float | None:
    """Watts."""
    milliwatts = _number("nvmlDeviceGetPowerUsage", bus_id)
    return None if milliwatts is None else milliwatts / 1000


def power_limit(bus_id: str) -> float | None:
    """Watts."""
    milliwatts = _number("nvmlDeviceGetEnforcedPowerLimit", bus_id)
    return None if milliwatts is None else milliwatts / 1000


def driver_version() -> str | None:
    """The driver's own version ("580.159.04"), where CUDA tells only which CUDA it supports."""
    library = _library()
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    if library is None or library.nvmlSystemGetDriverVersion(text, _TEXT_BYTES):
        return None
    return text.value.decode()
