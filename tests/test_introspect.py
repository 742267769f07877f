"""attention_weights, key_importance and row_stats against P written out in full."""

import numpy as np
import problems
import pytest
from hypothesis import given

import cuflash
from cuflash import introspect, reference


def whole_softmax(call):
    """P (batch, heads, len_q, len_k) and lse of a call in float64, by feeding unit vectors as values.

    head_dim_v = len_k and v = identity make out the weights themselves, by the forward of the specification.
    """
    swapped = call.options.get("layout") == "bhsd"
    options = {name: value for name, value in call.options.items() if name not in ("dropout", "out_dtype")}
    batch = call.k.shape[0] if call.k.ndim == 4 else 1
    len_k, heads_k = call.k.shape[-3:-1][:: -1 if swapped else 1]
    eye = np.eye(len_k, max(len_k, 1))
    v = np.broadcast_to(eye[None, :, None, :], (batch, len_k, heads_k, max(len_k, 1)))
    v = v.transpose(0, 2, 1, 3) if swapped else v if call.k.ndim == 4 else v[0]
    out, lse = reference.attention(call.q, call.k, v.astype(call.q.dtype), return_lse=True, **options)
    P = out if swapped else out.swapaxes(-2, -3)
    return P[..., :len_k], lse


@given(problems.calls(max_length=33, max_scores=3000, extreme=False))
def test_against_the_whole_softmax(call):
    P, lse = whole_softmax(call)
    tolerance = dict(atol=1e-12) if call.build.dtype == "float64" else dict(atol=2e-4)
    weights = cuflash.attention_weights(call.q, call.k, **call.options)
    assert weights.shape == P.shape
    assert weights.dtype == ("float64" if call.build.dtype == "float64" else "float32")
    np.testing.assert_allclose(weights, P, **tolerance)
    importance = cuflash.key_importance(call.q, call.k, **call.options)
    np.testing.assert_allclose(importance, P.sum(axis=-2), atol=40 * tolerance["atol"])

    entropy, max_score = cuflash.row_stats(call.q, call.k, **call.options)
    assert entropy.shape == max_score.shape == lse.shape
    P_sink = np.zeros(lse.shape)
    if "sink" in call.options:
        sink = call.options["sink"][:, None].astype("float64")
        P_sink = np.where(np.isneginf(lse), 0, np.exp(sink - np.where(np.isneginf(lse), 0, lse)))
    everything = np.concatenate([P, P_sink[..., None]], axis=-1)
    expected = -np.sum(everything * np.log(np.where(everything == 0, 1, everything)), axis=-1)
    np.testing.assert_allclose(entropy, expected, atol=30 * tolerance["atol"])
    largest = everything.max(axis=-1)  # the largest score is the one with the largest weight: lse + log P
    expected = np.where(largest == 0, -np.inf, lse + np.log(np.where(largest == 0, 1, largest)))
    np.testing.assert_allclose(max_score, expected, atol=30 * tolerance["atol"], rtol=1e-5)


def test_rows_and_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 9, 4, 5)), rng.standard_normal((2, 11, 2, 5))
    whole = cuflash.attention_weights(q, k, causal=True)
    importance, stats = cuflash.key_importance(q, k, causal=True), cuflash.row_stats(q, k, causal=True)
    monkeypatch.setattr(reference, "MAX_BLOCK", {"numpy": 25})
    picked = cuflash.attention_weights(q, k, causal=True, rows=[3, 0, -1])
    np.testing.assert_allclose(picked, whole[:, :, [3, 0, 8]], atol=1e-15)
    by_head = rng.integers(0, 9, (2, 4, 3))
    picked = cuflash.attention_weights(q, k, causal=True, rows=by_head)
    np.testing.assert_allclose(picked, np.take_along_axis(whole, by_head[..., None], 2), atol=1e-15)
    np.testing.assert_allclose(cuflash.key_importance(q, k, causal=True), importance, rtol=1e-14)
    for got, expected in zip(cuflash.row_stats(q, k, causal=True), stats, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-14)
    assert cuflash.attention_weights(q, k, rows=[]).shape == (2, 4, 0, 11)


