"""fwd_10_persistent: the whole contract on a CPU, maxima that move, work beyond the grid; builds."""

import ml_dtypes
import numpy as np
import pytest
from close import Judge
from problems import Build, Call
from test_forward_kernels import draw, modelled, moved

import cuflash
from cuflash import CuflashError, build, checks, emulator
from cuflash.cases import cases
from cuflash.copies import BY_TMA

ROW = "fwd_10_persistent"
QUICK = {case.name: case for case in cases(quick=True)}
ALL = {case.name: case for case in cases()}
SIZES = [(64, 64), (40, 200), (96, 96), (192, 128), (256, 256), (256, 64), (64, 96)]
TRAFFIC = {
    "grouped": ((2, 70, 300, 4, 2, 64, 64), {}),
    "causal": ((1, 290, 330, 2, 1, 128, 128), {"causal": True}),
    "few keys": ((1, 193, 170, 2, 2, 40, 104), {"causal": True, "query_offset": 5, "out_dtype": "float32"}),
}


def judge(arrays, dtype, **options):
    call = Call(*arrays, dout=arrays[0], dlse=None, options=options, build=Build(dtype=dtype))
    Judge(call).forward(*cuflash.attention(*arrays, kernel=ROW, return_lse=True, **options))


@pytest.mark.parametrize("name", QUICK)
def test_quick_cases(name):
    for dtype in ("float16", "bfloat16"):
        line = checks.one(ROW, "forward", checks.Expected(QUICK[name], dtype), np)
        if name == "strides":  # TMA walks no axis backwards, and the copy is dear
            assert line.status == "refused" and BY_TMA in line.message
        else:
            assert line.status == "passed", line.message


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_all_cases(name, dtype):
    expected = checks.Expected(ALL[name], dtype)
    for seed in range(4):
        with emulator.options(seed=seed):
            line = checks.one(ROW, "forward", expected, np)
        assert line.status != "failed", f"seed {seed}: {line.message}"


@pytest.mark.parametrize("sizes", SIZES)
def test_head_dims_equal_or_not(sizes):
    judge(draw((1, 200, 330, 2, 1, *sizes), "bfloat16"), "bfloat16", causal=True)
    judge(draw((2, 70, 130, 2, 2, *sizes), "float16"), "float16", out_dtype="float32")


@pytest.mark.parametrize("grows", [3.0, 300.0])
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_maxima_that_grow_from_tile_to_tile(grows, step, dtype):
    """Keys whose size grows along the walk, or against it: weights under the first maximum overflow."""
    q, k, v = draw((1, 130, 700, 1, 1, 64, 64), dtype)
    size = 1 + grows * np.arange(700)[::step] / 700
    k = (k.astype(np.float64) * size[None, :, None, None]).astype(k.dtype)
    for causal in (False, True):
        judge((q, k, v), dtype, causal=causal)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("middle", [-300.0, -38.0, -9.0, 30.0, 300.0])
def test_scores_far_from_0(middle, dtype):
    """Weights of a first tile that vanish, nearly vanish or overflow under a maximum of 0; in some rows."""
    q, k, v = draw((1, 130, 300, 1, 1, 64, 64), dtype)
    q[..., 0], k[..., 0] = 16, middle / 2  # scores of middle
    judge((q, k, v), dtype)
    q[0, ::3, 0, 0] = 0
    judge((q, k, v), dtype, causal=True, query_offset=170)
    judge((q, k, v), dtype, window=(200, 100))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_groups_that_multiply_in_turn(dtype):
    """Long, causal, head_dim 128: groups of equal walks, of unequal ones, without rows, without keys."""
    q = cuflash.spec((1, 900, 1, 128), dtype)
    assert dict(cuflash.explain(q, q, q, causal=True, device="sm_90a", kernel=ROW).main.params)["PLANS"] == 0
    mask = cuflash.BlockMask.from_dense(np.random.default_rng(2).random((3, 9)) < 0.4, 100, 100)
    for seed in (0, 1):
        with emulator.options(seed=seed):
            judge(draw((1, 130, 900, 2, 1, 128, 128), dtype), dtype, causal=True, window=(300, 0))
            judge(draw((1, 270, 800, 1, 1, 128, 128), dtype), dtype, causal=True, query_offset=-150)
            arrays = draw((1, 270, 900, 1, 1, 128, 128), dtype)
            judge(arrays, dtype, causal=True, query_offset=600, block_mask=mask)


