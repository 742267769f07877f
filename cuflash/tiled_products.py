"""Products of the tiled algorithm, asked of BLAS in the way that it does best.

A BLAS first copies its factors into an order of its own ("packing").  That pays for large products; those of
attention have one side of head_dim, and use what was copied a few times only.  OpenBLAS has a second kernel
for small products, on CPUs with AVX-512, which reads them where they lie.  There a product is asked for as
many small ones, some rows at a time.  The arithmetic is the same.

Tried (float32, one core of an AMD EPYC at 3.65 GHz, 117 GFLOP/s at best, November 2026; GFLOP/s):
- Q K^T of 384 x 960 x 64: whole 100, by 12 rows 112; P V of 384 x 64 x 960: 98 and 116; P^T dO: 98 and 115
- odd numbers of rows: 45 to 100; where the left factor is transposed, 4: 66-89, 8: 99-107, 16: 102-108
- with K^T as a view of K (the kernel refuses that order): 68 to 92, so K is stored transposed
"""

from __future__ import annotations

import functools
import math

import numpy as np

from cuflash.tiled_workers import blas

SMALL = 100**3  # n k m of a product that OpenBLAS calls small
WITH_SMALL_KERNEL = ("SkylakeX", "Cooperlake", "SapphireRapids")


@functools.cache
def has_small_kernel() -> bool:
    """Does NumPy's BLAS multiply small matrices where they lie?"""
    found = [(x.internal_api, getattr(x, "architecture", None)) for x in blas().lib_controllers]
    return bool(found) and all(api == "openblas" and cpu in WITH_SMALL_KERNEL for api, cpu in found)


def multiply(A: np.ndarray, B: np.ndarray, out: np.ndarray) -> np.ndarray:
    """A (n, k) @ B (k, m), written to out (n, m).

    Rows of B and out, and rows or columns of A, are to lie in memory without gaps between their numbers.
    """
    n, k = A.shape
    rows = small_rows(n, k * B.shape[1], least=4 if A.strides[1] == A.itemsize else 12)
    if rows == n:
        return np.matmul(A, B, out=out)
    end = n - n % rows
    np.matmul(A[:end].reshape(-1, rows, k), B, out=out[:end].reshape(-1, rows, B.shape[1]))
    if end < n:
        np.matmul(A[end:], B, out=out[end:])
    return out


def small_rows(n: int, flop: int, least: int = 4) -> int:
    """In how many rows at a time n rows are multiplied, each of which takes so many multiplications.

    least: so few at a time are worth it.
    """
    most = SMALL // flop // 4 * 4 if flop else n
    if not least <= most < n or not has_small_kernel():
        return n
    step = 12 if 12 <= most < 48 else 4
    most -= most % step
    even = math.ceil(n / math.ceil(n / most))
    return math.ceil(even / step) * step


def largest_norm(x: np.ndarray) -> float:
    """Length of the longest row of x (n, dim)."""
    return math.sqrt(np.vecdot(x, x).max())


def product(weights: np.ndarray, x: np.ndarray, pairs: np.ndarray | None, out: np.ndarray) -> np.ndarray:
    """weights (n, m) @ x (m, dim), written to out, over visible pairs: nothing is taken from a hidden NaN.

    pairs (n, m): True where visible; None when all is finite, and the 0 of a hidden pair is enough.
    """
    if pairs is None:
        return multiply(weights, x, out)
    is_finite = np.isfinite(x).all(axis=1)
    multiply(weights, np.where(is_finite[:, None], x, 0), out)
    for row in np.flatnonzero(~is_finite):
        out += np.where(pairs[:, row, None], weights[:, row, None] * x[row], 0)
    return out
