"""build.py and cache.py: source text, the cache on disk, and the message when something does not compile.

Needs NVRTC (through CuPy), no GPU.
"""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cuflash import build, cache
from cuflash.errors import CuflashError

TOY = """// toy.cu - one store
#include "lib/params.cuh"
#include "lib/memory.cuh"
/* a comment
   of two lines */
KERNEL(32, 1) toy(float* out) { Global<float> to(out); to.store(threadIdx.x, tile_q); }
"""
PARAMS = "#pragma once\n#ifdef CUFLASH_JIT\nconstexpr int tile_q = CUFLASH_TILE_Q;\n#endif\n"
JOB = build.Job("toy", (("TILE_Q", 64), ("DTYPE", 1), ("HEAD_DIM", 128), ("CAUSAL", 1)), "sm_90a")


@pytest.fixture
def kernels(tmp_path):
    """A kernels/ folder with one toy kernel and the real lib/, apart from params.cuh."""
    folder = tmp_path / "kernels"
    (folder / "lib").mkdir(parents=True)
    for name in ("memory.cuh", "platform.cuh", "args.cuh"):
        (folder / "lib" / name).write_text((build.kernels_directory() / "lib" / name).read_text())
    (folder / "lib" / "params.cuh").write_text(PARAMS)
    (folder / "toy.cu").write_text(TOY)
    return folder


@pytest.fixture(autouse=True)
def cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    cache.temporary_directory.cache_clear()  # what other tests built there is not this test's
    return tmp_path / "cache"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# ---- source


def test_expand_pastes_each_include_once_and_keeps_home_lines(kernels):
    text = build.expand("toy", directory=kernels)
    assert "#include" not in text and "#pragma once" not in text
    assert text.count("constexpr int tile_q") == 1
    assert text.count('#line 1 "kernels/lib/platform.cuh"') == 1, (
        "platform.cuh is included by params and memory"
    )
    lines = text.splitlines()
    home, number = None, 0
    for line in lines:  # follow the markers as a compiler does
        marker = re.match(r'#line (\d+) "(.*)"', line)
        if marker:
            number, home = int(marker[1]), marker[2]
            continue
        if "KERNEL(32, 1) toy" in line:
            assert (home, number) == ("kernels/toy.cu", 6)
        number += 1


def test_expand_leaves_the_emulator_out_unless_asked():
    row = build.kernel_files()[0]
    assert 'kernels/lib/emulated.cuh"' not in build.expand(row)
    assert 'kernels/lib/emulated.cuh"' in build.expand(row, emulated=True)


def test_what_the_other_side_compiles_is_blank(tmp_path):
    text = "#ifdef CUFLASH_EMULATED\nhost\n#if A\nnested\n#endif\n#else\ndevice\n#endif\nboth"
    lines = text.splitlines()
    (tmp_path / "toy.cu").write_text(text)
    for emulated, gone in ((False, {"host", "nested"}), (True, {"device"})):
        found = build.expand("toy", emulated, tmp_path).splitlines()[1:]
        assert found == ["" if line in gone else line for line in lines]


def test_expand_names_what_is_missing(kernels):
    with pytest.raises(CuflashError, match=r"no kernel file tot\.cu in .*; there are toy"):
        build.expand("tot", directory=kernels)
    (kernels / "toy.cu").write_text('\n#include "lib/absent.cuh"\n')
    with pytest.raises(CuflashError, match=r'kernels/toy\.cu\(2\): #include "lib/absent\.cuh" is neither'):
        build.expand("toy", directory=kernels)


def test_source_hash_ignores_comments_and_blank_lines(kernels):
    text = build.expand("toy", directory=kernels)
    bare = build.strip_comments(text)
    (kernels / "toy.cu").write_text(
        TOY.replace("a comment", "another\n\n").replace("// toy.cu", "\n\n// other")
    )
    assert build.strip_comments(build.expand("toy", directory=kernels)) == bare
    (kernels / "toy.cu").write_text(TOY.replace("threadIdx.x", "threadIdx.x + 1"))
    assert build.strip_comments(build.expand("toy", directory=kernels)) != bare
    assert "//" not in bare and "\n\n" not in bare and "#line" not in bare


