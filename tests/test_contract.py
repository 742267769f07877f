"""Calls drawn from the whole contract, on every path, against the specification.

| path | what runs | every run | pytest -m full |
|---|---|---|---|
| NumPy | tiled.py | 150 calls | 5,000 |
| emulated | every row, in the emulator | 7 builds | 48 builds, 1,000 calls; 40 builds of unstarred rows |
| GPU | every row | 12 builds | 48 builds, 5,000 calls; 40 builds of unstarred rows |

Starred rows take every call of the covering list of builds.  Unstarred rows refuse most of them, so they get
a list of their own, of the options that they do.  A row's refusal is a sentence that begins with its name.
The names of the long runs begin with a shard, for several processes where xdist is not installed:
pytest -m "full and gpu" -k shard03.
With CUFLASH_DRAWN=DIR a long run of starred rows on a GPU writes DIR/<build>.json: how many calls, and which
rows were judged how often; `python tests/drawn.py DIR...` makes one record of them.
"""

import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from close import Judge, to_numpy
from hypothesis import given, settings
from problems import BUILD_VALUES, Build, calls, copy_to_device, covering_builds, list_of_calls

import cuflash
from cuflash import launch, plan, records, results, rows
from cuflash.arrays import array_spec
from cuflash.check import check
from cuflash.copies import BY_TMA
from cuflash.devices import EMULATED

N_SHARDS = 16
CORE = ("dtype", "head_dim", "head_dim_v", "out_dtype", "dout_dtype", "causal", "dlse", "deterministic")
ROWS = {"forward": rows.FORWARD, "backward": rows.BACKWARD}
SMALL = dict(max_length=70, max_scores=2**12)  # for the emulator
MEDIUM = dict(max_length=200, max_scores=2**15)
JUDGED = Counter()  # row -> results of it that were judged right; "calls": calls on a GPU, all rows right


def builds(step=1, core=False):
    """Builds to parametrize with; every pair of features meets in the whole list."""
    if core:
        found = covering_builds(40, values={name: BUILD_VALUES[name] for name in CORE})
    else:
        found = covering_builds(48)
    return [
        pytest.param(build, id=f"shard{n % N_SHARDS:02}-{n:02}-{build.dtype}-{build.head_dim}")
        for n, build in enumerate(found)
        if n % step == 0
    ]


def check_rows(call, judge, starred=True):
    """Forward and backward of a call by every row that takes it, with the call's own kind of arrays."""
    for row in ROWS["forward"]:
        if row.starred or not starred:
            found = forward(call, row)
            if found is not None:
                with named(row):
                    judge.forward(*found)
    saved = judge.saved()
    for row in ROWS["backward"]:
        if row.starred or not starred:
            gradients = backward(call, saved, row)
            if gradients is not None:
                with named(row):
                    judge.backward(gradients, *saved)


@contextmanager
def named(row):
    """A failure within says whose it is; what passes is counted."""
    try:
        yield
        JUDGED[row.name] += 1
    except AssertionError as failure:
        failure.add_note(f"by {row.name}")
        raise


def unless_refused(row, call, run):
    """What run() gives; None where the row refuses: it is unstarred, not made for dtype and sizes, or copies
    by TMA what TMA cannot address."""
    try:
        return run()
    except cuflash.CuflashError as refusal:
        is_covered = row.starred and row.covers(call.build.dtype, call.q.shape[-1], call.v.shape[-1])
        may_refuse = not is_covered or str(refusal).startswith(f"{row.name} {BY_TMA}")
        assert may_refuse and str(refusal).startswith(f"{row.name} "), refusal
        return None


def forward(call, row):
    arrays = call.q, call.k, call.v
    return unless_refused(
        row, call, lambda: cuflash.attention(*arrays, kernel=row.name, return_lse=True, **call.options)
    )


def backward(call, saved, row=None):
    if not isinstance(call.q, np.ndarray):
        import cupy

        saved = [cupy.asarray(array) for array in saved]
    arrays = (call.dout, call.q, call.k, call.v, *saved)
    options = dict(call.options, dlse=call.dlse, deterministic=call.deterministic)
    if row is None:
        return cuflash.attention_backward(*arrays, **options)
    return unless_refused(row, call, lambda: cuflash.attention_backward(*arrays, kernel=row.name, **options))


# ---- NumPy


def check_numpy(call):
    judge = Judge(call)
    judge.forward(*cuflash.attention(call.q, call.k, call.v, return_lse=True, **call.options))
    saved = judge.saved()
    judge.backward(backward(call, saved), *saved)


@settings(max_examples=150)
@given(calls(max_scores=2**16))
def test_numpy(call):
    check_numpy(call)


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_numpy_in_full(part):
    @settings(max_examples=250)
    @given(calls())
    def check_them(call):
        check_numpy(call)

    check_them()


# ---- emulated


