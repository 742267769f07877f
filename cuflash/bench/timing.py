"""Clocks, bursts and rounds: how a time is taken, and what is said of many.

All contenders of a shape are shuffled anew in every round, so that none is always first on a cool GPU.  A
turn is a pause, one launch that does not count, and a burst of a few that do: back to back, cards throttle
and times say who ran first.  Medians and quartiles are reported, never means.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Call = Callable[[int], Any]  # run set number i
WAIT_CYCLES = 1_000_000  # half a millisecond: a launch's few microseconds are less than 1 % of it
GATE_CYCLES = 6_000_000  # 3 ms, in which the host queues a burst: then it is the GPU that is timed
WAIT = """
extern "C" __global__ void wait_cycles(long long n) {
  for (long long start = clock64(); clock64() - start < n;) {}
}
"""
AWAITED_SECONDS, AWAITED_LAUNCHES = 0.01, 64  # what an awaited burst takes, at least, in how many launches
ONE_TURN = 3.0  # seconds: a call that takes longer is timed once, when it is first made
VERY_LONG = 1.0  # seconds: not made a second time before it is timed
PLANS = 20.0  # seconds that a library on a GPU may take to load and plan, in its first call
LONG = 0.05  # seconds: a call that takes longer is not launched before it is timed


@dataclass(frozen=True)
class Rounds:
    """The protocol.  pause in seconds; launches: timed ones of a burst; budget: seconds a burst may take."""

    rounds: int = 3
    launches: int = 4
    pause: float = 0.012
    budget: float = 0.2
    sustained: float | None = None  # seconds back to back, after the rounds
    seed: int = 0

    def burst_of(self, estimate: float) -> tuple[int, int]:
        """(launches that do not count, launches that do) for a call that takes about `estimate` seconds."""
        launches = max(1, min(self.launches, int(self.budget / max(estimate, 1e-9))))
        return (0 if estimate > LONG else 1), launches


class Clock(Protocol):
    """Where time is taken.  burst: seconds of each of n launches, after `first` that do not count."""

    def burst(self, call: Call, first: int, n: int) -> list[float]: ...
    def pause(self, seconds: float) -> None: ...
    def sync(self) -> None: ...
    @property
    def mhz(self) -> float | None: ...


class HostClock:
    """The processor's clock around each call: for NumPy, and for libraries that wait for their results."""

    mhz = None

    def burst(self, call: Call, first: int, n: int) -> list[float]:
        for i in range(first):
            call(i)
        found = []
        for i in range(first, first + n):
            start = time.perf_counter()
            call(i)
            found.append(time.perf_counter() - start)
        return found

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def sync(self) -> None:
        pass


class CudaClock:
    """CUDA events on the default stream, where CuPy and PyTorch both launch.

    A burst that begins with launches that do not count waits behind a kernel until the host has queued it:
    a library whose backward costs the host more than the GPU is not timed by its host.
    mhz: the SM clock right after the last burst, from a kernel that waits a known number of cycles.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._wait = cupy.RawKernel(WAIT, "wait_cycles")
        self.mhz: float | None = None

    def burst(self, call: Call, first: int, n: int) -> list[float]:
        cuda = self._cupy.cuda
        if first:
            self._wait((1,), (1,), (np.int64(GATE_CYCLES),))
        for i in range(first):
            call(i)
        marks = [cuda.Event() for _ in range(n + 2)]
        marks[0].record()
        for i in range(n):
            call(first + i)
            marks[i + 1].record()
        self._wait((1,), (1,), (np.int64(WAIT_CYCLES),))
        marks[n + 1].record()
        marks[n + 1].synchronize()
        self.mhz = WAIT_CYCLES / cuda.get_elapsed_time(marks[n], marks[n + 1]) / 1e3
        return [cuda.get_elapsed_time(marks[i], marks[i + 1]) / 1e3 for i in range(n)]

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def sync(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()


class AwaitedClock(HostClock):
    """The processor's clock around a whole burst: launches go out back to back, `wait` ends the last.

    For libraries with streams of their own, which events on the default stream do not see (JAX).  Short calls
    are launched more often than asked, or a good part of the time would be the way there and the wait.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def burst(self, call: Call, first: int, n: int) -> list[float]:
        start = time.perf_counter()
        for i in range(first):
            call(i)
        self._wait()
        if first:
            one = (time.perf_counter() - start) / first
            n = max(n, min(AWAITED_LAUNCHES, int(AWAITED_SECONDS / max(one, 1e-9))))
        start = time.perf_counter()
        for i in range(first, first + n):
            call(i)
        self._wait()
        return [(time.perf_counter() - start) / n]


