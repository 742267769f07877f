"""bwd_03_mma and bwd_04_pipeline: results, traffic and order on a CPU, registers without a GPU."""

import re

import numpy as np
import pytest
from close import Judge
from in_emulator import check_case, check_orders
from problems import Build, Call, list_of_calls
from test_backward_kernels import draw, modelled, moved, run, same_bits

import cuflash
from cuflash import build, checks, emulator, rows, rows_mma_backward
from cuflash.cases import cases
from cuflash.row import CLASSES

ROWS = ("bwd_03_mma", "bwd_04_pipeline")
QUICK = {case.name: case for case in cases(quick=True)}
ALL = {case.name: case for case in cases()}
# (batch, len_q, len_k, heads, heads_k, head_dim, head_dim_v), options
TRAFFIC = {
    "grouped": ((2, 70, 93, 4, 2, 64, 64), {}),
    "causal": ((1, 130, 150, 2, 1, 128, 128), {"causal": True}),
    "few keys": ((1, 193, 70, 2, 2, 40, 200), {"causal": True, "query_offset": 5, "out_dtype": "float32"}),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", QUICK)
def test_quick_cases(row, name):
    for dtype in ("float16", "bfloat16", "float32") if row == "bwd_04_pipeline" else ("float16",):
        check_case(row, "backward", QUICK[name], dtype, may_refuse=row != "bwd_04_pipeline")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ALL)
def test_all_cases(name, dtype):
    expected = checks.Expected(ALL[name], dtype)
    for row in ROWS if dtype != "float32" else ROWS[1:]:
        check_orders(row, "backward", expected)


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("row", ROWS)
def test_traffic_is_what_the_row_says(row, name):
    shape, options = TRAFFIC[name]
    arrays = draw(shape, "bfloat16", options)
    expected = modelled(row, arrays, **options)
    assert expected["k"][0] > 0 and moved(row, arrays, **options) == expected


@pytest.mark.parametrize("head_dim", [16, 32, 96, 192, 256])
def test_every_class_of_head_dim(head_dim):
    """Each cuts its products among the warps in another way."""
    for row, causal in zip(ROWS, (False, True), strict=True):
        build = Build(dtype="float16", head_dim=head_dim, causal=causal)
        (call,) = list_of_calls(1, seed=head_dim, build=build, max_length=150, extreme=False)
        run(call, row)


IN_TURN = {
    "window": Build(dtype="bfloat16", causal=True, window=True, deterministic=True),
    "packed": Build(dtype="float16", sequences="packed", causal=True, deterministic=True),
    "block mask": Build(dtype="bfloat16", block_mask=(32, 64), deterministic=True),
    "options": Build(
        dtype="float16", bias="float32", alibi=True, sink=True, dropout=True, deterministic=True, causal=True
    ),
}


@pytest.mark.parametrize("name", IN_TURN)
def test_blocks_add_to_dq_in_turn(name):
    """Whatever the order of threads and blocks: the same bits."""
    (call,) = list_of_calls(1, seed=11, build=IN_TURN[name], max_length=300, extreme=False)
    first = run(call, "bwd_04_pipeline")
    for seed in (1, 2):
        with emulator.options(seed=seed):
            assert same_bits(first, run(call, "bwd_04_pipeline"))


def test_odd_strides_and_dtypes_are_read_in_place():
    """Rows that no 16-byte copy can read, dout in float32: judged as any other call, and no copies."""
    random = np.random.default_rng(5)
    wide = [random.standard_normal((1, n, 2, 41)).astype(np.float16) for n in (90, 130, 130)]
    q, k, v = (x[..., 1:] for x in wide)
    dout = random.standard_normal((1, 90, 2, 40)).astype(np.float32)
    for row in ROWS:
        options = {"causal": True, "out_dtype": "float32"}
        assert cuflash.explain(q, k, v, kernel=row, backward=True, **options).copies == ()
        run(Call(q, k, v, dout=dout, dlse=None, options=options, build=Build(dtype="float16")), row)


