"""Every kernel compiles for every architecture, with the registers and shared memory that are promised.

Needs NVRTC, no GPU.  static_asserts in the kernels compare sizeof(Smem) and sizeof(Args) with the host's
numbers, so a build that succeeds has proven both.  Here: a few builds a row and architecture; all of the
covering list of problems.py under -m full.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from problems import Build, covering_builds, list_of_calls

import cuflash
from cuflash import CuflashError, build, devices, plan, rows
from cuflash.arrays import numpy_dtype
from cuflash.bench import suites
from cuflash.bench.ahead import specs_of
from cuflash.bench.shapes import Shape, Sizes
from cuflash.check import check

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TABLE = [("forward", row) for row in rows.FORWARD] + [("backward", row) for row in rows.BACKWARD]
IDS = [f"{direction}-{row.name}" for direction, row in TABLE]
PLAIN = [
    Build(dtype=dtype, head_dim=dim) for dtype, dim in (("float16", 64), ("bfloat16", 128), ("float32", 40))
]
TUNED = (64, 128, 256)  # head_dims whose plain builds must not spill


pytestmark = pytest.mark.usefixtures("copies_however_dear")  # builds are drawn with odd strides too


def problem_of(one: Build, direction: str):
    """A Problem of this build, of any sizes."""
    for call in list_of_calls(20, build=one, max_length=70, extreme=False):
        options = dict(call.options)
        arrays = {"q": call.q, "k": call.k, "v": call.v}
        problem, _ = check("forward", arrays, options)
        if 0 in (problem.batch, problem.len_q, problem.len_k, problem.heads):
            continue
        if direction == "forward":
            return problem
        out_dtype = call.dout.dtype
        axes = call.dout.shape[:-1]
        rows_shape = axes if problem.packed or problem.layout == "bhsd" else (axes[0], axes[2], axes[1])
        if problem.packed:
            rows_shape = axes[::-1]
        lse = np.zeros(rows_shape, numpy_dtype(problem.accumulator))
        arrays |= dict(dout=call.dout, out=np.zeros(call.dout.shape, out_dtype), lse=lse)
        if one.dlse:
            arrays["dlse"] = lse
        return check("backward", arrays, options | {"deterministic": one.deterministic})[0]
    raise AssertionError(f"every call of {one} is empty")


def plans_of(row, direction, builds, arch):
    """Plans of those builds that the row takes."""
    found = []
    for one in builds:
        try:
            found.append(plan.make(problem_of(one, direction), devices.named(arch), row.name))
        except CuflashError as refusal:
            assert str(refusal).startswith(f"{row.name} "), refusal
    return found


def is_covered(row, one):
    """Is the row made for the dtype and the sizes of this build?"""
    return row.covers(one.dtype, one.head_dim, one.head_dims[1])


def runs_on(row, arch):
    have = devices.named(arch).arch
    return have == row.arch if row.exact_arch else have >= row.arch


def compile_and_judge(plans):
    built = dict(zip(jobs := plan.jobs(plans), build.compile_all(jobs), strict=True))
    for one in plans:
        for launch in one.launches:
            entries = built[launch.job].entries
            assert launch.name in entries, f"{launch.step.file}.cu has no entry {launch.name}"
            assert built[launch.job].warnings == (), built[launch.job].path.name
            used = entries[launch.name].registers
            assert 0 < used <= 65536 // launch.block[0], f"{launch.name}: a block does not fit an SM"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("direction, row", TABLE, ids=IDS)
def test_rows_compile(direction, row, arch):
    if not runs_on(row, arch):
        pytest.skip(f"needs sm_{row.arch}")
    turn = ARCHS.index(arch)
    covering = covering_builds(48)
    plain = [one for one in PLAIN if (one.dtype, arch) != ("bfloat16", "sm_75") and one.dtype in row.dtypes]
    few = [
        plain[turn % len(plain)],
        *(covering[(turn * 2 + n) % 48] for n in range(2 if row.starred else 1)),
    ]
    plans = plans_of(row, direction, few, arch)
    assert plans, "no row refuses a plain build"
    compile_and_judge(plans)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("direction, row", TABLE, ids=IDS)
def test_rows_compile_in_every_build(direction, row, arch):
    if not runs_on(row, arch):
        pytest.skip(f"needs sm_{row.arch}")
    plain = [replace(one, head_dim=dim) for one in PLAIN for dim in (1, 16, 32, 64, 96, 128, 192, 256, 512)]
    plans = plans_of(row, direction, [*plain, *covering_builds(48)], arch)
    covered = [one for one in (*plain, *covering_builds(48)) if is_covered(row, one)]
    assert not row.starred or len(plans) == len(covered), "a starred row takes every option"
    compile_and_judge(plans)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("direction, row", [pair for pair in TABLE if pair[1].starred])
def test_tuned_tiles_do_not_spill(direction, row, dtype):
    if dtype not in row.dtypes:
        pytest.skip(f"{row.name} takes no {dtype}")
    arch = "sm_90" if row.arch <= 90 else f"sm_{row.arch}"
    q = {dim: cuflash.spec((1, 256, 4, dim), dtype) for dim in TUNED}
    for dim in TUNED if dtype != "float64" else TUNED[:2]:
        if not row.covers(dtype, dim, dim):
            continue
        for causal in (False, True):
            found = cuflash.explain(
                q[dim],
                q[dim],
                q[dim],
                causal=causal,
                backward=direction == "backward",
                device=arch,
                kernel=row.name,
            )
            spilled = {
                name: used.spill_stores + used.spill_loads
                for name, used in found.resources.items()
                if not name.endswith("__careful")  # runs for blocks that met infinities, and no others
            }
            assert max(spilled.values()) <= found.tile.spills, (dim, causal, spilled)


# What wgmma multiplies in registers leaves few for anything else.
HOPPER = [(direction, row) for direction, row in TABLE if row.exact_arch]
OPTION_SPILLS = 512  # bytes of spills a thread may have with one option; without any there are none


def tuned_sizes(row):
    """head_dims that a row has tiles for: a rung that is not chosen does the core at 64 and 128."""
    found = (64, 96, 128, 192, 256) if row.starred else (64, 128)
    least = 129 if row.name == "bwd_07_cluster" else 0  # bwd_06_specialize is for those up to 128
    return [dim for dim in found if least <= dim and row.covers("bfloat16", dim, dim)]


def main_build(row, direction, shape):
    """(plan, entry of the row's own kernel) of a shape of the bench; None where the row refuses."""
    q, k, v, options = specs_of(shape)
    try:
        found = cuflash.explain(
            q, k, v, **options, backward=direction == "backward", device="sm_90a", kernel=row.name
        )
    except CuflashError:
        return None
    built = build.compile(found.main.job)
    assert built.warnings == (), (shape.label(), built.warnings)  # C75xx: products are serialised
    used = built.entries[row.name]
    return found, used.spill_stores + used.spill_loads


@pytest.mark.parametrize("direction, row", HOPPER, ids=[row.name for _, row in HOPPER])
def test_hopper_rows_neither_spill_nor_serialise(direction, row):
    settings = [(), (("causal", True),)]
    if direction == "backward":
        settings += [(*one, ("deterministic", True)) for one in settings]
    for dim in tuned_sizes(row):
        for one in settings:
            for length in (512, 8192):
                shape = Shape(direction, 2, length, length, 16, 16, dim, dim, "bfloat16", one)
                found, spills = main_build(row, direction, shape)
                assert spills <= found.tile.spills == 0, shape.label()


@pytest.mark.full
@pytest.mark.parametrize("direction, row", [pair for pair in HOPPER if pair[1].starred])
def test_options_spill_little_on_hopper(direction, row):
    for dim in tuned_sizes(row):
        shapes = suites.suite("options", Sizes(head_dims=(dim,)), "gpu", "bfloat16").shapes
        made = [main_build(row, direction, shape) for shape in shapes if shape.direction == direction]
        assert None not in made and max(spills for _, spills in made) <= OPTION_SPILLS


def test_lengths_pass_compiles_everywhere():
    jobs = [build.Job("pass_lengths", (), build.target_of(int(arch[3:]))) for arch in ARCHS]
    assert all(one.entries["pass_lengths"].spill_stores == 0 for one in build.compile_all(jobs))


def test_every_kernel_file_is_used_and_names_itself():
    used = {step.file for _, row in TABLE for step in row.steps} | {"pass_lengths"}
    for name in build.kernel_files():
        text = (build.kernels_directory() / f"{name}.cu").read_text()
        assert text.startswith(f"// {name}.cu - "), f"{name}.cu begins with its name and what it is"
        assert name in used or name.startswith("pass_"), f"{name}.cu is in no row"
    assert used <= set(build.kernel_files())


def test_the_readme_names_every_file():
    home = Path(__file__).resolve().parents[1] / "kernels"
    text = (home / "README.md").read_text(encoding="utf-8")
    files = [f"`{path.name}`" for path in (home / "lib").glob("*.cuh")]
    files += [f"`{name}`" for name in build.kernel_files() if not name.startswith("pass_")]
    assert len(files) > 50 and [name for name in files if name not in text] == []


def test_a_build_outside_build_py_gets_the_default_set():
    """clangd and nvcc parse a kernel without parameters; with -DCUFLASH_JIT a forgotten one is an error."""
    compiler = build.nvrtc()
    program = compiler.createProgram(build.expand("fwd_02_tiled"), "fwd_02_tiled.cu", (), ())
    try:
        compiler.compileProgram(program, ["-arch=sm_80", "--std=c++17"])
    finally:
        compiler.destroyProgram(program)
    with pytest.raises(CuflashError, match=r"params\.cuh\(\d+\): error: identifier \"CUFLASH_"):
        build.compile(build.Job("fwd_02_tiled", (), "sm_80"))
