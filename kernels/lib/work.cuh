// work.cuh - what a block of a persistent grid does next, as a record small enough to pass around.   sm_90
//
// Heads come in sections whose K and V fit the L2 cache together; a section is finished before the next
// begins.  Inside it tiles come last first, heads alternating: with causal the longest lead.  A section of
// few heads has too few short tiles to fill the end of the grid: the shortest of all heads are kept for it.
#pragma once
#include "positions.cuh"

constexpr bool tiles_shrink = causal && !has_window;   // towards a head's first row
constexpr u32 SECTION_BYTES = 8 << 20;   // of K and V: what a wave of blocks reads of heads of 512 keys
// Where tiles shrink, a section that ends with 4 heads or more balances better:
constexpr u32 SHRINKING_BYTES = 16 << 20, SHORT_HEAD = 8;   // from that many tiles a head on
constexpr u32 HELD = 4, LONG_HEAD = 32;  // of that many tiles or more the first 1 / HELD come last,
constexpr u32 HELD_BYTES = 128u << 20;   // in sections of their own: they read a part of K and V alone

struct alignas(16) Work {
  i32 b;     // sequence; packed: args.batch is the tail
  i32 h;     // query head
  i32 h_k;   // its key head
  i32 i0;    // first row; NO_WORK: the end
};
constexpr i32 NO_WORK = -1;

DEVICE QueryTile query_tile_of(const Args& args, const Work& work) {
  return {sequence_of(args, work.b), work.h, work.h_k, work.i0, true};
}

// Query tiles of all heads.  (Divisions are 32 bits wide: a tile is at least 64 rows of 128 bytes, so 2^32 of
// them do not fit a memory.)
DEVICE u32 n_work(const Args& args, i32 tile_rows) {
  return static_cast<u32>(n_slots(args, args.len_q, tile_rows) * args.heads);
}

// The x-th of them; i0 = NO_WORK: an empty slot of a packed call.
template <class T> DEVICE Work work_of(const Args& args, u32 x, i32 tile_rows) {
  if constexpr (is_packed) {
    const QueryTile t = query_tile_of(args, x, tile_rows);
    return {static_cast<i32>(t.seq.b), static_cast<i32>(t.h), static_cast<i32>(t.h_k),
            t.exists ? t.i0 : NO_WORK};
  }
  const u32 heads = static_cast<u32>(args.heads), all = heads * static_cast<u32>(args.batch);
  const u32 n_tiles = static_cast<u32>(ceil_div(args.len_q, tile_rows));
  u32 rows = n_tiles, end = n_tiles;   // of a head, the last `rows` tiles before `end` are dealt out here
  u32 section_bytes = tiles_shrink && n_tiles >= SHORT_HEAD ? SHRINKING_BYTES : SECTION_BYTES;
  if (tiles_shrink && n_tiles >= LONG_HEAD && args.len_k <= args.len_q) {
    const u32 held = n_tiles / HELD, others = all * (n_tiles - held);
    rows -= held;
    if (x >= others) x -= others, rows = end = held, section_bytes = HELD_BYTES;
  }
  const u32 group = heads / static_cast<u32>(args.heads_k);
  const i64 bytes = largest<i64>(args.len_k * (args.head_dim + args.head_dim_v) * sizeof(T), 4096);
  const u32 fit = bytes > section_bytes ? 1 : section_bytes / static_cast<u32>(bytes);
  const u32 wide = smallest(fit * group, all);   // query heads of a section
  const u32 section = x / (wide * rows), place = x - section * wide * rows;
  const u32 here = smallest(wide, all - section * wide);   // the last one may be smaller
  const u32 row = place / here, head = section * wide + place - row * here, b = head / heads;
  const u32 h = head - b * heads;
  return {static_cast<i32>(b), static_cast<i32>(h), static_cast<i32>(h / group),
          static_cast<i32>(end - 1 - row) * tile_rows};
}
