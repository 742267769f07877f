"""Tables of README.md and kernels/README.md, written from the records (and the plan table) between markers.

    <!-- forward -->
    ... generated ...
    <!-- /forward -->

For every shape the newest record that measured it is used, whole: numbers side by side are always of one run.
A number whose kernel has changed since is marked stale.  `cuflash bench --tables` writes them; a test checks
that they are what it would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cuflash import features, records, rows
from cuflash.bench.against import card
from cuflash.bench.cells import (
    STALE,
    Record,
    Stale,
    all_records,
    caption,
    chosen,
    is_stale,
    line_of,
    markdown,
    nothing,
)
from cuflash.bench.comparisons import compared, sustained
from cuflash.bench.profile import UTILISATION
from cuflash.bench.report import UNITS, columns, digits, percent, value
from cuflash.bench.shapes import Shape
from cuflash.bench.suites import COMPARED_WITH, SUITES
from cuflash.errors import CuflashError

FILES = ("README.md", "kernels/README.md")


def root() -> Path:
    """The checkout.  CuflashError in an installed wheel, which has no READMEs to write."""
    folder = records.folder()
    if folder.name != "measured":
        raise CuflashError("bench --tables: writes the READMEs of a checkout; this is an installed package.")
    return folder.parent.parent


def write(folder: Path | None = None) -> list[Path]:
    """Write every table; returns the files that changed."""
    changed = []
    for path, text in texts(folder).items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def texts(folder: Path | None = None) -> dict[Path, str]:
    """File -> its text with every table as it should be."""
    found, made = all_records(folder), {}
    for name in FILES:
        path = root() / name
        made[path] = filled(path.read_text(encoding="utf-8"), found)
    return made


def filled(text: str, found: Sequence[Record]) -> str:
    """The text with what stands between each pair of markers made anew."""

    def one(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name} -->\n{render(name, found)}\n<!-- /{name} -->"

    names = "|".join(TABLES)
    return re.sub(rf"<!-- ({names}) -->\n.*?<!-- /\1 -->", one, text, flags=re.DOTALL)


def render(name: str, found: Sequence[Record]) -> str:
    """One table in Markdown, or the command that would make its record."""
    return TABLES[name](name, found)


# ---- tables


def by_shape(name: str, found: Sequence[Record]) -> str:
    """A line per shape, a column per contender, the best number of a line in bold."""
    cells, stale = chosen(name, found), Stale()
    if not cells:
        return nothing(name)
    metric = cells[0][1]["metric"]
    parts = [caption(cells), f"In {UNITS[metric]}."]
    for direction in ("forward", "backward"):
        own = [cell for cell in cells if cell[0]["shape"]["direction"] == direction]
        if not own:
            continue
        names = [n for n in columns([c[0] for c in own]) if any(_has_cell(c[0], n, metric) for c in own)]
        attention = [n for n in names if not n.startswith("matmul")]
        share = ["of matmul"] if metric == "tflops" else []
        head = [direction, *("cuflash" if n == "auto" else n for n in attention), *share, "kernel"]
        body = []
        for one, record in own:
            numbers = {n: _shown(one, n, metric) for n in attention}
            there = [x for x in numbers.values() if x is not None]
            better = min if metric in ("ms", "host_us", "bytes") else max
            best = better(there) if there else None
            row, kernel, first = [one["label"]], "", None
            for n in attention:
                line, number = line_of(one, n), numbers[n]
                text = digits(number)
                if number is not None and number == best:
                    text = f"**{text}**"
                if number is not None and is_stale(line, stale.of(record)):
                    text += STALE
                if line is not None and line["status"] == "wrong":
                    text = "wrong"
                if number is not None and line["kind"] == "cuflash":
                    first, kernel = (
                        number if first is None else first,
                        line["name"] if n == "auto" else kernel,
                    )
                row.append(text)
            shares = [percent(first, one["matmul_tflops"])] if share else []
            body.append([*row, *shares, f"`{kernel}`" if kernel else ""])
        parts += [markdown(head, body), *wrong_notes([one for one, _ in own])]
    return "\n\n".join(parts)


def wrong_notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence per contender that computed wrong numbers: in how many shapes, and the first complaint."""
    found: dict[str, list[str]] = {}
    for one in results:
        for line in one["lines"]:
            if line["status"] == "wrong":
                found.setdefault(line["name"], []).append(f"{one['label']}: {line['says'].split(', ')[0]}")
    return [
        f"Wrong: `{name}` in {len(says)} of {len(results)} shapes, first in {says[0]}; no time is given."
        for name, says in found.items()
    ]


