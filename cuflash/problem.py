"""What a call is, apart from the numbers in its arrays: check.py makes these, all after it reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class ArraySpec:
    """Shape, dtype and strides of an array that need not exist.

    shape and strides are in elements, in the caller's axis order; align is the largest power of two, at
    most 256, that divides the address in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    align: int = 256


@dataclass(frozen=True)
class Problem:
    """A call without its numbers.  Frozen and hashable: it is the key of every plan and of every build.

    Sizes follow design: q (batch, len_q, heads, head_dim), k (batch, len_k, heads_k, head_dim), v (batch,
    len_k, heads_k, head_dim_v).  When `packed`, batch is the number of sequences and len_q, len_k are the
    tokens in the arrays, an upper bound of every sequence's length.
    """

    direction: str  # "forward" | "backward"
    dtype: str  # of q, k, v
    out_dtype: str  # of out in the forward, of dq, dk, dv in the backward
    batch: int
    len_q: int
    len_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    packed: bool = False  # cu_seqlens_q and cu_seqlens_k are given
    layout: str = "bshd"  # of the caller's arrays and of new outputs; specs are canonical either way
    has_query_lengths: bool = False
    has_key_lengths: bool = False
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)  # (left, right), None is unbounded
    query_offset: int | None = None  # None: len_k - len_q of the sequence
    softcap: float | None = None
    has_alibi: bool = False
    bias: str | None = None  # dtype of bias, None without one
    has_mask: bool = False
    block_mask: tuple[int, int] | None = None  # (block_q, block_k)
    has_sink: bool = False
    dropout: float | None = None  # p; None also for p = 0
    precision: str | None = None  # "float32" | "tf32" | None; float32 inputs only
    deterministic: bool = False  # backward
    has_dlse: bool = False  # backward
    gradients: tuple[str, ...] = ()  # backward: which of dq dk dv dbias dsink dalibi_slopes are computed
    # (name, ArraySpec) of every operand in its canonical view (see Operands), sorted by name
    specs: tuple[tuple[str, ArraySpec], ...] = ()

    def spec(self, name: str) -> ArraySpec | None:
        return dict(self.specs).get(name)

    @property
    def accumulator(self) -> str:
        """dtype of sums, softmax, lse: float32, or float64 for float64 inputs."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def group(self) -> int:
        """Query heads per key head (GQA)."""
        return self.heads // self.heads_k if self.heads_k else 0


@dataclass
class Operands:
    """The arrays of one call as views in canonical axis order; nothing is copied to make them.

    | field | canonical view |
    |---|---|
    | q, dq | (batch, len_q, heads, head_dim) |
    | k, dk | (batch, len_k, heads_k, head_dim) |
    | v, dv | (batch, len_k, heads_k, head_dim_v) |
    | out, dout | (batch, len_q, heads, head_dim_v) |
    | lse, dlse | (batch, heads, len_q) |
    | bias, mask, dbias | (batch or 1, heads or 1, len_q or 1, len_k or 1): broadcast axes have length 1 |
    | alibi_slopes, dalibi_slopes | (batch or 1, heads) |
    | sink, dsink | (heads,) |
    | query_lengths, key_lengths | (batch,) integers, NumPy (host) or device |
    | cu_seqlens_q, cu_seqlens_k | (batch + 1,) integers, NumPy (host) or device |

    Packed calls have one leading axis of length 1 in place of batch: q is (1, tokens, heads, head_dim), lse
    is (1, heads, tokens), and rows of sequence b are cu_seqlens_q[b] to cu_seqlens_q[b + 1].  bias, mask
    and alibi_slopes keep their batch axis: entry b belongs to sequence b.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    out: Any = None  # forward: where to write (None: allocate); backward: the forward's output
    lse: Any = None
    dout: Any = None
    dlse: Any = None
    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    sink: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    block_mask: Any = None  # cuflash.BlockMask
    seed: Any = None  # dropout: an int, or a 0-d uint64 device array
    counter_shift: tuple[int, int, int, int] = (0, 0, 0, 0)  # (batch0, head0, i0, j0) of contract item 10
    grads: dict[str, Any] = field(default_factory=dict)  # backward: name -> array to write
    workspace: Any = None
    progress: Any = None  # callable (done, total)
