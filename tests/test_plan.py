"""plan.py, copies.py, cost.py, devices.py: which kernel takes what, the words for it, and its cost."""

import copy
import itertools
import logging
import pickle
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask, CuflashError, build, cost, devices, plan, rows
from cuflash.attention import explain
from cuflash.check import check
from cuflash.problem import ArraySpec, Problem
from cuflash.row import CORE, WHOLE, Row, Slot, Step, Tile, n_slots, query_tiles, shared_bytes

ARCHS = (75, 80, 86, 89, 90, 100, 120)
HALF = ("float16", "bfloat16")


def problem_of(dtype="bfloat16", batch=2, n=256, heads=8, dim=64, **changes):
    spec = {
        name: ArraySpec((batch, n, heads, dim), dtype, (n * heads * dim, heads * dim, dim, 1))
        for name in "qkv"
    }
    values = dict(
        direction="forward", dtype=dtype, out_dtype=dtype, batch=batch, len_q=n, len_k=n, heads=heads,
        heads_k=heads, head_dim=dim, head_dim_v=dim, scale=0.125, specs=tuple(sorted(spec.items())),
    )  # fmt: skip
    return Problem(**(values | changes))


def small_smem(params):
    return 2 * params["TILE_Q"] * params["HEAD_DIM"]


def row(name, arch, starred=True, **changes):
    values = dict(
        tiles=(Tile(64, 64, 4, up_to=128),),
        steps=(Step(name, query_tiles, small_smem),),
        teaches="an idea",
        dtypes=HALF,
    )
    return Row(name, starred, arch, **(values | changes))


TABLE = (
    row("fwd_10_persistent", 90, exact_arch=True, stride_bytes=16, flops_per_clock=4096),
    row("fwd_09_overlap", 90, starred=False, exact_arch=True, features=CORE),
    row("fwd_05_pipeline", 80, features=WHOLE - {"bias"}),
    row("fwd_02_tiled", 75, dtypes=(*HALF, "float32", "float64"), tiles=(Tile(32, 32, 4, chunk=64),)),
)


@pytest.fixture
def table(monkeypatch):
    """A table with tensor-core rows, whatever the real one holds today."""
    monkeypatch.setattr(rows, "FORWARD", TABLE)
    monkeypatch.setattr(plan, "_warned", set())
    plan.make.cache_clear()
    yield TABLE
    plan.make.cache_clear()


def make(problem, arch=90, kernel=None):
    return plan.make(problem, devices.named(f"sm_{arch}"), kernel)


# ---- the choice


@pytest.mark.parametrize(
    "changes, chosen",
    [
        ({}, "fwd_02 fwd_05 fwd_05 fwd_05 fwd_10 fwd_05 fwd_05"),
        (dict(dtype="float32", out_dtype="float32"), "fwd_02 fwd_02 fwd_02 fwd_02 fwd_02 fwd_02 fwd_02"),
        (dict(bias="float32"), "fwd_02 fwd_02 fwd_02 fwd_02 fwd_10 fwd_02 fwd_02"),
        (dict(head_dim=200), "fwd_02 fwd_02 fwd_02 fwd_02 fwd_02 fwd_02 fwd_02"),
    ],
)
def test_the_first_starred_row_that_accepts(table, changes, chosen):
    found = [make(problem_of(**changes), arch).kernel[:6] for arch in ARCHS]
    assert found == chosen.split()


def test_every_other_row_says_why_not(table):
    found = make(problem_of(softcap=2.0, bias="float32"), 86)
    assert found.kernel == "fwd_02_tiled"
    assert found.refused == {
        "fwd_10_persistent": "needs sm_90a, and no other, this device is sm_86",
        "fwd_09_overlap": "needs sm_90a, and no other, this device is sm_86",
        "fwd_05_pipeline": "does not do bias",
    }
    best = make(problem_of(), 90)
    assert best.refused["fwd_05_pipeline"] == "accepts, and comes after fwd_10_persistent"
    assert best.refused["fwd_09_overlap"] == "accepts, and runs by name only"


