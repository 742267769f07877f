"""The specification, first half: which rows exist, what each score is, which pairs are visible.

reference.py, the second half, makes weights, outputs and gradients of it.  Both are written to be read
and to be right; tiled.py is the fast path.  Everything works on one (sequence, head) at a time, with i
and j the positions of query and key inside the sequence:

    S[i, j] = scale * Q[i] . K[j]                      scale: 1 / sqrt(head_dim) unless given
    S = cap * tanh(S / cap)                            softcap
    S = S - slope * |i + query_offset - j|             ALiBi: query i stands at key position i + query_offset
    S = S + bias[i, j]
    S = -inf where (i, j) is hidden                    causal, window, mask, block mask, beyond a length

A score that is -inf for another reason (a bias of -inf) is hidden just the same.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuflash.arrays import module_of, numpy_dtype
from cuflash.problem import Operands, Problem

IN_ORDER = 64  # numbers that a library may sum in an order of its own


@dataclass(frozen=True)
class Arithmetic:
    """In which precision the mathematics is done.

    | field | meaning |
    |---|---|
    | accumulate | dtype of products, sums and softmax |
    | rounds_to | dtype that S, P, O, dP, dS and the gradients are rounded to after each step, or None |
    | noise | None, or a numpy.random.Generator that draws other errors of the same size |

    rounds_to="tf32" keeps 10 bits of the fraction, of the inputs too.  With noise, S, P, dP and dS are
    rounded on a grid that is shifted at random, the inputs and what scores are made of move by up to a unit
    of accumulate, and sums are those of 1, 2, 4 or 8 lanes that each add one number at a time, in a random
    order.  Equal numbers move alike, as they round alike: their errors do not cancel in a sum.
    Weights below the smallest normal number are 0 then, as they are on a GPU.
    """

    accumulate: str = "float64"
    rounds_to: str | None = None
    noise: Any = None

    def widen(self, x: Any) -> Any:
        """An input in the accumulation dtype."""
        x = x.astype(self.accumulate)
        if self.noise is not None:
            x = self._shake(x, self.accumulate)
        return _round_tf32(x) if self.rounds_to == "tf32" else x

    def step(self, x: Any) -> Any:
        """What a score is made of: exact here where numbers are simple, rounded by who computes in base 2."""
        return x if self.noise is None else self._shake(x, self.accumulate)

    def exp(self, x: Any) -> Any:
        """Weights of scores above lse."""
        xp = module_of(x)
        P = xp.exp(x)
        if self.noise is None:
            return P
        smallest = float(np.finfo(P.dtype).smallest_normal)
        return xp.where(xp.isnan(P) | (smallest <= P), P, 0)

    def round(self, x: Any) -> Any:
        """A step on the way (S, P, dP, dS), rounded but still held in the accumulation dtype."""
        if self.rounds_to is not None and self.noise is not None:
            return self._shake(x, self.rounds_to)
        return self.round_result(x, self.rounds_to)

    def round_result(self, x: Any, dtype: str | None) -> Any:
        """A result (out, a gradient) rounded to its dtype, still held in the accumulation dtype."""
        if self.rounds_to is None:
            return x
        if dtype == "tf32":
            return _round_tf32(x)
        return x.astype(numpy_dtype(dtype)).astype(self.accumulate)

    def product(self, A: Any, B: Any, onto: Any = 0) -> Any:
        """onto + A @ B.  In float32, sums grow one number after the other, as in threads of a matrix product.

        A library handed 64 rows of a long problem would split the sum to fill the GPU, and its error would
        not be that of unfused attention over all rows: several times smaller on an H200 at 16,384 keys.
        """
        if self.noise is None and self.accumulate == "float64":
            return onto + product(A, B)
        if self.noise is None:
            total = product(A[:, :IN_ORDER], B[:IN_ORDER])
            for inner in range(IN_ORDER, A.shape[1], IN_ORDER):
                total += product(A[:, inner : inner + IN_ORDER], B[inner : inner + IN_ORDER])
            return onto + total
        lanes = module_of(A).zeros((self._n_lanes(), A.shape[0], B.shape[1]), A.dtype)
        for n, inner in enumerate(self.noise.permutation(A.shape[1]).tolist()):
            lanes[n % len(lanes)] += A[:, inner, None] * B[None, inner]
        return onto + sum(lanes)

    def total(self, x: Any, axis: int = 0) -> Any:
        """x summed along an axis, which is left out."""
        if self.noise is None or not x.shape[axis]:
            return x.sum(axis=axis)
        xp, n_lanes = module_of(x), self._n_lanes()
        x = xp.moveaxis(x, axis, 0)[xp.asarray(self.noise.permutation(x.shape[axis]))]
        return sum(xp.cumsum(x[lane::n_lanes], axis=0)[-1] for lane in range(min(n_lanes, len(x))))

    def _n_lanes(self) -> int:
        return 2 ** int(self.noise.integers(4))

    def _shake(self, x: Any, dtype: str) -> Any:
        """x with another rounding to dtype: on a grid shifted by a random part of its unit, another part for
        each power of 2.  In accumulate, whose digits x has: moved by a random part of a unit, -1 to 1."""
        xp = module_of(x)
        eps = 2.0**-10 if dtype == "tf32" else float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
        _, exponent = xp.frexp(x)  # |x| is from 2^(exponent - 1) to 2^exponent
        unit = xp.ldexp(xp.asarray(eps / 2, x.dtype), exponent)
        if dtype == self.accumulate:
            moved = x + _hashed(x, int(self.noise.integers(2**63))).astype(x.dtype) * unit
        else:
            shift = xp.asarray(self.noise.uniform(-0.5, 0.5, 1 << 12).astype(x.dtype))[exponent & 0xFFF]
            moved = (xp.rint(x / unit + shift) - shift) * unit
        return xp.where(xp.isfinite(moved) & (x != 0), moved, x)


def _hashed(x: Any, seed: int) -> Any:
    """Numbers from -1 to 1, float64, that look random: equal where x is.

    The bits of x go through the last lines of MurmurHash3 (Appleby), which mix 64 bits.
    """
    xp = module_of(x)
    bits = xp.ascontiguousarray(x).view(f"uint{8 * x.itemsize}").astype(xp.uint64) ^ xp.uint64(seed)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits ^= bits >> xp.uint64(33)
        bits *= xp.uint64(factor)
    bits ^= bits >> xp.uint64(33)
    return bits / 2.0**63 - 1


def _round_tf32(x: Any) -> Any:
    """float32 to 10 bits of fraction, to nearest, ties away from zero (as cvt.rna.tf32 does)."""
    bits = x.astype("float32").view("int32")
    rounded = ((bits + 0x1000) & ~0x1FFF).view("float32")
    return module_of(x).where(module_of(x).isfinite(x), rounded, x)


@dataclass(frozen=True)
class Sequence:
    """One entry of the batch: where its rows lie in the arrays, and how many of them exist."""

    b: int  # its place in options with a batch axis: bias, mask, slopes, block mask, dropout
    array_b: int  # its place on the batch axis of q, k, v, out, lse: 0 when packed
    q_start: int  # the array row of query 0
    len_q: int
    k_start: int
    len_k: int
    offset: int  # query i stands at key position i + offset


def sequences(problem: Problem, operands: Operands) -> list[Sequence]:
    """Every sequence of a problem.  Lengths on a device are read; what is out of range is clamped."""
    found = []
    lengths = {
        name: None if value is None else to_host(value)
        for name in ("query_lengths", "key_lengths", "cu_seqlens_q", "cu_seqlens_k")
        for value in [getattr(operands, name)]
    }

    def extent(b: int, rows: int, own: Any, cumulative: Any) -> tuple[int, int]:
        """(first row, number of rows) of sequence b."""
        if cumulative is not None:
            start = min(max(int(cumulative[b]), 0), rows) if b else 0
            end = min(max(int(cumulative[b + 1]), 0), rows)
            return start, max(end - start, 0)
        return 0, rows if own is None else min(max(int(own[b]), 0), rows)

    for b in range(problem.batch):
        q_start, len_q = extent(b, problem.len_q, lengths["query_lengths"], lengths["cu_seqlens_q"])
        k_start, len_k = extent(b, problem.len_k, lengths["key_lengths"], lengths["cu_seqlens_k"])
        offset = len_k - len_q if problem.query_offset is None else problem.query_offset
        found.append(Sequence(b, 0 if problem.packed else b, q_start, len_q, k_start, len_k, offset))
    return found


class Scores(NamedTuple):
    """Scores of query rows i (down) and key rows j (across) of one (sequence, head)."""

    S: Any  # float (n_i, n_j), -inf where hidden
    visible: Any  # bool (n_i, n_j)
    dcap: Any  # derivative of the softcap at each score, 1.0 without one
    distance: Any  # |i + offset - j| (n_i, n_j)


def scores(
    problem: Problem, operands: Operands, sequence: Sequence, h: int, i: Any, j: Any, arithmetic: Arithmetic
) -> Scores:
    """The scores of query rows i and key rows j: integer arrays of positions inside the sequence."""
    xp = module_of(operands.q)
    Q = arithmetic.widen(operands.q[sequence.array_b, sequence.q_start + i, h])
    K = arithmetic.widen(operands.k[sequence.array_b, sequence.k_start + j, h // problem.group])
    distance = xp.abs(i[:, None] + sequence.offset - j[None, :]).astype(arithmetic.accumulate)

    S = arithmetic.step(problem.scale * arithmetic.product(Q, K.T))
    dcap = 1.0
    if problem.softcap is not None:
        tanh = xp.tanh(S / problem.softcap)
        S, dcap = arithmetic.step(problem.softcap * tanh), 1 - tanh * tanh
    if problem.has_alibi:
        slope = operands.alibi_slopes[slope_index(operands.alibi_slopes, sequence, h)]
        S = S - arithmetic.step(slope.astype(arithmetic.accumulate) * distance)
    visible = is_visible(problem, operands, sequence, h, i, j)
    if problem.bias is not None:
        bias, reached = at_positions(operands.bias, sequence, h, i, j)
        S = S + arithmetic.step(bias.astype(arithmetic.accumulate))
        visible = visible & reached
    S = arithmetic.round(S)
    visible = visible & ~xp.isneginf(S)
    return Scores(xp.where(visible, S, -np.inf), visible, dcap, distance)


def product(A: Any, B: Any) -> Any:
    """A @ B, on the host where CuPy finds no cuBLAS (the cuda12 extra brings none): as right, and slow."""
    try:
        return A @ B
    except ImportError as error:
        _warn_of_slow_products(str(error))
        return module_of(A).asarray(to_host(A) @ to_host(B))


@functools.cache
def _warn_of_slow_products(why: str) -> None:
    logging.getLogger("cuflash").warning("reference: products run on the host, CuPy has no cuBLAS: %s", why)


def to_host(array: Any) -> np.ndarray:
    """A NumPy array of a CuPy array or of anything NumPy takes."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def is_visible(problem: Problem, operands: Operands, sequence: Sequence, h: int, i: Any, j: Any) -> Any:
    """Whether key j is visible to query i by every mask of the call: bool (n_i, n_j)."""
    xp = module_of(operands.q)
    position = i[:, None] + sequence.offset  # of the query, among the keys
    key = j[None, :]
    visible = xp.ones((len(i), len(j)), bool)
    if problem.causal:
        visible &= key <= position
    left, right = problem.window
    if left is not None:
        visible &= key >= position - left
    if right is not None:
        visible &= key <= position + right
    if problem.has_mask:
        mask, reached = at_positions(operands.mask, sequence, h, i, j)
        visible &= mask & reached
    if problem.block_mask is not None:
        visible &= block_visible(operands.block_mask, sequence, h, i, j)
    return visible


