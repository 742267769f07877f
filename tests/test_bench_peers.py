"""Peers: tried in children that may die, refusing in words, given the same problem."""

from __future__ import annotations

import time
from dataclasses import replace

import crashing_peers
import numpy as np
import pytest
from bench_help import BACK, CAUSAL, SMALL, lines_of

from cuflash.bench import (
    inputs,
    peers,
    probe,
)
from cuflash.bench.contenders import Cuflash
from cuflash.bench.run import Task, run
from cuflash.bench.shapes import Suite
from cuflash.bench.timing import Rounds
from cuflash.bench.truth import Truth

# ---- peers


def test_peers_are_tried_in_children_that_may_die():
    both = (SMALL, CAUSAL)
    named = {peer.name: peer for peer in crashing_peers.PEERS}
    wanted = [named[name] for name in ("segfault", "leave", "refuse", "raise", "chatter", "absent")]
    says = probe.probe(wanted, both)
    assert says["segfault", SMALL] == "crashed (SIGSEGV)"
    assert says["leave", SMALL] == "ended with exit code 3"
    assert says["refuse", SMALL] == "does not do this"
    assert says["raise", SMALL] == "RuntimeError: no kernel image is available"
    assert says["chatter", SMALL] is None
    assert says["absent", SMALL] == says["absent", CAUSAL] == "no_such_module is not installed"
    for name in ("segfault", "leave", "refuse", "raise", "chatter"):
        assert says[name, CAUSAL] is None  # the next shape goes on in a new child


def test_shapes_that_share_a_compiled_kernel_go_to_one_child():
    half = [replace(one, dtype="bfloat16", head_dim=d, head_dim_v=d, len_q=n, len_k=n, heads_k=4)
            for d in (64, 128) for n in (512, 2048) for one in (SMALL, CAUSAL)]  # fmt: skip
    fa4, jax, sdpa = (peers.named((name,), "gpu")[0] for name in ("fa4", "jax_xla", "sdpa_flash"))
    parts = probe.parts_of(fa4, half)
    assert [{(one.head_dim, one.causal) for one in part} for part in parts] == [
        {(64, False)}, {(64, True)}, {(128, False)}, {(128, True)}
    ]  # fmt: skip
    assert sorted(map(len, parts)) == [2, 2, 2, 2]
    assert len(probe.parts_of(jax, half)) == probe.PARTS and probe.parts_of(sdpa, half) == [half]
    dealt = [shape for part in probe.parts_of(jax, half) for shape in part]
    assert sorted(map(repr, dealt)) == sorted(map(repr, half))


def test_a_peer_that_hangs_is_left():
    (hang,) = [peer for peer in crashing_peers.PEERS if peer.name == "hang"]
    start = time.perf_counter()
    says = probe.probe([hang], [SMALL, CAUSAL], seconds=(8.0, 8.0))
    assert says == {("hang", SMALL): "gave no result in 8 s", ("hang", CAUSAL): None}
    assert time.perf_counter() - start < 30


def test_a_wrong_peer_and_a_crashing_one_in_a_run():
    named = {peer.name: peer for peer in crashing_peers.PEERS}
    task = Task(
        Suite("forward", (SMALL,)), "cpu", peers=(named["wrong"], named["segfault"], named["absent"]),
        contenders=(Cuflash("numpy"),), protocol=Rounds(rounds=1, pause=0),
    )  # fmt: skip
    lines = lines_of(run(task))
    assert lines["numpy"].status == "measured"
    assert lines["wrong"].status == "wrong" and lines["segfault"].status == "failed"
    assert (lines["absent"].status, lines["absent"].says) == ("missing", "no_such_module is not installed")


def test_a_peer_that_needs_more_memory_than_there_is_is_not_tried():
    hungry = peers.named(("numpy_unfused",), "cpu")
    says = probe.probe(hungry, [SMALL], free_bytes=1e4)
    assert "GB are free" in says["numpy_unfused", SMALL]


@pytest.mark.parametrize(
    "name, shape, says",
    [
        ("fa3", BACK, "has no backward"),
        ("fa4", SMALL, "takes float16, bfloat16, not float32"),
        ("sdpa_math", replace(SMALL, settings=(("softcap", 5.0),)), "does no softcap"),
        ("sdpa_math", CAUSAL, "its causal mask is top-left"),
        ("jax_xla", CAUSAL, "its causal mask is top-left"),
        ("fa4", replace(CAUSAL, dtype="float16", settings=(("causal", True), ("window", (3, 3)))), None),
        (
            "fa3_jax",
            replace(SMALL, dtype="float16", head_dim=192, head_dim_v=192),
            "takes head_dim up to 128",
        ),
        ("sdpa_math", replace(CAUSAL, len_k=40, drawn=("bias",)), "takes causal or a mask, not both"),
        ("sdpa_flash", replace(CAUSAL, dtype="float16", len_k=40), None),
    ],
)
def test_peers_refuse_in_words(name, shape, says):
    (peer,) = peers.named((name,), "gpu")
    assert peer.refuses(shape) == says


def test_every_peer_has_a_class_and_a_name():
    names = [peer.name for peer in peers.PEERS]
    assert len(set(names)) == len(names)
    wanted = "sdpa_flash sdpa_cudnn sdpa_efficient sdpa_math fa3 fa3_jax fa4 jax_xla cupy_unfused torch_cpu"
    for name in wanted.split():
        assert name in names


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("settings", [(), (("causal", True),), (("causal", True), ("scale", 0.3))])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_unfused_numpy_is_right(dtype, settings, direction):
    (peer,) = peers.named(("numpy_unfused",), "cpu")
    made = inputs.draw(replace(SMALL, direction=direction, dtype=dtype, settings=settings), np)
    ready = peer.prepare(made, False)
    ready.call(0)
    for verdict in Truth(made).judge(ready.results()):
        assert verdict.passed, verdict.message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drawn", [(), ("bias",), ("mask",)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_torch_is_given_the_same_problem(dtype, drawn, direction):
    pytest.importorskip("torch")
    (peer,) = peers.named(("torch_cpu",), "cpu")
    made = inputs.draw(replace(SMALL, direction=direction, dtype=dtype, drawn=drawn), np)
    if "mask" in drawn:
        made.options["mask"][:, :, 20] = True  # a row that sees nothing is NaN in PyTorch
        made = inputs.Inputs(made.shape, np, made.sets, made.options, made.problem, made.operands)
    ready = peer.prepare(made, False)
    with ready.around():
        ready.call(0)
    for verdict in Truth(made).judge(ready.results()):
        # a library may round more often than the baseline: here only the problem must be the same one
        assert verdict.error <= 4 * verdict.limit, verdict.message