def drawn(build, n, sizes, check_one):
    """Hypothesis: n calls of one build."""

    @settings(max_examples=n)
    @given(calls(build=build, **sizes))
    def check_them(call):
        check_one(call)

    check_them()


def check_emulated(call):
    check_rows(call, Judge(call))


def check_emulated_unstarred(call):
    check_rows(call, Judge(call), starred=False)


@pytest.mark.parametrize("build", builds(step=8))
def test_emulated(build):
    drawn(build, 4, SMALL, check_emulated)


@pytest.mark.parametrize("build", builds(step=40, core=True))
def test_emulated_unstarred(build):
    drawn(build, 6, SMALL, check_emulated_unstarred)


@pytest.mark.full
@pytest.mark.parametrize("build", builds())
def test_emulated_in_full(build):
    drawn(build, 21, SMALL, check_emulated)


@pytest.mark.full
@pytest.mark.parametrize("build", builds(core=True))
def test_emulated_unstarred_in_full(build):
    drawn(build, 8, SMALL, check_emulated_unstarred)


@pytest.mark.parametrize(
    "row",
    [None, *(row for row in rows.BACKWARD if row.starred)],
    ids=lambda row: getattr(row, "name", "numpy"),
)
def test_a_key_that_bias_hides_gets_nothing_from_a_row_of_nan(row):
    """Key 0 makes every row NaN; key 1 is visible to none of them."""
    q, k = np.ones((2, 1, 40, 1, 16), np.float16)
    k[0, 0] = np.nan
    bias = np.zeros(40, np.float16)
    bias[1] = -np.inf
    lse = np.full((1, 1, 40), np.nan, np.float32)
    kernel = None if row is None else row.name
    gradients = cuflash.attention_backward(q, q, k, q, k * np.nan, lse, bias=bias, kernel=kernel)
    for name in ("dk", "dv"):
        found = np.isnan(getattr(gradients, name)[0, :, 0])
        assert not found[1].any() and found[2:].all(), name


@pytest.mark.parametrize(
    "row", [None, *rows.BACKWARD], ids=lambda row: getattr(row, "name", "numpy") if row else "numpy"
)
def test_a_key_hidden_by_position_gets_nothing_from_rows_of_nan(row):
    """Key 0 makes every row NaN; key 3 lies after the last query."""
    dtype = np.float32 if row is None or "float32" in row.dtypes else np.float16
    q, k = np.ones((1, 3, 1, 16), dtype), np.ones((1, 4, 1, 16), dtype)
    v = k.copy()
    v[0, 0] = np.nan
    options = dict(causal=True, query_offset=0)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert np.isnan(out).all()
    kernel = None if row is None else row.name
    gradients = cuflash.attention_backward(q, q, k, v, out, lse, kernel=kernel, **options)
    for name in ("dk", "dv"):
        assert (getattr(gradients, name)[0, 3] == 0).all(), name
    assert np.isnan(gradients.dk[0, :3]).all()


@pytest.mark.parametrize(
    "row", [None, *rows.BACKWARD], ids=lambda row: getattr(row, "name", "numpy") if row else "numpy"
)
def test_keys_without_query_heads_get_no_gradient(row):
    dtype = np.float32 if row is None or "float32" in row.dtypes else np.float16
    q, k = np.zeros((2, 3, 0, 16), dtype), np.ones((2, 5, 3, 16), dtype)
    lse, kernel = np.zeros((2, 0, 3), np.float32), None if row is None else row.name
    gradients = cuflash.attention_backward(q, q, k, k, q, lse, kernel=kernel)
    assert (gradients.dk == 0).all() and (gradients.dv == 0).all() and gradients.dq.shape == q.shape


# ---- a bias or mask that does not reach the longest sequence, which only lengths on a device allow


SHORT = (
    Build(sequences="packed", bias="same", mask=True, causal=True),
    Build("float16", 40, sequences="packed", bias="float32", alibi=True, block_mask=(16, 16)),
    Build("float64", 8, sequences="packed", mask=True, bias="same", sink=True, dropout=True),
)


def cut(call):
    """(call whose bias and mask end early, the same call with full ones that hide what the others lack)."""
    short, full = dict(call.options), dict(call.options)
    for name in ("bias", "mask"):
        array = call.options.get(name)
        if array is None:
            continue
        ends = tuple(slice(0, n - 3 if n > 4 else n) for n in array.shape[-2:])
        ends = (..., *ends) if array.ndim else (...,)
        short[name] = array[ends]
        full[name] = np.full_like(array, -np.inf if name == "bias" else False)
        full[name][ends] = short[name]
    return replace(call, options=short), replace(call, options=full)


def check_short(call, run):
    """run(short call, saved or None) -> (out, lse), or with saved results Gradients."""
    short, full = cut(call)
    judge = Judge(full)
    judge.forward(*run(short, None))
    saved = judge.saved()
    gradients = run(short, saved)
    if gradients.dbias is not None:  # nothing reaches the places that are not there
        dbias = np.zeros_like(full.options["bias"])
        dbias[tuple(map(slice, gradients.dbias.shape))] = to_numpy(gradients.dbias)
        gradients = gradients._replace(dbias=dbias)
    judge.backward(gradients, *saved)


