"""Plan row for Hopper, backward, head_dim up to 256: bwd_07_cluster.

Shared memory and the grid are what the kernel's header says.
"""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.row import Grid, Map, Params, Row, Slot, Step, Tile, n_slots, round_up, shared_bytes
from cuflash.rows_backward import OPTIONS_AFTER, OPTIONS_BEFORE, delta_slot, option_slots
from cuflash.rows_forward import LENGTHS, kept_blocks_bytes
from cuflash.rows_hopper_backward import CLOSE, DTYPES, OPEN, OPTION_DELTA, query_tile_slots

_CLUSTER = 2  # blocks


def _grid(problem: Problem, p: Params) -> Grid:
    return _CLUSTER * n_slots(problem, problem.len_k, p["TILE_KV"]) * problem.heads_k, 1, 1


def _own_keys(p: Params) -> int:
    return p["TILE_KV"] // _CLUSTER


def _half_tile(p: Params) -> int:
    return p["TILE_Q"] // _CLUSTER


def _smem(p: Params) -> int:
    keys, queries, stages = _own_keys(p), p["TILE_Q"], p["N_STAGES"]
    d, dv = p["HEAD_DIM"], p["HEAD_DIM_V"]
    blocks = p["BLOCK_KV"], p["BLOCK_Q"]
    kept = kept_blocks_bytes(p["TILE_KV"], queries, *blocks, 2) if p["BLOCK_MASK"] else 0
    tiles = shared_bytes(
        (2, keys, d),
        (2, keys, dv),
        (2, keys, 64 if d == 128 else 128),
        (2, 2 * queries, d),
        (2, stages * queries, dv),
        (2, 4 * keys, queries),
    )
    others = shared_bytes(
        (4, 2 * 4 * 128, 4),
        (4, 2, queries),
        (4, stages, queries),
        (4, 8, 4),
        (8, 1, 1),
        *8 * [(8, 1, 2)],
        *4 * [(8, 1, stages)],
    )
    return round_up(round_up(kept, 1024) + tiles + others, 1024)


def _workspace(problem: Problem, p: Params) -> tuple[Slot, ...]:
    delta = (delta_slot(problem),) if len(problem.gradients) > 3 else ()
    return (*option_slots(problem, p), *query_tile_slots(problem, p), *delta)


BWD_07 = Row(
    "bwd_07_cluster",
    False,
    90,
    (
        Tile(64, 128, 12, stages=2, up_to=192, least=128),
        Tile(64, 128, 12, stages=1, up_to=256, least=128),
    ),
    (
        OPEN,
        OPTION_DELTA,
        *OPTIONS_BEFORE,
        Step(
            "bwd_07_cluster",
            _grid,
            _smem,
            maps=(Map("Q", _half_tile), Map("K", _own_keys), Map("V", _own_keys), Map("dO", _half_tile)),
        ),
        CLOSE,
        *OPTIONS_AFTER,
    ),
    "two blocks share Q and dO and exchange dS; warpgroups divide the products",
    dtypes=DTYPES,
    exact_arch=True,
    features=frozenset({"tf32", "causal", "query_offset", "dlse", "head_dim_v", "out_dtype"}),
    limits=(*LENGTHS, ("head_dim", 256), ("head_dim_v", 256)),
    workspace=_workspace,
    flops_per_clock=4096,
)
