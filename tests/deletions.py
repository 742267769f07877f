"""Delete one barrier, wait, fence or arrival of a kernel, and see whether the emulated checks notice."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuflash import build, checks, emulator, launch, rows
from cuflash.cases import Case, _bias, _block_mask, cases

WAIT = re.compile(
    r"\b(?:block_sync|warp_sync|barrier_(?:sync|arrive)|cluster_(?:sync|arrive|wait)|cp_async_(?:commit|wait|arrive)"
    r"|mbarrier_(?:init_fence|wait|arrive|arrive_expect|arrive_remote|expect)|fence_async_(?:shared|global)"
    r"|wgmma_(?:fence|commit|wait)|bulk_(?:commit|wait_read|wait)|wait_for_tiles"
    r"|(?:\w+\.)?wait_(?:full|empty)|arrive_at_both)\s*(?:<[^<>;]*>)?\s*\("
)
# where the instructions themselves are defined
WRAPPERS = {"warp", "barrier", "cp_async", "mbarrier", "tma", "cluster", "wgmma"}
WRAPPERS |= {"emulated", "memory", "platform"}
SEEDS = (1, 2, 3, 5, 7, 0)
DETERMINISTIC = (
    "ragged grouped heads", "alibi", "block mask", "bias by key", "bias by head and query", "turns"
)  # fmt: skip
# Besides the quick cases: what only these make a kernel walk.
MORE = (
    "long",
    "head_dim 256",
    "head_dim 320 v 257",
    "bias by key",
    "bias by head and query",
    "alibi by batch",
    "both lengths causal",
)


@dataclass(frozen=True)
class Site:
    """One call to delete.  file: below kernels/.  line: from 1.  start, end: columns of the statement."""

    file: str
    line: int
    start: int
    end: int
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.file, self.text


def files_of(row_name: str, launched: set[str] | None = None) -> list[str]:
    """Every file of a row, passes and headers included, that may hold a wait.

    launched: files of passes that run; None: all that the row may ever run.
    """
    row = next(r for r in (*rows.FORWARD, *rows.BACKWARD) if r.name == row_name)
    found: list[str] = []
    for file in dict.fromkeys(step.file for step in row.steps):
        if launched is not None and file not in launched:
            continue
        for home in re.findall(r'^#line 1 "kernels/(.*)"$', build.expand(file, emulated=True), re.M):
            if Path(home).stem not in WRAPPERS and home not in found:
                found.append(home)
    return found


def sites_of(row_name: str, launched: set[str] | None = None) -> list[Site]:
    """The waits of a row, in the order of the text."""
    found = []
    for file in files_of(row_name, launched):
        for number, line in enumerate((build.kernels_directory() / file).read_text().splitlines(), 1):
            code = line.split("//")[0]
            if code.lstrip().startswith(("DEVICE", "template", "#")):
                continue
            for match in WAIT.finditer(code):
                end = _statement_end(code, match.end())
                if end is not None:
                    found.append(Site(file, number, match.start(), end, line.strip()))
    return found


def _statement_end(code: str, at: int) -> int | None:
    """Index of the ';' that closes a call whose '(' ends at `at`; None when it closes no statement here."""
    depth = 1
    while at < len(code) and depth:
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        at += 1
    return at if depth == 0 and code[at:].lstrip().startswith(";") else None


@contextlib.contextmanager
def without(site: Site | None, folder: Path) -> Iterator[None]:
    """The kernels of this process are a copy in which the site's statement is empty."""
    before = build.kernels_directory
    target = folder / "kernels"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(before(), target, ignore=shutil.ignore_patterns("measured"))
    if site is not None:
        path = target / site.file
        lines = path.read_text().splitlines()
        line = lines[site.line - 1]
        lines[site.line - 1] = line[: site.start] + line[site.end :]
        path.write_text("\n".join(lines) + "\n")
    build.kernels_directory = lambda: target
    launch.forget()
    try:
        yield
    finally:
        build.kernels_directory = before
        launch.forget()


LENGTHS = [1, 299, 130]
NAN_QUERIES = "NaN behind queries"  # in dout too


