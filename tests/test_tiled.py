"""The NumPy path against the specification: contract, targets, threads, memory, progress, gradients."""

import math
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from close import Judge
from problems import Build, covering_builds, list_of_calls
from threadpoolctl import ThreadpoolController, threadpool_limits

import cuflash
from cuflash import (
    BlockMask,
    Gradients,
    reference,
    tiled,
    tiled_backward,
    tiled_blocks,
    tiled_products,
    tiled_workers,
)
from cuflash.check import check
from cuflash.tiled_products import product
from cuflash.tiled_scores import NATURAL
from cuflash.tiled_visible import Visible

BLAS = ThreadpoolController().select(user_api="blas")


# ---- the contract


def test_keys_without_query_heads_get_no_gradient():
    q, k = np.zeros((1, 3, 0, 8), np.float32), np.ones((1, 2, 5, 8), np.float32)
    out, vjp = cuflash.attention_vjp(q, k, k)
    grads = vjp(out)
    assert out.shape == grads.dq.shape == q.shape
    assert grads.dk.shape == grads.dv.shape == k.shape and not grads.dk.any() and not grads.dv.any()


def check_call(call):
    """Forward, and backward from the out and lse of a perfect forward, by the rule of close.py."""
    judge = Judge(call)
    judge.forward(*cuflash.attention(call.q, call.k, call.v, **call.options, return_lse=True))
    out, lse = judge.saved()
    arrays = (call.dout, call.q, call.k, call.v, out, lse)
    options = {**call.options, "dlse": call.dlse, "deterministic": call.deterministic}
    judge.backward(cuflash.attention_backward(*arrays, **options), out, lse)


@pytest.mark.parametrize("build", covering_builds(48)[::6], ids=str)
def test_every_pair_of_features(build):
    for call in list_of_calls(2, seed=1, build=build, max_scores=2**15):
        check_call(call)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (70, None)},
        {"dropout": (0.2, 5)},
        {"softcap": 3.0},
        {"scale": 2.0},
    ],
    ids=str,
)
def test_several_tiles_along_both_axes(options, monkeypatch):
    """Tiles smaller than those of problems.py make the running maximum move, and sums cross items."""
    for module in (tiled, tiled_backward):
        monkeypatch.setattr(module, "TILE_Q", 32)
        monkeypatch.setattr(module, "TILE_KV", 16)
    monkeypatch.setattr(tiled, "LOADED", 2**8)
    monkeypatch.setattr(tiled, "FEW_ROWS", 32)
    monkeypatch.setattr(tiled_backward, "LOADED_KV", 32)
    monkeypatch.setattr(tiled_blocks, "GRAIN", 8)
    build = Build(head_dim=8, alibi=True, bias="same", mask="causal" in options, sink=True, dlse=True)
    for call in list_of_calls(6, seed=3, build=build, max_scores=2**15, extreme=False):
        call.options.update(options)
        check_call(call)
    for call in list_of_calls(6, seed=4, build=Build(head_dim=8, block_mask=(16, 16)), max_scores=2**15):
        call.options.update(options)
        check_call(call)


@pytest.mark.parametrize("small", [0, 5])
def test_with_a_running_maximum_or_without(small, monkeypatch):
    """0: always with; 5: some tiles of an item need none, later ones do."""
    monkeypatch.setattr(tiled, "SMALL", small)
    monkeypatch.setattr(tiled, "TILE_KV", 16)
    for dtype in ("float32", "float64"):
        build = Build(dtype, head_dim=8, causal=True, mask=True, dropout=True)
        for call in list_of_calls(4, seed=6, build=build, max_scores=2**15):
            check_call(call)


def test_without_a_fast_exp2(monkeypatch):
    monkeypatch.setattr(tiled, "FAST", NATURAL)
    for call in list_of_calls(4, seed=5, build=Build(head_dim=40, causal=True), max_scores=2**15):
        check_call(call)


@pytest.mark.parametrize("small", [2000, 0])
def test_any_blas(small, monkeypatch):
    """0: products are whole, as where BLAS has no kernel for small ones."""
    monkeypatch.setattr(tiled_products, "has_small_kernel", lambda: bool(small))
    monkeypatch.setattr(tiled_products, "SMALL", small)
    for call in list_of_calls(4, seed=9, build=Build(head_dim=40, causal=True), max_scores=2**15):
        check_call(call)


