"""One thread's memory in the tiled algorithm: tiles are loaded, made and masked in arrays that stay.

A new array of a megabyte costs page faults that take as long as the arithmetic on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


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

    def by_key(self, name: str, rows: int, columns: int) -> np.ndarray:
        """(rows, columns) that lies in memory column by column: what the backward keeps a tile of S in."""
        return self.empty(name, columns, rows).T

    def like(self, name: str, tile: np.ndarray) -> np.ndarray:
        """An array with the shape of tile and its order in memory."""
        return self.empty(name, *tile.shape) if tile.flags.c_contiguous else self.by_key(name, *tile.shape)

    def zeros(self, name: str, rows: int, columns: int) -> np.ndarray:
        """(rows, columns) of 0."""
        array = self.empty(name, rows, columns)
        array[...] = 0
        return array

    def load(self, name: str, x: np.ndarray) -> np.ndarray:
        """x (n, dim) in the accumulation dtype."""
        tile = self.empty(name, *x.shape)
        np.copyto(tile, x, casting="unsafe")
        return tile

    def load_with(self, name: str, x: np.ndarray, *columns: Any, factor: float = 1.0) -> np.ndarray:
        """[factor x, columns], (n, dim + 1 or 2), of x (n, dim): in the accumulation dtype, and wider."""
        n, dim = x.shape
        tile = self.empty(name, n, dim + len(columns))
        np.copyto(tile[:, :dim], x, casting="unsafe")
        if factor != 1:
            tile[:, :dim] *= self.dtype.type(factor)
        for number, column in enumerate(columns, dim):
            tile[:, number] = column
        return tile

    def keep_only(self, tile: np.ndarray, kept: np.ndarray, value: float) -> None:
        """Write value into tile wherever kept (boolean, it broadcasts) is False; exact for NaN too.

        For masks without a pattern this is 9 times as fast as np.copyto(..., where=...): bit by bit,
        tile = tile & m | value & ~m, with m all ones where kept.
        """
        whole = np.dtype(f"i{self.dtype.itemsize}")
        bits, m = tile.view(whole), self.like("mask", tile).view(whole)
        np.copyto(m, kept)
        np.negative(m, out=m)
        bits &= m
        if value != 0:
            np.invert(m, out=m)
            m &= self.dtype.type(value).view(whole)
            bits |= m
