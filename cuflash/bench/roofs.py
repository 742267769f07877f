"""What the arithmetic units of a card could do at the measured clock: the second roof, beside the matmul."""

from __future__ import annotations

from cuflash.devices import Device

# Dense FLOPs of one SM per clock for 16-bit inputs with float32 accumulation.  Consumer cards do half of what
# the data-center card of their generation does.
TENSOR_PER_CLOCK = {75: 1024, 80: 2048, 86: 512, 89: 512, 90: 4096, 100: 8192, 103: 8192, 120: 512}


def per_clock(device: Device, dtype: str, precision: str | None = None) -> int | None:
    """FLOPs of one SM per clock that bound a kernel in dtype; None where this file does not know the card."""
    if dtype == "float64":
        return device.float64_per_clock
    if dtype == "float32" and precision != "tf32":
        return device.float32_per_clock
    tensor = TENSOR_PER_CLOCK.get(device.arch)
    return tensor // 2 if tensor and dtype == "float32" else tensor


def peak(device: Device, dtype: str, clock: float | None, precision: str | None = None) -> float | None:
    """FLOP/s of the whole card at a clock in Hz."""
    each = per_clock(device, dtype, precision)
    return each * device.n_sms * clock if each and clock else None
