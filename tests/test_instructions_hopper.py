"""sm_90a instructions against NumPy: in the emulator, early and late, and on a GPU."""

import ml_dtypes
import numpy as np
import pytest
from probes import expand, probe, swizzle

from cuflash import build, emulator
from cuflash.errors import CuflashError

WHERE = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
SEEDS = range(4)
FILE = "probe_hopper"
rng = np.random.default_rng(11)


@pytest.fixture(params=WHERE)
def where(request):
    return request.param


def box_of(x, at, box):
    """The box of an array (slow axis first) at coordinates (fast axis first), zeros outside."""
    index = [np.arange(n) + start for n, start in zip(reversed(box), reversed(at), strict=True)]
    inside = [(i >= 0) & (i < n) for i, n in zip(index, x.shape, strict=True)]
    taken = x[np.ix_(*[np.clip(i, 0, n - 1) for i, n in zip(index, x.shape, strict=True)])]
    for axis, good in enumerate(inside):
        taken = taken * good.astype(x.dtype).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return taken


def keywords(x, box, line, dtype):
    return {
        "dtype": dtype,
        "dims": x.shape[::-1],
        "strides": [s for s in x.strides[-2::-1]],
        "box": box,
        "swizzle": line,
    }


BOXES = [
    # shape (slow first), box and coordinates (fast first), swizzle
    ((40, 64), (64, 24), (0, 8), 128),
    ((40, 64), (64, 24), (0, 30), 128),
    ((40, 64), (32, 16), (48, -5), 64),
    ((9, 20, 32), (16, 8, 2), (16, 15, 8), 32),
    ((3, 5, 17, 64), (64, 16, 1, 1), (0, 3, 4, 2), 128),
    ((3, 5, 17, 24), (16, 8, 2, 2), (16, 12, -1, 1), 0),
    ((2, 3, 2, 11, 64), (64, 8, 2, 1, 1), (0, 6, 0, 2, 1), 128),
]


@pytest.mark.parametrize("shape, box, at, line", BOXES)
@pytest.mark.parametrize("copies", ["early", "late"])
def test_tma_load(where, shape, box, at, line, copies):
    x = rng.integers(1, 60000, shape).astype(np.uint16)
    n_bytes = 2 * int(np.prod(box))
    numbers = [len(shape), *at, *[0] * (5 - len(at)), n_bytes]
    maps = [(0, keywords(x, box, line, "bfloat16"))]
    with emulator.options(copies=copies):
        _, tile = probe(
            where, FILE, "probe_tma_load", [x, np.zeros(n_bytes, np.uint8)], numbers,
            block=128, shared_mem=16400, maps=maps,
        )  # fmt: skip
    flat = box_of(x, at, box).reshape(-1).view(np.uint8)
    assert np.array_equal(tile[swizzle(np.arange(n_bytes), line)], flat)


@pytest.mark.parametrize("shape, box, at, line", BOXES)
@pytest.mark.parametrize("copies", ["early", "late"])
def test_tma_store(where, shape, box, at, line, copies):
    at = tuple(max(start, 0) for start in at)  # a store at a negative coordinate is an illegal instruction
    x = rng.integers(1, 60000, shape).astype(np.uint16)
    tile = rng.integers(1, 60000, tuple(reversed(box))).astype(np.uint16)
    image = np.empty(tile.nbytes, np.uint8)
    image[swizzle(np.arange(tile.nbytes), line)] = tile.reshape(-1).view(np.uint8)
    numbers = [len(shape), *at, *[0] * (5 - len(at)), tile.nbytes]
    maps = [(0, keywords(x, box, line, "bfloat16"))]
    with emulator.options(copies=copies):
        got, _ = probe(
            where, FILE, "probe_tma_store", [x, image], numbers, block=128, shared_mem=16400, maps=maps
        )
    expected = x.copy()
    for index in np.ndindex(tile.shape):
        there = tuple(i + start for i, start in zip(index, reversed(at), strict=True))
        if all(0 <= i < n for i, n in zip(there, shape, strict=True)):
            expected[there] = tile[index]
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("copies", ["early", "late"])
def test_tma_reduce_add(where, copies):
    x = rng.standard_normal((20, 48)).astype(np.float32)
    tile = rng.standard_normal((8, 32)).astype(np.float32)
    image = np.empty(tile.nbytes, np.uint8)
    image[swizzle(np.arange(tile.nbytes), 128)] = tile.reshape(-1).view(np.uint8)
    maps = [(0, keywords(x, (32, 8), 128, "float32"))]
    with emulator.options(copies=copies):
        got, _ = probe(
            where, FILE, "probe_tma_store", [x, image], [2, 32, 15, 0, 0, 0, tile.nbytes, 1],
            block=128, grid=3, shared_mem=16400, maps=maps,
        )  # fmt: skip
    expected = x.copy()
    for _ in range(3):
        expected[15:, 32:] += tile[:5, :16]
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copies(where, seed):
    x = rng.integers(-8, 8, (5, 64)).astype(np.float32)
    with emulator.options(seed=seed):
        _, y, total = probe(
            where, FILE, "probe_bulk", [x, np.zeros_like(x), np.zeros(64, np.float32)],
            block=64, grid=5, shared_mem=272,
        )  # fmt: skip
    assert np.array_equal(y, x + 1) and np.array_equal(total, (x + 1).sum(0))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n_tiles", [1, 2, 3, 4, 50])
