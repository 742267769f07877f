"""The tiled algorithm in NumPy: what runs for NumPy arrays.  This file is the forward; next tiled_backward.py.

Attention of one head is O = softmax(S) V with S = scale Q K^T.  S has len_q x len_k numbers and is never held:
K and V come in tiles, and each query row keeps three things that are enough to take in one tile more,

    m    the largest score so far, or one not far below it
    l    sum of exp(S - m)
    O    sum of exp(S - m) V                 the output is O / l, and lse = m + log l

When a tile brings a score that is much larger, m is raised and l and O, which were made with the old m, shrink by
exp(old m - new m).  The result is exact, whatever the order of the keys.

| file | what |
|---|---|
| tiled.py | the loop of the forward |
| tiled_backward.py | the loop of the backward |
| tiled_scores.py | what becomes of a product before it is a score: scale, softcap, ALiBi, bias; loading of tiles |
| tiled_visible.py | causal, window, masks: which tiles are computed, which pairs are hidden |
| tiled_workers.py | threads |

Source: Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), for the loop order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.problem import Operands, Problem
from cuflash.reference_scores import sequences
from cuflash.results import allocate_missing
from cuflash.tiled_backward import backward
from cuflash.tiled_scores import FAST, Buffers, Head, product
from cuflash.tiled_visible import cut, tile_size
from cuflash.tiled_workers import Queue, Turn, run

__all__ = ["backward", "forward"]

TILE_Q = 1024  # query rows of an item, at most
TILE_KV = 256
SLACK = 8  # how far (in units of S) a score may lie above m before m is raised: exp2(8) weights are no danger
N_ITEMS = 32  # items that a small problem is cut into, if it can be: enough for the threads of most machines


def forward(problem: Problem, operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a checked call.

    problem, operands: as cuflash.check.check makes them, NumPy arrays.  Returns canonical views: out
    (batch, len_q, heads, head_dim_v) and lse (batch, heads, len_q), the arrays in operands where there are any.
    operands.progress(done, total) counts query tiles.
    """
    allocate_missing(problem, operands, np)
    out, lse = operands.out, operands.lse
    if problem.packed or problem.has_query_lengths:  # rows that belong to nobody
        out[...] = 0
        lse[...] = -np.inf

    items = query_items(problem, operands)

    def make_worker() -> Any:
        buffers = Buffers(problem.accumulator)

        def do(_turn: Turn, item: tuple) -> None:
            sequence, h, i0, i1 = item
            head = Head(problem, operands, sequence, h, FAST)
            rows = slice(sequence.q_start + i0, sequence.q_start + i1)
            b = sequence.array_b
            attend(head, i0, i1, buffers, out[b, rows, h], lse[b, h, rows])

        return do

    flop = 2.0 * problem.len_q * problem.len_k * problem.heads * (problem.head_dim + problem.head_dim_v)
    run(Queue(items), make_worker, flop * (1 if problem.packed else problem.batch), operands.progress)
    return out, lse


def attend(head: Head, i0: int, i1: int, buffers: Buffers, out: np.ndarray, lse: np.ndarray) -> None:
    """Query rows [i0, i1) of one head: the loop over key tiles.  Writes out (n, head_dim_v) and lse (n,)."""
    exp, log, units = head.base
    Q = buffers.load_with("Q", head.q[i0:i1], 0, factor=head.q_factor)  # [Q, -m]
    O = buffers.zeros("O", i1 - i0, out.shape[1])  # noqa: E741
    m, l = start(head, i1 - i0)  # noqa: E741
    if head.folds_m:
        Q[:, -1] = -m

    for j0, j1 in head.visible.key_tiles(i0, i1, TILE_KV):
        r0, r1 = head.visible.queries_of(j0, j1)  # rows that see a key of this tile
        r0, r1 = max(r0, i0), min(r1, i1)
        if r0 >= r1 or head.visible.is_hidden(r0, r1, j0, j1):
            continue
        rows = slice(r0 - i0, r1 - i0)
        K = buffers.load_with("K", head.k[j0:j1], 1)  # [K, 1]
        V = buffers.load("V", head.v[j0:j1])

        S = np.matmul(Q[rows], K.T, out=buffers.empty("S", r1 - r0, j1 - j0))  # Q K^T - m
        head.change(S, m[rows], r0, j0, buffers)
        pairs = head.pairs(S, V)
        # (worded so that NaN, too, takes the careful way)
        if not (S.max() <= SLACK and l[rows].min() > 0):
            raise_maximum(head, S, m[rows], l[rows], O[rows])
            if head.folds_m:
                Q[rows, -1] = -m[rows]
        P = exp(S, out=S)
        l[rows] += P @ np.ones(j1 - j0, P.dtype)
        if head.problem.dropout is not None:
            np.copyto(P, 0, where=head.dropped(r0, r1, j0, j1))
        O[rows] += product(P, V, pairs, out=buffers.empty("PV", r1 - r0, V.shape[1]))

    np.divide(m + log(l), units, out=lse)  # natural
    if head.problem.dropout is not None:
        l *= 1 - head.problem.dropout  # noqa: E741
    # a row that saw nothing has O = 0 and l = 0, and its output is 0
    np.divide(O, l[:, None], out=O, where=O != 0)
    np.copyto(out, O, casting="unsafe")


def start(head: Head, n: int) -> tuple[np.ndarray, np.ndarray]:
    """m and l (n,) before the first key.  A sink is a key before the first, whose value is 0."""
    m, l = np.zeros(n, head.number), np.zeros(n, head.number)  # noqa: E741
    sink = head.operands.sink
    if sink is not None and sink[head.h] != -np.inf:
        m[:] = sink[head.h] * head.number(head.base.units)
        l[:] = head.base.exp(m - m)  # 1; NaN where the sink is not finite
    return m, l


def raise_maximum(head: Head, S: np.ndarray, m: np.ndarray, l: np.ndarray, O: np.ndarray) -> None:  # noqa: E741
    """Bring m up to the largest score of each row, in place.  S (n, n_keys) is taken above m, before and after.

    A row that has seen no key yet has l = 0 and no m worth keeping: it takes the largest score as it is.
    """
    up = S.max(axis=1)
    np.maximum(up, 0, out=up, where=l > 0)
    up[up == -np.inf] = 0  # still nothing visible
    up[up == np.inf] = np.nan  # inf / inf: the row is NaN
    np.subtract(S, up[:, None], out=S, where=True if np.isfinite(up).all() else S != -np.inf)
    m += up
    shrink = head.base.exp(-np.fmax(up, 0))  # fmax: a row that is NaN from here on keeps its O
    l *= shrink
    O *= shrink[:, None]


def query_items(problem: Problem, operands: Operands) -> list[tuple]:
    """(sequence, head, i0, i1) of every tile of query rows, those that see most keys first when causal."""
    rows = problem.len_q * problem.heads * (1 if problem.packed else problem.batch)
    size = tile_size(rows, N_ITEMS, TILE_Q, operands.block_mask and operands.block_mask.block_q)
    items = [
        (sequence, h, i0, i1)
        for sequence in sequences(problem, operands)
        for h in range(problem.heads)
        for i0, i1 in cut(0, sequence.len_q, size)
    ]
    if problem.causal:
        items.sort(key=lambda item: -item[2])
    return items
