"""fwd_06_wgmma to fwd_09_overlap: results and traffic on a CPU, registers without a GPU."""

import numpy as np
import pytest
from in_emulator import check_case, check_orders
from test_forward_kernels import draw, modelled, moved

import cuflash
from cuflash import CuflashError, build, checks, emulator
from cuflash.cases import cases
from cuflash.copies import BY_TMA

ROWS = ("fwd_06_wgmma", "fwd_07_tma", "fwd_08_specialize", "fwd_09_overlap")
MAPPED = ROWS[1:]
QUICK = {case.name: case for case in cases(quick=True)}
ALL = {case.name: case for case in cases()}
# (batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v), options
TRAFFIC = {
    "grouped": ((2, 70, 300, 4, 2, 64, 64), {}),
    "causal": ((1, 290, 330, 2, 1, 128, 128), {"causal": True}),
    "few keys": ((1, 193, 170, 2, 2, 40, 104), {"causal": True, "query_offset": 5, "out_dtype": "float32"}),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", QUICK)
def test_quick_cases(row, name):
    for dtype in ("float16", "bfloat16") if name in ("plain", "causal") else ("bfloat16",):
        check_case(row, "forward", QUICK[name], dtype, may_refuse=True)


def test_the_core_is_not_refused():
    names = [name for name in QUICK if name in ("plain", "ragged grouped heads", "causal", "causal few keys")]
    assert len(names) == 4
    for row in ROWS:
        for name in (*names, "head_dim 128", "no keys", "large scores"):
            check_case(row, "forward", QUICK[name], "float16")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_all_cases(name, dtype):
    expected = checks.Expected(ALL[name], dtype)
    for row in ROWS:
        check_orders(row, "forward", expected, n_orders=4)


@pytest.mark.parametrize("shape", [(1, 150, 300, 2, 1, 64, 64), (1, 260, 140, 1, 1, 128, 128)])
def test_the_same_bits_in_every_order(shape):
    """With one tile the rungs up to 08 do the same arithmetic: who copies and who waits must not show."""
    arrays = draw(shape, "bfloat16")
    options = {"causal": True, "query_offset": 200, "out_dtype": "float32"}
    same = {}
    for row in ROWS:
        first = cuflash.attention(*arrays, kernel=row, **options)
        assert np.isfinite(first).all()
        tile = cuflash.explain(*arrays, kernel=row).tile
        if row != "fwd_09_overlap":  # another maximum, other bits
            assert np.array_equal(first, same.setdefault((tile.tile_q, tile.tile_kv), first)), row
        for seed in range(4):  # copies and products early and late
            with emulator.options(seed=seed):
                again = cuflash.attention(*arrays, kernel=row, **options)
            assert np.array_equal(first, again), (row, seed)
    assert shape[5] == 64 or len(same) == 1


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("row", ROWS)
def test_traffic_is_what_the_row_says(row, name):
    shape, options = TRAFFIC[name]
    arrays = draw(shape, "bfloat16")
    expected = modelled(row, arrays, **options)
    assert expected["k"][0] > 0 and moved(row, arrays, **options) == expected


def test_odd_strides_are_read_in_place_without_tma():
    wide = [np.zeros((*x.shape[:-1], 41), x.dtype) for x in draw((1, 70, 90, 2, 1, 40, 40), "float16")]
    wide = [x + np.random.default_rng(n).standard_normal(x.shape).astype(x.dtype) for n, x in enumerate(wide)]
    views = [x[..., 1:] for x in wide]
    assert cuflash.explain(*views, kernel="fwd_06_wgmma").copies == ()
    found = cuflash.attention(*views, kernel="fwd_06_wgmma", causal=True)
    whole = list(map(np.ascontiguousarray, views))
    assert np.array_equal(found, cuflash.attention(*whole, kernel="fwd_06_wgmma", causal=True))
    for row in MAPPED:
        with pytest.raises(CuflashError, match=f"{row} {BY_TMA}q its address is no multiple of"):
            cuflash.attention(*views, kernel=row)


@pytest.mark.parametrize("row", MAPPED)
def test_strides_that_tma_addresses(row):
    """Heads before rows, rows of a wider array, a broadcast batch: no copies, the same bits."""
    q, k, v = draw((2, 150, 200, 2, 2, 64, 64), "float16")
    wide = np.stack([k, v], 2)
    views = q.swapaxes(1, 2).copy().swapaxes(1, 2), wide[:, :, 0], np.broadcast_to(v[:1], v.shape)
    assert cuflash.explain(*views, kernel=row).copies == ()
    found = cuflash.attention(*views, kernel=row, causal=True)
    whole = list(map(np.ascontiguousarray, views))
    assert np.array_equal(found, cuflash.attention(*whole, kernel=row, causal=True))


@pytest.mark.parametrize("row", MAPPED)
def test_nothing_beyond_the_arrays_is_touched(row):
    """NaN all around: in the rest of a wider head_dim, between rows, before and after."""
    arrays = []
    for x in draw((2, 130, 150, 2, 1, 40, 40), "float16"):
        around = np.full((x.shape[0] + 2, x.shape[1] + 2, x.shape[2] + 2, 64), np.nan, x.dtype)
        view = around[1:-1, 1:-1, 1:-1, 8:48]
        view[...] = x
        arrays.append((x, view))
    found = cuflash.attention(*(view for _, view in arrays), kernel=row, causal=True)
    assert np.array_equal(found, cuflash.attention(*(x for x, _ in arrays), kernel=row, causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row", ROWS)
def test_compiled_without_spills_and_without_serialised_products(row, head_dim, causal):
    for dtype in ("float16", "bfloat16"):
        q = cuflash.spec((1, 4096, 16, head_dim), dtype)
        found = cuflash.explain(q, q, q, causal=causal, device="sm_90a", kernel=row)
        assert found.spills == 0
        assert build.compile(found.main.job).warnings == ()
        assert found.blocks_per_sm >= 1


def test_they_run_on_hopper_alone():
    q = cuflash.spec((1, 256, 4, 64), "float16")
    for row in ROWS:
        with pytest.raises(CuflashError, match="needs sm_90a, and no other, this device is sm_100"):
            cuflash.explain(q, q, q, device="sm_100", kernel=row)
