"""What the tests of the bench share: shapes, a clock that says what it is told, a record that never ran."""

from __future__ import annotations

from dataclasses import replace

import cuflash
from cuflash import build, cli
from cuflash.bench.contenders import Prepared
from cuflash.bench.run import Task
from cuflash.bench.shapes import Shape, Suite
from cuflash.bench.timing import Rounds

SMALL = Shape("forward", 2, 40, 50, 4, 2, 16, 16, "float32")
CAUSAL = replace(SMALL, settings=(("causal", True),))
BACK = replace(SMALL, direction="backward")


def bench(capsys, *arguments):
    """(exit code, stdout, stderr) of `cuflash bench`."""
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def results_of(made):
    """What cuflash computes, canonical."""
    one, lead = made.first, (lambda x: x[None]) if made.problem.packed else (lambda x: x)
    out, lse = cuflash.attention(one["q"], one["k"], one["v"], **made.options, return_lse=True)
    if made.shape.direction == "forward":
        return {"out": lead(out), "lse": lead(lse)}
    grads = cuflash.attention_backward(one["dout"], one["q"], one["k"], one["v"], out, lse, **made.options)
    return {name: lead(getattr(grads, name)) for name in ("dq", "dk", "dv")}


class FakeClock:
    """Says the times it is told, and writes down who ran: seconds(name) -> seconds of the next launch."""

    def __init__(self, seconds=lambda name: 1e-3):
        self.log, self.seconds, self.pauses, self.mhz = [], seconds, [], None

    def burst(self, call, first, n):
        names = [call(i) for i in range(first + n)]
        self.log.append((names[0], first, n))
        return [self.seconds(name) for name in names[first:]]

    def pause(self, seconds):
        self.pauses.append(seconds)

    def sync(self):
        pass


class Made:
    """A contender on the CPU that computes with cuflash, changed by `damage`; act(i) runs in each call."""

    kind = "cuflash"

    def __init__(self, name, damage=None, act=None, refuses=None, capture=None):
        self.name, self.damage, self.act, self.refuses, self.capture = name, damage, act, refuses, capture

    def prepare(self, made, fresh):
        if self.refuses:
            raise self.refuses
        right = results_of(made)
        if self.damage:
            self.damage(right)

        def call(i):
            if self.act:
                self.act(i)
            return self.name

        return Prepared(call, lambda: right, self.name, capture=self.capture)


def task_of(*contenders, suite=None, clock=None, **protocol):
    suite = suite or Suite("forward", (SMALL, CAUSAL))
    return Task(suite, "cpu", protocol=Rounds(**protocol), contenders=contenders, clock=clock or FakeClock())


def lines_of(report_, number=0):
    return {line.name: line for line in report_.results[number].lines}


def fake_record(seconds=1e-3, name="fwd_02_tiled", card="NVIDIA H200", date="2026-01-01T00:00:00", **changes):
    """A record of suite forward with one shape, two contenders and a matmul."""
    shape = replace(SMALL, heads_k=4, len_k=40, dtype="bfloat16")

    def line(line_name, kind, took, tflops, **more):
        made = {"name": line_name, "asked": line_name, "kind": kind, "status": "measured", "seconds": took}
        return made | {"quartiles": [took] * 2, "spread": 0.01, "n": 12, "tflops": tflops, "tbs": 1.0} | more

    own = line(name, "cuflash", seconds, 0.5 / seconds, asked="auto", sources=[name], error_over_limit=0.3)
    lines = [own, line("sdpa_cudnn", "peer", 1e-3, 600.0), line("matmul cupy", "roof", 1e-3, 800.0)]
    device = {"name": card, "driver": "13.0", "driver_version": "580.1"}
    environment = {"date": date, "device": device, "cpu": "a CPU", "cores": 2, "versions": {"torch": "2.11"}}
    protocol = {"rounds": 3, "launches": 4, "pause_ms": 12.0, "query_heads_checked": 16}
    result = {"label": shape.label(), "shape": shape.as_json(), "sets": 1, "clock_mhz": 1750.0,
              "matmul_tflops": 800.0, "peak_tflops": 940.0, "lines": lines}  # fmt: skip
    return {"kind": "bench-forward", "suite": "forward", "metric": "tflops", "own": False, "place": "gpu",
            "stopped": False, "seconds": 1.0, "distribution": "N(0,1)", "protocol": protocol,
            "environment": environment, "sources": {name: build.source_hash(name)}, "results": [result],
            **changes}  # fmt: skip