@pytest.mark.parametrize("size", [1e4, np.inf, np.nan])
def test_one_key_that_is_far_from_the_rest(size):
    q, k, v = draw((1, 70, 500, 1, 1, 64, 64), "bfloat16")
    k[0, 17, 0, 3] = size
    judge((q, k, v), "bfloat16")


def test_thread_orders_give_the_same_bits():
    for shape in ((1, 300, 400, 2, 1, 64, 64), (2, 260, 330, 1, 1, 128, 128)):
        arrays = draw(shape, "bfloat16")
        options = {"causal": True, "out_dtype": "float32", "kernel": ROW}
        first = cuflash.attention(*arrays, **options)
        assert np.isfinite(first).all()
        for seed in range(4):
            with emulator.options(seed=seed):
                assert np.array_equal(first, cuflash.attention(*arrays, **options))


def test_blocks_walk_several_tiles():
    """More tiles than blocks, tiles of no rows, tiles of no keys: every row is written once."""
    arrays = draw((70, 130, 40, 2, 1, 64, 64), "float16")
    found = cuflash.explain(*arrays, kernel=ROW)
    assert found.grid[0] <= 4  # as many as the emulator has SMs
    assert dict(found.main.params)["PERSISTENT"] == 2
    judge(arrays, "float16", causal=True, query_offset=-100)
    # a quarter of a head's tiles comes after those of all heads, or none where there are more keys
    judge(draw((2, 600, 600, 4, 2, 64, 64), "float16"), "float16", causal=True)
    judge(draw((2, 600, 650, 4, 2, 64, 64), "float16"), "float16", causal=True)
    lengths = np.random.default_rng(1).integers(0, 60, 60)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    q, k, v = (array[0] for array in draw((1, cu[-1] + 9, cu[-1] + 9, 3, 1, 64, 64), "bfloat16"))
    for array in (q, k, v):
        array[cu[-1] :] = np.nan
    judge((q, k, v), "bfloat16", cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)


def test_nothing_leaks_past_a_length():
    """NaN behind every sequence's keys and queries, in the tile that holds its end."""
    q, k, v = draw((3, 200, 300, 1, 1, 128, 128), "bfloat16")
    lengths_q, lengths_k = [200, 0, 77], [1, 299, 130]
    for b in range(3):
        q[b, lengths_q[b] :], k[b, lengths_k[b] :], v[b, lengths_k[b] :] = np.nan, np.nan, np.nan
    judge((q, k, v), "bfloat16", query_lengths=lengths_q, key_lengths=lengths_k)


