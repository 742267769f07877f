"""The specification against dumb loops, finite differences and the words of the contract."""

import loops
import numpy as np
import problems
import pytest
from hypothesis import given

import cuflash
from cuflash import reference
from cuflash.reference_scores import product


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def assert_same(got, expected, limit=1e-10, message=""):
    np.testing.assert_allclose(got, expected, rtol=limit, atol=limit, err_msg=message)


# ---- the forward against loops over single numbers


@given(problems.calls(max_length=17, max_scores=600, extreme=False))
def test_forward_is_what_loops_give(call):
    out, lse = reference.attention(call.q, call.k, call.v, return_lse=True, **call.options)
    expected_out, expected_lse = loops.attention(call.q, call.k, call.v, **call.options)
    assert out.shape == expected_out.shape and lse.shape == expected_lse.shape
    assert out.dtype == lse.dtype == "float64"
    assert_same(out, expected_out)
    assert_same(lse, expected_lse)


def test_blocks_of_query_rows_change_nothing(monkeypatch):
    features = {"alibi": True, "bias": "same", "sink": True, "dropout": True, "mask": True}
    build = problems.Build(dtype="float64", head_dim=8, **features)
    call = problems.list_of_calls(1, seed=9, build=build, max_length=33, extreme=False)[0]
    whole = reference.attention_vjp(call.q, call.k, call.v, **call.options)
    monkeypatch.setattr(reference, "MAX_BLOCK", {"numpy": 60, "cupy": 60})
    blocked = reference.attention_vjp(call.q, call.k, call.v, **call.options)
    assert_same(blocked[0], whole[0])
    for one, other in zip(blocked[1](call.dout), whole[1](call.dout), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same(one, other)


# ---- gradients against finite differences


DIFFERENTIABLE = ("q", "k", "v", "bias", "sink", "alibi_slopes")


def directional(call_of, arguments, name, direction, step=1e-6):
    """(f(x + step d) - f(x - step d)) / 2 step for one argument."""
    ends = [call_of(arguments | {name: arguments[name] + sign * step * direction}) for sign in (1, -1)]
    return (ends[0] - ends[1]) / (2 * step)


def check_gradients(arguments, dout, dlse):
    """Each gradient along random directions and along single coordinates, through out and lse together."""

    def loss(arguments):
        out, lse = reference.attention(**arguments, return_lse=True)
        seen = np.isfinite(lse)  # -inf of an empty row has no slope
        return np.sum(dout * out) + np.sum((dlse * np.where(seen, lse, 0))[seen])

    settings = {name: value for name, value in arguments.items() if name not in ("q", "k", "v")}
    _, vjp = reference.attention_vjp(arguments["q"], arguments["k"], arguments["v"], **settings)
    gradients = vjp(dout, dlse)._asdict()
    rng = np.random.default_rng(1)
    for name in DIFFERENTIABLE:
        gradient = gradients["d" + name]
        if arguments.get(name) is None:
            assert gradient is None
            continue
        shape = arguments[name].shape
        assert gradient.shape == shape
        single = np.zeros(shape)
        single.flat[rng.integers(single.size)] = 1
        for direction in (rng.standard_normal(shape), single):
            expected = directional(loss, arguments, name, direction)
            got = np.sum(np.where(direction == 0, 0, gradient * direction))
            assert got == pytest.approx(expected, rel=2e-6, abs=2e-7), name


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "offset and window": {"window": (2, 1), "query_offset": 1, "scale": 0.7},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.4},
    "alibi": {"alibi_slopes": normal(4, seed=1)},
    "alibi by batch": {"alibi_slopes": normal(2, 4, seed=1), "causal": True},
    "bias": {"bias": normal(2, 4, 5, 7, seed=2)},
    "bias over heads and rows": {"bias": normal(2, 1, 1, 7, seed=2)},
    "bias over batch and keys": {"bias": normal(4, 5, 1, seed=2)},
    "bias by key": {"bias": normal(7, seed=2)},
    "sink": {"sink": normal(4, seed=3)},
    "sink and empty rows": {"sink": normal(4, seed=3), "causal": True, "query_offset": -2},
    "mask": {"mask": normal(2, 1, 5, 7, seed=4) > -0.5},
    "dropout": {"dropout": (0.4, 123456789012345)},
    "lengths": {"query_lengths": [4, 5], "key_lengths": [7, 3], "causal": True},
    "block mask": {"block_mask": cuflash.BlockMask(2, 3, [0, 2, 3, 4], [0, 2, 1, 0])},
    "bhsd": {"layout": "bhsd", "bias": normal(4, 1, 7, seed=2)},
    "everything": {
        "softcap": 2.0, "alibi_slopes": normal(4, seed=1), "bias": normal(4, 1, 7, seed=2),
        "sink": normal(4, seed=3), "mask": normal(5, 7, seed=4) > -1, "dropout": (0.2, 5, (1, 2, 3, 5)),
        "key_lengths": [6, 7], "window": (5, 3), "causal": True, "scale": 0.9,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_finite_differences(name):
    options = OPTIONS[name]
    arguments = {"q": normal(2, 5, 4, 3), "k": normal(2, 7, 2, 3, seed=5), "v": normal(2, 7, 2, 6, seed=6)}
    dout = normal(2, 5, 4, 6, seed=7)
    if options.get("layout") == "bhsd":
        arguments = {name: array.transpose(0, 2, 1, 3) for name, array in arguments.items()}
        dout = dout.transpose(0, 2, 1, 3)
    check_gradients(arguments | options, dout, normal(2, 4, 5, seed=8))


def test_gradients_of_packed_sequences_are_finite_differences():
    cu = {"cu_seqlens_q": [0, 3, 3, 7, 8], "cu_seqlens_k": [0, 4, 6, 6, 9]}
    arguments = {"q": normal(9, 4, 3), "k": normal(9, 2, 3, seed=5), "v": normal(9, 2, 2, seed=6)}
    options = {"causal": True, "bias": normal(4, 1, 4, 4, seed=2), "alibi_slopes": normal(4, 4, seed=1)}
    check_gradients(arguments | cu | options, normal(9, 4, 2, seed=7), normal(4, 9, seed=8))


@given(problems.calls(max_length=9, max_scores=300, extreme=False))
def test_any_call_has_gradients_that_are_finite_differences(call):
    arrays = {name: getattr(call, name).astype("float64") for name in ("q", "k", "v")}
    options = {name: value for name, value in call.options.items() if name != "out_dtype"}
    options |= {name: options[name].astype("float64") for name in DIFFERENTIABLE if name in options}
    out, lse = reference.attention(**arrays, **options, return_lse=True)
    dlse = normal(*lse.shape) if call.dlse is not None else np.zeros(lse.shape)
    arguments = arrays | options
    if all(arguments[name].size for name in DIFFERENTIABLE if name in arguments):
        check_gradients(arguments, normal(*out.shape), dlse)


# ---- corners of the contract


def test_a_row_that_sees_nothing():
    q, k, v, dout = normal(1, 4, 2, 3), normal(1, 4, 2, 3), normal(1, 4, 2, 5), normal(1, 4, 2, 5)
    dout[0, 0] = np.nan  # nobody listens
    sink = np.array([0.3, -np.inf])
    options = {"causal": True, "query_offset": -1}
    out, lse, vjp = reference.attention_vjp(q, k, v, return_lse=True, **options)
    assert (out[0, 0] == 0).all() and (lse[0, :, 0] == -np.inf).all()
    assert np.isfinite(out).all() and np.isfinite(lse[..., 1:]).all()
    dq, dk, dv, *_ = vjp(dout)
    assert (dq[0, 0] == 0).all() and all(np.isfinite(x).all() for x in (dq, dk, dv))
    assert (dk[0, 3] == 0).all() and (dv[0, 3] == 0).all()  # no query sees the last key

    out, lse, vjp = reference.attention_vjp(q, k, v, return_lse=True, sink=sink, **options)
    assert (out[0, 0] == 0).all()
    assert lse[0, :, 0].tolist() == [0.3, -np.inf]  # its sink, if there is one
    dlse = np.zeros((1, 2, 4))
    dlse[0, :, 0] = 7.0
    gradients = vjp(np.where(np.isnan(dout), dout, 0), dlse)
    assert gradients.dsink.tolist() == [7.0, 0.0]  # dlse x P_sink
    assert not gradients.dq.any() and not gradients.dk.any() and not gradients.dv.any()


def test_a_row_beyond_its_length_does_not_exist():
    q, k, v, dout = normal(2, 4, 2, 3), normal(2, 5, 2, 3), normal(2, 5, 2, 3), normal(2, 4, 2, 3)
    dlse, sink = normal(2, 2, 4), np.array([0.5, 1.0])
    lengths = {"query_lengths": [3, 0], "key_lengths": np.array([2, 5])}
    clean = reference.attention_vjp(q, k, v, return_lse=True, sink=sink, **lengths)
    for array in (q, dout):
        array[0, 3:], array[1] = np.nan, np.nan
    dlse[0, :, 3:], dlse[1] = np.nan, np.nan
    k[0, 2:], v[0, 2:] = np.nan, np.inf
    out, lse, vjp = reference.attention_vjp(q, k, v, return_lse=True, sink=sink, **lengths)
    assert np.array_equal(out, clean[0]) and np.array_equal(lse, clean[1])
    assert not out[0, 3:].any() and not out[1].any()
    assert (lse[0, :, 3:] == -np.inf).all() and (lse[1] == -np.inf).all()  # the sink does not count
    gradients = vjp(dout, dlse)
    assert all(np.isfinite(x).all() for x in gradients if x is not None)
    assert not gradients.dq[0, 3:].any() and not gradients.dq[1].any()
    assert not gradients.dk[0, 2:].any() and not gradients.dv[1].any()


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)])
def test_sizes_of_zero(shape):
    batch, len_q, len_k, heads = shape
    q, k, v = normal(batch, len_q, heads, 3), normal(batch, len_k, heads, 3), normal(batch, len_k, heads, 5)
    out, lse, vjp = reference.attention_vjp(q, k, v, return_lse=True)
    assert out.shape == (batch, len_q, heads, 5) and lse.shape == (batch, heads, len_q)
    assert not out.any() and (lse == -np.inf).all()
    dq, dk, dv, *_ = vjp(normal(*out.shape))
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert not dq.any() and not dk.any() and not dv.any()