def test_strip_comments_keeps_strings():
    assert (
        build.strip_comments('f("// no comment"); /* gone */ g(\'"\'); // gone\n\n')
        == 'f("// no comment");   g(\'"\');'
    )


# ---- compiling


def test_compile_reports_and_caches(kernels, cache_directory):
    built = build.compile(JOB, kernels)
    assert re.fullmatch(r"toy-hd128-bf16-causal-sm90a-[0-9a-f]{8}\.cubin", built.path.name)
    assert built.path.read_bytes().startswith(b"\x7fELF") and built.path.read_bytes().endswith(b"\0")
    assert built.entries["toy"].registers > 0 and built.entries["toy"].spill_stores == 0
    assert built.warnings == ()
    report = json.loads(built.path.with_suffix(".json").read_text())
    assert report["options"][0] == "-arch=sm_90a" and "-DCUFLASH_TILE_Q=64" in report["options"]
    assert report["nvrtc"] == list(build.nvrtc_version())
    before = built.path.stat().st_mtime_ns
    assert build.compile(JOB, kernels).path.stat().st_mtime_ns == before, "the second call reads the file"


@pytest.mark.parametrize("change", ["source", "header", "parameter", "target"])
def test_every_change_is_a_new_build(kernels, change):
    first = build.compile(JOB, kernels).path
    job = JOB
    if change == "source":
        (kernels / "toy.cu").write_text(TOY + "// a comment counts: the key is the whole text\n")
    elif change == "header":
        (kernels / "lib" / "params.cuh").write_text(PARAMS + "constexpr int more = 1;\n")
    elif change == "parameter":
        job = build.Job("toy", (("TILE_Q", 32), *JOB.params[1:]), JOB.target)
    else:
        job = build.Job("toy", JOB.params, "sm_80")
    assert build.compile(job, kernels).path.name != first.name
    assert first.is_file()


def test_a_forgotten_parameter_is_an_error(kernels):
    with pytest.raises(CuflashError) as caught:
        build.compile(build.Job("toy", (), "sm_80"), kernels)
    message = str(caught.value)
    assert message.startswith("toy does not compile for sm_80 (NVRTC ")
    assert "\n  options: -arch=sm_80 --std=c++17 --ptxas-options=-v -DCUFLASH_JIT\n" in message
    assert "kernels/lib/params.cuh(3): error" in message, "NVRTC's log names the home line"


