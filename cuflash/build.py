"""Source text and parameters -> a cubin on disk: NVRTC, called directly, needs neither a GPU nor a toolkit.

One build is one combination of parameters, each passed as -DCUFLASH_<NAME>=<int> (kernels/lib/params.cuh).
The key of a build is the whole expanded text, the options and the version of NVRTC, so an edited header is
always a new build.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuflash import cache
from cuflash.errors import CuflashError

log = logging.getLogger("cuflash")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*(ifdef|ifndef|if|else|elif|endif)\b(.*)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
STEM_FLAGS = (
    "CAUSAL", "WINDOW", "PACKED", "SOFTCAP", "ALIBI", "MASK", "BLOCK_MASK", "SINK", "DROPOUT",
    "DETERMINISTIC",
)  # fmt: skip
DTYPE_NAMES = {0: "f16", 1: "bf16", 2: "f32", 3: "f64"}
# One lock per key: threads that want the same build wait for one of them to make it.
_locks: dict[str, threading.Lock] = {}
_locks_guard = threading.Lock()
_compilers: set[tuple[int, int]] = set()
_elsewhere: Path | None = None  # the folder of sources_from
_names: dict[str, str] = {}  # what compilers are to call a file of it


@dataclass(frozen=True)
class Job:
    """One thing to compile.

    file: kernels/<file>.cu.  params: (name, int), without CUFLASH_.  target: "sm_90a" (cubin) or
    "compute_120" (PTX).
    """

    file: str
    params: tuple[tuple[str, int], ...]
    target: str


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one entry point.  registers per thread; spills and stack in bytes per thread."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int


@dataclass(frozen=True)
class Build:
    """A compiled kernel file.  entries: entry point -> Resources, empty for PTX.  warnings: ptxas' C75xx."""

    path: Path
    entries: dict[str, Resources]
    warnings: tuple[str, ...]
    report: dict[str, Any]


# ---- source


def kernels_directory() -> Path:
    """`kernels/` of a checkout, `cuflash/kernels` of an installed wheel, or the folder of sources_from."""
    return _elsewhere or _own_directory()


@contextmanager
def sources_from(directory: Path, names: dict[str, str] | None = None) -> Iterator[None]:
    """Inside it, kernels are read from another folder, such as a copy with one file changed (lab.py).

    names: kernels/<file>.cu -> what compilers call it in their messages.  For the whole process.  What is
    loaded already stays loaded: see launch.forget.
    """
    global _elsewhere, _names
    before = _elsewhere, _names
    _elsewhere, _names = Path(directory), names or {}
    try:
        yield
    finally:
        _elsewhere, _names = before


@functools.cache
def _own_directory() -> Path:
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels", here.parent / "kernels"):
        if (folder / "lib" / "args.cuh").is_file():
            return folder
    raise CuflashError(
        f"the kernel sources are missing; looked in {here / 'kernels'} and {here.parent / 'kernels'}"
    )


def expand(file: str, emulated: bool = False, directory: Path | None = None) -> str:
    """The text of kernels/<file>.cu with every #include "..." pasted in, once each, and #line markers.

    Includes are found from the including file, then from the folder itself.  What stands under
    #ifdef CUFLASH_EMULATED is there only when `emulated`, and its #else only when not: a change to the
    emulator changes no cubin.
    """
    directory = directory or kernels_directory()
    path = directory / f"{file}.cu"
    if not path.is_file():
        raise CuflashError(
            f"no kernel file {path.name} in {directory}; there are {', '.join(kernel_files(directory))}"
        )
    return "\n".join(_paste(path, directory, emulated, set())) + "\n"


def kernel_files(directory: Path | None = None) -> list[str]:
    """Names of all kernel files, without .cu."""
    return sorted(path.stem for path in (directory or kernels_directory()).glob("*.cu"))


def _home(name: str) -> str:
    """What compilers call a file of kernels/."""
    home = f"kernels/{name}"
    return _names.get(home, home)


def _paste(path: Path, directory: Path, emulated: bool, seen: set[Path]) -> list[str]:
    seen.add(path)
    home = _home(path.relative_to(directory).as_posix())
    lines = [f'#line 1 "{home}"']
    branches: list[bool | None] = []  # per open #if: is this branch compiled?  None: not known here
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip() == "#pragma once":
            lines.append("")
            continue
        _follow(branches, line, emulated)
        if False in branches and not CONDITIONAL.match(line):
            lines.append("")
            continue
        match = INCLUDE.match(line)
        if not match:
            lines.append(line)
            continue
        target = _find_include(path, match[1], directory, number, home)
        if target not in seen:
            lines += _paste(target, directory, emulated, seen)
            lines.append(f'#line {number + 1} "{home}"')
        else:
            lines.append("")
    return lines


