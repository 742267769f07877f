"""The emulator finds bugs: each, seeded in a copy of a small kernel, is reported or gives wrong numbers."""

import os
import subprocess
import sys

import numpy as np
import pytest
from probes import probe, source

from cuflash import emulator
from cuflash.errors import CuflashError

rng = np.random.default_rng(3)
SEEDS = range(8)


def broken(file, *changes):
    """The file's text with each (old, new) replaced once; lines stay where they are."""
    text = source(file)
    for old, new in changes:
        assert text.count(old) >= 1, old
        assert old.count("\n") == new.count("\n")
        text = text.replace(old, new, 1)
    return text


def line_of(file, words):
    return 1 + source(file)[: source(file).index(words)].count("\n")


def run_tile(*changes, x=None, **options):
    x = rng.standard_normal((3, 8, 32)).astype(np.float32) if x is None else x
    tile = x.astype(np.float64)
    expected = (tile * tile.sum(2, keepdims=True))[:, ::-1] + tile.max(2, keepdims=True)
    with emulator.options(**options):
        _, out = probe(
            "emulator", "seeded", "seeded_tile", [x, np.full_like(x, np.nan)],
            block=256, grid=len(x), shared_mem=1056, text=broken("seeded", *changes),
        )  # fmt: skip
    return bool(np.abs(out - expected).max() < 1e-4)


def run_ring(*changes, **options):
    x = rng.standard_normal((7, 128)).astype(np.float32)
    with emulator.options(**options):
        _, out = probe(
            "emulator", "seeded", "seeded_ring", [x, np.full(128, np.nan, np.float32)], [7],
            block=128, shared_mem=1024, text=broken("seeded", *changes),
        )  # fmt: skip
    return bool(np.abs(out - x.sum(0)[::-1]).max() < 1e-4)


def caught(run, *changes):
    """Whether some seed gives an error or wrong numbers."""
    for seed in SEEDS:
        try:
            if not run(*changes, seed=seed):
                return True
        except CuflashError:
            return True
    return False


