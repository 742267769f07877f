"""What the forward and the backward share: what becomes of a product before it is a score, and dropout.

A product does more than multiply.  A tile is loaded with one more column, and

    [Q, -m] [K, 1]^T = Q K^T - m          [dO, -delta] [V, 1]^T = dO V^T - delta

come out with the row's number subtracted: one column of 65 is cheaper than a pass over the tile.

Everything speaks in positions inside the sequence, i of a query and j of a key.  So do the kernels
(kernels/lib/score.cuh): read either beside the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.introspect import opt_func_info

from cuflash.philox import dropout_keep
from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Sequence
from cuflash.tiled_buffers import Buffers
from cuflash.tiled_visible import Run, Tile, Visible, cut, part, plane


class Base(NamedTuple):
    """What P is an exponential of: P = exp(S), with S in units of which one natural unit has `units`."""

    exp: Callable
    small_exp: Callable  # the same for |S| < 100
    log: Callable
    units: float


NATURAL = Base(np.exp, np.exp, np.log, 1.0)


def exp2(S: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """2^S in float32 for any S.  np.exp2 takes 8 times as long where that is 0, 80 times where denormal."""
    out = np.empty_like(S) if out is None else out
    for rows in (slice(*ends) for ends in cut(0, len(S), 256)):
        if S[rows].min() >= -125:
            np.exp2(S[rows], out=out[rows])
        else:
            np.multiply(S[rows], np.float32(math.log(2)), out=out[rows])
            np.exp(out[rows], out=out[rows])
    return out


def fast_base() -> Base:
    """Base 2 where NumPy has vector code for exp2 in float32 on this CPU, else e.

    On x86 with AVX-512 np.exp2 makes 4.5 numbers a nanosecond, np.exp 2.1.
    """
    loops = opt_func_info(func_name="^exp2$", signature="float32").get("exp2", {})
    has_vector_code = any(not loop["current"].startswith("baseline") for loop in loops.values())
    return Base(exp2, np.exp2, np.log2, math.log2(math.e)) if has_vector_code else NATURAL


FAST = fast_base()


class Head:
    """One query head of one sequence: its rows, and what turns a product into a score.

    | field | meaning |
    |---|---|
    | q, k, v | (len_q, head_dim), (len_k, head_dim), (len_k, head_dim_v): views of the rows that exist |
    | visible | its masks |
    | q_factor | Q is multiplied by this when it is loaded |
    | is_plain | scores are products and nothing else |
    | folds_m | Q is scaled and the product subtracts m; else `change` does both |
    | base | of P and S; natural unless the caller has a faster one, and scores are plain products |
    """

    def __init__(
        self, problem: Problem, operands: Operands, sequence: Sequence, h: int, fast: Base = NATURAL
    ):
        b = sequence.array_b
        self.problem, self.operands, self.sequence, self.h = problem, operands, sequence, h
        self.query_rows = (b, slice(sequence.q_start, sequence.q_start + sequence.len_q), h)
        self.key_rows = (b, slice(sequence.k_start, sequence.k_start + sequence.len_k), h // problem.group)
        self.per_query = (b, h, self.query_rows[1])  # of lse, dlse, delta
        self.q = operands.q[self.query_rows]
        self.k, self.v = operands.k[self.key_rows], operands.v[self.key_rows]
        self.visible = Visible(problem, operands, sequence, h)
        self.slope = float(plane(operands.alibi_slopes, sequence.b, h)) if problem.has_alibi else None
        self.bias = plane(operands.bias, sequence.b, h) if problem.bias is not None else None
        self.has_holes = self.visible.has_holes or self.bias is not None  # may a tile have hidden pairs?
        self.sink = operands.sink[h] if problem.has_sink else None
        self.dropout = problem.dropout

        self.number = np.dtype(problem.accumulator).type
        # a scale above 1 could take Q over the dtype's limit where q.k itself stays inside
        self.folds_m = problem.softcap is None and abs(problem.scale) <= 1 and not self.product_is_finer
        self.is_plain = self.folds_m and self.slope is None and self.bias is None
        self.base = fast if self.is_plain and problem.accumulator == "float32" else NATURAL
        self.q_factor = problem.scale * self.base.units if self.folds_m else 1.0

    @property
    def product_is_finer(self) -> bool:
        """Does the product lose digits when its factor is scaled, and would a result show it?

        Products of 16-bit numbers have few digits, so float32 sums them with half the error, or none.  All
        scores share in the gradient of a slope, which has float32's digits.
        """
        is_exact = abs(math.frexp(self.problem.scale)[0]) in (0, 0.5)  # a power of two takes no digits
        return self.problem.has_alibi and self.problem.dtype in ("float16", "bfloat16") and not is_exact

    def column(self, m: np.ndarray) -> Any:
        """The column that Q is loaded with, beside the ones of K: -m, or 0 where `change` subtracts m."""
        return np.where(np.isnan(m), 0, -m) if self.folds_m else 0

    def columns(self, m: np.ndarray) -> tuple[Any, Any]:
        """The same for an m in natural units, such as lse, whatever the base: two columns beside two of ones.

        m in base 2, rounded, would shift all weights of a row alike, and sums over rows show it.
        """
        if not self.folds_m:
            return 0, 0
        exact = np.where(np.isnan(m), 0, -m.astype(np.float64) * self.base.units)
        high = exact.astype(self.number)
        return high, np.where(np.isinf(exact), 0, exact - high)

    def change(self, S: np.ndarray, m: np.ndarray, tile: Tile, buffers: Buffers) -> np.ndarray | None:
        """From the product to the score above m, in place: softcap, ALiBi, bias, masks, in this order.

        S (n_queries, n_keys): [Q, column(m)] [K, 1]^T.  m (n_queries,).  Returns the tanh of the softcap,
        from which the backward takes the derivative; None without one.
        """
        is_nan, tanh = np.isnan(m), None
        if not self.folds_m:
            S *= self.number(self.problem.scale)
        if self.problem.softcap is not None:
            S /= self.number(self.problem.softcap)
            tanh = np.tanh(S, out=buffers.empty("tanh", *S.shape))
            np.multiply(tanh, self.number(self.problem.softcap), out=S)
        if not self.folds_m:
            S -= np.where(is_nan, 0, m)[:, None]
        for run in tile.runs:
            if self.slope is not None:
                distance = self.distance(tile, run, buffers)
                distance *= self.number(self.slope)
                S[:, run.columns] -= distance
            if self.bias is not None:
                bias = part(self.bias, tile.i0, tile.i1, run.j0, run.j1)
                S[:, run.columns] += buffers.load("bias", bias)
        self.visible.hide(S, tile, -np.inf, buffers)
        if is_nan.any():  # every weight of such a row is NaN, but a hidden pair has no weight
            np.copyto(S, np.nan, where=is_nan[:, None] & ~np.isneginf(S))
        return tanh

    def differentiate_softcap(self, dS: np.ndarray, tanh: np.ndarray, pairs: np.ndarray | None) -> None:
        """dS *= 1 - tanh^2, the derivative of cap * tanh(x / cap).  tanh is overwritten."""
        np.square(tanh, out=tanh)
        np.subtract(1, tanh, out=tanh)
        if pairs is not None:
            np.copyto(tanh, 0, where=~pairs)
        dS *= tanh

    def needs_care(self, *arrays: np.ndarray) -> bool:
        """May the 0 of a hidden pair meet a NaN or an infinity of these arrays?  `product` must know."""
        return self.has_holes and not all(np.isfinite(x).all() for x in arrays)

    def distance(self, tile: Tile, run: Run, buffers: Buffers) -> np.ndarray:
        """|i + offset - j|, what a slope is multiplied by, of one run of a tile."""
        out = buffers.empty("distance", tile.i1 - tile.i0, run.j1 - run.j0)
        i, j = np.arange(out.shape[0]), np.arange(out.shape[1])
        # relative to the run's corner: small whole numbers, and large offsets, are exact in float32
        i = (i + (tile.i0 + self.sequence.offset - run.j0)).astype(out.dtype)
        np.subtract(i[:, None], j.astype(out.dtype), out=out)
        return np.abs(out, out=out)

    def kept(self, tile: Tile) -> np.ndarray:
        """The weights that dropout leaves: bool (n_queries, n_keys)."""
        kept = np.empty(tile.shape, bool)
        j = tile.keys()
        for r0, r1 in cut(tile.i0, tile.i1, max(1, 2**17 // len(j))):  # Philox's temporaries: in the cache
            i = np.arange(r0, r1)
            at = (self.operands.seed, self.dropout, self.sequence.b, self.h, i, j)
            kept[r0 - tile.i0 : r1 - tile.i0] = dropout_keep(*at, self.operands.counter_shift)
        return kept
