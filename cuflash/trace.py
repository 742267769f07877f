"""cuflash.trace: run a kernel in the emulator and see what it moved, computed, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.errors import CuflashError

_DEFAULT = {"forward": "fwd_02_tiled", "backward": "bwd_02_tiled"}


@dataclass(frozen=True)
class Tile:
    """What one warp did to one array between two barriers of its block.

    block: (x, y, z).  step: barriers and mbarrier phases the block had passed.  rows: (first, last) along the
    length axis of a q-, k- or v-like array, None for others.  n_bytes: moved by this warp.
    """

    kernel: str
    block: tuple[int, int, int]
    step: int
    warp: int
    array: str
    writes: bool
    rows: tuple[int, int] | None
    n_bytes: int


class Trace:
    """What the launches of one call did.  Prints as a table.

    launches: emulator.Record per kernel, in order.  arrays: name -> (read, written, added) bytes of all
    launches together; added means atomics and reduce-adds; one array given as several is "q = k = v".
    results: what the call returned: (out, lse), or Gradients with dout.
    """

    def __init__(self, launches: tuple[Any, ...], shapes: dict[str, Any], results: Any) -> None:
        self.launches = launches
        self.results = results
        self._shapes = shapes
        self.arrays: dict[str, tuple[int, int, int]] = {}
        for record in launches:
            for name, moved in record.arrays.items():
                before = self.arrays.get(name, (0, 0, 0))
                self.arrays[name] = tuple(a + b for a, b in zip(before, moved, strict=True))

    @property
    def read(self) -> int:
        """Bytes read from global memory."""
        return sum(moved[0] for moved in self.arrays.values())

    @property
    def written(self) -> int:
        """Bytes written to global memory, atomics included."""
        return sum(moved[1] + moved[2] for moved in self.arrays.values())

    @property
    def shared(self) -> int:
        """Bytes read from and written to shared memory, by threads and by the copy and tensor units."""
        return sum(record.shared + record.async_shared for record in self.launches)

    @property
    def exps(self) -> int:
        return sum(record.exps for record in self.launches)

    @property
    def tensor_flops(self) -> int:
        """2 M N K of every tensor-core instruction: also what masks and padding waste."""
        return sum(record.tensor_flops for record in self.launches)

    def tiles(self, array: str | None = None, block: tuple[int, int, int] | None = None) -> list[Tile]:
        """The timeline, by block and step: which rows of which array were moved between which barriers."""
        found = []
        for record in self.launches:
            for event in record.events:
                name = record.names[event["array"]]
                where = tuple(int(x) for x in event["block"])
                if array in (None, name, *name.split(" = ")) and block in (None, where):
                    found.append(self._tile(record.kernel, name, where, event))
        order = {record.kernel: i for i, record in enumerate(self.launches)}
        return sorted(
            found, key=lambda t: (order[t.kernel], t.block[::-1], t.step, t.warp, t.array, t.writes)
        )

    def _tile(self, kernel: str, name: str, block: tuple[int, int, int], event: Any) -> Tile:
        rows = None
        shape = self._shapes.get(name.split(" = ")[0])
        if shape is not None:
            batch_step, row_step, n_rows = shape
            low, high = int(event["low"]) % batch_step, (int(event["high"]) - 1) % batch_step
            rows = (min(low // row_step, n_rows - 1), min(high // row_step, n_rows - 1))
        return Tile(
            kernel, block, int(event["step"]), int(event["warp"]), name, bool(event["writes"]), rows,
            int(event["n_bytes"]),
        )  # fmt: skip

    def __str__(self) -> str:
        lines = []
        for record in self.launches:
            threads = record.block[0] * record.block[1] * record.block[2]
            lines.append(
                f"{record.kernel}   grid {record.grid}, {threads} threads, {record.shared_mem} B shared"
            )
            for name, (read, written, added) in record.arrays.items():
                if read or written or added:
                    extra = f", {added:,} added" if added else ""
                    lines.append(f"  {name:<16}{read:>16,} B read {written:>16,} B written{extra}")
            lines.append(
                f"  shared memory {record.shared + record.async_shared:,} B, exponentials {record.exps:,}, "
                f"tensor-core flop {record.tensor_flops:,}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def trace(
    q: Any, k: Any, v: Any, *, dout: Any = None, kernel: str | None = None, seed: int = 0, **options: Any
) -> Trace:
    """Run one row of the plan in the emulator on NumPy arrays and say what it moved.

    q, k, v and options: as for cuflash.attention.  dout: trace the backward (the forward that it needs is not
    traced).  kernel: a row; None is fwd_02_tiled, bwd_02_tiled with dout.  seed: order of threads.

    >>> t = cuflash.trace(q, k, v, causal=True)
    >>> t.arrays["k"]                              # (bytes read, written, added)
    >>> [tile.rows for tile in t.tiles("k", block=(0, 0, 0))]
    """
    from cuflash import emulator
    from cuflash.attention import attention, attention_backward

    given = {"q": q, "k": k, "v": v} | ({} if dout is None else {"dout": dout})
    for name, array in given.items():
        if not isinstance(array, np.ndarray):
            raise CuflashError(
                f"trace: {name} is a {type(array).__name__}; needs a NumPy array\n"
                "  Kernels are traced in the emulator, on the CPU: copy the arrays to NumPy."
            )
    direction = "forward" if dout is None else "backward"
    name = kernel or _DEFAULT[direction]
    if dout is not None:
        out, lse = attention(q, k, v, return_lse=True, **_forward_only(options))
    with emulator.options(timeline=True, seed=seed), emulator.recording() as records:
        if dout is None:
            results = attention(q, k, v, **{**options, "kernel": name, "return_lse": True})
        else:
            results = attention_backward(dout, q, k, v, out, lse, kernel=name, **options)
    shapes = {name: _steps(array, options.get("layout", "bshd")) for name, array in given.items()}
    return Trace(tuple(records), {n: s for n, s in shapes.items() if s}, results)


def _forward_only(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("deterministic", "dlse")}


def _steps(array: np.ndarray, layout: str) -> tuple[int, int, int] | None:
    """(bytes from one batch entry to the next, from one row to the next, rows) of a contiguous array."""
    if array.ndim == 3:  # packed: (tokens, heads, dim)
        steps = array.strides[0], array.shape[0]
        batch = array.nbytes
    else:
        axis = 1 if layout == "bshd" else 2
        steps = array.strides[axis], array.shape[axis]
        batch = array.strides[axis - 1]  # rows repeat with what lies outside them
    if not array.flags.c_contiguous or not array.size or steps[0] <= 0:
        return None
    return max(batch, 1), steps[0], steps[1]
