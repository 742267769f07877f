"""The tiled algorithm in NumPy: what runs for NumPy arrays.  Here the forward; next tiled_backward.py.

Attention of one head is O = softmax(S) V with S = scale Q K^T.  S has len_q x len_k numbers and is never
held.  K and V come in tiles, and a query row keeps three things, enough to take in one tile more:

    m    the largest score so far, or one not far below it
    l    sum of exp(S - m)
    O    sum of exp(S - m) V             in the end: out = O / l and lse = m + log l

When a tile brings a score far above m, m is raised, and l and O, made with the old m, shrink by
exp(old m - new m).  The result is exact, in whatever order the keys come.

m is there so that exp does not overflow.  Often it cannot anyway, for |q . k| <= |q| |k|: as long as that is
small, m stays 0 and nobody looks for a maximum.

| file | what |
|---|---|
| tiled.py | the loop of the forward |
| tiled_backward.py | the loop of the backward; tiled_sums.py: what its tiles share |
| tiled_scores.py | from a product to a score: scale, softcap, ALiBi, bias; dropout |
| tiled_visible.py | causal, window, masks: which tiles are computed, which pairs are hidden |
| tiled_buffers.py, tiled_workers.py | memory and threads |

Sources: Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), order of loops;
FlashAttention-4 (2025), raising m only when it matters.

Tried (float32, 8 heads of 4,096 x 64, an AMD EPYC with AVX-512, November 2026; ns per score and core, 3.1 in
all, of which the two products take 2.65; PyTorch 2.13 takes 3.1 to 3.2 in the same runs):
- S - m as a pass of its own: +0.18; the maximum of every row of every tile: +0.3; np.exp for np.exp2: +0.24
- l as a column of ones in V: +0.04; K stored transposed: the loads cost what the product gains
- TILE_Q 1024: +0.1, 512: +0.4, as K and V are read across heads; narrower tiles along the diagonal: no gain
"""

# ruff: noqa: E741  (l and O are the papers' names)

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Sequence, sequences
from cuflash.results import allocate_missing
from cuflash.tiled_backward import backward
from cuflash.tiled_buffers import Buffers
from cuflash.tiled_scores import FAST, Head, largest_norm, product
from cuflash.tiled_visible import cut, tile_size
from cuflash.tiled_workers import Queue, Turn, n_flop, run

__all__ = ["backward", "forward"]

TILE_Q = 2048  # query rows of an item, at most
TILE_KV = 256
N_ITEMS = 16  # a small problem is cut into about so many items: work for that many threads
SLACK = 8  # a score may lie this far above m, in its base, before m is raised: weights up to 2^8 do no harm
FAR = {"float32": 150, "float64": 1100}  # exp of less than this below 0 is 0, in either base
SMALL, SMALL_V = 40, 2.0**40  # |q| |k| and |v| up to which no exponential, and no sum of them, overflows


class QueryTile(NamedTuple):
    """What one item owns: queries [i0, i1) of one head."""

    sequence: Sequence
    h: int
    i0: int
    i1: int


