// key_pieces.cuh - tiles of keys that are left when every block has had as many: walked in pieces.
//
// 2,048 tiles are 15.5 rounds of 132 blocks, and in the last round half of the SMs would have nothing to do.
// So those 68 tiles are cut into PIECES pieces of their queries.  Each but the last leaves its dK and dV in
// memory, and the last adds them to its own.  That memory is dq's: pass_query_tiles__close makes dq of its
// sums afterwards.
#pragma once
#include "barrier.cuh"
#include "query_tiles.cuh"

#ifndef CUFLASH_PIECES
#define CUFLASH_PIECES 1   // nothing is cut
#endif
constexpr int n_pieces = CUFLASH_PIECES;
#undef CUFLASH_PIECES
constexpr bool cuts = n_pieces > 1;
constexpr int piece_threads = 256, fours_K = head_dim_tile / 8, fours = fours_K + head_dim_v_tile / 8;
constexpr u32 most_cut = 2 * tile_q - 1;   // each has a counter: see counter_index

// How many of n_tiles are cut: those after the last whole round, if dq has no gaps and can hold their sums.
DEVICE u32 cut_tiles(const Args& args, u32 n_tiles) {
  const u32 left = n_tiles % gridDim.x;
  if (!cuts || left > most_cut || 4 * left > 3 * gridDim.x) return 0;
  const Tensor& dQ = args.dQ;
  const i64 numbers = args.batch * args.len_q * args.heads * args.head_dim;
  const i64 extent = (args.batch - 1) * dQ.batch + (args.len_q - 1) * dQ.row + (args.heads - 1) * dQ.head;
  const i64 needs = static_cast<i64>(left) * (n_pieces - 1) * fours * piece_threads * sizeof(Vec16<float>);
  const bool fits = extent + args.head_dim == numbers && dQ.vector_bytes == 16;
  return fits && needs <= numbers * static_cast<i64>(sizeof(out_elem)) ? left : 0;
}

// The queries of piece 0, 1, ... among all that a tile of keys meets.
DEVICE Range queries_of_piece(const Range& all, i32 piece) {
  const i32 n = ceil_div(all.end, tile_q);
  return {piece * n / n_pieces * tile_q, smallest(all.end, (piece + 1) * n / n_pieces * tile_q)};
}

// All threads of the consumers, with their dK and dV of a piece of the cut-th tile.  The last piece has the
// sums of all; returns whether this is the last.  Pieces start one after the other: nobody waits for long.
template <int n_K, int n_V>
DEVICE bool join_pieces(const Args& args, i32 cut, i32 piece, float (&dK)[n_K], float (&dV)[n_V],
                        int thread) {
  static_assert(n_K == 4 * fours_K && n_V == 4 * (fours - fours_K), "join_pieces: sizes");
  const Global<float> parts(args.dQ.data);
  const Global<i32> counts(args.workspace[SLOT_ROWS]);
  const i64 counter = counter_index(args) + 1 + cut;
  const auto at = [&](i32 part, int four) {
    return (((static_cast<i64>(cut) * (n_pieces - 1) + part) * fours + four) * piece_threads + thread) * 4;
  };
  if (piece < n_pieces - 1) {
#pragma unroll
    for (int n = 0; n < fours; ++n) {
      const float* x = n < fours_K ? dK + 4 * n : dV + 4 * (n - fours_K);
      parts.store_as(at(piece, n), Vec16<float>{{x[0], x[1], x[2], x[3]}});
    }
    barrier_sync(1, piece_threads);   // all threads have stored
    if (thread == 0) counts.add_release(counter, 1);
    return false;
  }
  if (thread == 0) counts.wait_for(counter, n_pieces - 1);
  barrier_sync(1, piece_threads);   // what the other pieces left may be read
#pragma unroll 1
  for (i32 part = 0; part < n_pieces - 1; ++part)
#pragma unroll
    for (int n = 0; n < fours; ++n) {
      const Vec16<float> four = parts.load_as<Vec16<float>>(at(part, n));
      float* x = n < fours_K ? dK + 4 * n : dV + 4 * (n - fours_K);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] += four.item[e];
    }
  return true;
}
