"""Plan row of fwd_10_persistent: its tiles and their settings, as measured on an H200.

Shared memory, grid and workspace are what the kernel's header says.
"""

from __future__ import annotations

from dataclasses import replace

from cuflash.problem import Problem
from cuflash.row import (
    ITEMSIZE,
    Grid,
    Map,
    Number,
    Params,
    Row,
    Slot,
    Step,
    Tile,
    n_slots,
    round_up,
    shared_bytes,
)
from cuflash.rows_forward import LENGTHS, Traffic, kept_blocks_bytes
from cuflash.rows_hopper import DTYPES, FLOPS, boxed_bytes, role_threads
from cuflash.rows_mma import heads_together, splits

LIMITS = (*LENGTHS, ("head_dim", 256), ("head_dim_v", 256))
N_SMS = 132  # of a large GPU


def panel(cols: int) -> int:
    """Columns of a panel: = PanelTile::panel_cols."""
    return 64 if cols % 64 == 0 else 32 if cols % 32 == 0 else 16


def _smem(p: Params) -> int:
    tile_q, tile_kv, stages = p["TILE_Q"], p["TILE_KV"], p["N_STAGES"]
    widths = p["HEAD_DIM"], p["HEAD_DIM_V"]
    q_and_o = p["Q_STAGES"] * widths[0] + (widths[1] if p["O_BUFFER"] == 1 else 0)
    tiles = 2 * (tile_q * q_and_o + stages * tile_kv * sum(widths))
    blocks = p["BLOCK_Q"], p["BLOCK_KV"]
    kept = kept_blocks_bytes(tile_q, tile_kv, *blocks, stages) if p["BLOCK_MASK"] else 0
    rings = 4 * [(8, 1, stages)] + 2 * [(8, 1, 2)] + 2 * [(8, 1, p["Q_STAGES"])] + 2 * [(8, 1, 1)]
    others = shared_bytes((16, 1, 2), (32, p["N_WARPS"] // 4, 2), (4, 1, stages), *rings)
    return round_up(tiles + others + kept, 1024)


def _tiles(problem: Problem, p: Params) -> int:
    return n_slots(problem, problem.len_q, p["TILE_Q"]) * problem.heads


def _blocks(problem: Problem, p: Params) -> Grid:
    return _tiles(problem, p), 1, 1


def _stays(p: Params) -> bool:
    return p["PERSISTENT"] != 0


def _more(problem: Problem, p: Params) -> Params:
    """LATE: nothing is added to a score and the scale is positive, so it waits for the softmax.
    A counter of tiles is not needed where every block has one at most."""
    adds = problem.softcap is not None or problem.has_alibi or problem.bias is not None
    is_short = p["PERSISTENT"] == 2 and _tiles(problem, p) <= N_SMS
    return {"LATE": int(problem.scale > 0 and not adds)} | ({"PERSISTENT": 1} if is_short else {})


def _yields(problem: Problem) -> str | None:
    """fwd_05_pipeline shares the keys of few query tiles among blocks, and reads K and V once for few queries
    of grouped heads."""
    if heads_together(problem) > 1:
        return "accepts, and leaves few queries of grouped heads to a kernel that reads K and V once for them"
    if splits(problem, {"TILE_Q": 128}) < 4:
        return None
    return "accepts, and leaves few query tiles over many keys to blocks that share them"


def _bytes(problem: Problem, p: Params) -> Traffic:
    """{} where it depends on what arrays hold, and where every thread of a tile reads for itself."""
    reads = problem.has_alibi or problem.has_sink or problem.bias is not None or problem.has_mask
    given = problem.packed or problem.has_query_lengths or problem.has_key_lengths or problem.block_mask
    return {} if reads or given else boxed_bytes(problem, p)


def _slots(problem: Problem, p: Params) -> tuple[Slot, ...]:
    return (Slot("next_tile", "int32", (1,), zero=True),) if p["PERSISTENT"] == 2 else ()


def _map(name: str, rows: Number, width: str) -> Map:
    """Of a PanelTile [rows, width]."""
    return Map(name, rows, lambda p: panel(p[width]), lambda p: 2 * panel(p[width]))


def _is_16_bit(problem: Problem) -> bool:
    """What TMA stores from the tile of O; wider results are stored from registers."""
    return ITEMSIZE[problem.out_dtype] == 2


def _tile(
    tile_q: int,
    tile_kv: int,
    up_to: int,
    stages: int = 2,
    least_tiles: int = 0,
    longest: int | None = None,
    **settings: int,
) -> Tile:
    """settings: parameters that are not the usual ones."""
    usual = {"PERSISTENT": 2, "O_BUFFER": 1, "Q_STAGES": 2, "OVERLAP": 0, "PLANS": 0}
    return Tile(
        tile_q,
        tile_kv,
        tile_q // 16,
        stages,
        up_to=up_to,
        least=64,
        least_tiles=least_tiles,
        longest=longest,
        options=tuple((usual | settings).items()),
    )


def _whole(tile: Tile) -> Tile:
    """For block masks whose blocks are whole tiles: nobody asks about elements."""
    return replace(tile, whole_blocks=True)


# Where P V takes long against the softmax, weights are made meanwhile; there is no room for O then.
WIDE = {"O_BUFFER": 0, "Q_STAGES": 1, "OVERLAP": 1}
# Walks so short that what lies between two query tiles counts.  In long ones the same is slower.
SHORT = {"longest": 768, "PLANS": 1}

FWD_10 = Row(
    "fwd_10_persistent",
    True,
    90,
    (
        _whole(_tile(128, 128, 64, 3)),
        _whole(_tile(128, 128, 128)),
        _whole(_tile(128, 64, 128, 3)),
        _whole(_tile(128, 64, 256, **WIDE)),
        _tile(256, 64, 64, 4, least_tiles=N_SMS),
        _tile(192, 112, 96, least_tiles=N_SMS),
        _tile(128, 128, 128, **SHORT),
        _tile(128, 128, 128),
        _tile(128, 80, 192, Q_STAGES=1, OVERLAP=1, **SHORT),
        _tile(128, 80, 192, Q_STAGES=1, OVERLAP=1),
        _tile(128, 64, 256, O_BUFFER=2, Q_STAGES=1, OVERLAP=1, **SHORT),
        _tile(128, 64, 256, O_BUFFER=2, Q_STAGES=1, OVERLAP=1),
    ),
    (
        Step(
            "fwd_10_persistent",
            _blocks,
            _smem,
            threads=role_threads,
            resident=_stays,
            maps=(
                _map("Q", "TILE_Q", "HEAD_DIM"),
                _map("K", "TILE_KV", "HEAD_DIM"),
                _map("V", "TILE_KV", "HEAD_DIM_V"),
                replace(_map("O", 64, "HEAD_DIM_V"), when=_is_16_bit),
            ),
        ),
    ),
    "a block walks many tiles, longest first, in L2-sized sections; the store overlaps the next",
    dtypes=DTYPES,
    exact_arch=True,
    limits=LIMITS,
    workspace=_slots,
    more=_more,
    yields=_yields,
    bytes=_bytes,
    flops_per_clock=FLOPS,
)
