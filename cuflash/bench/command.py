"""`cuflash bench`: the arguments, and what happens in which order.

Exit codes: 0 all is well; 1 a wrong result, or with --against a kernel that became slower; 2 bad input;
130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import cuflash
from cuflash import devices, records
from cuflash.bench import against, inputs, markdown, peers, plots, profile, report, shapes, suites
from cuflash.bench.ahead import compile_pairs
from cuflash.bench.contenders import check_names
from cuflash.bench.run import Task, run
from cuflash.bench.shapes import Shape, Sizes, Suite
from cuflash.bench.timing import Rounds
from cuflash.bench.truth import SAMPLES
from cuflash.errors import CuflashError
from cuflash.problem import FLOAT_DTYPES

WIDTH = 200  # columns of tables that go into a file
CPU_PAUSE = 0.1  # seconds: threads of BLAS and OpenMP go on spinning after their work
EXAMPLES = """examples:
  cuflash bench                                    forward and backward, on the GPU or, without one, the CPU
  cuflash bench forward --peers --grid envelope    beside every library that is installed
  cuflash bench forward --len 4096 --head-dim 128 --causal yes --dtype float16
  cuflash bench ladder --plot ladder.svg           every rung
  cuflash bench cpu --peers                        NumPy beside PyTorch on the CPU
  cuflash bench forward --against RECORD.json      what became slower
  cuflash bench --profile fwd_02_tiled             how busy the units are, by ncu
  cuflash bench --tables                           write the tables of the READMEs from the records
"""


def words(text: str) -> tuple[str, ...]:
    """A comma-separated list."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them")
    return found


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word.replace("_", "")) for word in words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no whole numbers with commas between them") from None


def count(text: str) -> int:
    """How often something is done."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def duration(text: str) -> float:
    """A length of time; the flag says in what unit."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: give a number from 0")
    return value


def edge(text: str) -> int | None:
    """Keys to one side of a window; None: all of them."""
    if text.lower() == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number from 0 nor none")
    return int(text)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="cuflash bench",
        description="Measure kernels side by side; every result is checked in the run that times it.",
        epilog="suites:\n"
        + "\n".join(f"  {name:<14}{text}" for name, text in suites.SUITES.items())
        + f"\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("suites", nargs="*", metavar="SUITE", help="see below; default: forward backward")
    everyone = ", ".join(peer.name for peer in peers.PEERS)
    top.add_argument("--peers", nargs="?", type=words, const=(), metavar="A,B",
                     help=f"run other libraries beside: all that are here, or of {everyone}")  # fmt: skip
    top.add_argument("--kernels", type=words, metavar="A,B", help="rows by name; auto is the one chosen")
    top.add_argument("--grid", choices=tuple(shapes.GRIDS), default="default", help="of forward and backward")
    top.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    _add_sizes(top)
    protocol = top.add_argument_group("protocol")
    protocol.add_argument("--rounds", type=count, default=3, metavar="N", help="shuffled rounds (3)")
    protocol.add_argument("--launches", type=count, default=4, metavar="N", help="timed launches a burst (4)")
    protocol.add_argument("--pause", type=duration, metavar="MS", help="before each burst (12; CPU 100)")
    protocol.add_argument("--sustained", type=duration, metavar="S", help="also S seconds back to back")
    protocol.add_argument(
        "--graph", choices=("auto", "always", "never"), help="CUDA graph replay of forwards"
    )
    protocol.add_argument("--samples", type=count, default=SAMPLES, metavar="N",
                          help=f"query heads checked of each shape ({SAMPLES})")  # fmt: skip
    protocol.add_argument("--tiny", action="store_true", help="sizes of milliseconds: for the checks alone")
    output = top.add_argument_group("output")
    output.add_argument("--record", metavar="PATH", help="default: kernels/measured/ or ./cuflash-records/")
    output.add_argument("--no-record", action="store_true")
    output.add_argument("--plot", metavar="PATH", help="SVG or PNG; several suites: name-SUITE.svg")
    output.add_argument("--against", metavar="RECORD", help="list what became slower since")
    output.add_argument("--show", metavar="RECORD", help="print (and --plot) a record; measures nothing")
    output.add_argument("--tables", action="store_true", help="write the READMEs' tables from the records")
    output.add_argument("--profile", type=words, metavar="A,B", help="counters of Nsight Compute for kernels")
    return top


