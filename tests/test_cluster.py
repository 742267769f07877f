"""bwd_07_cluster: the whole contract on a CPU, long walks in every order of events; builds without a GPU."""

import numpy as np
import pytest
from close import Judge
from problems import Build, covering_builds, list_of_calls
from test_backward_kernels import draw, run, same_bits

import cuflash
from cuflash import CuflashError, build, checks, copies, devices, emulator, plan
from cuflash.cases import cases
from cuflash.check import check

ROW = "bwd_07_cluster"
QUICK = {case.name: case for case in cases(quick=True)}
ALL = {case.name: case for case in cases()}
COVERED = [
    one for one in covering_builds(48) if one.dtype in ("float16", "bfloat16") and max(one.head_dims) <= 256
]


@pytest.mark.parametrize("name", QUICK)
def test_quick_cases(name, copies_however_dear):
    line = checks.one(ROW, "backward", checks.Expected(QUICK[name], "bfloat16"), np)
    assert line.status == "passed", line.message


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_all_cases(name, dtype, copies_however_dear):
    expected = checks.Expected(ALL[name], dtype)
    for seed in range(4):
        with emulator.options(seed=seed):
            line = checks.one(ROW, "backward", expected, np)
        assert line.status == "passed" or "head_dim" in line.message, f"seed {seed}: {line.message}"


@pytest.mark.parametrize("one", COVERED[::5], ids=lambda one: f"build{COVERED.index(one)}")
def test_the_contract(one, copies_however_dear):
    for call in list_of_calls(3, seed=COVERED.index(one), build=one, max_length=200, max_scores=2**15):
        run(call, ROW)


@pytest.mark.full
@pytest.mark.parametrize("one", COVERED, ids=lambda one: f"build{COVERED.index(one)}")
def test_the_whole_contract(one, copies_however_dear):
    for number, call in enumerate(
        list_of_calls(12, seed=COVERED.index(one), build=one, max_length=300, max_scores=2**16)
    ):
        judge = Judge(call)
        for seed in (number, number + 1):
            with emulator.options(seed=seed):
                run(call, ROW, judge)


# (batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v): many steps a cluster, several heads, odd ends
WALKS = [
    ((1, 700, 130, 2, 1, 256, 256), {}),
    ((1, 330, 400, 1, 1, 192, 192), {"causal": True}),
    ((2, 65, 300, 2, 2, 192, 128), {"causal": True}),
    ((1, 200, 65, 1, 1, 128, 256), {"causal": True, "query_offset": 0}),
    ((1, 300, 260, 2, 1, 224, 160), {"window": (70, 30)}),
]


@pytest.mark.parametrize("shape, options", WALKS)
def test_long_walks_in_every_order(shape, options):
    """Copies and products early and late, threads in other orders: dk and dv have the same bits each time."""
    dout, q, k, v, out, _ = draw(shape, "bfloat16", options)
    exact, lse = cuflash.reference.attention(q, k, v, return_lse=True, **options)
    arrays = dout, q, k, v, exact.astype(out.dtype), lse.astype(np.float32)
    expected = cuflash.reference.attention_backward(*arrays, **options)
    first = None
    for seed in range(4):
        with emulator.options(seed=seed):
            got = cuflash.attention_backward(*arrays, kernel=ROW, **options)
        for mine, reference in zip(got[:3], expected[:3], strict=True):
            error = np.abs(mine.astype(np.float64) - reference).max()
            assert error < 0.02 * np.abs(reference).max()
        first = first or got
        assert same_bits(first[1:3] * 2, got[1:3] * 2)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_deterministic_gradients_ignore_the_order_of_threads_and_blocks(seed):
    one = Build(dtype="bfloat16", head_dim=192, alibi=True, deterministic=True, causal=True)
    (call,) = list_of_calls(1, seed=7, build=one, max_length=300, extreme=False)
    first = run(call, ROW)
    with emulator.options(seed=seed):
        assert same_bits(first, run(call, ROW))


