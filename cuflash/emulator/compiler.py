"""C++ compiler, flags and cache of the emulator."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cuflash import build, cache
from cuflash.emulator.module import Module
from cuflash.errors import CuflashError

# -O1 compiles in 0.7 of -O2's time and runs 1.3 to 1.8 times as long: tests build more than they run.  The
# arithmetic is fixed: no contraction into fma, no reassociation, so that every compiler gives the same bits.
KERNEL_FLAGS = ("-O1", "-g0", "-w")
RUNTIME_FLAGS = ("-O2", "-g0")
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-fstack-clash-protection",  # a stack overflow meets the guard page, however large the array
    "-U_FORTIFY_SOURCE",  # its longjmp refuses to leave a fiber
    "-fno-sanitize=all",  # zig's default traps on what CUDA defines
    "-DCUFLASH_EMULATED",
)
ENTRY = re.compile(r"^\s*(?:CLUSTER_)?KERNEL\s*\((?P<words>[^;{]*?)\)\s*(?P<name>\w*)\s*\(", re.M)
ASYNC_SOURCES = ("lib/tma.cuh", "lib/wgmma.cuh")


@functools.cache
def find_compiler() -> tuple[str, ...]:
    """The command of a C++17 compiler: $CXX, c++, g++, clang++, or the one in the ziglang wheel."""
    if os.environ.get("CXX"):
        return tuple(os.environ["CXX"].split())
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return (name,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise CuflashError(
        "the emulator needs a C++17 compiler; found none of $CXX, c++, g++, clang++, ziglang\n"
        "  Install one, or pip install 'cuflash[emulator]'."
    )


@functools.cache
def compiler_version() -> str:
    command = [*find_compiler(), "--version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CuflashError(f"the C++ compiler does not run: {' '.join(command)}: {error}") from error
    return f"{' '.join(find_compiler())}\n{answer.stdout}\n{platform.machine()}"


def entry_points(text: str) -> dict[str, str]:
    """The kernels defined in a source text: name -> its blocks per SM, an expression of the text."""
    found = {}
    for match in ENTRY.finditer(build.strip_comments(text)):
        words = [word.strip() for word in match["words"].split(",")]
        name = match["name"] or words[-1]
        if name.isidentifier() and len(words) > 1:
            found[name] = words[1]
    return found


def compile(text: str, params: dict[str, int] | tuple, entry: str) -> Module:
    """The module of an expanded kernel text (build.expand(file, emulated=True)), cached on disk.

    params: name -> int without CUFLASH_, as build.Job has them.  Any entry point of the text can be had from
    the module.  Raises CuflashError with the compiler's words.
    """
    names = entry_points(text)
    if entry not in names:
        raise CuflashError(f"{entry} is no KERNEL of this source; it has {', '.join(names) or 'none'}")
    defines = [f"-DCUFLASH_{name}={value}" for name, value in sorted(dict(params).items())]
    uses_proxy = any(f'#line 1 "kernels/{name}"' in text for name in ASYNC_SOURCES)
    if uses_proxy:
        defines.append("-DCUFLASH_ASYNC_PROXY")
    callers = "".join(
        f'extern "C" void cuflash_call_{name}(void* const* p) {{ emulated::call({name}, p); }}\n'
        f'extern "C" int cuflash_sizes_{name}(u64* s) {{ return emulated::parameter_sizes({name}, s); }}\n'
        f'extern "C" const int cuflash_blocks_{name} = {blocks};\n'
        for name, blocks in names.items()
    )
    callers += f'extern "C" const int cuflash_async_proxy = {int(uses_proxy)};\n'
    source = f'{text}\n#line 1 "callers"\n{callers}'
    first = next(iter(names))
    jit = ["-DCUFLASH_JIT"] if params else []  # without parameters: the default set of lib/params.cuh
    path = _object(source, [*KERNEL_FLAGS, *jit, *defines], f"emulated-{first}", first)
    return _load(path)


@functools.cache
def _load(path: Path) -> Module:
    return Module(path, runtime())


@functools.cache
def runtime() -> Path:
    """The shared library of scheduler, barriers and copies that every kernel is linked to on loading."""
    here = Path(__file__).parent
    library = build.kernels_directory() / "lib"
    seen: dict[str, str] = {}

    def paste(name: str) -> str:
        """One text, so that the key of the cache is all of it."""
        if name in seen:
            return ""
        path = here / name if (here / name).is_file() else library / name
        seen[name] = ""
        lines = [f'#line 1 "{path.name}"']
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = build.INCLUDE.match(line)
            lines.append(f'{paste(match[1])}\n#line {number + 1} "{path.name}"' if match else line)
        return "\n".join(lines).replace("#pragma once", "")

    return _object(paste("runtime.cpp"), list(RUNTIME_FLAGS), "emulator-runtime", "the emulator's runtime")


def _object(source: str, flags: list[str], stem: str, what: str) -> Path:
    options = [*FLAGS, *flags]
    key = hashlib.sha256("\0".join([source, *options, compiler_version()]).encode()).hexdigest()
    stem = f"{stem}-{key[:8]}"
    found = cache.find(stem, key)
    if found is None:
        blob = _run_compiler(source, options, what)
        found = cache.store(stem, key, ".so", blob, {"kernel": what, "options": options, "entries": {}})
    return found.path


def _run_compiler(source: str, options: list[str], what: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="cuflash-emulator-") as folder:
        path = Path(folder) / "kernel.cpp"
        path.write_text(source)
        target = Path(folder) / "kernel.so"
        command = [*find_compiler(), *options, "-o", str(target), str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise CuflashError(
                f"{what} does not compile for the emulator\n  {' '.join(command)}\n{done.stderr[:20000]}"
            )
        return target.read_bytes()