def test_ptx_for_a_gpu_newer_than_nvrtc(kernels):
    newest = build.supported_archs()[-1]
    target = build.target_of(newest // 10 * 10 + 30)
    assert target == f"compute_{newest}"
    built = build.compile(build.Job("toy", JOB.params, target), kernels)
    assert built.path.suffix == ".ptx" and b".entry toy" in built.path.read_bytes()
    assert built.entries == {}, "ptxas has not run"


def test_targets():
    assert build.target_of(90) == "sm_90" and build.target_of(90, exact=True) == "sm_90a"
    assert build.target_of(75) == "sm_75"
    with pytest.raises(CuflashError, match=r"compiles for sm_\d+ and later, this is sm_3"):
        build.target_of(3)


def test_log_is_parsed():
    log = """ptxas info    : Compiling entry function 'bwd_01_naive__dq' for 'sm_90a'
ptxas info    : Function properties for bwd_01_naive__dq
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""
    found = build.parse_log(log)
    assert found["entries"] == {
        "bwd_01_naive__dq": {"registers": 168, "spill_stores": 12, "spill_loads": 8, "stack": 16},
        "other": {"registers": 32, "spill_stores": 0, "spill_loads": 0, "stack": 0},
    }
    assert len(found["warnings"]) == 1 and "(C7510)" in found["warnings"][0]


# ---- the cache


def test_a_damaged_build_is_made_again(kernels):
    path = build.compile(JOB, kernels).path
    whole = path.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole[:-1] + b"x"):
        path.write_bytes(damage)
        assert build.compile(JOB, kernels).path.read_bytes() == whole
    path.with_suffix(".json").write_text("{")
    assert build.compile(JOB, kernels).path.read_bytes() == whole


def test_a_build_of_another_key_under_the_same_name_does_not_count(kernels):
    path = build.compile(JOB, kernels).path
    report = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**report, "key": "0" * 64}))
    assert cache.find(path.stem, report["key"]) is None


@pytest.mark.parametrize("why", ["a file is in the way", "no such place", "read-only"])
def test_a_folder_that_cannot_be_written(kernels, tmp_path, monkeypatch, why):
    if why == "a file is in the way":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "cache"
    elif why == "no such place":
        folder = Path("/proc/cuflash-cannot-be-here")
    else:
        folder = tmp_path / "closed"
        folder.mkdir()

        def refuse(*_args, **_kwargs):  # as for an ordinary user: root may write anywhere
            if Path(_kwargs["dir"]) == folder:
                raise PermissionError(13, "Permission denied")
            return real(*_args, **_kwargs)

        real = cache.tempfile.mkstemp
        monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(folder))
    built = build.compile(JOB, kernels)
    assert built.path.is_file() and built.path.parent == cache.temporary_directory()
    again = build.compile(JOB, kernels)
    assert again.path == built.path


def test_a_read_only_folder_is_still_read(kernels, cache_directory, monkeypatch):
    path = build.compile(JOB, kernels).path
    monkeypatch.setattr(cache, "_write", lambda *_: pytest.fail("nothing needs to be written"))
    assert build.compile(JOB, kernels).path == path


def test_no_home(kernels, monkeypatch):
    monkeypatch.delenv("CUFLASH_CACHE_DIR")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache.wanted_directory() is None
    assert build.compile(JOB, kernels).path.parent == cache.temporary_directory()
    assert cache.entries() == []


def test_entries_and_clear(kernels, cache_directory):
    build.compile(JOB, kernels)
    (cache_directory / "of-somebody-else.txt").write_text("stays")
    (entry,) = cache.entries()
    assert entry.n_bytes > 100 and entry.report["kernel"] == "toy"
    assert cache.clear() == 1 and cache.entries() == []
    assert names_in(cache_directory) == ["of-somebody-else.txt"]


def test_two_processes_at_once(kernels, cache_directory):
    program = (
        "import sys; from pathlib import Path; from cuflash import build\n"
        f"job = build.Job('toy', {JOB.params!r}, 'sm_90a')\n"
        "print(build.compile(job, Path(sys.argv[1])).path.name)"
    )
    environment = {**os.environ, "CUFLASH_CACHE_DIR": str(cache_directory)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(kernels)], stdout=subprocess.PIPE, env=environment
        )
        for _ in range(2)
    ]
    names = {process.communicate(timeout=120)[0].decode().strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(names) == 1
    assert names_in(cache_directory) == sorted([*names, names.copy().pop().replace(".cubin", ".json")])


def test_threads_build_once(kernels, monkeypatch):
    runs, real = [], build._run_nvrtc
    monkeypatch.setattr(build, "_run_nvrtc", lambda *a: (runs.append(1), real(*a))[1])
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(build.compile(JOB, kernels).path)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1 and len(paths) == 8 and len(set(paths)) == 1


def test_compile_all_reports_progress_and_raises(kernels, monkeypatch):
    monkeypatch.setattr(build, "kernels_directory", lambda: kernels)
    jobs = [build.Job("toy", (("TILE_Q", n),), "sm_80") for n in (1, 2, 3)]
    said = []
    assert len(build.compile_all(jobs, progress=lambda done, total: said.append((done, total)))) == 3
    assert sorted(said) == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(CuflashError, match="toy does not compile for sm_80"):
        build.compile_all([*jobs, build.Job("toy", (), "sm_80")])


def test_without_cupy():
    program = (
        "import sys; sys.modules['cupy'] = None; sys.modules['cupy.cuda'] = None\n"
        "from cuflash import build\n"
        "try: build.supported_archs()\n"
        "except build.CuflashError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("CUDA kernels need CuPy; import says:") and "pip install 'cuflash[cuda12]'" in said