def test_scores_that_rise_and_fall():
    """Far above and below what one exponential holds, in order up, down and mixed."""
    rng = np.random.default_rng(0)
    k = np.ones((1, 2000, 1, 1), np.float32)
    v = rng.standard_normal((1, 2000, 1, 3), dtype=np.float32)
    q = np.ones((1, 3, 1, 1), np.float32)
    rising = np.linspace(-3000, 3000, 2000)
    for order in (rising, rising[::-1], rng.permutation(rising)):
        k[0, :, 0, 0] = order
        out, lse = cuflash.attention(q, k, v, return_lse=True)
        expected_out, expected_lse = reference.attention(q, k, v, return_lse=True)
        np.testing.assert_allclose(out, expected_out, rtol=1e-5)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("far", [-1e3, -1e5, -1e9, -1e30])
@pytest.mark.parametrize("how", ["bias", "sink", "keys", "softcap"])
def test_scores_far_above_all_before_keep_their_digits(how, far, dtype):
    """Additive masks hide the first keys with -1e9 or the like, a sink of -1e30 is none: there m starts."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((1, n, 2, 8)).astype(dtype) for n in (5, 600, 600))
    options = {}
    if how == "sink":
        options["sink"] = np.array([far, 0], dtype)
    elif how == "keys":
        q[..., 0], k[:, :300, :, 0] = 1, far
    else:
        options["bias"] = np.where(np.arange(600) < 300, far, 0).astype(dtype)
        options["softcap"] = 3.0 if how == "softcap" else None
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=0)


def test_scaling_takes_no_digits_of_16_bit_products():
    """Slopes have gradients with float32's digits: sums of exact products, not of rounded ones."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        (8 * rng.standard_normal((2, n, 6, 320))).astype(ml_dtypes.bfloat16) for n in (100, 40, 40, 100)
    )
    options = dict(alibi_slopes=np.linspace(0.1, 1, 12, dtype=np.float32).reshape(2, 6))
    out, lse = cuflash.reference.attention(q, k, v, return_lse=True, **options)
    given = dout, q, k, v, out.astype(ml_dtypes.bfloat16), lse.astype(np.float32)
    exact, found, baseline = (
        module.attention_backward(*given, **options).dalibi_slopes
        for module in (cuflash.reference, cuflash, cuflash.reference.unfused("float32"))
    )
    rms = [np.sqrt(np.mean((x - exact) ** 2)) for x in (found, baseline)]
    assert rms[0] < 1.5 * rms[1], rms


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_is_not_finite_though_dropout_takes_the_score_that_makes_it_so(bad):
    """What dropout leaves of a row lies in tiles before or after the one of that score, or is nothing."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 8), dtype=np.float32) for n in (200, 900, 900))
    q[..., 0], k[0, 400, 0, 0] = np.abs(q[..., 0]), bad
    for keys in (slice(None), slice(None, 512), slice(300, None)):
        got, expected = (
            module.attention(q, k[:, keys], v[:, keys], dropout=(0.998, 3)) for module in (cuflash, reference)
        )
        assert np.isnan(got).all() and np.isnan(expected).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_stays_alone(bad):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 600, 1, 8)) for _ in range(3))
    q[0, 77, 0] = bad
    k[0, 300:, 0, :] = np.abs(k[0, 300:, 0, :])
    q[0, 77, 0, 1:] = 0 if bad == np.inf else bad
    out, lse = cuflash.attention(q, k, v, causal=True, query_offset=600, return_lse=True)
    assert np.isnan(out[0, 77]).all() and np.isnan(lse[0, 0, 77])
    others = np.arange(600) != 77
    np.testing.assert_allclose(out[0, others], reference.attention(q, k, v)[0, others], rtol=1e-9, atol=1e-12)


def test_dropout_takes_exactly_the_weights_of_dropout_mask():
    """With equal scores and V = 1, out is the number of kept weights."""
    dropout = (0.37, 2**63 + 11, (3, 1, 500, 7))
    len_q, len_k, heads = 70, 301, 3
    q, k = np.zeros((2, len_q, heads, 4), np.float32), np.zeros((2, len_k, heads, 4), np.float32)
    v = np.broadcast_to(np.eye(len_k, dtype=np.float32)[None, :, None, :], (2, len_k, heads, len_k))
    out = cuflash.attention(q, k, v, dropout=dropout)
    keep = cuflash.dropout_mask(2, heads, len_q, len_k, dropout)
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3) != 0, keep)
    np.testing.assert_allclose(out[out != 0], 1 / len_k / (1 - 0.37), rtol=1e-6)
    assert not np.array_equal(keep, cuflash.dropout_mask(2, heads, len_q, len_k, (0.37, 11)))


# ---- targets


def odd_target(shape, dtype, rng):
    """An array of NaN whose axes lie in memory in any order, some backwards, with gaps."""
    order = rng.permutation(len(shape))
    memory = np.full([2 * shape[axis] + 1 for axis in order], np.nan, dtype)
    view = memory[tuple(slice(None, None, rng.choice([2, -2])) for _ in order)]
    view = view[tuple(slice(0, shape[axis]) for axis in order)]
    return view.transpose(np.argsort(order))


@pytest.mark.parametrize("seed", range(8))
def test_targets_of_any_stride(seed):
    rng = np.random.default_rng(seed)
    build = Build(
        head_dim=8, bias="same", alibi=True, sink=True, dlse=True, sequences=rng.choice(["plain", "packed"])
    )
    (call,) = list_of_calls(1, seed=seed, build=build, max_scores=2**14, extreme=False)
    call.options["out_dtype"] = str(rng.choice(["float32", "float16"]))
    out, lse = cuflash.attention(call.q, call.k, call.v, **call.options, return_lse=True)
    targets = odd_target(out.shape, out.dtype, rng), odd_target(lse.shape, lse.dtype, rng)
    got = cuflash.attention(call.q, call.k, call.v, **call.options, return_lse=True, out=targets)
    assert all(a is b for a, b in zip(got, targets, strict=True))
    np.testing.assert_array_equal(targets[0], out)
    np.testing.assert_array_equal(targets[1], lse)

    arrays, options = (call.dout, call.q, call.k, call.v, out, lse), {**call.options, "dlse": call.dlse}
    grads = cuflash.attention_backward(*arrays, **options)
    targets = Gradients(*(odd_target(x.shape, x.dtype, rng) for x in grads))
    got = cuflash.attention_backward(*arrays, **options, grads=targets)
    for name, expected in grads._asdict().items():
        assert getattr(got, name) is getattr(targets, name)
        np.testing.assert_array_equal(getattr(targets, name), expected, err_msg=name)


# ---- threads


def everything(options, bias_shape, dtype=np.float32):
    """out, lse and all gradients of a problem of several items."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 300, heads, 16)).astype(dtype) for heads in (4, 2, 2, 4))
    options = {
        "bias": rng.standard_normal(bias_shape).astype(np.float32),
        "alibi_slopes": np.full(4, 0.01, np.float32),
        "sink": np.zeros(4, np.float32),
        **options,
    }
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    return [out, lse, *cuflash.attention_backward(dout, q, k, v, out, lse, **options, dlse=lse)]


