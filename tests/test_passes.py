"""The shared passes: column sums, merging, the dropout mask; in the emulator and on a GPU."""

import re
import sys

import numpy as np
import pytest

import cuflash
from cuflash import build, devices, introspect, passes, plan, rows
from cuflash.arrays import numpy_dtype
from cuflash.check import check
from cuflash.devices import EMULATED

merge = sys.modules["cuflash.merge"]  # the module: cuflash.merge is the function

COLUMNS = {
    "causal": ("float32", {"causal": True}),
    "window, sink": ("bfloat16", {"window": (40, 3), "sink": np.array([0.5, -np.inf], np.float32)}),
    "softcap": ("float64", {"softcap": 3.0, "query_offset": -20}),
    "packed": ("float32", {"cu_seqlens_q": [0, 100, 100, 140], "cu_seqlens_k": [0, 30, 50, 110]}),
    "blocks": ("float16", {"block_mask": cuflash.BlockMask.causal(150, 130, 16, 48)}),
    "bias, mask": ("float32", {"bias": np.linspace(-9, 2, 130, dtype="f4"), "mask": np.arange(130) % 3 > 0}),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_column_sums_are_key_importance(name):
    dtype, options = COLUMNS[name]
    random = np.random.default_rng(5)
    batch = () if name == "packed" else (2,)
    q, k = (random.standard_normal((*batch, n, h, 40)).astype(dtype) for n, h in ((150, 2), (130, 1)))
    _, lse = cuflash.reference.attention(q, k, k, return_lse=True, **options)
    problem, operands = check("forward", {"q": q, "k": k, "v": k}, options)
    operands.lse = lse.astype(problem.accumulator).reshape(-1, 2, 150)
    got = passes.column_sums(problem, operands, EMULATED)
    expected = cuflash.key_importance(q, k, **options)
    assert got.dtype == problem.accumulator and got.shape == (len(operands.lse), 2, 130)
    assert expected.any() and np.abs(got.reshape(expected.shape) - expected).max() < 2e-5


def test_key_importance_asks_a_kernel():
    """What key_importance does on a GPU, here in the emulator: a forward for lse, then the column sums."""
    random = np.random.default_rng(7)
    q, k = (
        random.standard_normal((2, 70, 4, 24), np.float32),
        random.standard_normal((2, 90, 2, 24), np.float32),
    )
    for options in (
        {"causal": True, "dropout": (0.5, 3), "out_dtype": "float16", "precision": "float32"},
        {"layout": "bhsd", "key_lengths": [80, 0], "alibi_slopes": np.ones(4, np.float32)},
    ):
        arrays = [x.swapaxes(1, 2) if "layout" in options else x for x in (q, k)]
        problem, operands = check("forward", dict(zip("qkv", (*arrays, arrays[1]), strict=True)), options)
        got = introspect._sums_by_kernel(problem, operands, EMULATED)
        expected = cuflash.key_importance(*arrays, **options)
        assert expected.any() and np.abs(got - expected).max() < 2e-5


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_merged_parts_are_the_whole(dtype, layout):
    random = np.random.default_rng(6)
    batch, len_q, heads, dim = 2, 7, 2, 40
    rows = (len_q, heads) if layout == "bshd" else (heads, len_q)
    outs = [
        random.standard_normal((batch, *rows, 2 * dim)).astype(numpy_dtype(dtype))[..., ::2] for _ in "123"
    ]
    accumulator = "float64" if dtype == "float64" else "float32"
    lses = [(random.standard_normal((batch, heads, len_q)) * 20).astype(accumulator) for _ in "123"]
    for lse in lses:
        lse[0, 0, 0] = -np.inf  # nothing in any part
    lses[1][0, 0, 1] = -np.inf
    outs[1][(0, 1, 0) if layout == "bshd" else (0, 0, 1)] = (
        np.nan
    )  # of a part that holds nothing: must not count
    lses[2][1, 1, 3] = np.nan
    lses[2][1, 1, 4] = np.inf
    out, lse = merge._by_kernel(np, outs, lses, layout, accumulator, EMULATED)
    expected_out, expected_lse = cuflash.merge(outs, lses, layout=layout)
    assert out.dtype == lse.dtype == accumulator and out.flags.c_contiguous
    assert (out[0, 0, 0] == 0).all() and np.isneginf(lse[0, 0, 0]) and np.isnan(out).sum() == 2 * dim
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-6)
    packed = merge._by_kernel(np, [x[1] for x in outs], [x[1] for x in lses], layout, accumulator, EMULATED)
    assert np.array_equal(packed[0], out[1], equal_nan=True) and packed[1].shape == (heads, len_q)


