"""Plots of a record: throughput or memory against length, or bars of the ladder and of suites that compare.

Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuflash.bench.report import UNITS, columns, digits, value
from cuflash.bench.suites import COMPARED_WITH
from cuflash.errors import CuflashError

FORMATS = (".svg", ".png")


def save(data: dict[str, Any], path: str | Path) -> Path:
    """Plot a payload into an SVG or PNG file."""
    path = Path(path)
    check_path(path)
    matplotlib = _matplotlib()
    if not any(line["status"] == "measured" for one in data["results"] for line in one["lines"]):
        raise CuflashError("bench --plot: nothing was measured, there is nothing to plot.")
    with matplotlib.rc_context({"svg.hashsalt": "cuflash", "font.size": 9}):
        figure = _drawn(data)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    return path


def _drawn(data: dict[str, Any]) -> Any:
    if data["suite"] == "ladder":
        return _rungs(data)
    return _compared(data) if data["suite"] in COMPARED_WITH else _lines(data)


def check_path(path: str | Path) -> None:
    """CuflashError for a file that cannot be plotted into; before anything is measured."""
    if Path(path).suffix not in FORMATS:
        raise CuflashError(f"bench --plot: {path} is neither .svg nor .png.")
    _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise CuflashError('bench --plot: needs matplotlib: pip install "cuflash[bench]"') from None
    return matplotlib


def _figure(n: int, at_most: int = 4) -> tuple[Any, list[Any]]:
    """n panels, a few in a row.  Without pyplot: no window, no global state."""
    from matplotlib.figure import Figure

    across = min(n, at_most)
    down = -(-n // across)
    figure = Figure(figsize=(16.8 / at_most * across, 3.2 * down), layout="constrained")
    axes = [figure.add_subplot(down, across, number + 1) for number in range(n)]
    return figure, axes


def _panels(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Results that differ in length alone, by what they share."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for one in data["results"]:
        shape = one["shape"]
        causal = ", causal" if dict(map(tuple, shape["settings"])).get("causal") else ""
        title = f"{shape['direction']}, head_dim {shape['head_dim']}, {shape['dtype']}{causal}"
        panels.setdefault(title, []).append(one)
    return panels


def _length(result: dict[str, Any]) -> int:
    return max(result["shape"]["len_q"], result["shape"]["len_k"])


def _lines(data: dict[str, Any]) -> Any:
    panels, metric = _panels(data), data["metric"]
    figure, axes = _figure(len(panels))
    colors = {name: f"C{number}" for number, name in enumerate(columns(data["results"]))}  # in every panel
    for axis, (title, results) in zip(axes, panels.items(), strict=True):
        results = sorted(results, key=_length)
        for name in columns(results):
            points = [
                (_length(one), value(line, metric))
                for one in results
                for line in one["lines"]
                if line["asked"] == name and line["kind"] != "roof"
            ]
            points = [(x, y) for x, y in points if y is not None]
            if points:
                own = any(
                    x["asked"] == name and x["kind"] == "cuflash" for one in results for x in one["lines"]
                )
                label = "cuflash" if name == "auto" else name
                axis.plot(*zip(*points, strict=True), marker="o", label=label, color=colors[name],
                          linewidth=2.4 if own else 1.2)  # fmt: skip
        if metric == "tflops":
            _roofs(axis, results)
        axis.set_xscale("log", base=2)
        if metric == "bytes":
            axis.set_yscale("symlog", linthresh=0.1)  # MB; some need nothing at all
            axis.set_ylim(bottom=0)
        elif metric == "ms":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.set_xlabel("length")
        axis.set_ylabel(UNITS[metric])
        axis.grid(alpha=0.3)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(),
                                                                       strict=True)}  # fmt: skip
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
    return figure


def _roofs(axis: Any, results: list[dict[str, Any]]) -> None:
    for key, style, label in (
        ("matmul_tflops", "--", "best matmul"),
        ("peak_tflops", ":", "peak at the clock"),
    ):
        points = [(_length(one), one[key]) for one in results if one.get(key)]
        if points:
            axis.plot(*zip(*points, strict=True), style, color="black", linewidth=1, label=label)


Bars = list[tuple[str, float]]


def _bars(panels: dict[str, tuple[Bars, float | None]], unit: str) -> Any:
    """A bar per name, from the top; panels: title -> (bars, a roof to draw)."""
    figure, axes = _figure(len(panels), at_most=2 if max(map(_longest, panels.values())) > 20 else 4)
    for axis, (title, (bars, roof)) in zip(axes, panels.items(), strict=True):
        drawn = axis.barh([name for name, _ in bars[::-1]], [number for _, number in bars[::-1]])
        axis.bar_label(drawn, [digits(number) for _, number in bars[::-1]], padding=2, fontsize=7)
        axis.margins(x=0.12)
        if roof is not None:
            axis.axvline(roof, linestyle="--", color="black", linewidth=1)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_title(title, fontsize=8)
        axis.set_xlabel(unit)
    return figure


def _longest(panel: tuple[Bars, float | None]) -> int:
    return max((len(name) for name, _ in panel[0]), default=0)


def _rungs(data: dict[str, Any]) -> Any:
    """One panel per shape, one bar per rung."""
    panels, metric = {}, data["metric"]
    for one in data["results"]:
        bars = [(x["name"], value(x, metric)) for x in one["lines"] if x["kind"] != "roof"]
        roof = one.get("matmul_tflops") if metric == "tflops" else None
        title = f"{one['shape']['direction']}, {one['label']}"
        panels[title] = [(name, number) for name, number in bars if number is not None], roof
    return _bars(panels, UNITS[metric])


def _compared(data: dict[str, Any]) -> Any:
    """One panel per direction, one bar per shape and kernel of cuflash."""
    panels: dict[str, tuple[Bars, float | None]] = {}
    metric = data["metric"]
    for one in data["results"]:
        bars = panels.setdefault(one["shape"]["direction"], ([], None))[0]
        mine = [(x, value(x, metric)) for x in one["lines"] if x["kind"] == "cuflash"]
        words = f"{one['label']}, {one['shape']['dtype']}"
        for line, number in mine:
            name = words if len(mine) == 1 else f"{words}, {line['name']}"
            bars += [] if number is None else [(name, number)]
    return _bars({title: panel for title, panel in panels.items() if panel[0]}, UNITS[metric])
