"""`cuflash bench`: the command, its records, regressions, plots and profiles."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time

import pytest
from bench_help import SMALL, bench, fake_record

from cuflash import devices, nvml, records
from cuflash.bench import (
    against,
    command,
    plots,
    profile,
    report,
    roofs,
    suites,
)
from cuflash.bench.shapes import Shape
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


# ---- plots, profiles, roofs


@pytest.mark.parametrize("suite", ["forward", "ladder", "memory"])
def test_plots_of_records(suite, tmp_path):
    record = fake_record(suite=suite, metric="bytes" if suite == "memory" else "tflops")
    for line in record["results"][0]["lines"]:
        line["extra_bytes"] = 10**6
    path = plots.save(record, tmp_path / f"{suite}.svg")
    text = path.read_text()
    assert text.startswith("<?xml") and len(text) > 5000
    assert plots.save(record, tmp_path / "again.svg").read_text() == text  # the same bytes every time


def test_a_library_has_one_color_in_all_panels():
    record = fake_record()
    (result,) = record["results"]
    other = {**result, "shape": {**result["shape"], "head_dim": 256}}
    peer = {**result["lines"][1], "name": "fa3", "asked": "fa3"}
    result["lines"] = [result["lines"][0], peer, *result["lines"][1:]]  # the other panel lacks it
    record["results"].append(other)
    figure = plots._lines(record)
    colors = [{line.get_label(): line.get_color() for line in axis.lines} for axis in figure.axes]
    assert len(colors) == 2 and "fa3" in colors[0] and "fa3" not in colors[1]
    assert colors[0]["sdpa_cudnn"] == colors[1]["sdpa_cudnn"] != colors[0]["fa3"]


def test_what_is_compared_is_drawn_as_bars():
    record = fake_record(suite="options", metric="ms")
    (axis,) = plots._drawn(record).axes
    assert [text.get_text() for text in axis.get_yticklabels()] == [
        f"{record['results'][0]['label']}, bfloat16"
    ]
    assert [bar.get_width() for bar in axis.patches] == [1.0]


def test_nothing_to_plot(tmp_path):
    with pytest.raises(CuflashError, match="nothing was measured"):
        plots.save(fake_record(results=[]), tmp_path / "x.svg")


NCU = """==PROF== Connected to process 1
noise
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","dram__bytes_write.sum",\
"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active","sm__inst_issued.avg.pct_of_peak_sustained_active",\
"sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",\
"l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed","launch__registers_per_thread",\
"sm__warps_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
"","","us","Mbyte","Kbyte","%","%","%","%","register/thread","%","inst","inst"
"0","fwd_02_tiled(Args)","1,234.5","2.5","500","41.0","33.1","{tensor}","51","168","18.5","1.0","3.0"
==PROF== Disconnected
"""


def test_ncu_is_read():
    (one,) = profile.parse(NCU.replace("{tensor}", "78.2"))
    assert one.kernel == "fwd_02_tiled" and one.milliseconds == pytest.approx(1.2345)
    assert one.utilisation == {"tensor": 78.2, "MUFU": 41.0, "issue": 33.1, "shared": 51.0}
    assert one.dram_bytes == pytest.approx(3.0e6) and one.registers == 168 and one.occupancy == 18.5
    assert one.stalls == {"long_scoreboard": 0.75, "wait": 0.25} and one.limiter == "tensor (78 %)"
    (idle,) = profile.parse(NCU.replace("{tensor}", "20"))
    assert idle.limiter == "waiting, mostly long scoreboard (busiest: shared 51 %)"
    assert profile.parse("==ERROR== no rights") == []


def fake_ncu(monkeypatch, folder, script):
    """An ncu that is a shell script; $asked is what it was called with, $last the child's folder."""
    fake, csv = folder / "ncu", folder / "csv"
    csv.write_text(NCU.replace("{tensor}", "78.2"))
    fake.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\nfor last; do :; done\ncsv={csv}\n{script}\n')
    fake.chmod(0o755)
    monkeypatch.setattr(profile, "find_ncu", lambda: str(fake))


def test_what_ncu_is_asked_for():
    """By names that ncu has on sm_90; issue slots are not the throughput of the busiest pipe."""
    *names, units, stalls = profile.metrics().split(",")
    assert "gpu__time_duration.sum" in names
    found = [re.compile(text.removeprefix("regex:")) for text in (units, stalls)]
    there = ["sm__inst_issued.avg.pct_of_peak_sustained_active",
             "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
             "sm__pipe_tensor_cycles_active_v2.avg.pct_of_peak_sustained_active",
             "lts__t_sectors.avg.pct_of_peak_sustained_elapsed"]  # fmt: skip
    assert all(found[0].search(name) for name in there)
    assert found[1].search("smsp__average_warps_issue_stalled_wait_per_issue_active.ratio")
    dear = ["sm__instruction_throughput.avg.pct_of_peak_sustained_elapsed",
            "lts__t_sectors_op_read.avg.pct_of_peak_sustained_elapsed",
            "dram__bytes.sum.pct_of_peak_sustained_elapsed"]  # fmt: skip
    assert not any(pattern.search(name) for pattern in found for name in dear)


