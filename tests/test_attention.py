"""The public functions: layouts, targets, packed calls, vjp, explain; on a GPU also warm calls."""

import itertools

import numpy as np
import pytest

import cuflash
from cuflash import CuflashError, Gradients, spec


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


Q, K, V = numbers(2, 37, 4, 8), numbers(2, 29, 2, 8), numbers(2, 29, 2, 5)
DOUT, DLSE = numbers(2, 37, 4, 5), numbers(2, 4, 37)
OPTIONS = {"causal": True, "bias": numbers(4, 1, 29), "alibi_slopes": numbers(4) ** 2, "sink": numbers(4)}


def swapped(array):
    return np.ascontiguousarray(array.swapaxes(1, 2))


def call(**options):
    """(out, lse, Gradients) of the plain arrays."""
    out, lse, vjp = cuflash.attention_vjp(Q, K, V, return_lse=True, **options)
    return out, lse, vjp(DOUT, DLSE)


def same(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


def test_shapes_and_dtypes():
    out, lse, grads = call(**OPTIONS)
    assert out.shape == DOUT.shape and out.dtype == np.float32 and out.flags.c_contiguous
    assert lse.shape == DLSE.shape and lse.dtype == np.float32
    for name, argument in (("dq", Q), ("dk", K), ("dv", V)):
        assert getattr(grads, name).shape == argument.shape
    for name in ("bias", "alibi_slopes", "sink"):
        assert getattr(grads, "d" + name).shape == OPTIONS[name].shape
    assert call()[2][3:] == (None, None, None)
    assert cuflash.attention(Q, K, V, out_dtype="float64").dtype == np.float64


def test_against_the_reference():
    out, lse, grads = call(**OPTIONS)
    expected = cuflash.reference.attention_vjp(Q, K, V, return_lse=True, **OPTIONS)
    same(out, expected[0])
    same(lse, expected[1])
    for got, wanted in zip(grads, expected[2](DOUT, DLSE), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_layout_bhsd():
    out, lse, grads = call(**OPTIONS)
    q, k, v, dout = map(swapped, (Q, K, V, DOUT))
    out2, lse2, vjp = cuflash.attention_vjp(q, k, v, layout="bhsd", return_lse=True, **OPTIONS)
    grads2 = vjp(dout, DLSE)
    same(out2, swapped(out))
    same(lse2, lse)
    for name in ("dq", "dk", "dv"):
        assert getattr(grads2, name).flags.c_contiguous
        same(getattr(grads2, name), swapped(getattr(grads, name)))
    for name in ("dbias", "dsink", "dalibi_slopes"):
        same(getattr(grads2, name), getattr(grads, name))


def test_packed_is_the_sequences_one_by_one():
    lengths_q, lengths_k = (20, 0, 17), (9, 11, 9)
    cu_q, cu_k = ([0, *itertools.accumulate(n)] for n in (lengths_q, lengths_k))
    q, k, v = Q[0], K[0], V[0]
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    out, lse, vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **packed)
    grads = vjp(DOUT[0], DLSE[0])
    assert out.shape == (37, 4, 5) and lse.shape == (4, 37)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one, lse_one, vjp = cuflash.attention_vjp(
            q[None, rows], k[None, keys], v[None, keys], return_lse=True, causal=True
        )
        expected = vjp(DOUT[:1, rows], DLSE[:1, :, rows])
        same(out[rows], one[0])
        same(lse[:, rows], lse_one[0])
        same(grads.dq[rows], expected.dq[0])
        same(grads.dk[keys], expected.dk[0])
        same(grads.dv[keys], expected.dv[0])


def test_out_is_written_and_returned():
    out, lse, _ = call(**OPTIONS)
    target, target_lse = np.full((2, 4, 37, 5), np.nan, np.float32).swapaxes(1, 2), np.full_like(lse, np.nan)
    assert cuflash.attention(Q, K, V, out=target, **OPTIONS) is target
    same(target, out)
    pair = (target, target_lse)
    assert cuflash.attention(Q, K, V, out=pair, return_lse=True, **OPTIONS) is pair
    same(target_lse, lse)


@pytest.mark.parametrize("attention", [cuflash.attention, cuflash.reference.attention])
def test_results_that_out_has_no_array_for_are_new(attention):
    out, lse = attention(Q, K, V, return_lse=True, **OPTIONS)
    target, target_lse = np.zeros(out.shape, np.float32), np.zeros(lse.shape, np.float32)
    for given in ((target, None), (None, target_lse), (None, None), [None, target_lse], target):
        found, found_lse = attention(Q, K, V, out=given, return_lse=True, **OPTIONS)
        np.testing.assert_allclose(found, out, rtol=1e-6)
        np.testing.assert_allclose(found_lse, lse, rtol=1e-6)
        given_out, given_lse = (given, None) if given is target else given
        assert given_out is None or found is given_out
        assert given_lse is None or found_lse is given_lse


def test_grads_are_written_and_returned():
    out, lse, grads = call(**OPTIONS)
    given = Gradients(
        dk=np.full(K.shape, np.nan, np.float32)[:, ::-1], dbias=np.full((4, 1, 29), np.nan, np.float32)
    )
    got = cuflash.attention_backward(DOUT, Q, K, V, out, lse, dlse=DLSE, grads=given, **OPTIONS)
    assert got.dk is given.dk and got.dbias is given.dbias
    for a, b in zip(got, grads, strict=True):
        same(a, b)


def test_torch_in_numpy_out():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(a).to(torch.bfloat16) for a in (Q, K, V))
    out = cuflash.attention(q, k, v)
    assert isinstance(out, np.ndarray) and out.dtype.name == "bfloat16"
    expected = cuflash.reference.attention(*(x.to(torch.float64) for x in (q, k, v)))
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2**-7, atol=2**-7)


