"""Try a peer on every shape in a child process, so that one that crashes or hangs takes nothing with it.

One child per peer walks the shapes: it imports the library once and says a line per shape.  When it dies or
stays silent for too long, that shape is marked and a new child goes on with the next.

    says = probe(peers, shapes)             # {(peer name, shape): None when it works, else why not}
    python -m cuflash.bench.probe           # the child: a request on stdin, JSON lines on stdout
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cuflash.bench.meters import release
from cuflash.bench.peer import Peer
from cuflash.bench.shapes import Shape
from cuflash.errors import CuflashError

FIRST_SECONDS = 180.0  # to import a library and run the first shape
SHAPE_SECONDS = 90.0  # for each shape: some peers compile
AT_ONCE = 12  # children side by side; those that hold scores run one at a time
PARTS = 5  # children of a peer that compiles
MEMORY_PART = 0.6  # of the free memory that a peer may need
BROKEN_CONTEXT = 75  # exit code of a child that said its line and cannot use the GPU any more

Says = dict[tuple[str, Shape], str | None]


def probe(
    peers: Sequence[Peer],
    shapes: Sequence[Shape],
    *,
    free_bytes: float | None = None,
    seconds: tuple[float, float] = (FIRST_SECONDS, SHAPE_SECONDS),
    progress: Callable[[str], None] | None = None,
) -> Says:
    """Why each peer cannot run each shape; None where it can.  progress(text) once per (peer, shape)."""
    says: Says = {}
    wanted: dict[str, list[Shape]] = {}
    step = progress or (lambda text: None)
    for peer in peers:
        missing = peer.missing()
        for shape in shapes:
            why = missing or peer.refuses(shape)
            needed = peer.needed_bytes(shape)
            if why is None and free_bytes is not None and needed > MEMORY_PART * free_bytes:
                why = f"would need {needed / 1e9:.0f} GB for its scores, {free_bytes / 1e9:.0f} GB are free"
            if why is None:
                wanted.setdefault(peer.name, []).append(shape)
            else:
                says[peer.name, shape] = why
                step(f"{peer.name}: {why}")
    by_name = {peer.name: peer for peer in peers}
    light = [name for name in wanted if not by_name[name].score_arrays]
    heavy = [name for name in wanted if by_name[name].score_arrays]

    children = Children()

    def one(name: str, shapes: Sequence[Shape]) -> None:
        for shape, why in walk(by_name[name], shapes, seconds, children):
            says[name, shape] = why
            step(f"{name}, {shape.label()}")

    with ThreadPoolExecutor(max(1, min(AT_ONCE, os.cpu_count() or 1))) as pool:
        try:
            jobs = []
            for name in light:
                jobs += [pool.submit(one, name, part) for part in parts_of(by_name[name], wanted[name])]
            jobs.append(pool.submit(lambda: [one(name, wanted[name]) for name in heavy]))
            for job in jobs:
                job.result()
        except BaseException:  # Ctrl-C: the pool would wait for its children to finish
            children.end()
            raise
    return says


def parts_of(peer: Peer, shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Shapes for each child of a peer: those that share a compiled kernel go to the same one."""
    if not peer.compiles:
        return [list(shapes)]
    groups: dict[Shape, list[Shape]] = {}
    for shape in shapes:
        groups.setdefault(peer.built_for(shape), []).append(shape)
    parts: list[list[Shape]] = [[] for _ in range(min(PARTS, len(groups)))]
    for number, group in enumerate(groups.values()):
        parts[number % len(parts)] += group
    return parts


class Children:
    """The processes that run now; after end() there are none, and no new ones."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self.ended = False

    def start(self, request: dict[str, Any]) -> subprocess.Popen | None:
        with self._lock:
            if self.ended:
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", "cuflash.bench.probe"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,  # Ctrl-C goes to the parent alone, which ends its children
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )  # fmt: skip
            self._running.add(process)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request))
            process.stdin.close()
        return process

    def stop(self, process: subprocess.Popen) -> None:
        process.kill()
        process.wait()
        process.stdout.close()
        with self._lock:
            self._running.discard(process)

    def end(self) -> None:
        with self._lock:
            self.ended = True
            for process in self._running:
                process.kill()


def walk(
    peer: Peer, shapes: Sequence[Shape], seconds: tuple[float, float], children: Children
) -> Iterator[tuple[Shape, str | None]]:
    """(shape, why not or None) for each shape, with a new child after every death."""
    left = list(shapes)
    while left and not children.ended:
        request = {
            "module": peer.module,
            "peer": peer.name,
            "shapes": [shape.as_json() for shape in left],
        }
        process = children.start(request)
        if process is None:
            return
        lines = _lines(process)
        try:
            limit = seconds[0]
            while left:
                says = _next(process, lines, limit)
                if says == AGAIN:
                    break
                limit = seconds[1]
                yield left.pop(0), says[1]
                if says[0] == "died":
                    break
        finally:
            children.stop(process)


def _lines(process: subprocess.Popen) -> queue.Queue[str | None]:
    """What the child prints, None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(ValueError):  # closed while it was read
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


AGAIN = ("again", None)  # the child asks for a fresh one: its GPU context is broken


def _next(
    process: subprocess.Popen, lines: queue.Queue[str | None], seconds: float
) -> tuple[str, str | None]:
    """("says", why not or None), ("died", why) or AGAIN."""
    while True:
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            return "died", f"gave no result in {seconds:.0f} s"
        if line is None:
            code = process.wait()
            return AGAIN if code == BROKEN_CONTEXT else ("died", _death(code))
        with contextlib.suppress(ValueError):
            return "says", json.loads(line)["says"]


def _death(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"crashed ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def sentence(error: BaseException) -> str:
    """An exception in one line of a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    text = text if isinstance(error, CuflashError) else f"{type(error).__name__}: {text}"
    return text[:160]


def tried(peer: Peer, shape: Shape) -> str | None:
    """Run a peer once on a shape, here: None, or why it cannot."""
    from cuflash.bench.inputs import draw

    try:
        import numpy

        xp = numpy if peer.place == "cpu" else importlib.import_module("cupy")
        prepared = peer.prepare(draw(shape, xp), fresh=False)
        with prepared.around():
            prepared.call(0)
            if prepared.clock is not None:
                prepared.clock.burst(prepared.call, 0, 1)
        if xp is not numpy:
            xp.cuda.runtime.deviceSynchronize()
        prepared.results()
    except Exception as error:  # whatever a library raises is its answer
        return sentence(error)
    return None


def main() -> int:
    """The child.  Lines of its own go out on the real stdout; what libraries print goes nowhere."""
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    known = {peer.name: peer for peer in importlib.import_module(request["module"]).PEERS}
    peer = known[request["peer"]]
    for data in request["shapes"]:
        says = tried(peer, Shape.from_json(data))
        print(json.dumps({"says": says}), file=out, flush=True)
        if peer.place == "gpu" and not release():
            return BROKEN_CONTEXT
    return 0


if __name__ == "__main__":
    sys.exit(main())
