"""Block patterns as (blocks kept in each row, their columns): vectorised, memory of the blocks kept."""

from __future__ import annotations

import numpy as np


def ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(counts (n_rows,), columns (kept,) int32): row r keeps first[r] to last[r] - 1, or nothing.

    >>> ranges(np.array([0, 1]), np.array([2, 4]))
    (array([2, 3]), array([0, 1, 1, 2, 3], dtype=int32))
    """
    counts = np.maximum(last - first, 0)
    ends = np.cumsum(counts)
    columns = np.arange(ends[-1] if ends.size else 0, dtype=np.int32)
    columns += np.repeat((first - (ends - counts)).astype(np.int32), counts)
    return counts, columns


def band(
    len_q: int,
    len_k: int,
    block_q: int,
    block_k: int,
    left: int | None,
    right: int | None,
    query_offset: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """First block column of each block row that a window shows, and one past the last one.

    A block is kept when any of its pairs is visible: i + offset - left <= j <= i + offset + right for a query
    i and a key j that exist.
    """
    offset = len_k - len_q if query_offset is None else query_offset
    n_rows, n_columns = -(-len_q // block_q), -(-len_k // block_k)
    row = np.arange(n_rows, dtype=np.int64)
    top, bottom = row * block_q + offset, np.minimum(row * block_q + block_q, len_q) - 1 + offset
    low = np.zeros(n_rows, np.int64) if left is None else np.maximum(top - left, 0)
    high = np.full(n_rows, len_k - 1) if right is None else np.minimum(bottom + right, len_k - 1)
    first, last = low // block_k, high // block_k + 1
    return first, np.where(low > high, first, np.minimum(last, n_columns))


def butterfly(n_rows: int, n_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row r keeps column r, and r with one bit flipped, as far as those columns exist."""
    n_bits = max(max(n_rows, n_columns) - 1, 0).bit_length()
    flips = np.concatenate([[0], 1 << np.arange(n_bits)]).astype(np.int64)
    columns = np.sort(np.arange(n_rows)[:, None] ^ flips[None], axis=1)
    kept = columns < n_columns
    return kept.sum(axis=1), columns[kept].astype(np.int32)


def random_columns(n_rows: int, n_columns: int, n_random: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """n_random different columns in every row (all of them where there are fewer), ascending."""
    rng = np.random.default_rng(seed)
    n = min(n_random, n_columns)
    columns = np.empty((n_rows, n), np.int32)
    for row in range(n_rows):
        columns[row] = np.sort(rng.choice(n_columns, n, replace=False, shuffle=False)) if n else 0
    return np.full(n_rows, n), columns.ravel()
