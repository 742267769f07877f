"""std_00_unfused, fwd_01_naive and fwd_02_tiled on a CPU: results, traffic, dropout, packed sequences."""

import numpy as np
import pytest
from in_emulator import check_case, check_orders

import cuflash
from cuflash import checks, emulator
from cuflash.arrays import numpy_dtype
from cuflash.cases import cases
from cuflash.emulator.module import recording

ROWS = ("std_00_unfused", "fwd_01_naive", "fwd_02_tiled")
QUICK = {case.name: case for case in cases(quick=True)}
ALL = {case.name: case for case in cases()}
# name -> (batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v), dtype, options
TRAFFIC = {
    "grouped": ((2, 70, 93, 4, 2, 64, 64), "float32", {}),
    "causal": ((1, 130, 150, 2, 1, 128, 128), "float16", {"causal": True}),
    "chunks": ((1, 40, 50, 2, 2, 320, 257), "bfloat16", {"out_dtype": "float32"}),
    "few keys": ((1, 93, 70, 2, 2, 40, 200), "float64", {"causal": True, "query_offset": 5}),
}


def draw(shape, dtype, seed=0):
    random = np.random.default_rng(seed)
    batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v = shape
    sizes = [(len_q, heads, head_dim), (len_k, heads_k, head_dim), (len_k, heads_k, head_dim_v)]
    return [random.standard_normal((batch, *size)).astype(numpy_dtype(dtype)) for size in sizes]


def moved(kernel, arrays, **options):
    """Bytes (read, written) by array that one call moves, as counted by the emulator."""
    with recording() as launches:
        cuflash.attention(*arrays, kernel=kernel, return_lse=True, **options)
    total = {}
    for launch in launches:
        for name, (read, written, _) in launch.arrays.items():
            before = total.get(name, (0, 0))
            total[name] = before[0] + read, before[1] + written
    return {name.removeprefix("workspace."): both for name, both in total.items() if any(both)}


def modelled(kernel, arrays, **options):
    traffic = cuflash.explain(*arrays, kernel=kernel, **options).traffic
    return {name: both for name, both in traffic.items() if any(both)}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", QUICK)
def test_quick_cases(row, name):
    for dtype in ("float32", "float16"):
        check_case(row, "forward", QUICK[name], dtype, may_refuse=row != "fwd_02_tiled")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ALL)
def test_all_cases(name, dtype):
    expected = checks.Expected(ALL[name], dtype)
    for row in ROWS:
        check_orders(row, "forward", expected)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_thread_orders_give_the_same_bits(row, seed):
    arrays = draw((1, 70, 93, 2, 1, 64, 64), "float32")
    first = cuflash.attention(*arrays, causal=True, kernel=row)
    with emulator.options(seed=seed):
        again = cuflash.attention(*arrays, causal=True, kernel=row)
    assert np.array_equal(first, again) and np.isfinite(first).all()


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("row", ROWS)
def test_traffic_is_what_the_row_says(row, name):
    shape, dtype, options = TRAFFIC[name]
    arrays = draw(shape, dtype)
    expected = modelled(row, arrays, **options)
    assert expected["k"][0] > 0 and moved(row, arrays, **options) == expected


def test_traffic_with_options():
    random = np.random.default_rng(1)
    arrays = draw((1, 150, 130, 2, 2, 64, 64), "float32")
    for options in (
        {"window": (20, 10)},
        {"bias": random.standard_normal((2, 150, 130)).astype(np.float32), "causal": True},
        {"mask": random.random((150, 130)) < 0.5},
        {"alibi_slopes": np.ones(2, np.float32), "sink": np.ones(2, np.float32)},
    ):
        assert moved("fwd_02_tiled", arrays, **options) == modelled("fwd_02_tiled", arrays, **options)


def test_tiling_saves_traffic():
    """At 512 x 512 the scores alone cost std_00 five passes over len_q x len_k numbers."""
    arrays = draw((1, 512, 512, 1, 1, 64, 64), "float32")
    total = {row: sum(map(sum, modelled(row, arrays).values())) for row in ROWS}
    assert total["std_00_unfused"] > 5 * 512 * 512 * 4 > 2 * total["fwd_02_tiled"]
    assert total["fwd_01_naive"] > 50 * total["fwd_02_tiled"]


@pytest.mark.parametrize("block", [(128, 64), (32, 16), (100, 48), (1, 1)])
def test_hidden_blocks_are_not_read(block):
    """K rows that are read = rows of the key tiles that hold a kept block, per query tile."""
    len_q, len_k, tile_q, tile_kv = 260, 700, 128, 64
    rows, cols = -(-len_q // block[0]), -(-len_k // block[1])
    kept = np.zeros((rows, cols), bool)
    kept[:, :: max(1, 128 // block[1])] = (
        np.arange(rows)[:, None] * block[0] < tile_q
    )  # only the first query tile
    kept[-1, -1] = True
    mask = cuflash.BlockMask.from_dense(kept, *block)
    arrays = draw((1, len_q, len_k, 1, 1, 64, 64), "float32")
    elements = np.repeat(np.repeat(kept, block[0], 0), block[1], 1)[:len_q, :len_k]
    expected = 0
    for i0 in range(0, len_q, tile_q):
        for j0 in range(0, len_k, tile_kv):
            expected += elements[i0 : i0 + tile_q, j0 : j0 + tile_kv].any() * min(tile_kv, len_k - j0)
    found = moved("fwd_02_tiled", arrays, block_mask=mask)
    assert cuflash.explain(*arrays, kernel="fwd_02_tiled").tile.tile_q == tile_q
    assert found["k"] == (expected * 64 * 4, 0)
    out = cuflash.attention(*arrays, block_mask=mask, kernel="fwd_02_tiled")
    np.testing.assert_allclose(out, cuflash.reference.attention(*arrays, mask=elements), atol=2e-6)


def test_packed_sequences_of_every_length():
    """Empty, single-row, exact and ragged sequences; rows past the last one are zero."""
    lengths_q = [0, 1, 128, 5, 0, 129, 64, 1]
    lengths_k = [3, 0, 64, 70, 0, 1, 130, 65]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]) for n in (lengths_q, lengths_k))
    q, k, v = (array[0] for array in draw((1, cu_q[-1] + 7, cu_k[-1] + 3, 2, 1, 32, 32), "float32"))
    q[cu_q[-1] :], k[cu_k[-1] :], v[cu_k[-1] :] = np.nan, np.nan, np.nan
    options = {"causal": True, "kernel": "fwd_02_tiled", "return_lse": True}
    out, lse = cuflash.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    assert not out[cu_q[-1] :].any() and np.isneginf(lse[:, cu_q[-1] :]).all()
    for b in range(len(lengths_q)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = cuflash.attention(q[None, rows], k[None, keys], v[None, keys], **options)
        assert np.array_equal(out[rows], alone[0][0]) and np.array_equal(lse[:, rows], alone[1][0])
