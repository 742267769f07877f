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
  const i64 n_tiles = ceil_div(args.len_q, tile_rows), group = args.heads / args.heads_k;
  const i64 key_heads = args.batch * args.heads_k;
  const i64 bytes = largest<i64>(args.len_k * (args.head_dim + args.head_dim_v) * sizeof(T), 1);
  const i64 wide = clamp<i64>(SECTION_BYTES / bytes, 1, key_heads) * group;   // query heads of a section
  const i64 section = x / (wide * n_tiles), place = x % (wide * n_tiles);
  const i64 here = smallest(wide, key_heads * group - section * wide);        // the last one may be smaller
  const i64 head = section * wide + place % here;                             // of all batches
  QueryTile t;
  t.h = head % args.heads;
  t.h_k = t.h / group;
  t.seq = sequence_of(args, head / args.heads);
  t.i0 = static_cast<i32>(n_tiles - 1 - place / here) * tile_rows;
  t.exists = true;
  return t;
}