def test_progress():
    steps = []
    cuflash.attention(Q, K, V, progress=lambda done, total: steps.append((done, total)))
    assert steps and steps[-1][0] == steps[-1][1]
    assert steps == sorted(steps)


def test_explain():
    plan = cuflash.explain(Q, K, V)
    assert plan.kernel == "tiled" and plan.device.kind == "host"
    x = spec((2, 1024, 16, 64), "bfloat16")
    for layout, backward, device in itertools.product(("bshd", "bhsd"), (False, True), ("sm_75", "sm_90a")):
        plan = cuflash.explain(x, x, x, layout=layout, backward=backward, device=device)
        assert plan.problem.direction == ("backward" if backward else "forward")
        assert plan.row.starred and plan.kernel in str(plan)
    flat, ends = spec((4096, 16, 64), "float16"), spec((9,), "int32")
    packed = cuflash.explain(
        flat, flat, flat, cu_seqlens_q=ends, cu_seqlens_k=ends, backward=True, device="sm_80"
    )
    assert packed.problem.batch == 8 and packed.problem.packed
    assert cuflash.explain(Q, K, V, kernel="fwd_01_naive").device.kind == "emulated"
    with pytest.raises(CuflashError, match=r"^explain: v has 5 key heads, k has 16\n"):
        cuflash.explain(x, x, spec((2, 1024, 5, 64), "bfloat16"))


# on a GPU


@pytest.fixture
def gpu():
    cupy = pytest.importorskip("cupy")
    from cuflash import launch

    launch.forget()
    return cupy


def on(cupy, **options):
    return {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


@pytest.mark.gpu
def test_warm_calls_equal_cold_ones(gpu):
    """The second call of a kind skips check and plan; numbers that may change between calls still count."""
    from cuflash import launch

    options = on(gpu, **OPTIONS)
    q, k, v, dout, dlse = map(gpu.asarray, (Q, K, V, DOUT, DLSE))
    for factor in (1, 2, 3):
        out, lse, vjp = cuflash.attention_vjp(factor * q, k, v, return_lse=True, **options)
        grads = vjp(dout, dlse)
        expected = cuflash.reference.attention_vjp(factor * Q, K, V, return_lse=True, **OPTIONS)
        for got, wanted in zip((out, lse, *grads), (*expected[:2], *expected[2](DOUT, DLSE)), strict=True):
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got.get(), wanted, rtol=1e-4, atol=1e-4)
    assert len(launch._prepared) == 2, "one forward, one backward"


