"""bwd_05_wgmma and bwd_06_specialize: results and order on a CPU, registers without a GPU."""

import re
import shutil

import numpy as np
import pytest
from in_emulator import check_case, check_orders
from problems import Build, Call, covering_builds, list_of_calls
from test_backward_kernels import draw, run, same_bits

import cuflash
from cuflash import build, checks, emulator, launch, rows_hopper_backward
from cuflash.cases import cases

ROWS = ("bwd_05_wgmma", "bwd_06_specialize")
QUICK = {case.name: case for case in cases(quick=True)}
ALL = {case.name: case for case in cases()}


pytestmark = pytest.mark.usefixtures("copies_however_dear")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", QUICK)
def test_quick_cases(row, name):
    line = checks.one(row, "backward", checks.Expected(QUICK[name], "bfloat16"), np)
    assert line.status in ("passed", "refused"), line.message


def test_the_core_is_not_refused():
    for row in ROWS:
        for name in ("ragged grouped heads", "causal few keys", "head_dim 128", "no keys"):
            check_case(row, "backward", QUICK[name], "float16")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("row, head_dim", [(ROWS[0], 64), (ROWS[1], 128), ("bwd_07_cluster", 192)])
def test_keys_without_queries_get_zeros(row, head_dim, deterministic):
    """Nobody opens a query tile then, and the counter of the key tiles is 0 all the same."""
    q, k = np.ones((1, 0, 2, head_dim), np.float16), np.ones((1, 700, 2, head_dim), np.float16)
    lse = np.zeros((1, 2, 0), np.float32)
    options = dict(kernel=row, deterministic=deterministic)
    found = cuflash.attention_backward(q, q, k, k, q, lse, **options)
    assert not found.dk.any() and not found.dv.any()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_all_cases(name, dtype):
    expected = checks.Expected(ALL[name], dtype)
    for row in ROWS:
        check_orders(row, "backward", expected)


OPTIONS = [
    one
    for one in covering_builds(48)
    if one.dtype in ("float16", "bfloat16") and max(one.head_dims) <= 128 and min(one.head_dims) >= 8
]


@pytest.mark.parametrize("one", OPTIONS[::3], ids=lambda one: f"{one.dtype}-{one.head_dim}")
def test_options(one):
    for call in list_of_calls(2, seed=5, build=one, max_length=300, max_scores=2**14):
        run(call, "bwd_06_specialize")


@pytest.mark.parametrize("head_dim, head_dim_v", [(8, 128), (96, 96), (104, 40), (96, 64), (128, 128)])
def test_every_tile(head_dim, head_dim_v):
    """Halves of dQ are cut out of panels of 64, 32 or 16 columns."""
    for row in (*ROWS, "in turn"):
        in_turn = row == "in turn"
        dout, q, k, v, *_ = draw((1, 130, 200, 2, 1, head_dim, head_dim_v), "bfloat16", {})
        given = Build(dtype="bfloat16", causal=True, deterministic=in_turn)
        call = Call(
            q, k, v, dout=dout, dlse=None, options={"causal": True}, build=given, deterministic=in_turn
        )
        run(call, ROWS[-1] if in_turn else row)


IN_TURN = {
    "causal": Build(dtype="bfloat16", causal=True, deterministic=True),
    "softcap": Build(dtype="float16", softcap=True, deterministic=True),
    "window": Build(dtype="bfloat16", causal=True, window=True, deterministic=True),
    "packed": Build(dtype="float16", sequences="packed", causal=True, deterministic=True),
    "block mask": Build(dtype="bfloat16", block_mask=(64, 48), deterministic=True),
}


@pytest.mark.parametrize("name", IN_TURN)
def test_blocks_add_to_dq_in_turn(name):
    """Whatever the order of threads and blocks: the same bits."""
    (call,) = list_of_calls(1, seed=11, build=IN_TURN[name], max_length=400, extreme=False)
    first = run(call, "bwd_06_specialize")
    for seed in (1, 2):
        with emulator.options(seed=seed, copies="late" if seed == 2 else "early"):
            assert same_bits(first, run(call, "bwd_06_specialize"))


def test_short_walks_of_many_blocks_add_in_turn(monkeypatch):
    """The first stores, the last makes dq: no zeros, no __close."""

    def closes(batch, length, heads_k=16, **options):
        q, k = (cuflash.spec((batch, length, heads, 128), "bfloat16") for heads in (16, heads_k))
        found = cuflash.explain(
            q, k, k, device="sm_90a", kernel="bwd_06_specialize", backward=True, **options
        )
        assert found.spills == 0
        return "pass_query_tiles__close" in {one.name for one in found.launches}

    assert not closes(32, 512) and not closes(32, 512, causal=True) and not closes(8, 2048)
    assert closes(4, 4096) and closes(1, 512) and closes(32, 512, window=(100, None))
    assert closes(32, 512, heads_k=4)
    monkeypatch.setattr(rows_hopper_backward, "MANY_BLOCKS", 0)
    for seed, head_dim, causal in [(0, 64, False), (1, 128, True), (2, 96, True)]:
        dout, q, k, v, *_ = draw((1, 200, 300, 3, 3, head_dim, head_dim), "bfloat16", {})
        with emulator.options(seed=seed):
            given, options = Build(dtype="bfloat16"), {"causal": causal}
            run(Call(q, k, v, dout=dout, dlse=None, options=options, build=given), "bwd_06_specialize")


