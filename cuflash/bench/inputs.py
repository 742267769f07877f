"""The arrays of a shape: normal numbers, drawn where they are used; several sets where one fits in L2."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash import cases, cost
from cuflash.arrays import numpy_dtype
from cuflash.bench.shapes import Shape
from cuflash.blockmask import BlockMask
from cuflash.check import check
from cuflash.problem import Operands, Problem
from cuflash.reference_scores import is_visible, sequences

DISTRIBUTION = "q, k, v, dout N(0,1), rounded to the dtype"
# Name of a block mask -> the share of its blocks that are kept.
BLOCKS = {"block_mask": 0.25, "blocks_1": 1.0, "blocks_1/2": 0.5, "blocks_1/4": 0.25, "blocks_1/8": 0.125}
PLANE = "bias_plane"  # a bias that all heads and sequences share
DRAWN = (*cases.DRAW, PLANE, "packed", *BLOCKS)
MAX_SETS = 256
PAIRS_AT_ONCE = 2**26  # of visible pairs counted at once


@dataclass
class Inputs:
    """Arrays on one module xp (numpy or cupy).

    sets: q, k, v and dout of each of n different problems of the same shape; calls take them in turn.
    options: keyword arguments of `attention`, shared by all sets.
    """

    shape: Shape
    xp: Any
    sets: list[dict[str, Any]]
    options: dict[str, Any]
    problem: Problem  # of the forward, first set
    operands: Operands
    cached: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> dict[str, Any]:
        return self.sets[0]

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs over all sequences and heads: what FLOPs are counted from."""
        if "pairs" not in self.cached:
            self.cached["pairs"] = visible_pairs(self.problem, self.operands)
        return self.cached["pairs"]

    @property
    def flops(self) -> int:
        """2 per pair and dimension of each product: two products in the forward, five in the backward."""
        d, dv = self.shape.head_dim, self.shape.head_dim_v
        per_pair = 2 * d + 2 * dv if self.shape.direction == "forward" else 6 * d + 4 * dv
        return per_pair * self.pairs

    @property
    def least_bytes(self) -> int:
        """Every operand read once, every result written once (of the forward)."""
        return cost.least_bytes(self.problem)


def seed_of(shape: Shape) -> int:
    """The same numbers for a shape on every machine and in every run."""
    return zlib.crc32(shape.label().encode())


def draw(shape: Shape, xp: Any, cache_bytes: int = 0) -> Inputs:
    """Draw a shape.  cache_bytes: size of the L2; smaller inputs get enough sets not to stay there."""
    batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v = shape.sizes
    dtype = numpy_dtype(shape.dtype)
    packed = "packed" in shape.drawn
    lead_q, lead_k = ((batch * len_q,), (batch * len_k,)) if packed else ((batch, len_q), (batch, len_k))
    sizes = {
        "q": (*lead_q, heads, head_dim),
        "k": (*lead_k, heads_k, head_dim),
        "v": (*lead_k, heads_k, head_dim_v),
    }
    if shape.direction == "backward":
        sizes["dout"] = (*lead_q, heads, head_dim_v)
    n_bytes = sum(math.prod(size) for size in sizes.values()) * dtype.itemsize
    n_sets = min(MAX_SETS, max(1, math.ceil(2 * cache_bytes / n_bytes))) if n_bytes < 2 * cache_bytes else 1
    random = _generator(xp, seed_of(shape))
    drawn = {name: random((n_sets, *size)).astype(dtype) for name, size in sizes.items()}
    sets = [{name: array[number] for name, array in drawn.items()} for number in range(n_sets)]
    options = options_of(shape, xp)
    qkv = {name: sets[0][name] for name in "qkv"}
    problem, operands = check("forward", qkv, of_forward(options))
    return Inputs(shape, xp, sets, options, problem, operands)


def of_forward(options: dict[str, Any]) -> dict[str, Any]:
    """Options that `attention` takes too: all but those of the backward alone."""
    return {name: value for name, value in options.items() if name != "deterministic"}


def _generator(xp: Any, seed: int) -> Any:
    """size -> float32 normal numbers on xp."""
    if xp is np:
        random = np.random.default_rng(seed)
        return lambda size: random.standard_normal(size, dtype=np.float32)
    state = xp.random.RandomState(seed)
    return lambda size: state.standard_normal(size, dtype=xp.float32)


def options_of(shape: Shape, xp: Any) -> dict[str, Any]:
    """Options of the call, arrays drawn: alibi_slopes, bias, mask, ... as in `cuflash explain`."""
    random = np.random.default_rng(seed_of(shape) + 1)
    case = cases.Case("bench", shape.sizes)
    options = dict(shape.settings)
    for name in shape.drawn:
        if name == "packed":
            options |= _packed(random, shape)
        elif name == PLANE:
            bias = random.standard_normal((1, 1, shape.len_q, shape.len_k), dtype=np.float32)
            options["bias"] = xp.asarray(bias.astype(numpy_dtype(shape.dtype)))
        elif name in BLOCKS:
            options["block_mask"] = _block_mask(random, shape, BLOCKS[name])
        else:
            value = cases.DRAW[name](random, case, shape.dtype)
            options[name] = value if "lengths" in name else xp.asarray(value)
    return options


def _packed(random: np.random.Generator, shape: Shape) -> dict[str, list[int]]:
    """Cumulative lengths: sequences of a quarter to seven quarters of the average, all tokens used."""
    found = {}
    parts = random.uniform(0.25, 1.75, shape.batch)
    for name, length in (("q", shape.len_q), ("k", shape.len_k)):
        ends = np.rint(np.cumsum(parts) / parts.sum() * shape.batch * length).astype(int)
        found[f"cu_seqlens_{name}"] = [0, *ends.tolist()]
    return found


def _block_mask(random: np.random.Generator, shape: Shape, share: float) -> BlockMask:
    """Blocks of 128 x 128, this share kept, the diagonal always."""
    rows, columns = -(-shape.len_q // 128), -(-shape.len_k // 128)
    kept = random.random((1, 1, rows, columns)) < share
    kept[:, :, np.arange(rows), np.minimum(np.arange(rows), columns - 1)] = True
    return BlockMask.from_dense(kept, 128, 128)


def visible_pairs(problem: Problem, operands: Operands) -> int:
    """(query, key) pairs that every mask of the call leaves: by formula where shapes say it, else counted."""
    counted = problem.has_mask or problem.block_mask is not None
    total = 0
    for sequence in sequences(problem, operands):
        if not counted:
            total += cost.visible_pairs(problem, sequence.len_q, sequence.len_k) * problem.heads
            continue
        xp = np if isinstance(operands.q, np.ndarray) else _cupy()
        j = xp.arange(sequence.len_k)
        step = max(1, PAIRS_AT_ONCE // max(1, sequence.len_k))
        for head in range(problem.heads):
            for start in range(0, sequence.len_q, step):
                i = xp.arange(start, min(start + step, sequence.len_q))
                total += int(is_visible(problem, operands, sequence, head, i, j).sum())
    return total


def _cupy() -> Any:
    import cupy

    return cupy
