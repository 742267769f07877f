"""`cuflash check`: is what runs on this machine right?  Every row, every dtype, the fixed list of cases.py.

Each result is compared with the float64 reference by the rule of judge.py.  The forward runs twice, once into
memory full of NaN, and the two must agree bit for bit; gradients are written into memory full of NaN too.

    report = run(plan_of_check(quick=True))
    report.passed, report.summary
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import cuflash
from cuflash import build, devices, plan, rows
from cuflash.arrays import numpy_dtype, spec
from cuflash.cases import Case, find, make, wide
from cuflash.check import check
from cuflash.copies import BY_TMA
from cuflash.errors import CuflashError
from cuflash.judge import Draws, Verdict, judge_drawn, to_numpy
from cuflash.problem import FLOAT_DTYPES, Problem

NUMPY = "numpy"  # the row that is no kernel: tiled.py
FLOAT32_JUDGED = ("lse", "dsink", "dalibi_slopes")  # whatever the input dtype
GRADIENT_OF = {
    "dq": "q",
    "dk": "k",
    "dv": "v",
    "dbias": "bias",
    "dsink": "sink",
    "dalibi_slopes": "alibi_slopes",
}


# Exact results by name, draws of the dtype's baseline, draws of the accumulation dtype's.
Answers = tuple[dict[str, Any], Draws, Draws]


@dataclass(frozen=True)
class Line:
    """One row on one case: status is "passed", "failed" or "refused"; message says why it is not "passed"."""

    row: str
    direction: str
    case: str
    dtype: str
    status: str
    message: str = ""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def ratio(self) -> float:
        """Largest error over limit of its arrays: 1 is the edge.  0 where nothing was compared."""
        return max((v.error / v.limit if v.limit else 0.0 for v in self.verdicts), default=0.0)


@dataclass(frozen=True)
class Task:
    """What to run: rows of each direction, cases, dtypes, and the module whose arrays go in.

    xp is numpy or cupy, or None for a task that is only compiled, for a GPU elsewhere.
    """

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    cases: tuple[Case, ...]
    dtypes: tuple[str, ...]
    xp: Any
    quick: bool

    def __len__(self) -> int:
        return len(self.cases) * len(self.dtypes) * (len(self.forward) + len(self.backward))


@dataclass
class Report:
    """Every line of a run."""

    task: Task
    lines: list[Line] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True when something was compared and nothing failed."""
        statuses = [line.status for line in self.lines]
        return "passed" in statuses and "failed" not in statuses

    @property
    def failures(self) -> list[Line]:
        return [line for line in self.lines if line.status == "failed"]

    def summary(self) -> list[dict[str, Any]]:
        """One entry per (row, direction): counts, and the line that came nearest to its limit."""
        entries = []
        for key in dict.fromkeys((line.row, line.direction) for line in self.lines):
            lines = [line for line in self.lines if (line.row, line.direction) == key]
            worst = max(lines, key=lambda line: line.ratio)
            entries.append(
                {
                    "row": key[0],
                    "direction": key[1],
                    **{
                        status: sum(x.status == status for x in lines)
                        for status in ("passed", "failed", "refused")
                    },
                    "worst_ratio": worst.ratio,
                    "worst": f"{worst.case}, {worst.dtype}" if worst.ratio else "",
                }
            )
        return entries

    def payload(self) -> dict[str, Any]:
        """For the record: the summary, the largest error per row, dtype and array, every failure."""
        worst: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        for line in self.lines:
            for v in line.verdicts:
                key = (line.row, line.direction, line.dtype, v.name)
                ratio = v.error / v.limit if v.limit else 0.0
                if key not in worst or not ratio <= worst[key]["ratio"]:
                    worst[key] = {"ratio": ratio, "error": v.error, "limit": v.limit, "case": line.case}
        names = ("row", "direction", "dtype", "array")
        refusals = {(line.row, line.message) for line in self.lines if line.status == "refused"}
        return {
            "passed": self.passed,
            "quick": self.task.quick,
            "where": "GPU" if self.task.xp is not np else "CPU",
            "cases": [case.name for case in self.task.cases],
            "dtypes": list(self.task.dtypes),
            "summary": self.summary(),
            "largest_errors": [
                {**dict(zip(names, key, strict=True)), **entry} for key, entry in worst.items()
            ],
            "refusals": [{"row": row, "says": says} for row, says in sorted(refusals)],
            "failures": [
                {"row": x.row, "direction": x.direction, "case": x.case, "dtype": x.dtype, "says": x.message}
                for x in self.failures
            ],
        }


