"""Work falls in proportion to the blocks a BlockMask keeps: counted, on the NumPy path and in the emulator.

By time: `cuflash bench blocks`.
"""

import math

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask, reference, tiled_visible

BLOCK, LENGTH, DIM = 128, 1024, 64
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)


def masked(share):
    """(BlockMask, how many of its 64 blocks are kept: exactly that share)."""
    n = LENGTH // BLOCK
    kept = np.zeros(n * n, bool)
    kept[np.random.default_rng(3).permutation(n * n)[: int(share * n * n)]] = True
    return cuflash.BlockMask.from_dense(kept.reshape(n, n), BLOCK, BLOCK), int(kept.sum())


def draw():
    return np.random.default_rng(0).standard_normal((4, 1, LENGTH, 1, DIM), np.float32)


@pytest.mark.parametrize("share", SHARES)
def test_pairs_of_the_numpy_path(share, monkeypatch):
    """Every pair of a kept block is computed once in each direction, and no other pair."""
    mask, n_kept = masked(share)
    pairs = dict.fromkeys(("key_tiles", "query_tiles"), 0)

    def counting(name, find):
        def found(self, *where):
            steps = find(self, *where)
            pairs[name] += sum(math.prod(tile.shape) for _, _, tiles in steps for tile in tiles)
            return steps

        return found

    for name in pairs:
        find = getattr(tiled_visible.Visible, name)
        monkeypatch.setattr(tiled_visible.Visible, name, counting(name, find))
    q, k, v, dout = draw()
    out, vjp = cuflash.attention_vjp(q, k, v, block_mask=mask)
    assert pairs == {"key_tiles": n_kept * BLOCK**2, "query_tiles": 0}
    vjp(dout)
    assert pairs["query_tiles"] == n_kept * BLOCK**2
    assert out.any() == bool(n_kept)


@pytest.mark.parametrize("share", SHARES)
def test_tiles_of_the_kernels(share):
    """What a kernel reads again for each tile, and its exponentials, in the emulator."""
    mask, n_kept = masked(share)
    q, k, v, dout = draw()
    row_bytes = DIM * 4

    forward = cuflash.trace(q, k, v, block_mask=mask)
    tile = cuflash.explain(q, k, v, block_mask=mask, kernel="fwd_02_tiled").tile
    assert BLOCK % tile.tile_q == 0 and BLOCK % tile.tile_kv == 0
    rows = n_kept * (BLOCK // tile.tile_q) * BLOCK
    assert forward.arrays["k"][0] == forward.arrays["v"][0] == rows * row_bytes
    pairs = n_kept * BLOCK**2
    assert pairs <= forward.exps <= 1.25 * pairs  # one a thread and tile more, for the maximum that moves

    backward = cuflash.trace(q, k, v, dout=dout, block_mask=mask)
    tile = cuflash.explain(q, k, v, block_mask=mask, kernel="bwd_02_tiled", backward=True).tile
    assert BLOCK % tile.tile_q == 0 and BLOCK % tile.tile_kv == 0
    assert backward.arrays["q"][0] == n_kept * (BLOCK // tile.tile_kv) * BLOCK * row_bytes
    assert backward.exps == pairs


@pytest.mark.parametrize(
    ("block", "density", "options"),
    [
        ((64, 64), 0.5, {}),
        ((64, 64), 0.05, {"window": (300, 200)}),
        ((96, 128), 0.3, {"causal": True, "query_offset": 700}),
        ((16, 48), 0.3, {"causal": True, "query_offset": 700}),
        ((256, 512), 0.5, {"window": (300, 200)}),
        ((1, 700), 0.5, {"dropout": (0.2, 7)}),
    ],
    ids=str,
)
def test_scattered_blocks(block, density, options):
    """Runs of kept blocks side by side in a tile, wide gaps, ragged ends; positions cut blocks."""
    rng = np.random.default_rng(0)
    len_q, len_k = 700, 1500
    q, dout = (rng.standard_normal((1, len_q, 2, 8)) for _ in range(2))
    k, v = (rng.standard_normal((1, len_k, 1, 8)) for _ in range(2))
    dense = rng.random((1, 2, -(-len_q // block[0]), -(-len_k // block[1]))) < density
    options = {
        "block_mask": BlockMask.from_dense(dense, *block),
        "bias": rng.standard_normal((1, 2, len_q, len_k)),
        "alibi_slopes": np.array([0.01, 0.02]),
        **options,
    }
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    expected = reference.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-13, atol=1e-14)
    arrays = (dout, q, k, v, *expected)
    grads = cuflash.attention_backward(*arrays, **options, dlse=lse)
    expected = reference.attention_backward(*arrays, **options, dlse=lse)
    for name, value in expected._asdict().items():
        if value is not None:
            np.testing.assert_allclose(getattr(grads, name), value, rtol=1e-11, atol=1e-11, err_msg=name)
