"""The node tests of ONNX for its operator Attention, as onnx 1.23.2 generates them, through compat."""

import warnings

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.backend.test.case.node import collect_testcases
from onnx.helper import get_attribute_value

import cuflash
from cuflash.compat import onnx_attention

VERSION, N_CASES = "1.23.2", 93


def collect():
    """name -> TestCase; expected outputs come from the generators of onnx, which pip installs with it.

    Left out are the same cases with the operator expanded into smaller ones: they say nothing more.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases("Attention")
    return {case.name: case for case in cases if len(case.model.graph.node) == 1}


CASES = collect()


def run(case):
    """[(output name, expected, got)] of a case."""
    (node,) = case.model.graph.node
    ((inputs, expected),) = case.data_sets
    given = iter(inputs)
    arrays = [next(given) if name else None for name in node.input]
    attributes = {a.name: get_attribute_value(a) for a in node.attribute}
    n_outputs = len(node.output)
    found = onnx_attention(*arrays, n_outputs=n_outputs, **attributes)
    found = [found] if n_outputs == 1 else found
    there = [(name, array) for name, array in zip(node.output, found, strict=True) if name]
    return [(name, want, got) for (name, got), want in zip(there, expected, strict=True)]


def test_every_case_of_the_pinned_version_is_here():
    if onnx.__version__ != VERSION:
        pytest.skip(f"onnx is {onnx.__version__}; the number of cases is known of {VERSION}")
    assert len(CASES) == N_CASES


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]
    compared = run(case)
    assert compared[0][0] == "Y"
    for output, want, got in compared:
        assert type(got) is np.ndarray and got.dtype == want.dtype and got.shape == want.shape, output
        # the tolerance of onnx; 16-bit expectations were rounded after each step, by up to some units
        eps = float(ml_dtypes.finfo(want.dtype).eps)
        rtol = max(case.rtol, 4 * eps) if want.dtype.itemsize == 2 else case.rtol
        atol = max(case.atol, eps) if want.dtype.itemsize == 2 else max(case.atol, 1e-6)
        wide = [x.astype(np.float64) for x in (got, want)]
        np.testing.assert_allclose(*wide, rtol=rtol, atol=atol, err_msg=output)


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_softcap_comes_before_the_mask():
    """onnx pull request 7867: a mask of -inf stays hidden under a softcap."""
    Q, K, V = draw(1, 2, 4, 8), draw(1, 2, 6, 8, seed=1), draw(1, 2, 6, 8, seed=2)
    mask = np.where(np.arange(6) < 4, 0, -np.inf).astype(np.float32)
    Y = onnx_attention(Q, K, V, mask, softcap=0.5)
    expected = onnx_attention(Q, K[:, :, :4], V[:, :, :4], softcap=0.5)
    np.testing.assert_allclose(Y, expected, rtol=1e-5, atol=1e-6)


def test_outputs_are_made_when_asked_for():
    Q, K, V = draw(2, 4, 3, 8), draw(2, 2, 5, 8, seed=1), draw(2, 2, 5, 6, seed=2)
    assert onnx_attention(Q, K, V).shape == (2, 4, 3, 6)
    Y, key = onnx_attention(Q, K, V, n_outputs=2)
    assert key is K and Y.shape == (2, 4, 3, 6)
    *_, scores = onnx_attention(Q, K, V, n_outputs=4, scale=1.0)
    expected = np.einsum("bhid,bhjd->bhij", Q, np.repeat(K, 2, axis=1))
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    *_, P = onnx_attention(Q, K, V, n_outputs=4, qk_matmul_output_mode=3, is_causal=1)
    assert np.allclose(P.sum(-1), 1) and not np.triu(P[0, 0], 1).any()


def test_double_precision_of_the_softmax():
    Q, K, V = draw(1, 1, 3, 8), draw(1, 1, 5, 8, seed=1), draw(1, 1, 5, 8, seed=2)
    Y = onnx_attention(Q, K, V, softmax_precision=11)
    exact = cuflash.reference.attention(Q, K, V, layout="bhsd")
    assert Y.dtype == np.float32 and np.array_equal(Y, exact.astype(np.float32))


def test_integer_masks_are_added_and_shorter_ones_hide():
    Q, K, V = draw(1, 1, 3, 8), draw(1, 1, 5, 8, seed=1), draw(1, 1, 5, 8, seed=2)
    mask = np.array([[0, -2, 3]] * 3)
    expected = onnx_attention(Q, K[:, :, :3], V[:, :, :3], mask.astype(np.float32))
    np.testing.assert_allclose(onnx_attention(Q, K, V, mask), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"past_key": 0}, "one of past_key and past_value is None"),
        ({"past_key": 0, "past_value": 0, "nonpad_kv_seqlen": [1]}, "nonpad_kv_seqlen with past_key"),
        ({"qk_matmul_output_mode": 4}, "qk_matmul_output_mode is 4"),
        ({"softmax_precision": 7}, "softmax_precision is 7"),
        ({"n_outputs": 5}, "n_outputs is 5"),
        ({"q_num_heads": 2}, "Leave q_num_heads out"),
        ({"left_window_size": -2}, "window"),
        ({"attn_mask": "no"}, "attn_mask has the type str"),
        (
            dict.fromkeys(("past_key", "past_value"), draw(1, 1, 3, 8)),
            r"past_key is \(1, 1, 3, 8\) float32, K",
        ),
        (dict.fromkeys(("past_key", "past_value"), draw(2, 3, 8)), r"past_key is \(2, 3, 8\)"),
        (
            {"past_key": draw(1, 2, 3, 8), "past_value": draw(1, 2, 3, 8, dtype=np.float16)},
            r"past_value is \(1, 2, 3, 8\) float16, V",
        ),
    ],
)
def test_what_onnx_forbids(changes, message):
    Q = draw(1, 2, 3, 8)
    with pytest.raises(cuflash.CuflashError, match=message):
        onnx_attention(Q, Q, Q, **changes)


def test_three_axes_need_the_number_of_heads():
    Q = draw(1, 3, 16)
    for number in (None, "2", 2.0, True, 0, 3):
        with pytest.raises(cuflash.CuflashError, match=f"q_num_heads is {number!r}\n"):
            onnx_attention(Q, Q, Q, kv_num_heads=2, q_num_heads=number)
    with pytest.raises(cuflash.CuflashError, match="kv_num_heads is 3"):
        onnx_attention(Q, Q, Q, q_num_heads=2, kv_num_heads=3)
