"""A run as plain data for the record, and that data as tables for the terminal.

Everything that is shown, plotted, compared or put into a README is read from this data, never from the run
itself: a record says all that its run said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from cuflash import devices
from cuflash.bench.inputs import DISTRIBUTION
from cuflash.bench.run import Line, Report, Result

LONG_FORM = 4  # up to so many shapes each contender gets a line of its own
UNITS = {
    "tflops": "TFLOP/s",
    "tbs": "TB/s",
    "ms": "ms",
    "host_us": "us on the host",
    "bytes": "MB above inputs and outputs",
}
STATUS = {"refused": "-", "missing": "", "failed": "failed", "wrong": "WRONG"}


def payload(report: Report) -> dict[str, Any]:
    """What the record holds of a run besides the environment."""
    task, protocol = report.task, report.task.protocol
    device = devices.find(None) if task.place == "gpu" else None
    return {
        "suite": task.suite.name,
        "metric": task.suite.metric,
        "own": task.suite.own,
        "place": task.place,
        "stopped": report.stopped,
        "seconds": round(report.seconds, 1),
        "phases": {name: round(seconds, 1) for name, seconds in report.phases.items()},
        "distribution": DISTRIBUTION,
        "protocol": {
            "rounds": protocol.rounds,
            "launches": protocol.launches,
            "pause_ms": 1e3 * protocol.pause,
            "sustained_s": protocol.sustained,
            "shuffled": True,
            "query_heads_checked": task.samples,
        },
        "results": [result_data(result, device) for result in report.results],
    }


def result_data(result: Result, device: Any = None) -> dict[str, Any]:
    return {
        "label": result.shape.label(),
        "shape": result.shape.as_json(),
        "sets": result.sets,
        "seconds": round(result.seconds, 2),
        "clock_mhz": None if result.clock is None else result.clock / 1e6,
        "matmul_tflops": result.matmul,
        "peak_tflops": result.peak(device),
        "lines": [line_data(line) for line in result.lines],
    }


def line_data(line: Line) -> dict[str, Any]:
    data: dict[str, Any] = {"name": line.name, "asked": line.asked, "kind": line.kind, "status": line.status}
    if line.says:
        data["says"] = line.says
    if line.times is not None:
        low, high = line.times.quartiles
        data |= {
            "seconds": line.times.median,
            "quartiles": [low, high],
            "least": min(line.times.seconds),
            "n": len(line.times.seconds),
            "spread": line.times.spread,
            "tflops": line.tflops,
            "tbs": line.tbs,
            "graph": line.graph,
            "clock_mhz": None if line.times.clock is None else line.times.clock / 1e6,
        }
        if line.times.sustained:
            data["sustained_tflops"] = line.flops / line.times.sustained / 1e12
    if line.extra_bytes is not None:
        data["extra_bytes"] = line.extra_bytes
    if line.ratio is not None:
        data["error_over_limit"] = line.ratio
    if line.sources:
        data["sources"] = list(line.sources)
    return data | ({"details": line.details} if line.details else {})


def sources_of(data: dict[str, Any]) -> set[str]:
    """Kernel files that a payload speaks about."""
    return {
        name for result in data["results"] for line in result["lines"] for name in line.get("sources", ())
    }


def value(line: dict[str, Any], metric: str) -> float | None:
    """What the metric reads off a line, in the units of UNITS; None where there is none."""
    if line["status"] != "measured":
        return None
    if metric == "bytes":
        return None if line.get("extra_bytes") is None else line["extra_bytes"] / 1e6
    if line.get("seconds") is None:
        return None
    if metric in ("ms", "host_us"):
        return line["seconds"] * (1e3 if metric == "ms" else 1e6)
    return line[metric]


def digits(number: float | None) -> str:
    """Three significant digits, no exponent.

    >>> digits(683.4), digits(4.256), digits(0.0123)
    ('683', '4.26', '0.0123')
    """
    if number is None or not math.isfinite(number):
        return "" if number is None else str(number)
    if number == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{min(places, 6)}f}"


def percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f} %" if part and whole else ""


# ---- tables for the terminal


def table(*columns: str) -> Table:
    """Without boxes; a column whose name starts with ">" is aligned right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right)
    return made


