"""Plan row for Hopper, backward, head_dim up to 256: bwd_07_cluster.

Shared memory and the grid are what the kernel's header says.
"""

from __future__ import annotations

from dataclasses import replace

from cuflash.hopper_bytes import cluster_bytes
from cuflash.problem import Problem
from cuflash.row import (
    WHOLE,
    Grid,
    Map,
    Params,
    Row,
    Slot,
    Step,
    Tile,
    n_slots,
    round_up,
    shared_bytes,
)
from cuflash.rows_backward import (
    OPTIONS_AFTER,
    OPTIONS_BEFORE,
    convert_keys,
    delta_slot,
    dO_parts,
    group_shares,
    key_sum_slots,
    option_slots,
)
from cuflash.rows_forward import LENGTHS, Traffic, kept_blocks_bytes
from cuflash.rows_hopper_backward import (
    CLOSE,
    DTYPES,
    FOUR_WARPS,
    OPEN,
    OPTION_DELTA,
    dO_is_mapped,
    query_tile_slots,
    with_four_warps,
)

_CLUSTER = 2  # blocks


ENOUGH_CLUSTERS = 66  # two blocks on every pair of SMs of a large GPU


def _clusters(problem: Problem, p: Params) -> int:
    return n_slots(problem, problem.len_k, p["TILE_KV"]) * problem.heads_k


def _splits(problem: Problem, p: Params) -> int:
    """Among how many clusters the query heads of a key head are shared, where clusters are few; 0: one."""
    shares = group_shares(problem, _clusters(problem, p), ENOUGH_CLUSTERS)
    return shares if shares > 1 else 0


def _grid(problem: Problem, p: Params) -> Grid:
    return _CLUSTER * _clusters(problem, p) * max(p["SPLIT"], 1), 1, 1


def _stays(p: Params) -> int:
    """A cluster takes one tile of keys after another, but in turn: = stays of cluster_block.cuh."""
    return 0 if p["DETERMINISTIC"] else _CLUSTER


def _own_keys(p: Params) -> int:
    return p["TILE_KV"] // _CLUSTER


def _half_tile(p: Params) -> int:
    return p["TILE_Q"] // _CLUSTER


def _smem(p: Params) -> int:
    keys, queries = _own_keys(p), p["TILE_Q"]
    d, dv = p["HEAD_DIM"], p["HEAD_DIM_V"]
    kept = 0
    if p["BLOCK_MASK"]:
        kept = kept_blocks_bytes(p["TILE_KV"], queries, p["BLOCK_KV"], p["BLOCK_Q"], 2)
        if kept == 0 and p["DETERMINISTIC"]:  # tiles that are kept as a whole or not at all are visited too
            kept = shared_bytes((4, 2, 1))
    n_Q = 1 if p["SOFTCAP"] or kept else 2
    n_dO = 1 if dO_parts(p) > 1 else p["N_STAGES"]
    tiles = shared_bytes(
        (2, keys, d),
        (2, keys, dv),
        (2, keys, 64 if d == 128 else 128),
        (2, n_Q * queries, d),
        (2, n_dO * queries, dv),
        (2, 4 * keys, queries),
    )
    others = shared_bytes(
        (4, 8 * 128 * (2 if p["SOFTCAP"] else 1), 4),
        (4, n_Q, queries),
        (4, 2, queries),
        (4, 8, 4),
        (4, 1, 8),
        (4, 4, 4),
        (4, 1, 4),
        *5 * [(8, 1, 1)],
        (8, 1, 4),
        (8, 1, 8),
        *4 * [(8, 1, n_Q)],
        *8 * [(8, 1, 2)],
        *3 * [(8, 1, n_dO)],
    )
    return round_up(round_up(kept, 1024) + tiles + others, 1024)


def _by_blocks(p: Params) -> Params:
    return p | {"TILE_KV": _own_keys(p)}


def _workspace(problem: Problem, p: Params) -> tuple[Slot, ...]:
    """Parts of dalibi_slopes come from blocks."""
    delta = (delta_slot(problem),) if len(problem.gradients) > 3 else ()
    sums = key_sum_slots(problem, p["SPLIT"])
    return (*option_slots(problem, _by_blocks(p)), *query_tile_slots(problem, p), *delta, *sums)


def _bytes(problem: Problem, p: Params) -> Traffic:
    return cluster_bytes(problem, p, max(p["SPLIT"], 1))


def _after() -> tuple[Step, ...]:
    """The passes of the options, which count tiles of keys as blocks have them."""
    steps = with_four_warps(OPTIONS_AFTER)
    return tuple(
        replace(step, fixed=(*step.fixed, ("TILE_KV", 64))) if step.entry == "pass_dalibi" else step
        for step in steps
    )


def _yields(problem: Problem) -> str | None:
    """One block holds 128 keys of smaller heads by itself."""
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return None
    return "accepts, and leaves head_dim up to 128 to bwd_06_specialize"


BWD_07 = Row(
    "bwd_07_cluster",
    True,
    90,
    (
        Tile(64, 128, 12, stages=2, up_to=192, least=128),
        Tile(64, 128, 12, stages=1, up_to=256, least=128),
    ),
    (
        OPEN,
        OPTION_DELTA,
        *with_four_warps(OPTIONS_BEFORE),
        Step(
            "bwd_07_cluster",
            _grid,
            _smem,
            maps=(
                Map("Q", _half_tile),
                Map("K", _own_keys),
                Map("V", _own_keys),
                Map("dO", _half_tile, when=dO_is_mapped),
            ),
            resident=_stays,
            overlaps=True,
        ),
        CLOSE,
        *convert_keys(_splits, FOUR_WARPS),
        *_after(),
    ),
    "two blocks share Q and dO and exchange dS; warpgroups divide the products",
    dtypes=DTYPES,
    exact_arch=True,
    features=WHOLE,
    limits=(*LENGTHS, ("head_dim", 256), ("head_dim_v", 256)),
    workspace=_workspace,
    bytes=_bytes,
    splits=_splits,
    flops_per_clock=4096,
    yields=_yields,
)