def at_positions(array: Any, sequence: Sequence, h: int, i: Any, j: Any) -> tuple[Any, Any]:
    """(values, reached) of a bias or mask (batch or 1, heads or 1, len_q or 1, len_k or 1) at (i, j).

    An axis of length 1 serves every position.  reached is False where another axis is too short, which
    only lengths on a device can lead to: those pairs are hidden.
    """
    batch, heads, rows, keys = array.shape
    plane = array[sequence.b if batch != 1 else 0, h if heads != 1 else 0]
    xp = module_of(array)
    i_there = xp.minimum(i, rows - 1) if rows != 1 else xp.zeros_like(i)
    j_there = xp.minimum(j, keys - 1) if keys != 1 else xp.zeros_like(j)
    reached = ((i < rows) | (rows == 1))[:, None] & ((j < keys) | (keys == 1))[None, :]
    if not plane.size:  # nothing is reached
        return xp.zeros(reached.shape, array.dtype), reached
    return plane[i_there[:, None], j_there[None, :]], reached


def block_visible(block_mask: Any, sequence: Sequence, h: int, i: Any, j: Any) -> Any:
    """Whether block (i // block_q, j // block_k) is kept: bool (n_i, n_j)."""
    xp = module_of(i)
    indptr, indices = np.asarray(block_mask.indptr), np.asarray(block_mask.indices)
    first = indptr[sequence.b if indptr.shape[0] != 1 else 0, h if indptr.shape[1] != 1 else 0]
    n_columns = -(-sequence.len_k // block_mask.block_k)
    n_rows = -(-sequence.len_q // block_mask.block_q)
    kept = np.zeros((n_rows, n_columns), bool)
    for row in range(min(n_rows, len(first) - 1)):
        columns = indices[first[row] : first[row + 1]]
        kept[row, columns[columns < n_columns]] = True
    return xp.asarray(kept)[(i // block_mask.block_q)[:, None], (j // block_mask.block_k)[None, :]]


def slope_index(slopes: Any, sequence: Sequence, h: int) -> tuple[int, int]:
    """Where alibi_slopes (batch or 1, heads) hold the slope of one (sequence, head)."""
    return (sequence.b if slopes.shape[0] != 1 else 0, h)