def _add_sizes(top: argparse.ArgumentParser) -> None:
    sizes = top.add_argument_group("sizes and options, in place of the suite's own")
    for name, text in (
        ("head-dim", "64,128"), ("len", "query rows: 512,2048"), ("dtype", f"of {','.join(FLOAT_DTYPES)}"),
    ):  # fmt: skip
        kind = words if name == "dtype" else numbers
        sizes.add_argument(f"--{name}", type=kind, metavar="A,B", help=text)
    for name in ("head-dim-v", "len-k", "batch", "heads", "heads-k", "tokens", "hidden"):
        sizes.add_argument(f"--{name}", type=int, metavar="N")
    sizes.add_argument("--causal", choices=("yes", "no", "both"), help="default: that of the suite")
    sizes.add_argument("--window", type=edge, nargs=2, metavar=("LEFT", "RIGHT"), help="numbers, or none")
    for name in ("scale", "softcap", "dropout"):
        sizes.add_argument(f"--{name}", type=float, metavar="X")
    sizes.add_argument("--query-offset", type=int, metavar="N")
    sizes.add_argument("--precision", choices=("float32", "tf32"))
    sizes.add_argument("--deterministic", action="store_true", help="backward: bitwise repeatable gradients")
    sizes.add_argument("--with", type=words, default=(), metavar="A,B", dest="drawn",
                       help=f"array options, drawn: {', '.join(inputs.DRAWN)}")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `cuflash bench` and return its exit code."""
    options = parser().parse_args(arguments)
    wide = None if sys.stdout.isatty() else WIDTH
    out = Console(highlight=False, markup=False, emoji=False, soft_wrap=wide is not None, width=wide)
    if options.tables:
        changed = markdown.write()
        print("\n".join(f"written: {path}" for path in changed) or "every table is as it should be")
        return 0
    if options.show:
        return show(record_of_a_bench("--show", options.show), options, out)
    place = place_of(options.device)
    if options.profile:
        return profiled(options, place, out)
    return measured(options, place, out)


def record_of_a_bench(flag: str, path: str) -> dict[str, Any]:
    """The record that a flag names, before anything is measured."""
    record = records.read(path)
    if not (isinstance(record.get("results"), list) and {"suite", "environment"} <= set(record)):
        raise CuflashError(f"bench {flag}: {path} is no record of a bench.")
    return record


def place_of(device: str) -> str:
    has_gpu = devices.gpu_count() > 0
    if device == "gpu" and not has_gpu:
        raise CuflashError("bench: --device gpu: CuPy sees no CUDA device; `cuflash info` says what is here.")
    return "gpu" if has_gpu and device != "cpu" else "cpu"


def sizes_of(options: argparse.Namespace) -> Sizes:
    """What the flags say of sizes and options."""
    unknown = [name for name in options.dtype or () if name not in FLOAT_DTYPES]
    if unknown:
        raise CuflashError(f"bench: unknown dtype {', '.join(unknown)}; known: {', '.join(FLOAT_DTYPES)}.")
    unknown = [name for name in options.drawn if name not in inputs.DRAWN]
    if unknown:
        raise CuflashError(f"bench: --with {', '.join(unknown)}: known are {', '.join(inputs.DRAWN)}.")
    settings = {
        "window": tuple(options.window) if options.window else None,
        "query_offset": options.query_offset,
        "scale": options.scale,
        "softcap": options.softcap,
        "dropout": None if options.dropout is None else (options.dropout, 1),
        "precision": options.precision,
    }
    causal = {"yes": (True,), "no": (False,), "both": (False, True), None: None}[options.causal]
    return Sizes(
        options.head_dim, options.head_dim_v, options.len, options.len_k, options.batch, options.heads,
        options.heads_k, causal, options.dtype, options.tokens, options.hidden,
        tuple((name, value) for name, value in settings.items() if value is not None), options.drawn,
    )  # fmt: skip


def default_dtype(place: str) -> str:
    """bfloat16 where tensor cores know it."""
    if place == "cpu":
        return "float32"
    return "bfloat16" if devices.find(None).arch >= 80 else "float16"


def suites_of(options: argparse.Namespace, place: str) -> list[Suite]:
    names = options.suites or (["forward", "backward"] if place == "gpu" else ["cpu"])
    found = []
    for name in names:
        where = "cpu" if name == "cpu" else place
        made = suites.suite(name, sizes_of(options), where, default_dtype(where), options.grid, options.tiny)
        if options.graph:
            made = replace(made, graph=options.graph)
        if options.deterministic:
            made = replace(made, own=True, shapes=tuple(dict.fromkeys(map(suites.repeatable, made.shapes))))
        found.append(replace(made, own=made.own or options.tiny or bool(options.kernels)))
    return found


def measured(options: argparse.Namespace, place: str, out: Console) -> int:
    """Run the suites, print, record, plot, compare."""
    if options.plot:
        plots.check_path(options.plot)
    check_names(options.kernels)
    earlier = record_of_a_bench("--against", options.against) if options.against else None
    made = suites_of(options, place)
    for path in filter(None, (options.record, options.plot)):
        records.check_place(path)
    if earlier is not None:
        check_comparable(made, place, earlier)
    code = 0
    for suite in made:
        where = "cpu" if suite.name == "cpu" else place
        if where == "cpu" and suite.name != "cpu":
            why = "asked for the CPU" if options.device == "cpu" else "no CUDA GPU here"
            out.print(f"{why}: kernels are not measured, this is the NumPy path")
        pause = options.pause if options.pause is not None else 1e3 * (CPU_PAUSE if where == "cpu" else 0.012)
        if options.tiny:
            pause = 0
        protocol = Rounds(options.rounds, options.launches, pause / 1e3, sustained=options.sustained)
        chosen = () if options.peers is None else peers.chosen(options.peers, where, options.grid)
        task = Task(suite, where, options.kernels, chosen, protocol, options.samples)
        with bar(suite.name, len(suite.shapes)) as step:
            done = run(task, step)
        data = report.payload(done)
        show_payload(data, out)
        record = {"environment": records.environment(), **data}
        if not options.no_record and data["results"]:
            path = records.write(
                f"bench-{suite.name}", data, report.sources_of(data), _named(options.record, suite, made)
            )
            out.print(f"record: {path}")
        if options.plot and data["results"]:
            out.print(f"plot: {plots.save(data, _named(options.plot, suite, made))}")
        if done.wrong:
            code = 1
        if done.stopped:
            return 130
        if earlier is not None and suite.name == earlier["suite"]:
            code = 1 if print_changes(record, earlier, out) else code
    return code


def check_comparable(made: Sequence[Suite], place: str, earlier: dict[str, Any]) -> None:
    """CuflashError, before minutes are spent, where this run will have nothing to compare with the record."""
    mine = [suite for suite in made if suite.name == earlier["suite"]]
    if not mine:
        raise CuflashError(
            f"bench --against: the record is of suite {earlier['suite']}, "
            f"this run of {', '.join(suite.name for suite in made)}."
        )
    where = "cpu" if mine[0].name == "cpu" else place
    against.check_card({"environment": records.environment(), "place": where}, earlier)
    against.check_shapes(mine[0].shapes, earlier)


def _named(path: str | None, suite: Suite, suites: Sequence[Suite]) -> Path | None:
    """The path, with the suite's name in it when there are several."""
    if path is None or len(suites) == 1:
        return None if path is None else Path(path)
    whole = Path(path)
    return whole.with_name(f"{whole.stem}-{suite.name}{whole.suffix}")


