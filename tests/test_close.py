"""The comparison itself must be able to fail."""

import ml_dtypes
import numpy as np
import problems
import pytest
from close import Judge, check_close, nan_allowed
from hypothesis import given

from cuflash import reference

BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def long_case():
    """out of 8,192 query rows in bfloat16: (a good result, reference, baseline)."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 8192, 2, 8)).astype(BF16)
    k, v = (rng.standard_normal((1, 40, 2, 8)).astype(BF16) for _ in range(2))
    exact = reference.attention(q, k, v)
    baseline = reference.unfused("bfloat16").attention(q, k, v)
    return exact.astype(BF16), exact, baseline


def spoil_nothing(good):
    return good


def spoil_one_row(good):
    good[0, 4321, 1] = good[0, 4320, 1]
    return good


def spoil_one_number(good):
    good[0, 17, 0, 3] += BF16(0.1)
    return good


def fill_with_nan(good):
    return np.full_like(good, np.nan)


def hide_one_nan(good):
    good[0, 8191, 1, 7] = np.nan
    return good


def put_one_inf(good):
    good[0, 0, 0, 0] = np.inf
    return good


def swap_heads(good):
    return good[:, :, ::-1].copy()


def negate_one_row(good):
    good[0, 99, 0] *= -1
    return good


SPOILED = (
    spoil_one_row, spoil_one_number, fill_with_nan, hide_one_nan, put_one_inf, swap_heads, negate_one_row,
    np.zeros_like,
)  # fmt: skip


def test_a_good_result_passes(long_case):
    good, exact, baseline = long_case
    verdict = check_close("out", good, exact, baseline)
    assert 0 < verdict.error <= verdict.limit
    assert verdict.limit == pytest.approx(2 * verdict.baseline_error, rel=1e-3)


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda f: f.__name__)
def test_a_wrong_result_fails(long_case, spoil):
    good, exact, baseline = long_case
    with pytest.raises(AssertionError, match="out: "):
        check_close("out", spoil(good.copy()), exact, baseline)


def test_the_worst_place_is_named(long_case):
    good, exact, baseline = long_case
    wrong = good.copy()
    wrong[0, 4321, 1, 5] += 3
    with pytest.raises(AssertionError) as error:
        check_close("out", wrong, exact, baseline)
    assert "(batch 0, i 4321, head 1, d 5)" in str(error.value)
    assert "1 of 131072 numbers" in str(error.value)


def test_every_wrong_kind_fails_and_the_right_one_passes():
    exact = np.array([1.0, np.nan, np.inf, -np.inf])
    check_close("lse", exact.astype("float32"), exact, exact)
    for place in range(4):
        for wrong in (np.nan, np.inf, -np.inf, 0.0):
            result = exact.astype("float32")
            if np.array_equal(result[place], np.float32(wrong), equal_nan=True):
                continue
            result[place] = wrong
            with pytest.raises(AssertionError):
                check_close("lse", result, exact, exact)


def test_a_baseline_that_is_not_finite_allows_nothing():
    exact = np.array([1.0, 2.0])
    for bad in (np.nan, np.inf):
        with pytest.raises(AssertionError):
            check_close("out", np.array([1.0, 2.1]), exact, np.array([1.0, bad]))


def test_nan_is_allowed_only_where_said():
    exact = np.array([[1.0, 2.0], [3.0, 4.0]])
    result = np.array([[1.0, 2.0], [np.nan, 4.0]])
    check_close("out", result, exact, exact, may_be_nan=np.array([[False], [True]]))
    with pytest.raises(AssertionError):
        check_close("out", result, exact, exact, may_be_nan=np.array([[True], [False]]))
    with pytest.raises(AssertionError):  # an infinity is no NaN
        result[1, 0] = np.inf
        check_close("out", result, exact, exact, may_be_nan=True)


def test_an_overflow_of_the_results_own_dtype_passes():
    exact = np.array([1e5, -1e5, 1.0])
    good = np.array([np.inf, -np.inf, 1.0], np.float16)
    check_close("dq", good, exact, exact)
    with pytest.raises(AssertionError):
        check_close("dq", -good, exact, exact)
    with pytest.raises(AssertionError):
        check_close("dq", good.astype("float32"), exact, exact)


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        check_close("out", np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((3, 2)))
    with pytest.raises(AssertionError, match="shape"):
        check_close("out", np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((1, 3)))
    check_close("out", np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3)))


# ---- Judge: all results of a call


def another_rounding(judge):
    """(out, lse, gradients, saved out, saved lse) as a right kernel with other roundings gives them."""
    call, arrays = judge.call, (judge.call.q, judge.call.k, judge.call.v)
    low, high = (reference.unfused(d, np.random.default_rng(99)) for d in (judge.dtype, judge.accumulator))
    out = low.attention(*arrays, **call.options)
    _, lse = high.attention(*arrays, return_lse=True, **call.options)
    saved = judge.saved()
    options = call.options | {"dlse": call.dlse}
    gradients = low.attention_backward(call.dout, *arrays, *saved, **options)
    in_float32 = high.attention_backward(call.dout, *arrays, *saved, **options)
    gradients = gradients._replace(dsink=in_float32.dsink, dalibi_slopes=in_float32.dalibi_slopes)
    return out, lse, gradients, *saved


@given(problems.calls(max_length=65, max_scores=5000))
def test_right_results_pass(call):
    judge = Judge(call)
    out, lse, gradients, *saved = another_rounding(judge)
    judge.forward(out, lse)
    judge.backward(gradients, *saved)


def test_wrong_results_of_a_call_fail():
    options = {"alibi": True, "bias": "same", "sink": True, "dlse": True, "causal": True}
    build = problems.Build(dtype="bfloat16", head_dim=8, **options)
    call = next(
        call
        for call in problems.list_of_calls(50, seed=1, build=build, max_length=33, extreme=False)
        if call.q.size > 1000 and Judge(call).saved()[0].astype("float32").any(axis=-1).mean() > 0.9
    )
    judge = Judge(call)
    out, lse, gradients, *saved = another_rounding(judge)
    judge.forward(out, lse)
    judge.backward(gradients, *saved)
    with pytest.raises(AssertionError, match="lse"):
        judge.forward(out, lse + np.float32(1e-3))
    with pytest.raises(AssertionError, match="out"):
        judge.forward(out * np.float32(1.05), lse)
    for name, array in gradients._asdict().items():
        with pytest.raises(AssertionError, match=name):
            judge.backward(gradients._replace(**{name: array * np.float32(1.2)}), *saved)
        with pytest.raises(AssertionError, match=name):
            judge.backward(gradients._replace(**{name: None}), *saved)


def test_where_a_kernel_may_give_nan():
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 6, 2, 4)) for _ in range(4))
    k[1, 5, 0, 0] = np.nan  # beyond key_lengths: must not leak
    v[0, 5, 1, 2] = np.inf
    dout[1, 0, 1] = np.nan
    call = problems.Call(q, k, v, dout, None, {"key_lengths": [6, 5], "causal": True})
    allowed = nan_allowed(call)
    assert allowed["out"][..., 0].any(axis=1).tolist() == [[False, True], [False, False]]
    assert allowed["dk"][..., 0].any(axis=1).tolist() == [[False, False], [False, True]]
    assert not allowed["dv"][1, 5].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "tf32"])
def test_noise_is_as_large_as_rounding(dtype):
    x = np.random.default_rng(0).uniform(-8, 8, (100, 100)).astype("float32")
    plain = reference.Arithmetic("float32", dtype)
    shaken = reference.Arithmetic("float32", dtype, np.random.default_rng(1))
    if dtype == "float32":  # nothing to round: the noise alone
        assert np.abs(shaken.round(x) - x).max() == np.spacing(np.float32(4))
        return
    rounding, noise = plain.round(x) - x, shaken.round(x) - x
    assert np.abs(noise).max() == pytest.approx(np.abs(rounding).max(), rel=0.05)
    assert noise.std() == pytest.approx(rounding.std(), rel=0.05)
    assert not np.array_equal(noise, rounding)


def test_noise_moves_equal_numbers_alike():
    """As rounding does: in a sum of equal weights errors do not cancel."""
    shaken = reference.Arithmetic("float32", "bfloat16", np.random.default_rng(1))
    x = np.repeat(np.float32([0.3, 7.1, -5.0]), 1000)
    moved = shaken.round(x).reshape(3, 1000)
    assert (moved == moved[:, :1]).all() and len(np.unique(moved[:, 0] - x[::1000])) == 3
    again = shaken.round(x).reshape(3, 1000)
    assert (again[:, 0] != moved[:, 0]).all()
    assert not shaken.round(np.zeros(3, np.float32)).any()  # nothing to round
    near = shaken.round(np.linspace(1.001, 1.002, 1000, dtype=np.float32)) - 1.0015  # 1 / 8 of a unit
    assert near.std() < 0.002, "numbers close together, too, but where the grid jumps"


def test_noise_knows_that_tiny_weights_are_flushed():
    x = np.float32([-80, -88, -100, -np.inf])
    plain = reference.Arithmetic("float32", "float32")
    shaken = reference.Arithmetic("float32", "float32", np.random.default_rng(1))
    assert (plain.exp(x)[:3] > 0).all()
    assert (shaken.exp(x) > 0).tolist() == [True, False, False, False]


def test_noise_reaches_what_a_score_is_made_of():
    """Scores of softcap 2 in saturation are 2 exactly, in base 2 they are not: lse near 0 may show it."""
    q = np.full((1, 3, 1, 4), 50, np.float32)
    options = dict(softcap=2.0, bias=np.float32([[-1.998]]), return_lse=True)
    exact = reference.attention(q, q[:, :1], q[:, :1], **options)[1]
    errors = [
        np.abs(
            reference.unfused("float32", noise).attention(q, q[:, :1], q[:, :1], **options)[1] - exact
        ).max()
        for noise in (None, *map(np.random.default_rng, range(8)))
    ]
    assert errors[0] < 1e-9 and max(errors) > 6e-8


def test_the_baseline_multiplies_numbers_of_its_own_dtype():
    """dout may be float32 beside bfloat16 inputs: products of 16-bit numbers take it rounded."""
    q = np.ones((1, 1, 1, 2), ml_dtypes.bfloat16)
    dout = np.full((1, 1, 1, 2), 1.003, np.float32)  # 1 in bfloat16
    given = dout, q, q, q, np.ones((1, 1, 1, 2), np.float32), np.full((1, 1, 1), np.sqrt(2), np.float32)
    exact = reference.attention_backward(*given)
    found = reference.unfused("bfloat16").attention_backward(*given)
    assert (exact.dv > 1.0029).all() and (found.dv == 1).all()