@pytest.mark.parametrize(("offset", "shift"), [(None, 2), (0, 0), (1, 1), (-1, -1), (9, 9)])
def test_causal_offsets(offset, shift):
    q, k = normal(1, 3, 1, 4), normal(1, 5, 1, 4)
    P = cuflash.attention_weights(q, k, causal=True, query_offset=offset)[0, 0]
    for i in range(3):  # None: the last query sees the last key; 0: the first sees the first
        assert np.flatnonzero(P[i] > 0).tolist() == [j for j in range(5) if j <= i + shift]


@pytest.mark.parametrize("window", [(0, 0), (1, None), (None, 0), (2, 1), (0, 3), (None, None)])
def test_windows_are_inclusive_on_both_sides(window):
    P = cuflash.attention_weights(normal(1, 6, 1, 4), normal(1, 6, 1, 4), window=window)[0, 0]
    left, right = (99 if side is None else side for side in window)
    for i in range(6):
        assert np.flatnonzero(P[i] > 0).tolist() == [j for j in range(6) if i - left <= j <= i + right]


def test_default_offset_is_that_of_each_sequence():
    q, k, v = normal(2, 4, 1, 3), normal(2, 6, 1, 3), normal(2, 6, 1, 3)
    out = reference.attention(q, k, v, causal=True, query_lengths=[4, 2], key_lengths=[3, 6])
    for b, (len_q, len_k) in enumerate([(4, 3), (2, 6)]):
        own_q, own_k, own_v = q[b : b + 1, :len_q], k[b : b + 1, :len_k], v[b : b + 1, :len_k]
        assert_same(out[b, :len_q], reference.attention(own_q, own_k, own_v, causal=True)[0])


