"""What several tiles of the backward share: numbers per query row, and sums that cross tiles.

Two items that add to the same number do it in the order of the queue (`Sums.shared_by` says which may meet),
or each has a place of its own, and the places are added up at the end.  So every sum has one order.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from cuflash.problem import Operands, Problem
from cuflash.tiled_buffers import Buffers
from cuflash.tiled_scores import Head
from cuflash.tiled_visible import Tile, cut, part, plane

ROWS = 1024  # rows of dO and O taken at once for delta


class Sums:
    """Numbers per query row, and gradients other than dk and dv, in the accumulation dtype.

    | field | shape | |
    |---|---|---|
    | m | as lse | lse; +inf where a row sees nothing, so that its P is 0 |
    | minus_m | (2, as lse) | the columns of Q that subtract it: `Head.columns` |
    | delta | as lse | rowsum(dO * O) - dlse |
    | dq | as q | the result itself when it has this dtype |
    | dbias | as bias | the result itself when it has this dtype |
    | dbias, bias having one row | (batch, heads, 1, n_keys or n_items) | a place for each item |
    | dslopes | (batch, heads, n_items) | a place for each item |
    | dsink | (batch, heads) | a place for each head |
    """

    def __init__(self, problem: Problem, operands: Operands, n_items: int):
        self.problem, self.operands = problem, operands
        self.grads, self.dout = operands.grads, operands.dout
        dtype = np.dtype(problem.accumulator)
        self.m = np.empty(operands.lse.shape, dtype)
        self.minus_m = np.empty((2, *operands.lse.shape), dtype)
        self.delta = np.empty(operands.lse.shape, dtype)

        self.dq = self.grads["dq"]
        if self.dq.dtype != dtype:
            batch, length, heads, dim = self.dq.shape
            self.dq = np.empty((batch, heads, length, dim), dtype).swapaxes(1, 2)
        self.dq[...] = 0

        self.bias_has_rows = False
        places = (problem.batch, problem.heads)
        if problem.bias is not None:
            self.bias_has_rows = operands.bias.shape[2] != 1
            n_keys = operands.bias.shape[3]
            one_row = (*places, 1, n_keys if n_keys != 1 else n_items)
            is_result = self.bias_has_rows and self.grads["dbias"].dtype == dtype
            shape = operands.bias.shape if self.bias_has_rows else one_row
            self.dbias = self.grads["dbias"] if is_result else np.empty(shape, dtype)
            self.dbias[...] = 0
        self.dslopes = np.zeros((*places, n_items), dtype) if problem.has_alibi else None
        self.dsink = np.zeros(places, dtype) if problem.has_sink else None

    def shared_by(self, tile: Any) -> Hashable:
        """Items with the same key may add to the same rows: of dq, or of a bias that batch or heads share."""
        b, h_k = tile.sequence.b, tile.h_k
        if self.bias_has_rows:
            batch, heads = self.dbias.shape[:2]
            return (b if batch != 1 else 0, h_k if heads != 1 else 0)
        return b, h_k

    def start_rows(self, head: Head, buffers: Buffers) -> None:
        """m and delta of one head, and its share of dsink."""
        operands = self.operands
        m, delta = self.m[head.per_query], self.delta[head.per_query]
        np.copyto(m, operands.lse[head.per_query])
        m[m == -np.inf] = np.inf
        for place, column in zip(self.minus_m, head.columns(m), strict=True):
            place[head.per_query] = column
        for i0, i1 in cut(0, len(m), ROWS):
            O = buffers.load("O", operands.out[head.query_rows][i0:i1])  # noqa: E741
            dO = buffers.load("dO", operands.dout[head.query_rows][i0:i1])
            product = np.multiply(dO, O, out=buffers.empty("product", *O.shape))
            np.copyto(product, 0, where=O == 0)  # a row that sees nothing: its dO may be anything
            np.sum(product, axis=1, out=delta[i0:i1])
        if operands.dlse is not None:
            delta -= operands.dlse[head.per_query]
        if self.dsink is not None:
            P_sink = np.exp(operands.sink[head.h] - m)
            self.dsink[head.sequence.b, head.h] = -np.sum(P_sink * delta)

    def add_to_options(self, head: Head, dS: np.ndarray, tile: Tile, number: int, buffers: Buffers) -> None:
        """Add dS of a tile, of the item with this number, to the gradients of bias and ALiBi slopes."""
        b, h = head.sequence.b, head.h
        for run in tile.runs:
            dS_run = dS[:, run.columns]
            if self.problem.bias is not None:
                has_keys = self.operands.bias.shape[3] != 1
                share = dS_run if has_keys else dS_run.sum(axis=1, keepdims=True)
                if self.bias_has_rows:
                    part(plane(self.dbias, b, h), tile.i0, tile.i1, run.j0, run.j1)[...] += share
                else:
                    column = run.j0 if has_keys else number
                    self.dbias[b, h, 0, column : column + share.shape[1]] += share.sum(axis=0)
            if self.dslopes is not None:
                distance = head.distance(tile, run, buffers)
                distance *= dS_run
                self.dslopes[b, h, number] -= distance.sum()

    @np.errstate(all="ignore")  # as in the workers: a result that float16 does not hold is inf
    def finish(self) -> None:
        """Write the results that were added up elsewhere."""
        found = {}
        if self.dq is not self.grads["dq"]:
            found["dq"] = self.dq
        if self.problem.bias is not None:
            found["dbias"] = self.dbias if self.bias_has_rows else summed_like(self.dbias, self.operands.bias)
        if self.dslopes is not None:
            found["dalibi_slopes"] = summed_like(self.dslopes.sum(axis=2), self.operands.alibi_slopes)
        if self.dsink is not None:
            found["dsink"] = self.dsink.sum(axis=0)
        for name, array in found.items():
            if array is not self.grads[name]:
                np.copyto(self.grads[name], array, casting="unsafe")


def summed_like(array: np.ndarray, argument: np.ndarray) -> np.ndarray:
    """array summed over the axes along which argument has length 1."""
    axes = tuple(n for n, length in enumerate(argument.shape) if length == 1)
    return array.sum(axis=axes, keepdims=True)
