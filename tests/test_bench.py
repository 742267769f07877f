"""The bench without a GPU: what is counted, timed and checked; wrong results, failures and Ctrl-C."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from bench_help import BACK, SMALL, FakeClock, Made, lines_of, results_of, task_of

import cuflash
from cuflash import cost, plan
from cuflash.bench import (
    inputs,
    meters,
    peers,
    report,
    suites,
    timing,
)
from cuflash.bench.ahead import specs_of
from cuflash.bench.contenders import check_names
from cuflash.bench.run import Line, _wants_graph, run
from cuflash.bench.shapes import Shape, Sizes, Suite
from cuflash.bench.timing import AwaitedClock, HostClock, Rounds, Times, Turn, run_rounds, run_sustained
from cuflash.bench.truth import Truth
from cuflash.errors import CuflashError
from cuflash.reference_scores import is_visible, sequences

# ---- what is measured


def test_the_envelope_has_forty_cells_of_one_size():
    suite = suites.suite("forward", Sizes(), "gpu", "bfloat16", "envelope")
    assert len(suite.shapes) == 40 == len(set(suite.shapes))
    for shape in suite.shapes:
        assert shape.batch * shape.len_q == 16384 and shape.is_plain and shape.dtype == "bfloat16"
        assert shape.heads == 2048 // shape.head_dim


def test_flags_replace_what_the_suite_would_take():
    sizes = Sizes(
        head_dims=(32,), lengths=(100,), batch=3, heads=4, heads_k=2, causal=(True,), dtypes=("float16",)
    )
    suite = suites.suite("backward", sizes, "gpu", "bfloat16")
    assert suite.own
    (shape,) = suite.shapes
    assert shape == Shape("backward", 3, 100, 100, 4, 2, 32, 32, "float16", (("causal", True),))
    assert not shape.is_plain and Shape.from_json(json.loads(json.dumps(shape.as_json()))) == shape


@pytest.mark.parametrize("name", suites.SUITES)
@pytest.mark.parametrize("place", ["gpu", "cpu"])
def test_every_suite_has_shapes(name, place):
    if (name, place) == ("ladder", "cpu"):
        with pytest.raises(CuflashError, match="no CUDA GPU"):
            suites.suite(name, Sizes(), place, "float32")
        return
    suite = suites.suite(name, Sizes(), place, "float32")
    assert suite.shapes and suite.metric in report.UNITS and not suite.own
    tiny = suites.suite(name, Sizes(), place, "float32", tiny=True)
    assert all(max(shape.sizes) <= 90 for shape in tiny.shapes)
    assert len(set(tiny.shapes)) == len(tiny.shapes)


def test_one_option_at_a_time():
    suite = suites.suite("options", Sizes(), "gpu", "bfloat16")
    for direction, n_more in (("forward", 0), ("backward", 1)):
        mine = [shape for shape in suite.shapes if shape.direction == direction]
        assert len(mine) == len(suites.ONE_OPTION) - 1 + n_more
        for shape in mine[1:]:
            assert (shape.heads != shape.heads_k) + len(shape.settings) + len(shape.drawn) == 1


@pytest.mark.parametrize("drawn", [(), ("bias_plane",), ("mask", "sink"), ("packed",), ("key_lengths",),
                                   ("blocks_1/4",)])  # fmt: skip
def test_what_is_compiled_ahead_is_what_the_call_needs(drawn):
    settings = (("causal", True), ("softcap", 5.0))
    shape = Shape("forward", 2, 256, 256, 4, 2, 64, 64, "float16", settings, drawn)
    q, k, v, options = specs_of(shape)
    ahead = cuflash.explain(q, k, v, **options, device="sm_90a")
    made = inputs.draw(shape, np)
    call = cuflash.explain(*(made.first[name] for name in "qkv"), **made.options, device="sm_90a")
    assert plan.jobs([ahead]) == plan.jobs([call]) != []


def test_a_bias_that_all_heads_share():
    made = inputs.draw(replace(SMALL, drawn=("bias_plane",)), np)
    assert made.options["bias"].shape == (1, 1, SMALL.len_q, SMALL.len_k)
    assert made.problem.bias == "float32"


@pytest.mark.parametrize("sizes", [Sizes(lengths=(0,)), Sizes(heads=3, heads_k=2)])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(CuflashError, match="bench: "):
        suites.suite("forward", sizes, "gpu", "float16")


def test_unknown_names_are_refused():
    with pytest.raises(CuflashError, match="unknown suite 'speed'"):
        suites.suite("speed", Sizes(), "cpu", "float32")
    with pytest.raises(CuflashError, match="unknown peer xformers"):
        peers.named(("xformers",), "gpu")
    with pytest.raises(CuflashError, match="unknown kernel fwd_99"):
        check_names(("fwd_99",))


MASKS = [
    ((), ()),
    ((("causal", True),), ()),
    ((("causal", True), ("query_offset", 3)), ()),
    ((("window", (5, 2)),), ()),
    ((("causal", True),), ("packed",)),
    ((("causal", True),), ("key_lengths",)),
    ((), ("mask", "block_mask")),
]


@pytest.mark.parametrize("settings, drawn", MASKS)
def test_flops_are_counted_from_the_mask(settings, drawn):
    made = inputs.draw(replace(SMALL, settings=settings, drawn=drawn), np)
    counted = 0
    for sequence in sequences(made.problem, made.operands):
        i, j = np.arange(sequence.len_q), np.arange(sequence.len_k)
        for head in range(4):
            counted += is_visible(made.problem, made.operands, sequence, head, i, j).sum()
    assert made.pairs == counted and made.flops == 4 * 16 * counted
    if not drawn:
        assert made.flops == cost.flops(made.problem)
    back = inputs.draw(replace(BACK, settings=settings, drawn=drawn), np)
    assert back.pairs > 0
    assert back.flops == 2.5 * 64 * back.pairs


def test_small_inputs_get_sets_that_do_not_stay_in_the_cache():
    one = inputs.draw(SMALL, np)
    assert len(one.sets) == 1 and one.first["k"].shape == (2, 50, 2, 16)
    n_bytes = sum(array.nbytes for array in one.first.values())
    many = inputs.draw(SMALL, np, cache_bytes=3 * n_bytes)
    assert len(many.sets) == 6 and not np.array_equal(many.sets[0]["q"], many.sets[1]["q"])
    assert len(inputs.draw(SMALL, np, cache_bytes=n_bytes // 2).sets) == 1
    again = inputs.draw(SMALL, np)
    assert np.array_equal(one.first["q"], again.first["q"])
    assert abs(one.first["q"].mean()) < 0.1 and abs(one.first["q"].std() - 1) < 0.1


def test_packed_lengths_use_every_token():
    made = inputs.draw(replace(SMALL, batch=5, drawn=("packed",)), np)
    ends = made.options["cu_seqlens_q"]
    assert ends[0] == 0 and ends[-1] == 200 == len(made.first["q"]) and ends == sorted(ends)


# ---- is it right


EVERYTHING = (
    (("causal", True), ("window", (20, None)), ("softcap", 10.0), ("dropout", (0.2, 3))),
    ("bias", "mask", "sink", "alibi_slopes", "key_lengths", "block_mask"),
)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("settings, drawn", [((), ()), ((("causal", True),), ("packed",)), EVERYTHING])
def test_right_results_pass(direction, dtype, settings, drawn):
    shape = Shape(direction, 3, 90, 110, 4, 2, 32, 24, dtype, settings, drawn)
    made = inputs.draw(shape, np)
    verdicts = Truth(made).judge(results_of(made))
    assert {v.name for v in verdicts} == set(("out", "lse") if direction == "forward" else ("dq", "dk", "dv"))
    for verdict in verdicts:
        assert verdict.passed, verdict.message
        assert 0 < verdict.limit < 0.1


def damages():
    """name -> what it does to a copy of a result (batch, length, heads, dim)."""
    return {
        "one row": lambda x: x.__setitem__((-1, -1, -1), x[-1, -1, -1] + 1),
        "swapped heads": lambda x: x.__setitem__(..., x[:, :, ::-1].copy()),
        "zeros": lambda x: x.__setitem__(..., 0),
        "all nan": lambda x: x.__setitem__(..., np.nan),
        "scaled": lambda x: x.__imul__(1.02),
    }


@pytest.mark.parametrize("name", damages())
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_results_fail(name, direction):
    made = inputs.draw(Shape(direction, 2, 80, 80, 4, 4, 16, 16, "bfloat16"), np)
    truth, right = Truth(made), results_of(made)
    for array_name in [n for n in right if n != "lse"]:
        damaged = {n: array.copy() for n, array in right.items()}
        damages()[name](damaged[array_name])
        wrong = {v.name for v in truth.judge(damaged) if not v.passed}
        assert wrong == {array_name}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_products_of_11_bits_are_judged_as_such_where_they_were_asked_for(direction):
    def judged(settings, factor):
        made = inputs.draw(Shape(direction, 2, 80, 80, 4, 4, 32, 32, "float32", settings), np)
        found = {n: a if n == "lse" else a * np.float32(factor) for n, a in results_of(made).items()}
        return {verdict.passed for verdict in Truth(made).judge(found) if verdict.name != "lse"}

    asked = (("precision", "tf32"),)
    assert judged(asked, 1) == {True}, "more exact than asked for"
    assert judged(asked, 1 + 1e-4) == {True} and judged((), 1 + 1e-4) == {False}
    assert judged(asked, 1.02) == {False}


def test_nan_in_a_row_that_was_not_sampled_fails():
    made = inputs.draw(Shape("forward", 4, 300, 300, 8, 8, 16, 16, "float16"), np)
    truth, right = Truth(made, samples=4), results_of(made)
    assert len(truth.samples) == 4
    assert {
        (truth.samples[0].b, truth.samples[0].head_k),
        (truth.samples[-1].b, truth.samples[-1].head_k),
    } == {
        (0, 0),
        (3, 7),
    }
    for one in truth.samples:
        assert len(one.rows) == 64 == len(set(one.rows)) and {0, 299} <= set(one.rows)
    sampled = {(one.b, one.head_k) for one in truth.samples}
    b, head = next((b, h) for b in range(4) for h in range(8) if (b, h) not in sampled)
    right["out"][b, 17, head, 3] = np.inf
    messages = [v.message for v in truth.judge(right) if not v.passed]
    assert messages == ["out: 1 of 153600 numbers are not finite"]


def test_a_message_names_the_place_and_a_missing_array():
    made = inputs.draw(Shape("forward", 2, 30, 30, 2, 2, 16, 16, "float32"), np)
    truth, right = Truth(made), results_of(made)
    right["out"][1, :, 1] += 1
    (message,) = [v.message for v in truth.judge(right) if not v.passed]
    assert "sequence 1, key head 1" in message and "is over the limit" in message
    (message,) = [v.message for v in truth.judge({"lse": right["lse"]}) if not v.passed]
    assert message == "out: is missing"


# ---- how time is taken


def turns_of(clock, *names, estimate=1e-3):
    return [Turn(name, (lambda i, name=name: name), clock, estimate) for name in names]


def test_the_first_call_of_a_contender_of_seconds_is_its_time():
    clock = FakeClock()
    turns = [
        Turn(name, lambda i, name=name: name, clock, seconds) for name, seconds in (("a", 1e-3), ("b", 4.6))
    ]
    run_rounds(turns, Rounds(rounds=3, pause=0))
    assert len(turns[0].times.seconds) == 12 and turns[1].times.seconds == [4.6]
    assert {name for name, _, _ in clock.log} == {"a"}


def test_every_round_shuffles_every_contender():
    clock, names = FakeClock(), [f"row {n}" for n in range(8)]
    turns = turns_of(clock, *names)
    run_rounds(turns, Rounds(rounds=5, launches=4, pause=0.012))
    order = [[name for name, _, _ in clock.log[8 * r : 8 * r + 8]] for r in range(5)]
    assert all(sorted(one) == names for one in order)
    assert len({tuple(one) for one in order}) == 5  # five different orders
    assert clock.pauses == [0.012] * 40
    assert all((first, n) == (1, 4) for _, first, n in clock.log)
    assert all(len(turn.times.seconds) == 20 for turn in turns)


@pytest.mark.parametrize("seconds, wanted", [(1e-4, (1, 4)), (0.06, (0, 3)), (0.15, (0, 1)), (9.0, (0, 1))])
def test_slow_calls_are_launched_less_often(seconds, wanted):
    assert Rounds(budget=0.2).burst_of(seconds) == wanted


def test_median_quartiles_and_spread():
    times = Times([5.0, 1.0, 2.0, 3.0, 4.0], mhz=[1700, 1900, 1800])
    assert times.median == 3.0 and times.quartiles == (2.0, 4.0) and times.spread == pytest.approx(2 / 3)
    assert times.clock == 1.8e9
    assert Times([2.0]).quartiles == (2.0, 2.0) and Times([2.0]).spread == 0 and Times([2.0]).clock is None


def test_an_outlier_does_not_move_the_median():
    seconds = iter([1e-3] * 11 + [1.0])
    (turn,) = turns_of(FakeClock(lambda name: next(seconds)), "a")
    run_rounds([turn], Rounds(rounds=3))
    assert turn.times.median == 1e-3


def test_a_contender_that_raises_ends_alone():
    clock = FakeClock()
    turns = turns_of(clock, "a", "b")

    def fails(i):
        raise RuntimeError("an illegal memory access was encountered")

    turns.append(Turn("c", fails, clock, 1e-3))
    run_rounds(turns, Rounds(rounds=3))
    assert turns[2].error == "RuntimeError: an illegal memory access was encountered"
    assert [len(turn.times.seconds) for turn in turns] == [12, 12, 0]


def test_a_graph_of_several_launches_is_divided():
    (turn,) = turns_of(FakeClock(lambda name: 8e-3), "a")
    turn.per_call = 16
    run_rounds([turn], Rounds())
    assert turn.times.median == pytest.approx(0.5e-3)


def test_sustained_is_the_median_of_the_late_half():
    seconds = iter([1e-3] * 64 + [3e-3] * 10**6)
    (turn,) = turns_of(FakeClock(lambda name: next(seconds)), "a")
    run_sustained(turn, 0.02)
    assert turn.times.sustained == 3e-3


@pytest.mark.parametrize(
    ("took", "patience", "is_estimated", "calls"),
    [
        ([0.9, 0.001], 1.0, 0.001, 2),  # compiled in the first call
        ([2.0], 1.0, 2.0, 1),  # too long to be made twice
        ([5.0, 0.4, 0.002], 20.0, 0.002, 3),  # loads, then plans
        ([0.3, 0.29], 1.0, 0.29, 2),  # is as slow as that
        ([0.3, 0.1, 0.2], 1.0, 0.1, 3),
    ],
)
def test_an_estimate_waits_for_what_first_calls_do(monkeypatch, took, patience, is_estimated, calls):
    now, made = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(i):
        made.append(i)
        now[0] += took[i]

    assert timing.estimate(call, FakeClock(), patience) == pytest.approx(is_estimated)
    assert len(made) == calls


def test_the_awaited_clock_times_a_whole_burst(monkeypatch):
    done = []
    clock = AwaitedClock(lambda: (time.sleep(0.02), done.append("wait")))
    (seconds,) = clock.burst(lambda i: done.append(i), 1, 4)
    assert done == [0, "wait", 1, 2, 3, 4, "wait"] and 0.004 < seconds < 0.02
    done.clear()  # calls that are short for a burst: so many that the wait does not count
    monkeypatch.setattr(timing, "AWAITED_SECONDS", 10.0)
    (seconds,) = AwaitedClock(lambda: time.sleep(0.01)).burst(lambda i: done.append(i), 1, 4)
    assert len(done) == 1 + 64 and seconds < 0.005


def test_host_clock_times_each_call():
    slow = HostClock().burst(lambda i: time.sleep(0.01 * (i + 1)), 1, 2)
    assert len(slow) == 2 and slow[0] >= 0.02 and slow[1] >= 0.03


@pytest.mark.parametrize(
    "graph, direction, seconds, wanted",
    [
        ("auto", "forward", 1e-4, True),
        ("auto", "forward", 1e-3, False),
        ("auto", "backward", 1e-4, False),
        ("always", "forward", 1e-3, True),
        ("never", "forward", 1e-4, False),
    ],
)
def test_when_graphs_are_replayed(graph, direction, seconds, wanted):
    suite = Suite("forward", (), graph=graph)
    ready = [
        (Line("a", "cuflash"), None, Turn("a", None, None, seconds)),
        (Line("m", "roof"), None, Turn("m", None, None, 1e-9)),
    ]
    assert _wants_graph(suite, replace(SMALL, direction=direction), ready) is wanted


# ---- a run


def test_a_wrong_result_is_reported_in_place_of_its_time():
    def damage(results):
        results["out"][0, 3, 1] += 0.01

    found = run(task_of(Made("right"), Made("wrong", damage)))
    for number in range(2):
        lines = lines_of(found, number)
        assert lines["right"].status == "measured" and lines["right"].times.median == 1e-3
        assert lines["wrong"].status == "wrong" and lines["wrong"].times is None
        assert "out: error" in lines["wrong"].says
    assert [line.name for _, line in found.wrong] == ["wrong", "wrong"]
    data = report.payload(found)
    assert "seconds" not in data["results"][0]["lines"][1]
    assert any("wrong WRONG: d 16" in note for note in report.notes(data))


def test_tflops_come_from_flops_and_the_median():
    found = run(task_of(Made("a"), clock=FakeClock(lambda name: 2e-6)))
    line = lines_of(found)["a"]
    assert line.flops == 4 * 16 * 2 * 4 * 40 * 50 and line.tflops == pytest.approx(line.flops / 2e-6 / 1e12)


def test_refusals_and_failures_are_lines():
    clock = FakeClock()
    found = run(
        task_of(
            Made("fine"),
            Made("refuses", refuses=CuflashError("takes no float32\n  do this")),
            Made("raises", refuses=MemoryError("too much")),
            clock=clock,
        )
    )
    lines = lines_of(found)
    assert lines["fine"].status == "measured"
    assert (lines["refuses"].status, lines["refuses"].says) == ("refused", "takes no float32")
    assert (lines["raises"].status, lines["raises"].says) == ("failed", "MemoryError: too much")


def test_ctrl_c_keeps_what_was_measured_and_checks_it():
    count = [0]

    def act(i):
        count[0] += 1
        if count[0] == 12:
            raise KeyboardInterrupt

    def damage(results):
        results["out"][...] = 0

    contenders = (Made("a"), Made("zeros", damage), Made("stops", act=act))
    found = run(task_of(*contenders, rounds=3))
    assert found.stopped and len(found.results) == 1
    lines = lines_of(found)
    assert lines["a"].status == "measured" and lines["a"].times.seconds
    assert lines["a"].ratio is not None and lines["a"].ratio < 1
    assert lines["zeros"].status == "wrong"
    assert report.payload(found)["stopped"]


def test_short_calls_are_replayed_when_they_can_be_captured():
    captured = []

    def capture(call, n):
        captured.append(n)
        return lambda i: call(0)

    def cannot(call, n):
        raise RuntimeError("operation not permitted when stream is capturing")

    suite = Suite("short", (SMALL,), graph="always")
    found = run(task_of(Made("yes", capture=capture), Made("no", capture=cannot), Made("never"), suite=suite))
    lines = lines_of(found)
    assert [lines[name].graph for name in ("yes", "no", "never")] == [True, False, False]
    assert lines["yes"].times.median == pytest.approx(1e-3 / captured[0])
    assert lines["no"].times.median == 1e-3


def test_memory_is_what_a_call_takes_above_its_results():
    def call():
        kept["out"] = np.ones(1000) + np.ones(1000)

    kept = {}
    found = meters.peak_bytes("numpy", call, lambda: kept["out"].nbytes)
    assert 16000 <= found < 20000  # two arguments live beside the result
    assert meters.peak_bytes("", call, lambda: 0) is None