@pytest.mark.gpu
def test_warm_calls_see_new_numbers(gpu):
    q, k, v = map(gpu.asarray, (Q, K, V))
    for scale in (0.1, 0.7, 0.1):
        got = cuflash.attention(q, k, v, scale=scale)
        np.testing.assert_allclose(got.get(), cuflash.attention(Q, K, V, scale=scale), rtol=1e-4, atol=1e-4)
    for seed in (1, 2, 1, 2**64 - 1):
        got = cuflash.attention(q, k, v, dropout=(0.5, seed))
        expected = cuflash.attention(Q, K, V, dropout=(0.5, seed))
        np.testing.assert_allclose(got.get(), expected, rtol=1e-4, atol=1e-4)
    for lengths in ([3, 29], [29, 0], [3, 29]):
        expected = cuflash.attention(Q, K, V, key_lengths=lengths)
        for given in (lengths, gpu.asarray(lengths, "int32")):
            got = cuflash.attention(q, k, v, key_lengths=given)
            np.testing.assert_allclose(got.get(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_warm_calls_refuse_as_cold_ones(gpu):
    q = gpu.zeros((2, 16, 4, 8), gpu.float32)
    buffer = gpu.zeros(2 * q.size, gpu.float32)
    target = buffer[: q.size].reshape(q.shape)
    for _ in range(2):
        assert cuflash.attention(q, q, q, out=target) is target
    inside = buffer[q.size // 2 : q.size // 2 + q.size].reshape(q.shape)
    with pytest.raises(CuflashError, match=r"^attention: out overlaps q in memory"):
        cuflash.attention(inside, inside, inside, out=target)
    for _ in range(2):
        cuflash.attention(q, q, q, dropout=(0.5, 3))
    with pytest.raises(CuflashError, match=r"^attention: dropout has the seed -1"):
        cuflash.attention(q, q, q, dropout=(0.5, -1))
    with pytest.raises(CuflashError, match=r"^attention: the seed of dropout is None"):
        cuflash.attention(q, q, q, dropout=(0.5, None))
    with pytest.raises(CuflashError, match=r"^attention: key_lengths\[0\] is 17"):
        cuflash.attention(q, q, q, key_lengths=[17, 3])


def test_the_logger_says_what_ran_in_numpy(caplog):
    caplog.set_level("DEBUG", "cuflash")
    _, vjp = cuflash.attention_vjp(Q, K, V)
    vjp(DOUT)
    said = [record.message for record in caplog.records]
    assert said == [f"plan: tiled for {direction} on CPU (NumPy)" for direction in ("forward", "backward")]


@pytest.mark.gpu
def test_layouts_and_packed_on_a_gpu(gpu):
    q, k, v = (gpu.asarray(swapped(x)) for x in (Q, K, V))
    for _ in range(2):
        got = cuflash.attention(q, k, v, causal=True, layout="bhsd")
        assert got.flags.c_contiguous
        expected = swapped(cuflash.attention(Q, K, V, causal=True))
        np.testing.assert_allclose(got.get(), expected, rtol=1e-4, atol=1e-4)
    q, k, v = (gpu.asarray(x[0]) for x in (Q, K, V))
    ends = {"cu_seqlens_q": [0, 20, 20, 37], "cu_seqlens_k": [0, 9, 20, 29]}
    expected, expected_lse = cuflash.attention(Q[0], K[0], V[0], return_lse=True, **ends)
    for given in (ends, {n: gpu.asarray(e) for n, e in ends.items()}) * 2:
        out, lse = cuflash.attention(q, k, v, return_lse=True, **given)
        np.testing.assert_allclose(out.get(), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(lse.get(), expected_lse, rtol=1e-4, atol=1e-4)
