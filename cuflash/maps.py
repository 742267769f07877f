"""Addresses in the struct of a call, and the tensor maps behind it, encoded again when an address changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cuflash import args, results, tensormap
from cuflash.backends import ArgsBuffer
from cuflash.errors import CuflashError
from cuflash.plan import Plan
from cuflash.row import ITEMSIZE, number
from cuflash.tensormap import Layout


class Place:
    """Where one address stands in the struct: a pointer, and the tensor map of the same array if it has one.

    address: what stands there now.  A call that finds its own there has nothing to write.
    """

    __slots__ = ("_bytes", "_layout", "_word", "_words", "address")

    def __init__(self, buffer: ArgsBuffer, word: int) -> None:
        """word: which of the buffer's words."""
        self._words, self._word, self.address = buffer.words, word, 0
        self._layout: Layout | None = None

    def move(self, address: int) -> None:
        """Write an address, and encode the map with it."""
        if self._layout is not None:
            self._bytes[:] = self._layout.encode(address)
        self._words[self._word] = address
        self.address = address

    def attach(self, layout: Layout, room: memoryview) -> None:
        """From now on a map of this layout goes with the pointer."""
        self._layout, self._bytes = layout, room


def attach(plan: Plan, record: np.ndarray, buffer: ArgsBuffer, place: Callable[[str], Place]) -> None:
    """Give the places of a plan's mapped arrays their maps in one struct MappedArgs.

    record: the strides of every array in it.  buffer: the struct, mapped_args_bytes() long.  place(field of
    Args, "Q.data"): where no address has been written yet.
    """
    bits, boxes = 0, _boxes(plan)
    numbers = {name: number for number, name in enumerate(args.map_offsets())}
    for name, box in boxes.items():
        layout = _layout(plan, record[name], name, *box)
        if layout is not None:
            start = args.map_offsets()[name]
            room = memoryview(buffer.memory)[start : start + tensormap.BYTES]
            place(f"{name}.data").attach(layout, room)
            bits |= 1 << numbers[name]
    if boxes:
        buffer.words[args.map_offsets()["mapped"] // 8] = bits


def bytes_of(plan: Plan) -> int:
    """How long the struct of a plan's launches is: of the longest."""
    return max((launch.args_bytes for launch in plan.launches), default=args.args_bytes())


def _boxes(plan: Plan) -> dict[str, tuple[tuple[int, int], int]]:
    """Name of a map -> (box, swizzle)."""
    found: dict[str, tuple[tuple[int, int], int]] = {}
    for launch in plan.launches:
        params = dict(launch.params)
        for one in launch.step.maps:
            if one.when(plan.problem):
                mine = one.box(params), number(one.swizzle, params)
                if found.setdefault(one.name, mine) != mine:
                    raise CuflashError(f"{plan.kernel}: two steps map {one.name} with different boxes")
    return found


def _layout(plan: Plan, field: np.void, name: str, box: tuple[int, int], swizzle: int) -> Layout | None:
    """None where there is nothing to map: an empty array, a result that TMA cannot address."""
    shape, dtype, align = _array(plan, name)
    strides = [int(field[axis]) for axis in ("batch", "row", "head")]
    why = tensormap.why_not(shape, (*strides, 1), ITEMSIZE[dtype], align)
    if 0 in shape or why is not None:
        return None
    batch, rows, heads, dim = shape
    steps = [
        stride * ITEMSIZE[dtype] if n > 1 else 16
        for stride, n in zip(strides, (batch, rows, heads), strict=True)
    ]
    return Layout(
        dtype,
        (dim, rows, heads, batch),
        (steps[1], steps[2], steps[0]),
        (*box, 1, 1),
        swizzle,
        emulated=plan.device.kind == "emulated",
    )


def _array(plan: Plan, name: str) -> tuple[tuple[int, ...], str, int]:
    """(canonical shape, dtype, alignment) of the array that a field of Args describes."""
    slots = {slot.name: slot for slot in plan.slots[: plan.n_row_slots]}
    if name in slots:
        return slots[name].shape, slots[name].dtype, 256
    operand = args.OPERANDS[name]
    copied = {copy.name for copy in plan.copies}
    spec = plan.problem.spec(operand)
    if spec is None:
        return *results.shape_and_dtype(plan.problem, operand), 16
    return spec.shape, spec.dtype, 256 if operand in copied else spec.align