@pytest.mark.parametrize(
    "bias_shape", [(1, 1, 300, 300), (2, 1, 300, 1), (1, 4, 1, 300), (1, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout": (0.1, 3)}, {"block_mask": 64}], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(options, bias_shape, monkeypatch):
    if "block_mask" in options:
        options = {"block_mask": BlockMask.bigbird(300, 300, 64, 32)}
    monkeypatch.setattr(tiled_workers, "MIN_FLOP_PER_THREAD", 1.0)
    monkeypatch.setattr(tiled_backward, "TILE_Q", 32)
    monkeypatch.setattr(tiled_backward, "N_ITEMS", 64)
    results = []
    for n_threads in (1, 2, 7, 7):
        monkeypatch.setattr(tiled_workers, "n_cores", lambda n=n_threads: n)
        monkeypatch.setattr(tiled_workers, "n_blas_threads", lambda n=n_threads: n)
        results.append(everything(options, bias_shape))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_as_many_threads_as_blas_has(monkeypatch):
    started = []

    class Thread(threading.Thread):
        def start(self):
            started.append(self)
            super().start()

    monkeypatch.setattr(tiled_workers.threading, "Thread", Thread)
    monkeypatch.setattr(tiled_workers, "MIN_FLOP_PER_THREAD", 1.0)
    monkeypatch.setattr(tiled_workers, "n_cores", lambda: 2)
    q = np.ones((1, 256, 4, 8), np.float32)
    with threadpool_limits(1, user_api="blas"):
        cuflash.attention(q, q, q)
    assert not started
    if tiled_workers.n_blas_threads() > 1:
        cuflash.attention(q, q, q)
        assert len(started) == 1


def test_blas_threads_are_as_before():
    def n_threads():
        return [library.num_threads for library in BLAS.lib_controllers]

    before = n_threads()
    q = np.ones((1, 64, 2, 8), np.float32)
    inside = []
    cuflash.attention(q, q, q, progress=lambda done, total: inside.append(n_threads()))
    assert all(set(n) == {1} for n in inside[:-1])
    assert n_threads() == before

    gate = threading.Barrier(2)  # two calls that overlap, and end in another order than they began
    other = threading.Thread(target=lambda: cuflash.attention(q, q, q, progress=lambda *_: gate.wait(60)))
    other.start()
    cuflash.attention(q, q, q, progress=lambda *_: gate.wait(60))
    other.join()
    assert n_threads() == before


def test_an_error_in_one_thread_ends_the_call(monkeypatch):
    monkeypatch.setattr(tiled_workers, "MIN_FLOP_PER_THREAD", 1.0)
    monkeypatch.setattr(tiled_workers, "n_cores", lambda: 4)
    monkeypatch.setattr(tiled_workers, "n_blas_threads", lambda: 4)
    main = threading.current_thread()

    def break_one(*args, **kwargs):
        if threading.current_thread() is not main:
            raise MemoryError("no more")
        return product(*args, **kwargs)

    monkeypatch.setattr(tiled_backward, "product", break_one)
    before = [library.num_threads for library in BLAS.lib_controllers]
    with pytest.raises(MemoryError, match="no more"):
        everything({}, (1, 1, 300, 300))
    assert [library.num_threads for library in BLAS.lib_controllers] == before


# ---- progress


def test_progress_counts_items_in_the_calling_thread(monkeypatch):
    monkeypatch.setattr(tiled_workers, "MIN_FLOP_PER_THREAD", 1.0)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 200, 3, 8), dtype=np.float32) for _ in range(3))
    seen = []

    def progress(done, total):
        assert threading.current_thread() is threading.main_thread()
        seen.append((done, total))

    out, lse = cuflash.attention(q, k, v, return_lse=True, progress=progress)
    cuflash.attention_backward(q, q, k, v, out, lse, progress=progress)
    ends = [n for n, (done, total) in enumerate(seen) if done == total]
    assert len(ends) == 2 and ends[1] == len(seen) - 1
    for part in (seen[: ends[0] + 1], seen[ends[0] + 1 :]):
        done = [n for n, _ in part]
        assert done == sorted(set(done)) and len({total for _, total in part}) == 1


