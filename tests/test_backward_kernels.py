"""bwd_01_naive and bwd_02_tiled on a CPU: results, traffic, determinism, gradients of options."""

import numpy as np
import pytest
from close import Judge
from in_emulator import check_case, check_orders
from problems import Build, list_of_calls

import cuflash
from cuflash import checks, emulator
from cuflash.arrays import numpy_dtype
from cuflash.cases import cases
from cuflash.emulator.module import recording

ROWS = ("bwd_01_naive", "bwd_02_tiled")
QUICK = {case.name: case for case in cases(quick=True)}
ALL = {case.name: case for case in cases()}
# name -> (batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v), dtype, options
TRAFFIC = {
    "grouped": ((2, 70, 93, 4, 2, 64, 64), "float32", {}),
    "causal": ((1, 130, 150, 2, 1, 128, 128), "float16", {"causal": True}),
    "chunks": ((1, 40, 50, 2, 1, 320, 257), "bfloat16", {"out_dtype": "float32"}),
    "few keys": ((1, 93, 70, 2, 2, 40, 200), "float64", {"causal": True, "query_offset": 5}),
    "deterministic": ((1, 93, 130, 4, 2, 64, 32), "float32", {"causal": True, "deterministic": True}),
    "deterministic chunks": ((1, 70, 40, 2, 1, 264, 40), "float32", {"deterministic": True}),
}


def draw(shape, dtype, options, seed=0):
    """dout, q, k, v, out, lse; out and lse need not be a forward's to count bytes."""
    random = np.random.default_rng(seed)
    batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v = shape
    out = (len_q, heads, head_dim_v)
    sizes = [out, (len_q, heads, head_dim), (len_k, heads_k, head_dim), (len_k, heads_k, head_dim_v), out]
    result = options.get("out_dtype", dtype)
    dtypes = [numpy_dtype(name) for name in (result, dtype, dtype, dtype, result)]
    arrays = [random.standard_normal((batch, *s)).astype(d) for s, d in zip(sizes, dtypes, strict=True)]
    accumulator = np.float64 if dtype == "float64" else np.float32
    return [*arrays, np.full((batch, heads, len_q), 3, accumulator)]


def moved(kernel, arrays, **options):
    """Bytes (read, written) by array that one call moves, as counted by the emulator; an addition is both."""
    total = {}
    with recording() as launches:
        cuflash.attention_backward(*arrays, kernel=kernel, **options)
    for launch in launches:
        for name, (read, written, added) in launch.arrays.items():
            before = total.get(name, (0, 0))
            total[name] = before[0] + read + added, before[1] + written + added
    return {name.removeprefix("workspace."): both for name, both in total.items() if any(both)}


def modelled(kernel, arrays, **options):
    _dout, q, k, v, _out, _lse = arrays
    plan = cuflash.explain(q, k, v, kernel=kernel, backward=True, **options)
    return {name: both for name, both in plan.traffic.items() if any(both)}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", QUICK)
def test_quick_cases(row, name):
    for dtype in ("float32", "bfloat16"):
        check_case(row, "backward", QUICK[name], dtype, may_refuse=row != "bwd_02_tiled")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ALL)
def test_all_cases(name, dtype):
    expected = checks.Expected(ALL[name], dtype)
    for row in ROWS:
        check_orders(row, "backward", expected)


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("row", ROWS)
def test_traffic_is_what_the_row_says(row, name):
    shape, dtype, options = TRAFFIC[name]
    arrays = draw(shape, dtype, options)
    expected = modelled(row, arrays, **options)
    assert expected["k"][0] > 0 and moved(row, arrays, **options) == expected


def run(call, row="bwd_02_tiled", judge=None):
    """The gradients of a Call, judged."""
    judge = judge or Judge(call)
    out, lse = judge.saved()
    gradients = cuflash.attention_backward(
        call.dout, call.q, call.k, call.v, out, lse,
        dlse=call.dlse, deterministic=call.deterministic, kernel=row, **call.options,
    )  # fmt: skip
    judge.backward(gradients, out, lse)
    return gradients


def same_bits(one, two):
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if a is not None]
    return len(pairs) >= 3 and all(a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.parametrize("seed", [1, 2])
def test_deterministic_gradients_ignore_the_order_of_threads_and_blocks(seed):
    build = Build(bias="float32", alibi=True, sink=True, deterministic=True, causal=True)
    (call,) = list_of_calls(1, seed=7, build=build, max_length=130, extreme=False)
    first = run(call)
    with emulator.options(seed=seed):
        assert same_bits(first, run(call))


BIAS_SHAPES = [(b, h, i, j) for b in (1, 2) for h in (1, 4) for i in (1, 70) for j in (1, 50)]


@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_dbias_of_every_broadcast_shape(shape):
    random = np.random.default_rng(3)
    q, dout = random.standard_normal((2, 2, 70, 4, 16), np.float32)
    k, v = random.standard_normal((2, 2, 50, 2, 16), np.float32)
    options = {"bias": random.standard_normal(shape, np.float32), "causal": True}
    saved = cuflash.reference.attention(q, k, v, return_lse=True, **options)
    arrays = dout, q, k, v, *(x.astype(np.float32) for x in saved)
    got = cuflash.attention_backward(*arrays, kernel="bwd_02_tiled", **options).dbias
    exact = cuflash.reference.attention_backward(*arrays, **options).dbias
    assert got.shape == shape and np.abs(got - exact).max() < 2e-5 * max(1, np.abs(exact).max())


@pytest.mark.parametrize("sizes", [(0, 2, 9, 5), (2, 0, 9, 5), (2, 2, 0, 5), (2, 2, 9, 0)])
def test_dbias_of_empty_calls(sizes):
    batch, heads, len_q, len_k = sizes
    q, k = np.ones((batch, len_q, heads, 8), np.float32), np.ones((batch, len_k, heads, 8), np.float32)
    lse = np.full((batch, heads, len_q), -np.inf, np.float32)
    for kept in np.ndindex(2, 2, 2, 2):
        bias = np.zeros([n if keep else 1 for n, keep in zip(sizes, kept, strict=True)], np.float32)
        gradients = cuflash.attention_backward(q, q, k, k, q * 0, lse, bias=bias, kernel="bwd_02_tiled")
        assert gradients.dbias.shape == bias.shape and not gradients.dbias.any()


def test_hidden_blocks_are_not_read():
    """Time of a block mask falls with the blocks kept: Q is read for kept blocks alone."""
    arrays = draw((1, 256, 256, 1, 1, 64, 64), "float32", {})
    read = {}
    for left in (64, 256):
        mask = cuflash.BlockMask.window(256, 256, left, 0, 64, 64)
        read[left] = moved("bwd_02_tiled", arrays, block_mask=mask, causal=True)["q"][0]
    rows = {64: 7 * 64, 256: 10 * 64}
    assert read == {left: n * 64 * 4 for left, n in rows.items()}