def test_few_blocks_share_the_heads_of_a_group():
    shape = 1, 100, 130, 8, 1, 64, 40
    dout, q, k, v, *_ = draw(shape, "bfloat16", {})
    found = cuflash.explain(q, k, v, kernel="bwd_04_pipeline", backward=True)
    assert {"pass_convert__dk", "pass_convert__dv"} < {launch.name for launch in found.launches}
    run(Call(q, k, v, dout=dout, dlse=None, options={}, build=Build(dtype="bfloat16")), "bwd_04_pipeline")


BIAS_SHAPES = [(1, 4, 70, 50), (2, 1, 1, 50), (1, 4, 1, 50), (2, 4, 70, 1), (1, 1, 70, 50), (2, 4, 70, 50)]


@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_dbias_of_broadcast_shapes(shape):
    random = np.random.default_rng(3)
    q, dout = random.standard_normal((2, 2, 70, 4, 64)).astype(np.float16)
    k, v = random.standard_normal((2, 2, 50, 2, 64)).astype(np.float16)
    options = {"bias": random.standard_normal(shape).astype(np.float32), "causal": True}
    call = Call(q, k, v, dout=dout, dlse=None, options=options, build=Build(dtype="float16"))
    judge = Judge(call)
    gradients = run(call, "bwd_04_pipeline", judge)
    assert gradients.dbias.shape == shape