def message(run, *changes, **options):
    with pytest.raises(CuflashError) as error:
        run(*changes, **options)
    return str(error.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_sound_kernels_are_right_in_every_order(seed):
    assert run_tile(seed=seed) and run_ring(seed=seed)


LOAD = "= x.load_as<Four>(base + 4 * t);"
STORE = "out.store(base + t,"
TILE_SYNC = "block_sync();   // the tile is there"
SUM_SYNC = "block_sync();   // the sums are there"


@pytest.mark.parametrize(
    "old, new, words",
    [
        (LOAD, "= x.load_as<Four>(base + 4 * t + 4);", "outside array 0: bytes 3072 to 3088 of 3072"),
        (LOAD, "= x.load_as<Four>(base + 4 * t - 4);", "outside array 0: bytes -16 to 0"),
        (LOAD, "= x.load_as<Four>(base + 4 * t + 1);", "misaligned global access in array 0"),
        (STORE, "out.store(base + t + 768,", "outside array 1"),
        ("out(p.arrays[1]);", "out(p.arrays[5]);", "none of the arrays"),
        ("smem.tile(row, i);", "smem.tile(row, i + 1);", "outside [8][32]: row"),
        ("smem.tile(row, i);", "smem.tile(row + 1, i);", "outside [8][32]: row 8"),
        ("smem.tile.as<Four>(t / 8, t % 8 * 4)", "smem.tile.as<Four>(t / 8, t % 8 * 2)", "misaligned shared"),
    ],
)
def test_bad_accesses_name_kernel_block_thread_and_line(old, new, words):
    said = message(run_tile, (old, new))
    assert words in said
    assert f"seeded_tile: {said.split(': ', 1)[1].splitlines()[0]}" == said.splitlines()[0]
    second = source("seeded").index(old) if old != "out(p.arrays[1]);" else source("seeded").index(STORE)
    line = 1 + source("seeded")[:second].count("\n")
    assert f"at kernels/seeded.cu({line}), block (" in said and "thread (" in said


def test_missing_barriers_give_wrong_numbers_in_some_order():
    assert caught(run_tile, (TILE_SYNC, ""))
    assert caught(run_tile, (SUM_SYNC, ""))
    assert caught(run_ring, ("block_sync();   // tile j is there", ""))
    assert caught(run_ring, ("block_sync();   // tile j has", "// tile j has"))
    assert not caught(run_tile) and not caught(run_ring)


def test_barriers_that_a_part_of_the_block_never_reaches():
    for seed in SEEDS:
        said = message(run_tile, (SUM_SYNC, "if (t != 77) block_sync();"), seed=seed)
        assert "deadlock" in said and "255 of 256 threads came" in said
        assert "thread 77: wait for their warp at shfl_xor" in said
        assert f"kernels/seeded.cu({line_of('seeded', SUM_SYNC)})" in said
        said = message(run_tile, (TILE_SYNC, "if (row == 2) return; block_sync();"), seed=seed)
        assert "threads 64 to 95: left the kernel" in said
    two = (
        "  block_sync();   // the sums are there\n  const float",
        "  if (row < 4) block_sync();\n  else block_sync(); const float",
    )
    assert "another at kernels/seeded.cu(" in message(run_tile, two)


def test_named_barriers_that_do_not_add_up():
    said = message(run_tile, (SUM_SYNC, "barrier_sync(1, row < 4 ? 128 : 256);"))
    assert "barrier 1 is waited for with" in said
    assert "a multiple of 32" in message(run_tile, (SUM_SYNC, "barrier_sync(1, 100);"))
    assert "there are 16" in message(run_tile, (SUM_SYNC, "barrier_sync(16, 256);"))
    assert "deadlock" in message(run_tile, (SUM_SYNC, "if (row != 3) barrier_sync(1, 256);"))


def test_warps_that_part():
    maximum = "const float largest = warp_max(smem.tile(row, lane));"
    said = message(run_tile, (maximum, "const float largest = lane < 9 ? warp_max(0.f) : all(true);"))
    assert "the lanes of a warp have parted" in said or "deadlock" in said


def test_shared_memory_starts_as_nan():
    assert not run_tile((LOAD, "= {};"), x=np.zeros((1, 8, 32), np.float32) + 1)
    text = (f"if (t < 64) smem.tile.as<Four>(t / 8, t % 8 * 4) {LOAD}", "")
    x = np.zeros((1, 8, 32), np.float32)
    assert not run_tile(text, x=x)


def test_shared_memory_that_was_not_asked_for():
    with pytest.raises(
        CuflashError, match=r"needs 1056 bytes of dynamic shared memory, the launch gives 1024"
    ):
        x = np.zeros((1, 8, 32), np.float32)
        probe("emulator", "seeded", "seeded_tile", [x, x], block=256, shared_mem=1024)


@pytest.mark.parametrize(
    "new, words",
    [
        ("for (volatile int i = 0;; i = i + 1) {}", "without reaching a barrier"),
        ("while (x.load(0) != 1e30f) emulated::pause({__FILE__, __LINE__});", "spun"),
        ("*static_cast<volatile float*>(p.arrays[7]) = 1;", "fault"),
        ("volatile char big[1 << 20]; for (int i = 0; i < 1 << 20; i += 4096) big[i] = 1;", "stack overflow"),
        ("volatile int zero = 0; if (t / zero) out.store(0, 1.f);", "division by zero"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_kernel_gone_wild_neither_hangs_nor_crashes(new, words, seed):
    said = message(run_tile, (SUM_SYNC, new), seed=seed, stall_seconds=0.3)
    assert words in said and said.startswith("seeded_tile: ") and "block (" in said
    assert run_tile(seed=seed)  # and the process goes on


def test_ctrl_c_ends_a_launch():
    import _thread
    import threading

    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_tile((SUM_SYNC, "for (volatile int i = 0;; i = i + 1) {}"), stall_seconds=100)
    timer.join()
    assert run_tile()


def test_threads_of_python_launch_side_by_side():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda seed: run_tile(seed=seed), range(24)))


def test_cp_async_waits():
    wait = "cp_async_wait<1>();"
    for copies in ("early", "late"):
        assert run_ring(copies=copies)
    assert run_ring((wait, ""), copies="early") and not run_ring((wait, ""), copies="late")
    assert not run_ring((wait, "cp_async_wait<2>();"), copies="late")
    # the tile is requested into the stage that is being read
    assert not run_ring(("request(j + 1);", "request(j + 1); request(j + 2);"), copies="early")


def test_arguments_grids_and_blocks():
    function = emulator.compile  # refused before anything runs
    with pytest.raises(CuflashError, match="is no KERNEL"):
        function(source("seeded"), {}, "seeded_nothing")
    x = np.zeros((1, 8, 32), np.float32)
    with pytest.raises(CuflashError, match="2048 threads; needs 1 to 1024"):
        probe("emulator", "seeded", "seeded_tile", [x, x], block=2048)
    with pytest.raises(CuflashError, match="needs at most 232448"):
        probe("emulator", "seeded", "seeded_tile", [x, x], block=256, shared_mem=300000)
    with pytest.raises(CuflashError, match="does not compile for the emulator"):
        run_tile((SUM_SYNC, "no_such_function();"))


def test_traffic_is_counted_by_array():
    x = rng.standard_normal((3, 8, 32)).astype(np.float32)
    with emulator.recording() as records:
        assert run_tile(x=x)
    (record,) = records
    assert record.kernel == "seeded_tile" and record.grid == (3, 1, 1) and record.block == (256, 1, 1)
    assert record.arrays == {"array 0": (x.nbytes, 0, 0), "array 1": (0, x.nbytes, 0)}
    per_block = 64 * 16 + 8 * 32 * 4 + 8 * 4 + 256 * 4 + 256 * 4 + 256 * 4
    assert record.shared == 3 * per_block and record.barriers == 3 * 2 * 256


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_compiler_in_a_wheel_is_enough(tmp_path):
    pytest.importorskip("ziglang")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "sound or wild",
    ]
    environment = {"CXX": f"{sys.executable} -m ziglang c++", "CUFLASH_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
