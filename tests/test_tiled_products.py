"""Products in pieces are products, whatever BLAS does with them."""

import numpy as np
import pytest

from cuflash import tiled_products
from cuflash.tiled_buffers import Buffers


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("small", [10, 400, 10**6])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (7, 3, 5), (24, 1, 7), (100, 8, 4), (61, 3, 11), (0, 3, 4), (9, 0, 4)]
)
def test_products_in_pieces_are_products(shape, small, dtype, monkeypatch):
    """Whatever the number of rows at a time; of views, as tiles have them; nothing else is written."""
    monkeypatch.setattr(tiled_products, "has_small_kernel", lambda: True)
    monkeypatch.setattr(tiled_products, "SMALL", small)
    n, k, m = shape
    rng = np.random.default_rng(0)
    A, B = rng.integers(-9, 9, (n, k)).astype(dtype), rng.integers(-9, 9, (k, m)).astype(dtype)
    wide_A, wide_B = np.pad(A, ((0, 0), (0, 2))), np.pad(B, ((0, 0), (1, 3)))
    for left in (A, np.asfortranarray(A), wide_A[:, :k]):
        for right in (B, wide_B[:, 1 : 1 + m]):
            target = np.full((n, m + 4), np.nan, dtype)
            got = tiled_products.multiply(left, right, out=target[:, 2 : 2 + m])
            np.testing.assert_array_equal(target[:, 2 : 2 + m], A @ B)
            assert np.isnan(target[:, :2]).all() and np.isnan(target[:, 2 + m :]).all()
            assert np.shares_memory(got, target) or not got.size


def test_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(tiled_products, "has_small_kernel", lambda: True)
    for n in (1, 5, 128, 256, 2048):
        for flop in (0, 1, 64, 65 * 240, 65 * 1024, 66 * 2048, 10**6):
            rows = tiled_products.small_rows(n, flop)
            assert rows == n or (rows % 4 == 0 and rows < n and rows * flop <= tiled_products.SMALL)
    assert tiled_products.small_rows(2048, 10**6 // 9, least=12) == 2048
    assert tiled_products.small_rows(2048, 10**6 // 9) == 8
    monkeypatch.setattr(tiled_products, "has_small_kernel", lambda: False)
    assert tiled_products.small_rows(2048, 64 * 256) == 2048


def test_q_is_scaled_with_one_rounding():
    """A factor rounded first would shift all scores the same way."""
    x = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    loaded = Buffers("float32").load("Q", x, 1, factor=0.3)
    np.testing.assert_array_equal(loaded[:, :3], (x.astype(np.float64) * 0.3).astype(np.float32))
    assert (loaded[:, 3] == 1).all()
