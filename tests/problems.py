"""Legal calls drawn from the whole contract: arrays, options, layouts, strides, corner values.

    @given(calls())                      Hypothesis
    for call in list_of_calls(100)       a plain list, always the same
    covering_builds(48)                  builds in which every two features meet, for calls(build=...)

A call is drawn in two steps.  A *build* fixes what a kernel is compiled for (dtype, head_dim, which
options are there).  Everything else (sizes, numbers, strides) is free, so one compiled kernel serves many
calls.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import cuflash

DTYPES = ("float32", "float16", "bfloat16", "float64")
HEAD_DIMS = (64, 1, 8, 40, 96, 128, 200, 256, 320)
# around the edges of tiles of 32, 64 and 128 rows
LENGTHS = (33, 1, 2, 5, 9, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 191, 200, 0)
NUMPY_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES}


@dataclass(frozen=True)
class Build:
    """What a kernel is compiled for.  Numbers of a feature (which window, which cap) are no part of it."""

    dtype: str = "float32"
    head_dim: int = 64
    head_dim_v: str = "same"  # "same" | "other": the fourth dim after head_dim in HEAD_DIMS
    out_dtype: str = "same"  # "same" | "float32" | "float16"
    dout_dtype: str = "same"  # of out and dout in the backward: "same" as the result's | "float32"
    sequences: str = "plain"  # "plain" | "key_lengths" | "both_lengths" | "packed"
    causal: bool = False
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    bias: str | None = None  # None | "same" | "float32"
    mask: bool = False
    block_mask: tuple[int, int] | None = None
    sink: bool = False
    dropout: bool = False
    dlse: bool = False
    deterministic: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """(head_dim, head_dim_v) of a call of this build."""
        if self.head_dim_v == "same":
            return self.head_dim, self.head_dim
        return self.head_dim, HEAD_DIMS[(HEAD_DIMS.index(self.head_dim) + 4) % len(HEAD_DIMS)]


BUILD_VALUES = {
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "head_dim_v": ("same", "other"),
    "out_dtype": ("same", "float32", "float16"),
    "dout_dtype": ("same", "float32"),
    "sequences": ("plain", "key_lengths", "both_lengths", "packed"),
    "causal": (False, True),
    "window": (False, True),
    "softcap": (False, True),
    "alibi": (False, True),
    "bias": (None, "same", "float32"),
    "mask": (False, True),
    "block_mask": (None, (16, 16), (64, 48)),
    "sink": (False, True),
    "dropout": (False, True),
    "dlse": (False, True),
    "deterministic": (False, True),
}


@dataclass
class Call:
    """One legal call: attention(q, k, v, **options), and dout and dlse for its backward."""

    q: Any
    k: Any
    v: Any
    dout: Any
    dlse: Any  # or None
    options: dict
    build: Build = field(default_factory=Build)
    deterministic: bool = False  # for the backward
    label: str = ""

    def __repr__(self):
        return f"Call({self.label})"

    def _repr_pretty_(self, printer, _cycle):  # what Hypothesis shows: not every number
        printer.text(repr(self))

    def on_device(self, device_lengths=False):
        """The same call on the current CUDA device, strides kept; lengths stay on the host by default."""
        moved = {name: copy_to_device(getattr(self, name)) for name in ("q", "k", "v", "dout", "dlse")}
        options = {}
        for name, value in self.options.items():
            is_lengths = name.endswith("_lengths") or name.startswith("cu_seqlens")
            if isinstance(value, np.ndarray) and (device_lengths or not is_lengths):
                value = copy_to_device(value)
            elif is_lengths and device_lengths:
                value = copy_to_device(np.asarray(value, np.int32))
            options[name] = value
        return replace(self, options=options, **moved)


def copy_to_device(array):
    """A CuPy view with the same shape and strides (0 and negative too) over a copy of the memory."""
    import cupy

    if array is None:
        return None
    low, high = np.lib.array_utils.byte_bounds(array)
    memory = cupy.asarray(np.frombuffer((ctypes.c_char * (high - low)).from_address(low), np.uint8))
    start = array.__array_interface__["data"][0] - low
    return cupy.ndarray(array.shape, array.dtype, memptr=memory.data + start, strides=array.strides)


# ---- drawing


@st.composite
def calls(draw, build=None, max_length=200, max_scores=2**18, extreme=True):
    """Hypothesis strategy of Calls.

    build: a Build, or None to draw one.  max_length bounds len_q and len_k, max_scores bounds
    batch x heads x len_q x len_k; small values for slow paths.  extreme=False leaves out huge and non-finite
    numbers.
    """

    def pick(name, values):
        return draw(st.sampled_from(values), label=name)

    return make_call(pick, draw(st.integers(0, 2**16), label="rng"), build, max_length, max_scores, extreme)


def list_of_calls(n, seed=0, build=None, max_length=200, max_scores=2**18, extreme=True):
    """n Calls, the same in every run: the plain list for parametrized tests.  Arguments as in `calls`."""
    rng = np.random.default_rng(seed)

    def pick(_name, values):
        return values[rng.integers(len(values))]

    return [make_call(pick, seed * 1000 + n, build, max_length, max_scores, extreme) for n in range(n)]


def draw_build(pick):
    """A Build in which each feature is as often absent as present."""
    return Build(**{name: pick(name, values) for name, values in BUILD_VALUES.items()})


def make_call(pick, seed, build, max_length, max_scores, extreme):
    """Draw every free choice by pick(name, values), then fill arrays from a generator seeded by `seed`.

    The call's name lists them in order, so that it can be made again: pick = lambda *_: next(choices)[1].
    """
    build = build or draw_build(pick)
    rng = np.random.default_rng(seed)
    ask, choices = pick, []

    def pick(name, values):
        choices.append((name, ask(name, values)))
        return choices[-1][1]

    sizes = draw_sizes(pick, build, max_length, max_scores)
    layout = "bshd" if build.sequences == "packed" else pick("layout", ("bshd", "bhsd"))
    values = pick("values", ("normal", "large", "same", "normal") if extreme else ("normal",))
    poison = pick("poison", (None, None, "beyond", "anywhere") if extreme else (None,))
    if poison == "anywhere":
        values = "normal"  # a weight that underflows in one dtype and not in another turns x inf into 0 x inf
    options = draw_options(pick, rng, build, sizes, extreme)
    if layout != "bshd":
        options["layout"] = layout
    arrays = {}
    for name in ("q", "k", "v", "dout"):
        strides = pick(f"strides of {name}", STRIDES)
        arrays[name] = draw_array(rng, name, build, sizes, layout, strides, values)
    lse_shape = (sizes.heads, sizes.len_q) if sizes.packed else (sizes.batch, sizes.heads, sizes.len_q)
    accumulator = "float64" if build.dtype == "float64" else "float32"
    arrays["dlse"] = rng.standard_normal(lse_shape).astype(accumulator) if build.dlse else None
    if poison:
        place_poison(rng, poison, arrays, options, sizes, layout)
    label = f"{sizes} seed={seed} {build} choices={choices}"
    return Call(**arrays, options=options, build=build, deterministic=build.deterministic, label=label)


@dataclass
class Sizes:
    """Shapes of a call.  Packed: len_q and len_k are tokens, batch the number of sequences."""

    batch: int
    len_q: int
    len_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    cu_q: Any = None
    cu_k: Any = None

    @property
    def packed(self):
        return self.cu_q is not None

    @property
    def longest(self):
        """(query rows, key rows) of the longest sequence."""
        if not self.packed:
            return self.len_q, self.len_k
        return int(np.max(np.diff(self.cu_q), initial=0)), int(np.max(np.diff(self.cu_k), initial=0))


def draw_sizes(pick, build, max_length, max_scores):
    lengths = tuple(n for n in LENGTHS if n <= max_length)
    batch = pick("batch", (1, 2, 3) * 6 + (0,))
    heads_k = pick("heads_k", (1, 2, 3) * 6 + (0,))
    heads = heads_k * pick("group", (1, 2, 4, 1))
    rows = {}
    for side in "qk":
        n = max(batch, 1) if build.sequences == "packed" else 1
        rows[side] = [pick(f"len_{side}", lengths) for _ in range(n)]
    if batch * heads * max(rows["q"]) * max(rows["k"]) > max_scores:
        batch, heads_k, heads = min(batch, 1), min(heads_k, 1), min(heads, 2)
        rows = {side: [min(n, int((max_scores / 2) ** 0.5)) for n in some[:1]] for side, some in rows.items()}
    if build.sequences != "packed":
        return Sizes(batch, rows["q"][0], rows["k"][0], heads, heads_k, *build.head_dims)
    # tokens past the last cumulative length belong to no sequence
    cu = {side: np.cumsum([0, *some[:batch]], dtype=np.int32) for side, some in rows.items()}
    tail = pick("tail", (0, 3))
    tokens = {side: int(cu[side][-1]) + tail for side in cu}
    return Sizes(batch, tokens["q"], tokens["k"], heads, heads_k, *build.head_dims, cu["q"], cu["k"])


def draw_options(pick, rng, build, sizes, extreme):
    """The options of a call: only those that are not at their default."""
    options = {}
    rows, keys = sizes.longest
    dtype = NUMPY_DTYPES[build.dtype]
    accumulator = "float64" if build.dtype == "float64" else "float32"
    scores_shape = (sizes.batch, sizes.heads, rows, keys)
    if build.out_dtype != "same":
        options["out_dtype"] = build.out_dtype
    scale = pick("scale", (None, None, 0.25, -0.3, 0.0) if extreme else (None, 0.25))
    if scale is not None:
        options["scale"] = scale
    if build.causal:
        options["causal"] = True
    if build.window:
        edges = (None, 17, 70, 1, 0)
        options["window"] = (pick("window left", edges), pick("window right", edges))
    offset = pick("query_offset", (None,) * 6 + (0, 0, 0, 3, -5, keys, -rows - 1))
    if offset is not None:
        options["query_offset"] = offset
    if build.softcap:
        options["softcap"] = pick("softcap", (2.0, 30.0))
    if build.alibi:
        shape = pick("alibi", ((sizes.heads,), (sizes.batch, sizes.heads)))
        options["alibi_slopes"] = rng.uniform(-0.1, 0.3, shape).astype(accumulator)
    if build.bias:
        bias = np.asarray(rng.standard_normal(draw_broadcast(pick, "bias", scores_shape)))
        if extreme and pick("bias values", ("normal", "hiding")) == "hiding":
            bias[rng.random(bias.shape) < (0.3 if bias.size > 8 else 0.1)] = -np.inf
        options["bias"] = bias.astype(dtype if build.bias == "same" else np.float32)
    if build.mask:
        mask = np.asarray(rng.random(draw_broadcast(pick, "mask", scores_shape)))
        options["mask"] = np.asarray(mask < (pick("kept", (0.7, 0.95, 0.1)) if mask.size > 8 else 0.9))
    if build.block_mask:
        options["block_mask"] = draw_block_mask(pick, rng, build.block_mask, sizes)
    if build.sink:
        sink = rng.standard_normal(sizes.heads).astype(accumulator)
        if extreme and sizes.heads and pick("sink value", ("normal", "normal", "hidden")) == "hidden":
            sink[0] = -np.inf
        options["sink"] = sink
    if build.dropout:
        seed = int(rng.integers(2**63)) * 2 + 1
        options["dropout"] = pick("dropout", ((0.3, seed), (0.9, 7), (0.5, seed, (1, 2, 65, 30))))
    as_given = pick("lengths as", (list, np.int32, np.int64))
    lengths = {}
    if build.sequences in ("key_lengths", "both_lengths"):
        lengths["key_lengths"] = rng.integers(0, sizes.len_k + 1, sizes.batch)
    if build.sequences == "both_lengths":
        lengths["query_lengths"] = rng.integers(0, sizes.len_q + 1, sizes.batch)
    if sizes.packed:
        lengths["cu_seqlens_q"], lengths["cu_seqlens_k"] = sizes.cu_q, sizes.cu_k
    for name, value in lengths.items():
        options[name] = value.tolist() if as_given is list else value.astype(as_given)
    return options


def draw_broadcast(pick, name, shape):
    """A shape that broadcasts to the scores: any axes of length 1, leading axes left out or not."""
    kept = pick(f"{name} axes", tuple(itertools.product((True, False), repeat=4)))
    shape = tuple(n if keep else 1 for n, keep in zip(shape, kept, strict=True))
    first = next((axis for axis, n in enumerate(shape) if n != 1), 4)
    return shape[pick(f"{name} leading axes", (0, first)) :]


def draw_block_mask(pick, rng, block, sizes):
    """A random BlockMask that covers the longest sequence."""
    rows, keys = sizes.longest
    batch = pick("block mask batch", (1, sizes.batch))
    heads = pick("block mask heads", (1, sizes.heads))
    shape = (batch, heads, -(-rows // block[0]), -(-keys // block[1]))
    dense = rng.random(shape) < pick("blocks kept", (0.7, 0.9) * 4 + (0.0,))
    counts = np.concatenate([[0], dense.sum(-1).ravel()]).cumsum()
    starts = np.arange(batch * heads).reshape(batch, heads, 1) * shape[2] + np.arange(shape[2] + 1)
    indices = np.nonzero(dense)[3]
    return cuflash.BlockMask(*block, counts[starts].astype(np.int32), indices.astype(np.int32))


STRIDES = (
    "contiguous",
    "other layout",
    "every other row",
    "reversed rows",
    "wide heads",
    "strided dim",
    "broadcast heads",
)


def draw_array(rng, name, build, sizes, layout, strides, values):
    """q, k, v or dout with the shape, dtype and strides asked for."""
    heads = sizes.heads if name in ("q", "dout") else sizes.heads_k
    rows = sizes.len_q if name in ("q", "dout") else sizes.len_k
    dim = sizes.head_dim if name in ("q", "k") else sizes.head_dim_v
    dtype = build.dtype
    if name == "dout":
        dtype = build.dtype if build.out_dtype == "same" else build.out_dtype
        dtype = dtype if build.dout_dtype == "same" else build.dout_dtype
    batch = 1 if sizes.packed else sizes.batch
    # made as (batch, rows, heads, dim) with room around it, then cut and turned into what the call gets
    step = {"every other row": 2, "reversed rows": -1}.get(strides, 1)
    shape = [batch, rows * abs(step), heads, dim]
    if strides == "wide heads":
        shape[2] += 1
    if strides == "strided dim":
        shape[3] *= 2
    if strides == "broadcast heads":
        shape[2] = min(heads, 1)
    numbers = rng.standard_normal(shape) * {"normal": 1.0, "large": 8.0, "same": 0.0}[values]
    if values == "same":
        numbers += rng.standard_normal((1, 1, 1, dim * (2 if strides == "strided dim" else 1)))
    numbers = numbers.astype(NUMPY_DTYPES[dtype])
    if strides == "other layout" or (layout == "bhsd" and strides == "contiguous"):
        numbers = np.ascontiguousarray(numbers.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    numbers = numbers[:, ::step]
    if strides == "wide heads":
        numbers = numbers[:, :, :heads]
    if strides == "strided dim":
        numbers = numbers[..., ::2]
    if strides == "broadcast heads":
        numbers = np.broadcast_to(numbers, (batch, rows, heads, dim))
    if sizes.packed:
        return numbers[0]
    return numbers.transpose(0, 2, 1, 3) if layout == "bhsd" else numbers


def place_poison(rng, poison, arrays, options, sizes, layout):
    """Write NaN or inf into rows: "beyond" every length, where it must not leak, or "anywhere"."""
    row_axis = {"bshd": -3, "bhsd": -2}[layout]
    for name in [name for name, array in arrays.items() if array is not None]:
        side = "k" if name in ("k", "v") else "q"
        array = arrays[name] = arrays[name].copy()  # broadcast views share their rows
        rows_first = np.moveaxis(array, -1 if name == "dlse" else row_axis, 0)
        if poison == "anywhere":
            if array.size and rng.random() < 0.5:
                bad = np.nan if name in ("v", "dout", "dlse") else rng.choice([np.nan, np.inf])
                rows_first[rng.integers(len(rows_first)), ..., 0] = bad
        elif sizes.packed:
            rows_first[options[f"cu_seqlens_{side}"][-1] :] = np.nan
        else:
            lengths = options.get({"q": "query_lengths", "k": "key_lengths"}[side], ())
            for b, n in enumerate(lengths):
                rows_first[int(n) :, b] = np.nan


# ---- pairwise covering


def covering_builds(n=48, seed=0, values=BUILD_VALUES):
    """n Builds in which every two values of two different features meet at least once; always the same list.

    values: feature -> its values; features that are left out stay at their default.

    Greedy: each new build starts from a pair not yet met and takes, feature by feature in random order,
    the value that meets most pairs not yet met; of a few such builds the best is kept.  ValueError when n
    is too small.
    """
    rng = np.random.default_rng(seed)
    names = tuple(values)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(values[names[a]]))
        for y in range(len(values[names[b]]))
    }

    def pairs(chosen):
        return {tuple(pair) for pair in itertools.combinations(sorted(chosen.items()), 2)}

    def candidate():
        order = sorted(missing)
        chosen = dict(order[rng.integers(len(order))])
        for axis in rng.permutation(len(names)).tolist():
            if axis not in chosen:
                gains = [
                    sum(tuple(sorted([(axis, value), item])) in missing for item in chosen.items())
                    for value in range(len(values[names[axis]]))
                ]
                best = np.flatnonzero(np.array(gains) == max(gains))
                chosen[axis] = int(rng.choice(best))
        return chosen

    builds = []
    while len(builds) < n:
        if missing:
            chosen = max((candidate() for _ in range(20)), key=lambda c: len(pairs(c) & missing))
            missing -= pairs(chosen)
        else:
            chosen = {axis: int(rng.integers(len(values[name]))) for axis, name in enumerate(names)}
        features = {names[axis]: values[names[axis]][value] for axis, value in chosen.items()}
        builds.append(Build(**features))
    if missing:
        raise ValueError(f"{n} builds are too few: {len(missing)} pairs never meet")
    return builds
