"""Block masks in the tiled algorithm: where the kept blocks of a rectangle of queries and keys lie.

Blocks narrower than GRAIN are taken together, to cells: a narrower tile would cost more per pair than the
hidden pairs that it leaves out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GRAIN = 64  # rows or keys
NEAR = 512  # keys or queries between two spans that are not worth two loads


def cell_size(block: int) -> int:
    """Rows, or keys, of a cell of such blocks."""
    return block * max(1, GRAIN // block)


def pairs_are_whole(block_mask: Any) -> bool:
    """Is every pair of a kept cell visible?  Then nobody looks at the block mask again."""
    return all(cell_size(block) == block for block in (block_mask.block_q, block_mask.block_k))


class Cells:
    """Which cells of queries [i0, i1) x keys [j0, j1) have a kept block, for one (batch entry, head)."""

    def __init__(self, block_mask: Any, b: int, h: int, queries: tuple[int, int], keys: tuple[int, int]):
        self.n_queries, self.n_keys = cell_size(block_mask.block_q), cell_size(block_mask.block_k)
        self.row0, self.column0 = queries[0] // self.n_queries, keys[0] // self.n_keys
        self.kept = np.zeros((0, 0), bool)
        if queries[0] < queries[1] and keys[0] < keys[1]:
            whole = (self.row0 * self.n_queries, queries[1]), (self.column0 * self.n_keys, keys[1])
            kept = kept_blocks(block_mask, b, h, *whole)
            kept = together(kept, self.n_queries // block_mask.block_q, axis=0)
            self.kept = together(kept, self.n_keys // block_mask.block_k, axis=1)
        self.runs = runs(self.kept, self.n_keys, self.column0)

    def rows(self, i0: int, i1: int) -> list[tuple[int, int]]:
        """[i0, i1) cut where one row of cells ends."""
        ends = range(i0 // self.n_queries * self.n_queries, i1, self.n_queries)
        return [(max(start, i0), min(start + self.n_queries, i1)) for start in ends]

    def runs_of_keys(self, i: int, j0: int, j1: int) -> list[tuple[int, int]]:
        """The keys of [j0, j1) that query i keeps, as runs."""
        return clip(self.runs[i // self.n_queries - self.row0], j0, j1)

    def spans_of_keys(self, j0: int, j1: int) -> list[tuple[int, int]]:
        """The keys of [j0, j1) that any query keeps, with small gaps between them."""
        return join(clip(runs(self.kept.any(axis=0)[None], self.n_keys, self.column0)[0], j0, j1))

    def spans_of_queries(self, i0: int, i1: int) -> list[tuple[int, int]]:
        """The queries of [i0, i1) that keep any key, with small gaps between them."""
        return join(clip(runs(self.kept.any(axis=1)[None], self.n_queries, self.row0)[0], i0, i1))


def kept_blocks(
    block_mask: Any, b: int, h: int, rows: tuple[int, int], columns: tuple[int, int]
) -> np.ndarray:
    """The blocks that rows x columns touch, True where kept: bool (n_block_rows, n_block_columns)."""
    batch, heads = block_mask.indptr.shape[:2]
    indptr = block_mask.indptr[b if batch != 1 else 0, h if heads != 1 else 0]
    row0, row1 = rows[0] // block_mask.block_q, (rows[1] - 1) // block_mask.block_q + 1
    column0, column1 = columns[0] // block_mask.block_k, (columns[1] - 1) // block_mask.block_k + 1
    counts = np.diff(indptr[row0 : row1 + 1])
    row = np.repeat(np.arange(row1 - row0), counts)
    column = block_mask.indices[indptr[row0] : indptr[row1]] - column0
    is_inside = (column >= 0) & (column < column1 - column0)
    kept = np.zeros((row1 - row0, column1 - column0), bool)
    kept[row[is_inside], column[is_inside]] = True
    return kept


def together(kept: np.ndarray, n: int, axis: int) -> np.ndarray:
    """Any of each n neighbours along the axis."""
    return kept if n == 1 else np.logical_or.reduceat(kept, np.arange(0, kept.shape[axis], n), axis=axis)


def runs(kept: np.ndarray, size: int, first: int) -> list[list[tuple[int, int]]]:
    """For each row of kept, its runs of True as positions; column 0 is the cell with the number `first`."""
    padded = np.zeros((kept.shape[0], kept.shape[1] + 2), bool)
    padded[:, 1:-1] = kept
    rows, edges = np.nonzero(padded[:, 1:] != padded[:, :-1])  # a run begins, it ends, the next begins, ...
    found: list[list[tuple[int, int]]] = [[] for _ in range(len(kept))]
    edges = ((edges + first) * size).tolist()
    for row, begin, end in zip(rows[::2].tolist(), edges[::2], edges[1::2], strict=True):
        found[row].append((begin, end))
    return found


def clip(spans: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """What of the spans lies in [begin, end)."""
    return [(max(start, begin), min(stop, end)) for start, stop in spans if start < end and stop > begin]


def join(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans, neighbours made one."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < NEAR:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
