"""The tiled algorithm in NumPy, backward.  Read tiled.py first.

The forward kept out and lse, not P.  They are enough: P = exp(S - lse) is made again tile by tile, and with
one number per query row, delta = rowsum(dO * O) - dlse,

    dV = P^T dO            dS = P * (dP - delta)      where dP = dO V^T
    dK = scale dS^T Q      dQ = scale dS K

A tile of keys stays while the queries pass by: dK and dV of the tile are complete when its loop ends, and
each step adds its share to dQ.  dQ is the one sum that several key tiles share.  They add in order,
whichever thread they run in, so results repeat bit for bit.

Source: Dao, "FlashAttention-2" (2023), algorithm 2.  What was tried: kernels/ATTEMPTS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Sequence, sequences
from cuflash.results import allocate_missing
from cuflash.tiled_buffers import Buffers
from cuflash.tiled_products import largest_norm, multiply, product
from cuflash.tiled_scores import FAST, Head
from cuflash.tiled_sums import Sums
from cuflash.tiled_visible import Tile, cut, tile_size
from cuflash.tiled_workers import Queue, Turn, do_all, n_flop

TILE_Q = 256
TILE_KV = 704  # no power of two: rows of S so far apart would share few places in the cache
LOADED_KV = 2048  # key rows of an item, at most: three tiles to a load of Q and dO
SMALL = 40  # |q| |k| up to which no exponential of S - lse is 0 or denormal, which take long
N_ITEMS = 16  # a small problem is cut into about so many items: work for that many threads


class Item(NamedTuple):
    """What one thread does at a time: keys [j0, j1) of one key head, for all query heads that share it."""

    sequence: Sequence
    h_k: int
    number: int  # of the item in its sequence
    j0: int
    j1: int


def backward(problem: Problem, operands: Operands) -> dict[str, np.ndarray]:
    """Gradients by name of a checked call, in canonical views: see Operands.

    problem, operands: as cuflash.check.check makes them, with NumPy arrays.  Gradients for which
    operands.grads holds an array are written there.  operands.progress(done, total) counts items.
    """
    allocate_missing(problem, operands, np)
    if problem.packed or problem.has_key_lengths or not problem.heads:
        for name in ("dk", "dv"):
            operands.grads[name][...] = 0  # rows that belong to no sequence, or that no head looks at
    to_do = items(problem, operands) if problem.heads else []
    sums = Sums(problem, operands, n_items=1 + max((item.number for item in to_do), default=0))

    def make_rows_worker() -> Callable:
        buffers = Buffers(problem.accumulator)
        return lambda _turn, place: sums.start_rows(Head(problem, operands, *place, FAST), buffers)

    def make_worker() -> Callable:
        buffers = Buffers(problem.accumulator)

        def do(turn: Turn, item: Item) -> None:
            group = range(item.h_k * problem.group, (item.h_k + 1) * problem.group)
            heads = [Head(problem, operands, item.sequence, h, FAST) for h in group]
            differentiate(heads, item, turn, sums, buffers)

        return do

    heads = [(sequence, h) for sequence in sequences(problem, operands) for h in range(problem.heads)]
    do_all(Queue(heads), make_rows_worker, n_flop(problem, 3, 2) / 1000)
    do_all(Queue(to_do, sums.shared_by), make_worker, n_flop(problem, 3, 2), operands.progress)
    sums.finish()
    return {name: operands.grads[name] for name in problem.gradients}


def differentiate(heads: list[Head], item: Item, turn: Turn, sums: Sums, buffers: Buffers) -> None:
    """One item: the loop over query tiles.  Writes its dk and dv, adds to everything else."""
    keys = Keys(heads[0], item, sums, buffers)
    for head, i0, i1, tiles in in_turn(query_tiles(heads, item), turn):
        queries = keys.load(head, i0, i1)
        for tile in tiles:
            rows = queries.part(slice(tile.i0 - i0, tile.i1 - i0))
            P, tanh, pairs = keys.weights(head, tile, rows)
            dS = keys.changes(head, tile, rows, P, tanh, pairs)
            keys.add(head, tile, rows, P, dS, pairs)
    keys.store()


class Queries(NamedTuple):
    """Rows of queries, and what their weights are made with."""

    Q: np.ndarray  # (n, head_dim + 2): [scale Q, -lse], in units of the base
    dO: np.ndarray  # (n, head_dim_v + 1): [dO, -delta]
    m: np.ndarray  # (n,): lse
    delta: np.ndarray  # (n,)
    is_small: bool  # no exponential needs care, and
    is_finite: bool  # no NaN or infinity can meet the 0 of a hidden pair

    def part(self, rows: slice) -> Queries:
        return Queries(*(array[rows] for array in self[:4]), *self[4:])


class Keys:
    """The keys of an item, and their gradients so far.

    | field | shape | |
    |---|---|---|
    | K, dK | (n, head_dim) | |
    | K_T | (head_dim + 2, n) | [K, 1, 1]^T |
    | V_T | (head_dim_v + 1, n) | [V, 1]^T |
    | dV | (n, head_dim_v) | |
    """

    def __init__(self, first: Head, item: Item, sums: Sums, buffers: Buffers):
        self.first, self.item, self.sums, self.buffers = first, item, sums, buffers  # first of its group
        self.own = slice(item.j0, item.j1)
        K, V = buffers.load("K", first.k[self.own], 1, 1), buffers.load("V", first.v[self.own], 1)
        n_queries = first.sequence.len_q * first.problem.group
        self.K_T, self.V_T = buffers.turned("K^T", K, n_queries), buffers.turned("V^T", V, n_queries)
        self.K = K[:, :-2]
        self.dK = buffers.zeros("dK", *self.K.shape)
        self.dV = buffers.zeros("dV", len(V), V.shape[1] - 1)
        self.is_finite, self.longest = not first.needs_care(K, V), largest_norm(self.K)

    def load(self, head: Head, i0: int, i1: int) -> Queries:
        """Queries [i0, i1) of one head."""
        m, delta = self.sums.m[head.per_query][i0:i1], self.sums.delta[head.per_query][i0:i1]
        minus_m = self.sums.minus_m[:, *head.per_query][:, i0:i1]
        Q = self.buffers.load("Q", head.q[i0:i1], *minus_m, factor=head.q_factor)
        minus_delta = -delta if head.dropout is None else 0  # else it comes after dropout
        dO = self.buffers.load("dO", self.sums.dout[head.query_rows][i0:i1], minus_delta)
        is_finite = self.is_finite and not head.needs_care(Q[:, :-2], dO)
        is_finite = is_finite and bool(np.isfinite(delta).all())  # an infinite slope, too, hides pairs
        is_small = head.is_plain and self.longest * largest_norm(Q[:, :-2]) <= SMALL
        return Queries(Q, dO, m, delta, is_small and is_finite and not np.isnan(m).any(), is_finite)

    def weights(
        self, head: Head, tile: Tile, rows: Queries
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """P of a tile; the tanh of a softcap, and where pairs are visible if that matters."""
        K_T = tile.of(self.K_T, self.item.j0, "tile's K^T", self.buffers)
        S = multiply(rows.Q, K_T, out=self.buffers.empty("S", *tile.shape))
        if rows.is_small:
            P = head.base.small_exp(S, out=S)
            head.visible.hide(P, tile, 0, self.buffers)
            return P, None, None
        tanh = head.change(S, rows.m, tile, self.buffers)  # scores, above lse
        pairs = None if rows.is_finite else ~np.isneginf(S)
        return head.base.exp(S, out=S), tanh, pairs

    def changes(
        self,
        head: Head,
        tile: Tile,
        rows: Queries,
        P: np.ndarray,
        tanh: np.ndarray | None,
        pairs: np.ndarray | None,
    ) -> np.ndarray:
        """dS of a tile.  P loses what dropout takes."""
        buffers = self.buffers
        V_T = tile.of(self.V_T, self.item.j0, "tile's V^T", buffers)
        dP = multiply(rows.dO, V_T, out=buffers.empty("dP", *tile.shape))  # dO V^T - delta
        if head.dropout is not None:
            kept = head.kept(tile)
            buffers.keep_only(dP, kept, 0)
            dP /= 1 - head.dropout
            dP -= rows.delta[:, None]
        dS = np.multiply(P, dP, out=dP)
        if pairs is not None:
            np.copyto(dS, 0, where=~pairs)
        self.sums.add_to_options(head, dS, tile, self.item.number, buffers)
        if tanh is not None:
            head.differentiate_softcap(dS, tanh, pairs)
        if head.dropout is not None:
            buffers.keep_only(P, kept, 0)
        return dS

    def add(
        self, head: Head, tile: Tile, rows: Queries, P: np.ndarray, dS: np.ndarray, pairs: np.ndarray | None
    ) -> None:
        """Add P^T dO to dV, dS^T Q to dK and dS K to dQ."""
        buffers, j0, n_keys = self.buffers, self.item.j0, tile.shape[1]
        pairs_T = None if pairs is None else pairs.T
        dV = buffers.empty("tile's dV", n_keys, self.dV.shape[1])
        dK = buffers.empty("tile's dK", n_keys, self.dK.shape[1])
        product(P.T, rows.dO[:, :-1], pairs_T, out=dV)
        product(dS.T, rows.Q[:, :-2], pairs_T, out=dK)
        for run in tile.runs:
            self.dV[run.j0 - j0 : run.j1 - j0] += dV[run.columns]
            self.dK[run.j0 - j0 : run.j1 - j0] += dK[run.columns]

        dq = self.sums.dq[head.query_rows][tile.i0 : tile.i1]
        K = tile.rows_of(self.K, j0, "tile's K", buffers)
        dQ = product(dS, K, pairs, out=buffers.like("tile's dQ", dq))
        dq += np.multiply(dQ, head.number(head.problem.scale), out=dQ)

    def store(self) -> None:
        """Write dk and dv, which are complete."""
        first, dK, dV = self.first, self.dK, self.dV
        if not first.folds_m:  # else Q was loaded as scale Q, in units of the base
            dK *= first.number(first.problem.scale)
        elif first.base.units != 1:
            dK /= first.number(first.base.units)
        if first.dropout is not None:
            dV /= 1 - first.dropout
        np.copyto(self.sums.grads["dk"][first.key_rows][self.own], dK, casting="unsafe")
        np.copyto(self.sums.grads["dv"][first.key_rows][self.own], dV, casting="unsafe")


def in_turn(steps: list[tuple], turn: Turn) -> Iterator[tuple]:
    """The steps, each when its item may add to the rows [i0, i1) of the sums that it shares with others."""
    ends = [i1 for _, _, i1, _ in steps[1:]] + [0]
    for step, next_end in zip(steps, ends, strict=False):
        turn.wait_for(step[1])
        yield step
        turn.passed(next_end)


def query_tiles(heads: list[Head], item: Item) -> list[tuple[Head, int, int, list[Tile]]]:
    """The steps of an item: (head, i0, i1, tiles) of queries [i0, i1).

    From the last queries to the first, of all heads together: the order that `in_turn` and Queue count on.
    """
    size = TILE_Q if heads[0].visible.block_mask is None else 2 * TILE_Q
    steps = [
        (head, *step)
        for head in heads
        for step in head.visible.query_tiles(item.j0, item.j1, size, TILE_Q * TILE_KV)
    ]
    return sorted(steps, key=lambda step: -step[2])


def items(problem: Problem, operands: Operands) -> list[Item]:
    """All there is to do: the first tiles of all heads, then the second ones, ...

    Neighbours in the queue then add to different dQ; and when causal, the tiles that most queries see come
    first, and the short ones fill the end.
    """
    n_rows = operands.k.shape[0] * problem.len_k * problem.heads_k
    size = tile_size(n_rows, N_ITEMS, LOADED_KV, operands.block_mask and operands.block_mask.block_k)
    found = [
        Item(sequence, h_k, number, j0, j1)
        for sequence in sequences(problem, operands)
        for h_k in range(problem.heads_k)
        for number, (j0, j1) in enumerate(cut(0, sequence.len_k, size))
    ]
    return sorted(found, key=lambda item: item.number)