def tables(data: dict[str, Any]) -> Iterable[tuple[str, Table]]:
    """(title, table) of a payload: a line per contender for few shapes, a line per shape for many."""
    for direction in ("forward", "backward"):
        results = [one for one in data["results"] if one["shape"]["direction"] == direction]
        if not results:
            continue
        unit = UNITS[data["metric"]]
        if len(results) <= LONG_FORM:
            for one in results:
                yield f"{direction}, {one['label']}, {one['shape']['dtype']}", long_form(one, data["metric"])
        else:
            dtypes = ", ".join(dict.fromkeys(one["shape"]["dtype"] for one in results))
            yield f"{direction}, {dtypes}, {unit}", wide_form(results, data["metric"])


def long_form(result: dict[str, Any], metric: str) -> Table:
    """Everything about one shape."""
    unit = UNITS[metric]
    names = [f">{unit}", ">of matmul", ">of peak"] if metric == "tflops" else [f">{unit}"]
    has_ms = metric != "ms"
    made = table("", *names, *([">ms"] if has_ms else []), ">spread", ">error / limit", "")
    for line in result["lines"]:
        number = value(line, metric)
        row = [line["name"], digits(number)]
        if metric == "tflops":
            row += [percent(number, result["matmul_tflops"]), percent(number, result["peak_tflops"])]
        seconds, ratio = line.get("seconds"), line.get("error_over_limit")
        if has_ms:
            row.append("" if seconds is None else digits(1e3 * seconds))
        row.append("" if seconds is None or line["n"] < 2 else f"{100 * line['spread']:.1f} %")
        row.append("" if ratio is None else f"{ratio:.2f}")
        made.add_row(*row, _remark(line))
    return made


def _remark(line: dict[str, Any]) -> str:
    words = []
    if line["status"] != "measured":
        words.append("WRONG" if line["status"] == "wrong" else line["status"])
    if line.get("graph"):
        words.append("graph")
    if line.get("sustained_tflops"):
        words.append(f"sustained {digits(line['sustained_tflops'])} TFLOP/s")
    details = line.get("details", {})
    if details.get("registers"):
        words.append(f"{details['registers']} registers")
    return ", ".join(words)


def columns(results: Sequence[dict[str, Any]]) -> list[str]:
    """Contenders in order of appearance, cuflash first, matmuls last."""
    order = {"cuflash": 0, "peer": 1, "roof": 2}
    found = {line["asked"]: order[line["kind"]] for one in results for line in one["lines"]}
    return sorted(found, key=found.__getitem__)


def wide_form(results: Sequence[dict[str, Any]], metric: str) -> Table:
    """A line per shape, a column per contender that was measured anywhere."""
    names = [
        name
        for name in columns(results)
        if any(x["asked"] == name and x["status"] != "missing" for one in results for x in one["lines"])
    ]
    made = table(
        "shape", *(f">{'cuflash' if name == 'auto' else name}" for name in names), ">of matmul", "kernel"
    )
    for one in results:
        cells, best, kernel = [], None, ""
        for name in names:
            line = next((x for x in one["lines"] if x["asked"] == name), None)
            number = None if line is None else value(line, metric)
            cells.append(
                digits(number) if number is not None else STATUS.get(line["status"], "") if line else ""
            )
            if line is not None and line["kind"] == "cuflash" and number is not None:
                best = max(best or 0.0, number)
                kernel = line["name"] if name == "auto" else kernel
        share = percent(best, one["matmul_tflops"]) if metric == "tflops" else ""
        made.add_row(one["label"], *cells, share, kernel)
    return made


def notes(data: dict[str, Any]) -> list[str]:
    """A line for everything that was not measured, and how many shapes that was."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for one in data["results"]:
        for line in one["lines"]:
            if line["status"] == "measured":
                continue
            says = line.get("says", "")
            if line["status"] == "wrong":
                says = f"{one['label']}: {says}"
            key = (line["kind"], line["name"], line["status"], says)
            counts[key] = counts.get(key, 0) + 1
    total = len(data["results"])
    found = []
    for (_, name, status, says), n in counts.items():
        where = "" if n == total or status == "wrong" else f" ({n} of {total} shapes)"
        found.append(f"{name} {'WRONG' if status == 'wrong' else status}{where}: {says}")
    if data["stopped"]:
        found.append("stopped by Ctrl-C: what was measured before is above")
    return found