def test_an_error_of_progress_stops_the_call():
    q = np.ones((1, 4000, 1, 8), np.float32)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cuflash.attention(q, q, q, progress=stop)
    assert cuflash.attention(q, q, q).shape == q.shape


# ---- memory


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_does_not_grow_with_the_scores(dtype):
    """Above inputs and outputs, at 32,768 keys: buffers of each thread, two numbers per query row."""
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((1, 1024, 2, 64)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((1, 32768, 2, 64)).astype(dtype) for _ in range(2))
    out, lse = np.empty_like(q), np.empty((1, 2, 1024), np.float32)
    grads = Gradients(*(np.empty_like(x) for x in (q, k, v)))
    tracemalloc.start()
    try:
        cuflash.attention(q, k, v, out=(out, lse), return_lse=True)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        cuflash.attention_backward(dout, q, k, v, out, lse, grads=grads)
        backward = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert forward < 20e6 and backward < 30e6, (forward, backward)  # the scores alone would be 268 MB


def test_memory_of_block_masks():
    """The same where a quarter of the blocks is kept: more keys are loaded at once."""
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((1, 1024, 2, 64), np.float32) for _ in range(2))
    k, v = (rng.standard_normal((1, 32768, 2, 64), np.float32) for _ in range(2))
    options = {"block_mask": BlockMask.from_dense(rng.random((8, 256)) < 0.25, 128, 128)}
    tracemalloc.start()
    try:
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        cuflash.attention_backward(dout, q, k, v, out, lse, **options)
        backward = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert forward < 40e6 and backward < 80e6, (forward, backward)  # 34 MB of it are dk and dv


# ---- tiles that are skipped


