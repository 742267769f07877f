"""`cuflash bench --profile KERNEL`: how busy the units of the GPU are while a kernel runs, by Nsight Compute.

ncu runs this module as a child, one problem per kernel, and counts; here its CSV is read into one table, and
the unit that limits is named.

    profile({"fwd_02_tiled": shape}).launches        # a Profiled per launch of a row's own kernel
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cuflash import rows
from cuflash.bench.inputs import draw
from cuflash.bench.shapes import Shape
from cuflash.errors import CuflashError

ALWAYS = (
    "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "launch__registers_per_thread",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)  # fmt: skip
# of the cycles in which SMs had work, and of all of them: what a memory does has no meaning by the former
ACTIVE, ELAPSED = (rf"\.avg\.pct_of_peak_sustained_{which}" for which in ("active", "elapsed"))
# unit -> names of ncu's metrics, percent of the peak; the largest that a card has is taken.  No "throughput":
# ncu makes those of dozens of counters and as many passes, and sm__instruction_throughput, which sounds like
# issue slots, is as busy as the busiest pipe.
UTILISATION = {
    "tensor": (
        rf"sm__pipe_(tensor|tc)\w*_cycles_active(_v2)?{ACTIVE}",
        rf"sm__inst_executed_pipe_tensor{ACTIVE}",
    ),
    "MUFU": (rf"sm__inst_executed_pipe_xu{ACTIVE}",),
    "FMA": (rf"sm__pipe_fma\w*_cycles_active(_v2)?{ACTIVE}", rf"sm__inst_executed_pipe_fma{ACTIVE}"),
    "issue": (rf"sm__inst_issued{ACTIVE}", rf"smsp__issue_active{ACTIVE}"),
    "shared": (rf"l1tex__data_pipe_lsu_wavefronts{ELAPSED}", rf"l1tex__data_bank_(reads|writes){ELAPSED}"),
    "L2": (rf"lts__(t_sectors|lts2xbar_cycles_active|xbar2lts_cycles_active){ELAPSED}",),
    "DRAM": (rf"dram__bytes{ELAPSED}",),
}
STALLS = r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio"
BUSY = 60.0  # percent; below it on every unit, waiting is the limit
SECONDS = 300
STOP = "stop"
Progress = Callable[[str, bool], None]  # (kernel, whether it was counted)


@dataclass(frozen=True)
class Profiled:
    """One launch.  utilisation: unit -> percent of its peak; occupancy: percent of the warps an SM holds."""

    kernel: str
    milliseconds: float | None
    utilisation: dict[str, float]
    occupancy: float | None
    registers: int | None
    dram_bytes: float | None
    stalls: dict[str, float] = field(default_factory=dict)  # reason -> part of warp cycles
    limiter: str = ""
    label: str = ""  # of the problem

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Counted:
    """What was profiled; stopped: by Ctrl-C, or because time was up."""

    launches: list[Profiled]
    stopped: bool = False


def find_ncu() -> str | None:
    """Path of Nsight Compute's command line."""
    for candidate in (shutil.which("ncu"), "/usr/local/cuda/bin/ncu"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def direction_of(kernel: str) -> str:
    """ "forward" or "backward".  CuflashError for an unknown row."""
    for direction, table in (("forward", rows.FORWARD), ("backward", rows.BACKWARD)):
        if kernel in {row.name for row in table}:
            return direction
    known = ", ".join(dict.fromkeys(row.name for row in (*rows.FORWARD, *rows.BACKWARD)))
    raise CuflashError(f"bench --profile: unknown kernel {kernel!r}; known: {known}.")


def profile(
    shapes: Mapping[str, Shape], keep: Path | None = None, progress: Progress | None = None
) -> Counted:
    """Run each kernel on its shape, all under one ncu.

    keep: where ncu's CSV goes too.  progress(kernel, is_done) as it goes.  After SECONDS, or with Ctrl-C, the
    kernel at work is the last one, and what was counted is kept.

    Raises CuflashError without ncu, and with what ncu said when it fails (often: counters need rights).
    """
    ncu = find_ncu()
    if ncu is None:
        raise CuflashError(
            "bench --profile: needs Nsight Compute's `ncu`, which is not on PATH\n"
            "  It comes with the CUDA toolkit; `cuflash explain` tells registers and bytes without it."
        )
    with tempfile.TemporaryDirectory(prefix="cuflash-ncu-") as folder:
        output, stopped = _under_ncu([*_command(ncu, shapes), folder], Path(folder), progress)
    if keep is not None:
        keep.write_text(output)
    found = parse(output)
    if not found and not stopped:
        said = [x for x in output.splitlines() if "ERROR" in x or "Error" in x]
        raise CuflashError(
            f"bench --profile: ncu counted nothing for {', '.join(shapes)}\n  "
            + "\n  ".join(said[-5:] or ["(no message)"])
        )
    return Counted([_labelled(one, shapes) for one in found], stopped)


def metrics() -> str:
    """What ncu is asked for: names, and patterns for what cards name differently."""
    units = "|".join(pattern for patterns in UTILISATION.values() for pattern in patterns)
    return ",".join([*ALWAYS, f"regex:^({units})$", f"regex:^{STALLS}$"])


def _command(ncu: str, shapes: Mapping[str, Shape]) -> list[str]:
    """ncu and its child.  Neither sections nor rules: they make a kernel run twice as often, or nobody reads
    what they say.
    """
    return [
        ncu, "--csv", "--page", "raw", "--apply-rules", "no", "--kernel-name", f"regex:^({'|'.join(shapes)})",
        "--target-processes", "all", "--profile-from-start", "off",
        "--metrics", metrics(), sys.executable, "-m", "cuflash.bench.profile",
        json.dumps({kernel: shape.as_json() for kernel, shape in shapes.items()}),
    ]  # fmt: skip


def _under_ncu(command: list[str], folder: Path, progress: Progress | None) -> tuple[str, bool]:
    """(what ncu and its child said, whether the child was asked to stop).

    The child writes a file per kernel into the folder, and ends when it finds one named STOP there.  It has a
    session of its own: a terminal's Ctrl-C would kill ncu before it tells what it counted.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths}
    end, stopped, seen = time.monotonic() + SECONDS, False, set()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as child:
        try:
            while True:
                try:
                    said = child.communicate(timeout=0.2)
                    return "".join(said), stopped
                except subprocess.TimeoutExpired:
                    late = time.monotonic() > end
                except KeyboardInterrupt:
                    if stopped:
                        raise
                    late = True
                if late and stopped:
                    raise CuflashError(f"bench --profile: one kernel did not end in {SECONDS} s")
                if late:
                    (folder / STOP).touch()
                    stopped, end = True, time.monotonic() + SECONDS
                for path in sorted(set(folder.glob("*.done")) - seen) if progress else ():
                    progress(path.stem, True)
                    seen.add(path)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)


def _labelled(one: Profiled, shapes: Mapping[str, Shape]) -> Profiled:
    shape = shapes.get(one.kernel.split("__")[0])
    return one if shape is None else replace(one, label=f"{shape.direction}, {shape.label()}, {shape.dtype}")


def parse(text: str) -> list[Profiled]:
    """ncu's raw CSV page: a line of names, a line of units, a line per launch."""
    start = text.find('"ID"')
    if start < 0:
        return []
    lines = [line for line in text[start:].splitlines() if line.startswith('"')]
    names, units, *launches = list(csv.reader(io.StringIO("\n".join(lines))))
    return [_profiled(dict(zip(names, row, strict=False)), dict(zip(names, units, strict=True)))
            for row in launches]  # fmt: skip


def _number(text: str | None) -> float | None:
    try:
        return float(text.replace(",", "")) if text else None
    except ValueError:
        return None


_SCALE = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
          "ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1, "msecond": 1,
          "s": 1e3, "second": 1e3}  # fmt: skip


