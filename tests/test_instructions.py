"""Each instruction wrapper of kernels/lib against NumPy: in the emulator, and the same kernels on a GPU."""

import struct
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from probes import expand, probe

from cuflash import build, emulator
from cuflash.errors import CuflashError

WHERE = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
SEEDS = range(4)
rng = np.random.default_rng(7)


@pytest.fixture(params=WHERE)
def where(request):
    return request.param


def normal(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def bits(array):
    return array.view(np.uint16)


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_votes_and_reductions(where, seed):
    x = normal(32)
    with emulator.options(seed=seed):
        _, out = probe(where, "probe_warp", "probe_shuffles", [x, np.full((11, 32), np.nan, np.float32)])
    lanes = np.arange(32)
    assert np.array_equal(out[0], np.full(32, x[5]))
    assert np.array_equal(out[1], x[lanes ^ 3])
    assert np.array_equal(out[2], x[np.where(lanes + 4 < 32, lanes + 4, lanes)])
    assert np.array_equal(out[3], x[np.where(lanes >= 2, lanes - 2, lanes)])
    assert np.allclose(out[4], x.sum(dtype=np.float64), atol=1e-5) and np.all(out[4] == out[4][0])
    assert np.array_equal(out[5], np.full(32, x.max()))
    assert np.array_equal(out[6], np.repeat(x.reshape(8, 4).min(1), 4))
    assert np.array_equal(out[7], np.full(32, sum(1 << i for i in range(16) if x[i] > 0), np.float32))
    assert np.array_equal(out[8], np.full(32, x.max() > 2)) and np.array_equal(
        out[9], np.full(32, x.min() > -2)
    )
    assert np.array_equal(out[10], (x[lanes ^ 1].astype(np.float64) * 3).astype(np.float32))


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers(where, seed):
    with emulator.options(seed=seed):
        (out,) = probe(
            where, "probe_warp", "probe_barriers", [np.zeros(64, np.int32)], block=128, shared_mem=512
        )
    assert np.array_equal(out, np.repeat([300 + 21, 300 + 30 + 21], 32))


def test_atomics(where):
    counter, out, total = probe(
        where,
        "probe_warp",
        "probe_atomics",
        [np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32)],
        block=64,
        grid=20,
    )
    n = 64 * 20
    assert counter[0] == 2 * n and out[0] == n * (n - 1) and total[0] == n / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_take_turns(where, seed):
    n = 40
    given = [np.zeros(1, np.int32), np.zeros(4, np.float32), np.full(n, np.nan, np.float32)]
    with emulator.options(seed=seed):
        turn, total, order = probe(where, "probe_warp", "probe_turns", given, grid=n)
    numbers = np.arange(1, n + 1)
    assert turn[0] == n and np.array_equal(total, numbers.sum() * np.arange(1, 5))
    assert np.array_equal(order, np.cumsum(numbers) - numbers)


@pytest.mark.parametrize("seed", SEEDS)
def test_ldmatrix_and_movmatrix(where, seed):
    x = np.arange(512, dtype=np.uint16).reshape(32, 16)
    with emulator.options(seed=seed):
        _, out = probe(
            where, "probe_warp", "probe_ldmatrix", [x, np.zeros((5, 32, 4, 2), np.uint16)], shared_mem=2048
        )
    lane = np.arange(32)
    row, column = lane // 4, 2 * (lane % 4)
    pair = np.arange(2)
    tiles = x.reshape(4, 8, 16)[:, :, :8]  # matrix i: rows 8 i.., columns 0 to 7
    halves = [x[:8, :8], x[8:16, :8], x[:8, 8:], x[8:16, 8:]]  # as the operand A of one k16 step
    plain = lambda m: m[row[:, None], column[:, None] + pair]  # noqa: E731
    for i in range(4):
        assert np.array_equal(out[0, :, i], plain(tiles[i]))
        assert np.array_equal(out[1, :, i], plain(tiles[i].T))
        assert np.array_equal(out[2, :, i], plain(halves[i]))
        assert np.array_equal(out[3, :, i], plain(halves[i].T))
    assert np.array_equal(out[4, :, 0], plain(tiles[0])) and np.array_equal(out[4, :, 1], plain(tiles[1]))
    assert np.array_equal(out[4, :, 2], plain(tiles[0])) and np.array_equal(out[4, :, 3], plain(tiles[1].T))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float16 k8"])
def test_mma(where, kind):
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16
    a, b = normal(16, 16, dtype=dtype), normal(16, 8, dtype=dtype)
    number = ["float16", "bfloat16", "float16 k8"].index(kind)
    *_, d = probe(
        where, "probe_warp", "probe_mma", [bits(a), bits(b), np.zeros((16, 8), np.float32)], [number]
    )
    depth = 8 if kind.endswith("k8") else 16
    start = np.tile([[1, 2]] * 8 + [[3, 4]] * 8, 4)
    expected = start + a[:, :depth].astype(np.float64) @ b[:depth].astype(np.float64)
    assert np.abs(d - expected).max() < 4e-6 * np.abs(expected).max()