def run_emulated(call, saved):
    """Past check.py, which refuses such a bias with host lengths."""
    arrays, options = {"q": call.q, "k": call.k, "v": call.v}, dict(call.options)
    modifiers = {name: options.pop(name, None) for name in ("bias", "mask")}
    direction = "forward" if saved is None else "backward"
    if saved is not None:
        arrays |= {"dout": call.dout, "dlse": call.dlse, "out": saved[0], "lse": saved[1]}
    problem, operands = check(direction, arrays, options)
    for name, array in modifiers.items():
        if array is not None:
            view = array[(None,) * (4 - array.ndim)]
            setattr(operands, name, view)
            specs = tuple(sorted((*problem.specs, (name, array_spec(view)))))
            problem = replace(problem, specs=specs)
    bias = None if operands.bias is None else operands.bias.dtype.name
    gradients = (*problem.gradients, "dbias") if saved and bias else problem.gradients
    problem = replace(problem, bias=bias, has_mask=operands.mask is not None, gradients=gradients)
    found = launch.run(plan.make(problem, EMULATED), operands)
    if saved is not None:
        return results.gradients(problem, found, call.options, None)
    return [results.in_layout(problem, name, found[name]) for name in ("out", "lse")]


def run_on_gpu(call, saved):
    there = call.on_device(device_lengths=True)
    if saved is not None:
        return backward(there, saved)
    return cuflash.attention(there.q, there.k, there.v, return_lse=True, **there.options)


@pytest.mark.parametrize("build", SHORT, ids=lambda build: build.dtype)
def test_short_bias_and_mask_in_the_emulator(build):
    for call in list_of_calls(5, seed=1, build=build, **SMALL):
        check_short(call, run_emulated)


@pytest.mark.gpu
@pytest.mark.parametrize("build", SHORT, ids=lambda build: build.dtype)
def test_short_bias_and_mask_on_a_gpu(build):
    for call in list_of_calls(30, seed=2, build=build, **MEDIUM):
        check_short(call, run_on_gpu)


# ---- GPU


def check_on_gpu(call, starred=True):
    judge = Judge(call)
    has_lengths = call.build.sequences != "plain"
    for device_lengths in (False, True) if has_lengths else (False,):
        check_rows(call.on_device(device_lengths), judge, starred)
    JUDGED["calls"] += 1


def write_drawn(name):
    """One build's part of the record, where CUFLASH_DRAWN names a folder."""
    if folder := os.environ.get("CUFLASH_DRAWN"):
        judged = dict(JUDGED)
        n_calls = judged.pop("calls")
        payload = {"build": name, "calls": n_calls, "judged": judged}
        records.write("drawn", payload, rows=judged, path=Path(folder) / f"{name}.json")


@pytest.mark.gpu
@pytest.mark.parametrize("build", builds(step=4))
def test_gpu(build):
    drawn(build, 10, MEDIUM, check_on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("build", builds(step=8, core=True))
def test_gpu_unstarred(build):
    drawn(build, 10, MEDIUM, lambda call: check_on_gpu(call, starred=False))


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("build", builds())
def test_gpu_in_full(build, request):
    JUDGED.clear()
    drawn(build, 105, MEDIUM, check_on_gpu)
    write_drawn(request.node.callspec.id)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("build", builds(core=True))
def test_gpu_unstarred_in_full(build):
    drawn(build, 25, MEDIUM, lambda call: check_on_gpu(call, starred=False))


def check_scores_of_any_size(dtype, kernel, place=np.asarray):
    """Far above 2^24 the next float32 is whole units away, as a rounded maximum is from its score: rows of
    one key are left."""
    rng = np.random.default_rng(0)
    size = 6e4 if dtype == "float16" else 1e10
    q, k, v = (rng.uniform(-1, 1, (1, n, 2, 64)) for n in (20, 300, 300))
    q, k, v = (size * q).astype(dtype), (size * k).astype(dtype), v.astype(dtype)
    found = cuflash.attention(place(q), place(k), place(v), kernel=kernel, return_lse=True)
    out, lse = (to_numpy(array) for array in found)
    expected, expected_lse = cuflash.reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=0.01)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


LARGE = [
    pytest.param(dtype, kernel, id=f"{dtype}-{kernel}")
    for dtype in ("float16", "bfloat16")
    for kernel in (None, "fwd_02_tiled", "fwd_05_pipeline", "fwd_09_overlap", "fwd_10_persistent")
]


@pytest.mark.parametrize("dtype, kernel", LARGE)
def test_scores_of_any_size(dtype, kernel):
    check_scores_of_any_size(dtype, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, kernel", LARGE)
def test_scores_of_any_size_on_a_gpu(dtype, kernel):
    check_scores_of_any_size(dtype, kernel, copy_to_device)
