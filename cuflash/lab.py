"""For whoever changes a kernel: compile, check, time and compare one file, in one call.

    print(cuflash.lab("kernels/fwd_02_tiled.cu"))        # a kernel edited where it is
    print(cuflash.lab("mine.cu"))                        # a changed copy, anywhere, with the same entry point
    cuflash lab mine.cu                                  # the same from a shell

Said, in this order: registers, spills and the compiler's words; whether the results are right; how fast it is
beside the kernel it came from and the rung before; what changed since each (the header's "Read after").
Without a GPU it is compiled for sm_90, and the check runs in the emulator, which also counts its bytes.
"""

from __future__ import annotations

import argparse
import difflib
import html
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cuflash
from cuflash import build, checks, devices, emulator, launch, plan, rows
from cuflash.bench import report as report_
from cuflash.bench.contenders import Matmul, Prepared
from cuflash.bench.inputs import Inputs
from cuflash.bench.run import Task, run
from cuflash.bench.shapes import Shape, Sizes, Suite, grid
from cuflash.check import check
from cuflash.errors import CuflashError
from cuflash.lab_source import Source, names_of, overlay, parent_of, row_of, stem_of, workshop
from cuflash.lab_text import lines

# The emulator builds each combination with the C++ compiler, seconds each: these need two.
EMULATED_CASES = ("ragged grouped heads", "causal")
SHAPES = {"head_dims": (64, 128), "lengths": (4096,)}
BUILD_ARCH = "sm_90"  # compiled for, where there is no GPU


@dataclass(frozen=True)
class Compiled:
    """One build of the file: an entry point, what it was built for, and what the compiler said."""

    entry: str
    what: str
    registers: int
    spills: int
    smem_bytes: int
    blocks_per_sm: int | None
    log: str