def forward(problem: Problem, operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a checked call.

    problem, operands: as cuflash.check.check makes them, with NumPy arrays.  Returns canonical views: out
    (batch, len_q, heads, head_dim_v) and lse (batch, heads, len_q), the arrays that operands holds where it
    holds any.  operands.progress(done, total) counts query tiles.
    """
    allocate_missing(problem, operands, np)
    out, lse = operands.out, operands.lse
    if problem.packed or problem.has_query_lengths:
        out[...], lse[...] = 0, -np.inf  # rows that belong to no sequence

    def make_worker() -> Callable:
        buffers = Buffers(problem.accumulator)

        def do(_turn: Turn, tile: QueryTile) -> None:
            head = Head(problem, operands, tile.sequence, tile.h, FAST)
            rows = slice(tile.i0, tile.i1)
            attend(head, tile.i0, tile.i1, out[head.query_rows][rows], lse[head.per_query][rows], buffers)

        return do

    queue = Queue(query_tiles(problem, operands))
    run(queue, make_worker, n_flop(problem, 1, 1), operands.progress)
    return out, lse


def attend(head: Head, i0: int, i1: int, out: np.ndarray, lse: np.ndarray, buffers: Buffers) -> None:
    """Queries [i0, i1) of one head: the loop over key tiles.  Writes out (n, head_dim_v) and lse (n,)."""
    exp, small_exp, log, units = head.base
    m, l = start(head, i1 - i0)
    O = buffers.zeros("O", i1 - i0, out.shape[1])
    Q = buffers.load_with("Q", head.q[i0:i1], head.column(m), factor=head.q_factor)  # [scale Q, -m]
    longest_q = largest_norm(Q[:, :-1])
    is_small = head.is_plain and head.sink is None

    for r0, r1, j0, j1 in head.visible.key_tiles(i0, i1, TILE_KV):
        rows = slice(r0 - i0, r1 - i0)  # those that see a key of this tile
        K = buffers.load_with("K", head.k[j0:j1], 1)  # [K, 1]
        V = buffers.load("V", head.v[j0:j1])

        S = buffers.empty("S", r1 - r0, j1 - j0)
        is_small = is_small and longest_q * largest_norm(K) <= SMALL and largest_norm(V) <= SMALL_V
        if is_small:  # m is 0, may stay so, and needs no column
            np.matmul(Q[rows, :-1], K[:, :-1].T, out=S)
            P = small_exp(S, out=S)
            head.visible.hide(P, r0, j0, 0, buffers)
            pairs = None
        else:
            np.matmul(Q[rows], K.T, out=S)
            head.change(S, m[rows], r0, j0, buffers)  # scores, above m
            top = S.max()
            if not top <= FAR[S.dtype.name] and forget(S, m[rows], l[rows], O[rows]):
                Q[rows, -1] = head.column(m[rows])
                np.matmul(Q[rows], K.T, out=S)
                head.change(S, m[rows], r0, j0, buffers)
                top = S.max()
            if keep_maximum(head, S, top, m[rows], l[rows], O[rows]):
                Q[rows, -1] = head.column(m[rows])
            pairs = ~np.isneginf(S) if head.needs_care(V) else None
            P = exp(S, out=S)
        l[rows] += P @ np.ones(j1 - j0, P.dtype)
        if head.dropout is not None:
            buffers.keep_only(P, head.kept(r0, r1, j0, j1), 0)
        O[rows] += product(P, V, pairs, out=buffers.empty("PV", r1 - r0, V.shape[1]))

    np.divide(m + log(l), units, out=lse)  # natural; -inf where nothing was seen
    if head.dropout is not None:
        l *= 1 - head.dropout
    l[l == 0] = 1  # a row that saw nothing: O is 0
    # dropout may take all weights of a row that is NaN: O is 0, and l is NaN
    np.divide(O, l[:, None], out=O, where=True if head.dropout is None else O != 0)
    np.copyto(out, O, casting="unsafe")


def start(head: Head, n: int) -> tuple[np.ndarray, np.ndarray]:
    """m and l (n,) before the first key.  A sink is a key before the first, whose value is 0."""
    m, l = np.zeros(n, head.number), np.zeros(n, head.number)
    if head.sink is not None and head.sink != -np.inf:
        is_finite = np.isfinite(head.sink)
        m[:] = head.sink * head.number(head.base.units) if is_finite else 0
        l[:] = 1 if is_finite else np.nan
    return m, l


def forget(S: np.ndarray, m: np.ndarray, l: np.ndarray, O: np.ndarray) -> bool:
    """Start rows anew, in place, whose scores S are so far above m that all before weighs 0.  Were there any?

    A bias of -1e9 that hides the first keys, or a sink of -1e30, leaves such an m.  Scores above it have lost
    the digits that matter: S is to be made again.  O keeps what is NaN.
    """
    far = (S.max(axis=1) > FAR[S.dtype.name]) & (l > 0)
    m[far] = l[far] = 0
    O[far] *= 0
    return bool(far.any())


def keep_maximum(head: Head, S: np.ndarray, top: float, m: np.ndarray, l: np.ndarray, O: np.ndarray) -> bool:
    """Raise m in place where the scores S (n, n_keys), which are above m, ask for it.  Returns: has it moved?

    top: the largest of S.  Comparisons are worded so that NaN, too, asks for it.
    """
    has_moved = False
    if not l.min() > 0:
        unseen = np.flatnonzero(l == 0)  # rows that may see their first key here: neighbours, when causal
        if unseen.size:
            new = slice(unseen[0], unseen[-1] + 1)
            raise_maximum(head, S[new], m[new], l[new], O[new])
            has_moved, top = True, S.max()
    if not top <= SLACK:
        raise_maximum(head, S, m, l, O)
        has_moved = True
    return has_moved


def raise_maximum(head: Head, S: np.ndarray, m: np.ndarray, l: np.ndarray, O: np.ndarray) -> None:
    """Bring m up to the largest score of each row, in place.  S (n, n_keys) is above m, before and after.

    A row that has seen no key yet has l = 0, and no m worth keeping: it takes the largest score as it is.
    A score of NaN or +inf makes the row NaN, for good: l is NaN, and m need not be.
    """
    up = S.max(axis=1)
    np.maximum(up, 0, out=up, where=l > 0)
    up[up == -np.inf] = 0  # still nothing visible
    is_nan = ~np.isfinite(up)
    up[is_nan], l[is_nan] = 0, np.nan
    S -= up[:, None]
    m += up
    shrink = head.base.exp(-np.maximum(up, 0))
    l *= shrink
    O *= shrink[:, None]


def query_tiles(problem: Problem, operands: Operands) -> list[QueryTile]:
    """Every item; when causal, those that see most keys first, so that the short ones fill the end."""
    n_rows = operands.q.shape[0] * problem.len_q * problem.heads
    size = tile_size(n_rows, N_ITEMS, TILE_Q, operands.block_mask and operands.block_mask.block_q)
    tiles = [
        QueryTile(sequence, h, i0, i1)
        for sequence in sequences(problem, operands)
        for h in range(problem.heads)
        for i0, i1 in cut(0, sequence.len_q, size)
    ]
    return sorted(tiles, key=lambda tile: -tile.i0) if problem.causal else tiles