@pytest.mark.parametrize("block", [(128, 128), (128, 64), (32, 16), (100, 48), (1, 1)])
def test_hidden_blocks_are_not_read(block):
    """K rows that are read = rows of the key tiles that hold a kept block, per query tile."""
    len_q, len_k = 260, 700
    arrays = draw((1, len_q, len_k, 1, 1, 64, 64), "float16")
    kept = np.random.default_rng(5).random((-(-len_q // block[0]), -(-len_k // block[1]))) < 0.02
    kept[0], kept[-1, -1] = False, True
    mask = cuflash.BlockMask.from_dense(kept, *block)
    tile = cuflash.explain(*arrays, kernel=ROW, block_mask=mask).tile
    elements = np.repeat(np.repeat(kept, block[0], 0), block[1], 1)[:len_q, :len_k]
    expected = 0
    for i0 in range(0, len_q, tile.tile_q):
        for j0 in range(0, len_k, tile.tile_kv):
            part = elements[i0 : i0 + tile.tile_q, j0 : j0 + tile.tile_kv]
            expected += part.any() * part.shape[1]
    assert moved(ROW, arrays, block_mask=mask)["k"] == (expected * 64 * 2, 0)
    found = cuflash.attention(*arrays, block_mask=mask, kernel=ROW, out_dtype="float32")
    wide = [x.astype(np.float32) for x in arrays]
    np.testing.assert_allclose(found, cuflash.reference.attention(*wide, mask=elements), atol=2e-3)


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_is_what_the_row_says(name):
    shape, options = TRAFFIC[name]
    arrays = draw(shape, "bfloat16")
    expected = modelled(ROW, arrays, **options)
    assert expected["k"][0] > 0 and moved(ROW, arrays, **options) == expected


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 40.0])
def test_scales_of_any_sign_and_size(scale):
    judge(draw((1, 70, 300, 1, 1, 64, 64), "bfloat16"), "bfloat16", causal=True, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_compiled_without_spills_and_without_serialised_products(head_dim, causal):
    for dtype in ("float16", "bfloat16"):
        for length in (512, 16384):
            q = cuflash.spec((1, length, 16, head_dim), dtype)
            found = cuflash.explain(q, q, q, causal=causal, device="sm_90a", kernel=ROW)
            assert found.spills == 0, found.tile
            assert build.compile(found.main.job).warnings == ()


@pytest.mark.parametrize("head_dim", [192, 256])
def test_results_that_leave_where_V_was(head_dim):
    """Tiles without keys, of one key tile and of many follow each other; seeds shuffle who comes first."""
    for seed in (0, 1):
        with emulator.options(seed=seed):
            arrays = draw((3, 270, 100, 2, 2, head_dim, head_dim), "float16")
            judge(arrays, "float16", causal=True, query_offset=-150)
            judge(draw((1, 300, 530, 2, 1, head_dim, head_dim), "bfloat16"), "bfloat16", window=(60, 20))
            kept = np.random.default_rng(seed).random((3, 6)) < 0.3
            mask = cuflash.BlockMask.from_dense(kept, 128, 100)
            judge(draw((1, 300, 530, 2, 1, head_dim, head_dim), "bfloat16"), "bfloat16", block_mask=mask)


def test_results_that_tma_cannot_store_are_stored_otherwise():
    q, k, v = draw((1, 70, 90, 2, 1, 64, 64), "bfloat16")
    wide = np.full((1, 70, 2, 67), 7, ml_dtypes.bfloat16)
    out = wide[..., 2:66]
    assert out.strides[2] % 16
    cuflash.attention(q, k, v, kernel=ROW, out=out)
    assert np.array_equal(out, cuflash.attention(q, k, v, kernel=ROW))
    assert (wide[..., :2] == 7).all() and (wide[..., 66:] == 7).all()


@pytest.mark.gpu
def test_ten_thousand_launches_give_the_same_bits():
    import cupy

    for head_dim in (64, 96, 128, 192, 256):
        q, k, v = (cupy.asarray(x) for x in draw((2, 300, 700, 8, 2, head_dim, head_dim), "float16"))
        first = cuflash.attention(q, k, v, causal=True, kernel=ROW)
        again = cupy.empty_like(first)
        for n in range(2_000):
            cuflash.attention(q, k, v, causal=True, kernel=ROW, out=again)
            if n % 100 == 0:
                assert cupy.array_equal(first.view("u2"), again.view("u2"))
        assert cupy.array_equal(first.view("u2"), again.view("u2"))


def test_it_runs_on_hopper_alone():
    q = cuflash.spec((1, 256, 4, 64), "float16")
    with pytest.raises(CuflashError, match="needs sm_90a, and no other, this device is sm_100"):
        cuflash.explain(q, q, q, device="sm_100", kernel=ROW)
