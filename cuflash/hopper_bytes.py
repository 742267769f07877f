"""Bytes that the Hopper backward moves, exactly: what its passes and kernels read, write and add.

An addition counts as a read and a write, a tile that two blocks of a cluster share once.
"""

from __future__ import annotations

from cuflash import cost
from cuflash.problem import Problem
from cuflash.row import ITEMSIZE, Params, n_slots
from cuflash.rows_backward import dO_parts, queries_of, tile_pairs
from cuflash.rows_forward import Traffic, is_data_dependent


def walked_bytes(problem: Problem, p: Params, shares: int, asks: int = 0) -> Traffic:
    """Of bwd_05_wgmma and bwd_06_specialize; {} where data decides, or gradients of options are wanted too.

    shares: blocks among which the query heads of a key head are shared.  asks: blocks, at most,
    that ask a counter for the next tile of keys after each, and in turn for their first one too.
    """
    if is_data_dependent(problem) or len(problem.gradients) > 3:
        return {}
    pairs = list(tile_pairs(problem, p["TILE_KV"], p["TILE_Q"], True))
    met = sum(rows for rows, _, _ in pairs) * problem.batch * problem.heads_k * shares
    size = ITEMSIZE[problem.dtype]
    keys = {"k": (met * problem.head_dim * size, 0), "v": (met * problem.head_dim_v * size, 0)}
    traffic = _around(problem, p, shares) | keys
    if asks:
        tiles = len(range(0, problem.len_k, p["TILE_KV"])) * problem.batch * problem.heads_k * shares
        pieces, left = p.get("PIECES", 1), tiles % asks
        if pieces > 1 and 4 * left <= 3 * asks:  # all but the last leave dK and dV where dq will be
            more = left * (pieces - 1)
            tiles += more
            numbers = more * p["TILE_KV"] * (p["HEAD_DIM"] + p["HEAD_DIM_V"])
            read, written = traffic["dq"]
            traffic["dq"] = read + 4 * numbers, written + 4 * numbers
        counts = 4 * (tiles + (min(tiles, asks) if p.get("IN_TURN") else 0))
        read, written = traffic["query_rows"]
        traffic["query_rows"] = read + counts, written + counts
    return traffic


def cluster_bytes(problem: Problem, p: Params, shares: int) -> Traffic:
    """The same of bwd_07_cluster, where a block reads a part of its peer's K too, lse and delta itself."""
    if is_data_dependent(problem) or len(problem.gradients) > 3:
        return {}
    traffic = _around(problem, p, shares, blocks=2)
    half, dim = p["TILE_KV"] // 2, p["HEAD_DIM"]
    cols = 64 if dim == 128 else 128
    k_numbers = v_numbers = 0
    tiles = range(0, problem.len_k, p["TILE_KV"])
    for start in tiles:
        begin, end = queries_of(problem, start, min(start + p["TILE_KV"], problem.len_k))
        if begin >= end:  # keys that no query sees are not read
            continue
        for rank in range(2):
            own, peer = (
                min(max(problem.len_k - start - half * block, 0), half) for block in (rank, 1 - rank)
            )
            first = rank * (64 if dim == 192 else dim // 2)
            v_numbers += own * problem.head_dim_v
            k_numbers += own * problem.head_dim + peer * min(max(problem.head_dim - first, 0), cols)
    n, size = problem.batch * problem.heads_k * shares, ITEMSIZE[problem.dtype]
    if not p["DETERMINISTIC"]:  # for each tile of keys a counter is asked, or found to be at its end
        read, written = traffic["query_rows"]
        traffic["query_rows"] = read + 4 * n * len(tiles), written + 4 * n * len(tiles)
    return traffic | {"k": (n * k_numbers * size, 0), "v": (n * v_numbers * size, 0)}


def _around(problem: Problem, p: Params, shares: int, blocks: int = 1) -> Traffic:
    """All but K and V.  blocks: of one tile of keys, which read lse and delta each."""
    heads, heads_k = problem.batch * problem.heads, problem.batch * problem.heads_k
    pairs = list(tile_pairs(problem, p["TILE_KV"], p["TILE_Q"], True))
    visits = heads * sum(n for _, n, _ in pairs)  # of a tile of queries by a tile of keys
    walked = heads * sum(rows for _, _, rows in pairs)
    d, dv = problem.head_dim, problem.head_dim_v
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    o_size, do_size = (ITEMSIZE[problem.spec(name).dtype] for name in ("out", "dout"))
    places = n_slots(problem, problem.len_q, p["TILE_Q"]) * problem.heads
    tile, rows, pair = 4 * p["TILE_Q"] * p["HEAD_DIM"], problem.len_q * heads, 8 * p["TILE_Q"]
    traffic = {
        "q": (walked * d * size, 0),
        "out": (rows * dv * o_size, 0),
        "dout": (rows * dv * do_size, 0),
        "lse": (rows * 4, 0),
        "query_rows": (visits * pair * blocks, (places + 1) * pair),  # and counters
        "dQ_tiles": ((visits + places) * tile, (visits + places) * tile),
        "dq": (0, rows * d * out_size),
    }
    if dO_parts(p) > 1:
        part = dO_parts(p) * p["TILE_Q"] * p["HEAD_DIM_V"] * size
        traffic["dO_tiles"] = (visits * part * blocks, places * part)
    else:
        traffic["dout"] = (rows * dv * do_size + walked * dv * size, 0)
    if problem.has_dlse:
        traffic["dlse"] = (rows * 4, 0)
    if problem.has_mask:
        traffic["mask"] = (cost.visible_pairs(problem) * heads, 0)
    if p.get("IN_TURN"):
        traffic |= _turns(problem, p, visits, places)
    elif problem.deterministic:  # each half of a tile of dQ has a count: asked once and raised once a visit
        traffic["turns"] = (visits * 2 * 8, visits * 2 * 4)
    for name, dim in (("k", d), ("v", dv)):
        numbers = problem.len_k * heads_k * dim
        traffic[f"d{name}"] = (0, numbers * out_size)
        if shares > 1:
            added = 4 * numbers * shares
            traffic[f"d{name.upper()}_sum"] = (added + 4 * numbers, added)
    return traffic


def _turns(problem: Problem, p: Params, visits: int, places: int) -> Traffic:
    """Where blocks add to a query tile in turn: a count per tile, asked and raised once a visit.  The first
    stores: no zeros.  FINISHES: the last reads the sum, else pass_query_tiles__close does."""
    tile, warps = 4 * p["TILE_Q"] * p["HEAD_DIM"], 8  # of __close, that look whether there is a sum
    sums, looks = visits, places * warps
    if p.get("FINISHES"):
        sums, looks = visits - places, 0
    return {
        "dQ_tiles": (sums * tile, sums * tile),
        "turns": (4 * (2 * visits + looks), 4 * (visits + places)),
    }