def test_what_the_numbers_mean():
    q, k = np.zeros((1, 3, 1, 2)), np.ones((1, 8, 1, 2))
    entropy, max_score = cuflash.row_stats(q, k)  # every key alike
    np.testing.assert_allclose(entropy, np.log(8), rtol=1e-15)
    assert (max_score == 0).all()
    np.testing.assert_allclose(cuflash.key_importance(q, k), 3 / 8)
    entropy, max_score = cuflash.row_stats(q, k, causal=True, query_offset=-1)
    assert entropy[0, 0, :2].tolist() == [0, 0] and max_score[0, 0, 0] == -np.inf  # nothing, then one key
    assert cuflash.key_importance(q, k, causal=True, query_offset=-1).sum() == 2  # rows that see something
    weights = cuflash.attention_weights(q, k, sink=np.array([0.0]))
    np.testing.assert_allclose(weights, 1 / 9)
    assert introspect.RowStats._fields == ("entropy", "max_score")


def test_memory_stays_small():
    import tracemalloc

    peaks = []
    for length in (2048, 8192):
        q = np.zeros((1, length, 1, 4), np.float32)
        tracemalloc.start()
        cuflash.key_importance(q, q)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]  # a few blocks of scores, whatever the length
    assert peaks[1] < 8192 * 8192 / 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([9], "rows reach from 9 to 9"),
        ([-10], "-10"),
        ([0.5], "float64"),
        (np.zeros((3, 1, 2), int), "(3, 1, 2)"),
        (7, "whole numbers"),
        ({}, "whole numbers"),
        ([[0, 1]] * 2, "(2, 2)"),
    ],
)
def test_bad_rows(rows, said):
    q = np.zeros((2, 9, 4, 5))
    with pytest.raises(cuflash.CuflashError, match=r"^attention_weights: ") as error:
        cuflash.attention_weights(q, q, rows=rows)
    assert said in str(error.value).lower() or said in str(error.value)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint64"])
def test_rows_of_any_whole_dtype(dtype):
    q = np.random.default_rng(0).standard_normal((1, 300, 1, 4))
    rows = np.array([0, 7, 127] if dtype[0] == "u" else [0, -1, 127]).astype(dtype)
    expected = cuflash.attention_weights(q, q, rows=rows.astype(int))
    np.testing.assert_array_equal(cuflash.attention_weights(q, q, rows=rows), expected)


@pytest.mark.parametrize("function", ["attention_weights", "key_importance", "row_stats"])
def test_bad_input_names_the_function(function):
    with pytest.raises(cuflash.CuflashError, match=f"^{function}: "):
        getattr(cuflash, function)(np.zeros((1, 2, 3, 4)), np.zeros((1, 2, 2, 4)))


@pytest.mark.parametrize("function", ["attention_weights", "key_importance", "row_stats"])
def test_no_option_is_taken_and_then_forgotten(function):
    """A target that is not written, or a result that is not returned, would be."""
    q = np.zeros((1, 2, 3, 4), np.float32)
    for name, value in dict(out=q.copy(), return_lse=True, grads=None, deterministic=True).items():
        with pytest.raises(cuflash.CuflashError, match=f"^{function}: there is no option {name}= here"):
            getattr(cuflash, function)(q, q, **{name: value})


@pytest.mark.gpu
def test_the_same_numbers_on_the_gpu():
    import cupy

    for call in problems.list_of_calls(20, seed=3, max_length=65, extreme=False):
        there = call.on_device()
        for function in (cuflash.attention_weights, cuflash.key_importance):
            got = function(there.q, there.k, **there.options)
            assert isinstance(got, cupy.ndarray)
            np.testing.assert_allclose(got.get(), function(call.q, call.k, **call.options), atol=2e-3)
