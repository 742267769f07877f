"""What lab.py found, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cuflash.bench import report as report_

if TYPE_CHECKING:
    from cuflash.lab import Lab


def lines(found: Lab) -> Iterator[str]:
    """What `print(lab(...))` shows."""
    source = found.source
    yield f"{source.path}: a version of {source.row.name} ({source.row.teaches})"
    for one in found.compiled:
        blocks = "" if one.blocks_per_sm is None else f", {one.blocks_per_sm} blocks per SM"
        yield (
            f"  compiled  {one.entry}, {one.what}: {one.registers} registers, {one.spills} bytes of spills, "
            f"{one.smem_bytes:,} bytes shared{blocks}"
        )
    for log in dict.fromkeys(one.log for one in found.compiled if one.log):
        yield from (f"  log       {line}" for line in log.splitlines())
    if found.check is not None:
        yield from _check_lines(found)
    for name, (read, written, predicted) in found.traffic.items():
        formula = f", the row's formula says {predicted:,}" if predicted else ""
        yield f"  bytes     {name}: {read:,} read, {written:,} written{formula}"
    if found.timing is not None:
        yield from _timing_lines(found.timing)
    if found.base is not None:
        yield f"  diff      from {found.base}: {_size(found.change)}"
    if found.diff:
        yield f"  diff      from {found.parent}, the rung before: {_size(found.diff)}"
    yield from (f"  note      {note}" for note in found.notes)
    yield f"  {'right' if found.passed else 'NOT RIGHT'}, {found.seconds:.0f} s in all"


def _size(diff: list[str]) -> str:
    """How much a unified diff changes."""
    added, removed = (sum(x[0] == sign and x[:3] != sign * 3 for x in diff) for sign in "+-")
    return f"+{added} -{removed} lines, comments apart" if diff else "nothing, comments apart"


def _check_lines(found: Lab) -> Iterator[str]:
    for entry in found.check.summary():
        counts = ", ".join(f"{entry[status]} {status}" for status in ("passed", "failed", "refused"))
        worst, ratio = entry["worst"], entry["worst_ratio"]
        nearest = f"; error / limit at most {ratio:.2f}, {worst}" if worst else ""
        yield f"  check     {entry['direction']} on {found.where}: {counts}{nearest}"
    for line in found.check.failures[:10]:
        yield f"  WRONG     {line.direction}, {line.case}, {line.dtype}: {line.message}"


def _timing_lines(data: dict[str, Any]) -> Iterator[str]:
    for one in data["results"]:
        yield f"  time      {one['shape']['direction']}, {one['label']}, {one['shape']['dtype']}"
        first = next((x for x in one["lines"] if x["status"] == "measured"), None)
        for line in one["lines"]:
            number = report_.value(line, "tflops")
            if number is None:
                yield f"            {line['name']:<28}{line['status']}: {line.get('says', '')}"
                continue
            ratio = ""
            if line["kind"] == "cuflash" and line is not first:
                ratio = f"   this file takes {first['seconds'] / line['seconds']:.2f} of its time"
            share = report_.percent(number, one["matmul_tflops"])
            yield (
                f"            {line['name']:<28}{report_.digits(number):>7} TFLOP/s {share:>6} of matmul, "
                f"spread {100 * line['spread']:.1f} %{ratio}"
            )
    yield from (f"  note      {note}" for note in report_.notes(data) if "refused" not in note)
