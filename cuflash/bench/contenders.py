"""What runs in the rounds besides the peers: cuflash's kernels, its NumPy path, and the matmul they aim at.

A contender turns the inputs of a shape into a Prepared call, or refuses in a CuflashError.  Peers (peers.py)
are contenders too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import cuflash
from cuflash import devices, rows
from cuflash.arrays import numpy_dtype
from cuflash.bench.inputs import Inputs, of_forward
from cuflash.bench.timing import Call, Clock, capture_cupy
from cuflash.errors import CuflashError
from cuflash.problem import Problem

NUMPY = "numpy"  # the row that is no kernel: tiled.py
AUTOMATIC = "auto"  # the row that cuflash chooses


@dataclass
class Prepared:
    """A call that is ready to be timed.

    | field | meaning |
    |---|---|
    | call | call(i) runs set i modulo the number of sets |
    | results | those of set 0 as they are now: name -> whole array, canonical axes; lse may be missing |
    | name | what the tables call it |
    | flops | where they are not those of the shape |
    | clock | where the suite's clock does not see it (JAX) |
    | around | a context that calls run in |
    | capture | (call, n) -> a call that replays sets 0 to n - 1, or None |
    | family | whose allocator counts its memory: "cupy", "torch", "numpy", or "" |
    | sources | files in kernels/ that it depends on |
    """

    call: Call
    results: Callable[[], dict[str, Any]]
    name: str
    flops: int | None = None
    clock: Clock | None = None
    around: Callable[[], Any] = contextlib.nullcontext
    capture: Callable[[Call, int], Call] | None = None
    family: str = ""
    sources: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


class Contender(Protocol):
    """name: in tables; kind: "cuflash", "peer" or "roof"."""

    name: str
    kind: str

    def prepare(self, inputs: Inputs, fresh: bool) -> Prepared:
        """fresh: results are allocated by each call, as in everyday use, out alone; else written into given
        arrays, lse too.
        """


@dataclass(frozen=True)
class Cuflash:
    """A row of the plan table on the GPU, AUTOMATIC for the one chosen, or NUMPY on the CPU."""

    row: str
    kind: str = "cuflash"

    @property
    def name(self) -> str:
        return self.row

    def prepare(self, inputs: Inputs, fresh: bool) -> Prepared:
        kernel = None if self.row in (NUMPY, AUTOMATIC) else self.row
        make = _forward if inputs.shape.direction == "forward" else _backward
        calls, results, plan = make(inputs, kernel, fresh)
        n, on_gpu = len(calls), inputs.xp is not np
        files = tuple(dict.fromkeys(launch.step.file for launch in plan.launches)) if plan else ()
        return Prepared(
            call=lambda i: calls[i % n](),
            results=results,
            name=plan.kernel if plan else NUMPY,
            capture=capture_cupy if on_gpu and not fresh else None,
            family="cupy" if on_gpu else "numpy",
            sources=files,
            details=_details(plan),
        )


def _details(plan: Any) -> dict[str, Any]:
    """Of the row's own kernel, for the record."""
    if plan is None or plan.main is None:
        return {}
    return {
        "registers": plan.registers,
        "spills": plan.spills,
        "shared_bytes": plan.main.smem_bytes,
        "blocks_per_sm": plan.blocks_per_sm,
        "workspace_bytes": plan.workspace_bytes,
        "predicted_bytes": plan.bytes,
    }


def _empty(shape: tuple[int, ...], dtype: str, xp: Any) -> Any:
    """Memory full of NaN: what a kernel forgets to write shows."""
    return xp.full(shape, np.nan, numpy_dtype(dtype))


def _plan(direction: str, inputs: Inputs, kernel: str | None) -> Any:
    """The plan on the arrays' GPU; None on the CPU."""
    if inputs.xp is np:
        return None
    one = inputs.first
    backward = direction == "backward"
    return cuflash.explain(one["q"], one["k"], one["v"], **inputs.options, backward=backward, kernel=kernel)


def _workspace(plan: Any, xp: Any) -> dict[str, Any]:
    if plan is None or not plan.workspace_bytes:
        return {}
    return {"workspace": xp.empty(plan.workspace_bytes, np.uint8)}


def _canonical(problem: Problem, array: Any) -> Any:
    return array[None] if problem.packed else array


def _forward(inputs: Inputs, kernel: str | None, fresh: bool) -> tuple[list[Any], Any, Any]:
    """(one function per set, function giving the results of set 0, plan)."""
    shape, xp = inputs.shape, inputs.xp
    plan = _plan("forward", inputs, kernel)
    wide = "float64" if shape.dtype == "float64" else "float32"
    kept: dict[int, Any] = {}
    calls = []
    options = {**inputs.options, "kernel": kernel}
    if not fresh:
        options |= _workspace(plan, xp)
    for number, arrays in enumerate(inputs.sets):
        q, k, v = (arrays[name] for name in "qkv")
        if fresh:

            def call(q=q, k=k, v=v, number=number):
                kept[number] = (cuflash.attention(q, k, v, **options),)  # lse: who trains asks for it
        else:
            lse_shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
            pair = (_empty((*q.shape[:-1], shape.head_dim_v), shape.dtype, xp), _empty(lse_shape, wide, xp))
            kept[number] = pair
            call = functools.partial(cuflash.attention, q, k, v, **options, return_lse=True, out=pair)
        calls.append(call)

    def results() -> dict[str, Any]:
        found = zip(("out", "lse"), kept[0], strict=False)
        return {name: _canonical(inputs.problem, array) for name, array in found}

    return calls, results, plan