def _profiled(row: dict[str, str], units: dict[str, str]) -> Profiled:
    def scaled(name: str) -> float | None:
        number = _number(row.get(name))
        return None if number is None else number * _SCALE.get(units.get(name, ""), 1)

    utilisation = {}
    for unit, patterns in UTILISATION.items():
        shares = [
            number
            for name, text in row.items()
            if any(re.fullmatch(pattern, name.split(" ")[0]) for pattern in patterns)
            and (number := _number(text)) is not None
        ]
        if shares:
            utilisation[unit] = max(shares)
    read, written = scaled("dram__bytes_read.sum"), scaled("dram__bytes_write.sum")
    registers = _number(row.get("launch__registers_per_thread"))
    return Profiled(
        kernel=row.get("Kernel Name", "").split("(")[0],
        milliseconds=scaled("gpu__time_duration.sum"),
        utilisation=utilisation,
        occupancy=_number(row.get("sm__warps_active.avg.pct_of_peak_sustained_active")),
        registers=None if registers is None else int(registers),
        dram_bytes=None if read is None else read + (written or 0),
        stalls=_stalls(row),
        limiter=limiter(utilisation, _stalls(row)),
    )


def _stalls(row: dict[str, str]) -> dict[str, float]:
    """Why warps waited: the three largest reasons as parts of all waiting (issuing is "selected")."""
    cycles = {
        match[1]: number
        for name, text in row.items()
        if (match := re.fullmatch(STALLS, name)) and (number := _number(text)) and match[1] != "selected"
    }
    whole = sum(cycles.values())
    most = sorted(cycles.items(), key=lambda pair: -pair[1])[:3]
    return {reason: round(number / whole, 3) for reason, number in most}


def limiter(utilisation: dict[str, float], stalls: dict[str, float]) -> str:
    """The unit that is busiest, or what warps wait for when none is busy."""
    if not utilisation:
        return "unknown"
    unit, share = max(utilisation.items(), key=lambda pair: pair[1])
    if share >= BUSY:
        return f"{unit} ({share:.0f} %)"
    waiting = next(iter(stalls), None)
    reason = f", mostly {waiting.replace('_', ' ')}" if waiting else ""
    return f"waiting{reason} (busiest: {unit} {share:.0f} %)"


def main() -> int:
    """The child: each kernel once unseen (it is loaded, and sets up what it keeps), once counted."""
    import cupy
    from cupyx.profiler import profile as counted

    from cuflash.bench.contenders import Cuflash

    asked, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    for kernel, data in asked.items():
        if (folder / STOP).exists():
            break
        with contextlib.suppress(CuflashError):  # the row refuses: its line is missing
            prepared = Cuflash(kernel).prepare(draw(Shape.from_json(data), cupy), fresh=False)
            prepared.call(0)
            cupy.cuda.runtime.deviceSynchronize()
            with counted():
                prepared.call(0)
                cupy.cuda.runtime.deviceSynchronize()
        (folder / f"{kernel}.done").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