def _nan_behind(*names: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """NaN past the end of each sequence: it may reach no result."""

    def change(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        changed = {name: arrays[name].copy() for name in names}
        for array in changed.values():
            for b, length in enumerate(LENGTHS):
                array[b, length:] = np.nan
        return arrays | changed

    return change


def chosen_cases() -> list[Case]:
    chosen = [case for case in cases() if case.quick or case.name in MORE]
    for axes in ((1, 2), (2, 3), (0, 3)):  # broadcast biases under a block mask
        draw = {"bias": _bias(*axes), "block_mask": _block_mask}
        chosen.append(Case(f"block mask and bias of axes {axes}", (2, 70, 93, 4, 2, 64, 64), draw=draw))
    # More query tiles than a persistent grid has blocks, some of which see no keys; many kept blocks;
    # sequences that end inside a tile, with NaN behind.
    many = (3, 300, 420, 20, 2, 64, 64)
    chosen += [
        Case("many query tiles", many, {"causal": True}),
        Case("many wide query tiles", (2, 300, 200, 4, 2, 192, 192), {"causal": True}),
        Case("many without keys", (3, 300, 120, 20, 2, 64, 64), {"causal": True, "query_offset": -150}),
        Case("many kept blocks", (1, 300, 700, 2, 1, 64, 64), draw={"block_mask": _block_mask}),
        Case(
            "NaN behind", (3, 70, 300, 1, 1, 64, 64), {"key_lengths": LENGTHS}, change=_nan_behind("k", "v")
        ),
        Case(NAN_QUERIES, (3, 300, 70, 1, 1, 64, 64), {"query_lengths": LENGTHS}, change=_nan_behind("q")),
        Case("turns", (1, 150, 420, 2, 1, 64, 64)),  # several tiles of keys add to one of dQ
    ]
    return chosen


class Checks:
    """The emulated checks of one row.  Expected results are computed once."""

    def __init__(self, row: str, dtypes: tuple[str, ...]):
        self.row = row
        self.directions = [
            direction
            for direction, table in (("forward", rows.FORWARD), ("backward", rows.BACKWARD))
            if any(r.name == row for r in table)
        ]
        self.launched: set[str] = set()  # files of what ran
        self.bits: dict[str, str] = {}  # of deterministic gradients, by the run's words
        self.runs = []  # (words, direction, Expected)
        for case in chosen_cases():
            for dtype in dtypes:
                expected = checks.Expected(case, dtype)
                if case.name == NAN_QUERIES:
                    expected.dout = _nan_behind("dout")({"dout": expected.dout})["dout"]
                for direction in self.directions:
                    self.runs.append((f"{case.name}, {dtype}, {direction}", direction, expected))
                    if direction == "backward" and case.name in DETERMINISTIC:
                        again = copy.copy(expected)
                        again.options = {**expected.options, "deterministic": True}
                        self.runs.append((f"{case.name}, {dtype}, deterministic", direction, again))

    def keep_what_passes(self) -> None:
        """Forget what the row refuses, and what it fails as it is: other tests report that."""
        with emulator.recording() as launches:
            self.runs = [run for run in self.runs if self.outcome(run, 0) == "passed"]
        assert self.runs, f"{self.row} passes nothing"
        self.launched = {launch.kernel.split("__")[0] for launch in launches}

    def outcome(self, run: tuple[str, str, checks.Expected], seed: int) -> str:
        """What `cuflash check` says of one case in one order of threads: "passed", or status and sentence."""
        with emulator.options(seed=seed, stall_seconds=5), np.errstate(all="ignore"):
            line = checks.one(self.row, run[1], run[2], np)
            assert "does not compile" not in line.message, line.message
            if line.status != "passed":
                return f"{line.status}: {line.message}"
            if run[2].options.get("deterministic"):
                gradients = checks.backward(self.row, run[2], np)
                bits = hashlib.sha256(b"".join(x.tobytes() for x in gradients.values())).hexdigest()
                if self.bits.setdefault(run[0], bits) != bits:
                    return "failed: other bits in another order of threads"
        return "passed"

    def notice(self, last: str = "") -> str | None:
        """The first thing that is wrong, in any case and any order of threads; last time's comes first."""
        turns = [(f"{run[0]}, seed {seed}: ", run, seed) for run in self.runs for seed in SEEDS]
        for words, run, seed in sorted(turns, key=lambda turn: not last.startswith(turn[0])):
            said = self.outcome(run, seed)
            if said != "passed":
                return words + said
        return None


def search(
    row: str, folder: Path, dtypes: tuple[str, ...], last: Mapping[tuple[str, str], str] | None = None
) -> dict[Site, str | None]:
    """Site -> what noticed its deletion (case, dtype, seed and message), None when nothing did.

    last: what noticed the same statement, by Site.key, in an earlier search: it is tried first.
    """
    with without(None, folder / "sound"):  # a copy that stays as it is
        all_checks = Checks(row, dtypes)
        all_checks.keep_what_passes()
        found = {}
        for site in sites_of(row, all_checks.launched):
            with without(site, folder):
                found[site] = all_checks.notice((last or {}).get(site.key, ""))
    return found