def test_the_last_heads_are_walked_from_the_last_query_on(monkeypatch, tmp_path):
    """Sections of two heads: of nine the last four, with the longest walks first; one head is left over."""
    folder = tmp_path / "kernels"
    shutil.copytree(build.kernels_directory(), folder, ignore=shutil.ignore_patterns("measured"))
    header = folder / "lib" / "key_rows.cuh"
    text, n = re.subn(r"(section_tiles = ).*;", r"\g<1>6;", header.read_text())
    assert n == 1
    header.write_text(text)
    monkeypatch.setattr(rows_hopper_backward, "MANY_BLOCKS", 0)
    launch.forget()
    with build.sources_from(folder):
        for seed, more in enumerate([{}, {}, {"query_offset": 100}]):
            deterministic = seed == 1
            dout, q, k, v, *_ = draw((1, 260, 300, 9, 9, 8, 8), "bfloat16", {})
            given = Build(dtype="bfloat16", causal=True, deterministic=deterministic)
            options = {"causal": True, **more}
            call = Call(
                q, k, v, dout=dout, dlse=None, options=options, build=given, deterministic=deterministic
            )
            with emulator.options(seed=seed):
                run(call, "bwd_06_specialize")
    launch.forget()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("options", ["causal", "alibi", "mask", "softcap"])
def test_nan_reaches_what_a_small_weight_connects(row, options):
    """A weight far below 2^-133 is not a hidden one: a row of dO that is NaN makes dq and dk NaN."""
    dout, q, k, v, *_ = draw((1, 100, 150, 1, 1, 64, 64), "bfloat16", {})
    q[:, 40], k[:, ::2] = 3, -40
    dout[:, 40] = np.nan
    given = {
        "causal": {"causal": True},
        "alibi": {"causal": True, "alibi_slopes": np.full(1, 0.5, np.float32)},
        "mask": {"mask": np.arange(100)[:, None] * 0 + np.arange(150) % 3 > 0},
        "softcap": {"causal": True, "softcap": 500.0},
    }[options]
    if row == "bwd_05_wgmma" and options != "causal":
        return
    out, lse = cuflash.attention(q, k, v, return_lse=True, **given)
    found = cuflash.attention_backward(dout, q, k, v, out, lse, kernel=row, **given)
    exact = cuflash.reference.attention_backward(dout, q, k, v, out, lse, **given)
    for name in ("dq", "dk"):
        is_nan = np.isnan(getattr(exact, name).astype(np.float32))
        assert is_nan.any() and not is_nan.all(), name
        assert np.array_equal(is_nan, np.isnan(getattr(found, name).astype(np.float32))), name


@pytest.mark.parametrize("head_dim, length, heads", [(64, 700, 3), (96, 800, 5), (128, 600, 3)])
def test_tiles_that_are_left_over_are_walked_in_pieces(monkeypatch, head_dim, length, heads):
    """9 or 15 tiles of keys on 4 SMs, so 1 or 3 in pieces; their sums lie in dq, unless it has gaps."""
    monkeypatch.setattr(rows_hopper_backward, "ENOUGH_BLOCKS", 1)
    monkeypatch.setattr(rows_hopper_backward, "LONG_WALK", 3)
    shape = (1, length, 300, heads, heads, head_dim, head_dim)
    dout, q, k, v, out, lse = draw(shape, "bfloat16", {})
    given = {"kernel": "bwd_06_specialize"}
    (main,) = (
        one
        for one in cuflash.explain(q, k, v, device="emulated", backward=True, **given).launches
        if one.name == "bwd_06_specialize"
    )
    assert dict(main.params)["PIECES"] == rows_hopper_backward.PIECES
    for seed in range(2):
        with emulator.options(seed=seed, copies="late" if seed else "early"):
            run(Call(q, k, v, dout=dout, dlse=None, options={}, build=Build(dtype="bfloat16")), main.name)
    wide = np.full((*q.shape[:3], 2 * head_dim), 7, q.dtype)
    grads = cuflash.Gradients(wide[..., :head_dim], None, None, None, None, None)
    cuflash.attention_backward(dout, q, k, v, out, lse, grads=grads, **given)
    exact = cuflash.attention_backward(dout, q, k, v, out, lse)
    assert (wide[..., head_dim:] == 7).all()
    difference = abs(wide[..., :head_dim].astype(np.float32) - exact.dq.astype(np.float32)).max()
    assert difference < 0.02 * abs(exact.dq.astype(np.float32)).max()


