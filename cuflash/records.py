"""Records: what was run, where, when, on which sources.  One JSON file a run; tables are made from them.

A record holds the environment (device, driver, versions, date), the hash of every kernel source it speaks
about, and the payload.  A row whose kernel has changed since shows as stale, never as an error:
`stale(record)` says which.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cuflash
from cuflash import nvml

VERSIONED = (
    "numpy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "torch",
    "jax",
    "fa3-fwd",
    "flash-attn3-jax",
    "flash-attn-4",
)


def folder() -> Path:
    """kernels/measured in a checkout, ./cuflash-records from an installed wheel."""
    root = Path(cuflash.__file__).resolve().parent.parent
    in_checkout = (root / "pyproject.toml").is_file() and (root / "kernels").is_dir()
    return root / "kernels" / "measured" if in_checkout else Path.cwd() / "cuflash-records"


def environment() -> dict[str, Any]:
    """Machine, device, driver and versions.  device is None without a GPU."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cuflash": cuflash.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": device(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Installed packages that decide what runs."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def device() -> dict[str, Any] | None:
    """The current CUDA device: name, arch, driver, runtime and NVRTC versions; None without one.

    driver is the newest CUDA it supports, driver_version its own number.  Clocks in MHz, power in watts, as
    they are now (NVML; None where that is missing).
    """
    try:
        import cupy

        runtime = cupy.cuda.runtime
        if runtime.getDeviceCount() == 0:
            return None
        current = cupy.cuda.Device()
        properties, bus_id = runtime.getDeviceProperties(current.id), current.pci_bus_id
        return {
            "name": properties["name"].decode(),
            "arch": f"sm_{properties['major']}{properties['minor']}",
            "multiprocessors": properties["multiProcessorCount"],
            "memory_bytes": properties["totalGlobalMem"],
            "driver": dotted(runtime.driverGetVersion()),
            "runtime": dotted(runtime.runtimeGetVersion()),
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
            "cupy": cupy.__version__,
            "driver_version": nvml.driver_version(),
            "max_sm_clock": nvml.max_sm_clock(bus_id),
            "sm_clock": nvml.sm_clock(bus_id),
            "temperature": nvml.temperature(bus_id),
            "power_limit": nvml.power_limit(bus_id),
        }
    except Exception:  # a missing module, driver or library: each has its own class, all mean "no GPU here"
        return None


def dotted(version: int) -> str:
    """CUDA's version number as people write it.

    >>> dotted(12090)
    '12.9'
    """
    return f"{version // 1000}.{version % 1000 // 10}"


def slug(name: str) -> str:
    """A name as part of a file name.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def source_hashes(rows: Iterable[str]) -> dict[str, str]:
    """Row name -> hash of its expanded source without comments and blank lines; "numpy" rows have none."""
    from cuflash import build

    return {row: build.source_hash(row) for row in sorted(set(rows)) if row != "numpy"}


def write(
    kind: str, payload: dict[str, Any], rows: Iterable[str] = (), path: str | Path | None = None
) -> Path:
    """Write one record and return its path.

    kind: "check", "bench", ...  payload: anything JSON takes; NaN and infinities become strings.
    rows: kernels the record speaks about.  path: a file, or None for <folder>/<kind>-<device>-<date>.json.
    """
    where = environment()
    record = {"kind": kind, "environment": where, "sources": source_hashes(rows), **payload}
    if path is None:
        name = where["device"]["name"] if where["device"] else "cpu"
        stamp = re.sub(r"[^0-9]", "", where["date"])[:14]
        path = folder() / f"{kind}-{slug(name)}-{stamp}.json"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(plain(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)  # a reader sees the whole record or none
    return path


def check_place(path: str | Path) -> None:
    """CuflashError where no record could be written: said before minutes are spent on it."""
    where = Path(path)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=where.parent).close()
    except OSError as error:
        raise cuflash.CuflashError(f"{path} cannot be written: {error.strerror or error}.") from None
    if where.is_dir():
        raise cuflash.CuflashError(f"{path} cannot be written: it is a folder.")


def read(path: str | Path) -> dict[str, Any]:
    """A record that was written; CuflashError where there is no file, or it holds none."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise cuflash.CuflashError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise cuflash.CuflashError(f"{path} is no record: {error}.") from None
    if not isinstance(record, dict):
        raise cuflash.CuflashError(f"{path} is no record: it holds no JSON object.")
    return record


def stale(record: dict[str, Any]) -> list[str]:
    """Rows of a record whose source is not what it was (or is gone)."""
    from cuflash import build

    changed = []
    for row, then in record.get("sources", {}).items():
        try:
            now = build.source_hash(row)
        except (cuflash.CuflashError, OSError):
            now = None
        if now != then:
            changed.append(row)
    return changed


def plain(value: Any) -> Any:
    """value with NumPy scalars as Python numbers, tuples as lists, and non-finite floats as strings."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if hasattr(value, "item") and not isinstance(value, str):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
