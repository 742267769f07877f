"""pytest -m full: every barrier, wait, fence and arrival of every rung, deleted one at a time, is noticed.

What survives is redundant and stands in REDUNDANT with the reason.  kernels/measured/deletions-<row>.json
keeps the result of each row.
"""

import pytest
from deletions import search, sites_of

from cuflash import records, rows

ROWS = list(dict.fromkeys(row.name for row in (*rows.FORWARD, *rows.BACKWARD)))
DTYPES = ("float32", "float16")

# (file, words of the line) -> why deleting it changes nothing
REDUNDANT: dict[tuple[str, str], str] = {
    ("lib/reduce.cuh", "of_warp may be overwritten"): "no kernel sums twice; one that did would need it",
    ("bwd_02_tiled.cu", "thread 0 has read: scratch is free"): (
        "P is written again after the barriers in score_products, or after the one before the next sums"
    ),
    ("bwd_02_tiled.cu", "all sums are read: scratch is free"): (
        "P is written again after the barriers in score_products only"
    ),
    ("fwd_09_overlap.cu", "wgmma_wait<1>();   // S is there, K is used"): (
        "the copies before that of the next K wait for a V that is given back later"
    ),
    ("lib/planner.cuh", "together again"): "shfl and a named barrier bring the warp together as well",
    ("lib/producer.cuh", "together"): "the named barrier counts all lanes: none can be a query tile behind",
    ("lib/key_group.cuh", "wgmma_fence();"): "another product stands right before, whose fence covers it",
    ("lib/key_group.cuh", "wgmma_commit();"): "another product follows at once, whose commit covers it",
    ("lib/key_group.cuh", "rows are zeros"): (
        "of K: those of dS come before dQ, the first product to which they matter; of Q and dO it is noticed"
    ),
    ("lib/key_group.cuh", "fence_async_shared();"): "the same",
    ("lib/query_tiles.cuh", "barrier_sync(2 + group"): (
        "it keeps the order of sums, bits and not errors; emulated blocks seldom meet in that window"
    ),
    ("lib/key_group.cuh", "the sums are read"): "the next sums come after the barriers of a whole head",
    ("lib/key_pieces.cuh", "barrier_sync"): "walks of these cases are too short for pieces",
    ("bwd_06_specialize.cu", "wgmma_wait<0>();   // dV, dK"): (
        "with dQ late the wait for the next S covers it; the compiler serialises the products without it"
    ),
    ("bwd_06_specialize.cu", "all lanes have added"): "it keeps the order of sums: bits, not errors",
    ("lib/key_producer.cuh", "all lanes have read"): "what they read has gone through shfl, by all lanes",
    ("lib/cluster_weights.cuh", "// K_peer"): "group 2 has waited before the dS that comes next",
    ("lib/cluster_weights.cuh", "barrier_sync(P_empty(n + 1)"): "it meets arrivals that are left at the end",
    ("lib/cluster_weights.cuh", "if (n_P == 2) barrier_sync"): "it meets arrivals that are left at the end",
    ("lib/cluster_weights.cuh", "the warp has read"): "barrier_arrive has brought the warp together",
    ("lib/cluster_gradients.cuh", "the warp has read"): "the same",
    ("lib/cluster_gradients.cuh", "the sums are read"): "the next come after the barriers of a whole head",
    ("lib/cluster_gradients.cuh", "wgmma_wait<0>();   // dK"): "the wait for dQ covers dK",
    ("bwd_04_pipeline.cu", "the last additions are done"): "it keeps the order of sums: bits, not errors",
    ("lib/mma_gradient.cuh", "thread 0 has read: scratch is free"): (
        "no case wants the gradients of slopes and of a bias by key at once; one that did would need it"
    ),
    ("lib/mma_gradient.cuh", "all sums are read: scratch is free"): (
        "dS is written again after the barrier of the next tile only"
    ),
}
# (row, file, words of the line) -> whose the waits are: they stand in functions that the row does not call
NOT_CALLED = {
    ("bwd_03_mma", "lib/gradient.cuh", ""): "score_products is bwd_02_tiled's",
    ("bwd_04_pipeline", "lib/gradient.cuh", ""): "score_products is bwd_02_tiled's",
    ("bwd_03_mma", "lib/mma_gradient.cuh", ""): "store_sums is bwd_04_pipeline's",
    ("bwd_03_mma", "lib/shares.cuh", ""): "Trade is bwd_04_pipeline's",
    ("bwd_06_specialize", "lib/query_tiles.cuh", ""): "Turns is bwd_05_wgmma's: here a thread takes turns",
    ("bwd_05_wgmma", "lib/key_pieces.cuh", ""): "pieces are bwd_06_specialize's",
    ("bwd_05_wgmma", "lib/key_group.cuh", "rows are zeros"): "lengths are bwd_06_specialize's",
    ("bwd_05_wgmma", "lib/key_group.cuh", "fence_async_shared();"): "lengths are bwd_06_specialize's",
    ("bwd_05_wgmma", "lib/key_group.cuh", "all warps have written"): "slopes are bwd_06_specialize's",
    ("bwd_05_wgmma", "lib/key_group.cuh", "the sums are read"): "slopes are bwd_06_specialize's",
}


def reason(site, row):
    for (name, file, words), why in NOT_CALLED.items():
        if (row, site.file) == (name, file) and words in site.text:
            return why
    for (file, words), why in REDUNDANT.items():
        if site.file == file and words in site.text:
            return why
    return None


def test_the_search_sees_waits_and_not_what_only_looks_like_them():
    found = sites_of("fwd_02_tiled")
    assert any(site.file == "fwd_02_tiled.cu" and "block_sync" in site.text for site in found)
    assert not any(site.text.startswith(("//", "DEVICE", "#")) for site in found)
    assert not any(site.file.startswith("lib/barrier") for site in found)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", ROWS)
def test_no_deletion_goes_unnoticed(row, tmp_path):
    path = records.folder() / f"deletions-{row}.json"
    last = records.read(path)["sites"] if path.is_file() else []
    noticed = {(site["file"], site["text"]): site["noticed"] for site in last if site["noticed"]}
    found = search(row, tmp_path, DTYPES, noticed)
    lines = [
        {
            "file": site.file,
            "line": site.line,
            "text": site.text,
            "noticed": how[:300] if how else None,
            "redundant": None if how else reason(site, row),
        }
        for site, how in found.items()
    ]
    records.write("deletions", {"row": row, "sites": lines}, [row], path)
    unnoticed = [site for site, how in found.items() if how is None and not reason(site, row)]
    survivors = [f"{site.file}({site.line}) {site.text}" for site in unnoticed]
    assert not survivors, "\n".join(["nobody noticed that these were deleted:", *survivors])
