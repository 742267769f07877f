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
"""

import numpy as np
import pytest
from close import Judge
from hypothesis import given, settings
from problems import BUILD_VALUES, calls, covering_builds

import cuflash
from cuflash import rows

N_SHARDS = 16
CORE = ("dtype", "head_dim", "head_dim_v", "out_dtype", "dout_dtype", "causal", "dlse", "deterministic")
ROWS = {"forward": rows.FORWARD, "backward": rows.BACKWARD}
SMALL = dict(max_length=70, max_scores=2**12)  # for the emulator
MEDIUM = dict(max_length=200, max_scores=2**15)


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
                judge.forward(*found)
    saved = judge.saved()
    for row in ROWS["backward"]:
        if row.starred or not starred:
            gradients = backward(call, saved, row)
            if gradients is not None:
                judge.backward(gradients, *saved)


def unless_refused(row, run):
    """What run() gives, None where an unstarred row refuses."""
    try:
        return run()
    except cuflash.CuflashError as refusal:
        assert not row.starred and str(refusal).startswith(f"{row.name} "), refusal
        return None


def forward(call, row):
    arrays = call.q, call.k, call.v
    return unless_refused(
        row, lambda: cuflash.attention(*arrays, kernel=row.name, return_lse=True, **call.options)
    )


def backward(call, saved, row=None):
    if not isinstance(call.q, np.ndarray):
        import cupy

        saved = [cupy.asarray(array) for array in saved]
    arrays = (call.dout, call.q, call.k, call.v, *saved)
    options = dict(call.options, dlse=call.dlse, deterministic=call.deterministic)
    if row is None:
        return cuflash.attention_backward(*arrays, **options)
    return unless_refused(row, lambda: cuflash.attention_backward(*arrays, kernel=row.name, **options))


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


# ---- GPU


def check_on_gpu(call, starred=True):
    judge = Judge(call)
    has_lengths = call.build.sequences != "plain"
    for device_lengths in (False, True) if has_lengths else (False,):
        check_rows(call.on_device(device_lengths), judge, starred)


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
def test_gpu_in_full(build):
    drawn(build, 105, MEDIUM, check_on_gpu)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("build", builds(core=True))
def test_gpu_unstarred_in_full(build):
    drawn(build, 25, MEDIUM, lambda call: check_on_gpu(call, starred=False))