def _has_cell(result: dict[str, Any], asked: str, metric: str) -> bool:
    line = line_of(result, asked)
    return line is not None and (line["status"] == "wrong" or value(line, metric) is not None)


def _shown(result: dict[str, Any], asked: str, metric: str) -> float | None:
    line = line_of(result, asked)
    return None if line is None else value(line, metric)


def ladder_notes() -> dict[str, dict[str, str]]:
    """Rung -> {"predicted", "limiter"}, written by hand in kernels/ladder.json."""
    path = root() / "kernels" / "ladder.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def limiters(found: Sequence[Record], device: str) -> dict[str, str]:
    """Row -> what limits its longest kernel, from the newest profile of its present source on this card."""
    newest: dict[str, str] = {}
    for record in found:
        if record.get("kind") == "profile" and card(record) == device:
            changed = records.stale(record)
            by_time = sorted(record["kernels"], key=lambda one: one.get("milliseconds") or 0.0)
            mine = [(one["kernel"].split("__")[0], one["limiter"]) for one in by_time]
            newest |= {row: limiter for row, limiter in mine if row not in changed}
    return newest


def by_rung(name: str, found: Sequence[Record]) -> str:
    """A line per rung, a column per shape: TFLOP/s and percent of the matmul; prediction and limiter."""
    cells, stale = chosen(name, found), Stale()
    if not cells:
        return nothing(name)
    notes, profiled = ladder_notes(), limiters(found, card(cells[-1][1]))
    parts = [
        caption(cells),
        "TFLOP/s, and percent of the best matmul of the same rounds. Predicted: written down before the rung "
        "was timed, for head_dim 128, no mask (`ladder.json`). Limiter: of the profile, where there is one.",
    ]
    for direction, table in (("forward", rows.FORWARD), ("backward", rows.BACKWARD)):
        own = [cell for cell in cells if cell[0]["shape"]["direction"] == direction]
        if not own:
            continue
        head = [direction, *(_short_label(one["shape"]) for one, _ in own), "registers", "predicted",
                "limiter", "the one idea"]  # fmt: skip
        body = []
        for row in sorted(table, key=lambda row: row.name.split("_")[1]):  # by number
            texts, registers = [], ""
            for one, record in own:
                line = line_of(one, row.name)
                number = None if line is None else value(line, "tflops")
                text = "" if number is None else f"{digits(number)} ({percent(number, one['matmul_tflops'])})"
                if line is not None and line["status"] in ("wrong", "failed"):
                    text = line["status"]
                if number is not None and is_stale(line, stale.of(record)):
                    text += STALE
                registers = str((line or {}).get("details", {}).get("registers") or registers)
                texts.append(text)
            note = notes.get(row.name, {})
            limiter = profiled.get(row.name, note.get("limiter", ""))
            body.append([f"`{row.name}`", *texts, registers, note.get("predicted", ""), limiter, row.teaches])
        parts.append(markdown(head, body))
    return "\n\n".join(parts)


def _short_label(shape: dict[str, Any]) -> str:
    causal = ", causal" if dict(map(tuple, shape["settings"])).get("causal") else ""
    return f"d {shape['head_dim']}, {shape['len_q']:,}{causal}"


def speed(name: str, found: Sequence[Record]) -> str:
    """Suites forward and backward in short: cuflash and the best peer of the same run, a line per shape."""
    cells, stale = [*chosen("forward", found), *chosen("backward", found)], Stale()
    cells = [cell for cell in cells if Shape.from_json(cell[0]["shape"]).is_plain]
    if not cells:
        return nothing("forward backward")
    columns_, lines = [], {}
    for one, record in cells:
        shape = Shape.from_json(one["shape"])
        column = f"{shape.direction}{', causal' if shape.causal else ''}"
        columns_ += [] if column in columns_ else [column]
        key = (shape.dtype, shape.head_dim, shape.len_q)
        lines.setdefault(key, {})[column] = _pair(one, stale.of(record))
    several = len({key[0] for key in lines}) > 1
    body = [
        [f"{dim}{f', {dtype}' if several else ''}", f"{length:,}", *(line.get(c, "") for c in columns_)]
        for (dtype, dim, length), line in sorted(lines.items())
    ]
    text = "TFLOP/s of cuflash, and after the stroke of the fastest library beside it, which is named."
    return "\n\n".join([caption(cells), text, markdown(["head_dim", "length", *columns_], body)])