def test_hidden_blocks_are_not_read():
    """Q is read for query tiles that hold a kept block alone, per key tile."""
    arrays = draw((1, 512, 512, 1, 1, 64, 64), "float16", {})
    tile = cuflash.explain(*arrays[1:4], kernel="bwd_04_pipeline", backward=True).tile
    for left in (128, 512):
        mask = cuflash.BlockMask.window(512, 512, left, 0, 128, 128)
        elements = np.repeat(np.repeat(mask.dense()[0, 0], 128, 0), 128, 1)
        tiles = elements.reshape(512 // tile.tile_q, tile.tile_q, 512 // tile.tile_kv, tile.tile_kv)
        kept = tiles.any((1, 3))
        read = moved("bwd_04_pipeline", arrays, block_mask=mask)["q"][0]
        assert read == kept.sum() * tile.tile_q * 64 * 2


@pytest.mark.parametrize("name", ROWS)
def test_every_tile_can_be_shared_among_its_warps(name):
    """Every product of every size a tile may be asked for has an even cut: others do not compile."""
    (row,) = (row for row in rows.BACKWARD if row.name == name)
    for tile in row.tiles:
        sizes = {tile.head_dim(size) for size in CLASSES if size <= tile.up_to}
        for dim in sizes:
            for dim_v in sizes:
                p = {"TILE_Q": tile.tile_q, "TILE_KV": tile.tile_kv, "N_WARPS": tile.warps}
                p |= {"HEAD_DIM": dim, "HEAD_DIM_V": dim_v, "DTYPE": 1 if 2 in tile.itemsizes else 2}
                q = tile.tile_q if row.name == "bwd_03_mma" else rows_mma_backward._step_q(p)
                of_keys = ((tile.tile_kv, cols) for cols in (q, dim, dim_v))
                cuts = [(shape, tile.warps) for shape in (*of_keys, (tile.tile_q, dim))]
                if row.name == "bwd_04_pipeline":  # halves of the warps, which trade or make dK alone
                    cuts += [((tile.tile_kv, cols), tile.warps // 2) for cols in (q, dim)]
                for shape, warps in cuts:
                    across = rows_mma_backward._warps_across(*shape, warps)
                    down = warps // across
                    assert shape[0] % (16 * down) == 0, (tile, shape)
                    assert shape[1] % (16 * across) == 0 or shape[1] == 8 * across, (tile, shape)


@pytest.mark.parametrize("bad", ["q", "k", "v", "dout"])
def test_floats_that_are_not_finite_take_the_careful_kernel(bad):
    """Infinity as the reference gives it: it must not meet the zeros of other numbers' second parts."""
    random = np.random.default_rng(2)
    arrays = {name: random.standard_normal((1, 70, 2, 32), np.float32) for name in ("q", "k", "v", "dout")}
    arrays["q"] = np.abs(arrays["q"])
    arrays[bad][0, 40] = -np.inf
    dout = arrays.pop("dout")
    call = Call(**arrays, dout=dout, dlse=None, options={"causal": True}, build=Build(dtype="float32"))
    run(call, "bwd_04_pipeline")


def test_tf32_is_one_product():
    """Nearer to the truth than bfloat16, further from it than three products."""
    dout, q, k, v, *_ = draw((1, 200, 150, 2, 2, 64, 64), "float32", {})
    out, lse = cuflash.reference.attention(q, k, v, return_lse=True)
    saved = out.astype(np.float32), lse.astype(np.float32)
    exact = cuflash.reference.attention_backward(dout, q, k, v, *saved)
    far = {}
    for precision in ("tf32", "float32"):
        options = {"precision": precision, "kernel": "bwd_04_pipeline"}
        got = cuflash.attention_backward(dout, q, k, v, *saved, **options)
        pairs = zip(got[:3], exact[:3], strict=True)
        far[precision] = max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)
    assert 1e-5 < far["tf32"] < 2e-3 and far["float32"] < 2e-6


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_one_product_keeps_nan(bits):
    """Whatever its bits; the first are those that a GPU makes."""
    dout, q, k, v, *_ = draw((1, 70, 40, 1, 1, 64, 64), "float32", {})
    out, lse = cuflash.reference.attention(q, k, v, return_lse=True)
    dout[0, 3, 0, 5] = np.array(bits, np.uint32).view(np.float32)
    saved = out.astype(np.float32), lse.astype(np.float32)
    dq, dk, dv, *_ = cuflash.attention_backward(
        dout, q, k, v, *saved, precision="tf32", kernel="bwd_04_pipeline"
    )
    assert np.isnan(dq[0, 3]).all() and np.isnan(dk).all()
    assert np.array_equal(np.isnan(dv), np.broadcast_to(np.arange(64) == 5, dv.shape))


def resources(row, arch, head_dim, dtype="bfloat16", **options):
    q = cuflash.spec((1, 256, 4, head_dim), dtype)
    found = cuflash.explain(q, q, q, backward=True, device=arch, kernel=row, **options)
    return found, found.resources[row]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", pytest.param("sm_86", marks=pytest.mark.full)])
def test_tiles_of_the_pipeline_do_not_spill(arch, head_dim):
    for causal in (False, True):
        found, used = resources("bwd_04_pipeline", arch, head_dim, causal=causal)
        assert used.spill_stores + used.spill_loads == 0, found.tile


def built():
    """The table of the header: arch, then registers and KB of shared memory for each head_dim."""
    head = (build.kernels_directory() / "bwd_04_pipeline.cu").read_text().split("#include")[0]
    rows = re.findall(r"^// +(sm_\d+) +([\d ]+)$", head, re.M)
    assert len(rows) == 4
    return [(arch, [int(x) for x in line.split()]) for arch, line in rows]


@pytest.mark.parametrize("arch, numbers", built())
def test_registers_and_bytes_are_those_of_the_header(arch, numbers):
    """Exactly with the compiler that it names; another may take a few registers more."""
    known = build.nvrtc_version() == (12, 9)
    for n, head_dim in enumerate((64, 96, 128, 192, 256)):
        found, used = resources("bwd_04_pipeline", arch, head_dim, causal=True)
        registers, kilobytes = numbers[2 * n : 2 * n + 2]
        assert used.registers == registers if known else used.registers <= 255
        assert found.smem_bytes // 1024 == kilobytes
        assert used.spill_stores + used.spill_loads <= found.tile.spills


def in_full(value):
    return pytest.param(value, marks=pytest.mark.full)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("head_dim", [64, 256, *map(in_full, (96, 128, 192))])
def test_tiles_of_float32_do_not_spill(head_dim, precision):
    found, used = resources("bwd_04_pipeline", "sm_90", head_dim, "float32", precision=precision)
    assert used.spill_stores + used.spill_loads == 0, found.tile


def test_sm_75_takes_float16_and_says_so_of_bfloat16():
    for head_dim, spills in ((64, 0), (128, 500), (256, 500)):  # what the header says
        found, used = resources("bwd_03_mma", "sm_75", head_dim, "float16")
        assert used.spill_stores + used.spill_loads <= spills and found.smem_bytes <= 64 * 1024
    with pytest.raises(cuflash.CuflashError, match="needs sm_80 for bfloat16, this device is sm_75"):
        resources("bwd_03_mma", "sm_75", 64)
