"""Operands that a kernel cannot address: what is copied before it runs, and when that is too dear."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash import cost, tensormap
from cuflash.devices import Device
from cuflash.problem import Problem
from cuflash.row import ITEMSIZE, Refusal, Row, Slot, round_up

COPY_SHARE = 0.05  # a copy may cost this much of the kernel's predicted time
BY_TMA = "copies by TMA, and of "  # a refusal that begins so is about what TMA cannot address
_INPUTS = {
    "forward": {"q": "Q", "k": "K", "v": "V"},
    "backward": {"q": "Q", "k": "K", "v": "V", "out": "O", "dout": "dO"},
}
_TARGETS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Copy:
    """An operand that the kernel cannot address: copied to the workspace first; a result, back afterwards.

    dim: length of the last axis; the slot's may be longer, so that its rows start at multiples of 16 bytes.
    """

    name: str
    slot: Slot
    why: str
    dim: int
    back: bool = False


def copies_of(problem: Problem, device: Device, row: Row) -> tuple[Copy, ...] | Refusal:
    """Operands the row cannot address.

    A last axis whose elements do not lie side by side is always copied: no kernel reads it.  Other strides
    and addresses matter to rows with stride_bytes > 1, and those of inputs with a tensor map to TMA; they are
    copied when that costs less than COPY_SHARE of the kernel's predicted time.
    """
    copies, dear = [], []
    inputs, mapped = _INPUTS[problem.direction], row.mapped(problem)
    for name in (*inputs, *_TARGETS[problem.direction]):
        spec = problem.spec(name)
        if spec is None or 0 in spec.shape:
            continue
        size = ITEMSIZE[spec.dtype]
        is_mapped = inputs.get(name) in mapped
        dim = spec.shape[-1]
        slot = Slot(name, spec.dtype, (*spec.shape[:-1], round_up(dim, 16 // size) if is_mapped else dim))
        steps = [s * size for s, n in zip(spec.strides[:-1], spec.shape[:-1], strict=True) if n > 1]
        why, is_dear = None, False
        if dim > 1 and spec.strides[-1] != 1:
            why = f"the stride of its last axis is {spec.strides[-1]} elements, not 1"
        elif any(s % row.stride_bytes for s in (*steps, spec.align)):
            why, is_dear = f"a stride or its address is no multiple of {row.stride_bytes} bytes", True
        elif is_mapped:
            why = tensormap.why_not(spec.shape, spec.strides, size, spec.align)
            is_dear = why is not None
        if why is not None:
            copy = Copy(name, slot, why, dim, name not in inputs)
            copies.append(copy)
            dear += [copy] if is_dear else []
    return _too_dear(problem, device, row, dear) or tuple(copies)


def _too_dear(problem: Problem, device: Device, row: Row, copies: list[Copy]) -> Refusal | None:
    """The refusal when these copies cost more than COPY_SHARE of the kernel."""
    copying = sum(2 * copy.slot.n_bytes for copy in copies) / device.bandwidth
    running = device.seconds(
        cost.flops(problem), cost.least_bytes(problem), problem.dtype, row.flops_per_clock
    )
    if copying <= COPY_SHARE * running:
        return None
    names = " and ".join(copy.name for copy in copies)
    share = 100 * copying / running if running else float("inf")
    if row.stride_bytes > 1:
        needs = f"needs strides and addresses in multiples of {row.stride_bytes} bytes"
    else:
        needs = BY_TMA + " and of ".join(f"{copy.name} {copy.why}" for copy in copies)
    return Refusal(
        f"{needs}; copying {names} would cost {share:.0f} % of the kernel, "
        f"more than {100 * COPY_SHARE:.0f} %",
        names,
    )