def names_of(table: Iterable[Any]) -> list[str]:
    return [row.name for row in table]


def select(asked: Sequence[str] | None, xp: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(forward rows, backward rows) to run: those asked for, else every row on a GPU and tiled.py on the CPU.

    A row in both directions (std_00_unfused) is in both.  On the CPU a kernel asked for by name runs
    emulated.
    """
    forward, backward = names_of(rows.FORWARD), names_of(rows.BACKWARD)
    if asked is None:
        return ((NUMPY,), (NUMPY,)) if xp is np else (tuple(forward), tuple(backward))
    known = dict.fromkeys([NUMPY, *forward, *backward])
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise CuflashError(f"check: unknown row {', '.join(unknown)}; known: {', '.join(known)}.")
    if NUMPY in asked and xp is not np:
        raise CuflashError("check: the row numpy is for the CPU; add --device cpu.")
    return (
        tuple(name for name in asked if name in (NUMPY, *forward)),
        tuple(name for name in asked if name in (NUMPY, *backward)),
    )


def task(
    asked: Sequence[str] | None = None,
    quick: bool = False,
    dtypes: Sequence[str] | None = None,
    case_names: list[str] | None = None,
    xp: Any = np,
) -> Task:
    """The task for a command line; unknown names are errors in words."""
    unknown = [name for name in dtypes or () if name not in FLOAT_DTYPES]
    if unknown:
        raise CuflashError(f"check: unknown dtype {', '.join(unknown)}; known: {', '.join(FLOAT_DTYPES)}.")
    forward, backward = select(asked, xp)
    return Task(forward, backward, tuple(find(case_names, quick)), tuple(dtypes or FLOAT_DTYPES), xp, quick)


def run(task: Task, progress: Callable[[Line, int, int], None] | None = None) -> Report:
    """Run a task.  progress(line, done, total) after every line."""
    report = Report(task)
    for case in task.cases:
        for dtype in task.dtypes:
            expected = Expected(case, dtype)
            for direction, names in (("forward", task.forward), ("backward", task.backward)):
                for row in names:
                    line = one(row, direction, expected, task.xp)
                    report.lines.append(line)
                    if progress is not None:
                        progress(line, len(report.lines), len(task))
    return report


def jobs(task: Task, device: Any) -> list[build.Job]:
    """Every build that the task's kernels need on a device of devices.py, once.  Nothing is computed."""
    plans = []
    for case in task.cases:
        for dtype in task.dtypes:
            for direction, names in (("forward", task.forward), ("backward", task.backward)):
                problem = problem_of(case, dtype, direction)
                for name in names:
                    with contextlib.suppress(CuflashError):  # a row that refuses needs no build
                        plans.append(plan.make(problem, device, name))
    lengths = build.Job("pass_lengths", (), build.target_of(device.arch))
    return [*plan.jobs(plans), lengths]


def problem_of(case: Case, dtype: str, direction: str) -> Problem:
    """The Problem of a case as it is on a GPU: arrays there start at a multiple of 256 bytes."""
    arrays, options = make(case, dtype)
    lengths = [name for name in options if "lengths" in name or "seqlens" in name]
    specs = {name: spec_of(value) for name, value in options.items() if isinstance(value, np.ndarray)}
    options = {**options, **{name: value for name, value in specs.items() if name not in lengths}}
    given = {name: spec_of(value) for name, value in arrays.items()}
    if direction == "forward":
        return check(direction, {name: given[name] for name in "qkv"}, options, specs=True)[0]
    out_dtype = options.get("out_dtype") or dtype
    dout = arrays["dout"]
    given["out"] = spec(dout.shape, out_dtype)
    axes = dout.shape[:-1]
    lse = axes if options.get("layout") == "bhsd" else (*axes[:-2], axes[-1], axes[-2])
    given["lse"] = spec(lse, str(wide(dtype)))
    return check(direction, given, options, specs=True)[0]


def spec_of(array: np.ndarray) -> Any:
    """Shape, dtype and strides in elements."""
    return spec(array.shape, array.dtype.name, tuple(stride // array.itemsize for stride in array.strides))


class Expected:
    """A case drawn in one dtype, with what the reference and the baselines say of it.

    The backward is given the reference's out and lse, rounded to the dtypes a forward would return, so that
    every row gets the same input and its error is its own.
    """

    def __init__(self, case: Case, dtype: str):
        self.case, self.dtype = case, dtype
        arrays, self.options = make(case, dtype)
        self.qkv = [arrays[name] for name in "qkv"]
        self.dout, self.dlse = arrays["dout"], arrays.get("dlse")
        self.out_dtype = numpy_dtype(self.options.get("out_dtype") or dtype)
        self.accumulator = "float64" if dtype == "float64" else "float32"
        reference = cuflash.reference
        self.exact = reference.LONGDOUBLE if dtype == "float64" else reference.FLOAT64
        self._backward: Answers | None = None
        self.forward = self._answers(self._forward_of)

    def _answers(self, run: Callable[..., dict[str, Any]]) -> Answers:
        """(exact results, draws of the dtype's baseline, draws of the one for lse and gradients per head)."""
        reference = cuflash.reference

        def draws_in(dtype: str) -> Draws:
            def drawn(noise: Any) -> dict[str, Any]:
                return run(reference.unfused(dtype, noise))

            return Draws(drawn)

        functions = {name: getattr(reference, name) for name in ("attention", "attention_backward")}
        best = SimpleNamespace(**{name: partial(f, arithmetic=self.exact) for name, f in functions.items()})
        own = draws_in(self.dtype)
        return run(best), own, own if self.dtype == self.accumulator else draws_in(self.accumulator)

    def _forward_of(self, path: Any) -> dict[str, Any]:
        out, lse = path.attention(*self.qkv, **self.options, return_lse=True)
        return {"out": out, "lse": lse}

    def _backward_of(self, path: Any) -> dict[str, Any]:
        gradients = path.attention_backward(*self.given, **self.options, dlse=self.dlse)
        return {name: value for name, value in gradients_of(gradients).items() if value is not None}

    @property
    def given(self) -> list[np.ndarray]:
        """dout, q, k, v, out, lse: what a backward starts from."""
        out = self.forward[0]["out"].astype(self.out_dtype)
        lse = self.forward[0]["lse"].astype(wide(self.dtype))
        return [self.dout, *self.qkv, out, lse]

    @property
    def backward(self) -> Answers:
        """As `forward`, of the gradients by name; computed when first asked for."""
        if self._backward is None:
            self._backward = self._answers(self._backward_of)
        return self._backward

    def judge(self, direction: str, results: dict[str, Any]) -> tuple[Verdict, ...]:
        """Verdicts on the arrays of one result; a missing or an extra array is a failure."""
        reference, own, wide_draws = self.forward if direction == "forward" else self.backward
        verdicts = []
        for name in dict.fromkeys([*reference, *results]):
            if name not in results or name not in reference:
                verdicts.append(
                    Verdict(name, np.nan, np.nan, np.nan, f"{name}: is missing, or should not be there")
                )
                continue
            draws = wide_draws if name in FLOAT32_JUDGED else own
            verdicts.append(
                judge_drawn(name, results[name], reference[name], draws, accumulator=self.accumulator)
            )
        return tuple(verdicts)


def gradients_of(gradients: Any) -> dict[str, Any]:
    return {name: getattr(gradients, name) for name in GRADIENT_OF}


def one(row: str, direction: str, expected: Expected, xp: Any) -> Line:
    """One row on one case."""
    covered = (expected.dtype, *expected.case.shape[5:])
    starred = row == NUMPY or any(
        r.starred and r.covers(*covered) for r in (*rows.FORWARD, *rows.BACKWARD) if r.name == row
    )
    line = {"row": row, "direction": direction, "case": expected.case.name, "dtype": expected.dtype}
    try:
        if direction == "forward":
            results, note = forward(row, expected, xp)
        else:
            results, note = backward(row, expected, xp), ""
        verdicts = expected.judge(direction, results)
    except CuflashError as error:
        # A starred row takes the whole contract: where it covers dtype and sizes a refusal is a failure,
        # unless TMA cannot address an operand.  So is, of any row, what goes wrong after the plan: a kernel
        # that does not compile, or reads outside.
        may_refuse = not starred or str(error).startswith(f"{row} {BY_TMA}")
        is_refusal = may_refuse and refuses(row, direction, expected, xp)
        return Line(**line, status="refused" if is_refusal else "failed", message=sentence(error))
    except Exception as error:  # a check that stops at the first crash tells less than one that goes on
        return Line(**line, status="failed", message=f"{type(error).__name__}: {error}")
    messages = [v.message for v in verdicts if v.message] + ([note] if note else [])
    return Line(
        **line, status="failed" if messages else "passed", message="; ".join(messages), verdicts=verdicts
    )


def refuses(row: str, direction: str, expected: Expected, xp: Any) -> bool:
    """Does the plan already refuse, before anything is compiled or run?"""
    device = devices.HOST if xp is np else devices.find(None)
    try:
        plan.make(problem_of(expected.case, expected.dtype, direction), device, row)
    except CuflashError:
        return True
    return False


def sentence(error: CuflashError) -> str:
    """The error in one line: of a kernel that does not compile, the compiler's first complaint."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join([first, *([line for line in rest if "error:" in line] or rest)[:1]])


def forward(row: str, expected: Expected, xp: Any) -> tuple[dict[str, Any], str]:
    """(out and lse as written into memory full of NaN, complaint when that differs from a new array)."""
    q, k, v = (to_device(array, xp) for array in expected.qkv)
    options = options_for(row, expected.options, xp)
    reference = expected.forward[0]
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    targets = (
        full_of_nan(reference["out"].shape, expected.out_dtype, xp),
        full_of_nan(reference["lse"].shape, wide(expected.dtype), xp),
    )
    cuflash.attention(q, k, v, **options, return_lse=True, out=targets)
    first, second = [to_numpy(x) for x in (out, lse)], [to_numpy(x) for x in targets]
    same = all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(first, second, strict=True)
    )
    note = "" if same else "out= gives other bits than a new array"
    return {"out": second[0], "lse": second[1]}, note


def backward(row: str, expected: Expected, xp: Any) -> dict[str, Any]:
    """Gradients by name, written into memory full of NaN."""
    given = [to_device(array, xp) for array in expected.given]
    options = options_for(row, expected.options, xp)
    dlse = None if expected.dlse is None else to_device(expected.dlse, xp)
    targets = {}
    for name, value in expected.backward[0].items():
        dtype = (
            expected.out_dtype if name in ("dq", "dk", "dv") else expected.options[GRADIENT_OF[name]].dtype
        )
        targets[name] = full_of_nan(value.shape, dtype, xp)
    result = cuflash.attention_backward(*given, **options, dlse=dlse, grads=cuflash.Gradients(**targets))
    return {name: to_numpy(value) for name, value in gradients_of(result).items() if value is not None}


def options_for(row: str, options: dict[str, Any], xp: Any) -> dict[str, Any]:
    """Options of a case on the device, with the row named."""
    moved = {
        name: to_device(value, xp) if isinstance(value, np.ndarray) and "lengths" not in name else value
        for name, value in options.items()
    }
    return moved if row == NUMPY else {**moved, "kernel": row}


def full_of_nan(shape: tuple[int, ...], dtype: np.dtype, xp: Any) -> Any:
    return to_device(np.full(shape, np.nan, dtype), xp)


def to_device(array: np.ndarray, xp: Any) -> Any:
    """The array for module xp, strides kept (0 and negative ones too): a view over copied memory."""
    if xp is np:
        return array
    if array.size == 0 or array.flags.c_contiguous:
        return xp.asarray(array)
    low, high = np.lib.array_utils.byte_bounds(array)
    lowest = array[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)]
    element = lowest[(slice(0, 1),) * array.ndim].reshape(1).view(np.uint8)
    memory = xp.asarray(np.lib.stride_tricks.as_strided(element, (high - low,), (1,)))
    start = array.__array_interface__["data"][0] - low
    return xp.ndarray(array.shape, array.dtype, memptr=memory.data + start, strides=array.strides)
