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
| tiled_blocks.py | block masks: where the kept blocks lie |
| tiled_products.py | products, asked of BLAS in the way that it does best |
| tiled_buffers.py, tiled_workers.py | memory and threads |

Sources: Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), order of loops;
FlashAttention-4 (2025), raising m only when it matters.  What was tried: kernels/ATTEMPTS.md.
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
from cuflash.tiled_products import largest_norm, multiply, product
from cuflash.tiled_scores import FAST, Head
from cuflash.tiled_visible import Tile, cut, tile_size
from cuflash.tiled_workers import Queue, Turn, do_all, n_flop

__all__ = ["backward", "forward"]

TILE_Q = 2048  # query rows of an item, at most
TILE_KV = 256
LOADED = 2**19  # numbers of K to load at once where a block mask leaves some keys to each query
FEW_ROWS = 128
N_ITEMS = 16  # a small problem is cut into about so many items: work for that many threads
SLACK = 8  # a score may lie this far above m, in its base, before m is raised: weights up to 2^8 do no harm
FAR = {"float32": 150, "float64": 1100}  # exp of less than this below 0 is 0, in either base
SMALL, SMALL_V = 40, 2.0**40  # |q| |k| and |v| up to which no exponential, and no sum of them, overflows


class Item(NamedTuple):
    """What one thread does at a time: queries [i0, i1) of one head."""

    sequence: Sequence
    h: int
    i0: int
    i1: int


