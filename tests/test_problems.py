"""The drawn calls are legal, varied, and always the same."""

import itertools
from collections import Counter

import numpy as np
import problems
import pytest
from hypothesis import given

from cuflash import reference
from cuflash.check import check


def test_covering_builds_meet_in_every_pair():
    builds = problems.covering_builds(48)
    assert len(builds) == 48 and builds == problems.covering_builds(48)
    for a, b in itertools.combinations(problems.BUILD_VALUES, 2):
        met = {(getattr(build, a), getattr(build, b)) for build in builds}
        assert met == set(itertools.product(problems.BUILD_VALUES[a], problems.BUILD_VALUES[b])), (a, b)
    with pytest.raises(ValueError, match="too few"):
        problems.covering_builds(20)


@given(problems.calls())
def test_every_call_is_legal(call):
    problem, _ = check("forward", {"q": call.q, "k": call.k, "v": call.v}, call.options)
    assert problem.dtype == call.build.dtype and problem.head_dim == call.build.head_dim
    assert problem.causal == call.build.causal and problem.has_mask == call.build.mask
    assert (problem.bias is not None) == (call.build.bias is not None)
    assert problem.packed == (call.build.sequences == "packed")
    assert problem.batch * problem.heads * problem.len_q * problem.len_k < 2**24
    batch = 1 if problem.packed else problem.batch
    lse = np.zeros((batch, problem.heads, problem.len_q), problem.accumulator)
    arrays = {"dout": call.dout, "q": call.q, "k": call.k, "v": call.v, "out": call.dout, "dlse": call.dlse}
    check("backward", arrays | {"lse": lse[0] if problem.packed else lse}, call.options)


def test_a_list_is_always_the_same_and_varied():
    calls, again = (problems.list_of_calls(300, seed=2, max_length=65) for _ in range(2))
    for one, other in zip(calls, again, strict=True):
        assert one.label == other.label
        np.testing.assert_array_equal(one.q.astype("float64"), other.q.astype("float64"))
    seen = Counter()
    for call in calls:
        strides = call.q.strides if call.q.size else ()
        seen["negative stride"] += any(s < 0 for s in strides)
        seen["stride 0"] += any(s == 0 and n > 1 for s, n in zip(strides, call.q.shape, strict=False))
        seen["strided dim"] += bool(strides) and call.q.shape[-1] > 1 and strides[-1] != call.q.itemsize
        seen["empty"] += call.q.size == 0 or call.k.size == 0
        seen["not finite"] += not np.isfinite(call.k.astype("float64")).all()
        seen["bhsd"] += call.options.get("layout") == "bhsd"
        seen["scale 0"] += call.options.get("scale") == 0.0
        seen["something comes out"] += bool(reference.attention(call.q, call.k, call.v, **call.options).any())
    assert all(count >= 10 for count in seen.values()), seen
    assert seen["something comes out"] > 150, seen


def test_a_build_is_kept():
    build = problems.Build(dtype="bfloat16", head_dim=40, sequences="packed", sink=True)
    for call in problems.list_of_calls(20, build=build, max_length=40):
        assert call.build == build
        assert call.q.dtype.name == "bfloat16" and call.q.shape[-1] == 40
        assert set(call.options) <= {"cu_seqlens_q", "cu_seqlens_k", "sink", "scale", "query_offset"}


@pytest.mark.gpu
def test_calls_move_to_a_device_with_their_strides():
    for call in problems.list_of_calls(60, seed=5):
        there = call.on_device(device_lengths=True)
        for name in ("q", "k", "v", "dout"):
            host, device = getattr(call, name), getattr(there, name)
            assert device.strides == host.strides and device.dtype == host.dtype
            np.testing.assert_array_equal(device.get().astype("float64"), host.astype("float64"))
