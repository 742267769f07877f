"""What became slower since an earlier record of the same kind of card, beyond what the spread explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuflash.bench.report import digits
from cuflash.bench.shapes import Shape
from cuflash.errors import CuflashError

LEAST = 0.03  # a change below this is never reported: two runs of one binary differ as much
FEW, UNKNOWN = 3, 0.2  # fewer measurements than this say nothing about spread: this much is allowed


@dataclass(frozen=True)
class Change:
    """One contender on one shape, then and now.  allowed: part by which the spreads let it grow."""

    name: str
    direction: str
    label: str
    before: float  # seconds
    now: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.now / self.before

    @property
    def slower(self) -> bool:
        return self.ratio > 1 + self.allowed

    @property
    def faster(self) -> bool:
        return self.ratio < 1 / (1 + self.allowed)

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.direction}, {self.label}: {digits(1e3 * self.before)} ms -> "
            f"{digits(1e3 * self.now)} ms ({100 * (self.ratio - 1):+.1f} %, spread explains "
            f"{100 * self.allowed:.1f} %)"
        )


def card(record: dict[str, Any]) -> str:
    """The device a record was made on, or the CPU's name."""
    where = record["environment"]
    if record.get("place") == "cpu" or not where["device"]:
        return where["cpu"]
    return where["device"]["name"]


def check_card(record: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Raises CuflashError when the records are of different cards; one of a run still to come will do."""
    if card(record) != card(earlier):
        raise CuflashError(
            f"bench --against: the record was made on {card(earlier)}, this is {card(record)}; "
            "times of different cards do not compare."
        )


def check_shapes(shapes: Sequence[Shape], earlier: dict[str, Any]) -> None:
    """Raises CuflashError when a run of these shapes will find none of them in the record."""
    there = [Shape.from_json(one["shape"]) for one in earlier["results"]]
    if not set(shapes) & set(there):
        has, wants = (one[0].label() if one else "no shape" for one in (there, list(shapes)))
        raise CuflashError(
            f"bench --against: no shape in common; the first of the record is {has}, of this run {wants}."
        )


def compare(record: dict[str, Any], earlier: dict[str, Any]) -> list[Change]:
    """Every contender that both records measured, cuflash's own first, the worst first.

    Raises CuflashError when the records are of different cards, or have nothing in common.
    """
    check_card(record, earlier)
    before = _by_key(earlier)
    changes = []
    for key, (line, label) in _by_key(record).items():
        if key in before:
            old = before[key][0]
            known = min(old["n"], line["n"]) >= FEW
            allowed = max(LEAST if known else UNKNOWN, old["spread"] + line["spread"])
            changes.append((line["kind"] != "cuflash", Change(
                line["name"], key[1], label, old["seconds"], line["seconds"], allowed
            )))  # fmt: skip
    if not changes:
        raise CuflashError(
            f"bench --against: nothing in common; the record has {_what(earlier)}, this run {_what(record)}."
        )
    return [change for _, change in sorted(changes, key=lambda one: (one[0], -one[1].ratio))]


def _what(record: dict[str, Any]) -> str:
    return f"suite {record['suite']} with {len(record['results'])} shapes"


def _by_key(record: dict[str, Any]) -> dict[tuple[Any, ...], tuple[dict[str, Any], str]]:
    """(name, direction, shape, suite's metric) -> (line, label) of what was measured."""
    found = {}
    for one in record["results"]:
        shape = repr(sorted(one["shape"].items()))
        for line in one["lines"]:
            if line["status"] == "measured" and line.get("seconds"):
                key = (line["name"], one["shape"]["direction"], shape, record["metric"] == "host_us")
                found[key] = (line, one["label"])
    return found


def kernels_slower(changes: list[Change], record: dict[str, Any]) -> list[Change]:
    """Those of cuflash's own that became slower."""
    own = {line["name"] for one in record["results"] for line in one["lines"] if line["kind"] == "cuflash"}
    return [change for change in changes if change.slower and change.name in own]
