"""What is measured: a Shape is one problem as data, a suite is a list of them.

The grids are those of the FlashAttention papers: a fixed number of tokens is split into batch x length, and a
fixed hidden size into heads x head_dim, so that every cell has the same arrays and only attention changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cuflash.errors import CuflashError

TOKENS, HIDDEN = 16384, 2048
ENVELOPE = {"head_dims": (64, 96, 128, 192, 256), "lengths": (512, 2048, 8192, 16384)}
DEFAULT = {"head_dims": (64, 128), "lengths": (512, 2048, 8192)}
GRIDS = {"default": DEFAULT, "envelope": ENVELOPE}


@dataclass(frozen=True)
class Shape:
    """One problem to measure.

    settings: (option, value) of the call, arrays apart.  drawn: names of array options (inputs.DRAWN).
    With "packed" among them len_q and len_k are averages: batch sequences, batch * len_q tokens.
    """

    direction: str
    batch: int
    len_q: int
    len_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    settings: tuple[tuple[str, Any], ...] = ()
    drawn: tuple[str, ...] = ()

    @property
    def causal(self) -> bool:
        return bool(dict(self.settings).get("causal"))

    @property
    def sizes(self) -> tuple[int, ...]:
        """As cases.Case takes them."""
        return (
            self.batch, self.len_q, self.len_k, self.heads, self.heads_k, self.head_dim, self.head_dim_v
        )  # fmt: skip

    @property
    def others(self) -> list[str]:
        """Options beyond causal, in words."""
        words = [f"{name} {value}" for name, value in self.settings if name != "causal"]
        return [*words, *self.drawn]

    @property
    def is_plain(self) -> bool:
        """Self-attention without options but causal, every head its own key head."""
        square = self.len_q == self.len_k and self.heads == self.heads_k
        return square and self.head_dim == self.head_dim_v and not self.others

    def label(self) -> str:
        """One line for tables and messages."""
        length = f"{self.len_q:,}" if self.len_q == self.len_k else f"{self.len_q:,} x {self.len_k:,}"
        heads = f"{self.heads}" if self.heads == self.heads_k else f"{self.heads}/{self.heads_k}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        words = [f"d {dim}", f"length {length}", f"batch {self.batch}", f"heads {heads}"]
        return ", ".join([*words, *(["causal"] if self.causal else []), *self.others])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "settings": [list(pair) for pair in self.settings], "drawn": list(self.drawn)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Shape:
        settings = tuple(
            (name, tuple(value) if isinstance(value, list) else value) for name, value in data["settings"]
        )
        return cls(**{**data, "settings": settings, "drawn": tuple(data["drawn"])})


@dataclass(frozen=True)
class Suite:
    """A list of shapes and what is read off them.

    metric: "tflops"; "tbs" (bytes of inputs and outputs, for decoding); "ms"; "host_us" (time of a call on
    the host, without waiting); "bytes" (memory above inputs and outputs).  ladder: every rung runs, not just
    the best.  graph: "auto" replays short forwards from CUDA graphs, "always" all forwards, "never" none.
    """

    name: str
    shapes: tuple[Shape, ...]
    metric: str = "tflops"
    ladder: bool = False
    graph: str = "auto"
    own: bool = False  # sizes or options were given on the command line


@dataclass(frozen=True)
class Sizes:
    """What the command line may say of sizes; None leaves the suite's own choice."""

    head_dims: tuple[int, ...] | None = None
    head_dim_v: int | None = None
    lengths: tuple[int, ...] | None = None
    len_k: int | None = None
    batch: int | None = None
    heads: int | None = None
    heads_k: int | None = None
    causal: tuple[bool, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    tokens: int | None = None
    hidden: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    drawn: tuple[str, ...] = ()

    @property
    def given(self) -> bool:
        return self != Sizes()


def grid(
    directions: Sequence[str], sizes: Sizes, *, head_dims: Sequence[int], lengths: Sequence[int], dtype: str,
    causal: Sequence[bool] = (False, True), tokens: int = TOKENS, hidden: int = HIDDEN,
) -> tuple[Shape, ...]:  # fmt: skip
    """Every combination, in the order head_dim, length, causal; what `sizes` says comes first."""
    of_one = (sizes.head_dim_v, sizes.len_k, sizes.batch, sizes.heads, sizes.heads_k)
    single = [n for n in (*of_one, sizes.tokens, sizes.hidden) if n is not None]
    given = [*(sizes.head_dims or ()), *(sizes.lengths or ()), *single]
    if min(given, default=1) < 1:
        raise CuflashError(f"bench: a size is {min(given)}; every size needs to be 1 or more.")
    found = []
    for dtype_ in sizes.dtypes or (dtype,):
        for direction in directions:
            for head_dim in sizes.head_dims or head_dims:
                for length in sizes.lengths or lengths:
                    for is_causal in sizes.causal or causal:
                        plain = _plain(direction, head_dim, length, is_causal, dtype_, tokens, hidden, sizes)
                        found.append(plain)
    for shape in found:
        if shape.heads % shape.heads_k:
            raise CuflashError(f"bench: {shape.heads} heads are no multiple of {shape.heads_k} key heads.")
    return tuple(dict.fromkeys(found))


def _plain(
    direction: str, head_dim: int, length: int, causal: bool, dtype: str, tokens: int, hidden: int,
    sizes: Sizes,
) -> Shape:  # fmt: skip
    heads = sizes.heads or max(1, (sizes.hidden or hidden) // head_dim)
    settings = ((("causal", True),) if causal else ()) + sizes.settings
    return Shape(
        direction,
        sizes.batch or max(1, (sizes.tokens or tokens) // length),
        length,
        sizes.len_k or length,
        heads,
        sizes.heads_k or heads,
        head_dim,
        sizes.head_dim_v or head_dim,
        dtype,
        settings,
        sizes.drawn,
    )


# ---- suites


SUITES = {
    "forward": "TFLOP/s of the forward",
    "backward": "TFLOP/s of the backward",
    "short": "short sequences, replayed from CUDA graphs",
    "decode": "one query row and many keys (GQA): bytes per second",
    "float32": "float32 on the plain arithmetic units, forward and backward",
    "memory": "bytes above inputs and outputs, against length",
    "host": "what a warm call costs the host",
    "cpu": "the NumPy path beside other CPU attention",
    "blocks": "block masks: time against the share of blocks kept",
    "options": "what each option costs: one problem, one option at a time",
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
    directions = ("forward", "backward")
    if place == "cpu":
        return Suite("", _cpu_shapes(directions, sizes), graph="never")
    lengths = (1024, 2048, 4096, 8192, 16384)
    return Suite("", grid(directions, sizes, head_dims=(64, 128), lengths=lengths, dtype="float32",
                          causal=(False,), tokens=16384, hidden=1024), ladder=False)  # fmt: skip


def _memory(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    lengths = (1024, 4096, 16384, 32768) if place == "gpu" else (1024, 4096)
    one = replace(sizes, batch=sizes.batch or 1, heads=sizes.heads or (8 if place == "gpu" else 2))
    dtype = dtype if place == "gpu" else "float32"
    both = ("forward", "backward")
    shapes = grid(both, one, head_dims=(64,), lengths=lengths, dtype=dtype, causal=(False,))
    return Suite("", shapes, "bytes", graph="never")


def _host(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    one = replace(sizes, batch=sizes.batch or 1, heads=sizes.heads or 8)
    dtype = dtype if place == "gpu" else "float32"
    shapes = grid(("forward", "backward"), one, head_dims=(64,), lengths=(128,), dtype=dtype, causal=(False,))
    return Suite("", shapes, "host_us", graph="never")


def _cpu(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    return Suite("", _cpu_shapes(("forward", "backward"), sizes), "ms", graph="never")


def _blocks(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    """One problem with fewer and fewer of its 128 x 128 blocks kept."""
    on_cpu = {"tokens": 4096, "hidden": 256} if place == "cpu" else {}
    dtype, length = ("float32", 4096) if place == "cpu" else (dtype, 8192)
    found: list[Shape] = []
    for kept in sizes.drawn or ("blocks_1", "blocks_1/2", "blocks_1/4", "blocks_1/8"):
        one = replace(sizes, drawn=(kept,), causal=sizes.causal or (False,))
        both = ("forward", "backward")
        found += grid(both, one, head_dims=(64,), lengths=(length,), dtype=dtype, **on_cpu)
    return Suite("", tuple(found), "ms", graph="never")


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
    on_cpu = {"tokens": 1024, "hidden": 256} if place == "cpu" else {}
    dim, length = ((64,), (512,)) if place == "cpu" else ((128,), (4096,))
    dtype, found = "float32" if place == "cpu" else dtype, []
    for direction in ("forward", "backward"):
        for settings, drawn, group in ONE_OPTION:
            if direction == "forward" and dict(settings).get("deterministic"):
                continue
            one = replace(sizes, settings=(*settings, *sizes.settings), drawn=(*drawn, *sizes.drawn))
            (shape,) = grid(
                (direction,), one, head_dims=dim, lengths=length, causal=(False,), dtype=dtype, **on_cpu
            )
            found.append(replace(shape, heads_k=max(1, shape.heads_k // group)))
    return Suite("", tuple(dict.fromkeys(found)), "ms", graph="never")


def _ladder(sizes: Sizes, place: str, dtype: str, which: dict[str, Any]) -> Suite:
    """Every rung on problems that the slowest can still do in a second or two."""
    both, one = ("forward", "backward"), {"lengths": (4096,), "dtype": dtype, "tokens": 8192}
    shapes = grid(both, sizes, head_dims=(64, 128), **one)
    if sizes.head_dims is None:
        shapes += grid(both, sizes, head_dims=(256,), causal=(False,), **one)
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
    "ladder": _ladder,
}


def by_direction(shapes: Sequence[Shape]) -> Iterator[tuple[str, list[Shape]]]:
    """(direction, its shapes), forward first."""
    for direction in ("forward", "backward"):
        found = [shape for shape in shapes if shape.direction == direction]
        if found:
            yield direction, found