def print_changes(record: dict[str, Any], earlier: dict[str, Any], out: Console) -> bool:
    """Print what changed; whether one of cuflash's own became slower."""
    changes = against.compare(record, earlier)
    slower = [change for change in changes if change.slower]
    faster = [change for change in changes if change.faster]
    date = earlier["environment"]["date"][:10]
    out.print(f"\nagainst {date}: {len(changes)} compared, {len(slower)} slower, {len(faster)} faster")
    for title, found in (("slower", slower), ("faster", faster)):
        for change in found:
            out.print(f"  {title}: {change}")
    return bool(against.kernels_slower(changes, record))


def show(record: dict[str, Any], options: argparse.Namespace, out: Console) -> int:
    """A record as its run printed it."""
    show_payload(record, out)
    if options.plot:
        out.print(f"plot: {plots.save(record, options.plot)}")
    return 0


def show_payload(data: dict[str, Any], out: Console) -> None:
    for title, table in report.tables(data):
        out.print(f"\n{title}")
        out.print(table)
    for note in report.notes(data):
        out.print(note)
    ratios = [
        line["error_over_limit"]
        for one in data["results"]
        for line in one["lines"]
        if line.get("error_over_limit") is not None
    ]
    if ratios:
        phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in data.get("phases", {}).items())
        took = f"{data['seconds']:.0f} s" + (f" ({phases})" if phases else "")
        out.print(f"{len(ratios)} results checked, largest error / limit {max(ratios):.2f}; {took}")