@dataclass
class Lab:
    """What `lab` found.  Prints itself; passed: it compiles and every result is right."""

    source: Source
    compiled: list[Compiled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    check: checks.Report | None = None
    where: str = ""
    traffic: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # read, written, predicted
    timing: dict[str, Any] | None = None  # a payload of bench/report.py
    base: str | None = None  # the version that it is a change of, and what changed
    change: list[str] = field(default_factory=list)
    parent: str | None = None  # the rung before, and what changed since
    diff: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.check is not None and self.check.passed

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def lab(
    path: str | Path,
    *,
    against: str | Path | None = None,
    shapes: Sequence[Shape] | None = None,
    cases: str | Sequence[str] | None = None,
    dtypes: str | Sequence[str] | None = None,
    arch: str = BUILD_ARCH,
    timing: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Lab:
    """Compile, check, time and compare one kernel file.

    | argument | meaning |
    |---|---|
    | path | a .cu file: one of kernels/, or a changed copy of one with the same entry point |
    | against | another version of the same kernel to compare with; None: the one in the package |
    | shapes | bench.shapes.Shape to time; None: head_dim 64 and 128, length 4,096, causal and not |
    | cases, dtypes | of `cuflash check`, one or more; None: its quick ones on a GPU, two in the emulator |
    | arch | what to compile for where there is no GPU |
    | timing | False leaves the times out |
    | progress | called with a sentence as it goes |

        >>> found = cuflash.lab("kernels/fwd_02_tiled.cu")
        >>> found.passed, [build.registers for build in found.compiled]

    Raises CuflashError with the compiler's log when the file does not compile, and when it is no kernel.
    """
    say = progress or (lambda text: None)
    start = time.perf_counter()
    for name, given in (("path", path), ("against", against or "none")):
        if not isinstance(given, (str, os.PathLike)):
            got = f"{name} has the type {type(given).__name__}"
            raise CuflashError(f"lab: {got}; needs the path of a .cu file.")
    cases, dtypes = ([names] if isinstance(names, str) else names for names in (cases, dtypes))
    with workshop(Path(path)) as source:
        found = Lab(source)
        _compare(found, Path(against) if against else None)
        has_gpu = devices.gpu_count() > 0
        device = devices.find(None) if has_gpu else devices.named(arch)
        launch.forget()  # what an earlier call loaded is another version
        with build.sources_from(source.folder, source.names):
            say(f"compiling for {device.label}")
            _compile(found, device)
            say("checking")
            _check(found, has_gpu, cases, dtypes)
            if not has_gpu:
                _count(found)
        if timing and has_gpu:
            say("timing")
            _time(found, Path(against) if against else None, shapes, say)
        elif timing:
            found.notes.append("no CUDA GPU here: nothing was timed")
        launch.forget()
    found.seconds = time.perf_counter() - start
    return found


# ---- the steps


def _compare(found: Lab, against: Path | None) -> None:
    """The diffs from the version that the file is a change of, and from the parent rung."""
    source, home = found.source, build.kernels_directory()
    if against is not None:
        if not against.is_file():
            raise CuflashError(f"lab: {against} is not there; --against needs the path of a .cu file.")
        other = row_of(against).name
        if other != source.row.name:
            raise CuflashError(f"lab: {against} is a version of {other}, not of {source.row.name}.")
        found.base = str(against)
        found.change = _diff(against, source.path)
    elif source.shipped is not None:
        found.base = f"{stem_of(source.path)} as shipped"
        found.change = _diff(source.shipped / f"{stem_of(source.path)}.cu", source.path)
    found.parent = parent_of(source.text)
    if found.parent is None or not (home / f"{found.parent}.cu").is_file():
        found.notes.append("the header names no rung to read before: nothing to diff against")
        return
    found.diff = _diff(home / f"{found.parent}.cu", source.path)


def _diff(before: Path, after: Path) -> list[str]:
    """Lines of a unified diff, comments apart."""
    texts = (build.strip_comments(path.read_text(encoding="utf-8")).splitlines() for path in (before, after))
    return list(difflib.unified_diff(*texts, before.name, after.name, lineterm="", n=1))


# ---- compile


def _compile(found: Lab, device: devices.Device) -> None:
    """Every combination that is timed, for one device: registers, spills, the compiler's words."""
    try:
        build.nvrtc_version()
    except CuflashError as error:
        found.notes.append(f"not compiled: {str(error).splitlines()[0]}")
        return
    for shape in _shapes(found.source, None):
        one = _plan(shape, device, found.source.row.name)
        if one is None or one.main is None:
            continue
        files = (found.source.row.name, stem_of(found.source.path))
        own = [step for step in one.launches if step.step.file in files]
        for step, built in zip(own, build.compile_all([step.job for step in own]), strict=True):
            resources = built.entries.get(step.name)
            if resources is None:
                continue
            spills = resources.spill_stores + resources.spill_loads
            fits = plan.occupancy(device, step.block[0], resources.registers, step.smem_bytes)
            causal = ", causal" if shape.causal else ""
            what = f"{shape.dtype}, head_dim {shape.head_dim}{causal}, {step.job.target}"
            log = _words(built.report.get("log", ""))
            made = Compiled(step.name, what, resources.registers, spills, step.smem_bytes, fits, log)
            if made not in found.compiled:
                found.compiled.append(made)


def _words(log: str) -> str:
    """The compiler's log without ptxas' lines of numbers."""
    numbers = ("ptxas info", "Used ", "bytes stack frame", "Function properties")
    lines = (line.strip("\0 ") for line in log.splitlines())
    return "\n".join(line for line in lines if line and not any(word in line for word in numbers))


def _shapes(source: Source, given: Sequence[Shape] | None) -> list[Shape]:
    if given is not None:
        return list(given)
    preferred = ("bfloat16", "float16", "float32", "float64")
    dtype = next(name for name in preferred if name in source.row.dtypes)
    return list(grid(source.directions, Sizes(), **SHAPES, dtype=dtype))


def _plan(shape: Shape, device: devices.Device, row: str) -> Any:
    """The plan of a shape, or None where the row refuses it."""
    q = cuflash.spec((shape.batch, shape.len_q, shape.heads, shape.head_dim), shape.dtype)
    backward = shape.direction == "backward"
    try:
        return cuflash.explain(q, q, q, **dict(shape.settings), backward=backward, kernel=row, device=device)
    except CuflashError:
        return None


# ---- check


def _check(found: Lab, has_gpu: bool, cases: Sequence[str] | None, dtypes: Sequence[str] | None) -> None:
    """The cases of `cuflash check`: on the GPU, or a few in the emulator."""
    row = found.source.row
    xp: Any = np
    if has_gpu:
        import cupy as xp
    else:
        cases = cases or EMULATED_CASES
        dtypes = dtypes or row.dtypes[:1]
    task = checks.task([row.name], True, dtypes, None if cases is None else list(cases), xp)
    task = replace(task, dtypes=tuple(name for name in task.dtypes if name in row.dtypes))
    found.check = checks.run(task)
    found.where = devices.find(None).label if has_gpu else "the emulator"


def _count(found: Lab) -> None:
    """Bytes of global memory that the emulator counts on one small problem, beside the row's own formula."""
    direction = found.source.directions[0]
    dtype = found.source.row.dtypes[0]
    case = checks.find(["causal"])[0]
    arrays, options = checks.make(case, dtype)
    given = {name: arrays[name] for name in "qkv"}
    if direction == "backward":
        out, lse = cuflash.attention(**given, **options, return_lse=True)
        given = {"dout": arrays["dout"], **given, "out": out, "lse": lse}
    try:
        problem, operands = check(direction, given, options)
        made = plan.make(problem, devices.HOST, found.source.row.name)
        with emulator.recording() as launches:
            launch.run(made, operands)
    except CuflashError as error:
        found.notes.append(f"bytes not counted: {str(error).splitlines()[0]}")
        return
    for one in launches:
        for name, moved in one.arrays.items():
            name = name.removeprefix("workspace.")
            read, written, predicted = found.traffic.get(name, (0, 0, sum(made.traffic.get(name, (0, 0)))))
            found.traffic[name] = (read + moved[0], written + sum(moved[1:]), predicted)


# ---- time


@dataclass(frozen=True)
class Version:
    """A row compiled from a folder of sources, as a contender: several versions of one row run side by side.

    It calls its prepared launches itself: attention() would find those of the version before.
    """

    name: str
    row: str
    folder: Path
    names: dict[str, str] = field(default_factory=dict)
    kind: str = "cuflash"

    def prepare(self, inputs: Inputs, fresh: bool) -> Prepared:
        direction, one = inputs.shape.direction, inputs.first
        given = {name: one[name] for name in "qkv"}
        if direction == "backward":
            out, lse = cuflash.attention(**given, **inputs.options, return_lse=True)
            given = {"dout": one["dout"], **given, "out": out, "lse": lse}
        problem, operands = check(direction, given, inputs.options)
        launch.forget()
        with build.sources_from(self.folder, self.names):
            made = plan.make(problem, devices.find(None), self.row)
            results = launch.run(made, operands)
            details = {"registers": made.registers, "spills": made.spills}
        launch.forget()
        kept = {"results": results}

        def call(i: int) -> None:
            kept["results"] = launch.run(made, operands)

        return Prepared(call, lambda: kept["results"], self.name, family="cupy", details=details)


def _time(
    found: Lab, against: Path | None, shapes: Sequence[Shape] | None, say: Callable[[str], None]
) -> None:
    """This version, the one it came from and the rung before, in the same shuffled rounds."""
    source = found.source
    with tempfile.TemporaryDirectory(prefix="cuflash-lab-") as temporary:
        home = build.kernels_directory()
        versions = [Version(source.path.name, source.row.name, source.folder, source.names)]
        if against is not None:
            other = overlay(Path(temporary) / "kernels", against)
            versions.append(Version(f"against {against.name}", source.row.name, other, names_of(against)))
        elif source.shipped is not None:
            versions.append(Version(f"{source.row.name} as shipped", source.row.name, source.shipped))
        table = rows.FORWARD if source.directions[0] == "forward" else rows.BACKWARD
        if found.parent in {row.name for row in table}:
            versions.append(Version(found.parent, found.parent, home))
        suite = Suite("lab", tuple(_shapes(source, shapes)), graph="never", own=True)
        task = Task(suite, "gpu", contenders=(*versions, Matmul("cupy")))
        found.timing = report_.payload(run(task, lambda text, done: say(text)))


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """`cuflash lab FILE.cu`: 0 when it compiles and is right, 1 when a result is wrong, 2 for bad input."""
    top = argparse.ArgumentParser(prog="cuflash lab", description=lab.__doc__.splitlines()[0])
    top.add_argument("file", metavar="FILE.cu", help="a kernel, or a changed copy with the same entry point")
    top.add_argument("--against", metavar="FILE.cu", help="another version to compare with")
    top.add_argument("--cases", type=_words_of, metavar="A,B", help="cases of `cuflash check`, by name")
    top.add_argument("--dtypes", type=_words_of, metavar="A,B")
    top.add_argument("--len", type=int, metavar="N", help="time this length instead of 4,096")
    top.add_argument("--head-dim", type=int, metavar="N", help="time this head_dim instead of 64 and 128")
    top.add_argument("--arch", default=BUILD_ARCH, metavar="SM", help="compiled for, without a GPU (sm_90)")
    top.add_argument("--no-timing", action="store_true")
    top.add_argument("--diff", action="store_true", help="print what changed, line by line")
    options = top.parse_args(arguments)
    chosen = None
    if options.len or options.head_dim:
        with workshop(Path(options.file)) as source:
            base = _shapes(source, None)
        sizes = Sizes(
            head_dims=(options.head_dim,) if options.head_dim else None,
            lengths=(options.len,) if options.len else None,
        )
        chosen = grid(source.directions, sizes, **SHAPES, dtype=base[0].dtype)
    found = lab(
        options.file, against=options.against, shapes=chosen, cases=options.cases, dtypes=options.dtypes,
        arch=options.arch, timing=not options.no_timing, progress=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    print(found)
    if options.diff:
        print("\n".join(found.change or found.diff))
    return 0 if found.passed else 1


def _words_of(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


class _Callable(ModuleType):
    """cuflash.lab is this module and also the function in it: `cuflash.lab(path)`."""

    def __call__(self, path: str | Path, **options: Any) -> Lab:
        return lab(path, **options)


sys.modules[__name__].__class__ = _Callable
