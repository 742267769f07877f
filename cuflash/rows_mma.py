"""Plan rows on tensor cores by mma.sync, forward: fwd_03_mma, fwd_04_swizzle, fwd_05_pipeline.

Shared memory and grids are what the kernels' headers say; traffic is that of fwd_02_tiled with one chunk.
"""

from __future__ import annotations

from cuflash.row import CORE, Params, Row, Step, Tile, query_tiles, shared_bytes
from cuflash.rows_forward import LENGTHS, kept_blocks_bytes, tiled_bytes

DTYPES = ("float16", "bfloat16")
LIMITS = (*LENGTHS, ("head_dim", 256), ("head_dim_v", 256))
KB = 1024


def _tiles_bytes(p: Params, stages: int) -> int:
    return shared_bytes(
        (2, p["TILE_Q"], p["HEAD_DIM"]),
        (2, stages * p["TILE_KV"], p["HEAD_DIM"]),
        (2, stages * p["TILE_KV"], p["HEAD_DIM_V"]),
    )


def _one_stage(p: Params) -> int:
    return _tiles_bytes(p, 1)


def _two_stages(p: Params) -> int:
    blocks = p["BLOCK_Q"], p["BLOCK_KV"]
    kept = kept_blocks_bytes(p["TILE_Q"], p["TILE_KV"], *blocks, 2) if p["BLOCK_MASK"] else 0
    return _tiles_bytes(p, 2) + kept


FWD_03 = Row(
    "fwd_03_mma",
    False,
    75,
    (
        Tile(64, 64, 4, up_to=128),  # 48 KB at 128
        Tile(64, 32, 4, up_to=256),  # 64 KB at 256: what sm_75 has
    ),
    (Step("fwd_03_mma", query_tiles, _one_stage),),
    "tensor cores; P is S's registers repacked",
    dtypes=DTYPES,
    dtype_archs=(("bfloat16", 80),),
    features=CORE,
    limits=LIMITS,
    bytes=tiled_bytes,
    flops_per_clock=2048,
)

FWD_04 = Row(
    "fwd_04_swizzle",
    False,
    80,
    FWD_03.tiles,
    (Step("fwd_04_swizzle", query_tiles, _one_stage),),
    "XOR the chunk index: no bank conflicts",
    dtypes=DTYPES,
    features=CORE,
    limits=LIMITS,
    bytes=tiled_bytes,
    flops_per_clock=2048,
)

FWD_05 = Row(
    "fwd_05_pipeline",
    True,
    80,
    (
        Tile(128, 64, 4, up_to=64),
        Tile(128, 32, 4, up_to=128),
        Tile(64, 32, 4, up_to=256),
    ),
    (Step("fwd_05_pipeline", query_tiles, _two_stages),),
    "ask for tile j+1 before using tile j; mask only the tiles that need it",
    dtypes=DTYPES,
    limits=LIMITS,
    bytes=tiled_bytes,
    flops_per_clock=2048,
)