def test_named_rows(table):
    assert make(problem_of(), 90, "fwd_09_overlap").named
    with pytest.raises(CuflashError) as caught:
        make(problem_of(window=(5, None)), 90, "fwd_09_overlap")
    assert str(caught.value) == (
        "fwd_09_overlap does not do window\n"
        "  Rows that would accept: fwd_10_persistent, fwd_05_pipeline, fwd_02_tiled."
    )
    with pytest.raises(CuflashError) as caught:
        make(problem_of(), 90, "fwd_05_pipelin")
    assert str(caught.value) == (
        "no forward kernel is called 'fwd_05_pipelin'\n  Did you mean fwd_05_pipeline?\n"
        "  Known: fwd_10_persistent, fwd_09_overlap, fwd_05_pipeline, fwd_02_tiled."
    )
    with pytest.raises(CuflashError, match="It is a row of the other direction; this call is a forward"):
        make(problem_of(), 90, "bwd_02_tiled")


def test_a_slower_kernel_is_a_warning_once_that_names_the_argument(table, caplog):
    caplog.set_level(logging.DEBUG, "cuflash")
    for _ in range(2):
        make(problem_of(bias="float32"), 86)
        make(problem_of(bias="float32", causal=True), 86)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["fwd_02_tiled runs instead of fwd_05_pipeline, which does not do bias (bias)"]
    assert any(record.message.startswith("plan: fwd_02_tiled for forward on") for record in caplog.records)


@pytest.mark.parametrize("changes", [dict(dtype="float32", out_dtype="float32"), {}])
def test_dtype_and_architecture_are_no_reason_for_a_warning(table, caplog, changes):
    make(problem_of(**changes, batch=3), 86)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_kernel_at_all(table, monkeypatch):
    monkeypatch.setattr(rows, "FORWARD", TABLE[:1])
    with pytest.raises(
        CuflashError, match=r"no kernel takes this problem\n  fwd_10_persistent   needs sm_90a"
    ):
        make(problem_of(batch=5), 86)


# ---- copies


def strided(problem, **strides):
    specs = dict(problem.specs)
    for name, values in strides.items():
        specs[name] = replace(specs[name], **values)
    return replace(problem, specs=tuple(sorted(specs.items())))


def test_a_copy_that_is_cheap_is_made_and_a_dear_one_is_a_refusal(table):
    odd = dict(k=dict(align=4))
    long, short = problem_of(n=16384), problem_of(n=256)
    found = make(strided(long, **odd))
    assert found.kernel == "fwd_10_persistent"
    assert [(copy.name, copy.why) for copy in found.copies] == [
        ("k", "a stride or its address is no multiple of 16 bytes")
    ]
    assert found.workspace_bytes == 2 * 16384 * 8 * 64 * 2
    found = make(strided(short, **odd))
    assert found.kernel == "fwd_05_pipeline" and found.copies == ()
    assert re.fullmatch(
        r"needs strides and addresses in multiples of 16 bytes; copying k would cost \d+ % of the kernel, "
        r"more than 5 %",
        found.refused["fwd_10_persistent"],
    )


def test_a_last_axis_with_gaps_is_always_copied(table):
    gaps = strided(problem_of(n=256), v=dict(strides=(256 * 8 * 128, 8 * 128, 128, 2)))
    found = make(gaps, 75)
    assert [(copy.name, copy.back) for copy in found.copies] == [("v", False)]
    assert found.copies[0].why == "the stride of its last axis is 2 elements, not 1"
    one = strided(problem_of(dim=1), v=dict(strides=(256 * 8, 8, 1, 7)))
    assert make(one, 75).copies == (), "an axis of one element has no stride"


def test_a_result_with_gaps_is_copied_back(table):
    out = ArraySpec((2, 256, 8, 64), "bfloat16", (256 * 8 * 128, 8 * 128, 128, 2))
    found = make(
        replace(problem_of(), specs=tuple(sorted({**dict(problem_of().specs), "out": out}.items()))), 75
    )
    assert [(copy.name, copy.back) for copy in found.copies] == [("out", True)]


# ---- the real table


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("backward", [False, True])
def test_something_takes_every_legal_problem(arch, backward):
    device = devices.named(f"sm_{arch}")
    for dtype, dim, dim_v in itertools.product(
        ("float16", "bfloat16", "float32", "float64"), (1, 8, 40, 64, 96, 128, 200, 256, 320, 512), (None, 72)
    ):
        q = cuflash.spec((2, 70, 6, dim), dtype)
        k, v = cuflash.spec((2, 90, 3, dim), dtype), cuflash.spec((2, 90, 3, dim_v or dim), dtype)
        found = explain(
            q, k, v, causal=True, window=(40, None), softcap=9.0, alibi_slopes=cuflash.spec((6,), acc(dtype)),
            bias=cuflash.spec((6, 1, 90), "float16"), mask=np.ones((70, 90), bool), key_lengths=[3, 90],
            block_mask=BlockMask.from_dense(np.eye(5, 6), 16, 16), sink=cuflash.spec((6,), acc(dtype)),
            dropout=(0.1, 3), out_dtype="float32", backward=backward, deterministic=backward, device=device,
        )  # fmt: skip
        assert found.row.starred and found.launches
        for launch in found.launches:
            assert launch.smem_bytes <= device.shared_bytes, (dtype, dim, launch.name)
            assert launch.block[0] <= 1024 and launch.block[0] % 32 == 0
            params = dict(launch.params)
            if launch is found.main:
                assert params["HEAD_DIM"] >= dim or params["HEAD_DIM"] == found.tile.chunk


