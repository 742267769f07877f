"""Which pairs a tile shows: by position (causal, window), by block mask, by boolean mask.

Two questions, for one (sequence, head), in positions inside the sequence: which tiles hold a visible pair at
all (the others are never computed), and which pairs of such a tile are hidden.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cuflash.problem import Operands, Problem
from cuflash.reference_scores import Sequence
from cuflash.tiled_blocks import Cells, cell_size, kept_blocks, pairs_are_whole
from cuflash.tiled_buffers import Buffers

WIDEST = 960  # keys of a tile: over more, the small products of tiled_products.py would get too small


class Run(NamedTuple):
    """Keys [j0, j1) of a tile, which lie in these columns of it."""

    j0: int
    j1: int
    columns: slice


class Tile(NamedTuple):
    """What is computed at once: queries [i0, i1) and keys of which they see something, run beside run.

    Without a block mask there is one run.
    """

    i0: int
    i1: int
    runs: tuple[Run, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.i1 - self.i0, self.runs[-1].columns.stop

    def keys(self) -> np.ndarray:
        """Positions of the keys."""
        return np.concatenate([np.arange(run.j0, run.j1) for run in self.runs])

    def of(self, array: np.ndarray, j0: int, name: str, buffers: Buffers) -> np.ndarray:
        """The columns of array that belong to the tile's keys; array's are those of keys from j0 on."""
        found = [array[:, run.j0 - j0 : run.j1 - j0] for run in self.runs]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found, axis=1, out=buffers.empty(name, len(array), self.shape[1]))

    def rows_of(self, array: np.ndarray, j0: int, name: str, buffers: Buffers) -> np.ndarray:
        """The same of an array with a row for each key."""
        found = [array[run.j0 - j0 : run.j1 - j0] for run in self.runs]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found, out=buffers.empty(name, self.shape[1], array.shape[1]))


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
        self.cuts_blocks = self.block_mask is not None and not pairs_are_whole(self.block_mask)
        # can `hide` find anything to do?
        self.has_holes = self.cuts_blocks or any(x is not None for x in (self.first, self.last, self.mask))

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

    def key_tiles(self, i0: int, i1: int, size: int, area: int) -> list[tuple[int, int, list[Tile]]]:
        """What queries [i0, i1) see: (j0, j1, tiles) of keys [j0, j1), at most `size` of them, ascending.

        area: pairs of a tile, at most.
        """
        begin, end = self.keys_of(i0, i1)
        cells = None if self.block_mask is None else self._cells((i0, i1), (begin, end))
        spans = [(begin, end)] if cells is None else cells.spans_of_keys(begin, end)
        found = [(j0, j1, self._tiles(cells, i0, i1, j0, j1, area)) for j0, j1 in pieces(spans, size)]
        return [step for step in found if step[2]]

    def query_tiles(self, j0: int, j1: int, size: int, area: int) -> list[tuple[int, int, list[Tile]]]:
        """What keys [j0, j1) are seen by: (i0, i1, tiles) of queries [i0, i1), as in `key_tiles`."""
        begin, end = self.queries_of(j0, j1)
        cells = None if self.block_mask is None else self._cells((begin, end), (j0, j1))
        spans = [(begin, end)] if cells is None else cells.spans_of_queries(begin, end)
        found = [(i0, i1, self._tiles(cells, i0, i1, j0, j1, area)) for i0, i1 in pieces(spans, size)]
        return [step for step in found if step[2]]

    def _cells(self, queries: tuple[int, int], keys: tuple[int, int]) -> Cells:
        return Cells(self.block_mask, self.sequence.b, self.h, queries, keys)

    def _tiles(self, cells: Cells | None, i0: int, i1: int, j0: int, j1: int, area: int) -> list[Tile]:
        """The tiles of queries [i0, i1) x keys [j0, j1)."""
        tiles = []
        begin, end = self.queries_of(j0, j1)
        i0, i1 = max(i0, begin), min(i1, end)
        for r0, r1 in [(i0, i1)] if cells is None else cells.rows(i0, i1):
            begin, end = self.keys_of(r0, r1)
            c0, c1 = max(j0, begin), min(j1, end)
            if r0 >= r1 or c0 >= c1:
                continue
            widest = min(max(1, area // (r1 - r0)), WIDEST)
            runs = [(c0, c1)] if cells is None else cells.runs_of_keys(r0, c0, c1)
            runs = [piece for run in runs for piece in cut_evenly(*run, widest)]
            if self.mask is not None:
                runs = [run for run in runs if part(self.mask, r0, r1, *run).any()]
            tiles += [Tile(r0, r1, packed) for packed in side_by_side(runs, widest)]
        return tiles

    def hide(self, array: np.ndarray, tile: Tile, value: float, buffers: Buffers) -> None:
        """Write value into the hidden pairs of the tile: -inf into scores, 0 into weights."""
        if not self.has_holes:
            return
        for run in tile.runs:
            self._hide_positions(array[:, run.columns], tile.i0, run.j0, value)
            if self.mask is not None:
                visible = part(self.mask, tile.i0, tile.i1, run.j0, run.j1)
                if not visible.all():
                    buffers.keep_only(array[:, run.columns], visible, value)
        if self.cuts_blocks:
            queries, keys = np.arange(tile.i0, tile.i1), tile.keys()
            ends = (tile.i0, tile.i1), (int(keys[0]), int(keys[-1]) + 1)
            kept = kept_blocks(self.block_mask, self.sequence.b, self.h, *ends)
            rows, columns = queries // self.block_mask.block_q, keys // self.block_mask.block_k
            kept = kept[:, columns - columns[0]][rows - rows[0]]
            if not kept.all():
                buffers.keep_only(array, kept, value)

    def _hide_positions(self, array: np.ndarray, i0: int, j0: int, value: float) -> None:
        """What causal and window hide in the rectangle whose corner is (i0, j0)."""
        i1, j1 = i0 + array.shape[0], j0 + array.shape[1]
        if self.last is not None:  # the corner of early queries and late keys
            end = min(max(j1 - 1 - self.last, i0), i1)
            start = min(max(i0 + self.last + 1, j0), j1)
            visible = triangle(end - i0, j1 - start, i0 + self.last - start)
            np.copyto(array[: end - i0, start - j0 :], value, where=~visible)
        if self.first is not None:  # the corner of late queries and early keys
            start = min(max(j0 - self.first + 1, i0), i1)
            end = min(max(i1 - 1 + self.first, j0), j1)
            hidden = triangle(i1 - start, end - j0, start + self.first - j0 - 1)
            np.copyto(array[start - i0 :, : end - j0], value, where=hidden)


@functools.lru_cache(maxsize=8)
def triangle(n: int, m: int, k: int) -> np.ndarray:
    """bool (n, m): True on and below the k-th diagonal.  Tiles along an edge mostly ask for the same one."""
    return np.tri(n, m, k, bool)


def side_by_side(runs: list[tuple[int, int]], widest: int) -> list[tuple[Run, ...]]:
    """The runs [j0, j1), in groups of at most `widest` keys."""
    groups: list[list[Run]] = []
    for j0, j1 in runs:
        at = groups[-1][-1].columns.stop if groups else 0
        if not groups or at + j1 - j0 > widest:
            groups.append([])
            at = 0
        groups[-1].append(Run(j0, j1, slice(at, at + j1 - j0)))
    return [tuple(group) for group in groups]


def cut(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    """[begin, end) in pieces of `size`, the last one shorter."""
    return [(start, min(start + size, end)) for start in range(begin, end, size)]


def cut_evenly(begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """[begin, end) in pieces of nearly the same size, in 16s, at most `most`."""
    n = -(-(end - begin) // most)
    return cut(begin, end, min(-(-(end - begin) // (16 * n)) * 16, most))


def pieces(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Each of the spans, cut."""
    return [piece for span in spans for piece in cut(*span, size)]


def tile_size(n_rows: int, n_items: int, largest: int, block: int | None = None) -> int:
    """Rows of an item: n_rows over n_items, in 64s, from 128 to `largest`.

    block: rows of a block of the block mask.  It leaves less to do: items are twice as large, whole blocks.
    """
    if block is not None:
        n_rows, largest = 2 * n_rows, 2 * largest
    size = min(max(-(-n_rows // (64 * n_items)) * 64, 128), largest)
    cell = 1 if block is None else cell_size(block)
    return max(size // cell, 1) * cell if cell <= largest else size


def plane(array: np.ndarray, b: int, h: int) -> np.ndarray:
    """array[b, h] of an array whose first two axes have length 1 where they broadcast."""
    return array[b if array.shape[0] != 1 else 0, h if array.shape[1] != 1 else 0]


def part(array: np.ndarray, i0: int, i1: int, j0: int, j1: int) -> np.ndarray:
    """array[i0:i1, j0:j1]; an axis of length 1 stays, and broadcasts."""
    rows = slice(i0, i1) if array.shape[0] != 1 else slice(None)
    columns = slice(j0, j1) if array.shape[1] != 1 else slice(None)
    return array[rows, columns]