def test_several_kernels_go_through_one_ncu(monkeypatch, tmp_path):
    fake_ncu(monkeypatch, tmp_path, "touch $last/fwd_02_tiled.done\nsleep 1\ncat $csv")
    told = []
    shapes_of = {"fwd_02_tiled": SMALL, "fwd_05_pipeline": SMALL}
    counted = profile.profile(shapes_of, progress=lambda kernel, done: told.append((kernel, done)))
    (one,) = counted.launches
    assert one.label == f"forward, {SMALL.label()}, float32" and not counted.stopped
    assert told == [("fwd_02_tiled", True)]
    asked = (tmp_path / "asked").read_text()
    assert "regex:^(fwd_02_tiled|fwd_05_pipeline)" in asked
    (given,) = [line for line in asked.splitlines() if "cuflash.bench.profile" in line]
    shapes_, _ = json.JSONDecoder().raw_decode(given, given.index("{"))
    assert {name: Shape.from_json(data) for name, data in shapes_.items()} == shapes_of
    assert "cuflash-ncu-" in given[given.index("}}") :]


WAITS = "while [ ! -f $last/stop ]; do sleep 0.05; done\ncat $csv"


def test_a_profile_that_takes_too_long_keeps_what_was_counted(monkeypatch, tmp_path):
    fake_ncu(monkeypatch, tmp_path, WAITS)
    monkeypatch.setattr(profile, "SECONDS", 0.3)
    counted = profile.profile({"fwd_02_tiled": SMALL})
    assert counted.stopped and [one.kernel for one in counted.launches] == ["fwd_02_tiled"]


def test_a_kernel_that_never_ends_is_an_error(monkeypatch, tmp_path):
    fake_ncu(monkeypatch, tmp_path, "sleep 60")
    monkeypatch.setattr(profile, "SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(CuflashError, match="one kernel did not end in"):
        profile.profile({"fwd_02_tiled": SMALL})
    assert time.monotonic() - start < 20


def test_ctrl_c_ends_a_profile_and_keeps_what_was_counted(monkeypatch, tmp_path, capsys):
    fake_ncu(monkeypatch, tmp_path, WAITS)
    real, calls = subprocess.Popen.communicate, []

    def interrupted(self, *args, **options):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    monkeypatch.setattr(command, "place_of", lambda device: "gpu")
    monkeypatch.setattr(command, "compile_pairs", lambda pairs: None)
    monkeypatch.setattr(command, "default_dtype", lambda place: "float16")
    path = tmp_path / "record.json"
    code, out, _ = bench(capsys, "--profile", "fwd_02_tiled,fwd_01_naive", "--record", str(path))
    assert code == 130 and "fwd_01_naive: not counted; stopped before it" in out
    record = records.read(path)
    assert record["stopped"] and list(record["sources"]) == ["fwd_02_tiled"]
    assert [one["kernel"] for one in record["kernels"]] == ["fwd_02_tiled"]


def test_without_ncu_it_says_so(monkeypatch):
    monkeypatch.setattr(profile, "find_ncu", lambda: None)
    with pytest.raises(CuflashError, match="needs Nsight Compute"):
        profile.profile({"fwd_02_tiled": SMALL})


def test_what_ncu_says_is_passed_on(monkeypatch, tmp_path):
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(profile, "find_ncu", lambda: str(fake))
    with pytest.raises(CuflashError, match="ERR_NVGPUCTRPERM"):
        profile.profile({"fwd_02_tiled": SMALL})


def test_roofs():
    h200 = devices.named("sm_90")
    assert roofs.peak(h200, "bfloat16", 1.755e9) == 132 * 4096 * 1.755e9
    assert roofs.peak(h200, "float32", 1e9) == 132 * 256 * 1e9
    assert roofs.peak(h200, "float32", 1e9, "tf32") == 132 * 2048 * 1e9
    assert roofs.peak(h200, "bfloat16", None) is None
    assert roofs.peak(devices.named("sm_87"), "bfloat16", 1e9) is None


def test_nvml_is_not_needed():
    if devices.gpu_count():
        assert nvml.sm_clock(nvml.bus_id_of(0)) > 100
    else:
        assert nvml.sm_clock("0000:00:00.0") is None and nvml.power("0000:00:00.0") is None


@pytest.mark.parametrize(
    "number, text",
    [
        (683.4, "683"),
        (4.256, "4.26"),
        (0.0123, "0.0123"),
        (0, "0"),
        (None, ""),
        (12345.6, "12,346"),
        (math.inf, "inf"),
    ],
)
def test_three_digits(number, text):
    assert report.digits(number) == text


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ["forward", "backward", "decode", "memory", "host", "ladder"])
def test_suites_on_a_gpu(capsys, tmp_path, suite):
    path = tmp_path / "gpu.json"
    code, out, _ = bench(capsys, suite, "--tiny", "--rounds", "2", "--record", str(path))
    assert code == 0, out
    record = records.read(path)
    own = [line for one in record["results"] for line in one["lines"] if line["kind"] == "cuflash"]
    assert own and all(line["status"] == "measured" for line in own), report.notes(record)
    assert all(0 < line["error_over_limit"] <= 1 for line in own)


@pytest.mark.gpu
def test_short_kernels_are_replayed_on_a_gpu(capsys, tmp_path):
    path = tmp_path / "gpu.json"
    code, out, _ = bench(capsys, "short", "--tiny", "--rounds", "2", "--record", str(path))
    assert code == 0, out
    for one in records.read(path)["results"]:
        (own,) = [line for line in one["lines"] if line["kind"] == "cuflash"]
        assert own["graph"] and one["sets"] > 1 and 0 < own["error_over_limit"] <= 1
