"""`cuflash bench`: the command, its records, and regressions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from bench_help import bench, fake_record

from cuflash import devices, records
from cuflash.bench import (
    against,
    command,
    report,
    suites,
)
from cuflash.errors import CuflashError

# ---- the command


def test_bench_cpu_is_right_and_recorded(capsys, tmp_path):
    path, plot = tmp_path / "cpu.json", tmp_path / "cpu.svg"
    code, out, _ = bench(
        capsys, "cpu", "--tiny", "--peers", "--rounds", "1", "--record", str(path), "--plot", str(plot)
    )  # fmt: skip
    assert code == 0 and f"record: {path}" in out.replace("\n", "") and "results checked" in out
    record = records.read(path)
    assert (record["kind"], record["suite"], record["own"], record["stopped"]) == (
        "bench-cpu",
        "cpu",
        True,
        False,
    )
    assert record["environment"]["cpu"] and "N(0,1)" in record["distribution"]
    names = {"numpy", "numpy_unfused", "matmul numpy"}
    directions = set()
    for one in record["results"]:
        directions.add(one["shape"]["direction"])
        lines = {line["name"]: line for line in one["lines"]}
        assert names <= set(lines) and "torch_cpu" in lines
        for line in lines.values():
            assert line["status"] in ("measured", "missing")
            if line["status"] == "measured":
                assert line["seconds"] > 0 and 1 <= line["n"] <= 4  # fewer where it is slow
            if line["kind"] != "roof" and line["status"] == "measured":
                assert 0 < line["error_over_limit"] <= 1
    assert directions == {"forward", "backward"}
    assert plot.read_text().startswith("<?xml")
    code, out, _ = bench(capsys, "--show", str(path), "--plot", str(tmp_path / "again.png"))
    assert code == 0 and "numpy_unfused" in out
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suite", ["forward", "backward", "short", "decode", "float32", "memory", "host"])
def test_every_suite_runs_without_a_gpu(capsys, suite):
    if devices.gpu_count():
        pytest.skip("says what it says without a GPU")
    code, out, _ = bench(capsys, suite, "--tiny", "--rounds", "1", "--no-record", "--launches", "1")
    assert code == 0
    assert "no CUDA GPU here: kernels are not measured, this is the NumPy path" in out
    assert "numpy" in out and "record:" not in out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("nonsense",), "unknown suite 'nonsense'"),
        (("ladder", "--device", "cpu"), "there is no CUDA GPU here"),
        (("--device", "gpu"), "CuPy sees no CUDA device"),
        (("cpu", "--dtype", "int8"), "unknown dtype int8"),
        (("cpu", "--with", "rope"), "known are alibi_slopes"),
        (("cpu", "--kernels", "fwd_99"), "unknown kernel fwd_99"),
        (("cpu", "--plot", "x.pdf"), "neither .svg nor .png"),
        (("--profile", "fwd_99"), "unknown kernel 'fwd_99'"),
        (("--profile", "fwd_02_tiled"), "there is none here"),
        (("cpu", "--peers", "xformers"), "unknown peer xformers"),
        (("--peers", "cpu"), "unknown peer cpu (a suite: it comes before --peers)"),
        (("cpu", "--window", "1", "all"), "'all' is neither a whole number from 0 nor none"),
        (("cpu", "--tiny", "--record", "/dev/null/x.json"), "x.json cannot be written"),
        (("cpu", "--tiny", "--plot", "/dev/null/x.svg"), "x.svg cannot be written"),
        (("--show", "nowhere.json"), "nowhere.json cannot be read: No such file"),
    ],
)
def test_bad_input_is_refused_in_words(capsys, arguments, says):
    if devices.gpu_count() and says.endswith(("here", "device")):
        pytest.skip("there is a GPU")
    code, _, err = bench(capsys, *arguments)
    assert code == 2 and says in err


def test_help_names_every_suite(capsys):
    code, out, _ = bench(capsys, "--help")
    assert code == 0
    for name in suites.SUITES:
        assert f"\n  {name} " in out


def test_options_reach_the_call(capsys, tmp_path):
    path = tmp_path / "own.json"
    sizes = "--len 40 --batch 2 --heads 4 --heads-k 2 --head-dim 16 --causal yes --window 9 none --softcap 5"
    rest = f"--device cpu --with sink,bias --rounds 1 --pause 0 --record {path}"
    arguments = ("forward", *sizes.split(), *rest.split())
    code, out, _ = bench(capsys, *arguments)
    assert code == 0, out
    record = records.read(path)
    (one,) = record["results"]
    assert dict(map(tuple, one["shape"]["settings"])) == {"causal": True, "window": [9, None], "softcap": 5.0}
    assert one["shape"]["drawn"] == ["sink", "bias"] and one["shape"]["heads_k"] == 2
    assert one["lines"][0]["status"] == "measured" and 0 < one["lines"][0]["error_over_limit"] <= 1


def test_repeatable_gradients_are_asked_of_the_backward_alone(capsys, tmp_path):
    path = tmp_path / "repeatable.json"
    arguments = (
        "backward",
        "--device",
        "cpu",
        "--tiny",
        "--deterministic",
        "--rounds",
        "1",
        "--causal",
        "no",
    )
    code, out, _ = bench(capsys, *arguments, "--record", str(path))
    assert code == 0, out
    (one,) = records.read(path)["results"]
    assert one["shape"]["settings"] == [["deterministic", True]] and one["lines"][0]["status"] == "measured"


def test_ctrl_c_leaves_a_record(tmp_path):
    path = tmp_path / "stopped.json"
    command = [sys.executable, "-m", "cuflash", "bench", "cpu", "--len", "256", "--rounds", "200",
               "--record", str(path)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(6)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    record = records.read(path)
    assert record["stopped"] and record["results"][0]["lines"][0]["n"] > 1
    assert record["results"][0]["lines"][0]["error_over_limit"] <= 1
    assert "stopped by Ctrl-C" in out


# ---- records against records


def test_what_became_slower():
    before = fake_record(1.0e-3)
    assert not [x for x in against.compare(fake_record(1.02e-3), before) if x.slower]  # within 3 %
    changes = against.compare(fake_record(1.10e-3), before)
    assert [x.name for x in changes if x.slower] == ["fwd_02_tiled"]
    assert [x.name for x in against.kernels_slower(changes, fake_record())] == ["fwd_02_tiled"]
    assert "1.00 ms -> 1.10 ms (+10.0 %, spread explains 3.0 %)" in str(changes[0])
    assert [x.name for x in against.compare(fake_record(0.9e-3), before) if x.faster] == ["fwd_02_tiled"]


def test_a_wide_spread_explains_more():
    noisy = fake_record(1.10e-3)
    noisy["results"][0]["lines"][0]["spread"] = 0.12
    assert not [x for x in against.compare(noisy, fake_record()) if x.slower]


def test_one_measurement_says_nothing_about_its_spread():
    once = fake_record(1.15e-3)
    once["results"][0]["lines"][0] |= {"n": 1, "spread": 0.0}
    (change, *_) = against.compare(once, fake_record())
    assert not change.slower and "spread explains 20.0 %" in str(change)
    (_, table), *_ = report.tables(once)
    spreads = list(table.columns[[column.header for column in table.columns].index("spread")].cells)
    assert spreads == ["", "1.0 %", "1.0 %"]


def test_records_that_do_not_compare():
    with pytest.raises(CuflashError, match="made on NVIDIA A100, this is NVIDIA H200"):
        against.compare(fake_record(), fake_record(card="NVIDIA A100"))
    with pytest.raises(CuflashError, match="nothing in common"):
        against.compare(fake_record(), fake_record(results=[]))


def test_against_a_record_from_the_command_line(capsys, tmp_path):
    path = tmp_path / "now.json"
    common = ("cpu", "--tiny", "--causal", "no", "--rounds", "1")
    assert bench(capsys, *common, "--record", str(path))[0] == 0
    record = records.read(path)
    for one in record["results"]:
        for line in one["lines"]:
            line["seconds"], line["spread"] = line["seconds"] / 1e6, 0.0
    path.write_text(json.dumps(record))
    code, out, _ = bench(capsys, *common, "--no-record", "--against", str(path))
    assert code == 1 and "slower: numpy, " in out.replace("\n", " ")
    for one in record["results"]:
        for line in one["lines"]:
            line["seconds"] *= 1e12
    path.write_text(json.dumps(record))
    code, out, _ = bench(capsys, *common, "--no-record", "--against", str(path))
    assert code == 0 and ", 0 slower, " in out
    code, _, err = bench(capsys, "forward", "--tiny", "--against", str(path))
    assert code == 2 and "the record is of suite cpu, this run of forward." in err


def test_another_card_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    path = tmp_path / "other.json"
    record = fake_record(card="NVIDIA A100") | {"suite": "cpu", "place": "gpu"}
    path.write_text(json.dumps(record))
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("measured"))
    code, _, err = bench(capsys, "cpu", "--tiny", "--no-record", "--against", str(path))
    assert code == 2 and "made on NVIDIA A100" in err


def test_a_record_of_other_shapes_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    path = tmp_path / "other.json"
    record = fake_record(suite="cpu", place="cpu")
    record["environment"]["cpu"] = records.cpu_name()
    path.write_text(json.dumps(record))
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("measured"))
    code, _, err = bench(capsys, "cpu", "--tiny", "--no-record", "--against", str(path))
    assert code == 2 and "no shape in common; the first of the record is d 16, length 40" in err


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"suite": "cpu"}', '{"results": 5}', "\xff"])
@pytest.mark.parametrize("flag", ["--show", "--against"])
def test_a_file_that_is_no_record(flag, content, capsys, tmp_path):
    path = tmp_path / "some.json"
    path.write_text(content, encoding="latin-1")
    code, out, err = bench(capsys, "cpu", "--tiny", "--no-record", flag, str(path))
    assert code == 2 and f"{path} is no record" in err and not out


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--rounds", "0", "'0' is no whole number from 1"),
        ("--launches", "-1", "'-1' is no whole number from 1"),
        ("--samples", "2.5", "'2.5' is no whole number from 1"),
        ("--pause", "-1", "'-1' is no length of time: give a number from 0"),
        ("--sustained", "nan", "'nan' is no length of time"),
        ("--len", "512,x", "'512,x' are no whole numbers with commas between them"),
        ("--len", ",", "',' names nothing"),
        ("--kernels", "", "'' names nothing; give names with commas between them"),
    ],
)
def test_numbers_and_names_that_are_none(flag, value, says, capsys):
    code, _, err = bench(capsys, "cpu", "--tiny", "--no-record", f"{flag}={value}")
    assert code == 2 and says in err
