"""PanelTile (lib/panels.cuh): TMA in, wgmma with both kinds of descriptor, stmatrix and TMA out."""

import ml_dtypes
import numpy as np
import pytest
from probes import probe

from cuflash import emulator

WHERE = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
DTYPE = ml_dtypes.bfloat16  # what a build without parameters has


def panel_map(array, dim):
    """The map of [batch, head, row, dim] whose box is one panel of 64 rows."""
    columns = next(n for n in (64, 32, 16) if dim % n == 0)
    batch, heads, rows, _ = array.shape
    steps = [n * 2 for n in (dim, rows * dim, heads * rows * dim)]
    return {
        "dtype": "bfloat16",
        "dims": (dim, rows, heads, batch),
        "strides": steps,
        "box": (columns, 64, 1, 1),
        "swizzle": 2 * columns,
    }


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("order", ["early", "late"])
def test_two_products_through_panels(where, dim, order):
    rng = np.random.default_rng(dim)
    x = (rng.standard_normal((1, 3, 64, dim)) / 4).astype(DTYPE)
    rows = 37
    x[0, 2, rows:] = np.nan  # rows past a sequence's end
    out = np.full((1, 1, 64, dim), np.nan, DTYPE)
    maps = [(0, panel_map(x, dim)), (1, panel_map(out, dim))]
    shared = 3 * 64 * dim * 2 + 1024
    with emulator.options(copies=order, products=order):
        _, found = probe(
            where, "probe_panels", f"probe_panels_{dim}", [x.view(np.uint16), out.view(np.uint16)], [rows],
            block=128, shared_mem=shared, maps=maps,
        )  # fmt: skip
    q, k, v = x[0].astype(np.float64)
    v[rows:] = 0
    s = (q @ k.T).astype(np.float32).astype(DTYPE).astype(np.float64)
    expected = s @ v
    error = np.abs(found.view(DTYPE)[0, 0].astype(np.float64) - expected).max()
    assert error < 1e-2 * np.abs(expected).max()