def n_computed(problem_options, len_q=1024, len_k=1024):
    """Pairs in the tiles that the forward and the backward compute, of one head."""
    q, k = np.zeros((1, len_q, 1, 8), np.float32), np.zeros((1, len_k, 1, 8), np.float32)
    problem, operands = check("forward", {"q": q, "k": k, "v": k}, problem_options)
    visible = Visible(problem, operands, reference.sequences(problem, operands)[0], 0)
    forward = [
        tile
        for item in tiled.items(problem, operands)
        for _, _, tiles in visible.key_tiles(item.i0, item.i1, tiled.TILE_KV, 2**18)
        for tile in tiles
    ]
    backward = [
        tile
        for item in tiled_backward.items(problem, operands)
        for _, _, tiles in visible.query_tiles(item.j0, item.j1, tiled_backward.TILE_Q, 2**18)
        for tile in tiles
    ]
    return [sum(math.prod(tile.shape) for tile in tiles) for tiles in (forward, backward)]


def test_hidden_tiles_are_not_computed():
    full = 1024 * 1024
    assert n_computed({}) == [full, full]
    for n in n_computed({"causal": True}):
        assert 0.5 * full < n < 0.65 * full
    for n in n_computed({"window": (63, 0)}):
        assert n < 0.35 * full
    for n in n_computed({"mask": np.arange(1024)[:, None] // 256 == np.arange(1024) // 256}):
        assert n < 0.5 * full
    assert n_computed({"causal": True, "query_offset": -1024}) == [0, 0]


@pytest.mark.parametrize("block", [64, 128, 256])
def test_work_falls_with_the_blocks_kept(block):
    rng = np.random.default_rng(0)
    dense = rng.random((1024 // block, 1024 // block)) < 0.3
    kept = int(dense.sum()) * block * block
    assert n_computed({"block_mask": BlockMask.from_dense(dense, block, block)}) == [kept, kept]


# ---- gradients by differences


@pytest.mark.parametrize("seed", range(12))
def test_gradients_are_those_of_finite_differences(seed):
    """Central differences in float64 along random directions, for out and lse together."""
    rng = np.random.default_rng(seed)
    features = {name: bool(rng.integers(2)) for name in ("causal", "window", "softcap", "mask", "dropout")}
    build = Build(
        dtype="float64", head_dim=8, alibi=True, bias="same", sink=True, dlse=True,
        sequences=str(rng.choice(["plain", "key_lengths", "packed"])), **features,
    )  # fmt: skip
    (call,) = list_of_calls(1, seed=100 + seed, build=build, max_length=40, max_scores=2**12, extreme=False)
    inputs = {"q": call.q, "k": call.k, "v": call.v}
    inputs |= {name: call.options[name] for name in ("bias", "sink", "alibi_slopes")}
    others = {name: value for name, value in call.options.items() if name not in inputs}

    def loss(values):
        arrays = [values[name] for name in "qkv"]
        options = {name: values[name] for name in ("bias", "sink", "alibi_slopes")}
        out, lse = cuflash.attention(*arrays, **options, **others, return_lse=True)
        return (out * call.dout).sum() + (np.where(np.isneginf(lse), 0, lse) * call.dlse).sum()

    out, lse = cuflash.attention(call.q, call.k, call.v, **call.options, return_lse=True)
    grads = cuflash.attention_backward(
        call.dout, call.q, call.k, call.v, out, lse, dlse=call.dlse, **call.options
    )
    for name, array in inputs.items():
        direction = rng.standard_normal(array.shape)
        step = 1e-5
        up, down = (loss(inputs | {name: array + sign * step * direction}) for sign in (1, -1))
        expected, got = (up - down) / (2 * step), (getattr(grads, "d" + name) * direction).sum()
        assert np.isclose(got, expected, rtol=1e-6, atol=1e-6), (name, got, expected, call)


# ---- warnings


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, 6e4])
def test_numbers_that_are_not_finite_or_do_not_fit_warn_of_nothing(bad):
    """Results say what they are; a warning of one thread or another would not say where."""
    rng = np.random.default_rng(0)
    for which in range(4):
        arrays = [rng.standard_normal((1, n, 2, 8)).astype(np.float16) for n in (5, 9, 9, 5)]
        arrays[which][0, 3] = bad
        out, lse, vjp = cuflash.attention_vjp(*arrays[:3], return_lse=True, scale=50.0, causal=True)
        vjp(arrays[3], np.ones_like(lse))
        cuflash.merge([out, out], [lse, lse])
        cuflash.row_stats(*arrays[:2], causal=True)
        cuflash.key_importance(*arrays[:2], causal=True)