def test_few_clusters_share_the_heads_of_a_key_head():
    q, k = cuflash.spec((1, 256, 8, 192), "float16"), cuflash.spec((1, 128, 1, 192), "float16")
    plans = [
        cuflash.explain(q, k, k, backward=True, device="sm_90a", kernel=ROW, deterministic=fixed)
        for fixed in (False, True)
    ]
    assert [plan.grid for plan in plans] == [(16, 1, 1), (2, 1, 1)]
    names = [{slot.name for slot in plan.slots} for plan in plans]
    assert {"dK_sum", "dV_sum"} <= names[0] and not {"dK_sum", "dV_sum"} & names[1]


@pytest.mark.parametrize("head_dims", [(192, 192), (256, 256), (192, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_compiled_without_spills_and_without_serialised_products(head_dims, causal):
    for dtype in ("float16", "bfloat16"):
        q, v = (cuflash.spec((1, 4096, 16, dim), dtype) for dim in head_dims)
        found = cuflash.explain(q, q, v, causal=causal, backward=True, device="sm_90a", kernel=ROW)
        assert found.spills == 0
        assert build.compile(found.main.job).warnings == ()


def test_turns_cost_no_spills():
    x = cuflash.spec((1, 4096, 16, 256), "bfloat16")
    found = cuflash.explain(x, x, x, backward=True, deterministic=True, device="sm_90a", kernel=ROW)
    assert found.spills == 0 and build.compile(found.main.job).warnings == ()


def test_it_runs_on_hopper_alone():
    q = cuflash.spec((1, 256, 4, 256), "float16")
    with pytest.raises(CuflashError, match="needs sm_90a, and no other, this device is sm_100"):
        cuflash.explain(q, q, q, backward=True, device="sm_100", kernel=ROW)


MANY = (2, 300, 700, 4, 2, 256, 256)  # of ten thousand launches


def calls_on_a_gpu():
    for number, one in enumerate(COVERED):
        yield from list_of_calls(1, seed=number, build=one, max_length=400, max_scores=2**16)


@pytest.fixture(scope="module")
def compiled_side_by_side():
    """Every kernel of the tests below, by as many compilers as there are cores: one by one takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "COPY_SHARE", 1e9)
        plans = [plan_on_a_gpu(*draw(MANY, "float16", {}), options={"causal": True})]
        for call in calls_on_a_gpu():
            options = dict(call.options, dlse=call.dlse, deterministic=call.deterministic)
            plans.append(plan_on_a_gpu(call.dout, call.q, call.k, call.v, *Judge(call).saved(), options))
        cuflash.warmup(plans)


def plan_on_a_gpu(dout, q, k, v, out, lse, options):
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": options.pop("dlse", None)}
    problem, _ = check("backward", arrays, dict(options, kernel=ROW))
    return plan.make(problem, devices.find(None), ROW)


@pytest.mark.gpu
def test_ten_thousand_launches_give_the_same_bits(compiled_side_by_side):
    import cupy

    dout, q, k, v, out, lse = (cupy.asarray(x) for x in draw(MANY, "float16", {}))
    first = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, kernel=ROW)
    again = cuflash.Gradients(*(None if x is None else cupy.empty_like(x) for x in first))
    for _ in range(10_000):
        cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, kernel=ROW, grads=again)
    assert cupy.array_equal(first.dk, again.dk) and cupy.array_equal(first.dv, again.dv)


@pytest.mark.gpu
def test_the_contract_on_a_gpu(compiled_side_by_side, copies_however_dear):
    import cupy

    for call in calls_on_a_gpu():
        judge, there = Judge(call), call.on_device()
        saved = judge.saved()
        gradients = cuflash.attention_backward(
            there.dout, there.q, there.k, there.v, *(cupy.asarray(x) for x in saved),
            dlse=there.dlse, deterministic=there.deterministic, kernel=ROW, **there.options,
        )  # fmt: skip
        judge.backward(gradients, *saved)