def _pair(result: dict[str, Any], stale: set[str]) -> str:
    """cuflash, by its own choice if that was measured, / the best peer; the faster in bold."""
    numbers = [(value(x, "tflops"), x) for x in result["lines"] if x["kind"] != "roof"]
    own = [(n, x) for n, x in numbers if n is not None and x["kind"] == "cuflash"]
    own = [(n, x) for n, x in own if x["asked"] == "auto"] or own
    peers = [(n, x) for n, x in numbers if n is not None and x["kind"] == "peer"]
    best_own, best_peer = (max(side, key=lambda pair: pair[0], default=None) for side in (own, peers))
    words = []
    for mine, other in ((best_own, best_peer), (best_peer, best_own)):
        text = "-" if mine is None else digits(mine[0])
        if mine is not None and other is not None and mine[0] > other[0]:
            text = f"**{text}**"
        if mine is not None and mine[1]["kind"] == "peer":
            text += f" {mine[1]['name']}"
        words.append(text + (STALE if mine is not None and is_stale(mine[1], stale) else ""))
    return " / ".join(words)


def profiles(name: str, found: Sequence[Record]) -> str:
    """A line per profiled kernel and shape: utilisation and the limiter."""
    mine = [record for record in found if record.get("kind") == "profile"]
    if not mine:
        return nothing(name)
    device, stale = card(mine[-1]), Stale()
    newest: dict[tuple[str, str], tuple[Record, dict[str, Any]]] = {}
    for record in mine:
        for one in record["kernels"] if card(record) == device else ():
            newest[one["kernel"], one.get("label") or record.get("label", "")] = record, one
    head = ["kernel", "problem", "ms", *UTILISATION, "occupancy", "DRAM GB", "warps wait for", "limiter"]
    body = []
    for (kernel, label), (record, one) in sorted(newest.items()):
        mark = STALE if kernel.split("__")[0] in stale.of(record) else ""
        shares = [_share(one["utilisation"].get(unit)) for unit in UTILISATION]
        moved = one.get("dram_bytes")
        body.append([
            f"`{kernel}`{mark}", label, digits(one.get("milliseconds")), *shares,
            _share(one.get("occupancy")), "" if moved is None else digits(moved / 1e9), waits_for(one),
            one["limiter"],
        ])  # fmt: skip
    text = (
        f"{device}, {mine[-1]['environment']['date'][:10]}; percent of what each unit can do, by ncu, which "
        "holds the card at its base clock: times are longer than elsewhere."
    )
    return f"{text}\n\n{markdown(head, body)}"


def waits_for(one: dict[str, Any]) -> str:
    """The two commonest reasons, in parts of all waiting."""
    most = list(one.get("stalls", {}).items())[:2]
    return ", ".join(f"{reason.replace('_', ' ')} {100 * part:.0f} %" for reason, part in most)


def suites_table(name: str, found: Sequence[Record]) -> str:
    """A line per suite: what it measures, and how long its newest record took, kernels compiled before."""
    body = []
    for suite, words in SUITES.items():
        mine = [r for r in found if r.get("suite") == suite and not r["protocol"].get("sustained_s")]
        took = ["", "", ""]
        if mine:
            record = mine[-1]
            kinds = [{x["name"] for x in one["lines"] if x["kind"] == "peer"} for one in record["results"]]
            peers = max(map(len, kinds), default=0)
            took = [str(len(record["results"])), str(peers or "none"), f"{record['seconds']:.0f}"]
        body.append([f"`{suite}`", words, *took])
    head = ["suite", "what it measures", "problems, last time", "beside peers", "seconds, compiled before"]
    return markdown(head, body)


def _share(part: float | None) -> str:
    return "" if part is None else f"{part:.0f} %"


TABLES: dict[str, Callable[[str, Sequence[Record]], str]] = {
    **{name: by_shape for name in SUITES},
    **{name: compared for name in COMPARED_WITH},
    "sustained": sustained,
    "suites": suites_table,
    "ladder": by_rung,
    "speed": speed,
    "profile": profiles,
    "features": lambda name, found: features.table(),
    "chosen": lambda name, found: features.chosen(),
}
