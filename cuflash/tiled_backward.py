"""The tiled algorithm in NumPy, backward.  Read tiled.py first.

The forward kept out and lse, not P.  They are enough: P = exp(S - lse) is made again tile by tile, and with one
number per query row, delta = rowsum(dO * O) - dlse,

    dV = P^T dO            dS = P * (dP - delta)      where dP = dO V^T
    dK = scale dS^T Q      dQ = scale dS K

A tile of keys stays while the queries pass by: dK and dV of the tile are complete when its loop ends, and each
step adds its share to dQ.  dQ is the one sum that several key tiles share.  They add in order, whichever thread
they run in, so results repeat bit for bit.

S, P, dP and dS lie in memory key by key (S.T is C-contiguous): a product is fastest with the longer side, here the
keys, outermost.  np.matmul takes such an array as `out` without a copy.

Tried        (2 cores of an AMD EPYC with AVX-512, float32, 8 heads of 4,096 x 64; PyTorch 2.13 takes 0.58 s)
             TILE_Q x TILE_KV 256 x 1024: 0.54 s; 512 x 512: 0.54; 1024 x 256, row by row: 0.56; 256 x 2048: 0.50
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Sequence, sequences
from cuflash.results import allocate_missing
from cuflash.tiled_scores import Buffers, Head, product
from cuflash.tiled_sums import Sums
from cuflash.tiled_visible import cut, tile_size
from cuflash.tiled_workers import Queue, Turn, run

TILE_Q = 256
TILE_KV = 2048  # key rows of an item, at most
N_ITEMS = 16  # items that a small problem is cut into, if it can be


class KeyTile(NamedTuple):
    """What one item owns: keys [j0, j1) of one key head, with all query heads that share it."""

    sequence: Sequence
    h_k: int
    number: int  # of the tile in its sequence
    j0: int
    j1: int


def backward(problem: Problem, operands: Operands) -> dict[str, np.ndarray]:
    """Gradients by name of a checked call, in canonical views: see Operands.

    problem, operands: as cuflash.check.check makes them, NumPy arrays.  Gradients that operands.grads has an array
    for are written there.  operands.progress(done, total) counts key tiles.
    """
    allocate_missing(problem, operands, np)
    if problem.packed or problem.has_key_lengths:
        for name in ("dk", "dv"):
            operands.grads[name][...] = 0  # rows that belong to no sequence
    tiles = key_tiles(problem, operands)
    sums = Sums(problem, operands, n_tiles=1 + max((tile.number for tile in tiles), default=0))
    n_flop = 2.0 * (3 * problem.head_dim + 2 * problem.head_dim_v) * problem.heads * problem.len_q * problem.len_k
    n_flop *= 1 if problem.packed else problem.batch

    def make_rows_worker() -> Callable:
        buffers = Buffers(problem.accumulator)
        return lambda _turn, place: sums.start_rows(Head(problem, operands, *place), buffers)

    def make_worker() -> Callable:
        buffers = Buffers(problem.accumulator)

        def do(turn: Turn, tile: KeyTile) -> None:
            group = range(tile.h_k * problem.group, (tile.h_k + 1) * problem.group)
            heads = [Head(problem, operands, tile.sequence, h) for h in group]
            differentiate(heads, tile, turn, sums, buffers)

        return do

    heads = [(sequence, h) for sequence in sequences(problem, operands) for h in range(problem.heads)]
    run(Queue(heads), make_rows_worker, n_flop / 1000)
    run(Queue(tiles, sums.shared_by), make_worker, n_flop, operands.progress)
    sums.finish()
    return {name: operands.grads[name] for name in problem.gradients}


def differentiate(heads: list[Head], tile: KeyTile, turn: Turn, sums: Sums, buffers: Buffers) -> None:
    """One tile of keys: the loop over query tiles.  Writes dk and dv of the tile, adds to everything else."""
    head, j0, j1 = heads[0], tile.j0, tile.j1
    K = buffers.load_with("K", head.k[j0:j1], 1)  # [K, 1]
    V = buffers.load_with("V", head.v[j0:j1], 1)  # [V, 1]
    dK = buffers.zeros("dK", j1 - j0, head.k.shape[1])
    dV = buffers.zeros("dV", j1 - j0, head.v.shape[1])

    steps = [(i0, i1, head) for head in heads for i0, i1 in head.visible.query_tiles(j0, j1, TILE_Q)]
    steps.sort(key=lambda step: -step[1])  # from the last rows to the first, as Queue wants it
    row_ends = [i1 for _, i1, _ in steps[1:]] + [0]
    for (i0, i1, head), next_end in zip(steps, row_ends, strict=False):
        turn.wait_for(i0)
        c0, c1 = head.visible.keys_of(i0, i1)  # keys of this tile that one of the queries sees
        c0, c1 = max(c0, j0), min(c1, j1)
        if c0 < c1 and not head.visible.is_hidden(i0, i1, c0, c1):
            keys = slice(c0 - j0, c1 - j0)
            step(head, (i0, i1), (c0, c1), tile.number, K[keys], V[keys], dK[keys], dV[keys], sums, buffers)
        turn.passed(next_end)

    if not head.folds_m:  # else Q was loaded as scale Q
        dK *= head.number(head.problem.scale)
    if head.problem.dropout is not None:
        dV /= 1 - head.problem.dropout
    np.copyto(sums.grads["dk"][head.key_rows][j0:j1], dK, casting="unsafe")
    np.copyto(sums.grads["dv"][head.key_rows][j0:j1], dV, casting="unsafe")


def step(
    head: Head, queries: tuple[int, int], keys: tuple[int, int], tile_number: int,
    K: np.ndarray, V: np.ndarray, dK: np.ndarray, dV: np.ndarray, sums: Sums, buffers: Buffers,
) -> None:  # fmt: skip
    """One tile of S, P, dP and dS: adds to dK, dV (n_keys, dim) and to sums.  K, V: [K, 1] and [V, 1]."""
    (i0, i1), (j0, j1) = queries, keys
    dim, dim_v = dK.shape[1], dV.shape[1]
    dropout, softcap = head.problem.dropout, head.problem.softcap
    rows = head.per_query
    m, delta = sums.m[rows][i0:i1], sums.delta[rows][i0:i1]
    Q = buffers.load_with("Q", head.q[i0:i1], -m if head.folds_m else 0, factor=head.q_factor)
    dO = buffers.load_with("dO", sums.dout[head.query_rows][i0:i1], -delta if dropout is None else 0)

    S = np.matmul(Q, K.T, out=buffers.by_key("S", i1 - i0, j1 - j0))  # Q K^T - lse
    tanh = None if softcap is None else buffers.by_key("tanh", *S.shape)
    head.change(S, m, i0, j0, buffers, tanh)
    pairs = head.pairs(S, Q[:, :dim], K, V, dO)
    P = head.base.exp(S, out=S)
    dP = np.matmul(dO, V.T, out=buffers.by_key("dP", i1 - i0, j1 - j0))  # dO V^T - delta
    if dropout is not None:
        dropped = head.dropped(i0, i1, j0, j1)
        dP /= 1 - dropout
        np.copyto(dP, 0, where=dropped)
        dP -= delta[:, None]
    dS = np.multiply(P, dP, out=dP)
    if pairs is not None:
        np.copyto(dS, 0, where=~pairs)
        if softcap is not None:
            np.copyto(tanh, 0, where=~pairs)

    if dropout is not None:
        np.copyto(P, 0, where=dropped)
    pairs_T = None if pairs is None else pairs.T
    dV += product(P.T, dO[:, :dim_v], pairs_T, out=buffers.empty("dV step", *dV.shape))
    sums.add_to_options(head, dS, i0, j0, tile_number, buffers)
    if softcap is not None:
        np.square(tanh, out=tanh)
        dS *= np.subtract(1, tanh, out=tanh)
    dK += product(dS.T, Q[:, :dim], pairs_T, out=buffers.empty("dK step", *dK.shape))
    dQ = product(dS, K[:, :dim], pairs, out=buffers.empty("dQ step", i1 - i0, dim))
    dQ *= head.number(head.problem.scale)
    sums.dq[head.query_rows][i0:i1] += dQ


def key_tiles(problem: Problem, operands: Operands) -> list[KeyTile]:
    """Every item.  First tiles of all heads first: neighbours in the queue add to different dQ, and when causal
    the first tiles, which most queries see, are the longest."""
    n_rows = problem.len_k * problem.heads_k * (1 if problem.packed else problem.batch)
    size = tile_size(n_rows, N_ITEMS, TILE_KV, operands.block_mask and operands.block_mask.block_k)
    tiles = [
        KeyTile(sequence, h_k, number, j0, j1)
        for sequence in sequences(problem, operands)
        for h_k in range(problem.heads_k)
        for number, (j0, j1) in enumerate(cut(0, sequence.len_k, size))
    ]
    return sorted(tiles, key=lambda tile: tile.number)