def _follow(branches: list[bool | None], line: str, emulated: bool) -> None:
    match = CONDITIONAL.match(line)
    if not match:
        return
    word, rest = match[1], match[2].split()[:1]
    if word in ("ifdef", "ifndef"):
        branches.append((word == "ifdef") == emulated if rest == ["CUFLASH_EMULATED"] else None)
    elif word == "if":
        branches.append(None)
    elif word == "else" and branches:
        branches[-1] = None if branches[-1] is None else not branches[-1]
    elif word == "elif" and branches:
        branches[-1] = None
    elif word == "endif" and branches:
        branches.pop()


def _find_include(path: Path, name: str, directory: Path, number: int, home: str) -> Path:
    for folder in (path.parent, directory):
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise CuflashError(f'{home}({number}): #include "{name}" is neither beside this file nor in {directory}')


def strip_comments(text: str) -> str:
    """The text without comments, blank lines, #line markers and trailing blanks."""
    text = re.sub(
        r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/',
        lambda m: " " if m[0].startswith("/") else m[0],
        text,
        flags=re.S,
    )
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#line"))


def source_hash(row_name: str) -> str:
    """sha256 of a row's expanded text without comments and blank lines: tells stale records from fresh."""
    return hashlib.sha256(strip_comments(expand(row_name)).encode()).hexdigest()


# ---- options