def acc(dtype):
    return "float64" if dtype == "float64" else "float32"


def test_names_files_and_entries_are_one_word():
    files = set(build.kernel_files())
    for table in (rows.FORWARD, rows.BACKWARD):
        names = [one.name for one in table]
        assert len(set(names)) == len(names)
        assert table[-1].name == "std_00_unfused"
        for one in table:
            assert one.name in files
            entries = [step.entry for step in one.steps]
            assert len(set(entries)) == len(entries), one.name
            assert any(entry.split("__")[0] == one.name for entry in entries)
            for step in one.steps:
                text = (build.kernels_directory() / f"{step.file}.cu").read_text()
                kind = "MappedArgs" if step.maps else "Args"
                assert re.search(rf"\b{step.entry}\)?\(const __grid_constant__ {kind} ", text), step.entry
                assert step.file == one.name or step.file.startswith("pass_"), step.entry
    starred = [[one.name for one in table if one.starred] for table in (rows.FORWARD, rows.BACKWARD)]
    assert starred[0][-1] == "fwd_02_tiled" and starred[1][-1] == "bwd_02_tiled"


def test_every_parameter_of_params_cuh_is_passed_and_no_other():
    text = (build.kernels_directory() / "lib" / "params.cuh").read_text()
    known = set(re.findall(r"#undef CUFLASH_(\w+)", text))
    assert known == set(re.findall(r"#define CUFLASH_(\w+)", text)), "the default set is complete"
    for one in make(problem_of(), 80).launches:
        assert set(dict(one.params)) == known


def test_a_shared_pass_is_built_once_for_problems_that_differ_elsewhere():
    jobs = set()
    for options in ({}, dict(causal=True), dict(softcap=2.0), dict(window=(3, 3))):
        q = cuflash.spec((1, 64, 2, 64), "float16")
        found = explain(q, q, q, backward=True, device="sm_80", **options)
        jobs |= {launch.job for launch in found.launches if launch.name == "pass_delta"}
    assert len(jobs) == 1


@pytest.mark.parametrize("heads_k", [8, 2])
def test_memory_is_linear_in_length(heads_k):
    """Backward: delta, one scaled lse, one accumulator of dq, and with GQA of dk and dv; few bytes more."""
    for n in (1024, 8192):
        q, k = cuflash.spec((2, n, 8, 64), "bfloat16"), cuflash.spec((2, n, heads_k, 64), "bfloat16")
        assert explain(q, k, k, device="sm_90").workspace_bytes <= 256  # a counter of tiles
        rows_, keys = 2 * n * 8, 2 * n * heads_k
        most = 4 * (2 * rows_ + 64 * rows_ + (2 * 64 * keys if heads_k != 8 else 0))
        assert explain(q, k, k, backward=True, device="sm_90").workspace_bytes <= most + 65536


def test_more_blocks_than_65535():
    q = cuflash.spec((700, 64, 100, 64), "float16")
    found = explain(q, q, q, device="sm_80")
    assert found.main.grid[0] >= 70_000 and found.main.grid[1:] == (1, 1)


def test_workspace_slots_start_on_256_bytes():
    slots = (Slot("a", "float32", (3,)), Slot("b", "uint8", (257,)), Slot("c", "float64", (0, 5)))
    found = replace(make(problem_of(), 80), slots=slots)
    assert found.offsets == (0, 256, 768) and found.workspace_bytes == 768


def test_packed_grids_have_room_for_ragged_tiles():
    assert n_slots(problem_of(packed=True, batch=3, n=100), 100, 64) == 100 // 64 + 3 + 1
    assert n_slots(problem_of(batch=3, n=100), 100, 64) == 6
    assert query_tiles(problem_of(batch=3, n=100, heads=8), {"TILE_Q": 64}) == (48, 1, 1)


