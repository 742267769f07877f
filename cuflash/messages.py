"""The arrays of one call under their names, and its error messages in one grammar: what; got; what to do."""

from __future__ import annotations

from typing import Any, NoReturn

from cuflash.arrays import HOST, SPEC, address, convert
from cuflash.errors import CuflashError


def device_text(device: Any) -> str:
    """ "the host" or "cuda:0"."""
    return {HOST: "the host", SPEC: "any device"}.get(device) or f"cuda:{device}"


class Call:
    """The arrays of one call under their argument names, with the names of their axes.

    | field | meaning |
    |---|---|
    | where | the public function, first word of every message |
    | arrays | argument name -> array, in the caller's axis order |
    | axes | argument name -> names of its axes |
    | devices | argument name -> HOST, SPEC or the CUDA device number |
    | sizes | axis name -> (length, argument that bound it first) |
    """

    def __init__(self, where: str):
        self.where = where
        self.arrays: dict[str, Any] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self.devices: dict[str, Any] = {}
        self.sizes: dict[str, tuple[int, str]] = {}

    def take(self, name: str, value: Any, specs: bool) -> None:
        """One array into the call: any kind in, NumPy or CuPy on whole elements out."""
        try:
            array, device = convert(value)
        except TypeError as error:
            self.fail(f"{name} {error}", "Give a NumPy or CuPy array, or one that DLPack hands over as such.")
        if device == SPEC and not specs:
            self.fail(f"{name} is a spec, not an array", "cuflash.explain and cuflash.warmup take specs.")
        self.arrays[name], self.devices[name] = array, device
        itemsize = array.dtype.itemsize
        if itemsize > 1 and (address(array) % itemsize or any(s % itemsize for s in array.strides)):
            self.fail(
                f"{name} has an address or strides that are no multiple of its {itemsize}-byte elements",
                f"strides in bytes {array.strides}",
                "Give a copy.",
            )

    def fail(self, what: str, *do: str, show: tuple[str, ...] = (), mark: tuple = ()) -> NoReturn:
        """Raise CuflashError: what, the lines of `show` (array names, or sentences), then the lines of do.

        mark holds (array name, axis number | "dtype" | "device" | "rank"): each gets a "!".
        """
        lines = [f"{self.where}: {what}"]
        for name in show:
            if " " in name:
                lines.append(f"  {name}")
            elif name in self.arrays:
                lines.append("  " + self.describe(name, mark))
        raise CuflashError("\n".join(lines + [f"  {line}" for line in do]))

    def describe(self, name: str, mark: tuple = ()) -> str:
        """One line: q (batch 2, len_q 1024, heads 16, head_dim 128) bfloat16; marked parts end in "!"."""
        array, axes = self.arrays[name], self.axes.get(name, ())

        def flag(part: Any) -> str:
            return "!" if (name, part) in mark else ""

        if len(axes) == array.ndim:
            shape = ", ".join(
                f"{axis} {n}{flag(i)}" for i, (axis, n) in enumerate(zip(axes, array.shape, strict=True))
            )
        else:
            shape = ", ".join(f"{n}{flag(i)}" for i, n in enumerate(array.shape))
        on = f" on {device_text(self.devices[name])}{flag('device')}" if _names_devices(mark) else ""
        return f"{name} ({shape}){flag('rank')} {array.dtype.name}{flag('dtype')}{on}"


def _names_devices(mark: tuple) -> bool:
    return any(part == "device" for _, part in mark)
