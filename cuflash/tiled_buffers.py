"""One thread's memory in the tiled algorithm: tiles are loaded, made and masked in arrays that stay.

A new array of a megabyte costs page faults that take as long as the arithmetic on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FEW = 64  # rows whose product with a transposed copy takes as long as the copy and the gain together
GAP = 16  # numbers between rows: were they a power of two apart, they would share few places in the cache


class Buffers:
    """One thread's memory: named arrays, made once, handed out in the shape that a tile needs."""

    def __init__(self, dtype: str):
        self.dtype = np.dtype(dtype)
        self._flat: dict[str, np.ndarray] = {}

    def empty(self, name: str, rows: int, columns: int) -> np.ndarray:
        """(rows, columns), C-contiguous, with any content."""
        flat = self._flat.get(name)
        if flat is None or flat.size < rows * columns:
            flat = self._flat[name] = np.empty(rows * columns, self.dtype)
        return flat[: rows * columns].reshape(rows, columns)

    def like(self, name: str, array: np.ndarray) -> np.ndarray:
        return self.empty(name, *array.shape)

    def zeros(self, name: str, rows: int, columns: int) -> np.ndarray:
        """(rows, columns) of 0."""
        array = self.empty(name, rows, columns)
        array[...] = 0
        return array

    def load(self, name: str, x: np.ndarray, *columns: Any, factor: float = 1.0) -> np.ndarray:
        """[factor x, columns], (n, dim + len(columns)), of x (n, dim): in the accumulation dtype."""
        n, dim = x.shape
        tile = self.empty(name, n, dim + len(columns))
        if factor == 1:
            np.copyto(tile[:, :dim], x, casting="unsafe")
        else:
            # in float64, as the factor, rounded, would shift all that it multiplies the same way
            np.multiply(x, factor, out=tile[:, :dim], dtype=np.float64, casting="unsafe")
        for number, column in enumerate(columns, dim):
            tile[:, number] = column
        return tile

    def turned(self, name: str, tile: np.ndarray, n_uses: int) -> np.ndarray:
        """tile^T, for products with n_uses rows altogether: a copy, where that many are worth it."""
        if n_uses < FEW:
            return tile.T
        n, dim = tile.shape
        turned = self.empty(name, dim, n + GAP)[:, :n]
        np.copyto(turned, tile.T)
        return turned

    def keep_only(self, tile: np.ndarray, kept: np.ndarray, value: float) -> None:
        """Write value into tile wherever kept (boolean, it broadcasts) is False; exact for NaN too.

        For masks without a pattern this is 9 times as fast as np.copyto(..., where=...): bit by bit,
        tile = tile & m | value & ~m, with m all ones where kept.
        """
        whole = np.dtype(f"i{self.dtype.itemsize}")
        bits, m = tile.view(whole), self.empty("mask", *tile.shape).view(whole)
        np.copyto(m, kept)
        np.negative(m, out=m)
        bits &= m
        if value != 0:
            np.invert(m, out=m)
            m &= self.dtype.type(value).view(whole)
            bits |= m