def test_shared_bytes_rounds_members_to_16():
    assert shared_bytes((2, 64, 72), (4, 1, 1)) == 64 * 72 * 2 + 16


# ---- costs


def test_visible_pairs_are_exact():
    for n_q, n_k, offset, left, right, causal in itertools.product(
        (0, 1, 5, 9), (0, 1, 4, 9), (None, 0, -7, 3, 20), (None, 0, 2), (None, 0, 3), (False, True)
    ):
        problem = problem_of(len_q=n_q, len_k=n_k, query_offset=offset, window=(left, right), causal=causal)
        i, j = np.arange(n_q)[:, None] + (n_k - n_q if offset is None else offset), np.arange(n_k)[None]
        seen = np.ones((n_q, n_k), bool)
        seen &= True if left is None else j >= i - left
        seen &= True if right is None else j <= i + right
        seen &= (j <= i) | (not causal)
        assert cost.visible_pairs(problem) == seen.sum(), problem


def test_flops():
    assert cost.flops(problem_of()) == 4 * 2 * 8 * 256 * 256 * 64
    assert cost.flops(problem_of(direction="backward")) == 10 * 2 * 8 * 256 * 256 * 64
    assert cost.flops(problem_of(packed=True, batch=4, n=1024)) == 4 * 8 * 4 * 256 * 256 * 64


def test_least_bytes():
    array = 2 * 256 * 8 * 64 * 2
    assert cost.least_bytes(problem_of()) == 4 * array + 4 * 2 * 8 * 256


@pytest.mark.parametrize(
    "threads, registers, smem, blocks",
    [(128, 249, 114688, 2), (128, 32, 0, 16), (1024, 64, 0, 1), (128, 128, 0, 4)],
)
def test_occupancy(threads, registers, smem, blocks):
    assert plan.occupancy(devices.named("sm_90"), threads, registers, smem) == blocks


# ---- what a plan shows


def test_text(table):
    found = make(strided(problem_of(n=300, causal=True), v=dict(strides=(1, 1, 1, 2))), 86)
    assert str(found) == (
        "fwd_05_pipeline (chosen) for attention forward on RTX 3090 (sm_86)\n"
        "  problem     batch 2, len_q 300, len_k 300, heads 8, heads_k 8\n"
        "              head_dim 64, head_dim_v 64, bfloat16, results bfloat16\n"
        "              with causal\n"
        "  idea        an idea\n"
        "  tile        TILE_Q 64, TILE_KV 64, HEAD_DIM 64, HEAD_DIM_V 64, 4 warps, 1 stage\n"
        "  launch      fwd_05_pipeline: 80 blocks of 128 threads, 8,192 bytes of shared memory\n"
        "  workspace   v (2, 300, 8, 64) bfloat16, 614,400 bytes\n"
        "              614,400 bytes in all\n"
        "  copies      v, 614,400 bytes: the stride of its last axis is 2 elements, not 1\n"
        "  arithmetic  185 MFLOP\n"
        "  memory      2.48 MB when every array moves once\n"
        "  compiled    not yet: plan.registers, plan.spills and plan.blocks_per_sm compile\n"
        "  refused     fwd_10_persistent: needs sm_90a, and no other, this device is sm_86\n"
        "              fwd_09_overlap: needs sm_90a, and no other, this device is sm_86\n"
        "              fwd_02_tiled: accepts, and comes after fwd_05_pipeline"
    )


def test_html_has_the_same_lines_and_escapes(table):
    found = make(problem_of(), 86)
    shown = found._repr_html_()
    for line in str(found).splitlines()[1:]:
        assert line[14:].replace("'", "&#x27;") in shown
    assert "<script" not in replace(found, refused={"<script>": "a & b"})._repr_html_()


def test_resources_compile_on_first_access():
    q = cuflash.spec((1, 64, 2, 32), "float16")
    found = explain(q, q, q, device="sm_80")
    assert "resources" not in found.__dict__
    assert 0 < found.registers <= 255 and found.spills == 0 and found.blocks_per_sm >= 1
    assert f"{found.kernel}: {found.registers} registers, 0 bytes of spills" in str(found)


