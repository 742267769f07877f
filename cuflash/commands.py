"""What each command of `cuflash` does: a function from parsed options to an exit code."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import cuflash
from cuflash import build, cache, cases, checks, devices, records
from cuflash import demo as demo_
from cuflash.encoder import INSTALL_WEIGHTS, find_weights
from cuflash.errors import CuflashError


class PlainConsole(Console):
    """Without markup: "cuflash[cuda12]" and a user's sentences are printed as they are."""

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else 200  # a file or a pipe has no edge to wrap at
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for cli.main; rich would exit with 1, which here means a wrong number


def console() -> Console:
    """Where tables go; made anew each time so that a redirected stdout is the one in use."""
    return PlainConsole()


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table without boxes; a column whose name starts with ">" is aligned right."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right)
    return made


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; the function given out moves it one step and says what is done."""
    counts = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    what = TextColumn("{task.description}")
    with Progress(*counts, what, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda text: progress.update(bar, advance=1, description=text)


# ---- info


def info(options: argparse.Namespace) -> int:
    """What is here, and what runs for NumPy and CuPy arrays."""
    where = records.environment()
    made = table("", "")
    made.show_header = False
    made.add_row("cuflash", f"{where['cuflash']}, kernels in {build.kernels_directory()}")
    made.add_row("Python, NumPy", f"{where['python']}, {np.__version__}")
    made.add_row("CPU", f"{where['cpu']}, {where['cores']} cores")
    made.add_row("CuPy", cupy_line())
    made.add_row("NVRTC", nvrtc_line())
    gpus = [devices.gpu(index) for index in range(devices.gpu_count())]
    made.add_row("GPU", "\n".join(f"{gpu.index}: {gpu.label}" for gpu in gpus) or "none")
    if where["device"]:
        made.add_row("driver", f"CUDA {where['device']['driver']}, runtime {where['device']['runtime']}")
    made.add_row("cache", cache_line())
    made.add_row("demo weights", "installed" if find_weights() else f"not installed: {INSTALL_WEIGHTS}")
    out = console()
    out.print(made)
    out.print()
    made = table("arrays", "where", "forward", "backward", title="what will run")
    made.add_row("NumPy, any dtype", devices.HOST.label, "tiled", "tiled")
    for gpu in gpus[:1]:
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            rows = (chosen(dtype, gpu, backward) for backward in (False, True))
            made.add_row(f"CuPy, {dtype}, head_dim 64", gpu.label, *rows)
    if not gpus:
        made.add_row("CuPy", "needs a GPU", "", "")
    out.print(made)
    return 0


def chosen(dtype: str, device: Any, backward: bool) -> str:
    """Name of the row for a plain causal problem."""
    spec = cuflash.spec((1, 4096, 16, 64), dtype)
    return cuflash.explain(spec, spec, spec, causal=True, backward=backward, device=device).kernel


def cupy_line() -> str:
    try:
        import cupy
    except ImportError as error:
        if importlib.util.find_spec("cupy") is None:
            return "not installed: pip install 'cuflash[cuda12]' (or [cuda13])"
        return f"fails to import: {error}"
    return cupy.__version__


def nvrtc_line() -> str:
    try:
        archs = ", ".join(f"sm_{arch}" for arch in build.supported_archs() if arch >= 75)
        return f"{'.'.join(map(str, build.nvrtc_version()))}, for {archs}"
    except CuflashError as error:
        return str(error).splitlines()[0]


def cache_line() -> str:
    found = cache.entries()
    return f"{cache.wanted_directory()}, {len(found)} builds, {sum(e.n_bytes for e in found) / 1e6:.1f} MB"


# ---- demo


def demo(options: argparse.Namespace) -> int:
    """The encoder on sentences; without weights, a made-up problem."""
    out = console()
    if find_weights() is None:
        out.print(demo_.weights_are_missing())
        difference, limit, where = demo_.made_up(options.device)
        right = difference <= limit
        out.print(f"A made-up problem instead, on {where}: largest difference from the float64 reference "
                  f"{difference:.1e} ({'right' if right else 'WRONG'}, limit {limit:.0e}).")  # fmt: skip
        return 0 if right else 1
    result = demo_.run(sentences_of(options), options.device, options.dtype)
    made = table("sentence", "nearest", ">cosine")
    for found in result.neighbours:
        cosine = "" if found.nearest is None else f"{found.cosine:.3f}"
        made.add_row(found.sentence, found.nearest or "(no other sentence)", cosine)
    out.print(made)
    n = len(result.neighbours)
    sentences = f"{n} sentence{'s' if n > 1 else ''}, {result.n_tokens} tokens"
    out.print(f"\n{sentences}, {1e3 * result.seconds:.1f} ms on {result.where}, attention in {options.dtype}")
    out.print(f"largest difference from a float64 pass through the reference: {result.difference:.1e} "
              f"({'right' if result.passed else 'WRONG'}, limit {result.limit:.0e})")  # fmt: skip
    return 0 if result.passed else 1


def sentences_of(options: argparse.Namespace) -> list[str]:
    """Sentences of the command line and of --file, else the built-in ones."""
    found = list(options.sentences)
    if options.file is not None:
        try:
            text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CuflashError(f"demo: {options.file} cannot be read: {error}") from error
        found += [line.strip() for line in text.splitlines() if line.strip()]
        if not found:
            raise CuflashError(f"demo: {options.file} has no sentences; give one a line.")
    return found or list(demo_.SENTENCES)


# ---- check


def check(options: argparse.Namespace) -> int:
    """The correctness suite: a bar while it runs, a table, a record."""
    xp, where = demo_.array_module(options.device)
    if options.cubins is not None:
        n = cache.bring(options.cubins)
        if n == 0:
            raise CuflashError(
                f"check: no compiled kernels in {options.cubins}. Fill it: cuflash cache build --to DIR"
            )
        print(f"{n} compiled kernels from {options.cubins}")
    task = checks.task(options.rows, options.quick, options.dtypes, options.cases, xp)
    if not options.no_record:
        records.check_place(options.record or records.folder() / "record of this check")
    named = xp is np and {*task.forward, *task.backward} != {checks.NUMPY}
    emulated = f", kernels of {build.kernels_directory()} in the emulator" if named else ""
    print(f"{len(task)} checks on {where}{emulated}", flush=True)
    if xp is not np:
        compile_ahead(checks.jobs(task, devices.find(None)))
    start = time.perf_counter()
    with progress_bar("checking", len(task)) as step:
        report = checks.run(task, lambda line, done, total: step(f"{line.row}, {line.case}, {line.dtype}"))
    seconds = time.perf_counter() - start
    print_report(report, seconds)
    if not options.no_record:
        payload = {**report.payload(), "seconds": round(seconds, 1), "nvrtc_of_cubins": build.compilers()}
        path = records.write("check", payload, {*task.forward, *task.backward}, options.record)
        print(f"record: {path}")
    return 0 if report.passed else 1


def print_report(report: checks.Report, seconds: float) -> None:
    out = console()
    made = table("row", "direction", ">passed", ">failed", ">refused", ">error / limit", "at")
    for entry in report.summary():
        counts = (str(entry[status]) for status in ("passed", "failed", "refused"))
        made.add_row(entry["row"], entry["direction"], *counts, f"{entry['worst_ratio']:.2f}", entry["worst"])
    out.print(made)
    for line in report.failures[:20]:
        out.print(f"FAILED {line.row}, {line.direction}, {line.case}, {line.dtype}: {line.message}")
    if len(report.failures) > 20:
        out.print(f"... and {len(report.failures) - 20} more; the record has them all")
    verdict = "all right" if report.passed else f"{len(report.failures)} WRONG"
    if not report.failures and not report.passed:
        verdict = "nothing was compared: every row refused every case"
    out.print(f"{len(report.lines)} checks in {seconds:.0f} s: {verdict}")


def compile_ahead(jobs: list[build.Job]) -> None:
    """Compile in parallel, with a bar."""
    with progress_bar("compiling", len(jobs)) as step:
        build.compile_all(jobs, progress=lambda done, total: step(""))


# ---- explain


def explain(options: argparse.Namespace) -> int:
    """The plan of a problem of the given sizes; with --run, the problem itself."""
    len_k = options.len if options.len_k is None else options.len_k
    heads_k = options.heads if options.heads_k is None else options.heads_k
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    shape = (options.batch, options.len, len_k, options.heads, heads_k, options.head_dim, head_dim_v)
    if min(shape) < 0:
        raise CuflashError(f"explain: sizes are {shape}; each needs to be 0 or more.")
    settings, arrays = settings_of(options), specs_of(options, shape)
    q, k, v = (cuflash.spec(size, options.dtype) for size in sizes_of(shape))
    plan = cuflash.explain(
        q,
        k,
        v,
        **settings,
        **arrays,
        kernel=options.kernel,
        backward=options.backward,
        deterministic=options.deterministic,
        device=options.device or ("emulated" if options.run else None),
    )
    if options.compile:
        _ = plan.resources  # compiles; the text then has what the compiler said
    print(plan)
    if options.run is None:
        return 0
    drawn = {name: cases.DRAW[name] for name in arrays}
    return run_emulated(plan.kernel, cases.Case("command line", shape, settings, drawn), options)


def sizes_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, k and v."""
    batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v = shape
    return (
        (batch, len_q, heads, head_dim),
        (batch, len_k, heads_k, head_dim),
        (batch, len_k, heads_k, head_dim_v),
    )


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Options of the call that are no arrays; those not given are left out."""
    given = {
        "causal": options.causal or None,
        "window": tuple(options.window) if options.window else None,
        "query_offset": options.query_offset,
        "scale": options.scale,
        "softcap": options.softcap,
        "dropout": None if options.dropout is None else (options.dropout, 1),
    }
    return {name: value for name, value in given.items() if value is not None}


def specs_of(options: argparse.Namespace, shape: tuple[int, ...]) -> dict[str, Any]:
    """Options of the call that are arrays, as specs: a plan looks at shapes alone."""
    batch, len_q, len_k, heads = shape[:4]
    wide = str(cases.wide(options.dtype))
    specs = {
        "alibi_slopes": options.alibi and cuflash.spec((heads,), wide),
        "bias": options.bias and cuflash.spec((batch, heads, len_q, len_k), options.dtype),
        "mask": options.mask and cuflash.spec((batch, 1, len_q, len_k), "bool"),
        "sink": options.sink and cuflash.spec((heads,), wide),
        "key_lengths": options.key_lengths and [len_k] * batch,
    }
    return {name: value for name, value in specs.items() if value}


def run_emulated(row: str, case: cases.Case, options: argparse.Namespace) -> int:
    """Run the case on the CPU with the named kernel and compare with the reference."""
    start = time.perf_counter()
    expected = checks.Expected(case, options.dtype)
    direction = "backward" if options.backward else "forward"
    line = checks.one(row, direction, expected, np)
    seconds = time.perf_counter() - start
    print(f"\n{row} in the emulator, {direction}, {seconds:.1f} s with the reference: {line.status}")
    for verdict in line.verdicts:
        print(f"  {verdict.name:<14} error {verdict.error:.2e}   limit {verdict.limit:.2e}")
    if line.message:
        print(f"  {line.message}")
    return 0 if line.status == "passed" else 1


# ---- cache


def cache_where(options: argparse.Namespace) -> int:
    print(cache.wanted_directory() or cache.temporary_directory())
    return 0


def cache_list(options: argparse.Namespace) -> int:
    """Every build: its registers and spills are of the entry point that needs most."""
    found = cache.entries()
    made = table("build", ">KB", ">registers", ">spills", ">NVRTC", ">seconds")
    for entry in found:
        report = entry.report
        resources = list(report.get("entries", {}).values())
        registers = max((r["registers"] for r in resources), default="-")  # "-": built for the emulator
        spills = max((r["spill_stores"] + r["spill_loads"] for r in resources), default="-")
        nvrtc = ".".join(map(str, report.get("nvrtc", "-")))
        seconds = f"{report['seconds']:.1f}" if "seconds" in report else "-"
        made.add_row(
            entry.path.name, f"{entry.n_bytes / 1e3:.0f}", str(registers), str(spills), nvrtc, seconds
        )
    if found:
        console().print(made)
    print(cache_line())
    return 0


def cache_clear(options: argparse.Namespace) -> int:
    print(f"{cache.clear()} builds deleted from {cache.wanted_directory()}")
    return 0


def cache_build(options: argparse.Namespace) -> int:
    """Compile what `cuflash check` needs for an architecture, into a folder that can be taken along."""
    device = devices.find(options.arch)
    if device.kind != "cuda":
        raise CuflashError(f"cache build: --arch is {options.arch!r}; needs that of a GPU, such as sm_90.")
    task = checks.task(options.rows, options.quick, options.dtypes, None, xp=None)
    jobs = checks.jobs(task, device)
    version = ".".join(map(str, build.nvrtc_version()))
    with cache_folder(options.to):
        folder = cache.wanted_directory() or cache.temporary_directory()
        try:
            cache.check_writable(folder)
        except OSError as error:
            do = "Give another folder: --to DIR."
            raise CuflashError(f"cache build: {folder} cannot be written: {error.strerror}\n  {do}") from None
        print(f"{len(jobs)} builds for {options.arch} with NVRTC {version}", flush=True)
        compile_ahead(jobs)
        print(cache_line())
    return 0


@contextmanager
def cache_folder(folder: str | None) -> Iterator[None]:
    """Inside it, compiled kernels go to this folder; None leaves the cache where it is."""
    before = os.environ.get("CUFLASH_CACHE_DIR")
    if folder is not None:
        os.environ["CUFLASH_CACHE_DIR"] = folder
    try:
        yield
    finally:
        if folder is not None:
            os.environ.pop("CUFLASH_CACHE_DIR")
            os.environ.update({} if before is None else {"CUFLASH_CACHE_DIR": before})
