"""The tables of the READMEs: which numbers they show, what they say of stale, wrong and missing ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_help import bench, fake_record

from cuflash import records
from cuflash import rows as rows_
from cuflash.bench import cells, comparisons, markdown, shapes, suites
from cuflash.bench.shapes import Shape

TEXT = "before\n<!-- forward -->\nold\n<!-- /forward -->\nafter\n"


def test_tables_stand_between_their_markers():
    text = markdown.filled(TEXT, [fake_record()])
    assert text.startswith("before\n<!-- forward -->\nNVIDIA H200, driver 580.1") and text.endswith("after\n")
    assert "old" not in text and "(stale)" not in text
    row = next(line for line in text.splitlines() if line.startswith("| d 16"))
    assert "**600**" in row and " 500 " in row and "62 %" in row and "`fwd_02_tiled`" in row
    assert markdown.filled(text, [fake_record()]) == text
    for word in ("bfloat16", "N(0,1)", "2026-01-01", "SM clock 1,750", "torch 2.11"):
        assert word in text


def test_a_changed_kernel_is_marked_stale():
    record = fake_record()
    record["sources"]["fwd_02_tiled"] = "0" * 64
    text = markdown.filled(TEXT, [record])
    assert "500 (stale)" in text and "600 (stale)" not in text


def test_without_a_record_the_command_is_named():
    assert "`cuflash bench forward --peers`" in markdown.filled(TEXT, [])


def test_the_newest_run_of_a_shape_is_shown_whole():
    old, new = fake_record(1e-3), fake_record(2e-3, date="2026-02-01T00:00:00")
    text = markdown.filled(TEXT, [old, new])
    assert " 250 " in text and " 500 " not in text and "2026-02-01" in text and "2026-01-01" not in text
    own = fake_record(4e-3, date="2026-03-01T00:00:00", own=True)
    assert markdown.filled(TEXT, [old, new, own]) == text
    other = fake_record(4e-3, card="Tesla T4", date="2025-01-01T00:00:00")
    assert markdown.filled(TEXT, [other, old, new]) == text


def test_wrong_results_are_shown_as_such():
    record = fake_record()
    record["results"][0]["lines"][0].update(status="wrong", says="out: error")
    assert "| wrong |" in markdown.filled(TEXT, [record])


def test_speed_is_two_numbers_and_a_name():
    forward = fake_record(1e-3)
    backward = fake_record(0.5e-3, suite="backward")
    backward["results"][0]["shape"]["direction"] = "backward"
    backward["sources"]["fwd_02_tiled"] = "0" * 64
    text = markdown.render("speed", [forward, backward])
    assert "| head_dim | length | forward | backward |" in text
    assert "| 16 | 40 | 500 / **600** sdpa_cudnn | **1,000** (stale) / 600 sdpa_cudnn |" in text
    assert "`cuflash bench forward backward --peers`" in markdown.render("speed", [])
    by_name = forward["results"][0]["lines"][0] | {"asked": "fwd_05_pipeline", "tflops": 900.0}
    forward["results"][0]["lines"].insert(0, by_name)  # what a user does not get unasked does not count
    assert "| 16 | 40 | 500 / **600** sdpa_cudnn |" in markdown.render("speed", [forward])


@pytest.fixture
def checkout(monkeypatch):
    """READMEs, records and notes beside these tests, where the package itself is installed elsewhere too."""
    measured = Path(__file__).resolve().parents[1] / "kernels" / "measured"
    monkeypatch.setattr(records, "folder", lambda: measured)


def test_the_ladder_has_a_line_per_rung(checkout):
    record = fake_record(suite="ladder")
    record["results"][0]["lines"][0]["asked"] = "fwd_02_tiled"
    text = markdown.render("ladder", [record])
    assert "| `fwd_02_tiled` | 500 (62 %) |" in text and "| `std_00_unfused` |  |" in text
    names = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert names == sorted((row.name for row in rows_.FORWARD), key=lambda name: name[4:6])


def test_the_ladder_says_what_was_predicted_and_what_limits(monkeypatch):
    record = fake_record(suite="ladder")
    record["results"][0]["lines"][0]["asked"] = "fwd_02_tiled"
    notes = {name: {"predicted": "600", "limiter": "by hand"} for name in ("fwd_02_tiled", "fwd_01_naive")}
    monkeypatch.setattr(markdown, "ladder_notes", lambda: notes)
    one = {"kernel": "fwd_02_tiled", "limiter": "FMA (72 %)", "milliseconds": 2.0}
    other = {"kernel": "fwd_02_tiled__pass", "limiter": "waiting", "milliseconds": 1.0}
    profile = {"kind": "profile", "kernels": [one, other]}
    rows = markdown.render("ladder", [fake_record(**profile), record]).splitlines()
    tiled = next(row for row in rows if row.startswith("| `fwd_02_tiled`"))
    assert "| 600 | FMA (72 %) |" in tiled
    assert "| 600 | by hand |" in next(row for row in rows if row.startswith("| `fwd_01_naive`"))
    other = markdown.render("ladder", [fake_record(card="Tesla T4", **profile), record])
    assert "| 600 | by hand |" in next(x for x in other.splitlines() if x.startswith("| `fwd_02_tiled`"))


def test_notes_of_the_ladder_name_rungs(checkout):
    assert markdown.ladder_notes()
    known = {row.name for row in (*rows_.FORWARD, *rows_.BACKWARD)}
    for name, note in markdown.ladder_notes().items():
        assert name in known and set(note) <= {"predicted", "limiter"}, name


def test_a_part_of_the_envelope_is_shown():
    record = fake_record(own=True)
    (shape,) = [
        one for one in suites.suite("forward", shapes.Sizes(), "gpu", "bfloat16", "envelope").shapes
        if (one.head_dim, one.len_q, one.causal) == (192, 16384, True)
    ]  # fmt: skip
    record["results"][0] |= {"shape": shape.as_json(), "label": shape.label()}
    assert "| d 192, length 16,384, batch 1, heads 10, causal |" in markdown.filled(TEXT, [record])


def test_profiles_are_shown_with_their_limiter():
    record = fake_record(kind="profile", kernels=[{
        "kernel": "fwd_02_tiled", "label": "d 64", "milliseconds": 1.5, "stalls": {"long_scoreboard": 0.4},
        "utilisation": {"FMA": 72.4, "shared": 50.0}, "occupancy": 25.0,
        "dram_bytes": 2.5e9, "limiter": "FMA (72 %)",
    }])  # fmt: skip
    text = markdown.render("profile", [record])
    assert "| `fwd_02_tiled` | d 64 | 1.50 |  |  | 72 % |" in text
    assert "| 25 % | 2.50 | long scoreboard 40 % | FMA (72 %) |" in text


def test_the_readmes_are_what_the_command_would_write(checkout):
    for path, text in markdown.texts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `cuflash bench --tables`"


def test_tables_are_written_by_the_command(capsys, tmp_path, monkeypatch):
    (tmp_path / "kernels" / "measured").mkdir(parents=True)
    for name in markdown.FILES:
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "kernels" / "measured" / "bench.json").write_text(json.dumps(fake_record()))
    (tmp_path / "kernels" / "measured" / "broken.json").write_text("{")
    monkeypatch.setattr(records, "folder", lambda: tmp_path / "kernels" / "measured")
    code, out, _ = bench(capsys, "--tables")
    assert code == 0 and "**600**" in (tmp_path / "README.md").read_text()
    assert str(tmp_path / "kernels" / "README.md") in out
    assert bench(capsys, "--tables")[1] == "every table is as it should be\n"


# ---- what is compared


def compared_record(name, shapes_, rates, **changes):
    """A record of a suite: shape n took 1 ms at rates[n] TFLOP/s, beside a matmul of 800."""
    made = fake_record(suite=name, metric="tflops", own=False, **changes)
    (result,) = made["results"]
    made["results"] = []
    for shape, rate in zip(shapes_, rates, strict=True):
        lines = [dict(line) for line in result["lines"]]
        lines[0] |= {"tflops": rate, "seconds": 1e-3}
        one = result | {"shape": shape.as_json(), "label": shape.label(), "lines": lines}
        made["results"].append(one)
    return made


def rows_of(text):
    cut = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {row[0]: row for row in cut}


@pytest.mark.parametrize("name", suites.COMPARED_WITH)
@pytest.mark.parametrize("place", ["gpu", "cpu"])
def test_every_shape_of_a_suite_that_compares_has_its_plain_one(name, place):
    made = suites.suite(name, shapes.Sizes(), place, "bfloat16" if place == "gpu" else "float32")
    for shape in made.shapes:
        plain = suites.COMPARED_WITH[name](shape)
        assert plain in made.shapes and suites.COMPARED_WITH[name](plain) == plain
        assert (plain == shape) == (comparisons.what_differs(shape, plain) == "")
    assert len(made.shapes) >= 2 * sum(shape == suites.COMPARED_WITH[name](shape) for shape in made.shapes)


def test_what_an_option_costs():
    suite = suites.suite("options", shapes.Sizes(), "gpu", "bfloat16")
    plain, shared, causal = [one for one in suite.shapes if one.direction == "forward"][:3]
    record = compared_record("options", [causal, plain, shared], [300.0, 600.0, 630.0])
    record["results"][0]["lines"][0]["seconds"] = 1.2e-3  # 0.6 of the work
    text = markdown.render("options", [record])
    found = rows_of(text)
    assert list(found)[1:] == [plain.label(), "16 heads over 4", "causal"]  # in the order of the suite
    assert found[plain.label()][1:] == ["100 %", "1.00", "600", "75 %", "", "", "`fwd_02_tiled`"]
    assert found["16 heads over 4"][5:7] == ["1.000", "1.050"]
    assert found["causal"][1:4] == ["60 %", "1.20", "300"] and found["causal"][5:7] == ["1.200", "0.500"]
    record["results"][0]["lines"][0].update(status="wrong", says="out: error")
    assert rows_of(markdown.render("options", [record]))["causal"][2] == "wrong"


def test_a_dtype_is_divided_by_its_matmul():
    base = shapes.grid(("forward",), shapes.Sizes(causal=(False,)), head_dims=(64,), lengths=(8192,),
                       dtype="bfloat16")[0]  # fmt: skip
    record = compared_record("dtypes", [base, replace(base, dtype="float16")], [600.0, 540.0])
    record["results"][1]["matmul_tflops"] = 720.0
    text = markdown.render("dtypes", [record])
    assert rows_of(text)["float16"][4:7] == ["75 %", "1.000", "1.000"] and "matmul of its dtype" in text


def test_repeatable_gradients_stand_beside_the_others():
    suite = suites.suite("deterministic", shapes.Sizes(), "gpu", "bfloat16")
    record = compared_record("deterministic", suite.shapes[:2], [500.0, 450.0])
    assert rows_of(markdown.render("deterministic", [record]))["deterministic"][6] == "0.900"
    assert "`cuflash bench deterministic`" in markdown.render("deterministic", [])


def test_a_plain_line_of_another_run_does_not_count():
    suite = suites.suite("gqa", shapes.Sizes(), "gpu", "bfloat16")
    plain, shared = suite.shapes[:2]
    old = compared_record("gqa", [plain], [500.0])
    new = compared_record("gqa", [shared], [500.0], date="2026-02-01T00:00:00")
    found = rows_of(markdown.render("gqa", [old, new]))
    assert found[shared.label()][5:7] == ["", ""]


def test_hot_runs_are_apart():
    hot = fake_record(date="2026-03-01T00:00:00")
    hot["protocol"]["sustained_s"] = 1.0
    hot["results"][0]["lines"][0]["sustained_tflops"] = 450.0
    text = markdown.render("sustained", [fake_record(), hot])
    assert " 500 / 450 " in text and " 600 /  " in text and "back to back for 1.00 s" in text
    assert "2026-03-01" not in markdown.render("forward", [fake_record(), hot])
    assert "--sustained" in markdown.render("sustained", [fake_record()])


def test_what_was_wrong_is_said_below_the_table():
    record = fake_record()
    record["results"][0]["lines"][1].update(status="wrong", says="dq: error 588 is over the limit, 4 are")
    text = markdown.render("forward", [record])
    label = Shape.from_json(record["results"][0]["shape"]).label()
    assert f"Wrong: `sdpa_cudnn` in 1 of 1 shapes, first in {label}: dq: error 588 is over the limit;" in text


def test_every_table_is_in_a_readme(checkout):
    text = "".join(path.read_text(encoding="utf-8") for path in markdown.texts())
    for name in markdown.TABLES:
        assert f"<!-- {name} -->" in text and f"<!-- /{name} -->" in text, name


def test_suites_say_how_long_they_took():
    found = rows_of(markdown.render("suites", [fake_record() | {"seconds": 64.3}]))
    assert set(found) == {"suite", *(f"`{name}`" for name in suites.SUITES)}
    assert found["`forward`"][2:] == ["1", "1", "64"]
    assert not any(found["`ladder`"][2:])


def test_only_records_of_the_bench_are_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(fake_record()))
    (tmp_path / "b.json").write_text(json.dumps(fake_record(kind="check")))
    (tmp_path / "c.json").write_text("{")
    assert [record["kind"] for record in cells.all_records(tmp_path)] == ["bench-forward"]