@dataclass
class Times:
    """What was measured of one contender: seconds of single launches, in the order they were taken."""

    seconds: list[float] = field(default_factory=list)
    mhz: list[float] = field(default_factory=list)
    sustained: float | None = None  # seconds a launch, back to back

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a part of the median."""
        low, high = self.quartiles
        return (high - low) / self.median if self.median else 0.0

    @property
    def clock(self) -> float | None:
        """Median SM clock in Hz."""
        return 1e6 * statistics.median(self.mhz) if self.mhz else None


@dataclass
class Turn:
    """A contender in the rounds.  per_call: launches inside one call (a CUDA graph of several)."""

    name: str
    call: Call
    clock: Clock
    estimate: float
    per_call: int = 1
    times: Times = field(default_factory=Times)
    around: Callable[[], Any] = contextlib.nullcontext
    error: str | None = None


def estimate(call: Call, clock: Clock, patience: float = VERY_LONG) -> float:
    """Seconds of one call, roughly: of the second, so that what is made on first use is there.

    More calls are made while they become much faster (libraries that plan, or load, when first called).  A
    call that takes longer than `patience` is not made again.
    """
    least = math.inf
    for i in range(4):
        start = time.perf_counter()
        call(i)
        clock.sync()
        seconds = time.perf_counter() - start
        if seconds > patience or (i and (seconds <= LONG or seconds > least / 2)):
            return min(least, seconds)
        least = min(least, seconds)
    return least


def run_rounds(
    turns: Sequence[Turn], protocol: Rounds, progress: Callable[[str], None] | None = None
) -> None:
    """Fill in the times of every turn.  A call that raises ends that contender, and says why.

    A contender that takes more than ONE_TURN has no turn: what its first call took is its time.

    KeyboardInterrupt passes through; what was measured before it stays in the turns.
    """
    for turn in turns:
        if turn.estimate > ONE_TURN:
            turn.times.seconds.append(turn.estimate / turn.per_call)
    for number in range(protocol.rounds):
        order = [turn for turn in turns if turn.error is None and turn.estimate <= ONE_TURN]
        random.Random(protocol.seed + number).shuffle(order)
        for turn in order:
            take(turn, protocol)
            if progress is not None:
                progress(turn.name)


def take(turn: Turn, protocol: Rounds) -> None:
    """One turn: pause, launches that do not count, a burst."""
    first, n = protocol.burst_of(turn.estimate)
    turn.clock.pause(protocol.pause)
    try:
        with turn.around():
            seconds = turn.clock.burst(turn.call, first, n)
    except Exception as error:  # whatever a peer raises; the others go on
        turn.error = f"{type(error).__name__}: {error}"
        return
    turn.times.seconds += [one / turn.per_call for one in seconds]
    if turn.clock.mhz is not None:
        turn.times.mhz.append(turn.clock.mhz)


def run_sustained(turn: Turn, seconds: float) -> None:
    """Back to back without pauses; the median of the second half, when the card is as hot as it gets.

    A call that raises ends that contender, and says why.
    """
    n = max(1, min(64, int(0.1 / max(turn.estimate, 1e-9))))
    end, found = time.perf_counter() + seconds, []
    try:
        with turn.around():
            while not found or time.perf_counter() < end:
                found += turn.clock.burst(turn.call, 0, n)
    except Exception as error:  # whatever a peer raises; the others go on
        turn.error = f"{type(error).__name__}: {error}"
        return
    late = found[len(found) // 2 :]
    turn.times.sustained = statistics.median(late) / turn.per_call


# ---- CUDA graphs


def capture_cupy(call: Call, n: int) -> Call:
    """Set 0 to n-1 as one CUDA graph: a function that replays it on the default stream.

    Raises what CUDA raises when a call cannot be captured (it allocates, or waits).
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for i in range(n):  # what is allocated on first use is allocated before the capture
            call(i)
        stream.synchronize()
        stream.begin_capture()
        try:
            for i in range(n):
                call(i)
        finally:
            graph = stream.end_capture()
    default = cupy.cuda.Stream.null

    def replay(i: int, _stream: Any = stream) -> None:  # the stream's memory belongs to the graph
        graph.launch(default)

    return replay


def capture_torch(call: Call, n: int) -> Call:
    """The same for PyTorch."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(n):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            call(i)
    return lambda i: graph.replay()
