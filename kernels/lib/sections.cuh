// sections.cuh - blocks in an order in which K and V stay in the L2 cache.
//
// Heads come in sections whose K and V fit the cache together; a section is finished before the next begins.
// Inside it heads alternate and tiles come last first, as in query_tile_of: with causal the heaviest lead.
#pragma once
#include "positions.cuh"

constexpr i64 SECTION_BYTES = 16 << 20;   // of K and V: a third of the L2 of a large GPU

// What block x of the grid n_slots * heads owns.
template <class T> DEVICE QueryTile query_tile_in_section(const Args& args, i64 x, i32 tile_rows) {
  if constexpr (is_packed) return query_tile_of(args, x, tile_rows);
  // All of these are at most the grid, which has less than 2^31 blocks: 32 bits divide faster.
  const u32 n_tiles = static_cast<u32>(ceil_div(args.len_q, tile_rows));
  const u32 heads = static_cast<u32>(args.heads), group = heads / static_cast<u32>(args.heads_k);
  const u32 key_heads = static_cast<u32>(args.batch * args.heads_k);
  const i64 bytes = largest<i64>(args.len_k * (args.head_dim + args.head_dim_v) * sizeof(T), 1);
  const u32 fit = bytes < SECTION_BYTES ? static_cast<u32>(SECTION_BYTES) / static_cast<u32>(bytes) : 1;
  const u32 wide = smallest(fit, key_heads) * group;   // query heads of a section
  const u32 section = static_cast<u32>(x) / (wide * n_tiles), place = static_cast<u32>(x) % (wide * n_tiles);
  const u32 here = smallest(wide, key_heads * group - section * wide);   // the last one may be smaller
  const u32 head = section * wide + place % here;                        // of all batches
  QueryTile t;
  t.h = head % heads;
  t.h_k = head % heads / group;
  t.seq = sequence_of(args, head / heads);
  t.i0 = static_cast<i32>(n_tiles - 1 - place / here) * tile_rows;
  t.exists = true;
  return t;
}