@pytest.mark.parametrize("shift", [None, (1, 2, 65, 30)])
@pytest.mark.parametrize("seed", [2**63 + 12345, np.array(99, np.uint64)])
def test_dropout_mask_is_numpys(shift, seed):
    expected = cuflash.dropout_mask(2, 3, 5, 131, (0.4, int(seed), shift))
    keep = passes.dropout_mask((2, 3, 5, 131), 0.4, seed, shift or (0, 0, 0, 0), EMULATED)
    assert keep.dtype == bool and np.array_equal(keep, expected) and 0.5 < keep.mean() < 0.7
    assert passes.dropout_mask((1, 1, 2, 3), 0.0, seed, (0, 0, 0, 0), EMULATED).all()
    assert passes.dropout_mask((1, 1, 0, 3), 0.4, seed, (0, 0, 0, 0), EMULATED).shape == (1, 1, 0, 3)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("row", passes.ROWS, ids=lambda row: row.name)
def test_passes_compile(row, arch):
    q = np.zeros((1, 8, 2, 4), np.float32)
    problem, _ = check("forward", {"q": q, "k": q, "v": q}, {"dropout": (0.5, 1), "causal": True})
    found = plan.consider(problem, devices.named(arch), row)
    (built,) = build.compile_all([one.job for one in found.launches])
    assert built.entries[row.name].spill_stores == 0 and built.warnings == ()


def test_every_pass_is_launched():
    """Every entry point of every kernel file is a step of some row, or is launched by a backend."""
    rows_ = (*rows.FORWARD, *rows.BACKWARD, *passes.ROWS)
    launched = {step.entry for row in rows_ for step in row.steps} | {"pass_lengths"}
    texts = [(build.kernels_directory() / f"{name}.cu").read_text() for name in build.kernel_files()]
    found = re.findall(r"KERNEL\(.*?\) (\w+)\(|CLUSTER_KERNEL\(.*?(\w+)\)\(", "\n".join(texts))
    assert {"".join(names) for names in found} == launched


@pytest.mark.gpu
def test_on_the_gpu():
    import cupy

    random = np.random.default_rng(1)
    outs = random.standard_normal((3, 2, 50, 4, 72)).astype(np.float16)
    lses = random.standard_normal((3, 2, 4, 50), np.float32)
    out, lse = cuflash.merge(list(cupy.asarray(outs)), list(cupy.asarray(lses)))
    expected = cuflash.merge(list(outs), list(lses))
    assert isinstance(out, cupy.ndarray) and out.dtype == np.float32
    np.testing.assert_allclose(out.get(), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse.get(), expected[1], rtol=1e-6, atol=1e-6)
    for shift in (None, (1, 2, 65, 30)):
        for seed in (2**63 + 5, cupy.asarray(np.array(7, np.uint64))):
            keep = cuflash.dropout_mask(2, 3, 33, 500, (0.3, seed, shift), device=0)
            seed = seed if isinstance(seed, int) else 7
            assert np.array_equal(keep.get(), cuflash.dropout_mask(2, 3, 33, 500, (0.3, seed, shift)))
    for dtype, options in COLUMNS.values():
        batch = () if "cu_seqlens_q" in options else (2,)
        q, k = (random.standard_normal((*batch, n, h, 40)).astype(dtype) for n, h in ((150, 2), (130, 1)))
        there = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        got = cuflash.key_importance(cupy.asarray(q), cupy.asarray(k), **there)
        assert isinstance(got, cupy.ndarray)
        expected = cuflash.key_importance(q.astype("f8"), k.astype("f8"), **{
            n: x.astype("f8") if n == "sink" else x for n, x in options.items()
        })  # fmt: skip
        assert got.shape == expected.shape and np.abs(got.get() - expected).max() < 2e-4
