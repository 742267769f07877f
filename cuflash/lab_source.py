"""The file that lab.py studies: which row it is a version of, and a folder of sources with it in place."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cuflash import build, emulator, rows
from cuflash.errors import CuflashError
from cuflash.row import Row


@dataclass(frozen=True)
class Source:
    """The file under study.  row: the row it is a version of; folder: the kernels/ to compile it from.

    shipped: the folder of the kernel as it is in the package, None where the file is that kernel itself.
    names: the file is called by its path in compilers' messages, as build.sources_from wants it.
    """

    path: Path
    row: Row
    directions: tuple[str, ...]
    folder: Path
    shipped: Path | None

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def names(self) -> dict[str, str]:
        return {} if self.shipped is None else names_of(self.path)


@contextmanager
def workshop(path: Path) -> Iterator[Source]:
    """The file as a kernel of some folder: its own, or a copy of kernels/ with it in place of the row's."""
    if not path.is_file():
        raise CuflashError(f"lab: {path} is not there; needs the path of a .cu file.")
    row = row_of(path)
    directions = tuple(
        direction
        for direction, table in (("forward", rows.FORWARD), ("backward", rows.BACKWARD))
        if row.name in {one.name for one in table}
    )
    home = build.kernels_directory()
    if path.resolve().parent == home.resolve():
        yield Source(path, row, directions, home, None)
        return
    with tempfile.TemporaryDirectory(prefix="cuflash-lab-") as temporary:
        folder = overlay(Path(temporary) / "kernels", path)
        yield Source(path, row, directions, folder, home)


def overlay(folder: Path, path: Path) -> Path:
    """A copy of kernels/ in which `path` is the file of its name's row.  Headers beside it stay behind."""
    shutil.copytree(build.kernels_directory(), folder, ignore=shutil.ignore_patterns("measured", "*.md"))
    shutil.copy(path, folder / f"{stem_of(path)}.cu")
    return folder


def names_of(path: Path) -> dict[str, str]:
    """What compilers are to call the file that `overlay` puts in place of its row's."""
    return {f"kernels/{stem_of(path)}.cu": path.as_posix().replace('"', "'")}


def entry_of(path: Path) -> str:
    """The first entry point that a file defines.  Raises CuflashError when there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CuflashError(f"lab: {path} cannot be read as text: {error}") from None
    for name in emulator.compiler.entry_points(text):
        return name
    raise CuflashError(f"lab: {path} defines no entry point: KERNEL(threads, blocks) name(...).")


def stem_of(path: Path) -> str:
    """Name of the kernel file that a file is a version of, from its first entry point."""
    return entry_of(path).split("__")[0]


def row_of(path: Path) -> Row:
    """The row whose entry point the file defines; for a pass, the best row that runs it.

    Raises CuflashError when the file has no entry point, or one that no row has.
    """
    name = stem_of(path)
    table = list(dict.fromkeys((*rows.FORWARD, *rows.BACKWARD)))
    for row in table:
        if row.name == name:
            return row
    for row in table:
        if name.startswith("pass_") and row.starred and any(step.file == name for step in row.steps):
            return row
    raise CuflashError(
        f"lab: no row of the plan table runs {name}; known: {', '.join(row.name for row in table)}\n"
        "  Keep the entry point's name in a changed copy.  A new rung needs a row in cuflash/rows_*.py first."
    )


def parent_of(text: str) -> str | None:
    """The rung that a header says to read before this one.

    >>> parent_of("// Read after   fwd_01_naive.cu          Read next   fwd_03_mma.cu")
    'fwd_01_naive'
    """
    match = re.search(r"Read after\s+(\w+)", text)
    return match[1] if match else None
