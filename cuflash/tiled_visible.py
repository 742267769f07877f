"""Which pairs a tile shows: by position (causal, window), by block mask, by boolean mask.

Two questions, for one (sequence, head), in positions inside the sequence: which tiles hold a visible pair at
all (the others are never computed), and which pairs of such a tile are hidden.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Sequence
from cuflash.tiled_buffers import Buffers

GRAIN = 64  # rows or keys: a narrower tile costs more per pair than the hidden pairs that it leaves out


class Visible:
    """The masks of one (sequence, head).  Lengths need no mask: rows past them are in no tile."""

    def __init__(self, problem: Problem, operands: Operands, sequence: Sequence, h: int):
        self.sequence, self.h = sequence, h
        left, right = problem.window
        if problem.causal:
            right = 0 if right is None else min(right, 0)
        # key j is visible to query i by position when i + first <= j <= i + last; None: no bound
        self.first = None if left is None else sequence.offset - left
        self.last = None if right is None else sequence.offset + right
        self.mask = plane(operands.mask, sequence.b, h) if problem.has_mask else None
        self.block_mask = operands.block_mask
        # can `hide` find anything to do?
        self.has_holes = any(x is not None for x in (self.first, self.last, self.mask, self.block_mask))

    def keys_of(self, i0: int, i1: int) -> tuple[int, int]:
        """Keys [begin, end): those that positions leave to at least one of the queries [i0, i1)."""
        len_k = self.sequence.len_k
        begin = 0 if self.first is None else min(max(i0 + self.first, 0), len_k)
        end = len_k if self.last is None else min(i1 + self.last, len_k)
        return begin, max(begin, end)

    def queries_of(self, j0: int, j1: int) -> tuple[int, int]:
        """Queries [begin, end): those to which positions leave at least one of the keys [j0, j1)."""
        len_q = self.sequence.len_q
        begin = 0 if self.last is None else min(max(j0 - self.last, 0), len_q)
        end = len_q if self.first is None else min(j1 - self.first, len_q)
        return begin, max(begin, end)

    def key_tiles(self, i0: int, i1: int, size: int) -> list[tuple[int, int, int, int]]:
        """What queries [i0, i1) see, in tiles (r0, r1, j0, j1) of at most `size` keys, ascending.

        Of a tile of keys [j0, j1) they see something only in rows [r0, r1).
        """
        tiles = []
        for j0, j1 in self._tiles(self.block_mask, (i0, i1), self.keys_of(i0, i1), size):
            r0, r1 = self.queries_of(j0, j1)
            tiles.append((max(r0, i0), min(r1, i1), j0, j1))
        return [tile for tile in tiles if self._shows(*tile)]

    def query_tiles(self, j0: int, j1: int, size: int) -> list[tuple[int, int, int, int]]:
        """What keys [j0, j1) are seen by, in tiles (i0, i1, c0, c1) of at most `size` queries, ascending.

        A tile of queries [i0, i1) sees something only of keys [c0, c1).
        """
        tiles = []
        transposed = self.block_mask and self.block_mask.transpose()
        for i0, i1 in self._tiles(transposed, (j0, j1), self.queries_of(j0, j1), size):
            c0, c1 = self.keys_of(i0, i1)
            tiles.append((i0, i1, max(c0, j0), min(c1, j1)))
        return [tile for tile in tiles if self._shows(*tile)]

    def _shows(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """Does the tile exist, and the boolean mask leave something of it?"""
        return i0 < i1 and j0 < j1 and (self.mask is None or bool(part(self.mask, i0, i1, j0, j1).any()))

    def _tiles(
        self, block_mask: Any, own: tuple[int, int], seen: tuple[int, int], size: int
    ) -> list[tuple[int, int]]:
        """`seen` cut into tiles, without the blocks in which `own`, rows of the block mask, keep nothing."""
        begin, end = seen
        if block_mask is None or begin == end:
            return cut(begin, end, size)
        kept = kept_blocks(block_mask, self.sequence.b, self.h, own, seen).any(axis=0)
        grain = max(1, GRAIN // block_mask.block_k)  # blocks taken together
        kept = np.logical_or.reduceat(kept, np.arange(0, len(kept), grain))
        is_edge = np.diff(kept, prepend=False, append=False)  # a run begins, a run ends, ...
        edges = (begin // block_mask.block_k + np.flatnonzero(is_edge) * grain) * block_mask.block_k
        runs = np.clip(edges, begin, end).reshape(-1, 2).tolist()
        return [tile for run in runs for tile in cut(*run, size)]

    def hide(self, tile: np.ndarray, i0: int, j0: int, value: float, buffers: Buffers) -> None:
        """Write value into the hidden pairs of the tile at (i0, j0): -inf into scores, 0 into weights."""
        i1, j1 = i0 + tile.shape[0], j0 + tile.shape[1]
        if self.last is not None:  # the corner of early queries and late keys
            end = min(max(j1 - 1 - self.last, i0), i1)
            start = min(max(i0 + self.last + 1, j0), j1)
            visible = triangle(end - i0, j1 - start, i0 + self.last - start)
            np.copyto(tile[: end - i0, start - j0 :], value, where=~visible)
        if self.first is not None:  # the corner of late queries and early keys
            start = min(max(j0 - self.first + 1, i0), i1)
            end = min(max(i1 - 1 + self.first, j0), j1)
            hidden = triangle(i1 - start, end - j0, start + self.first - j0 - 1)
            np.copyto(tile[start - i0 :, : end - j0], value, where=hidden)
        if self.mask is not None:
            visible = part(self.mask, i0, i1, j0, j1)
            if not visible.all():
                buffers.keep_only(tile, visible, value)
        if self.block_mask is not None:
            kept = kept_blocks(self.block_mask, self.sequence.b, self.h, (i0, i1), (j0, j1))
            if not kept.all():
                rows = np.arange(i0, i1) // self.block_mask.block_q - i0 // self.block_mask.block_q
                columns = np.arange(j0, j1) // self.block_mask.block_k - j0 // self.block_mask.block_k
                buffers.keep_only(tile, kept[rows[:, None], columns], value)


@functools.lru_cache(maxsize=8)
def triangle(n: int, m: int, k: int) -> np.ndarray:
    """bool (n, m): True on and below the k-th diagonal.  Tiles along an edge mostly ask for the same one."""
    return np.tri(n, m, k, bool)


def kept_blocks(
    block_mask: Any, b: int, h: int, rows: tuple[int, int], columns: tuple[int, int]
) -> np.ndarray:
    """The blocks that rows x columns touch, True where kept: bool (n_block_rows, n_block_columns)."""
    indptr = plane(block_mask.indptr, b, h)
    row0, row1 = rows[0] // block_mask.block_q, (rows[1] - 1) // block_mask.block_q + 1
    column0, column1 = columns[0] // block_mask.block_k, (columns[1] - 1) // block_mask.block_k + 1
    kept = np.zeros((row1 - row0, column1 - column0), bool)
    for row in range(row0, min(row1, len(indptr) - 1)):  # a mask may end before the keys do (transposed)
        indices = block_mask.indices[indptr[row] : indptr[row + 1]]
        first, last = np.searchsorted(indices, (column0, column1))
        kept[row - row0, indices[first:last] - column0] = True
    return kept


def cut(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    """[begin, end) in pieces of `size`, the last one shorter."""
    return [(start, min(start + size, end)) for start in range(begin, end, size)]


def tile_size(n_rows: int, n_items: int, largest: int, block: int | None = None) -> int:
    """Rows of an item: n_rows over n_items, in 64s, from 128 to `largest`.

    block: rows of a block of the block mask.  Then an item is one block row, for it computes what any of its
    rows sees; a few of them where they are small.
    """
    if block is not None and block <= largest:
        return block * max(1, GRAIN // block)
    return min(max(-(-n_rows // (64 * n_items)) * 64, 128), largest)


def plane(array: np.ndarray, b: int, h: int) -> np.ndarray:
    """array[b, h] of an array whose first two axes have length 1 where they broadcast."""
    return array[b if array.shape[0] != 1 else 0, h if array.shape[1] != 1 else 0]


def part(array: np.ndarray, i0: int, i1: int, j0: int, j1: int) -> np.ndarray:
    """array[i0:i1, j0:j1]; an axis of length 1 stays, and broadcasts."""
    rows = slice(i0, i1) if array.shape[0] != 1 else slice(None)
    columns = slice(j0, j1) if array.shape[1] != 1 else slice(None)
    return array[rows, columns]
