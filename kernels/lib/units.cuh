// units.cuh - query tiles opened and closed by idle warps of bwd_06_specialize, while its products run.
//
// pass_query_tiles opens a tile (delta and lse of its rows, its sum of dQ = 0) before the kernel and closes it (dQ
// from its sum) after it: 134 MB of sums written, added to and read again.  Here a block of unit u, which is a
// sequence and key head, opens its share of unit u + units_ahead and closes its share of unit u - units_ahead,
// whose blocks started long before: the passes are left with the first units and the last.
//
// units, i32 [units, 2], counts the blocks that have opened their share, and those that have added to dQ.  A block
// waits for blocks with smaller numbers only: they have started.
// Only for calls without lengths whose O and dO have the dtype of Q and can be read 16 bytes at a time.
#pragma once
#include "accumulators.cuh"
#include "barrier.cuh"
#include "query_tiles.cuh"

#ifndef CUFLASH_FUSED   // rows without such warps do not set it
#define CUFLASH_FUSED 0
#endif
constexpr int blocks_at_once = CUFLASH_FUSED;   // that may run while one does: host's number; 0: passes do it all
constexpr bool fuses_passes = blocks_at_once > 0;
#undef CUFLASH_FUSED

constexpr int SLOT_UNITS = 5;   // of the workspace
constexpr int helpers = 96;     // threads

struct Unit {
  i32 number, n_tiles, tile;   // the block's unit, the blocks of one, its number among them
  i32 ahead;                   // so many that blocks of unit + ahead start when those of unit have ended

  DEVICE explicit Unit(const Args& args) {
    n_tiles = static_cast<i32>(ceil_div(args.len_k, tile_kv));
    number = static_cast<i32>(blockIdx.x) / n_tiles;
    tile = static_cast<i32>(blockIdx.x) % n_tiles;
    ahead = static_cast<i32>(ceil_div(blocks_at_once, n_tiles)) + 1;
  }
};

// The tile that is number `at` of a unit.
struct UnitTile {
  i64 b, h, place;
  i32 i0;
  DEVICE UnitTile(const Args& args, i32 unit, i32 at) {
    const i32 per_head = static_cast<i32>(places_per_head(args)), group = static_cast<i32>(args.heads / args.heads_k);
    b = unit / static_cast<i32>(args.heads_k);
    h = unit % static_cast<i32>(args.heads_k) * group + at / per_head;
    i0 = at % per_head * tile_q;
    place = static_cast<i64>(unit) * group * per_head + at;
  }
};

// 8 lanes a row, each 8 numbers in every 64.
DEVICE void open_tile(const Args& args, const UnitTile& tile, int thread) {
  constexpr int parts = (head_dim_v_tile + 63) / 64, tile_numbers = tile_q * head_dim_tile;
  const Global<acc> rows(args.workspace[SLOT_ROWS]), sums(args.workspace[SLOT_DQ]);
#pragma unroll 1
  for (int at = thread * 4; at < tile_numbers; at += helpers * 4)
    sums.store_as(tile.place * tile_numbers + at, Vec16<acc>{});
  const int lane = thread % 8;
#pragma unroll 1
  for (int base = 0; base < tile_q; base += helpers / 8) {
    const int r = base + thread / 8;
    const i32 i = tile.i0 + r, len = static_cast<i32>(args.len_q);
    Vec16<elem> O[parts] = {}, dO[parts] = {};
#pragma unroll
    for (int p = 0; p < parts; ++p) {
      const int d = 64 * p + 8 * lane;
      if (r >= tile_q || i >= len || d >= static_cast<int>(args.head_dim_v)) continue;
      O[p] = Global<elem>(args.O.data).load_as<Vec16<elem>>(index_of(args.O, tile.b, tile.h, i) + d);
      dO[p] = Global<elem>(args.dO.data).load_as<Vec16<elem>>(index_of(args.dO, tile.b, tile.h, i) + d);
    }
    acc delta = 0;
#pragma unroll
    for (int p = 0; p < parts; ++p)
#pragma unroll
      for (int e = 0; e < 8; ++e) {   // a row that attends to nothing has O = 0, and its dO may be NaN
        const acc o = convert<acc>(O[p].item[e]);
        if (o != 0) delta += o * convert<acc>(dO[p].item[e]);
      }
    delta = warp_sum<8>(delta);
    if (lane != 0 || r >= tile_q) continue;
    acc row_lse = -NEG_INF;
    if (i < len) {
      if constexpr (has_dlse) delta -= Global<acc>(args.dlse.data).load(index_of(args.dlse, tile.b, tile.h, i));
      const acc lse = Global<acc>(args.lse.data).load(index_of(args.lse, tile.b, tile.h, i));
      if (lse != NEG_INF) row_lse = is_plain ? lse * LOG2E : lse;
    }
    rows.store(tile.place * 2 * tile_q + r, row_lse);
    rows.store((tile.place * 2 + 1) * tile_q + r, delta);
  }
}

// A warp takes 16 queries and 32 columns at a time.
DEVICE void close_tile(const Args& args, const UnitTile& tile, int warp, int lane) {
  constexpr int across = head_dim_tile / 32;
#pragma unroll 1
  for (int at = warp; at < tile_q / 16 * across; at += helpers / 32) {
    const int r = at / across, c0 = at % across * 4;
    float x[16];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const Vec16<acc> four =
          Global<acc>(args.workspace[SLOT_DQ]).load_as<Vec16<acc>>(dQ_index(tile.place, r, c0, lane) + c * 128);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * c + e] = four.item[e];
    }
    const i32 existing = static_cast<i32>(args.len_q) - tile.i0;
    store_rows<out_elem>(x, static_cast<float>(args.scale), args.dQ.data,
                         tile_source(args.dQ, tile.b, 0, tile.h, tile.i0, static_cast<i32>(args.len_q), c0 * 8,
                                     args.head_dim),
                         16 * r, existing, lane);
  }
}

// What the idle warps do, all of them.
DEVICE void open_and_close(const Args& args, int thread) {
  const Unit unit(args);
  const Global<i32> units(args.workspace[SLOT_UNITS]);
  const i32 n_units = static_cast<i32>(args.batch * args.heads_k);
  const i32 places = static_cast<i32>(places_per_head(args) * (args.heads / args.heads_k));   // of a unit
  const i32 next = unit.number + unit.ahead, before = unit.number - unit.ahead;
  if (next < n_units) {
    for (i32 at = unit.tile; at < places; at += unit.n_tiles)
      open_tile(args, UnitTile(args, next, at), thread);
    barrier_sync(2, helpers);   // the share is written
    if (thread == 0) units.add_release(2 * next, 1);
  }
  if (before < 0) return;
  if (thread == 0) units.wait_for(2 * before + 1, unit.n_tiles);
  barrier_sync(2, helpers);   // all blocks of that unit have added
  for (i32 at = unit.tile; at < places; at += unit.n_tiles)
    close_tile(args, UnitTile(args, before, at), thread / 32, thread % 32);
}
