"""fwd_03_mma, fwd_04_swizzle and fwd_05_pipeline: results and traffic on a CPU, registers without a GPU."""

import re
import shutil

import numpy as np
import pytest
from close import Judge
from in_emulator import check_case, check_orders
from problems import Build, Call
from test_forward_kernels import draw, modelled, moved

import cuflash
from cuflash import build, checks, emulator, launch
from cuflash.arrays import numpy_dtype
from cuflash.cases import cases

ROWS = ("fwd_03_mma", "fwd_04_swizzle", "fwd_05_pipeline")
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
    for dtype in ("float16", "bfloat16", "float32") if row == "fwd_05_pipeline" else ("float16",):
        check_case(row, "forward", QUICK[name], dtype, may_refuse=row != "fwd_05_pipeline")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ALL)
def test_all_cases(name, dtype):
    expected = checks.Expected(ALL[name], dtype)
    for row in ROWS:
        check_orders(row, "forward", expected)


@pytest.mark.parametrize("row", ROWS)
def test_thread_orders_give_the_same_bits(row):
    arrays = draw((1, 150, 93, 2, 1, 64, 64), "bfloat16")
    first = cuflash.attention(*arrays, causal=True, kernel=row, out_dtype="float32")
    for seed in (1, 2, 3):
        with emulator.options(seed=seed):
            again = cuflash.attention(*arrays, causal=True, kernel=row, out_dtype="float32")
        assert np.array_equal(first, again) and np.isfinite(first).all()


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("row", ROWS)
def test_traffic_is_what_the_row_says(row, name):
    shape, options = TRAFFIC[name]
    arrays = draw(shape, "bfloat16")
    expected = modelled(row, arrays, **options)
    assert expected["k"][0] > 0 and moved(row, arrays, **options) == expected


def test_traffic_with_options():
    random = np.random.default_rng(1)
    arrays = draw((1, 150, 130, 2, 2, 64, 64), "float16")
    for options in (
        {"window": (20, 10)},
        {"bias": random.standard_normal((2, 150, 130)).astype(np.float16), "causal": True},
        {"mask": random.random((150, 130)) < 0.5},
        {"alibi_slopes": np.ones(2, np.float32), "sink": np.ones(2, np.float32)},
    ):
        assert moved("fwd_05_pipeline", arrays, **options) == modelled("fwd_05_pipeline", arrays, **options)


@pytest.mark.parametrize("row", ROWS)
def test_what_cannot_be_read_16_bytes_at_a_time_is_read_in_place(row):
    """Odd strides and addresses: the same bits as from arrays that lie well, and no copies."""
    wide = [np.zeros((*x.shape[:-1], 41), x.dtype) for x in draw((1, 70, 90, 2, 1, 40, 40), "float16")]
    wide = [x + np.random.default_rng(n).standard_normal(x.shape).astype(x.dtype) for n, x in enumerate(wide)]
    views = [x[..., 1:] for x in wide]
    assert all(view.strides[1] % 16 for view in views)
    assert cuflash.explain(*views, kernel=row).copies == ()
    found = cuflash.attention(*views, kernel=row, causal=True)
    assert np.array_equal(
        found, cuflash.attention(*map(np.ascontiguousarray, views), kernel=row, causal=True)
    )


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 40.0])
def test_scales_of_any_sign_and_size(scale):
    """A scale above 0 waits for the softmax, the others do not: the maximum would turn round."""
    arrays = draw((1, 70, 100, 1, 1, 32, 32), "bfloat16")
    options = {"causal": True, "scale": scale}
    judge = Judge(Call(*arrays, dout=arrays[0], dlse=None, options=options, build=Build(dtype="bfloat16")))
    judge.forward(*cuflash.attention(*arrays, kernel="fwd_05_pipeline", return_lse=True, **options))