def test_numpy_arrays_run_in_numpy_unless_a_row_is_named():
    q = np.zeros((1, 8, 2, 4), np.float32)
    here = explain(q, q, q)
    assert here.kernel == "tiled" and here.launches == () and here.registers is None
    assert set(here.refused) == {one.name for one in rows.FORWARD}
    emulated = explain(q, q, q, kernel="fwd_02_tiled")
    assert emulated.device is devices.EMULATED and emulated.main.name == "fwd_02_tiled"


def test_emulated_devices_run_rows_of_any_architecture(table):
    problem, _ = check("forward", {name: np.zeros((1, 64, 2, 64), np.float16) for name in "qkv"}, {})
    assert plan.make(problem, devices.EMULATED, "fwd_10_persistent").kernel == "fwd_10_persistent"


# ---- devices


def test_devices_by_name():
    assert devices.find("sm_90a").arch == devices.find("90").arch == 90
    assert devices.find("emulated") is devices.EMULATED and devices.find("host") is devices.HOST
    with pytest.raises(CuflashError, match=r"device 'sm_42' is not known\n  Known are sm_75, sm_80"):
        devices.find("sm_42")
    for wrong in (1.5, True, [0], np.zeros(2)):
        with pytest.raises(CuflashError, match=r"device is .*\n  Give a CUDA device number"):
            devices.find(wrong)


def test_plans_can_be_pickled_and_copied_after_they_ran():
    q = np.ones((1, 3, 1, 4), np.float32)
    cuflash.attention(q, q, q, kernel="fwd_02_tiled")
    one = explain(q, q, q, kernel="fwd_02_tiled")
    assert one.calls, "the plan that ran"
    for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
        assert str(other) == str(one) and other.problem == one.problem and not other.calls
        assert [why.argument for why in other.refused.values() if hasattr(why, "argument")] == [
            why.argument for why in one.refused.values() if hasattr(why, "argument")
        ]


def test_a_gpu_that_is_not_there():
    with pytest.raises(CuflashError, match=r"CUDA device 99 is not there; this machine has \d+"):
        devices.find(99)


def test_a_gpu_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    q = cuflash.spec((1, 64, 2, 32), "float16")
    with pytest.raises(CuflashError, match="CUDA device 98 is not there; this machine has 0"):
        explain(q, q, q, device="cuda:98")
    with pytest.raises(CuflashError, match="CUDA device 98 is not there"):
        cuflash.dropout_mask(1, 1, 2, 3, (0.5, 7), device=98)


# ---- warmup


def test_warmup_compiles_what_calls_need(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    q = cuflash.spec((1, 64, 2, 32), "float16")
    said = []
    plans = cuflash.warmup(
        [(q, q, q), dict(q=q, k=q, v=q, kernel="fwd_01_naive"), explain(q, q, q, device="sm_80")],
        device="sm_80", progress=lambda done, total: said.append((done, total)),
    )  # fmt: skip
    assert [one.kernel for one in plans] == ["fwd_05_pipeline", "fwd_01_naive", "fwd_05_pipeline"]
    assert sorted(said) == [(1, 2), (2, 2)], "the third call needs what the first has"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".cubin", ".cubin", ".json", ".json"]


@pytest.mark.parametrize(
    "call, says", [(dict(q=1), "a call lacks k, v"), (7, "7 is no call"), ("abcd", "'abcd' is no call")]
)
def test_warmup_says_what_a_call_is(call, says):
    with pytest.raises(CuflashError, match=says):
        cuflash.warmup([call], device="sm_80")


@pytest.mark.parametrize(
    "calls, options, says",
    [
        (None, {}, "specs has the type NoneType"),
        ([], {"threads": -1}, "threads is -1"),
        ([], {"threads": "2"}, "threads is '2'"),
        ([], {"progress": 3}, "progress is 3"),
        ([np.zeros((9, 9))], {}, "an object of type ndarray is no call"),
    ],
)
def test_warmup_says_what_it_needs(calls, options, says):
    with pytest.raises(CuflashError, match=f"warmup: {says}"):
        cuflash.warmup(calls, device="sm_80", **options)


def test_explain_takes_a_direction():
    q = cuflash.spec((1, 64, 2, 32), "float16")
    with pytest.raises(CuflashError, match="explain: backward is 'no'"):
        explain(q, q, q, backward="no")


@pytest.mark.skipif(devices.gpu_count() > 0, reason="with a GPU, warmup has a device")
def test_warmup_without_a_gpu_wants_a_name():
    with pytest.raises(CuflashError, match=r'there is no GPU here.*\n.*device="sm_90a"'):
        cuflash.warmup([])
