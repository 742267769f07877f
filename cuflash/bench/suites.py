"""Suites by name, and what each of their shapes is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cuflash.bench.shapes import GRIDS, Shape, Sizes, Suite, grid
from cuflash.errors import CuflashError

BOTH = ("forward", "backward")
SUITES = {
    "forward": "TFLOP/s of the forward",
    "backward": "TFLOP/s of the backward",
    "short": "short sequences, replayed from CUDA graphs",
    "decode": "one query row and many keys (GQA): bytes per second",
    "float32": "float32 inputs, exact and as TF32, forward and backward",
    "memory": "bytes above inputs and outputs, against length",
    "host": "what a warm call costs the host",
    "cpu": "the NumPy path beside other CPU attention",
    "blocks": "block masks and windows: time against the share of pairs kept",
    "options": "what each option costs: one problem, one option at a time",
    "gqa": "32 query heads over 8 key heads, beside 32 over 32",
    "dtypes": "float16 beside bfloat16, each divided by the matmul of its dtype",
    "deterministic": "bitwise repeatable gradients beside the others",
    "ladder": "every rung of the ladder, forward and backward",
}


def suite(
    name: str, sizes: Sizes, place: str, dtype: str, which: str = "default", tiny: bool = False
) -> Suite:
    """A suite by name.  place: "gpu" or "cpu", which gets smaller sizes.  dtype: unless sizes says one."""
    if name not in SUITES:
        raise CuflashError(f"bench: unknown suite {name!r}; known: {', '.join(SUITES)}.")
    if name == "ladder" and place == "cpu":
        raise CuflashError(
            "bench ladder: times kernels, and there is no CUDA GPU here\n"
            "  `cuflash bench cpu` measures the NumPy path; `cuflash lab FILE.cu` counts a kernel's bytes."
        )
    made = replace(_SUITES[name](sizes, place, dtype, GRIDS[which]), name=name, own=sizes.given)
    return replace(made, shapes=tuple(dict.fromkeys(map(tiny_of, made.shapes)))) if tiny else made


def tiny_of(shape: Shape) -> Shape:
    """The same problem at a size that takes milliseconds anywhere: values are checked, times mean nothing."""
    return replace(
        shape,
        batch=min(shape.batch, 2),
        len_q=min(shape.len_q, 70),
        len_k=min(shape.len_k, 90 if shape.len_q != shape.len_k else 70),
        heads=2 * (2 if shape.heads != shape.heads_k else 1),
        heads_k=2,
        head_dim=min(shape.head_dim, 32),
        head_dim_v=min(shape.head_dim_v, 32),
    )


def _throughput(direction: str) -> Any:
    def make(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
        if place == "cpu":
            return Suite("", _cpu_shapes((direction,), sizes), "tflops", graph="never")
        return Suite("", grid((direction,), sizes, **which, dtype=dtype))

    return make


def _cpu_shapes(directions: Sequence[str], sizes: Sizes) -> tuple[Shape, ...]:
    return grid(
        directions, sizes, head_dims=(64,), lengths=(4096,), dtype="float32", tokens=4096, hidden=512
    )  # fmt: skip


def _short(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    on_cpu = {"tokens": 1024, "hidden": 256} if place == "cpu" else {}
    dtype = "float32" if place == "cpu" else dtype
    return Suite(
        "",
        grid(("forward",), sizes, head_dims=(64, 128), lengths=(128, 256, 512, 1024), dtype=dtype, **on_cpu),
        graph="never" if place == "cpu" else "always",
    )


def _decode(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    """One query a sequence: what a KV cache of len_k costs to read, 32 heads over 8 key heads."""
    cells = ((1, 4096), (32, 4096), (1, 32768), (32, 32768)) if place == "gpu" else ((1, 4096),)
    dtype = dtype if place == "gpu" else "float32"
    if sizes.batch or sizes.len_k:
        cells = ((sizes.batch or 1, sizes.len_k or 4096),)
    base = replace(
        sizes,
        heads=sizes.heads or 32,
        heads_k=sizes.heads_k or 8,
        lengths=sizes.lengths or (1,),
        causal=sizes.causal or (False,),
    )
    found: list[Shape] = []
    for batch, len_k in cells:
        one = replace(base, batch=batch, len_k=len_k)
        found += grid(("forward",), one, head_dims=(128,), lengths=(1,), dtype=dtype)
    return Suite("", tuple(found), "tbs", graph="always" if place == "gpu" else "never")


def _float32(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    if place == "cpu":
        return Suite("", _cpu_shapes(BOTH, sizes), graph="never")
    found: list[Shape] = []
    asked = "precision" in dict(sizes.settings)
    for more in ((),) if asked else ((), (("precision", "tf32"),)):
        one = replace(sizes, settings=(*more, *sizes.settings))
        found += grid(BOTH, one, head_dims=(64, 128), lengths=(1024, 4096, 16384), dtype="float32",
                      causal=(False,), hidden=1024)  # fmt: skip
    return Suite("", tuple(dict.fromkeys(found)))


def _memory(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    lengths = (1024, 4096, 16384, 32768) if place == "gpu" else (1024, 4096)
    one = replace(sizes, batch=sizes.batch or 1, heads=sizes.heads or (8 if place == "gpu" else 2))
    dtype = dtype if place == "gpu" else "float32"
    shapes = grid(BOTH, one, head_dims=(64,), lengths=lengths, dtype=dtype, causal=(False,))
    return Suite("", shapes, "bytes", graph="never")


def _host(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    one = replace(sizes, batch=sizes.batch or 1, heads=sizes.heads or 8)
    dtype = dtype if place == "gpu" else "float32"
    shapes = grid(BOTH, one, head_dims=(64,), lengths=(128,), dtype=dtype, causal=(False,))
    return Suite("", shapes, "host_us", graph="never")


def _cpu(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    return Suite("", _cpu_shapes(BOTH, sizes), "ms", graph="never")


# Fewer and fewer pairs of one problem: settings and drawn.
FEWER: tuple[tuple[tuple[tuple[str, Any], ...], tuple[str, ...]], ...] = (
    ((), ()),
    *(((), (name,)) for name in ("blocks_1", "blocks_1/2", "blocks_1/4", "blocks_1/8")),
    *(((("window", (reach, reach)),), ()) for reach in (2048, 1024, 512, 256)),
)


def _blocks(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    """One problem with fewer and fewer of its 128 x 128 blocks kept, or of its keys in the window."""
    on_cpu = {"tokens": 4096, "hidden": 256} if place == "cpu" else {}
    dtype, dim, length = ("float32", 64, 4096) if place == "cpu" else (dtype, 128, 8192)
    return _each(FEWER, sizes, dim, length, dtype, on_cpu)


def _each(
    changes: Any, sizes: Sizes, head_dim: int, length: int, dtype: str, more: dict[str, int]
) -> Suite:  # fmt: skip
    """One problem, and the same with each change."""
    found: list[Shape] = []
    for direction in BOTH:
        for settings, drawn, *group in changes:
            if direction == "forward" and dict(settings).get("deterministic"):
                continue
            one = replace(sizes, settings=(*settings, *sizes.settings), drawn=(*drawn, *sizes.drawn))
            made = grid((direction,), one, head_dims=(head_dim,), lengths=(length,), causal=(False,),
                        dtype=dtype, **more)  # fmt: skip
            found += [replace(shape, heads_k=max(1, shape.heads_k // (group or [1])[0])) for shape in made]
    return Suite("", tuple(dict.fromkeys(found)), "ms", graph="never")


# One option at a time: settings, drawn, and among how many query heads a key head is shared.
ONE_OPTION: tuple[tuple[tuple[tuple[str, Any], ...], tuple[str, ...], int], ...] = (
    ((), (), 1),
    ((), (), 4),
    ((("causal", True),), (), 1),
    ((("window", (512, 512)),), (), 1),
    ((("softcap", 30.0),), (), 1),
    ((("dropout", (0.1, 1)),), (), 1),
    ((("deterministic", True),), (), 1),
    *(((), (name,), 1) for name in ("alibi_slopes", "bias_plane", "mask", "sink", "key_lengths", "packed",
                                    "blocks_1/4")),
)  # fmt: skip


def _options(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    if place == "cpu":
        return _each(ONE_OPTION, sizes, 64, 512, "float32", {"tokens": 1024, "hidden": 256})
    return _each(ONE_OPTION, sizes, 128, 4096, dtype, {})


def _side_by_side(shapes: Iterable[Shape], variants: Callable[[Shape], Iterable[Shape]]) -> Suite:
    """Each shape next to what it is compared with: the card is as hot for both."""
    return Suite("", tuple(dict.fromkeys(one for shape in shapes for one in variants(shape))), graph="never")


def _few(sizes: Sizes, place: str, dtype: str, directions: Sequence[str], **on_gpu: Any) -> tuple[Shape, ...]:
    """The grid on a GPU; one small cell on the CPU."""
    if place == "gpu":
        return grid(directions, sizes, dtype=dtype, **on_gpu)
    return grid(directions, sizes, head_dims=(64,), lengths=(512,), dtype="float32", tokens=1024, hidden=256)


def _gqa(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    one = replace(sizes, heads=sizes.heads or (32 if place == "gpu" else 8), heads_k=None)
    shapes = _few(one, place, dtype, BOTH, head_dims=(128,), lengths=(2048, 8192))

    def shared(shape: Shape) -> Shape:
        return replace(shape, heads_k=sizes.heads_k or max(1, shape.heads // 4))

    return _side_by_side(shapes, lambda shape: (shape, shared(shape)))


def _dtypes(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    dtypes = sizes.dtypes or ("bfloat16", "float16")
    one = replace(sizes, dtypes=dtypes[:1])
    shapes = _few(one, place, dtype, BOTH, head_dims=(64, 128, 256), lengths=(8192,))
    return _side_by_side(shapes, lambda shape: [replace(shape, dtype=name) for name in dtypes])


def repeatable(shape: Shape) -> Shape:
    """The backward of a shape with deterministic=True; a forward always is."""
    if shape.direction == "forward" or "deterministic" in dict(shape.settings):
        return shape
    return replace(shape, settings=(*shape.settings, ("deterministic", True)))


def _deterministic(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    shapes = _few(sizes, place, dtype, ("backward",), head_dims=(64, 128, 256), lengths=(2048, 8192))
    return _side_by_side(shapes, lambda shape: (shape, repeatable(shape)))


def _ladder(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    """Every rung on problems that the slowest can still do in seconds."""
    one: dict[str, Any] = {"lengths": (4096,), "dtype": dtype, "tokens": 8192}
    if sizes.head_dims is not None:
        return Suite("", grid(BOTH, sizes, head_dims=(), **one), ladder=True)
    shapes = grid(BOTH, sizes, head_dims=(128,), **one)
    shapes += grid(BOTH, sizes, head_dims=(64, 256), causal=(False,), **one)
    return Suite("", shapes, ladder=True)


_SUITES = {
    "forward": _throughput("forward"),
    "backward": _throughput("backward"),
    "short": _short,
    "decode": _decode,
    "float32": _float32,
    "memory": _memory,
    "host": _host,
    "cpu": _cpu,
    "blocks": _blocks,
    "options": _options,
    "gqa": _gqa,
    "dtypes": _dtypes,
    "deterministic": _deterministic,
    "ladder": _ladder,
}


# ---- compared with


def _without_repeatable(shape: Shape) -> Shape:
    return replace(shape, settings=tuple(pair for pair in shape.settings if pair[0] != "deterministic"))


# Suite -> the shape that one of its shapes is compared with: itself, where it is that.
COMPARED_WITH: dict[str, Callable[[Shape], Shape]] = {
    "blocks": lambda shape: replace(shape, settings=(), drawn=()),
    "options": lambda shape: replace(shape, heads_k=shape.heads, settings=(), drawn=()),
    "gqa": lambda shape: replace(shape, heads_k=shape.heads),
    "dtypes": lambda shape: replace(shape, dtype="bfloat16"),
    "deterministic": _without_repeatable,
}