def test_rows_past_an_end_may_hold_anything():
    """Packed sequences, NaN behind the last of them: each gets what it gets alone, and the rest zeros."""
    lengths = [0, 1, 128, 5, 129]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    n = cu[-1] + 9
    dout, q, k, v, *_ = (x[0] for x in draw((1, n, n, 2, 1, 64, 64), "bfloat16", {}))
    for x in (dout, q, k, v):
        x[cu[-1] :] = np.nan
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **packed)
    found = cuflash.attention_backward(dout, q, k, v, out, lse, kernel="bwd_06_specialize", **packed)
    for x in found[:3]:
        assert not x[cu[-1] :].any()
    for b in range(len(lengths)):
        rows = slice(cu[b], cu[b + 1])
        one = [x[None, rows] for x in (dout, q, k, v, out)]
        alone = cuflash.attention_backward(
            *one, lse[None, :, rows], kernel="bwd_06_specialize", causal=True, deterministic=True
        )
        for x, y in zip(found[:3], alone[:3], strict=True):
            x, y = x[rows].astype(np.float32), y[0].astype(np.float32)
            np.testing.assert_allclose(x, y, rtol=0.02, atol=0.02)


def test_few_blocks_share_the_heads_of_a_group():
    dout, q, k, v, *_ = draw((1, 100, 130, 8, 1, 64, 40), "bfloat16", {})
    found = cuflash.explain(q, k, v, kernel="bwd_06_specialize", backward=True)
    assert {"pass_convert__dk", "pass_convert__dv"} < {one.name for one in found.launches}
    run(Call(q, k, v, dout=dout, dlse=None, options={}, build=Build(dtype="bfloat16")), "bwd_06_specialize")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_tuned_tiles_do_not_spill(head_dim, dtype):
    q = cuflash.spec((8, 2048, 16, head_dim), dtype)
    plain = {"causal": False}, {"causal": True}, {"deterministic": True}
    for row, options in [("bwd_05_wgmma", {}), *(("bwd_06_specialize", options) for options in plain)]:
        found = cuflash.explain(q, q, q, device="sm_90a", kernel=row, backward=True, **options)
        assert found.spills <= found.tile.spills, (row, options)
        (built,) = build.compile_all([found.main.job])
        assert built.warnings == (), (row, options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("batch, deterministic", [(6, False), (6, True), (24, False)])
def test_ten_thousand_launches_give_the_same_bits(head_dim, batch, deterministic):
    """More tiles of keys than SMs: blocks ask for more.  dq has the same bits where sums have an order."""
    import cupy

    heads_k = 8 if batch == 24 else 4
    arrays = draw((batch, 300, 700, 8, heads_k, head_dim, head_dim), "bfloat16", {})
    dout, q, k, v, out, lse = (cupy.asarray(x) for x in arrays)
    options = {"causal": True, "kernel": "bwd_06_specialize", "deterministic": deterministic}
    first = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    again = cuflash.Gradients(*(None if x is None else cupy.empty_like(x) for x in first))
    workspace = cupy.empty(cuflash.explain(q, k, v, backward=True, **options).workspace_bytes, cupy.uint8)
    for _ in range(10_000):
        cuflash.attention_backward(dout, q, k, v, out, lse, grads=again, workspace=workspace, **options)
    same = [
        bool((x.view(cupy.uint16) == y.view(cupy.uint16)).all())
        for x, y in zip(first[:3], again[:3], strict=True)
    ]
    is_ordered = deterministic or batch == 24  # many blocks: they add in turn anyway
    assert same[1:] == [True, True] and (same[0] or not is_ordered)
    difference = abs(first.dq.astype(cupy.float32) - again.dq.astype(cupy.float32)).max()
    assert float(difference) < 0.01 * float(abs(first.dq.astype(cupy.float32)).max())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pieces_are_summed_in_one_order(head_dim):
    """More tiles than SMs, not twice as many: those left over are walked in pieces; dk and dv repeat."""
    import cupy

    heads = cupy.cuda.Device().attributes["MultiProcessorCount"] // 32 + 1
    arrays = draw((1, 4096, 4096, heads, heads, head_dim, head_dim), "bfloat16", {})
    dout, q, k, v, out, lse = (cupy.asarray(x) for x in arrays)
    first = cuflash.attention_backward(dout, q, k, v, out, lse, kernel="bwd_06_specialize")
    exact = cuflash.attention_backward(dout, q, k, v, out, lse, kernel="bwd_04_pipeline")
    for _ in range(300):
        again = cuflash.attention_backward(dout, q, k, v, out, lse, kernel="bwd_06_specialize")
    for name in ("dq", "dk", "dv"):
        one, other, right = (
            getattr(gradients, name).astype(cupy.float32) for gradients in (first, again, exact)
        )
        assert name == "dq" or bool((one == other).all()), name
        assert float(abs(one - right).max()) < 0.02 * float(abs(right).max()), name
