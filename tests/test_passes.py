"""The shared passes in the emulator: column sums, merging, the dropout mask, conversion of dtype, strides."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import args, build, emulator, passes, plan
from cuflash.check import check
from cuflash.devices import EMULATED
from cuflash.problem import Operands
from cuflash.row import Tile
from cuflash.rows import FWD_02

CODES = {np.dtype(np.float16): 0, np.dtype(ml_dtypes.bfloat16): 1, np.dtype("f4"): 2, np.dtype("f8"): 3}


def launch(entry, grid, record, params, **buffers):
    """Run one entry point; `record` holds sizes and strides, buffers are put where its fields say."""
    problem, _ = check("forward", dict.fromkeys("qkv", np.zeros((1, 1, 1, 1), np.float32)))
    every = plan.params_of(problem, FWD_02, Tile(64, 64, 4, chunk=64))
    every |= {"SMEM_BYTES": -1, "ARGS_BYTES": args.args_bytes()} | params
    module = emulator.compile(build.expand(entry.split("__")[0], emulated=True), every, entry)
    function = module.get_function(entry)
    function((grid, 1, 1), (128, 1, 1), (record.tobytes(),), buffers=buffers)


def address(array):
    return array.__array_interface__["data"][0]


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


def test_merged_parts_are_the_whole():
    random = np.random.default_rng(6)
    n, batch, len_q, heads, dim = 3, 2, 7, 2, 40
    parts = random.standard_normal((n, batch, len_q, heads, dim), np.float32)
    lses = random.standard_normal((n, batch, heads, len_q), np.float32) * 20
    lses[:, 0, 0, 0] = -np.inf  # nothing in any part
    lses[1, 0, 0, 1] = -np.inf
    parts[1, 0, 1, 0] = np.nan  # of a part that holds nothing: must not count
    lses[2, 1, 1, 3] = np.nan
    out, lse = np.full((batch, len_q, heads, dim), np.nan, "f4"), np.full((batch, heads, len_q), np.nan, "f4")
    problem, operands = check("forward", {"q": out, "k": out, "v": out})
    operands = replace(operands, out=out, lse=lse)
    record = args.record_of(problem, operands)
    record["n_splits"] = n
    record["O"]["data"], record["lse"]["data"] = address(out), address(lse)
    record["workspace"][:2] = address(parts), address(lses)
    launch("pass_merge", batch * len_q * heads // 4 + 1, record, {}, out=out, lse=lse, parts=parts, lses=lses)
    clean = np.where(np.isneginf(lses.transpose(0, 1, 3, 2))[..., None], 0, parts)
    expected_out, expected_lse = cuflash.merge(list(clean), list(lses))
    assert (out[0, 0, 0] == 0).all() and np.isneginf(lse[0, 0, 0])
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shift", [None, (1, 2, 65, 30)])
def test_dropout_mask_is_numpys(shift):
    dropout = (0.4, 2**63 + 12345, *([shift] if shift else []))
    expected = cuflash.dropout_mask(2, 3, 5, 131, dropout)
    keep = np.full(expected.shape, 7, np.uint8)
    operands = Operands(mask=keep, seed=dropout[1], counter_shift=shift or (0, 0, 0, 0))
    problem, _ = check(
        "forward", dict.fromkeys("qkv", np.zeros((2, 5, 3, 4), np.float32)), {"dropout": dropout}
    )
    record = args.record_of(replace(problem, len_k=131), operands)
    record["seed"], record["mask"]["data"] = dropout[1], address(keep)
    launch("pass_dropout_mask", 8, record, {"DROPOUT": 1}, keep=keep)
    assert np.array_equal(keep, expected)


@pytest.mark.parametrize("target", CODES)
@pytest.mark.parametrize("source", CODES)
def test_convert(source, target):
    random = np.random.default_rng(8)
    numbers = random.standard_normal((2, 3, 5, 70)).astype(source)[:, ::-1, :, ::2]
    result = np.zeros((2, 3, 35, 5), target).transpose(0, 1, 3, 2)
    problem, _ = check("forward", dict.fromkeys("qkv", np.zeros((2, 5, 3, 4), np.float32)))
    record = args.record_of(replace(problem, len_k=35, scale=1.0), Operands(bias=numbers))
    args.fill(record, "dbias", result)
    record["bias"]["data"], record["dbias"]["data"] = address(numbers), address(result)
    params = {"DTYPE": CODES[source], "OUT_DTYPE": CODES[target]}
    launch("pass_convert", 8, record, params, numbers=numbers, result=result)
    wide = np.float64 if source == np.float64 and target == np.float64 else np.float32
    assert np.array_equal(result, numbers.astype(wide).astype(target))
