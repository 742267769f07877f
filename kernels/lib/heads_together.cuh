// heads_together.cuh - the query heads that share a key head, as rows of one tile.
//
// With few queries a tile of one head is mostly empty, and each head of a group would read the same K and V.
// So row r of a tile stands for query r / heads_together of the key head's query head r % heads_together.
// Only where nothing but position hides a key, and nothing is added to a score: see rows_mma.py.
#pragma once
#include "fragments.cuh"

#ifndef CUFLASH_TOGETHER
#define CUFLASH_TOGETHER 1
#endif
constexpr int heads_together = CUFLASH_TOGETHER;   // 1: a tile has one head
#undef CUFLASH_TOGETHER

DEVICE i32 query_of(i32 row) { return row / heads_together; }

// What block x of the grid n_tiles * batch * heads_k owns; h is the first of its heads.
DEVICE QueryTile tile_of_heads(const Args& args, i64 x, i32 tile_rows) {
  const i64 n_tiles = ceil_div(args.len_q * heads_together, tile_rows), slot = x / args.heads_k;
  QueryTile t;
  t.h_k = x % args.heads_k;
  t.h = t.h_k * heads_together;
  t.seq = sequence_of(args, slot % args.batch);
  t.i0 = static_cast<i32>(n_tiles - 1 - slot / args.batch) * tile_rows;
  t.exists = true;
  return t;
}

// tile = Q, rows own.i0 .. i1 of the heads together; the rest is zero.  As request_tile.
template <class Tile>
DEVICE void request_heads(Tile& tile, const Args& args, const QueryTile& own, i32 i1, int thread) {
  constexpr int chunks = Tile::cols / per_chunk;
  const Global<elem> from(args.Q.data);
#pragma unroll 1
  for (int at = thread; at < Tile::rows * chunks; at += n_threads) {
    const int r = at / chunks, d = at % chunks * per_chunk, row = own.i0 + r;
    const i64 index = index_of(args.Q, own.seq.array_b, own.h + row % heads_together, query_of(row)) + d;
    if (args.Q.vector_bytes == 16) {
      const u32 n_bytes = row < i1 && d < args.head_dim ? 16 : 0;
      cp_async(tile.address(r, at % chunks), from.address(index, n_bytes), n_bytes);
    } else {
      Vec16<elem> chunk;
#pragma unroll
      for (int e = 0; e < per_chunk; ++e) {
        chunk.item[e] = {};
        if (row < i1 && d + e < args.head_dim) chunk.item[e] = from.load(index + e);
      }
      tile.chunk(r, at % chunks) = chunk;
    }
  }
}

// O / l and lse of the heads together.  split: which of the blocks that share the keys; row0: the warp's
// first.
template <class To, int n_cols>
DEVICE void finish_heads(const Args& args, const QueryTile& own, i64 split, Fragment<n_cols>& O,
                         const RowState& state, int row0, int lane) {
  const Sequence& seq = own.seq;
  Tensor target = args.O;
  PerRow lse = args.lse;
  i64 b = seq.array_b;
  if constexpr (is_split) {   // as part_of
    const i64 dim = args.head_dim_v, row = args.heads * dim;
    target = {args.workspace[0], args.len_q * row, row, dim, dim % 4 == 0 ? 16 : 0};
    lse = {args.workspace[1], args.heads * args.len_q, args.len_q, 1};
    b += split * args.batch;
  }
  const Global<To> to(target.data);
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    const i32 row = own.i0 + row0 + fragment_row(0, lane, r), i = query_of(row);
    const i64 h = own.h + row % heads_together;
    RowEnd end = {0, NEG_INF, false};
    const float l = sum_over_lanes<3>(state.l[r]);
    if (i >= seq.rows_q) continue;
    if (i < seq.len_q) end = finish_row(state.m[r], l, split == 0 ? sink_of(args, h) : NEG_INF, 1);
    if (lane % 4 == 0) Global<acc>(lse.data).store(index_of(lse, b, h, i), end.lse);
    const i64 index = index_of(target, b, h, i);
#pragma unroll
    for (int c = 0; c < O.n; ++c) {
      const int d = fragment_col(lane, c);
      To pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) pair[e] = convert<To>(end.of(O.of_row(r, c, e)));
      if (target.vector_bytes == 16 && d < args.head_dim_v) {
        to.store_as(index + d, Pack<To, 2>{{pair[0], pair[1]}});
      } else {
        if (d < args.head_dim_v) to.store(index + d, pair[0]);
        if (d + 1 < args.head_dim_v) to.store(index + d + 1, pair[1]);
      }
    }
  }
}
