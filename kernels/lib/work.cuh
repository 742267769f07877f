// work.cuh - what a block of a persistent grid does next, as a record small enough to pass around.   sm_90
//
// Heads come in sections whose K and V fit the L2 cache together; a section is finished before the next
// begins.  Inside it tiles come last first, heads alternating: with causal the longest lead, and the short
// ones fill the end.
#pragma once
#include "positions.cuh"

constexpr i64 SECTION_BYTES = 8 << 20;   // of K and V: what a wave of blocks reads of heads of 512 keys

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
  const u32 heads = static_cast<u32>(args.heads), group = heads / static_cast<u32>(args.heads_k);
  const u32 n_tiles = static_cast<u32>(ceil_div(args.len_q, tile_rows));
  const i64 bytes = largest<i64>(args.len_k * (args.head_dim + args.head_dim_v) * sizeof(T), 1);
  const u32 fit = bytes > SECTION_BYTES ? 1 : static_cast<u32>(SECTION_BYTES) / static_cast<u32>(bytes);
  const u32 all = heads * static_cast<u32>(args.batch), wide = smallest(fit * group, all);
  const u32 section = x / (wide * n_tiles), place = x - section * wide * n_tiles;
  const u32 here = smallest(wide, all - section * wide);   // the last one may be smaller
  const u32 row = place / here, head = section * wide + place - row * here, b = head / heads;
  const u32 h = head - b * heads;
  return {static_cast<i32>(b), static_cast<i32>(h), static_cast<i32>(h / group),
          static_cast<i32>(n_tiles - 1 - row) * tile_rows};
}
