// pass_columns.cu - how much attention each key receives: P summed over the queries, never stored.   any GPU
//
// Read after   bwd_02_tiled.cu
// Algorithm    = introspect.key_importance.   P = e^(score - lse), masks and sink as in forward, no dropout
//              result -> workspace[0]: acc [batch, heads, len_k] (packed: [heads, tokens]); unseen keys get 0
// Grid         x: query head + heads * slot of key tiles (positions.cuh)
// Shared       Q, K [tile, chunk of d] | lse [tile] | sums [threads that share a column, tile]
// Barriers     2 a chunk: "operands are free", "operands are there";  at the end "the sums are there"
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/blocks.cuh"
#include "lib/mask.cuh"
#include "lib/products.cuh"
#include "lib/score.cuh"

constexpr int tile = is_same<acc, double> ? 32 : 64;
constexpr int chunk_d = 32;
using Walk = BlockWalk<tile, tile, block_kv, block_q>;
constexpr bool asks_blocks = has_block_mask && !Walk::Shape::tiles_are_whole;
using OfScores = Partition<acc, tile, tile, n_warps, false>;
constexpr int n_parts = OfScores::lanes_y * OfScores::warps_y;   // threads that share a column

struct Smem : KeptBlocks<Walk, asks_blocks> {
  Swizzled<acc, tile, chunk_d> Q;
  Swizzled<acc, tile, chunk_d> K;
  Shared<acc, 1, tile> lse;   // +inf for a row that attends to nothing: P = 0
  Shared<acc, n_parts, tile> sums;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes,
              "pass_columns: Smem and cuflash/rows.py disagree");

KERNEL(n_threads, 1) pass_columns(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, lane = thread % 32;
  const KeyTile own = key_tile_of(args, blockIdx.x, tile, args.heads);
  if (!own.exists) return;
  const Sequence& seq = own.seq;
  const OfScores part(thread);
  const Scoring scoring = natural_scoring_of(args, seq, own.h);
  const Masking masking = masking_of(args, seq, own.h);
  const i32 j1 = smallest(own.j0 + tile, seq.len_k);
  const Range queries = own.j0 < j1 ? visible_queries(args, seq, own.j0, j1 - 1) : Range{0, 0};
  Walk walk(args.blocks_of_key, seq.b, own.h, own.j0, j1, queries.begin, lane);
  acc sums[OfScores::cols];
#pragma unroll
  for (int c = 0; c < OfScores::cols; c++) sums[c] = 0;

#pragma unroll 1
  for (i32 i0 = queries.begin / tile * tile; i0 < queries.end; i0 += tile) {
    if constexpr (has_block_mask) i0 = walk.next(i0);
    if (has_block_mask && i0 >= queries.end) break;
    acc S[OfScores::rows][OfScores::cols];
    clear(S);
#pragma unroll 1
    for (i32 d0 = 0; d0 < args.head_dim; d0 += chunk_d) {
      block_sync();   // everyone is done with the operands, statistics and kept blocks of before
      load_swizzled<elem, tile, chunk_d, n_threads>(
          smem.Q, args.Q.data,
          tile_source(args.Q, seq.array_b, seq.q_row0, own.h, i0, seq.len_q, d0, args.head_dim), thread);
      load_swizzled<elem, tile, chunk_d, n_threads>(
          smem.K, args.K.data,
          tile_source(args.K, seq.array_b, seq.k_row0, own.h / (args.heads / args.heads_k), own.j0, seq.len_k,
                      d0, args.head_dim),
          thread);
      if (d0 == 0) {
        if (thread < 32) smem.fill_blocks(walk, i0, lane);
        for (int r = thread; r < tile; r += n_threads) {
          const i64 row = seq.q_row0 + i0 + r;
          acc lse = NEG_INF;
          if (i0 + r < seq.len_q)
            lse = Global<acc>(args.lse.data).load(index_of(args.lse, seq.array_b, own.h, row));
          smem.lse(0, r) = lse == NEG_INF ? -NEG_INF : lse;
        }
      }
      block_sync();   // they are there
      multiply_rows(part, S, smem.Q, smem.K);
    }
    const bool full = !asks_blocks && is_fully_visible(args, seq, i0, i0 + tile, own.j0, own.j0 + tile);
#pragma unroll
    for (int r = 0; r < OfScores::rows; r++) {
      const int row = part.row(r);
      const Range keys = full ? Range{0, 0} : visible_keys(args, seq, i0 + row);
#pragma unroll
      for (int c = 0; c < OfScores::cols; c++) {
        const i32 i = i0 + row, j = own.j0 + part.col(c);
        if (full || (visible(args, masking, keys, i, j) && smem.keeps(walk, j, i0, i)))
          sums[c] += exp_near(score_log2(args, scoring, S[r][c], i, j) - smem.lse(0, row));
      }
    }
  }

#pragma unroll
  for (int c = 0; c < OfScores::cols; c++)
    smem.sums(part.first_row / OfScores::row_group, part.col(c)) = sums[c];
  block_sync();   // every thread's sums are there
  for (int c = thread; c < tile && own.j0 + c < seq.rows_k; c += n_threads) {
    acc total = 0;
    for (int n = 0; n < n_parts; n++) total += smem.sums(n, c);
    Global<acc>(args.workspace[0])
        .store((seq.array_b * args.heads + own.h) * args.len_k + seq.k_row0 + own.j0 + c, total);
  }
}