def forward(problem: Problem, operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a checked call.

    problem, operands: as cuflash.check.check makes them, with NumPy arrays.  Returns canonical views: out
    (batch, len_q, heads, head_dim_v) and lse (batch, heads, len_q), the arrays that operands holds where it
    holds any.  operands.progress(done, total) counts items.
    """
    allocate_missing(problem, operands, np)
    out, lse = operands.out, operands.lse
    if problem.packed or problem.has_query_lengths:
        out[...], lse[...] = 0, -np.inf  # rows that belong to no sequence

    def make_worker() -> Callable:
        buffers = Buffers(problem.accumulator)

        def do(_turn: Turn, item: Item) -> None:
            head = Head(problem, operands, item.sequence, item.h, FAST)
            rows = slice(item.i0, item.i1)
            attend(head, item.i0, item.i1, out[head.query_rows][rows], lse[head.per_query][rows], buffers)

        return do

    queue = Queue(items(problem, operands))
    do_all(queue, make_worker, n_flop(problem, 1, 1), operands.progress)
    return out, lse


class Rows(NamedTuple):
    """What query rows keep from one key tile to the next, and Q."""

    Q: np.ndarray  # (n, head_dim + 1): [scale Q, -m], in units of the base
    m: np.ndarray  # (n,)
    l: np.ndarray  # (n,)
    O: np.ndarray  # (n, head_dim_v)

    def part(self, rows: slice) -> Rows:
        return Rows(*(array[rows] for array in self))


class Keys(NamedTuple):
    """Loaded keys, from position j0 on."""

    j0: int
    K_T: np.ndarray  # (head_dim + 1, n): [K, 1]^T
    V: np.ndarray  # (n, head_dim_v)

    def of(self, tile: Tile, buffers: Buffers) -> Keys:
        """The keys of a tile."""
        K_T = tile.of(self.K_T, self.j0, "tile's K^T", buffers)
        return Keys(self.j0, K_T, tile.rows_of(self.V, self.j0, "tile's V", buffers))


def attend(head: Head, i0: int, i1: int, out: np.ndarray, lse: np.ndarray, buffers: Buffers) -> None:
    """Queries [i0, i1) of one head: the loop over key tiles.  Writes out (n, head_dim_v) and lse (n,)."""
    m, l = start(head, i1 - i0)
    O = buffers.zeros("O", i1 - i0, out.shape[1])
    Q = buffers.load("Q", head.q[i0:i1], head.column(m), factor=head.q_factor)
    rows = Rows(Q, m, l, O)
    longest_q = largest_norm(Q[:, :-1])
    is_small = head.is_plain and head.sink is None

    for j0, j1, tiles in head.visible.key_tiles(i0, i1, n_keys(head, i1 - i0), TILE_Q * TILE_KV):
        K, V = buffers.load("K", head.k[j0:j1], 1), buffers.load("V", head.v[j0:j1])
        keys = Keys(j0, buffers.turned("K^T", K, n_uses=i1 - i0), V)
        is_small = is_small and longest_q * largest_norm(K[:, :-1]) <= SMALL and largest_norm(V) <= SMALL_V
        take_in = take_in_small if is_small else take_in_any
        for tile in tiles:
            own = rows.part(slice(tile.i0 - i0, tile.i1 - i0))
            take_in(head, tile, own, keys.of(tile, buffers), buffers)

    np.divide(m + head.base.log(l), head.base.units, out=lse)  # natural; -inf where nothing was seen
    if head.sink is not None and (np.isnan(head.sink) or head.sink == np.inf):
        lse[:], l[l > 0] = np.nan, np.nan  # what saw no key keeps its O of 0
    if head.dropout is not None:
        l *= 1 - head.dropout
    l[l == 0] = 1  # a row that saw nothing: O is 0
    np.divide(O, l[:, None], out=O)
    np.copyto(out, O, casting="unsafe")


def take_in_small(head: Head, tile: Tile, rows: Rows, keys: Keys, buffers: Buffers) -> None:
    """One tile more, of scores so small that m is 0, may stay so, and needs no column."""
    S = multiply(rows.Q[:, :-1], keys.K_T[:-1], out=buffers.empty("S", *tile.shape))
    P = head.base.small_exp(S, out=S)
    head.visible.hide(P, tile, 0, buffers)
    add(head, tile, rows, keys, P, None, buffers)


def take_in_any(head: Head, tile: Tile, rows: Rows, keys: Keys, buffers: Buffers) -> None:
    """One tile more, of any scores: m is raised where they ask for it."""
    Q, m, l, O = rows
    S = multiply(Q, keys.K_T, out=buffers.empty("S", *tile.shape))
    head.change(S, m, tile, buffers)  # scores, above m
    top = S.max()
    if not top <= FAR[S.dtype.name] and forget(S, m, l, O):
        Q[:, -1] = head.column(m)
        multiply(Q, keys.K_T, out=S)
        head.change(S, m, tile, buffers)
        top = S.max()
    if keep_maximum(head, S, top, m, l, O):
        Q[:, -1] = head.column(m)
    pairs = ~np.isneginf(S) if head.needs_care(keys.V) else None
    P = head.base.exp(S, out=S)
    add(head, tile, rows, keys, P, pairs, buffers)


def add(
    head: Head, tile: Tile, rows: Rows, keys: Keys, P: np.ndarray, pairs: np.ndarray | None, buffers: Buffers
) -> None:
    """Add a tile's weights P to l, and P V to O.  pairs: where P is of visible pairs, as in `product`."""
    np.add(rows.l, P @ np.ones(P.shape[1], P.dtype), out=rows.l)
    if head.dropout is not None:
        buffers.keep_only(P, head.kept(tile), 0)
    PV = product(P, keys.V, pairs, out=buffers.like("PV", rows.O))
    np.add(rows.O, PV, out=rows.O)


def n_keys(head: Head, n_rows: int) -> int:
    """Keys to load at once."""
    if head.visible.block_mask is not None:
        return max(LOADED // head.k.shape[1], TILE_KV)
    return TILE_KV if n_rows >= FEW_ROWS else 4 * TILE_KV


def start(head: Head, n: int) -> tuple[np.ndarray, np.ndarray]:
    """m and l (n,) before the first key.  A sink is a key before the first, whose value is 0.

    One of -inf is none, and of one of NaN or +inf `attend` thinks at the end.
    """
    m, l = np.zeros(n, head.number), np.zeros(n, head.number)
    if head.sink is not None and np.isfinite(head.sink):
        m[:] = head.sink * head.number(head.base.units)
        l[:] = 1
    return m, l


def forget(S: np.ndarray, m: np.ndarray, l: np.ndarray, O: np.ndarray) -> bool:
    """Start rows anew, in place, whose scores S are so far above m that all before weighs 0.  Were there any?

    A bias of -1e9 that hides the first keys, or a sink of -1e30, leaves such an m.  Scores above it have lost
    the digits that matter: S is to be made again.  O keeps what is NaN.
    """
    top = S.max(axis=1)
    far = (top > FAR[S.dtype.name]) & (l > 0)
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


def items(problem: Problem, operands: Operands) -> list[Item]:
    """All there is to do; when causal, what sees most keys first, so that the short items fill the end."""
    n_rows = operands.q.shape[0] * problem.len_q * problem.heads
    size = tile_size(n_rows, N_ITEMS, TILE_Q, operands.block_mask and operands.block_mask.block_q)
    found = [
        Item(sequence, h, i0, i1)
        for sequence in sequences(problem, operands)
        for h in range(problem.heads)
        for i0, i1 in cut(0, sequence.len_q, size)
    ]
    return sorted(found, key=lambda item: -item.i0) if problem.causal else found
