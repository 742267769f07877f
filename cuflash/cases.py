"""The fixed list of problems that `cuflash check` runs: the contract, one rule a case, small sizes.

A Case is data; `make(case, dtype)` draws its arrays.  Sizes stand around tile edges (64 and 128 with a ragged
rest), and cases that differ in shapes alone share one build of a kernel.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash.arrays import numpy_dtype
from cuflash.errors import CuflashError


@dataclass(frozen=True)
class Case:
    """One problem.  shape: (batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v).

    options: keyword arguments as they are.  draw: name -> function (random, case, dtype) -> option or array.
    change: what is done to q, k, v before the call (strides, values).  quick: part of `--quick`.
    dlse: a gradient of lse comes along.  packed: batch is 1 and its axis is dropped; lengths are tokens.
    """

    name: str
    shape: tuple[int, int, int, int, int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    draw: dict[str, Callable[..., Any]] = field(default_factory=dict)
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None
    quick: bool = False
    dlse: bool = False
    packed: bool = False


def wide(dtype: str) -> np.dtype:
    """dtype of alibi_slopes, sink and dlse: float64 with float64 inputs, else float32."""
    return np.dtype("float64" if dtype == "float64" else "float32")


# ---- what options are drawn from


def _bias(*axes: int) -> Callable[..., np.ndarray]:
    """A bias that keeps the axes (batch 0, heads 1, len_q 2, len_k 3) and broadcasts over the others."""

    def draw(random: np.random.Generator, case: Case, dtype: str) -> np.ndarray:
        batch, len_q, len_k, heads = case.shape[:4]
        full = (batch, heads, len_q, len_k)
        kept = [n if axis in axes else 1 for axis, n in enumerate(full)]
        return random.standard_normal(kept).astype(numpy_dtype(dtype))

    return draw


def _bias_with_holes(random: np.random.Generator, case: Case, dtype: str) -> np.ndarray:
    """A full bias in which one score in five is -inf (hidden), and the whole first query row is."""
    bias = _bias(0, 1, 2, 3)(random, case, dtype)
    bias[random.random(bias.shape) < 0.2] = -np.inf
    bias[:, :, 0] = -np.inf
    return bias


def _mask(random: np.random.Generator, case: Case, dtype: str) -> np.ndarray:
    """A boolean mask (batch, 1, len_q, len_k): about half is visible, one row nowhere."""
    batch, len_q, len_k, _ = case.shape[:4]
    mask = random.random((batch, 1, len_q, len_k)) < 0.5
    mask[:, :, len_q // 2] = False
    return mask


def _slopes(random: np.random.Generator, case: Case, dtype: str) -> np.ndarray:
    return random.uniform(0.01, 0.5, case.shape[3]).astype(wide(dtype))


def _batch_slopes(random: np.random.Generator, case: Case, dtype: str) -> np.ndarray:
    return random.uniform(0.01, 0.5, (case.shape[0], case.shape[3])).astype(wide(dtype))


def _sink(random: np.random.Generator, case: Case, dtype: str) -> np.ndarray:
    return random.standard_normal(case.shape[3]).astype(wide(dtype))


def _block_mask(random: np.random.Generator, case: Case, dtype: str) -> Any:
    """Blocks of 16 x 32; about half are kept, the first block row not at all."""
    from cuflash import BlockMask

    _, len_q, len_k, heads = case.shape[:4]
    kept = random.random((1, heads, -(-len_q // 16), -(-len_k // 32))) < 0.5
    kept[:, :, 0] = False
    return BlockMask.from_dense(kept, 16, 32)


def _lengths(which: str) -> Callable[..., np.ndarray]:
    def draw(random: np.random.Generator, case: Case, dtype: str) -> np.ndarray:
        longest = case.shape[1] if which == "query" else case.shape[2]
        lengths = random.integers(1, longest + 1, case.shape[0])
        lengths[0] = 0  # a sequence of no rows is ordinary
        return lengths

    return draw


# ---- what is done to q, k, v


def _strided(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q backwards over length, k broadcast over heads, v a view whose axes lie in another order."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    return {
        "q": q[:, ::-1],
        "k": np.broadcast_to(k[:, :, :1], k.shape),
        "v": np.ascontiguousarray(v.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3),
    }


def _last_axis(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The last axis in steps of two elements: a kernel needs a copy, or says that it does not take it."""
    return {name: np.repeat(array, 2, axis=-1)[..., ::2] for name, array in arrays.items()}