def test_mma_tf32(where):
    a, b = normal(16, 8), normal(8, 8)
    *_, d = probe(where, "probe_warp", "probe_tf32", [a, b, np.zeros((16, 8), np.float32)])
    tf32 = lambda x: ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32).astype(np.float64)  # noqa: E731
    expected = tf32(a) @ tf32(b)
    assert np.abs(d - expected).max() < 4e-6 * np.abs(expected).max()
    assert np.abs(d - a.astype(np.float64) @ b).max() > 1e-5  # and it is not float32


def test_pack_rounds_to_nearest_even(where):
    x = np.concatenate([normal(400), np.float32([0, -0.0, 65519, 65520, 1e-7, 6e-8, np.inf, -np.inf])])
    ties = np.float32(1) + np.arange(16, dtype=np.float32) * 2.0**-12
    x = np.concatenate([x, ties, -ties * 2.0**-16, ties * 2.0**-24])
    n = x.size // 2
    _, out = probe(where, "probe_warp", "probe_pack", [x, np.zeros((2, n, 2), np.uint16)], [n], block=64)
    with np.errstate(over="ignore"):
        assert np.array_equal(out[0].reshape(-1), bits(x.astype(np.float16)))
    assert np.array_equal(out[1].reshape(-1), bits(x.astype(ml_dtypes.bfloat16)))


@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async_groups_and_zero_fill(where, seed):
    x = rng.integers(1, 255, (6, 32, 16), dtype=np.uint8)
    with emulator.options(seed=seed):
        _, out = probe(where, "probe_warp", "probe_cp_async", [x, np.zeros_like(x)], shared_mem=2048)
    kept = np.arange(16) < (np.arange(32)[:, None] + np.arange(6)[:, None, None]) % 17
    assert np.array_equal(out, np.where(kept, x, 0))


WRAPPED = """
#include "lib/barrier.cuh"
#include "lib/memory.cuh"
struct alignas(16) Four { float item[4]; };
struct Smem { Shared<float, 32, 64> tile; Shared<float, 1, 32> sums; };
KERNEL(128, 1) cost(float* x, float* y, i64 n) {
  SHARED_MEMORY(Smem, smem);
  Global<float> from(x), to(y);
  for (int r = threadIdx.x / 16; r < 32; r += 8)
    smem.tile.as<Four>(r, threadIdx.x % 16 * 4) = from.load_as<Four>(r * n + threadIdx.x % 16 * 4);
  block_sync();
  if (threadIdx.x < 32) {
    float sum = 0;
    for (int c = 0; c < 64; c++) sum += smem.tile(threadIdx.x, c);
    smem.sums(0, threadIdx.x) = sum;
  }
  block_sync();
  for (int i = threadIdx.x; i < n; i += 128) to.store(i, from.load(i) * smem.sums(0, i % 32));
}
"""
PLAIN = """
#include "lib/platform.cuh"
struct alignas(16) Four { float item[4]; };
struct Smem { alignas(16) float tile[32][64]; alignas(16) float sums[32]; };
KERNEL(128, 1) cost(float* x, float* y, i64 n) {
  SHARED_MEMORY(Smem, smem);
  for (int r = threadIdx.x / 16; r < 32; r += 8)
    *(Four*)&smem.tile[r][threadIdx.x % 16 * 4] = *(const Four*)(x + r * n + threadIdx.x % 16 * 4);
  __syncthreads();
  if (threadIdx.x < 32) {
    float sum = 0;
    for (int c = 0; c < 64; c++) sum += smem.tile[threadIdx.x][c];
    smem.sums[threadIdx.x] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += 128) y[i] = x[i] * smem.sums[i % 32];
}
"""


def opcodes(name, text, arch):
    """How often each opcode occurs in the entry `cost`; 0x918 is NOP, which fills up the end."""
    image, _ = build._run_nvrtc(
        build.Job(name, (), arch), expand(name, text, False), [f"-arch={arch}", "--std=c++17"]
    )
    sections, size, count, names = struct.unpack_from("<Q10xHHH", image, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", image, sections + i * size) for i in range(count)]
    strings = headers[names][4]
    (code,) = [
        image[at : at + n_bytes]
        for name_at, _, _, _, at, n_bytes in headers
        if image[strings + name_at :].split(b"\0", 1)[0] == b".text.cost"
    ]
    found = Counter(int.from_bytes(code[i : i + 2], "little") & 0xFFF for i in range(0, len(code), 16))
    del found[0x918]
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_memory_wrappers_cost_nothing_on_the_device(arch):
    """The same loads and stores as with plain pointers, and as many instructions but for a move or two."""
    try:
        build.nvrtc()
    except CuflashError as error:
        pytest.skip(str(error).splitlines()[0])
    wrapped, plain = opcodes("wrapped", WRAPPED, arch), opcodes("plain", PLAIN, arch)
    loads_and_stores = (0x981, 0x984, 0x986, 0x388)  # LDG, LDS, STG, STS
    assert all(plain[op] == wrapped[op] > 0 for op in loads_and_stores)
    assert abs(wrapped.total() - plain.total()) <= 0.02 * plain.total()
