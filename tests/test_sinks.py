"""Sinks that are not finite, and rows that see nothing: the NumPy path, starred kernels in the emulator."""

import numpy as np
import pytest

import cuflash
from cuflash import reference

FORWARD = {"fwd_02_tiled": "float32", "fwd_05_pipeline": "bfloat16", "fwd_10_persistent": "bfloat16"}
BACKWARD = {
    "bwd_02_tiled": "float32",
    "bwd_04_pipeline": "bfloat16",
    "bwd_06_specialize": "bfloat16",
    "bwd_07_cluster": "bfloat16",
}


def rows_that_see_nothing(hiding, dtype, head_dim):
    """q, k, v and options: row 0 of each head sees nothing, sinks are of every kind.  V has a column of 0."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, n, 5, head_dim), dtype=np.float32).astype(dtype) for n in (9, 70, 70)]
    arrays[2][..., 0] = 0
    options = {"sink": np.array([np.inf, np.nan, -np.inf, 1, 1e30], np.float32)}
    if hiding == "mask":
        options["mask"] = np.tri(9, 70, -1, bool)
    return arrays, options | (hiding if isinstance(hiding, dict) else {})


HIDINGS = [{"causal": True, "query_offset": -1}, {"key_lengths": [0]}, "mask"]


@pytest.mark.parametrize("hiding", HIDINGS, ids=str)
@pytest.mark.parametrize("dropout", [None, (0.5, 3)])
@pytest.mark.parametrize("kernel", [None, *FORWARD])
def test_a_row_that_sees_nothing_is_0_whatever_its_sink(hiding, dropout, kernel):
    dtype = FORWARD.get(kernel, "float32")
    (q, k, v), options = rows_that_see_nothing(hiding, dtype, 8)
    options["dropout"] = dropout
    out, lse = cuflash.attention(q, k, v, return_lse=True, kernel=kernel, **options)
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
    out = out.astype(np.float32)
    assert not out[0, 0].any() and np.isnan(out[0, 1:, :2]).all() == (hiding != {"key_lengths": [0]})
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 if dtype == "float32" else 0.05)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


@pytest.mark.parametrize("hiding", HIDINGS, ids=str)
@pytest.mark.parametrize("dropout", [None, (0.5, 3)])
@pytest.mark.parametrize("kernel", [None, *BACKWARD])
def test_a_row_that_sees_nothing_gives_no_gradient_whatever_its_sink(hiding, dropout, kernel):
    dtype = BACKWARD.get(kernel, "float32")
    (q, k, v), options = rows_that_see_nothing(hiding, dtype, 192 if kernel == "bwd_07_cluster" else 8)
    options["dropout"] = dropout
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dout, dlse = np.ones(q.shape, dtype), np.ones(lse.shape, np.float32)
    arrays = (dout, q, k, v, out.astype(dtype), lse.astype(np.float32))
    got = cuflash.attention_backward(*arrays, dlse=dlse, kernel=kernel, **options)
    expected = reference.attention_backward(*arrays, dlse=dlse, **options)
    assert not got.dq[0, 0].any()
    for name in ("dq", "dk", "dv", "dsink"):
        one, other = np.asarray(getattr(got, name), np.float64), getattr(expected, name)
        atol = (1e-5 if dtype == "float32" else 0.02) * np.nanmax(np.abs(other), initial=1)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=name)


def test_what_is_not_finite_in_v_stays_below_a_large_sink():
    """A weight too small for float32 is not a key unseen."""
    q, k, v = (np.ones((1, 3, 1, 8), np.float32) for _ in range(3))
    v[0, 1, 0, 2] = np.nan
    for kernel in (None, "fwd_02_tiled"):
        out = cuflash.attention(q, k, v, causal=True, sink=np.full(1, 1e4, np.float32), kernel=kernel)
        assert np.isnan(out[0, 1:, 0, 2]).all() and not np.delete(out[0, :, 0], 2, axis=1).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kernel", ["bwd_04_pipeline", "bwd_06_specialize", "bwd_07_cluster"])
def test_a_query_that_is_not_finite_has_no_finite_gradient(kernel, dtype, bad):
    """inf - inf is a NaN with a sign on most CPUs and without one on a GPU: kernels may look at the sign."""
    rng = np.random.default_rng(0)
    dim = 192 if kernel == "bwd_07_cluster" else 16
    q, k, v, dout = (rng.standard_normal((1, n, 1, dim)).astype(dtype) for n in (17, 30, 30, 17))
    q[0, 5] = bad
    options = {"causal": True, "query_offset": 10}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    arrays = (dout, q, k, v, out.astype(dtype), lse.astype(np.float32))
    got = cuflash.attention_backward(*arrays, kernel=kernel, **options)
    expected = reference.attention_backward(*arrays, **options)
    np.testing.assert_array_equal(np.isnan(got.dq), np.isnan(expected.dq))
    for name in ("dk", "dv"):  # keys that the query does not see may be NaN, those that it sees must be
        assert np.isnan(getattr(got, name)[np.isnan(getattr(expected, name))]).all(), name
    assert np.isnan(expected.dk).any()


@pytest.mark.parametrize("kernel", [None, *BACKWARD])
def test_an_infinite_slope_hides_keys_and_leaves_them_without_a_gradient(kernel):
    dtype, dim = BACKWARD.get(kernel, "float32"), 192 if kernel == "bwd_07_cluster" else 8
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, n, 2, dim)).astype(dtype) for n in (3, 40, 40, 3))
    options = {"alibi_slopes": np.array([np.inf, 0.5], np.float32)}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    assert np.isnan(out[:, :, 0]).all()  # the key beside the query has 0 times inf
    arrays = (dout, q, k, v, out.astype(dtype), lse.astype(np.float32))
    got = cuflash.attention_backward(*arrays, kernel=kernel, **options)
    expected = reference.attention_backward(*arrays, **options)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(np.isnan(getattr(got, name)), np.isnan(getattr(expected, name)), name)
