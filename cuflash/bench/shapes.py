"""What is measured: a Shape is one problem as data, a Suite is a list of them.  suites.py has them by name.

The grids are those of the FlashAttention papers: a fixed number of tokens is split into batch x length, and a
fixed hidden size into heads x head_dim, so that every cell has the same arrays and only attention changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
