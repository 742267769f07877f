"""Plan rows for Hopper, forward: wgmma, TMA, specialised warps.  sm_90a and nothing else.

Shared memory and grids are what the kernels' headers say.
"""

from __future__ import annotations

from dataclasses import replace

from cuflash.problem import Problem
from cuflash.row import (
    CORE,
    ITEMSIZE,
    Map,
    Params,
    Row,
    Step,
    Tile,
    query_tiles,
    round_up,
    shared_bytes,
)
from cuflash.rows_forward import LENGTHS, Traffic, tiled_bytes, tiles_of_queries

DTYPES = ("float16", "bfloat16")
LIMITS = (*LENGTHS, ("head_dim", 128), ("head_dim_v", 128))
FLOPS = 4096  # of one SM and clock


def panels_bytes(p: Params, stages: int, *others: tuple[int, int, int]) -> int:
    """sizeof of Q and `stages` of K and V as panels (lib/panels.cuh), and other members behind them."""
    tiles = (
        (2, p["TILE_Q"], p["HEAD_DIM"]),
        (2, stages * p["TILE_KV"], p["HEAD_DIM"]),
        (2, stages * p["TILE_KV"], p["HEAD_DIM_V"]),
    )
    return round_up(shared_bytes(*tiles, *others), 1024)


def boxed_bytes(problem: Problem, p: Params) -> Traffic:
    """tiled_bytes where K and V come in boxes: the last one of a range is read whole, as far as K reaches."""
    traffic = tiled_bytes(problem, p)
    rows = 0
    for _, begin, end in tiles_of_queries(problem, p):
        rows += max(min(round_up(end, p["TILE_KV"]), problem.len_k) - begin, 0) if end else 0
    size = rows * problem.batch * problem.heads * ITEMSIZE[problem.dtype]
    return traffic | {"k": (size * problem.head_dim, 0), "v": (size * problem.head_dim_v, 0)}


def _two_stages(p: Params) -> int:
    return panels_bytes(p, 2)


FWD_06 = Row(
    "fwd_06_wgmma",
    False,
    90,
    (
        Tile(128, 128, 8, stages=2, up_to=64, least=64),
        Tile(128, 128, 8, stages=2, up_to=128, least=128),
    ),
    (Step("fwd_06_wgmma", query_tiles, _two_stages),),
    "a warpgroup multiplies straight from shared memory",
    dtypes=DTYPES,
    exact_arch=True,
    features=CORE,
    limits=LIMITS,
    bytes=tiled_bytes,
    flops_per_clock=FLOPS,
)

# ---- fwd_07_tma, fwd_08_specialize


def role_threads(p: Params) -> int:
    """A warpgroup that copies beside the tile's warps, which multiply: lib/roles.cuh."""
    return 32 * p["N_WARPS"] + 128


def _with_barriers(p: Params) -> int:
    return panels_bytes(p, 2, (8, 1, 2))


def _with_roles(p: Params) -> int:
    return panels_bytes(p, p["N_STAGES"], *[(8, 1, p["N_STAGES"])] * 4, (8, 1, 1))


MAPS = (Map("Q", "TILE_Q"), Map("K", "TILE_KV"), Map("V", "TILE_KV"))

FWD_07 = replace(
    FWD_06,
    name="fwd_07_tma",
    tiles=(
        Tile(128, 64, 8, stages=2, up_to=64, least=64),  # two blocks an SM
        Tile(128, 128, 8, stages=2, up_to=128, least=128),
    ),
    steps=(Step("fwd_07_tma", query_tiles, _with_barriers, maps=MAPS),),
    teaches="one thread copies a tile; a barrier counts bytes",
    bytes=boxed_bytes,
)

FWD_08 = replace(
    FWD_07,
    name="fwd_08_specialize",
    tiles=(
        Tile(192, 96, 12, stages=2, up_to=64, least=64),
        Tile(128, 128, 8, stages=2, up_to=128, least=128),
    ),
    steps=(Step("fwd_08_specialize", query_tiles, _with_roles, threads=role_threads, maps=MAPS),),
    teaches="a warp copies, warpgroups multiply, registers move between them",
)

FWD_09 = replace(
    FWD_08,
    name="fwd_09_overlap",
    steps=(Step("fwd_09_overlap", query_tiles, _with_roles, threads=role_threads, maps=MAPS),),
    teaches="the next S is issued before this P V; nobody looks for a maximum that stays",
)
