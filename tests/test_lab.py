"""`cuflash lab`: compile, check, time and compare one kernel file; here without a GPU, in the emulator."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

import cuflash
from cuflash import build, cli, devices, emulator, lab, lab_source, launch, rows
from cuflash.bench.shapes import Shape
from cuflash.errors import CuflashError
from cuflash.lab import Lab

KERNEL = "fwd_01_naive"  # the quickest to build for the emulator
WRONG = ("l * shrink + P", "l * shrink + 1.02f * P")  # an edit that makes it compute wrong numbers


def has_compiler():
    try:
        return bool(emulator.find_compiler())
    except CuflashError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")


@pytest.fixture
def changed(tmp_path):
    """A function (old, new) -> a copy of the kernel in which old has become new."""

    def make(old="", new="", kernel=KERNEL):
        text = (build.kernels_directory() / f"{kernel}.cu").read_text()
        assert old in text
        path = tmp_path / "mine.cu"
        path.write_text(text.replace(old, new) if old else text)
        return path

    return make


@needs_compiler
def test_a_copy_is_right(changed):
    said = []
    found = cuflash.lab(changed(), timing=False, progress=said.append)
    assert isinstance(found, Lab) and found.passed, str(found)
    assert (found.source.row.name == KERNEL and found.where == "the emulator") or devices.gpu_count()
    assert [line.status for line in found.check.lines] == ["passed"] * len(found.check.lines)
    assert len(found.check.lines) == len(lab.EMULATED_CASES) or devices.gpu_count()
    assert found.parent == "std_00_unfused" and any(line.startswith("+") for line in found.diff)
    assert said[-1] == "checking"
    if not devices.gpu_count():
        for name in ("q", "k", "v", "out", "lse"):
            read, written, predicted = found.traffic[name]
            assert read + written == predicted > 0
    text = str(found)
    for word in ("mine.cu: a version of fwd_01_naive", "diff ", "right, ", "2 passed, 0 failed"):
        assert word in text or devices.gpu_count()
    assert found._repr_html_().startswith("<pre>")


@needs_compiler
def test_registers_are_told_without_a_gpu(changed):
    found = lab.lab(changed(), timing=False, cases=["plain"], arch="sm_80")
    assert {one.entry for one in found.compiled} == {KERNEL}
    for one in found.compiled:
        assert one.registers > 16 and one.spills == 0 and one.blocks_per_sm >= 1
        assert devices.gpu_count() or one.what.endswith("sm_80")
    assert "registers, 0 bytes of spills" in str(found)


@needs_compiler
def test_a_wrong_kernel_is_found(changed, capsys):
    path = changed(*WRONG)
    found = lab.lab(path, timing=False, cases=["plain"])
    assert not found.passed and "NOT RIGHT" in str(found) and "  WRONG " in str(found)
    assert cli.main(["lab", str(path), "--no-timing", "--cases", "plain"]) == 1
    assert "out: error" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize(
    "old, new, says",
    [
        ("d < args.head_dim; ++d", "d <= args.head_dim; ++d", "global access outside"),
        ("largest(m, s)", "largets(m, s)", "largets"),
    ],
)
def test_a_broken_kernel_is_no_refusal(old, new, says, changed, monkeypatch):
    """What goes wrong after the plan is a failure, of a row that may refuse cases as well."""
    monkeypatch.setattr(lab, "_compile", lambda found, device: None)  # as where there is no NVRTC
    found = lab.lab(changed(old, new), timing=False, cases=["plain", "softcap"], dtypes=["float32"])
    statuses = {line.case: line.status for line in found.check.lines}
    assert statuses == {"plain": "failed", "softcap": "refused"} and not found.passed
    assert says in found.check.failures[0].message


@needs_compiler
def test_what_changed_is_told(changed, tmp_path, capsys):
    path = changed("#pragma unroll 4", "#pragma unroll 8")
    found = lab.lab(path, timing=False, cases=["plain"])
    assert f"from {KERNEL} as shipped: +1 -1 lines" in str(found)
    assert "+#pragma unroll 8" in found.change
    same = tmp_path / "same.cu"
    same.write_text(path.read_text())
    found = lab.lab(path, against=same, timing=False, cases=["plain"])
    assert f"from {same}: nothing, comments apart" in str(found) and found.change == []
    assert cli.main(["lab", str(path), "--against", str(tmp_path / "no.cu")]) == 2
    assert "no.cu is not there" in capsys.readouterr().err


@needs_compiler
def test_the_package_is_itself_again_afterwards(changed):
    home = build.kernels_directory()
    lab.lab(changed(*WRONG), timing=False, cases=["plain"])
    assert build.kernels_directory() == home
    q = np.random.default_rng(0).standard_normal((1, 20, 2, 16)).astype(np.float32)
    out = cuflash.attention(q, q, q, kernel=KERNEL)
    assert np.abs(out - cuflash.reference.attention(q, q, q)).max() < 1e-5


def test_what_does_not_compile_says_where(changed, capsys):
    build.nvrtc_version()
    path = changed("KERNEL(", "int x = ;\nKERNEL(")
    assert cli.main(["lab", str(path), "--no-timing"]) == 2
    err = capsys.readouterr().err
    assert "does not compile" in err and f"{path}(" in err and "expected" in err
    assert f"kernels/{KERNEL}.cu" not in err  # the shipped one is not at fault


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "is not there"),
        ("int nothing;\n", "defines no entry point"),
        (b"\xff\xfe\0", "cannot be read as text"),
        (
            "KERNEL(32, 1) fwd_77_dream(const __grid_constant__ Args args) {}\n",
            "no row of the plan table runs",
        ),
    ],
)
def test_files_that_are_no_kernel(text, says, tmp_path, capsys):
    path = tmp_path / "x.cu"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["lab", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_every_row_and_pass_has_a_file_that_lab_knows():
    for row in (*rows.FORWARD, *rows.BACKWARD):
        assert lab_source.row_of(build.kernels_directory() / f"{row.name}.cu") is row
    assert lab_source.row_of(build.kernels_directory() / "pass_delta.cu") in rows.BACKWARD


def test_a_file_of_the_package_is_used_where_it_is():
    with lab_source.workshop(build.kernels_directory() / f"{KERNEL}.cu") as source:
        assert source.folder == build.kernels_directory() and source.shipped is None
    with lab_source.workshop(build.kernels_directory() / "std_00_unfused.cu") as source:
        assert source.directions == ("forward", "backward")


def test_a_copy_gets_a_folder_of_its_own(changed):
    path = changed("KERNEL(", "// changed\nKERNEL(", kernel="pass_delta")
    with lab_source.workshop(path) as source:
        assert source.shipped == build.kernels_directory() != source.folder
        assert "// changed" in (source.folder / "pass_delta.cu").read_text()
        assert (source.folder / "lib" / "args.cuh").is_file()
        with build.sources_from(source.folder):
            assert "// changed" in build.expand("pass_delta")
        folder = source.folder
    assert not folder.exists() and "// changed" not in build.expand("pass_delta")


def test_the_parent_is_the_rung_to_read_before():
    assert lab_source.parent_of("// Read after   fwd_04_swizzle.cu   Read next   x.cu") == "fwd_04_swizzle"
    assert lab_source.parent_of("// Read first: the baseline") is None
    home = build.kernels_directory()
    for row in (*rows.FORWARD, *rows.BACKWARD):
        parent = lab_source.parent_of((home / f"{row.name}.cu").read_text())
        assert parent is None or (home / f"{parent}.cu").is_file()


def test_the_module_is_the_function_too():
    import cuflash.lab as module

    assert cuflash.lab is module and callable(cuflash.lab)
    with pytest.raises(CuflashError, match="is not there"):
        cuflash.lab("nowhere.cu")
    with pytest.raises(CuflashError, match="path has the type NoneType; needs the path"):
        cuflash.lab(None)
    with pytest.raises(CuflashError, match="unknown case plane; known: plain"):  # one name, no letters
        cuflash.lab(build.kernels_directory() / "fwd_01_naive.cu", cases="plane", timing=False)


@needs_compiler
def test_the_command(changed, capsys):
    path = changed()
    assert (
        cli.main(["lab", str(path), "--no-timing", "--cases", "plain", "--dtypes", "float32", "--diff"]) == 0
    )
    captured = capsys.readouterr()
    assert "1 passed, 0 failed" in captured.out and "\n+" in captured.out and "checking" in captured.err


# ---- on a GPU


@pytest.mark.gpu
def test_versions_run_side_by_side(changed):
    path = changed("KERNEL(", "// the same\nKERNEL(")
    shape = Shape("forward", 2, 256, 256, 4, 4, 64, 64, "float16")
    found = lab.lab(
        path, shapes=[shape, replace(shape, settings=(("causal", True),))], cases=["plain", "causal"]
    )
    assert found.passed
    for one in found.timing["results"]:
        lines = {line["name"]: line for line in one["lines"]}
        assert set(lines) == {"mine.cu", f"{KERNEL} as shipped", "std_00_unfused", "matmul cupy"}
        assert all(line["status"] == "measured" for line in lines.values())
    assert "of its time" in str(found)


@pytest.mark.gpu
def test_a_wrong_version_gets_no_time(changed):
    shape = Shape("forward", 2, 256, 256, 4, 4, 64, 64, "float16")
    found = lab.lab(changed(*WRONG), shapes=[shape], cases=["plain"])
    lines = {line["name"]: line["status"] for line in found.timing["results"][0]["lines"]}
    assert lines["mine.cu"] == "wrong" and lines[f"{KERNEL} as shipped"] == "measured"


@pytest.mark.gpu
def test_an_edit_in_place_is_seen_by_the_next_call(tmp_path):
    """What a notebook does: the same file, changed between two calls of one process."""
    import cupy

    folder = tmp_path / "kernels"
    shutil.copytree(build.kernels_directory(), folder)
    q = cupy.random.default_rng(0).standard_normal((1, 64, 2, 64)).astype(cupy.float32)
    with build.sources_from(folder):
        launch.forget()
        first = cuflash.attention(q, q, q, kernel=KERNEL)
        text = (folder / f"{KERNEL}.cu").read_text()
        (folder / f"{KERNEL}.cu").write_text(text.replace(*WRONG))
        launch.forget()
        second = cuflash.attention(q, q, q, kernel=KERNEL)
    launch.forget()
    assert not cupy.allclose(first, second)
