"""merge and merge_backward: any split of the keys, merged, equals the whole, gradients too."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import reference
from cuflash.devices import EMULATED

merging = sys.modules["cuflash.merge"]  # the module: cuflash.merge is the function


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@given(
    cuts=st.lists(st.integers(0, 13), max_size=5),
    offset=st.integers(-6, 13),
    sink_part=st.one_of(st.none(), st.integers(0, 5)),
    layout=st.sampled_from(["bshd", "bhsd"]),
    through_lse=st.booleans(),
    with_dropout=st.booleans(),
)
def test_any_split_of_the_keys_equals_the_whole(cuts, offset, sink_part, layout, through_lse, with_dropout):
    len_k, edges = 13, [0, *sorted(cuts), 13]
    parts = list(itertools.pairwise(edges))
    q, k, v = normal(2, 6, 4, 3), normal(2, len_k, 2, 3, seed=1), normal(2, len_k, 2, 5, seed=2)
    dout, dlse = normal(2, 6, 4, 5, seed=3), normal(2, 4, 6, seed=4) if through_lse else None
    bias, slopes = normal(4, 1, len_k, seed=5), normal(4, seed=6)
    sink = None if sink_part is None else normal(4, seed=7)
    options = {"causal": True, "softcap": 3.0, "alibi_slopes": slopes, "layout": layout}
    key_axis = 1 if layout == "bshd" else 2
    if layout == "bhsd":
        q, k, v, dout = (x.transpose(0, 2, 1, 3) for x in (q, k, v, dout))

    def run(first, last, own_sink):
        keys = [np.take(x, range(first, last), axis=key_axis) for x in (k, v)]
        dropout = (0.3, 17, (0, 0, 0, first)) if with_dropout else None
        return reference.attention_vjp(
            q, *keys, return_lse=True, bias=bias[..., first:last], query_offset=offset - first, sink=own_sink,
            dropout=dropout, **options,
        )  # fmt: skip

    whole_out, whole_lse, whole_vjp = run(0, len_k, sink)
    whole = whole_vjp(dout, dlse)
    owner = (sink_part or 0) % len(parts)  # of the sink
    pieces = [run(*part, sink if n == owner else None) for n, part in enumerate(parts)]
    outs, lses, vjps = zip(*pieces, strict=True)
    out, lse = cuflash.merge(outs, lses, layout=layout)
    np.testing.assert_allclose(out, whole_out, atol=1e-12)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-12)

    douts, dlses = cuflash.merge_backward(dout, dlse, outs, lses, out, lse, layout=layout)
    gradients = [vjp(*some) for vjp, *some in zip(vjps, douts, dlses, strict=True)]
    np.testing.assert_allclose(sum(g.dq for g in gradients), whole.dq, atol=1e-12)
    np.testing.assert_allclose(sum(g.dalibi_slopes for g in gradients), whole.dalibi_slopes, atol=1e-11)
    np.testing.assert_allclose(np.concatenate([g.dk for g in gradients], key_axis), whole.dk, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([g.dv for g in gradients], key_axis), whole.dv, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([g.dbias for g in gradients], -1), whole.dbias, atol=1e-12)
    if sink is not None:
        (dsink,) = [g.dsink for g in gradients if g.dsink is not None]
        np.testing.assert_allclose(dsink, whole.dsink, atol=1e-12)


def test_the_backward_of_a_part_may_also_be_given_the_results_of_the_whole():
    q, k, v = normal(1, 5, 2, 3), normal(1, 8, 2, 3, seed=1), normal(1, 8, 2, 3, seed=2)
    dout, sink = normal(1, 5, 2, 3, seed=3), normal(2)
    out, lse, vjp = reference.attention_vjp(q, k, v, causal=True, query_offset=-1, sink=sink, return_lse=True)
    whole = vjp(dout)
    options = {"causal": True, "sink": sink}
    first = reference.attention_backward(dout, q, k[:, :3], v[:, :3], out, lse, query_offset=-1, **options)
    second = reference.attention_backward(dout, q, k[:, 3:], v[:, 3:], out, lse, query_offset=-4, causal=True)
    np.testing.assert_allclose(first.dq + second.dq, whole.dq, atol=1e-13)
    np.testing.assert_allclose(np.concatenate([first.dv, second.dv], 1), whole.dv, atol=1e-13)
    np.testing.assert_allclose(first.dsink, whole.dsink, atol=1e-13)


def test_merging_in_two_steps_is_merging_at_once():
    outs, lses = [normal(2, 3, 4, 5, seed=n) for n in range(3)], [normal(2, 4, 3, seed=n) for n in range(3)]
    out, lse = cuflash.merge(outs, lses)
    first = cuflash.merge(outs[:2], lses[:2])
    again = cuflash.merge([first[0], outs[2]], [first[1], lses[2]])
    np.testing.assert_allclose(again[0], out, atol=1e-14)
    np.testing.assert_allclose(again[1], lse, atol=1e-14)


def test_merge_backward_is_finite_differences():
    outs = [normal(2, 3, 4, 5, seed=n) for n in range(3)]
    lses = [normal(2, 4, 3, seed=9 + n) for n in range(3)]
    dout, dlse = normal(2, 3, 4, 5, seed=20), normal(2, 4, 3, seed=21)

    def loss(outs, lses):
        out, lse = cuflash.merge(outs, lses)
        return np.sum(out * dout) + np.sum(lse * dlse)

    douts, dlses = cuflash.merge_backward(dout, dlse, outs, lses, *cuflash.merge(outs, lses))
    step = 1e-6
    for part in range(3):
        for values, gradient in ((outs, douts[part]), (lses, dlses[part])):
            direction = normal(*gradient.shape, seed=30)
            ends = []
            for sign in (1, -1):
                moved = [x + sign * step * direction if n == part else x for n, x in enumerate(values)]
                ends.append(loss(moved, lses) if values is outs else loss(outs, moved))
            assert np.sum(gradient * direction) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-7)


def test_empty_parts():
    outs = [np.zeros((1, 2, 1, 3), np.float32), np.ones((1, 2, 1, 3), np.float32)]
    outs[0][0, 0] = np.nan  # nothing is taken from an empty part
    lses = [np.full((1, 1, 2), -np.inf, np.float32), np.array([[[0.5, -np.inf]]], np.float32)]
    out, lse = cuflash.merge(outs, lses)
    assert out[0, :, 0].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert lse[0, 0].tolist() == [0.5, -np.inf]
    douts, dlses = cuflash.merge_backward(np.ones_like(out), np.ones_like(lse), outs, lses, out, lse)
    assert not douts[0].any() and not dlses[0].any()
    assert douts[1][0, :, 0].tolist() == [[1, 1, 1], [0, 0, 0]] and dlses[1][0, 0].tolist() == [1, 0]


def test_lses_that_are_not_finite_propagate():
    outs = [np.ones((1, 2, 1, 3)), np.ones((1, 2, 1, 3))]
    for bad in (np.nan, np.inf):
        lses = [np.array([[[bad, 0.0]]]), np.zeros((1, 1, 2))]
        out, lse = cuflash.merge(outs, lses)
        assert np.isnan(out[0, 0]).all() and np.isnan(lse[0, 0, 0])
        assert np.isfinite(out[0, 1]).all() and np.isfinite(lse[0, 0, 1])


@pytest.mark.parametrize("kernel", [None, "fwd_02_tiled", "fwd_05_pipeline"])
@pytest.mark.parametrize("sink", [np.inf, np.nan])
def test_what_sees_nothing_but_a_sink_that_is_not_finite_is_0_as_in_the_whole(sink, kernel):
    """Row 0 sees nothing, row 1 a key of the part without the sink, row 2 one of each. A column of V is 0."""
    q, k, v = (normal(1, n, 2, 8, seed=n).astype(np.float16) for n in (3, 20, 20))
    v[..., 0] = 0
    mask = np.zeros((3, 20), bool)
    mask[1, 15] = mask[2, 2] = mask[2, 12] = True
    sinks = np.array([sink, 0.5], np.float32)
    whole = cuflash.attention(q, k, v, mask=mask, sink=sinks, return_lse=True)
    parts = [
        cuflash.attention(
            q, k[:, keys], v[:, keys], mask=mask[:, keys], sink=own, kernel=kernel, return_lse=True
        )
        for keys, own in ((slice(10), sinks), (slice(10, None), None))
    ]
    for order in (parts, parts[::-1]):
        outs, lses = zip(*order, strict=True)
        out, lse = cuflash.merge(outs, lses)
        np.testing.assert_allclose(out, whole[0], atol=2e-3)
        np.testing.assert_allclose(lse, whole[1], rtol=1e-3)
        by_kernel = merging._by_kernel(np, [*outs], [*lses], "bshd", "float32", EMULATED)
        assert not out[0, 0].any() and np.isnan(out[0, 1:, 0]).all() and np.isfinite(out[0, :, 1]).all()
        np.testing.assert_allclose(by_kernel[0], out, atol=1e-6)
        np.testing.assert_allclose(by_kernel[1], lse, rtol=1e-6)
        douts, dlses = cuflash.merge_backward(np.ones_like(out), np.ones_like(lse), outs, lses, out, lse)
        without = 1 if order is parts else 0
        assert not douts[without][0, 0].any() and not dlses[without][0, :, 0].any()


def test_large_scores_do_not_overflow():
    outs = [np.full((1, 1, 1, 1), x, np.float32) for x in (1, 2)]
    out, lse = cuflash.merge(outs, [np.full((1, 1, 1), x, np.float32) for x in (3e38, 3e38)])
    assert out.item() == 1.5 and lse.item() == np.float32(3e38)
    out, lse = cuflash.merge(outs, [np.full((1, 1, 1), x, np.float32) for x in (-1e4, 1e4)])
    assert out.item() == 2 and lse.item() == 1e4


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_and_packed_parts(dtype):
    outs = [normal(7, 2, 3, seed=n).astype(dtype) for n in range(2)]
    wide = np.float64 if dtype == np.float64 else np.float32
    lses = [normal(2, 7, seed=n).astype(wide) for n in range(2)]
    out, lse = cuflash.merge(outs, lses)
    assert out.shape == (7, 2, 3) and lse.shape == (2, 7) and out.dtype == lse.dtype == wide
    douts, dlses = cuflash.merge_backward(outs[0], None, outs, lses, out, lse)
    assert all(x.dtype == wide and x.shape == (7, 2, 3) for x in douts)
    assert all(x.dtype == wide and x.shape == (2, 7) for x in dlses)
    alone, alone_lse = cuflash.merge(outs[:1], lses[:1])
    assert np.array_equal(alone, outs[0].astype(wide)) and np.array_equal(alone_lse, lses[0])


@pytest.mark.parametrize(
    ("outs", "lses", "layout", "said"),
    [
        ([], [], "bshd", "0 outs"),
        ([np.zeros((1, 2, 3, 4))], [], "bshd", "1 outs, 0 lses"),
        ([np.zeros((1, 2, 3, 4))], [np.zeros((1, 2, 3))], "bshd", "lse of part 0 (1, 2, 3)"),
        ([np.zeros((1, 2, 3, 4))] * 2, [np.zeros((1, 3, 2)), np.zeros((1, 3, 1))], "bshd", "part 1"),
        ([np.zeros((1, 2, 3, 4))], [np.zeros((1, 3, 2), int)], "bshd", "lse of part 0 is int64"),
        ([[1.0]], [np.zeros((1, 3, 2))], "bshd", "out of part 0"),
        ([np.zeros((1, 2, 3, 4))], [np.zeros((1, 3, 2))], "sbhd", "layout is 'sbhd'"),
        ([np.zeros((1, 2, 3, 4))], [np.zeros((1, 3, 2))], np.zeros(3), "layout is array"),
        (None, [np.zeros((1, 3, 2))], "bshd", "outs has the type NoneType"),
        ([np.zeros((1, 2, 3, 4))], 7, "bshd", "lses has the type int"),
        (np.zeros(()), [np.zeros((1, 3, 2))], "bshd", "outs has the type ndarray"),
    ],
)
def test_bad_input(outs, lses, layout, said):
    with pytest.raises(cuflash.CuflashError, match=r"^merge: ") as error:
        cuflash.merge(outs, lses, layout=layout)
    with pytest.raises(cuflash.CuflashError, match=r"^merge_backward: "):
        cuflash.merge_backward(np.zeros(3), None, outs, lses, np.zeros(3), np.zeros(3), layout=layout)
    assert said in str(error.value)


def test_bad_gradients_are_called_by_their_names():
    out, lse = normal(2, 3, 4, 5), normal(2, 4, 3)
    for dout, dlse, said in (
        (out[:, :2], None, "dout has shape (2, 2, 4, 5), lse (2, 4, 3); out of part 0 (2, 3, 4, 5)"),
        (out, lse[:1], "dout has shape (2, 3, 4, 5), dlse (1, 4, 3)"),
        (out.astype(int), None, "dout is int64"),
        (out, lse.astype(int), "dlse is int64"),
    ):
        with pytest.raises(cuflash.CuflashError) as error:
            cuflash.merge_backward(dout, dlse, [out] * 2, [lse] * 2, out, lse)
        assert str(error.value).startswith(f"merge_backward: {said}")


@pytest.mark.gpu
def test_the_same_numbers_on_the_gpu():
    import cupy

    outs, lses = [normal(2, 3, 4, 5, seed=n) for n in range(3)], [normal(2, 4, 3, seed=n) for n in range(3)]
    lses[0][0, 0, 0] = -np.inf
    on_host = cuflash.merge(outs, lses)
    on_device = cuflash.merge([cupy.asarray(x) for x in outs], [cupy.asarray(x) for x in lses])
    for got, expected in zip(on_device, on_host, strict=True):
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_allclose(got.get(), expected, rtol=1e-12, atol=1e-14)