def profiled(options: argparse.Namespace, place: str, out: Console) -> int:
    """`--profile A,B`: one table, one record."""
    directions = {kernel: profile.direction_of(kernel) for kernel in options.profile}
    if place == "cpu":
        raise CuflashError("bench --profile: counts on a CUDA GPU, and there is none here.")
    if options.record:
        records.check_place(options.record)
    asked = {kernel: profile_shape(options, kernel, direction) for kernel, direction in directions.items()}
    with bar("profile", len(asked)) as step:
        step("compiling", False)
        compile_pairs(asked.items())
        counted = profile.profile(asked, progress=step)
    found = counted.launches
    units = list(profile.UTILISATION)
    table = report.table("kernel", ">ms", *(f">{unit} %" for unit in units), ">occupancy %", ">DRAM GB",
                         ">registers", "limiter", "problem")  # fmt: skip
    for one in found:
        shares = (f"{one.utilisation[unit]:.0f}" if unit in one.utilisation else "" for unit in units)
        moved = None if one.dram_bytes is None else one.dram_bytes / 1e9
        occupancy = "" if one.occupancy is None else f"{one.occupancy:.0f}"
        table.add_row(one.kernel, report.digits(one.milliseconds), *shares, occupancy, report.digits(moved),
                      str(one.registers or ""), one.limiter, one.label)  # fmt: skip
    out.print(table)
    for one in found:
        waits = ", ".join(
            f"{reason.replace('_', ' ')} {100 * part:.0f} %" for reason, part in one.stalls.items()
        )
        if waits:
            out.print(f"{one.kernel}: warps wait for {waits}")
    there = {one.kernel.split("__")[0] for one in found}
    for kernel in [kernel for kernel in asked if kernel not in there]:
        refuses = f"it refuses {asked[kernel].label()}, see cuflash explain"
        out.print(f"{kernel}: not counted; {'stopped before it' if counted.stopped else refuses}")
    if found and not options.no_record:
        data = {"place": "gpu", "stopped": counted.stopped, "kernels": [one.as_json() for one in found]}
        out.print(f"record: {records.write('profile', data, there, options.record)}")
    return 130 if counted.stopped else 0


def profile_shape(options: argparse.Namespace, kernel: str, direction: str) -> Shape:
    """What the flags name: by default length 4,096, head_dim 128, or 256 for what is chosen there.

    Rungs of one thread a row get length 1,024 and 2,048 tokens: a pass of theirs would take seconds.
    """
    dtype, chosen = default_dtype("gpu"), {}
    for dim in (128, 256):
        q = cuflash.spec((4, 4096, 2048 // dim, dim), dtype)
        chosen.setdefault(cuflash.explain(q, q, q, backward=direction == "backward").kernel, dim)
    is_naive = kernel.endswith("_naive")
    made = shapes.grid(
        (direction,), sizes_of(options), head_dims=(chosen.get(kernel, 128),),
        lengths=(1024 if is_naive else 4096,), tokens=2048 if is_naive else shapes.TOKENS,
        causal=(False,), dtype=dtype,
    )  # fmt: skip
    return made[0]


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[str, bool], None]]:
    """A bar on stderr; the function given out says what goes on, and moves it when a shape is done."""
    counts = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    what = TextColumn("{task.description}", markup=False)
    with Progress(*counts, what, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda text, done: progress.update(task, advance=1 if done else 0, description=text)
