"""Compiled kernels on disk: one readable file and its report per build, safe for many processes at once.

The folder is $CUFLASH_CACHE_DIR, else ~/.cache/cuflash.  Where it cannot be written (read-only, no home),
files go to a temporary folder that ends with the process; what a read-only folder already holds is used.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("cuflash")
_brought: dict[str, Entry] = {}
SUFFIXES = (".cubin", ".ptx", ".so")


@dataclass(frozen=True)
class Entry:
    """One build on disk.  report: what the compiler said (registers, spills, options, source hash)."""

    path: Path
    report: dict[str, Any]

    @property
    def n_bytes(self) -> int:
        return self.path.stat().st_size


def wanted_directory() -> Path | None:
    """The folder asked for, existing or not; None when there is neither CUFLASH_CACHE_DIR nor a home."""
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    try:
        return Path.home() / ".cache" / "cuflash"
    except RuntimeError:
        return None


@functools.cache
def temporary_directory() -> Path:
    """This process's own folder, removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="cuflash-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends too, and its parent still needs the folder
        shutil.rmtree(folder, ignore_errors=True)


def check_writable(folder: Path) -> None:
    """Raise OSError where builds cannot be written; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def bring(folder: str | Path) -> int:
    """Prefer the builds of another cache folder, whatever version of NVRTC made them; returns how many.

    A build is taken when the source text and the options are those asked for.  For this process only.
    """
    _brought.clear()
    for path in sorted(Path(folder).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads(path.read_text())
            build = path.with_name(report["file"])
            if report["sha256"] == _sha(build.read_bytes()):
                _brought[report["content"]] = Entry(build, report)
    return len(_brought)


def brought(content: str) -> Entry | None:
    """The build of this text and these options among those brought along, or None."""
    return _brought.get(content)


def find(stem: str, key: str) -> Entry | None:
    """The build of `key`, or None.  A file that was cut short or belongs to another key does not count."""
    for folder in (wanted_directory(), temporary_directory()):
        if folder is None:
            continue
        try:
            report = json.loads((folder / f"{stem}.json").read_text())
            path = folder / report["file"]
            if report["key"] == key and report["sha256"] == _sha(path.read_bytes()):
                return Entry(path, report)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def store(stem: str, key: str, suffix: str, blob: bytes, report: dict[str, Any]) -> Entry:
    """Write one build: the file first, then the report that makes it valid, both by atomic rename."""
    full = {**report, "key": key, "file": stem + suffix, "sha256": _sha(blob)}
    wanted = wanted_directory()
    if wanted is not None:
        try:
            return _write(wanted, stem, suffix, blob, full)
        except OSError as error:
            why = error.strerror or error
            _say_once(f"{wanted} cannot be written ({why}): builds of this process are temporary")
    return _write(temporary_directory(), stem, suffix, blob, full)


def entries() -> list[Entry]:
    """Every build in the folder, by name."""
    folder = wanted_directory()
    found = []
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads(path.read_text())
            if (folder / report["file"]).is_file():
                found.append(Entry(folder / report["file"], report))
    return found


def clear() -> int:
    """Delete every build in the folder; returns how many.  Files that cuflash did not write stay."""
    found = entries()
    for entry in found:
        for path in (entry.path.parent / f"{entry.path.stem}.json", entry.path):
            path.unlink(missing_ok=True)
    return len(found)


def _write(folder: Path, stem: str, suffix: str, blob: bytes, report: dict[str, Any]) -> Entry:
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / (stem + suffix), blob)
    _replace(folder / f"{stem}.json", json.dumps(report, indent=1).encode())
    return Entry(folder / (stem + suffix), report)


def _replace(path: Path, blob: bytes) -> None:
    """Other processes see the old file or the new one, never a part of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(blob)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sha(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


@functools.cache
def _say_once(sentence: str) -> None:
    log.info("cache: %s", sentence)