def test_ring_of_mbarriers(where, seed, n_tiles):
    x = rng.integers(0, 60000, (8 * n_tiles - 3, 64)).astype(np.uint16)  # the last box is part outside
    with emulator.options(seed=seed):
        _, out = probe(
            where, FILE, "probe_ring", [x, np.zeros((64, 2), np.uint32)], [n_tiles],
            block=96, shared_mem=3072 + 64, maps=[(0, keywords(x, (64, 8), 128, "bfloat16"))],
        )  # fmt: skip
    padded = np.concatenate([x, np.zeros((3, 64), np.uint16)]).astype(np.uint32)
    assert np.array_equal(out.reshape(-1), padded.reshape(n_tiles, 8, 16, 4).sum((0, 3)).reshape(-1))


def test_stmatrix(where):
    r = rng.integers(0, 65536, (4, 32, 2)).astype(np.uint16)
    _, out = probe(where, FILE, "probe_stmatrix", [r, np.zeros((64, 16), np.uint16)], shared_mem=2048)
    matrix = r.reshape(4, 8, 8)  # lane l holds row l / 4, columns 2 (l % 4) and + 1
    assert np.array_equal(out[:32, :8], matrix.reshape(32, 8))
    assert np.array_equal(out[:32, 8:], matrix.transpose(0, 2, 1).reshape(32, 8))
    assert np.array_equal(out[32:48, :8], matrix[1:3].reshape(16, 8))
    assert np.array_equal(out[32:48, 8:], matrix[1:3].transpose(0, 2, 1).reshape(16, 8))
    assert not out[48:].any()


