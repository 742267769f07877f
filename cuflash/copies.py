"""Operands that a kernel cannot address: what is copied before it runs, and when that is too dear."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash import cost
from cuflash.devices import Device
from cuflash.problem import Problem
from cuflash.row import ITEMSIZE, Refusal, Row, Slot

COPY_SHARE = 0.05  # a copy may cost this much of the kernel's predicted time
_VECTORS = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "out", "dout")}
_TARGETS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Copy:
    """An operand that the kernel cannot address: copied to the workspace first; a result, back afterwards."""

    name: str
    slot: Slot
    why: str
    back: bool = False


def copies_of(problem: Problem, device: Device, row: Row) -> tuple[Copy, ...] | Refusal:
    """Operands the row cannot address.

    A last axis whose elements do not lie side by side is always copied: no kernel reads it.  Other strides
    and addresses matter to rows with stride_bytes > 1, and are copied when that costs less than COPY_SHARE of
    the kernel's predicted time.
    """
    copies = []
    n_bytes = 0
    for name in (*_VECTORS[problem.direction], *_TARGETS[problem.direction]):
        spec = problem.spec(name)
        if spec is None or 0 in spec.shape:
            continue
        size = ITEMSIZE[spec.dtype]
        steps = [s * size for s, n in zip(spec.strides[:-1], spec.shape[:-1], strict=True) if n > 1]
        slot = Slot(name, spec.dtype, spec.shape)
        back = name in _TARGETS[problem.direction]
        if spec.shape[-1] > 1 and spec.strides[-1] != 1:
            why = f"the stride of its last axis is {spec.strides[-1]} elements, not 1"
            copies.append(Copy(name, slot, why, back))
        elif any(s % row.stride_bytes for s in (*steps, spec.align)):
            copies.append(
                Copy(name, slot, f"a stride or its address is no multiple of {row.stride_bytes} bytes", back)
            )
            n_bytes += 2 * slot.n_bytes
    if n_bytes:
        copying = n_bytes / device.bandwidth
        running = device.seconds(
            cost.flops(problem), cost.least_bytes(problem), problem.dtype, row.flops_per_clock
        )
        if copying > COPY_SHARE * running:
            names = " and ".join(copy.name for copy in copies)
            share = 100 * copying / running if running else float("inf")
            return Refusal(
                f"needs strides and addresses in multiples of {row.stride_bytes} bytes; copying {names} "
                f"would cost {share:.0f} % of the kernel, more than {100 * COPY_SHARE:.0f} %",
                names,
            )
    return tuple(copies)
