"""`cuflash bench`: plots, profiles by Nsight Compute, roofs, and numbers as they are shown."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time

import pytest
from bench_help import SMALL, bench, fake_record

from cuflash import devices, nvml, records
from cuflash.bench import command, plots, profile, report, roofs
from cuflash.bench.shapes import Shape
from cuflash.errors import CuflashError


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
             "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
             "sm__pipe_tensor_cycles_active_v2.avg.pct_of_peak_sustained_active",
             "lts__t_sectors.avg.pct_of_peak_sustained_elapsed"]  # fmt: skip
    assert all(found[0].search(name) for name in there)
    assert found[1].search("smsp__average_warps_issue_stalled_wait_per_issue_active.ratio")
    not_those = ["sm__instruction_throughput.avg.pct_of_peak_sustained_elapsed",
                 "lts__t_sectors_op_read.avg.pct_of_peak_sustained_elapsed",
                 "dram__bytes.avg.pct_of_peak_sustained_active"]  # fmt: skip
    assert not any(pattern.search(name) for pattern in found for name in not_those)


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