@pytest.mark.parametrize("block", [(128, 64), (32, 16), (100, 48), (1, 1)])
def test_hidden_blocks_are_not_read(block):
    """K rows that are read = rows of the key tiles that hold a kept block, per query tile."""
    len_q, len_k = 260, 700
    arrays = draw((1, len_q, len_k, 1, 1, 64, 64), "float16")
    tile = cuflash.explain(*arrays, kernel="fwd_05_pipeline").tile
    span = tile.tile_kv * dict(tile.options).get("PARTS", 1)
    kept = np.zeros((-(-len_q // block[0]), -(-len_k // block[1])), bool)
    kept[:, :: max(1, 128 // block[1])] = np.arange(len(kept))[:, None] * block[0] < tile.tile_q
    kept[-1, -1] = True
    mask = cuflash.BlockMask.from_dense(kept, *block)
    elements = np.repeat(np.repeat(kept, block[0], 0), block[1], 1)[:len_q, :len_k]
    expected = 0
    for i0 in range(0, len_q, tile.tile_q):
        for j0 in range(0, len_k, span):
            part = elements[i0 : i0 + tile.tile_q, j0 : j0 + span]
            expected += part.any() * part.shape[1]
    assert moved("fwd_05_pipeline", arrays, block_mask=mask)["k"] == (expected * 64 * 2, 0)
    found = cuflash.attention(*arrays, block_mask=mask, kernel="fwd_05_pipeline", out_dtype="float32")
    wide = [x.astype(np.float32) for x in arrays]
    np.testing.assert_allclose(found, cuflash.reference.attention(*wide, mask=elements), atol=2e-3)


def test_packed_sequences_of_every_length():
    """Empty, single-row, exact, ragged sequences: as alone, bit for bit where the tile is the same one (short
    ones alone have another); rows past the last one are zero."""
    lengths_q, lengths_k = [0, 1, 128, 5, 0, 129, 1], [3, 0, 64, 70, 0, 1, 65]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]) for n in (lengths_q, lengths_k))
    q, k, v = (array[0] for array in draw((1, cu_q[-1] + 7, cu_k[-1] + 3, 2, 1, 32, 32), "bfloat16"))
    q[cu_q[-1] :], k[cu_k[-1] :], v[cu_k[-1] :] = np.nan, np.nan, np.nan
    options = {"causal": True, "kernel": "fwd_05_pipeline", "return_lse": True}
    out, lse = cuflash.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    assert not out[cu_q[-1] :].any() and np.isneginf(lse[:, cu_q[-1] :]).all()
    for b in range(len(lengths_q)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = cuflash.attention(q[None, rows], k[None, keys], v[None, keys], **options)
        if lengths_q[b] > 64:
            assert np.array_equal(out[rows], alone[0][0]) and np.array_equal(lse[:, rows], alone[1][0])
        np.testing.assert_allclose(*(x.astype(np.float32) for x in (out[rows], alone[0][0])), atol=0.02)
        np.testing.assert_allclose(lse[:, rows], alone[1][0], atol=1e-5)


def resources(row, arch, head_dim, dtype="bfloat16", length=256, **options):
    q = cuflash.spec((1, length, 4, head_dim), dtype)
    found = cuflash.explain(q, q, q, causal=True, device=arch, kernel=row, **options)
    return found, found.resources[row]


ARCHS = ["sm_80", "sm_89", "sm_90", "sm_120", pytest.param("sm_86", marks=pytest.mark.full)]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("arch", ARCHS)
def test_tiles_of_the_pipeline_do_not_spill(arch, head_dim):
    for length in (64, 256, 8192) if head_dim in (64, 256) else (256,):
        found, used = resources("fwd_05_pipeline", arch, head_dim, length=length)
        assert used.spill_stores + used.spill_loads == 0, found.tile


def built():
    """The table of the header: (arch, keys or float32), head_dim -> registers, KB of shared memory."""
    head = (build.kernels_directory() / "fwd_05_pipeline.cu").read_text().split("#include")[0]
    rows = re.findall(r"^// +(sm_\d+), (\d+|float32) +(.*)$", head, re.M)
    assert len(rows) == 6
    return [(arch, keys, [int(x) for x in line.split()]) for arch, keys, line in rows]


@pytest.mark.parametrize("arch, keys, numbers", built())
def test_registers_and_bytes_are_those_of_the_header(arch, keys, numbers):
    """Exactly with the compiler that it names; another may take a few registers more, and none spills."""
    known = build.nvrtc_version() == (12, 9)
    for n, head_dim in enumerate((64, 96, 128, 192, 256)):
        dtype, length = ("float32", 4096) if keys == "float32" else ("bfloat16", int(keys))
        found, used = resources("fwd_05_pipeline", arch, head_dim, dtype, length)
        registers, kilobytes = numbers[2 * n : 2 * n + 2]
        assert used.registers == registers if known else used.registers <= 255
        assert found.smem_bytes // 1024 == kilobytes
        assert used.spill_stores + used.spill_loads <= found.tile.spills


def first_rungs():
    """The tables of the first rungs: row, arch, dtype, registers, KB of shared memory and bytes of spills."""
    cases = []
    for row in ("fwd_03_mma", "fwd_04_swizzle", "bwd_03_mma"):
        head = (build.kernels_directory() / f"{row}.cu").read_text().split("#include")[0]
        lines = re.findall(r"^// +(sm_\d+), (\w+) +([\d ]+)$", head, re.M)
        assert len(lines) == (3 if row == "fwd_04_swizzle" else 4)
        for arch, dtype, numbers in lines:
            marks = pytest.mark.full if arch == "sm_120" else ()
            cases.append(pytest.param(row, arch, dtype, [int(x) for x in numbers.split()], marks=marks))
    return cases


@pytest.mark.parametrize("row, arch, dtype, numbers", first_rungs())
def test_the_first_rungs_take_what_their_headers_say(row, arch, dtype, numbers):
    """Exactly with the compiler that is named; another may take a few registers more."""
    known = build.nvrtc_version() == (12, 9)
    for n, head_dim in enumerate((64, 128, 256)):
        q = cuflash.spec((1, 256, 4, head_dim), dtype)
        found = cuflash.explain(q, q, q, causal=True, device=arch, kernel=row, backward=row.startswith("bwd"))
        used, (registers, kilobytes, spills) = found.resources[row], numbers[3 * n : 3 * n + 3]
        assert found.smem_bytes // 1024 == kilobytes
        if known:
            assert (used.registers, used.spill_stores + used.spill_loads) == (registers, spills)


@pytest.mark.parametrize("arch, head_dim", [("sm_80", 128), ("sm_89", 192), ("sm_90", 64), ("sm_90", 256)])
def test_floats_on_tensor_cores_spill_what_their_row_says(arch, head_dim):
    for precision in ("tf32", None):
        found, used = resources("fwd_05_pipeline", arch, head_dim, "float32", precision=precision)
        spills = used.spill_stores + used.spill_loads
        assert spills <= (found.tile.spills if precision is None else 0), found.tile
        assert (precision is None) == ("fwd_05_pipeline__careful" in found.resources)


# head_dim, head_dim_v, len_q, len_k
FLOATS = ((64, 64, 130, 150), (40, 72, 70, 93), (256, 16, 33, 41))


@pytest.mark.parametrize("precision", ["tf32", None])
@pytest.mark.parametrize("sizes", FLOATS)
def test_floats_as_one_and_as_three_products(sizes, precision):
    """Within the rule of float32 (of TF32), and from views that cp.async cannot read the same bits."""
    dim, dim_v, n, m = sizes
    arrays = [x.astype(np.float32) for x in draw((1, n, m, 2, 1, dim, dim_v), "float64")]
    options = {"causal": True} | ({"precision": precision} if precision else {})
    judge = Judge(Call(*arrays, dout=arrays[0], dlse=None, options=options, build=Build(dtype="float32")))
    judge.forward(*cuflash.attention(*arrays, kernel="fwd_05_pipeline", return_lse=True, **options))
    odd = [np.concatenate([x[..., :1], x], -1)[..., 1:] for x in arrays]
    found = cuflash.attention(*odd, kernel="fwd_05_pipeline", **options)
    assert np.array_equal(found, cuflash.attention(*arrays, kernel="fwd_05_pipeline", **options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_alone_of_scores_beyond_any_fused_product(dtype):
    """Half an ulp of such a maximum, in an exponent, leaves a row nothing, or too much: either is noticed."""
    rng = np.random.default_rng(1)
    for _ in range(8):  # half of the maxima are rounded up
        q, k, v = (rng.uniform(-1, 1, (1, n, 1, 64)) for n in (1, 70, 70))
        q, k, v = (1e10 * q).astype(dtype), (1e10 * k).astype(dtype), v.astype(dtype)
        out, lse = cuflash.attention(q, k, v, kernel="fwd_05_pipeline", return_lse=True)
        expected, expected_lse = cuflash.reference.attention(q, k, v, return_lse=True)
        np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=0.01)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


ODD_NUMBERS = {
    "+inf in k": ("k", (0, 30, 0, 5), np.inf),
    "-inf in many rows of k": ("k", (0, slice(None, None, 7), 0, 9), -np.inf),
    "nan in k": ("k", (0, 30, 0, 5), np.nan),
    "inf in v": ("v", (0, 40, 0, 3), np.inf),
    "nan in v": ("v", (0, 40, 0, 3), np.nan),
    "inf in q": ("q", (0, 3, 1, 7), np.inf),
    "the largest numbers in v": ("v", (0, 60, 0), 3.4e38),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ODD_NUMBERS)
def test_infinities_pass_through_three_products(name, causal):
    """high + low of an infinity is infinity and NaN: such blocks run again, with care."""
    which, where, value = ODD_NUMBERS[name]
    q, k, v = (x.astype(np.float32) for x in draw((1, 70, 100, 2, 1, 64, 64), "float64"))
    q = np.abs(q)  # so that -inf in k hides a key from every row,
    k[0, 60] = -2  # and this one gets weights that leave room for the largest numbers
    {"q": q, "k": k, "v": v}[which][where] = value
    options = {"causal": causal}
    judge = Judge(Call(q, k, v, dout=q, dlse=None, options=options, build=Build(dtype="float32")))
    with np.errstate(all="ignore"):
        judge.forward(*cuflash.attention(q, k, v, kernel="fwd_05_pipeline", return_lse=True, **options))


def test_floats_are_chosen_for_tensor_cores_and_the_plan_says_how():
    q = cuflash.spec((2, 300, 4, 64), "float32")
    assert cuflash.explain(q, q, q, device="sm_80").kernel == "fwd_05_pipeline"
    assert cuflash.explain(q, q, q, device="sm_75").kernel == "fwd_02_tiled"
    assert "three TF32 products" in str(cuflash.explain(q, q, q, device="sm_80"))
    assert "one TF32 product" in str(cuflash.explain(q, q, q, device="sm_80", precision="tf32"))


def test_sm_75_takes_float16_and_says_so_of_bfloat16():
    for head_dim, spills in ((64, 0), (128, 0), (256, 500)):  # what the header says
        found, used = resources("fwd_03_mma", "sm_75", head_dim, "float16")
        assert used.spill_stores + used.spill_loads <= spills and found.smem_bytes <= 64 * 1024
    with pytest.raises(cuflash.CuflashError, match="needs sm_80 for bfloat16, this device is sm_75"):
        resources("fwd_03_mma", "sm_75", 64)


STEPS_OF_8 = """  const u32 first[2] = {a[0], a[1]}, second[2] = {a[2], a[3]};
  emulated::multiply_fragments(emulated::Mma::f16_k8, d, first, &b0, here);
  emulated::multiply_fragments(emulated::Mma::f16_k8, d, second, &b1, here);
"""


@pytest.mark.parametrize("size", [64, 256])
def test_steps_of_8_as_on_sm_75(tmp_path, size):
    """fwd_03_mma with every m16n8k16 as two m16n8k8, which is what lib/mma.cuh makes of it for sm_75."""
    folder = tmp_path / "kernels"
    shutil.copytree(build.kernels_directory(), folder, ignore=shutil.ignore_patterns("measured"))
    path = folder / "lib" / "mma.cuh"
    emulated, device = path.read_text().split("#else", 1)
    emulated, n = re.subn(r"(mma_k16\([^{]*\{\n).*?(^}\n)", rf"\1{STEPS_OF_8}\2", emulated, flags=re.M | re.S)
    assert n == 1
    path.write_text(f"{emulated}#else{device}")
    arrays = draw((1, 70, 90, 2, 1, size, size), "float16")
    options = {"causal": True}
    judge = Judge(Call(*arrays, dout=arrays[0], dlse=None, options=options, build=Build(dtype="float16")))
    with build.sources_from(folder):
        launch.forget()
        judge.forward(*cuflash.attention(*arrays, kernel="fwd_03_mma", return_lse=True, **options))
    launch.forget()


# Later scores over the first ones: as weights they exceed float16, then bfloat16 and float32.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("growth", [8.0, 60.0, 900.0])
def test_scores_that_grow_beyond_the_first_maximum(dtype, growth):
    """Nobody looks for a maximum after the first keys; where weights overflow the block starts again."""
    arrays = draw((1, 140, 400, 2, 1, 64, 64), "float64")
    q, k, v = (x.astype(np.float32) for x in arrays)
    q[...] = np.abs(q)
    k[:, 150:] = np.abs(k[:, 150:]) * growth / 50  # scores of about 0.1 growth, then twice that
    k[:, 300:] *= 2
    arrays = [x.astype(numpy_dtype(dtype)) for x in (q, k, v)]
    judge = Judge(Call(*arrays, dout=arrays[0], dlse=None, options={}, build=Build(dtype=dtype)))
    judge.forward(*cuflash.attention(*arrays, kernel="fwd_05_pipeline", return_lse=True))


TOGETHER = {
    "decode": ((2, 1, 300, 4, 2, 64, 64), {"causal": True}),
    "one key head": ((1, 1, 130, 7, 1, 128, 128), {}),
    "five queries": ((2, 5, 200, 6, 2, 64, 40), {"causal": True, "out_dtype": "float32"}),
    "two tiles": ((1, 17, 90, 8, 2, 96, 96), {"causal": True}),
    "window and shares": ((1, 3, 2100, 4, 1, 64, 64), {"window": (1500, 0), "query_offset": 1900}),
    "lengths": ((3, 4, 150, 4, 2, 40, 72), {"query_lengths": [4, 0, 3], "key_lengths": [150, 20, 0]}),
    "shares and lengths": ((2, 2, 1100, 8, 2, 256, 256), {"causal": True, "key_lengths": [1100, 3]}),
    "negative scale": ((1, 2, 200, 4, 1, 64, 64), {"scale": -0.2}),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_heads_of_a_group_share_a_tile(name):
    """Where queries are few: K and V are read once for the heads of a group, with the same results."""
    shape, options = TOGETHER[name]
    arrays = draw(shape, "bfloat16")
    sink = np.random.default_rng(3).standard_normal(shape[3]).astype(np.float32)
    for more in ({}, {"sink": sink}):
        options = options | more
        plan = cuflash.explain(*arrays, kernel="fwd_05_pipeline", **options)
        assert dict(plan.main.params)["TOGETHER"] == shape[3] // shape[4]
        judge = Judge(
            Call(*arrays, dout=arrays[0], dlse=None, options=options, build=Build(dtype="bfloat16"))
        )
        judge.forward(*cuflash.attention(*arrays, kernel="fwd_05_pipeline", return_lse=True, **options))
    odd = [np.concatenate([x[..., :1], x], -1)[..., 1:] for x in arrays]
    found = cuflash.attention(*odd, kernel="fwd_05_pipeline", **options)
    assert np.array_equal(found, cuflash.attention(*arrays, kernel="fwd_05_pipeline", **options))


def test_keys_are_read_once_for_a_group():
    arrays = draw((2, 1, 300, 8, 2, 64, 64), "bfloat16")
    once = {name: x.nbytes for name, x in zip("kv", arrays[1:], strict=True)}
    read = moved("fwd_05_pipeline", arrays)
    assert {name: read[name][0] for name in "kv"} == once
    alone = cuflash.explain(*arrays, kernel="fwd_05_pipeline", softcap=9.0)
    assert "TOGETHER" not in dict(alone.main.params)


SHARED_KEYS = {
    "decode": ((2, 1, 1100, 4, 2, 64, 64), {}),
    "causal": ((1, 70, 1300, 2, 1, 64, 40), {"causal": True}),
    "parts": ((1, 130, 1100, 1, 1, 128, 128), {"causal": True}),
    "window": ((1, 9, 2100, 1, 1, 32, 32), {"window": (1500, 0), "query_offset": 1900}),
    "nothing seen": ((2, 6, 1100, 1, 1, 32, 32), {"key_lengths": [0, 1050]}),
    "all else": ((1, 20, 1100, 2, 1, 64, 64), {"dropout": (0.2, 5), "softcap": 20.0, "out_dtype": "float32"}),
}


CALLS = [*((name, "bfloat16") for name in SHARED_KEYS), ("parts", "float32"), ("all else", "float32")]


@pytest.mark.parametrize("name, dtype", CALLS)
def test_blocks_share_keys_where_query_tiles_are_few(name, dtype):
    shape, options = SHARED_KEYS[name]
    arrays = draw(shape, "bfloat16")
    if dtype == "float32":
        arrays = [x.astype(np.float32) for x in arrays]
    random = np.random.default_rng(3)
    options = dict(options, sink=random.standard_normal(shape[3]).astype(np.float32))
    if name == "all else":
        options["mask"] = random.random((shape[1], shape[2])) < 0.3
        options["key_lengths"] = [700]
    found = cuflash.explain(*arrays, kernel="fwd_05_pipeline", **options)
    careful = ["fwd_05_pipeline__careful"] if dtype == "float32" else []
    assert [one.name for one in found.launches] == ["fwd_05_pipeline", *careful, "pass_merge"]
    judge = Judge(Call(*arrays, dout=arrays[0], dlse=None, options=options, build=Build(dtype=dtype)))
    judge.forward(*cuflash.attention(*arrays, kernel="fwd_05_pipeline", return_lse=True, **options))