def _large(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q sixteen times larger: scores of some dozens, where exp overflows without the running maximum."""
    return {**arrays, "q": arrays["q"] * np.asarray(16, arrays["q"].dtype)}


# Options of the command line that take an array.
DRAW = {
    "alibi_slopes": _slopes,
    "bias": _bias(0, 1, 2, 3),
    "mask": _mask,
    "sink": _sink,
    "key_lengths": _lengths("key"),
}


def cases(quick: bool = False) -> list[Case]:
    """Every case, or those of `--quick`."""
    gqa = (2, 70, 93, 4, 2, 64, 64)
    square = (2, 96, 96, 4, 4, 64, 64)
    packed = (1, 150, 170, 4, 2, 64, 64)
    cumulative = {"cu_seqlens_q": [0, 40, 40, 150], "cu_seqlens_k": [0, 33, 60, 170]}
    left = {"window": (20, None), "causal": True}
    everything = {
        "draw": {
            "alibi_slopes": _slopes,
            "bias": _bias(1, 2, 3),
            "mask": _mask,
            "sink": _sink,
            "block_mask": _block_mask,
            "query_lengths": _lengths("query"),
            "key_lengths": _lengths("key"),
        },
        "options": {"softcap": 20.0, "causal": True, "window": (50, None), "dropout": (0.2, 7), "scale": 0.2},
        "dlse": True,
    }
    found = [
        Case("plain", (1, 64, 64, 2, 2, 64, 64), quick=True),
        Case("ragged grouped heads", gqa, quick=True, dlse=True),
        Case("causal", square, {"causal": True}, quick=True),
        Case("causal few keys", (1, 93, 70, 2, 1, 64, 64), {"causal": True}, quick=True, dlse=True),
        Case("causal offset 0", gqa, {"causal": True, "query_offset": 0}),
        Case("causal offset -30", gqa, {"causal": True, "query_offset": -30}),
        Case("one query many keys", (2, 1, 700, 8, 2, 64, 64), {"causal": True}),
        Case("long", (1, 600, 1100, 1, 1, 64, 64), {"causal": True}),
        Case("head_dim 1", (1, 33, 40, 2, 2, 1, 1)),
        Case("head_dim 40", (1, 65, 70, 2, 2, 40, 40), {"causal": True}),
        Case("head_dim 128", (1, 130, 150, 2, 1, 128, 128), {"causal": True}, quick=True),
        Case("head_dim 192 v 128", (1, 70, 70, 2, 2, 192, 128), {"causal": True}),
        Case("head_dim 40 v 200", (1, 50, 60, 2, 2, 40, 200)),
        Case("head_dim 256", (1, 70, 70, 1, 1, 256, 256)),
        Case("head_dim 320 v 257", (1, 40, 50, 2, 2, 320, 257)),
        Case("no sequences", (0, 8, 8, 2, 2, 64, 64)),
        Case("no queries", (2, 0, 8, 2, 2, 64, 64)),
        Case("no keys", (2, 8, 0, 2, 2, 64, 64), quick=True),
        Case("no heads", (2, 8, 8, 0, 0, 64, 64)),
        Case("strides", square, change=_strided, quick=True),
        Case("last axis strided", square, change=_last_axis),
        Case("layout bhsd", square, {"layout": "bhsd", "causal": True}),
        Case("scale 0", gqa, {"scale": 0.0}),
        Case("scale -0.1", gqa, {"scale": -0.1, "causal": True}),
        Case("large scores", square, change=_large, quick=True),
        Case("window left", square, left, quick=True),
        Case("window both sides", gqa, {"window": (10, 15)}),
        Case("window out of reach", gqa, {"window": (5, 5), "query_offset": 60}),
        Case("key lengths", gqa, draw={"key_lengths": _lengths("key")}, quick=True),
        Case("both lengths causal", gqa, {"causal": True},
             draw={"query_lengths": _lengths("query"), "key_lengths": _lengths("key")}, dlse=True),
        Case("packed causal", packed, {**cumulative, "causal": True}, packed=True, quick=True, dlse=True),
        Case("softcap", gqa, {"softcap": 5.0}, quick=True),
        Case("alibi", gqa, {"causal": True}, draw={"alibi_slopes": _slopes}, quick=True),
        Case("alibi by batch", gqa, draw={"alibi_slopes": _batch_slopes}),
        Case("bias", gqa, draw={"bias": _bias(0, 1, 2, 3)}, quick=True),
        Case("bias by key", gqa, draw={"bias": _bias(0, 3)}),
        Case("bias by head and query", gqa, draw={"bias": _bias(1, 2)}),
        Case("bias with holes", gqa, draw={"bias": _bias_with_holes}),
        Case("mask", gqa, draw={"mask": _mask}, quick=True),
        Case("block mask", (2, 70, 93, 4, 2, 64, 64), draw={"block_mask": _block_mask}, quick=True),
        Case("sink", gqa, {"causal": True, "query_offset": -10}, draw={"sink": _sink}, quick=True, dlse=True),
        Case("dropout", gqa, {"dropout": (0.3, 2**40 + 5)}, quick=True),
        Case("dropout of a shard", gqa, {"dropout": (0.3, 11, (1, 2, 30, 41)), "causal": True}),
        Case("out_dtype float32", square, {"out_dtype": "float32"}),
        Case("everything", gqa, quick=True, **everything),
    ]  # fmt: skip
    return [case for case in found if case.quick] if quick else found


def make(case: Case, dtype: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Draw a case: (arrays q, k, v, dout, dlse), options.  The same numbers for every dtype, rounded to it.

    Packed cases give arrays without a batch axis.  dlse is absent where the case has none.
    """
    random = np.random.default_rng(zlib.crc32(case.name.encode()))  # the same on every machine, unlike hash()
    batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v = case.shape
    shapes = {
        "q": (batch, len_q, heads, head_dim),
        "k": (batch, len_k, heads_k, head_dim),
        "v": (batch, len_k, heads_k, head_dim_v),
    }
    element = numpy_dtype(dtype)
    arrays = {name: random.standard_normal(shape).astype(element) for name, shape in shapes.items()}
    dout = random.standard_normal((batch, len_q, heads, head_dim_v)).astype(element)
    dlse = random.standard_normal((batch, heads, len_q)).astype(wide(dtype))
    options = {**case.options, **{name: draw(random, case, dtype) for name, draw in case.draw.items()}}
    if case.change is not None:
        arrays = case.change(arrays)
    arrays["dout"] = dout
    if options.get("layout") == "bhsd":
        arrays = {name: np.ascontiguousarray(array.transpose(0, 2, 1, 3)) for name, array in arrays.items()}
    if case.packed:
        arrays = {name: array[0] for name, array in arrays.items()}
        dlse = dlse[0]
    if case.dlse:
        arrays["dlse"] = dlse
    return arrays, options


def find(names: list[str] | None, quick: bool = False) -> list[Case]:
    """Cases by name (all of them when names is None)."""
    known = cases(quick and names is None)
    if names is None:
        return known
    unknown = sorted(set(names) - {case.name for case in known})
    if unknown:
        listed = "; ".join(case.name for case in known)
        raise CuflashError(f"check: unknown case {', '.join(unknown)}; known: {listed}.")
    return [case for case in known if case.name in names]
