"""The tiled algorithm in NumPy, backward.  Read tiled.py first.

The forward kept out and lse, not P.  They are enough: P = exp(S - lse) is made again tile by tile, and with
one number per query row, delta = rowsum(dO * O) - dlse,

    dV = P^T dO            dS = P * (dP - delta)      where dP = dO V^T
    dK = scale dS^T Q      dQ = scale dS K

A tile of keys stays while the queries pass by: dK and dV of the tile are complete when its loop ends, and
each step adds its share to dQ.  dQ is the one sum that several key tiles share.  They add in order,
whichever thread they run in, so results repeat bit for bit.

S, P, dP and dS lie in memory key by key (S.T is C-contiguous): a product is fastest with the longer side,
here the keys, outermost.  np.matmul takes such an array as `out` without a copy.

Source: Dao, "FlashAttention-2" (2023), algorithm 2.

Tried (as in tiled.py; seconds on two cores, idle otherwise; PyTorch 2.13: 0.58 in the same run):
- TILE_Q x TILE_KV 256 x 2048: 0.50, 256 x 1024: 0.54, 512 x 512: 0.54; S query by query, 1024 x 256: 0.56
- of one thread, others running; PyTorch: 1.07, causal 0.62: base 2: 1.04, 0.60; base e: 1.05, 0.64;
  TILE_Q 384: 1.01, 0.62
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Sequence, sequences
from cuflash.results import allocate_missing
from cuflash.tiled_buffers import Buffers
from cuflash.tiled_scores import FAST, Head, largest_norm, product
from cuflash.tiled_sums import Sums
from cuflash.tiled_visible import cut, tile_size
from cuflash.tiled_workers import Queue, Turn, n_flop, run

TILE_Q = 256
TILE_KV = 2048  # key rows of an item, at most
SMALL = 40  # |q| |k| up to which no exponential of S - lse is 0 or denormal, which take long
N_ITEMS = 16  # a small problem is cut into about so many items: work for that many threads


class KeyTile(NamedTuple):
    """What one item owns: keys [j0, j1) of one key head, seen by all query heads that share it."""

    sequence: Sequence
    h_k: int
    number: int  # of the tile in its sequence
    j0: int
    j1: int


def backward(problem: Problem, operands: Operands) -> dict[str, np.ndarray]:
    """Gradients by name of a checked call, in canonical views: see Operands.

    problem, operands: as cuflash.check.check makes them, with NumPy arrays.  Gradients for which
    operands.grads holds an array are written there.  operands.progress(done, total) counts key tiles.
    """
    allocate_missing(problem, operands, np)
    if problem.packed or problem.has_key_lengths or not problem.heads:
        for name in ("dk", "dv"):
            operands.grads[name][...] = 0  # rows that belong to no sequence, or that no head looks at
    tiles = key_tiles(problem, operands) if problem.heads else []
    sums = Sums(problem, operands, n_tiles=1 + max((tile.number for tile in tiles), default=0))

    def make_rows_worker() -> Callable:
        buffers = Buffers(problem.accumulator)
        return lambda _turn, place: sums.start_rows(Head(problem, operands, *place), buffers)

    def make_worker() -> Callable:
        buffers = Buffers(problem.accumulator)

        def do(turn: Turn, tile: KeyTile) -> None:
            group = range(tile.h_k * problem.group, (tile.h_k + 1) * problem.group)
            heads = [Head(problem, operands, tile.sequence, h, FAST) for h in group]
            differentiate(heads, tile, turn, sums, buffers)

        return do

    heads = [(sequence, h) for sequence in sequences(problem, operands) for h in range(problem.heads)]
    run(Queue(heads), make_rows_worker, n_flop(problem, 3, 2) / 1000)
    run(Queue(tiles, sums.shared_by), make_worker, n_flop(problem, 3, 2), operands.progress)
    sums.finish()
    return {name: operands.grads[name] for name in problem.gradients}


def differentiate(heads: list[Head], tile: KeyTile, turn: Turn, sums: Sums, buffers: Buffers) -> None:
    """One tile of keys: the loop over query tiles.  Writes its dk and dv, adds to everything else."""
    first, j0, j1 = heads[0], tile.j0, tile.j1  # what heads of a group share is read from the first
    scale, dropout, softcap = first.number(first.problem.scale), first.dropout, first.problem.softcap
    dim, dim_v = first.k.shape[1], first.v.shape[1]
    tile_K = buffers.load_with("K", first.k[j0:j1], 1, 1)  # [K, 1, 1]
    tile_V = buffers.load_with("V", first.v[j0:j1], 1)  # [V, 1]
    needs_care, longest_k = first.needs_care(tile_K, tile_V), largest_norm(tile_K[:, :dim])
    dK = buffers.zeros("dK", j1 - j0, dim)
    dV = buffers.zeros("dV", j1 - j0, dim_v)

    for head, i0, i1, c0, c1 in in_turn(query_tiles(heads, j0, j1), turn):
        keys = slice(c0 - j0, c1 - j0)  # those that one of the queries sees
        K, V = tile_K[keys], tile_V[keys]
        m, delta = sums.m[head.per_query][i0:i1], sums.delta[head.per_query][i0:i1]
        Q = buffers.load_with("Q", head.q[i0:i1], *head.columns(m), factor=head.q_factor)  # [scale Q, -lse]
        dO = buffers.load_with("dO", sums.dout[head.query_rows][i0:i1], -delta if dropout is None else 0)

        S = np.matmul(Q, K.T, out=buffers.by_key("S", i1 - i0, c1 - c0))
        takes_care = needs_care or head.needs_care(Q[:, :dim], dO, delta)
        is_small = head.is_plain and longest_k * largest_norm(Q[:, :dim]) <= SMALL
        if is_small and not takes_care and not np.isnan(m).any():
            tanh = pairs = None
            P = head.base.small_exp(S.T, out=S.T).T
            head.visible.hide(P, i0, c0, 0, buffers)
        else:
            tanh = head.change(S, m, i0, c0, buffers)  # scores, above lse
            pairs = ~np.isneginf(S) if takes_care else None
            P = head.base.exp(S.T, out=S.T).T
        dP = np.matmul(dO, V.T, out=buffers.by_key("dP", i1 - i0, c1 - c0))  # dO V^T - delta
        if dropout is not None:
            kept = head.kept(i0, i1, c0, c1)
            buffers.keep_only(dP, kept, 0)
            dP /= 1 - dropout
            dP -= delta[:, None]
        dS = np.multiply(P, dP, out=dP)
        if pairs is not None:
            np.copyto(dS, 0, where=~pairs)
        sums.add_to_options(head, dS, i0, c0, tile.number, buffers)
        if softcap is not None:
            head.differentiate_softcap(dS, tanh, pairs)
        if dropout is not None:
            buffers.keep_only(P, kept, 0)

        pairs_T = None if pairs is None else pairs.T
        dV[keys] += product(P.T, dO[:, :dim_v], pairs_T, out=buffers.empty("P^T dO", c1 - c0, dim_v))
        dK[keys] += product(dS.T, Q[:, :dim], pairs_T, out=buffers.empty("dS^T Q", c1 - c0, dim))
        dQ = product(dS, K[:, :dim], pairs, out=buffers.empty("dS K", i1 - i0, dim))
        sums.dq[head.query_rows][i0:i1] += np.multiply(dQ, scale, out=dQ)

    if not first.folds_m:  # else Q was loaded as scale Q, in units of the base
        dK *= scale
    elif first.base.units != 1:
        dK /= first.number(first.base.units)
    if dropout is not None:
        dV /= 1 - dropout
    np.copyto(sums.grads["dk"][first.key_rows][j0:j1], dK, casting="unsafe")
    np.copyto(sums.grads["dv"][first.key_rows][j0:j1], dV, casting="unsafe")


def query_tiles(heads: list[Head], j0: int, j1: int) -> list[tuple[Head, int, int, int, int]]:
    """The steps of keys [j0, j1): (head, i0, i1, c0, c1), queries [i0, i1) that see keys [c0, c1) of them.

    From the last queries to the first, of all heads together: the order that `in_turn` and Queue count on.
    """
    steps = [(head, *tile) for head in heads for tile in head.visible.query_tiles(j0, j1, TILE_Q)]
    return sorted(steps, key=lambda step: -step[2])


def in_turn(steps: list[tuple], turn: Turn) -> Iterator[tuple]:
    """The steps, each when its item may add to the rows [i0, i1) of the sums that it shares with others."""
    ends = [i1 for _, _, i1, _, _ in steps[1:]] + [0]
    for step, next_end in zip(steps, ends, strict=False):
        turn.wait_for(step[1])
        yield step
        turn.passed(next_end)


def key_tiles(problem: Problem, operands: Operands) -> list[KeyTile]:
    """Every item: the first tiles of all heads, then the second ones, ...

    Neighbours in the queue then add to different dQ; and when causal, the tiles that most queries see come
    first, and the short ones fill the end.
    """
    n_rows = operands.k.shape[0] * problem.len_k * problem.heads_k
    size = tile_size(n_rows, N_ITEMS, TILE_KV, operands.block_mask and operands.block_mask.block_k)
    tiles = [
        KeyTile(sequence, h_k, number, j0, j1)
        for sequence in sequences(problem, operands)
        for h_k in range(problem.heads_k)
        for number, (j0, j1) in enumerate(cut(0, sequence.len_k, size))
    ]
    return sorted(tiles, key=lambda tile: tile.number)