def lay_out(matrix, line, trans):
    """An operand (rows, K) as wgmma wants it: (bytes, leading, stride, byte offset of each k16 step)."""
    depth = matrix.shape[1]
    tile = (matrix.T if trans else matrix).copy()  # [k][rows] or [rows][k]: the last axis is contiguous
    lines, width = tile.shape
    if (
        line == 0
    ):  # core matrices of 8 lines x 16 bytes, one after another along the lines, then along the width
        image = (
            tile.reshape(lines // 8, 8, width // 8, 8).transpose(2, 0, 1, 3).copy().view(np.uint8).reshape(-1)
        )
        along_lines, along_width = 128, 16 * lines
        steps = np.arange(depth // 16) * 2 * (along_lines if trans else along_width)
        return (image, along_lines, along_width, steps) if trans else (image, along_width, along_lines, steps)
    per_panel = line // 2
    panels = -(-width // per_panel)
    padded = np.zeros((lines, panels * per_panel), tile.dtype)
    padded[:, :width] = tile
    flat = padded.reshape(lines, panels, per_panel).transpose(1, 0, 2).copy().view(np.uint8).reshape(-1)
    image = np.empty_like(flat)
    image[swizzle(np.arange(flat.size), line)] = flat
    k = np.arange(depth // 16) * 16
    steps = k * line if trans else k // per_panel * lines * line + k % per_panel * 2
    return image, lines * line, 8 * line, steps


SHAPES = {  # entry: (dtype, N, trans A, trans B, A in registers)
    "bf16_n64": ("bf16", 64, 0, 0, False),
    "f16_n8": ("f16", 8, 0, 0, False),
    "bf16_n80": ("bf16", 80, 0, 0, False),
    "bf16_n128_tb": ("bf16", 128, 0, 1, False),
    "f16_n96_ta_tb": ("f16", 96, 1, 1, False),
    "bf16_n256": ("bf16", 256, 0, 0, False),
    "bf16_n256_ta": ("bf16", 256, 1, 0, False),
    "bf16_n64_rs_tb": ("bf16", 64, 0, 1, True),
    "f16_n176_rs": ("f16", 176, 0, 0, True),
}


@pytest.mark.parametrize("entry", SHAPES)
@pytest.mark.parametrize("line", [128, 64, 32, 0])
@pytest.mark.parametrize("products", ["early", "late"])
def test_wgmma(where, entry, line, products):
    kind, n, trans_a, trans_b, in_registers = SHAPES[entry]
    depth = 16 if trans_a and trans_b else 64
    steps = 4
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float16
    a = rng.standard_normal((64, depth)).astype(dtype)
    b = rng.standard_normal((n, depth)).astype(dtype)
    image_a, lead_a, stride_a, at_a = lay_out(a.view(np.uint16), line, trans_a)
    image_b, lead_b, stride_b, at_b = lay_out(b.view(np.uint16), line, trans_b)
    if in_registers:
        image_a = a.view(np.uint8).reshape(-1)
    offsets = np.stack([at_a, at_b], 1).astype(np.int32)
    numbers = [depth // 16, lead_a, stride_a, lead_b, stride_b, {128: 1, 64: 2, 32: 3, 0: 0}[line]]
    numbers += [image_a.size, image_b.size]
    with emulator.options(products=products):
        *_, d, _ = probe(
            where, FILE, f"probe_wgmma_{entry}", [image_a, image_b, np.zeros((64, n), np.float32), offsets],
            numbers, block=128, shared_mem=64 * 128 + 256 * 128,
        )  # fmt: skip
    wide = a.astype(np.float64) @ b.astype(np.float64).T
    if in_registers and depth == 16:
        expected = wide
    else:  # k steps past the operands' depth repeat the first
        first = a[:, :16].astype(np.float64) @ b[:, :16].astype(np.float64).T
        expected = wide + (steps - depth // 16) * first
    assert np.abs(d - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("seed", SEEDS)
def test_cluster(where, seed):
    x = rng.integers(0, 60000, (8, 64)).astype(np.uint16)
    with emulator.options(seed=seed):
        _, out = probe(
            where, FILE, "probe_cluster", [x, np.zeros((4, 324), np.uint32)],
            block=64, grid=4, shared_mem=1024 + 512 + 32, maps=[(0, keywords(x, (64, 4), 128, "bfloat16"))],
        )  # fmt: skip
    for block in range(4):
        rank, peer = block % 2, block ^ 1
        assert list(out[block, :4]) == [rank, 2, 1000 * peer + 5, 77 + 1 - rank]
        assert np.array_equal(out[block, 4:68], 1000 * peer + np.arange(64))
        flat = x.reshape(-1).view(np.uint8)
        # the xor uses bits of the address, so the second half's rows are rows 4 to 7 of the pattern
        tile = out[block, 68:].view(np.uint8)[:1024]
        assert np.array_equal(tile[swizzle(np.arange(1024), 128)], flat)


@pytest.mark.parametrize("entry", ["probe_roles", "probe_roles_of_two"])
@pytest.mark.parametrize("seed", SEEDS)
def test_elect_one_and_setmaxnreg(where, seed, entry):
    with emulator.options(seed=seed):
        (out,) = probe(where, FILE, entry, [np.zeros(12, np.int32)], block=384)
    assert np.array_equal(out, np.ones(12))


@pytest.mark.parametrize(
    "entry, at, words",
    [
        ("probe_tma_load", (4, 0), "no multiple of 16 bytes"),
        ("probe_tma_store", (4, 0), "no multiple of 16 bytes"),
        ("probe_tma_store", (0, -1), "negative coordinate, -1 on axis 1"),
    ],
)
def test_coordinates_that_are_illegal_instructions(entry, at, words):
    x = np.zeros((40, 64), np.uint16)
    maps = [(0, keywords(x, (64, 8), 128, "bfloat16"))]
    numbers = [2, *at, 0, 0, 0, 1024]
    with pytest.raises(CuflashError, match=words):
        given = [x, np.zeros(1024, np.uint8)]
        probe("emulator", FILE, entry, given, numbers, block=128, shared_mem=16400, maps=maps)


def test_tensor_map_refuses_in_words():
    from cuflash import tensormap

    for change, words in (
        ({"strides": (100,)}, "multiples of 16 bytes"),
        ({"box": (128, 8)}, "at most the swizzle"),
        ({"box": (64, 300)}, "1 to 256"),
        ({"dims": (0, 5)}, "shorter than 1"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"swizzle": 48}, "swizzle 48"),
    ):
        base = {"dtype": "bfloat16", "dims": (64, 5), "strides": (128,), "box": (64, 8), "emulated": True}
        with pytest.raises(CuflashError, match=words):
            tensormap.Layout(**(base | change))
    with pytest.raises(CuflashError, match="multiple of 16"):
        tensormap.Layout(**base).encode(8)


def test_every_wgmma_shape_and_type_compiles():
    """All 32 widths, both 16-bit types, operands in registers and shared memory, transposed and not."""
    try:
        build.nvrtc()
    except CuflashError as error:
        pytest.skip(str(error).splitlines()[0])
    calls = "".join(
        f"  {{ float d[{n // 2}]; for (int i = 0; i < {n // 2}; i++) d[i] = x;\n"
        f"    wgmma<bf16, 0, 1>(d, p, p, x > 1); wgmma<f16, 1, 0>(d, p, p, true);\n"
        f"    wgmma<bf16, 1>(d, a, p, true); wgmma<f16>(d, a, p, false);\n"
        f"    for (int i = 0; i < {n // 2}; i++) x += d[i]; }}\n"
        for n in range(8, 257, 8)
    )
    text = (
        '#include "lib/wgmma.cuh"\nextern "C" __global__ void all(float* out, u64 p) {\n'
        f"  float x = out[0];\n  u32 a[4] = {{1, 2, 3, 4}};\n{calls}  out[0] = x;\n}}\n"
    )
    job = build.Job("all_shapes", (), "compute_90a")
    options = ["-arch=compute_90a", "--std=c++17"]
    image, _ = build._run_nvrtc(job, expand("all_shapes", text, False), options)
    ptx = image.decode()
    for n in range(8, 257, 8):
        assert ptx.count(f"m64n{n}k16.f32.bf16.bf16") == 2 and ptx.count(f"m64n{n}k16.f32.f16.f16") == 2