def nvrtc() -> Any:
    """cupy.cuda.nvrtc, which needs no GPU."""
    try:
        from cupy.cuda import nvrtc as module

        module.getVersion()
    except ImportError as error:
        raise CuflashError(
            f"CUDA kernels need CuPy; import says: {error}\n"
            "  Install it with pip install 'cuflash[cuda12]' (or [cuda13]), or pass NumPy arrays."
        ) from error
    except Exception as error:  # a missing library: RuntimeError, OSError or a class of CuPy
        raise CuflashError(
            f"CuPy is there, but its compiler NVRTC is not: {error}\n"
            "  Install it with pip install 'cuflash[cuda12]' (or [cuda13])."
        ) from error
    return module


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    return tuple(nvrtc().getVersion())


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Architectures this NVRTC can compile for, ascending: 75, 80, ..."""
    return tuple(sorted(nvrtc().getSupportedArchs()))


def target_of(arch: int, exact: bool = False) -> str:
    """What to compile for: a cubin for this GPU, or PTX of the newest known one for a GPU newer than NVRTC.

    arch: 10 x major + minor.  exact: the kernel needs the features that only this architecture has (sm_90a).

    >>> target_of(90, exact=True)
    'sm_90a'
    """
    known = supported_archs()
    if exact:
        return f"sm_{arch}a"
    if arch in known:
        return f"sm_{arch}"
    older = [a for a in known if a < arch]
    if not older:
        version = ".".join(map(str, nvrtc_version()))
        raise CuflashError(f"NVRTC {version} compiles for sm_{known[0]} and later, this is sm_{arch}")
    same_major = [a for a in older if a // 10 == arch // 10]  # cubins run on later minors of their major
    return f"sm_{same_major[-1]}" if same_major else f"compute_{older[-1]}"


def options_of(job: Job) -> list[str]:
    """The whole option line, in a fixed order."""
    defines = [f"-DCUFLASH_{name}={value}" for name, value in sorted(job.params)]
    ptxas = [] if job.target.startswith("compute") else ["--ptxas-options=-v"]
    return [f"-arch={job.target}", "--std=c++17", *ptxas, "-DCUFLASH_JIT", *defines]


def stem_of(job: Job, key: str) -> str:
    """fwd_02_tiled-hd128-bf16-causal-sm90a-1f2e3d4c: readable first, then enough of the key."""
    params = dict(job.params)
    words = [job.file]
    dims = [params[name] for name in ("HEAD_DIM", "HEAD_DIM_V") if params.get(name)]
    if dims:
        words.append("hd" + "x".join(str(d) for d in dict.fromkeys(dims)))
    if "DTYPE" in params:
        words.append(DTYPE_NAMES.get(params["DTYPE"], "none"))
    words += [flag.lower() for flag in STEM_FLAGS if params.get(flag)]
    if params.get("BIAS_DTYPE", -1) >= 0:
        words.append("bias")
    return "-".join([*words, job.target.replace("_", ""), key[:8]])


# ---- compiling


def compile(job: Job, directory: Path | None = None) -> Build:
    """The build of `job`, from disk when it is there.  Any number of threads and processes may ask at once.

    Raises CuflashError with the file, the option line and NVRTC's log when the source does not compile.
    """
    text = expand(job.file, directory=directory)
    options = options_of(job)
    version = nvrtc_version()
    content = hashlib.sha256("\0".join([text, *options]).encode()).hexdigest()
    key = hashlib.sha256(f"{content}\0{version}".encode()).hexdigest()
    stem = stem_of(job, key)
    with _locks_guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        entry = cache.brought(content) or cache.find(stem, key)
        if entry is None:
            start = time.perf_counter()
            image, compiler_log = _run_nvrtc(job, text, options)
            report = {
                "kernel": job.file,
                "target": job.target,
                "params": dict(job.params),
                "options": options,
                "nvrtc": list(version),
                "content": content,
                "source": hashlib.sha256(strip_comments(text).encode()).hexdigest(),
                "seconds": round(time.perf_counter() - start, 3),
                "log": compiler_log,
                **parse_log(compiler_log),
            }
            suffix = ".ptx" if job.target.startswith("compute") else ".cubin"
            entry = cache.store(stem, key, suffix, image, report)
            log.debug("build: %s in %.2f s", entry.path.name, report["seconds"])
            for warning in report["warnings"]:
                log.warning("build: %s: %s", entry.path.name, warning)
    _compilers.add(tuple(entry.report["nvrtc"]))
    entries = {name: Resources(**numbers) for name, numbers in entry.report["entries"].items()}
    return Build(entry.path, entries, tuple(entry.report["warnings"]), entry.report)


def compilers() -> list[str]:
    """Versions of NVRTC that made the builds this process has asked for."""
    return [".".join(map(str, version)) for version in sorted(_compilers)]


def compile_all(
    jobs: Iterable[Job], threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Build]:
    """Compile many at once (NVRTC releases the GIL); progress(done, total) after each."""
    jobs = list(jobs)
    done = 0
    guard = threading.Lock()

    def one(job: Job) -> Build:
        nonlocal done
        built = compile(job)
        with guard:
            done += 1
            if progress is not None:
                progress(done, len(jobs))
        return built

    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        return list(pool.map(one, jobs))


def _run_nvrtc(job: Job, text: str, options: list[str]) -> tuple[bytes, str]:
    compiler = nvrtc()
    program = compiler.createProgram(text, _home(f"{job.file}.cu"), (), ())
    try:
        try:
            compiler.compileProgram(program, options)
        except compiler.NVRTCError as error:
            line = " ".join(options)
            version = ".".join(map(str, nvrtc_version()))
            raise CuflashError(
                f"{job.file} does not compile for {job.target} (NVRTC {version}: {error})\n"
                f"  options: {line}\n{compiler.getProgramLog(program)}"
            ) from None
        compiler_log = compiler.getProgramLog(program)
        if job.target.startswith("compute"):
            image = compiler.getPTX(program)
            image = image.encode() if isinstance(image, str) else image
        else:
            image = compiler.getCUBIN(program)
        # CuPy cuts the last byte of both, taking it for a terminator: disassemblers refuse such a cubin.
        return image + b"\0", compiler_log
    finally:
        compiler.destroyProgram(program)


def parse_log(text: str) -> dict[str, Any]:
    """From ptxas' log: registers, spills and stack per entry point, and C75xx warnings (wgmma serialised).

    Functions that were not inlined are counted with the entry point they are listed under.
    """
    entries: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    warnings = []
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            current = entries.setdefault(match[1], dict.fromkeys(Resources.__annotations__, 0))
        elif match := FRAME.search(line):
            for name, n_bytes in zip(("stack", "spill_stores", "spill_loads"), match.groups(), strict=True):
                current[name] = current.get(name, 0) + int(n_bytes)
        elif match := re.search(r"Used (\d+) registers", line):
            current["registers"] = int(match[1])
        elif "(C75" in line:
            warnings.append(line.strip())
    return {"entries": entries, "warnings": warnings}