def _backward(inputs: Inputs, kernel: str | None, fresh: bool) -> tuple[list[Any], Any, Any]:
    """The same for the backward, which starts from the forward that cuflash chooses."""
    shape, xp = inputs.shape, inputs.xp
    plan = _plan("backward", inputs, kernel)
    kept: dict[int, cuflash.Gradients] = {}
    calls = []
    forward = of_forward(inputs.options)
    options = {**inputs.options, "kernel": kernel}
    if not fresh:
        options |= _workspace(plan, xp)
    for number, arrays in enumerate(inputs.sets):
        q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
        out, lse = cuflash.attention(q, k, v, **forward, return_lse=True)
        given = (dout, q, k, v, out, lse)
        if fresh:

            def call(given=given, number=number):
                kept[number] = cuflash.attention_backward(*given, **options)
        else:
            targets = {
                name: _empty(one.shape, shape.dtype, xp) for name, one in (("dq", q), ("dk", k), ("dv", v))
            }
            kept[number] = cuflash.Gradients(**targets)
            call = functools.partial(cuflash.attention_backward, *given, **options, grads=kept[number])
        calls.append(call)

    def results() -> dict[str, Any]:
        return {name: _canonical(inputs.problem, getattr(kept[0], name)) for name in ("dq", "dk", "dv")}

    return calls, results, plan


# ---- the matmul that kernels are compared with


@dataclass(frozen=True)
class Matmul:
    """A square product in the dtype of the shape, of normal numbers.  library: "cupy", "torch" or "numpy"."""

    library: str
    kind: str = "roof"

    @property
    def name(self) -> str:
        return f"matmul {self.library}"

    def size(self, inputs: Inputs) -> int:
        if self.library == "numpy":
            return 1024 if inputs.shape.len_q * inputs.shape.heads > 4096 else 256
        large = devices.find(None).n_sms >= 80 and inputs.shape.dtype in ("float16", "bfloat16")
        return 8192 if large else 4096

    def prepare(self, inputs: Inputs, fresh: bool) -> Prepared:
        n, dtype, xp = self.size(inputs), inputs.shape.dtype, inputs.xp
        a, b, c = _factors(self.library, n, dtype, id(xp))
        if self.library == "torch":
            import torch

            def call(i: int) -> None:
                torch.matmul(a, b, out=c)
        else:

            def call(i: int) -> None:
                xp.matmul(a, b, out=c)

        return Prepared(call, dict, self.name, flops=2 * n**3, family=self.library)


@functools.lru_cache(maxsize=4)
def _factors(library: str, n: int, dtype: str, module: int) -> tuple[Any, Any, Any]:
    """Two factors and room for the product, kept from shape to shape."""
    if library == "torch":
        import torch

        kind = getattr(torch, dtype)
        a, b = (torch.randn(n, n, device="cuda").to(kind) for _ in range(2))
        return a, b, torch.empty_like(a)
    if library == "numpy":
        a, b = np.random.default_rng(0).standard_normal((2, n, n)).astype(numpy_dtype(dtype))
        return a, b, np.empty_like(a)
    import cupy

    state = cupy.random.RandomState(0)
    a, b = state.standard_normal((2, n, n), dtype=cupy.float32).astype(numpy_dtype(dtype))
    return a, b, cupy.empty_like(a)


def own(direction: str, place: str, kernels: tuple[str, ...] | None, ladder: bool) -> list[Contender]:
    """cuflash's contenders of a direction: those named, every rung, or the automatic choice."""
    if place == "cpu":
        return [Cuflash(NUMPY)]
    table = rows.FORWARD if direction == "forward" else rows.BACKWARD
    known = [row.name for row in table]
    if ladder and kernels is None:
        return [Cuflash(name) for name in reversed(known)]
    if kernels is None:
        return [Cuflash(AUTOMATIC)]
    return [Cuflash(name) for name in kernels if name in (*known, AUTOMATIC)]


def check_names(kernels: tuple[str, ...] | None) -> None:
    """CuflashError for a kernel that neither table has."""
    known = dict.fromkeys([AUTOMATIC, *(row.name for row in (*rows.FORWARD, *rows.BACKWARD))])
    unknown = [name for name in kernels or () if name not in known]
    if unknown:
        raise CuflashError(f"bench: unknown kernel {', '.join(unknown)}; known: {', '.join(known)}.")


def roofs(place: str, torch_is_here: bool) -> list[Contender]:
    """The matmuls of every library that may be measured."""
    if place == "cpu":
        return [Matmul("numpy")]
    return [Matmul("cupy"), *([Matmul("torch")] if torch_is_here else [])]