PACKED = problems.Build(
    dtype="float64", head_dim=8, sequences="packed", causal=True, alibi=True, bias="same", mask=True,
    sink=True, dropout=True, block_mask=(16, 16), dlse=True,
)  # fmt: skip


@given(problems.calls(build=PACKED, max_length=33, max_scores=4000, extreme=False))
def test_packed_is_a_loop_over_sequences(call):
    options = dict(call.options)
    cu_q, cu_k = (np.asarray(options.pop(f"cu_seqlens_{side}")) for side in "qk")
    out, lse, vjp = reference.attention_vjp(call.q, call.k, call.v, return_lse=True, **call.options)
    gradients = vjp(call.dout, call.dlse)
    p, seed, *shift = options.pop("dropout")
    batch0, *others = shift[0] if shift else (0, 0, 0, 0)
    block_mask = options.pop("block_mask")
    seen_q, seen_k, dsink = np.zeros(len(call.q), bool), np.zeros(len(call.k), bool), 0
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        len_q, len_k = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        own = {name: cut(options[name], b, len_q, len_k) for name in ("bias", "mask")}
        slopes = np.atleast_2d(options["alibi_slopes"])
        own["alibi_slopes"] = slopes[[b if len(slopes) > 1 else 0]]
        own["dropout"] = (p, seed, (batch0 + b, *others))
        dense = block_mask.dense()[[b if block_mask.indptr.shape[0] > 1 else 0]]
        missing = max(-(-len_k // block_mask.block_k) - dense.shape[-1], 0)  # last columns, if none is kept
        dense = np.pad(dense, [(0, 0), (0, 0), (0, 0), (0, missing)])
        own["block_mask"] = cuflash.BlockMask.from_dense(dense, block_mask.block_q, block_mask.block_k)
        some, some_lse, some_vjp = reference.attention_vjp(
            call.q[None, rows], call.k[None, keys], call.v[None, keys], return_lse=True, **(options | own)
        )
        assert_same(out[rows], some[0])
        assert_same(lse[:, rows], some_lse[0])
        some_gradients = some_vjp(call.dout[None, rows], call.dlse[None, :, rows])
        assert_same(gradients.dq[rows], some_gradients.dq[0])
        assert_same(gradients.dk[keys], some_gradients.dk[0])
        assert_same(gradients.dv[keys], some_gradients.dv[0])
        seen_q[rows], seen_k[keys] = True, True
        dsink = dsink + some_gradients.dsink
    assert_same(gradients.dsink, dsink)
    assert not out[~seen_q].any() and (lse[:, ~seen_q] == -np.inf).all()  # tokens of no sequence
    assert not gradients.dq[~seen_q].any() and not gradients.dk[~seen_k].any()


def cut(array, b, len_q, len_k):
    """The part of a bias or mask that one sequence of a packed call has."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    array = array[[b]] if array.shape[0] > 1 else array
    array = array[:, :, :len_q] if array.shape[2] > 1 else array
    return array[..., :len_k] if array.shape[3] > 1 else array


def test_non_finite_numbers_spread_over_visible_pairs_only():
    q, k, v, dout = normal(1, 4, 1, 3), normal(1, 4, 1, 3), normal(1, 4, 1, 3), normal(1, 4, 1, 3)
    clean_out, clean_vjp = reference.attention_vjp(q, k, v, causal=True)
    clean = clean_vjp(dout)
    bad_v = v.copy()
    bad_v[0, 2, 0, 1] = np.nan
    out, vjp = reference.attention_vjp(q, k, bad_v, causal=True)
    assert np.array_equal(out[0, :2], clean_out[0, :2])  # rows 0 and 1 do not see key 2
    assert np.isnan(out[0, 2:, 0, 1]).all() and np.isfinite(out[0, :, 0, [0, 2]]).all()
    gradients = vjp(dout)
    assert np.array_equal(gradients.dq[0, :2], clean.dq[0, :2]) and np.isnan(gradients.dq[0, 2:]).all()

    bad_k = k.copy()
    bad_k[0, 3] = np.inf
    out, lse = reference.attention(np.abs(q), bad_k, v, causal=True, return_lse=True)
    assert np.isfinite(out[0, :3]).all() and np.isnan(out[0, 3]).all() and np.isnan(lse[0, 0, 3])
    out, lse = reference.attention(-np.abs(q), bad_k, v, causal=True, return_lse=True)
    assert np.isfinite(out).all() and np.isfinite(lse).all()  # a score of -inf is hidden, whatever made it so

    bad_dout = dout.copy()
    bad_dout[0, 1] = np.nan
    gradients = clean_vjp(bad_dout)
    assert np.isnan(gradients.dk[0, :2]).all() and np.array_equal(gradients.dk[0, 2:], clean.dk[0, 2:])
    assert np.array_equal(np.isnan(gradients.dq[0, :, 0, 0]), [False, True, False, False])


def test_a_bias_of_minus_infinity_hides():
    q, k, v, dout = normal(1, 3, 2, 4), normal(1, 5, 2, 4), normal(1, 5, 2, 4), normal(1, 3, 2, 4)
    mask = normal(3, 5) > 0
    mask[1] = False
    bias = np.where(mask, 0.0, -np.inf)
    out, lse, vjp = reference.attention_vjp(q, k, v, bias=bias, return_lse=True)
    masked = reference.attention_vjp(q, k, v, mask=mask, return_lse=True)
    assert np.array_equal(out, masked[0]) and np.array_equal(lse, masked[1])
    gradients, expected = vjp(dout), masked[2](dout)
    assert np.array_equal(gradients.dq, expected.dq) and np.array_equal(gradients.dv, expected.dv)
    assert np.isfinite(gradients.dbias).all() and not gradients.dbias[~mask].any()


def test_scores_beyond_the_range_of_exp():
    q = np.full((1, 2, 1, 1), 1e4)
    k = np.array([1e4, -1e4, 9999.0]).reshape(1, 3, 1, 1)
    v = np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert (out == 1).all() and (lse == 1e8).all()


def test_dropout_keeps_the_lse_and_scales_what_it_keeps():
    q, k, v = normal(1, 6, 2, 3), normal(1, 8, 2, 3), np.ones((1, 8, 2, 1))
    P = cuflash.attention_weights(q, k)
    keep = cuflash.dropout_mask(1, 2, 6, 8, (0.25, 11))
    out, lse = reference.attention(q, k, v, dropout=(0.25, 11), return_lse=True)
    assert_same(out[..., 0].swapaxes(1, 2), (P * keep).sum(-1) / 0.75)
    assert np.array_equal(lse, reference.attention(q, k, v, return_lse=True)[1])


# ---- chosen rows, targets, precisions


@given(problems.calls(max_length=33, max_scores=3000, extreme=False))
def test_chosen_rows_are_rows_of_the_whole(call):
    options, arrays = dict(call.options), (call.q, call.k, call.v)
    swapped = options.get("layout") == "bhsd"
    rng = np.random.default_rng(0)
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    lse = lse.astype("float64" if call.build.dtype == "float64" else "float32")
    heads, len_q = lse.shape[-2:]
    heads_k, len_k = call.k.shape[1 if swapped else -2], call.k.shape[-2 if swapped else -3]
    if not (out.size and len_k):
        return
    rows, keys = rng.integers(0, len_q, (1, heads, 5)), rng.integers(0, len_k, (1, heads_k, 4))

    def pick(array, rows):
        """The chosen rows of (.., rows, heads, dim) or of its swapped layout, per head."""
        by_head = array if swapped else array.swapaxes(-2, -3)
        index = rows[0][..., None] if array.ndim == 3 else rows[..., None]
        index = np.broadcast_to(index, (*by_head.shape[:-2], *index.shape[-2:]))
        picked = np.take_along_axis(by_head, index, -2)
        return picked if swapped else picked.swapaxes(-2, -3)

    some_out, some_lse = reference.attention(*arrays, return_lse=True, rows=rows, **options)
    assert_same(some_out, pick(out, rows))
    backward = (call.dout, *arrays, out, lse)
    whole = reference.attention_backward(*backward, dlse=call.dlse, **options)
    some = reference.attention_backward(*backward, dlse=call.dlse, rows=rows, **options)
    assert_same(some.dq, pick(whole.dq, rows))
    assert some.dk is None
    some = reference.attention_backward(*backward, dlse=call.dlse, keys=keys, **options)
    assert_same(some.dk, pick(whole.dk, keys))
    assert_same(some.dv, pick(whole.dv, keys))
    assert some.dq is None
    assert some_lse.shape == (*lse.shape[:-1], 5)


def test_results_are_written_where_asked():
    q, k, v, dout = (normal(2, 3, 2, 4, seed=n) for n in range(4))
    out, lse = np.full((2, 3, 2, 4), np.nan), np.full((2, 2, 3), np.nan)
    returned = reference.attention(q, k, v, return_lse=True, out=(out, lse))
    assert returned[0] is out and returned[1] is lse
    expected = reference.attention(q, k, v, return_lse=True)
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    dk = np.full((2, 3, 2, 4), np.nan)
    gradients = reference.attention_backward(dout, q, k, v, out, lse, grads=cuflash.Gradients(dk=dk))
    assert gradients.dk is dk and np.isfinite(dk).all()
    assert np.array_equal(dk, reference.attention_backward(dout, q, k, v, out, lse).dk)


def test_longdouble_judges_float64():
    q, k, v, dout = (normal(1, 6, 2, 4, seed=n) for n in range(4))
    out, vjp = reference.attention_vjp(q, k, v, arithmetic=reference.LONGDOUBLE)
    assert out.dtype == np.longdouble and vjp(dout).dq.dtype == np.longdouble
    plain, plain_vjp = reference.attention_vjp(q, k, v)
    assert 0 < np.abs(out - plain).max() < 1e-15
    assert np.abs(vjp(dout).dq - plain_vjp(dout).dq).max() < 1e-14


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_baseline_rounds_every_result_to_its_dtype(dtype):
    dtype = problems.NUMPY_DTYPES[dtype]
    q, k, v, dout = (normal(1, 6, 2, 4, seed=n).astype(dtype) for n in range(4))
    out, vjp = reference.unfused(dtype.name).attention_vjp(q, k, v, bias=normal(6, 6).astype(dtype))
    exact, exact_vjp = reference.attention_vjp(q, k, v, bias=normal(6, 6).astype(dtype))
    eps = float(problems.ml_dtypes.finfo(dtype).eps)
    for got, expected in [(out, exact), *zip(vjp(dout)[:4], exact_vjp(dout)[:4], strict=True)]:
        assert np.array_equal(got.astype(dtype).astype(got.dtype), got)
        assert np.abs(got - expected).max() < 20 * eps
        assert np.abs(got - expected).max() > eps / 50 or dtype == np.float64


def test_products_without_cublas_run_on_the_host(caplog):
    class WithoutBlas(np.ndarray):
        def __matmul__(self, other):
            raise ImportError("no libcublas")

    A, B = normal(3, 4), normal(4, 5)
    with caplog.at_level("WARNING", "cuflash"):
        assert np.array_equal(product(A.view(WithoutBlas), B.view(WithoutBlas)), A @ B)
    assert "no libcublas" in caplog.text


def test_bad_input_is_refused_as_in_attention():
    with pytest.raises(cuflash.CuflashError, match="attention"):
        reference.attention(normal(1, 2, 3, 4), normal(1, 2, 2, 4), normal(1, 2, 2, 4))


# ---- on the GPU


@pytest.mark.gpu
def test_the_same_numbers_on_the_gpu():
    for call in problems.list_of_calls(60, seed=11, max_length=65):
        there = call.on_device(device_lengths=True)
        out, lse, vjp = reference.attention_vjp(call.q, call.k, call.v, return_lse=True, **call.options)
        results = reference.attention_vjp(there.q, there.k, there.v, return_lse=True, **there.options)
        expected = {"out": out, "lse": lse, **vjp(call.dout, call.dlse)._asdict()}
        got = {"out": results[0], "lse": results[1], **results[2](there.dout, there.dlse)._asdict()}
        for name, array in expected.items():
            assert (got[name] is None) == (array is None)
            if array is not None:
                message = f"{name} of {call}"
                np.testing.assert_allclose(got[name].get(), array, rtol=1e-9, atol=1e-9, err_msg=message)


@pytest.mark.gpu
def test_baselines_run_on_the_gpu():
    for dtype in ("float16", "bfloat16", "float32"):
        build = problems.Build(dtype=dtype, bias="same", sink=True, dropout=True)
        call = problems.list_of_calls(1, seed=3, build=build, max_length=65, extreme=False)[0]
        there, baseline = call.on_device(), reference.unfused(dtype)
        out, lse = baseline.attention(call.q, call.k, call.v, return_lse=True, **call.options)
        got, got_lse = baseline.attention(there.q, there.k, there.v, return_lse=True, **there.options)
        eps = float(problems.ml_dtypes.finfo(problems.NUMPY_DTYPES[dtype]).eps)
        np.testing.assert_allclose(got.get(), out, atol=8 * eps)
        np.testing.assert_allclose(got_lse.get(), lse, atol=8 * eps)


@pytest.mark.gpu
def test_long_sequences_on_chosen_rows():
    import cupy

    cupy.random.seed(0)
    q, k, v, dout = (cupy.random.standard_normal((1, 16384, 2, 64), dtype=cupy.float32) for _ in range(4))
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)  # scores alone would be 4 GiB
    rng = np.random.default_rng(0)
    rows, keys = (np.sort(rng.integers(0, 16384, (1, 2, 64)), axis=-1) for _ in range(2))
    some, some_lse = reference.attention(q, k, v, causal=True, return_lse=True, rows=rows)
    for h in range(2):
        np.testing.assert_allclose(some[0, :, h].get(), out[0, rows[0, h], h].get(), atol=1e-12)
        np.testing.assert_allclose(some_lse[0, h].get(), lse[0, h, rows[0, h]].get(), atol=1e-12)
    backward = (dout, q, k, v, out, lse.astype("float32"))
    whole = reference.attention_backward(*backward, causal=True)
    dq = reference.attention_backward(*backward, causal=True, rows=rows).dq
    dk = reference.attention_backward(*backward, causal=True, keys=keys).dk
    for h in range(2):
        np.testing.assert_allclose(dq[0, :, h].get(), whole.dq[0, rows[0, h], h].get(), atol=1e-10)
        np.testing.assert_allclose(dk[0, :, h].get(), whole.dk[0, keys[0, h], h].get(), atol=1e-10)


@pytest.mark.parametrize("chosen", [[99], [-7], "x", [0.5], np.zeros((3, 1, 2), int), 7, {}])
@pytest.mark.parametrize("name", ["rows", "keys"])
def test_rows_that_are_not_there_are_refused(name, chosen):
    q = np.zeros((1, 6, 2, 4))
    with pytest.raises(cuflash.CuflashError, match=f"^reference: {name} "):
        lse = np.zeros((1, 2, 6))
        reference.attention_backward(q, q, q, q, q, lse, **{name: chosen})


def test_rows_count_from_the_end_too():
    q = np.random.default_rng(0).standard_normal((1, 6, 2, 4))
    whole = reference.attention(q, q, q, causal=True)
    np.testing.assert_array_equal(reference.attention(q, q, q, causal=True, rows=[-1, 0]), whole[:, [5, 0]])
