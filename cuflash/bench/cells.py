"""Which numbers a table shows: results of a suite from the newest records, and what is said beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuflash import records
from cuflash.bench.against import card
from cuflash.bench.shapes import GRIDS, Shape, Sizes
from cuflash.bench.suites import COMPARED_WITH
from cuflash.bench.suites import suite as suite_of

STALE = " (stale)"
Record = dict[str, Any]
Cell = tuple[dict[str, Any], Record]  # a result, and the record it is from


def all_records(folder: Path | None = None) -> list[Record]:
    """Every readable record of the bench, oldest first."""
    found = []
    for path in sorted((folder or records.folder()).glob("*.json")):
        try:
            record = records.read(path)
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and str(record.get("kind", "")).startswith(("bench", "profile")):
            found.append(record)
    return sorted(found, key=lambda record: record["environment"]["date"])


def chosen(suite: str, found: Sequence[Record], sustained: bool = False) -> list[Cell]:
    """Results of a suite: of the card measured last, each shape from the newest record that has it.

    sustained: of runs that heated the card, which are apart.
    """
    mine = [
        r
        for r in found
        if r.get("suite") == suite and r.get("results") and _is_of_its_suite(r)
        and bool(r["protocol"].get("sustained_s")) == sustained
    ]  # fmt: skip
    if not mine:
        return []
    device = card(mine[-1])
    cells: dict[str, Cell] = {}
    for record in mine:
        if card(record) != device:
            continue
        for one in record["results"]:
            if any(line["status"] == "measured" for line in one["lines"]):
                cells[repr(sorted(one["shape"].items()))] = one, record
    order = {"forward": 0, "backward": 1}

    def place(cell: Cell) -> tuple[Any, ...]:
        s = cell[0]["shape"]
        causal = dict(map(tuple, s["settings"])).get("causal", False)
        return order[s["direction"]], s["dtype"], s["head_dim"], s["len_q"], s["len_k"], s["batch"], causal

    return sorted(cells.values(), key=place)


def _is_of_its_suite(record: Record) -> bool:
    """Its shapes are the suite's, all or some of them, whatever kernels and peers were named."""
    if not record.get("own"):
        return True
    there = [Shape.from_json(one["shape"]) for one in record["results"]]
    name, place, dtype = record["suite"], record["place"], there[0].dtype
    shapes = {shape for which in GRIDS for shape in suite_of(name, Sizes(), place, dtype, which).shapes}
    return set(there) <= shapes


def is_stale(line: dict[str, Any], stale: set[str]) -> bool:
    return bool(stale.intersection(line.get("sources", ())))


class Stale:
    """Kernel files that changed since a record, looked up once a record."""

    def __init__(self) -> None:
        self._known: dict[int, set[str]] = {}

    def of(self, record: Record) -> set[str]:
        if id(record) not in self._known:
            self._known[id(record)] = set(records.stale(record))
        return self._known[id(record)]


COMMANDS = {
    "profile": "cuflash bench --profile KERNEL",
    "sustained": "cuflash bench forward backward --sustained 1 --head-dim 128 --len 8192 --causal no --peers",
    "ladder": "cuflash bench ladder",
    **{name: f"cuflash bench {name}" for name in COMPARED_WITH},
}


def nothing(name: str) -> str:
    command = COMMANDS.get(name, f"cuflash bench {name} --peers")
    return f"Not measured yet: `{command}` makes the record."


def caption(cells: Sequence[Cell]) -> str:
    """Device, driver, clock, dtype, distribution, date, protocol: what a number needs to mean something."""
    runs = list({id(record): record for _, record in cells}.values())
    last = runs[-1]
    where, protocol = last["environment"], last["protocol"]
    dates = sorted({record["environment"]["date"][:10] for record in runs})
    words = [card(last)]
    if last["place"] == "gpu" and where["device"]:
        driver = where["device"].get("driver_version") or f"CUDA {where['device']['driver']}"
        words.append(f"driver {driver}")
        clocks = sorted(one["clock_mhz"] for one, _ in cells if one.get("clock_mhz"))
        if clocks:
            words.append(f"SM clock {clocks[0]:,.0f} to {clocks[-1]:,.0f} MHz while measured")
    else:
        words.append(f"{where['cores']} cores")
    dtypes = ", ".join(dict.fromkeys(one["shape"]["dtype"] for one, _ in cells))
    versions = [f"{name} {where['versions'][name]}" for name in ("torch", "jax") if name in where["versions"]]
    return (
        f"{', '.join(words)}; {dtypes}, {last['distribution']}; {' to '.join(dict.fromkeys(dates))}"
        f"{'; ' + ', '.join(versions) if versions else ''}. "
        f"Medians of {_rounds(protocol['rounds'])} of {protocol['launches']} launches after a pause "
        f"of {protocol['pause_ms']:.0f} ms; every result checked in the run that timed it."
    )


def _rounds(n: int) -> str:
    return "1 round, shuffled," if n == 1 else f"{n} shuffled rounds"


def line_of(result: dict[str, Any], asked: str) -> dict[str, Any] | None:
    return next((line for line in result["lines"] if line["asked"] == asked), None)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])
