"""Tables of what is compared within one record: options, masks, shared heads, dtypes, determinism, heat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cuflash.bench.cells import (
    STALE,
    Cell,
    Record,
    Stale,
    caption,
    chosen,
    is_stale,
    line_of,
    markdown,
    nothing,
)
from cuflash.bench.report import columns, digits, percent, value
from cuflash.bench.shapes import Shape, Sizes
from cuflash.bench.suites import BOTH, COMPARED_WITH
from cuflash.bench.suites import suite as suite_of

TEXT = (
    "Each line beside the plain line above it, with the same kernel asked for, in one run. Pairs: the share "
    "of (query, key) pairs that masks leave. Time: in units of the plain line's. Rate: TFLOP/s of the pairs "
    "that are left, in units of the plain line's{divided}: 1 where an option costs nothing and masked tiles "
    "are skipped."
)


def compared(name: str, found: Sequence[Record]) -> str:
    """A line per shape of a suite that compares: time and rate beside those of the plain shape."""
    cells, stale = in_order_of_the_suite(name, chosen(name, found)), Stale()
    if not cells:
        return nothing(name)
    divided = ", each divided by the matmul of its dtype and its rounds" if name == "dtypes" else ""
    parts = [caption(cells), TEXT.format(divided=divided)]
    for direction in BOTH:
        own = [cell for cell in cells if cell[0]["shape"]["direction"] == direction]
        body = [row for cell in own for row in _rows(name, cell, own, stale)]
        if body:
            head = [direction, "pairs", "ms", "TFLOP/s", "of matmul", "time", "rate", "kernel"]
            parts.append(markdown(head, body))
    return "\n\n".join(parts)


def in_order_of_the_suite(name: str, cells: list[Cell]) -> list[Cell]:
    """The suite says what stands next to what; sizes from the command line come last."""
    if not cells:
        return []
    shape, place = Shape.from_json(cells[0][0]["shape"]), cells[0][1]["place"]
    order = list(suite_of(name, Sizes(), place, shape.dtype).shapes)

    def position(cell: Cell) -> int:
        shape = Shape.from_json(cell[0]["shape"])
        return order.index(shape) if shape in order else len(order)

    return sorted(cells, key=position)


def _rows(name: str, cell: Cell, others: Sequence[Cell], stale: Stale) -> list[list[str]]:
    """A row per kernel of cuflash that was measured on the shape."""
    one, record = cell
    shape = Shape.from_json(one["shape"])
    with_what = COMPARED_WITH[name](shape)
    plain = next((x for x, of in others if of is record and Shape.from_json(x["shape"]) == with_what), None)
    rows = []
    for line in one["lines"]:
        if line["kind"] != "cuflash":
            continue
        base = None if plain is None else line_of(plain, line["asked"])
        label = one["label"] if plain in (None, one) else what_differs(shape, with_what)
        if line["status"] != "measured" or not line.get("seconds"):
            rows.append([label, "", line["status"], "", "", "", "", f"`{line['name']}`"])
            continue
        mark = STALE if is_stale(line, stale.of(record)) else ""
        row = [label, "", digits(1e3 * line["seconds"]) + mark, digits(line["tflops"]) + mark]
        row += [percent(line["tflops"], one["matmul_tflops"]), "", "", f"`{line['name']}`"]
        if base is not None and base.get("seconds"):
            row[1] = f"{100 * _work(line) / _work(base):.3g} %"
            if base is not line:
                rate = line["tflops"] / base["tflops"]
                if name == "dtypes" and one["matmul_tflops"] and plain["matmul_tflops"]:
                    rate *= plain["matmul_tflops"] / one["matmul_tflops"]
                row[5], row[6] = f"{line['seconds'] / base['seconds']:.3f}", f"{rate:.3f}"
        rows.append(row)
    return rows


def _work(line: dict[str, Any]) -> float:
    """FLOPs in units of 1e12, counted from the mask."""
    return line["tflops"] * line["seconds"]


def what_differs(shape: Shape, plain: Shape) -> str:
    """In words, what a shape has that the plain one has not."""
    words = []
    if shape.dtype != plain.dtype:
        words.append(shape.dtype)
    if shape.heads_k != plain.heads_k:
        words.append(f"{shape.heads} heads over {shape.heads_k}")
    more = tuple(pair for pair in shape.settings if pair not in plain.settings)
    changed = replace(shape, settings=tuple(pair for pair in more if pair[0] != "causal"))
    words += ["causal"] if ("causal", True) in more else []
    return ", ".join([*words, *(word.removesuffix(" True") for word in changed.others)])


def sustained(name: str, found: Sequence[Record]) -> str:
    """Cool and hot: TFLOP/s in bursts after a pause, and back to back for seconds."""
    cells, stale = [cell for suite in BOTH for cell in chosen(suite, found, sustained=True)], Stale()
    if not cells:
        return nothing(name)
    seconds = cells[0][1]["protocol"]["sustained_s"]
    text = f"TFLOP/s in bursts / back to back for {digits(seconds)} s, the median of the second half."
    names = columns([one for one, _ in cells])
    body = []
    for one, record in cells:
        row = [f"{one['shape']['direction']}, {one['label']}"]
        for asked in names:
            line = line_of(one, asked)
            cool = None if line is None else value(line, "tflops")
            if cool is None:
                row.append("")
                continue
            mark = STALE if is_stale(line, stale.of(record)) else ""
            row.append(f"{digits(cool)} / {digits(line.get('sustained_tflops'))}{mark}")
        body.append(row)
    head = ["", *("cuflash" if asked == "auto" else asked for asked in names)]
    return "\n\n".join([caption(cells), text, markdown(head, body)])
