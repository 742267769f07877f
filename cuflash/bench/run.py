"""Run suites: prepare every contender, time them in shuffled rounds, check what they computed.

    report = run(task)                  # a Task says what, where and how
    report.results[0].lines             # one Line per contender: measured, refused, missing, failed or wrong

Ctrl-C ends the run and keeps what was measured: report.stopped says so.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash.bench import meters, roofs
from cuflash.bench.ahead import compile_ahead
from cuflash.bench.contenders import Contender, Prepared, own
from cuflash.bench.contenders import roofs as matmuls
from cuflash.bench.inputs import Inputs, draw
from cuflash.bench.peer import Peer
from cuflash.bench.probe import Says, probe, sentence
from cuflash.bench.shapes import Shape, Suite
from cuflash.bench.suites import tiny_of
from cuflash.bench.timing import (
    PLANS,
    VERY_LONG,
    Clock,
    CudaClock,
    HostClock,
    Rounds,
    Times,
    Turn,
    estimate,
    run_rounds,
    run_sustained,
)
from cuflash.bench.truth import SAMPLES, Truth
from cuflash.errors import CuflashError
from cuflash.judge import Verdict

SHORT = 300e-6  # seconds: forwards below this are replayed from graphs, or their launches would be timed
GRAPH_SECONDS = 300e-6  # a graph holds as many launches as last this long
HOST_CALLS = 100  # calls of one timing of the host suite
Progress = Callable[[str, bool], None]  # (what goes on, whether a shape is done)


@dataclass(frozen=True)
class Task:
    """What to run.  place: "gpu" or "cpu".  kernels: rows by name, None: the automatic one (or every rung).

    peers: contenders of other libraries, tried in child processes first.  samples: query heads checked.
    """

    suite: Suite
    place: str
    kernels: tuple[str, ...] | None = None
    peers: tuple[Peer, ...] = ()
    protocol: Rounds = field(default_factory=Rounds)
    samples: int = SAMPLES
    clock: Clock | None = None  # None: that of the place
    contenders: tuple[Contender, ...] | None = None  # None: cuflash's own and the matmuls

    @property
    def xp(self) -> Any:
        if self.place == "cpu":
            return np
        import cupy

        return cupy


@dataclass
class Line:
    """One contender on one shape.  status: measured, refused, missing, failed or wrong; says: why."""

    name: str
    kind: str
    status: str = "measured"
    says: str = ""
    times: Times | None = None
    flops: int = 0
    n_bytes: int = 0  # of inputs and outputs, each once
    graph: bool = False
    extra_bytes: int | None = None  # memory above inputs and outputs
    verdicts: tuple[Verdict, ...] = ()
    sources: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    asked: str = ""  # the name it was asked by: "auto"

    @property
    def tflops(self) -> float | None:
        return self.flops / self.times.median / 1e12 if self.times else None

    @property
    def tbs(self) -> float | None:
        return self.n_bytes / self.times.median / 1e12 if self.times else None

    @property
    def ratio(self) -> float | None:
        """Largest error over limit; None where nothing was compared."""
        return max((v.error / v.limit if v.limit else 0.0 for v in self.verdicts), default=None)


@dataclass
class Result:
    """Every line of one shape."""

    shape: Shape
    lines: list[Line] = field(default_factory=list)
    sets: int = 1
    stopped: bool = False
    seconds: float = 0.0  # drawing, preparing and checking included

    @property
    def matmul(self) -> float | None:
        """TFLOP/s of the best matmul of the same rounds."""
        return max((x.tflops for x in self.lines if x.kind == "roof" and x.tflops), default=None)

    @property
    def clock(self) -> float | None:
        """Median SM clock over attention's bursts, Hz."""
        found = [x.times.clock for x in self.lines if x.times and x.kind != "roof" and x.times.clock]
        return sorted(found)[len(found) // 2] if found else None

    def peak(self, device: Any) -> float | None:
        """TFLOP/s of the arithmetic units at that clock; None on the CPU."""
        if device is None or device.kind != "cuda":
            return None
        precision = dict(self.shape.settings).get("precision")
        found = roofs.peak(device, self.shape.dtype, self.clock, precision)
        return None if found is None else found / 1e12


@dataclass
class Report:
    task: Task
    results: list[Result] = field(default_factory=list)
    stopped: bool = False
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds of compiling, of trying peers

    @property
    def wrong(self) -> list[tuple[Result, Line]]:
        """cuflash's own lines that computed wrong numbers or failed."""
        return [
            (result, line)
            for result in self.results
            for line in result.lines
            if line.kind == "cuflash" and line.status in ("wrong", "failed")
        ]


def run(task: Task, progress: Progress | None = None) -> Report:
    """Run a task; progress(text, is_shape_done) as it goes."""
    say = progress or (lambda text, done: None)
    report = Report(task)
    start = time.perf_counter()
    clock = task.clock or (CudaClock() if task.place == "gpu" else HostClock())
    try:
        if task.place == "gpu" and task.contenders is None:
            say("compiling", False)
            compile_ahead(task)
            report.phases["compiling"] = time.perf_counter() - start
        says: Says = {}
        if task.peers:
            free = meters.free_bytes() if task.place == "gpu" else None
            tell = lambda text: say(f"trying {text}", False)  # noqa: E731
            began = time.perf_counter()
            with _reference_ahead(task):
                says = probe(task.peers, task.suite.shapes, free_bytes=free, progress=tell)
            report.phases["trying peers"] = time.perf_counter() - began
        for shape in task.suite.shapes:
            result = measure(task, shape, clock, says, say)
            report.results.append(result)
            say(shape.label(), True)
            if result.stopped:
                report.stopped = True
                break
    except KeyboardInterrupt:  # before the first burst of a shape, or a second time while it was checked
        report.stopped = True
    report.seconds = time.perf_counter() - start
    return report


@contextlib.contextmanager
def _reference_ahead(task: Task) -> Iterator[None]:
    """Beside the children, run the reference once on something small: CuPy compiles what it is made of."""

    def once() -> None:
        for shape in dict.fromkeys(tiny_of(shape) for shape in task.suite.shapes):
            Truth(draw(shape, task.xp), samples=1)

    if task.place == "cpu":
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(once)
        yield
        job.exception()  # what is wrong with it, the check of a shape will say again


# ---- one shape


def contenders_of(task: Task, shape: Shape) -> list[Contender]:
    if task.contenders is not None:
        return [*task.contenders, *task.peers]
    torch_is_here = any("torch" in peer.needs and peer.missing() is None for peer in task.peers)
    roof = matmuls(task.place, torch_is_here) if task.suite.metric in ("tflops", "ms") else []
    return [*own(shape.direction, task.place, task.kernels, task.suite.ladder), *roof, *task.peers]


def measure(task: Task, shape: Shape, clock: Clock, says: Says, say: Progress) -> Result:
    """Prepare, time and check every contender on one shape."""
    result, start = Result(shape), time.perf_counter()
    ready: list[tuple[Line, Prepared, Turn]] = []
    inputs = None
    try:
        meters.release()
        cache = 0 if task.place == "cpu" or task.suite.metric in ("host_us", "bytes") else l2_bytes()
        inputs = draw(shape, task.xp, cache)
        result.sets = len(inputs.sets)
        for contender in contenders_of(task, shape):
            say(f"{shape.label()}: {contender.name}", False)
            line = Line(contender.name, contender.kind, asked=contender.name)
            result.lines.append(line)
            made = prepare(contender, inputs, clock, line, says, task.suite.metric)
            if made is not None:
                ready.append((line, *made))
        if task.suite.metric == "bytes":
            for line, prepared, turn in ready:
                _weigh(line, prepared, turn)
        else:
            _time(task, shape, ready, clock, inputs, say)
    except KeyboardInterrupt:
        result.stopped = True
    if inputs is not None:
        _finish(task, inputs, ready)
    result.seconds = time.perf_counter() - start
    if result.stopped:
        result.lines = [x for x in result.lines if x.status != "measured" or x.times or x.extra_bytes]
    return result


def prepare(
    contender: Contender, inputs: Inputs, clock: Clock, line: Line, says: Says, metric: str
) -> tuple[Prepared, Turn] | None:
    """A contender that has run once, or None and the line says why."""
    why = says.get((contender.name, inputs.shape))
    if why is not None:
        line.status = "missing" if "not installed" in why else "refused"
        line.status = "failed" if why.startswith(("crashed", "ended", "gave no")) else line.status
        line.says = why
        return None
    try:
        prepared = contender.prepare(inputs, fresh=metric in ("host_us", "bytes"))
        with prepared.around():
            patience = PLANS if contender.kind == "peer" and inputs.xp is not np else VERY_LONG
            seconds = estimate(prepared.call, prepared.clock or clock, patience)
    except Exception as error:  # a peer may raise anything
        line.status = "refused" if isinstance(error, CuflashError) else "failed"
        line.says = sentence(error)
        return None
    line.name, line.sources, line.details = prepared.name, prepared.sources, prepared.details
    line.flops = inputs.flops if prepared.flops is None else prepared.flops
    line.n_bytes = inputs.least_bytes
    turn = Turn(line.name, prepared.call, prepared.clock or clock, seconds, around=prepared.around)
    return prepared, turn


def _time(
    task: Task, shape: Shape, ready: list[tuple[Line, Prepared, Turn]], clock: Clock, inputs: Inputs,
    say: Progress,
) -> None:  # fmt: skip
    """Rounds over everything that is ready; times go into the turns."""
    if task.suite.metric == "host_us":
        for _, prepared, turn in ready:
            _time_the_host(prepared, turn, clock)
    elif _wants_graph(task.suite, shape, ready):
        for line, prepared, turn in ready:
            line.graph = _replay(prepared, turn, len(inputs.sets))
    turns = [turn for _, _, turn in ready]
    run_rounds(turns, task.protocol, lambda name: say(f"{shape.label()}: {name}", False))
    if task.protocol.sustained:
        for turn in turns:
            if turn.error is None:
                say(f"{shape.label()}: {turn.name}, sustained", False)
                run_sustained(turn, task.protocol.sustained)


def _wants_graph(suite: Suite, shape: Shape, ready: Sequence[tuple[Line, Prepared, Turn]]) -> bool:
    """Whether launches would be a good part of the time of the fastest contender."""
    if suite.graph == "never" or shape.direction == "backward":
        return False
    fastest = min((turn.estimate for line, _, turn in ready if line.kind != "roof"), default=math.inf)
    return suite.graph == "always" or fastest < SHORT


def _replay(prepared: Prepared, turn: Turn, n_sets: int) -> bool:
    """Replay a contender from a CUDA graph that holds every set, if it can be captured."""
    if prepared.capture is None:
        return False
    n = max(n_sets, min(256, math.ceil(GRAPH_SECONDS / max(turn.estimate, 1e-6))))
    try:
        with prepared.around():
            replay = prepared.capture(prepared.call, n)
            turn.estimate = estimate(replay, turn.clock)
    except Exception:  # a call that allocates or waits: it is timed without a graph, and the line says so
        turn.clock.sync()
        return False
    turn.call, turn.per_call = replay, n
    return True


def _time_the_host(prepared: Prepared, turn: Turn, clock: Clock) -> None:
    """From now on a turn is HOST_CALLS calls that nobody waits for."""

    class Waiting(HostClock):
        def burst(self, call: Any, first: int, n: int) -> list[float]:
            found = []
            for _ in range(first + n):
                (prepared.clock or clock).sync()
                found += super().burst(call, 0, 1)
            (prepared.clock or clock).sync()
            return found[first:]

    single = prepared.call
    n = max(1, min(HOST_CALLS, int(0.05 / max(turn.estimate, 1e-9))))

    def call(i: int) -> None:
        for number in range(n):
            single(number)

    turn.clock, turn.call, turn.per_call, turn.estimate = Waiting(), call, n, turn.estimate * n


def _weigh(line: Line, prepared: Prepared, turn: Turn) -> None:
    """Memory of one call above its results."""

    def result_bytes() -> int:
        found = [array.nbytes for array in prepared.results().values() if array is not None]
        return sum(found)

    try:
        with prepared.around():
            line.extra_bytes = meters.peak_bytes(prepared.family, lambda: prepared.call(0), result_bytes)
    except Exception as error:
        turn.error = sentence(error)
        return
    if line.extra_bytes is None:
        line.status, line.says = "refused", "its library does not tell"


def _finish(task: Task, inputs: Inputs, ready: Sequence[tuple[Line, Prepared, Turn]]) -> None:
    """Put times into the lines, and check what was computed while they were taken."""
    truth = None
    for line, prepared, turn in ready:
        if turn.error is not None:
            line.status, line.says = "failed", turn.error
            continue
        if not turn.times.seconds and line.extra_bytes is None:
            continue
        line.times = turn.times if turn.times.seconds else None
        if line.kind == "roof":
            continue
        try:
            truth = truth or Truth(inputs, task.samples)
            line.verdicts = tuple(truth.judge(prepared.results()))
        except Exception as error:
            line.status, line.says, line.times = "failed", f"not checked: {sentence(error)}", None
            continue
        wrong = [verdict.message for verdict in line.verdicts if not verdict.passed]
        if wrong:
            line.status, line.says, line.times = "wrong", "; ".join(wrong), None
            line.extra_bytes = None


def l2_bytes() -> int:
    """Size of the current GPU's L2."""
    import cupy

    return cupy.cuda.Device().attributes["L2CacheSize"]
