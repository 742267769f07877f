"""Bugs of asynchronous code, seeded in copies of a small TMA and wgmma pipeline: some mode finds each."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from probes import probe
from test_emulator import broken, line_of

from cuflash import emulator
from cuflash.errors import CuflashError

FILE = "seeded_hopper"
N_TILES = 5
TIMES = list(itertools.product(("early", "late"), repeat=2))
rng = np.random.default_rng(5)
rows = rng.standard_normal((64 * (N_TILES + 1), 64)).astype(ml_dtypes.bfloat16)


def expected():
    Q, *tiles = rows.astype(np.float32).reshape(-1, 64, 64)
    P = [(Q @ K.T).astype(ml_dtypes.bfloat16).astype(np.float32) for K in tiles]
    return sum(p.T @ K for p, K in zip(P, tiles, strict=True))


def run(*changes, seed=0, **options):
    """Whether the pipeline, with changes, gives the right numbers."""
    layout = {"dtype": "bfloat16", "strides": (128,), "box": (64, 64), "swizzle": 128}
    maps = [(0, layout | {"dims": rows.shape[::-1]}), (1, layout | {"dims": (64, 64)})]
    out = np.full((64, 64), np.nan, ml_dtypes.bfloat16)
    with emulator.options(seed=seed, stall_seconds=5, **options):
        _, out = probe(
            "emulator", FILE, "seeded_pipeline", [rows, out], [N_TILES],
            block=160, shared_mem=32768 + 48, maps=maps,
            text=broken(FILE, *changes),
        )  # fmt: skip
    error = np.abs(out.astype(np.float32) - expected()).max()
    return bool(error < 0.02 * np.abs(expected()).max())


def words(*changes, **options):
    """What the emulator says of a broken copy; None: only wrong numbers.  Fails when it finds nothing."""
    silent = True
    for seed, (copies, products) in itertools.product(range(3), TIMES):
        try:
            silent &= run(*changes, **{"seed": seed, "copies": copies, "products": products, **options})
        except CuflashError as error:
            return str(error)
    assert not silent, f"nobody noticed {changes}"
    return None


@pytest.mark.parametrize("copies, products", TIMES)
@pytest.mark.parametrize("seed", range(4))
def test_the_sound_pipeline_is_right(seed, copies, products):
    assert run(seed=seed, copies=copies, products=products)


FIRST_FENCE = "wgmma_fence();   // S = Q K^T"
SECOND_FENCE = "wgmma_fence();   // O += P^T K"
SECOND_COMMIT = "wgmma_commit();\n    wgmma_wait<0>();   // K and P"


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("mbarrier_init_fence();", "", "mbarrier_init_fence() is missing"),
        ("block_sync();   // the mb", "// the mb", "is not initialised (yet)"),
        ("mbarrier_wait(smem.empty.address(0, j % 2), ((j / 2) & 1) ^ 1);", "", None),
        ("((j / 2) & 1) ^ 1);", "(j / 2) & 1);", "deadlock"),
        ("mbarrier_wait(smem.full.address(0, j % 2), (j / 2) & 1);", "", None),
        ("mbarrier_wait(Q_full, 0);", "", None),
        ("mbarrier_arrive_expect(full, 8192);", "mbarrier_arrive_expect(full, 8208);", "16 bytes"),
        ("mbarrier_arrive_expect(full, 8192);", "mbarrier_arrive_expect(full, 4096);", "-4096 bytes"),
        ("mbarrier_arrive_expect(full, 8192);", "mbarrier_expect(full, 8192);", "1 of 1 arrivals"),
        (FIRST_FENCE, "", "wgmma without wgmma_fence()"),
        (SECOND_FENCE, "", "wgmma without wgmma_fence()"),
        ("wgmma_commit();", "", None),
        (SECOND_COMMIT, SECOND_COMMIT.replace("wgmma_commit();", ""), None),
        ("wgmma_wait<0>();   // S", "wgmma_wait<1>();   // S", None),
        ("wgmma_wait<0>();   // K", "wgmma_wait<1>();   // K", None),
        ("fence_async_shared();\n    bar", "\n    bar", None),
        ("fence_async_shared();\n  bar", "\n  bar", None),
        ("barrier_sync(1, 128);", "", None),
        ("barrier_sync(2, 128);", "", None),
        ("if (lane == 0) mbarrier_arrive(smem.empty.address(0, j % 2));", "", "deadlock"),
        ("if (lane == 0) mbarrier_arrive(", "mbarrier_arrive(", None),
        ("bulk_commit();\n", "\n", "leaves the kernel while this store may still read"),
        ("bulk_wait_read<0>();", "", "leaves the kernel while this store may still read"),
        ("Q + 2 * k, K", "Q + 2 * k + (warp & 1), K", "issue different wgmma"),
        ("if (elect_one()) {", "{", None),
        ("P = wgmma_descriptor(smem.P.address(0, 0),", "P = wgmma_descriptor(40000,", "reaches outside"),
        ("smem.Q.address(0, 0), p.maps", "smem.Q.address(0, 8), p.maps", "no multiple of 128"),
        ("tma_at(0, 64 * (j + 1))", "tma_at(0, 64 * (j + 1), 0)", "3 coordinates for a tensor map of 2"),
        ("    return;\n  }", "    ;\n  }", None),
    ],
)  # fmt: skip
def test_each_bug_is_found(old, new, said):
    got = words((old, new))
    if said is not None:
        assert got is not None and said in got and got.startswith("seeded_pipeline: ")


def test_a_stage_that_is_freed_too_soon():
    """The empty arrival moves before the wait for what reads the stage: early copies, late products."""
    wait = "wgmma_wait<0>();   // K and P have been read\n"
    arrive = "    if (lane == 0) mbarrier_arrive(smem.empty.address(0, j % 2));"
    change = (wait + arrive, arrive + "\n    wgmma_wait<0>();")
    found = [not run(change, seed=seed, copies="early", products="late") for seed in range(4)]
    assert any(found)


def test_a_wait_that_cannot_end_names_what_it_waits_for():
    got = words(("mbarrier_arrive_expect(full, 8192);", "mbarrier_arrive_expect(full, 8208);"))
    assert f"kernels/seeded_hopper.cu({line_of(FILE, 'mbarrier_wait(smem.full')})" in got
    assert "it waits for 0 of 1 arrivals and 16 bytes" in got


def test_registers_that_do_not_fit():
    probe_text = broken("probe_hopper", ("registers_grow<240>();", "registers_grow<248>();"))
    with pytest.raises(CuflashError, match=r"wait for 248 registers a thread"):
        probe("emulator", "probe_hopper", "probe_roles", [np.zeros(12, np.int32)], block=384, text=probe_text)


def test_cluster_barriers():
    x = np.zeros((8, 64), np.uint16)
    layout = {"dtype": "bfloat16", "dims": (64, 8), "strides": (128,), "box": (64, 4), "swizzle": 128}
    start, end = (
        "cluster_sync();\n  if (t == 0) {\n    mbarrier_arrive_expect(box",
        "cluster_sync();\n  if (t == 0) out",
    )

    def outcome(old, seed):
        try:
            _, out = probe(
                "emulator", "probe_hopper", "probe_cluster", [x, np.zeros((4, 324), np.uint32)],
                block=64, grid=4, shared_mem=1024 + 512 + 32, maps=[(0, layout)],
                text=broken("probe_hopper", (old, old.replace("cluster_sync();", "block_sync();"))),
            )  # fmt: skip
        except CuflashError as error:
            return str(error)
        return "" if [o[3] for o in out] == [78, 77, 78, 77] else "wrong numbers"

    seen = {seed: outcome(start, seed) for seed in range(1)}
    for seed in range(8):
        with emulator.options(seed=seed):
            seen[seed] = outcome(start, seed)
    assert any("not initialised" in s or "left the kernel" in s for s in seen.values())
    for seed in range(8):
        with emulator.options(seed=seed):
            seen[seed] = outcome(end, seed)
    assert any("left the kernel" in s or s == "wrong numbers" for s in seen.values())
