// bwd_02_tiled.cu - attention backward in plain arithmetic, tiled; takes every problem.   any GPU
//
// Read after   bwd_01_naive.cu            Read next   bwd_03_mma.cu
// Changes      a tile of keys meets a tile of queries in shared memory; five products instead of seven: one
//              pass makes dK, dV and dQ, whose parts are added up in memory
//
// Algorithm    = tiled_backward.backward.   One block: TILE_KV keys of one (sequence, key head).
//                K, V -> shared, once
//                for each query head of the group, each query tile that sees these keys:
//                  S = Q K^T,  dP = dO V^T                     registers
//                  P = e^(score - lse),  dS = P (dP - delta)   lib/gradient.cuh; both to shared memory
//                  dV += P^T dO,  dK += dS^T Q                 registers, over the whole walk
//                  dQ_sum += dS K                              memory, atomically, 16 bytes at a time
//                dK * scale, dV -> memory                      (pass_convert makes dQ of dQ_sum)
//              GQA: the block walks the query heads of its key head, so dK and dV need no copies.  Where that
//              leaves too few blocks, n_splits blocks share the heads and add to dK_sum and dV_sum in memory.
//              head_dim above HEAD_DIM: the tiles hold one chunk of d at a time; a block owns one chunk of
//              dK, dV and dQ, and makes S and dP over all chunks, its own last: it stays for the products.
//              deterministic: no dQ here; bwd_02_tiled__dq owns query tiles and walks the keys, which costs
//              two products more.
// Grid         x: chunk + n_chunks * (key head + heads_k * (slot + n_slots * split)), slot: positions.cuh
//              __dq: chunk + n_chunks * (query head + heads * slot)
// Shared       Q, dO [TILE_Q, .] | K, V [TILE_KV, .] | lse, delta [TILE_Q] | P, dS [TILE_Q, TILE_KV]
//              all in acc, matrices swizzled
// Registers    per thread at 32 x 64, HEAD_DIM 64, 4 warps: dK 32, dV 32, S 16, dP 16; three blocks an SM
// Bytes        per block: K, V, dK, dV once; Q, dO, lse, delta and dQ_sum (an addition) per query tile
// Barriers     3 a tile: "operands are free", "operands are there", "P and dS are there"
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/blocks.cuh"
#include "lib/gradient.cuh"
#include "lib/warp.cuh"

// At 168 registers a thread three blocks of this tile share an SM: 12 warps hide shared memory's latency
// better than 8 with larger blocks of numbers.  Calls with many options need the registers more.
constexpr int n_options =
    has_softcap + has_alibi + has_bias + has_mask + has_dropout + has_window + is_packed + has_block_mask;
constexpr bool is_small = tile_q == 32 && tile_kv == 64 && head_dim_tile <= 64 && head_dim_v_tile <= 64;
constexpr int blocks_per_sm = is_small && n_options <= 1 ? 3 : 1;

constexpr int SLOT_DALIBI = 0;   // workspace: acc [slots of key tiles, heads], one part of dalibi_slopes each
constexpr int SLOT_DBIAS = 1;    // workspace: acc [batch, heads, len_k], dbias summed over the queries

using Walk = BlockWalk<tile_kv, tile_q, block_kv, block_q>;       // owns keys, walks queries
using WalkKeys = BlockWalk<tile_q, tile_kv, block_q, block_kv>;   // __dq
constexpr bool asks_blocks = has_block_mask && !Walk::Shape::tiles_are_whole;

using OfScores = Partition<acc, tile_q, tile_kv, n_warps, false>;      // S, dP
using OfK = Partition<acc, tile_kv, head_dim_tile, n_warps, true>;     // dK
using OfV = Partition<acc, tile_kv, head_dim_v_tile, n_warps, true>;   // dV
using OfQ = Partition<acc, tile_q, head_dim_tile, n_warps, false>;     // dQ

template <class Blocks> struct SmemOf : KeptBlocks<Blocks, asks_blocks> {
  TileOperands<tile_q, tile_kv, head_dim_tile, head_dim_v_tile> tile;
  Swizzled<acc, tile_q, tile_kv> P;   // dropped and scaled, as dV needs it
  Swizzled<acc, tile_q, tile_kv> dS;
};
using Smem = SmemOf<Walk>;
using SmemDq = SmemOf<WalkKeys>;
// The host has one number for both.
constexpr int larger_bytes = sizeof(Smem) > sizeof(SmemDq) ? sizeof(Smem) : sizeof(SmemDq);
static_assert(smem_bytes < 0 || larger_bytes == smem_bytes,
              "bwd_02_tiled: Smem and its row in cuflash/rows.py disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "bwd_02_tiled: Args and launch.py disagree");

// The sum of one number per thread, in a fixed order; thread 0 has it.  Nobody else may be using `scratch`.
DEVICE acc sum_over_block(acc number, Swizzled<acc, tile_q, tile_kv>& scratch, int thread) {
  number = warp_sum(number);
  if (thread % 32 == 0) scratch.cells(0, thread / 32) = number;
  block_sync();   // all warps have written
  acc total = 0;
  if (thread == 0)
    for (int warp = 0; warp < n_warps; warp++) total += scratch.cells(0, warp);
  block_sync();   // thread 0 has read: scratch is free
  return total;
}

// sums[c] of all threads that hold the same column -> dbias of head h, in a fixed order.  scratch as above.
DEVICE void store_column_sums(const Args& args, const OfScores& part, const acc (&sums)[OfScores::cols],
                              const KeyTile& own, i64 h, Swizzled<acc, tile_q, tile_kv>& scratch,
                              int thread) {
  constexpr int n_parts = OfScores::lanes_y * OfScores::warps_y;   // threads that share a column
  static_assert(n_parts <= tile_q, "bwd_02_tiled: no room for the column sums");
#pragma unroll
  for (int c = 0; c < OfScores::cols; c++)
    scratch.cells(part.first_row / OfScores::row_group, part.col(c)) = sums[c];
  block_sync();   // every part is there
  for (int c = thread; c < tile_kv && own.j0 + c < own.seq.rows_k; c += n_threads) {
    acc total = 0;
    for (int n = 0; n < n_parts; n++) total += scratch.cells(n, c);
    const i64 key = own.seq.k_row0 + own.j0 + c;
    Global<acc>(args.workspace[SLOT_DBIAS])
        .store((own.seq.array_b * args.heads + h) * args.len_k + key, total);
  }
  block_sync();   // all sums are read: scratch is free
}

KERNEL(n_threads, blocks_per_sm) bwd_02_tiled(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, lane = thread % 32;
  const i32 n_chunks = chunks_of<head_dim_tile, head_dim_v_tile>(args);
  const i32 own_chunk = static_cast<i32>(blockIdx.x % n_chunks);
  const i64 n_tiles = n_slots(args, args.len_k, tile_kv) * args.heads_k;
  const i64 x = blockIdx.x / n_chunks % n_tiles, split = blockIdx.x / n_chunks / n_tiles;
  const KeyTile own = key_tile_of(args, x, tile_kv, args.heads_k);
  if (!own.exists) return;
  const Sequence& seq = own.seq;
  const OfScores of_scores(thread);
  const OfK of_k(thread);
  const OfV of_v(thread);
  const OfQ of_q(thread);

  acc dK[OfK::rows][OfK::cols], dV[OfV::rows][OfV::cols];
  clear(dK);
  clear(dV);
  const i32 j1 = smallest(own.j0 + tile_kv, seq.len_k);
  const Range queries = own.j0 < j1 ? visible_queries(args, seq, own.j0, j1 - 1) : Range{0, 0};
  const i64 n_splits = gridDim.x / n_chunks / n_tiles;
  // A key that nobody sees has no heads to walk: dK = dV = 0.
  const i64 group = queries.begin < queries.end ? args.heads / args.heads_k : 0;
  const i64 h_end = own.h * group + (split + 1) * group / n_splits;
  bool new_keys = true;

#pragma unroll 1
  for (i64 h = own.h * group + split * group / n_splits; h < h_end; h++) {
    const HeadRules rules = head_rules_of(args, seq, h);
    Walk walk(args.blocks_of_key, seq.b, h, own.j0, j1, queries.begin, lane);
    acc column_sums[OfScores::cols], slope_sum = 0;   // of dbias and dalibi, this thread's part
#pragma unroll
    for (int c = 0; c < OfScores::cols; c++) column_sums[c] = 0;

#pragma unroll 1
    for (i32 i0 = queries.begin / tile_q * tile_q; i0 < queries.end; i0 += tile_q) {
      if constexpr (has_block_mask) i0 = walk.next(i0);
      if (has_block_mask && i0 >= queries.end) break;
      if (thread < 32) smem.fill_blocks(walk, i0, lane);   // read after the barriers in score_products

      acc S[OfScores::rows][OfScores::cols], dP[OfScores::rows][OfScores::cols];
      clear(S);
      clear(dP);
      score_products<n_threads>(args, smem.tile, of_scores, S, dP, seq, h, own.h, i0, own.j0, own_chunk, true,
                                new_keys, thread);
      new_keys = false;

      const bool full =
          !asks_blocks && is_fully_visible(args, seq, i0, i0 + tile_q, own.j0, own.j0 + tile_kv);
      const auto is_kept = [&](i32 i, i32 j) { return smem.keeps(walk, j, i0, i); };
      const auto visit = [&](int r, int c, i32 i, i32 j, acc d_score) {
        if constexpr (dbias_case == 1)
          if (own_chunk == 0)
            Global<bias_elem>(args.dbias.data)
                .store(rules.dbias0 + i * args.dbias.row + j * args.dbias.col, convert<bias_elem>(d_score));
        if constexpr (dbias_case == 2) column_sums[c] += d_score;
        if constexpr (wants_dalibi) slope_sum -= d_score * alibi_distance(rules.scoring, i, j);
      };
      tile_gradient(args, smem.tile, of_scores, S, dP, seq, rules, i0, own.j0, full, is_kept, visit);
      store_shared(of_scores, S, smem.P);
      store_shared(of_scores, dP, smem.dS);
      block_sync();   // P and dS are there

      multiply_columns(of_v, dV, smem.P, smem.tile.dO);
      multiply_columns(of_k, dK, smem.dS, smem.tile.Q);
      if constexpr (!deterministic) {
        acc dQ[OfQ::rows][OfQ::cols];
        clear(dQ);
        multiply(of_q, dQ, smem.dS, smem.tile.K);
        add_block(of_q, dQ, args.dQ_sum.data,
                  tile_source(args.dQ_sum, seq.array_b, seq.q_row0, opaque(static_cast<int>(h)), i0,
                              seq.len_q, own_chunk * head_dim_tile, args.head_dim));
      }
    }

    if constexpr (wants_dalibi) {
      block_sync();   // all products with P are done: it may hold the sums
      const acc total = sum_over_block(slope_sum, smem.P, thread);
      if (thread == 0 && own_chunk == 0)
        Global<acc>(args.workspace[SLOT_DALIBI]).store(x / args.heads_k * args.heads + h, total);
    }
    if constexpr (dbias_case == 2) {
      block_sync();   // all products with P are done: it may hold the sums
      if (own_chunk == 0) store_column_sums(args, of_scores, column_sums, own, h, smem.P, thread);
    }
  }

  const i32 d0 = own_chunk * head_dim_tile, d0_v = own_chunk * head_dim_v_tile, existing = seq.len_k - own.j0;
  const auto place = [&](const Tensor& tensor, i32 d, i64 dim, i32 end) {
    return tile_source(tensor, seq.array_b, seq.k_row0, own.h, own.j0, end, d, dim);
  };
  if (n_splits > 1) {
    add_block(of_k, dK, args.dK_sum.data, place(args.dK_sum, d0, args.head_dim, seq.len_k));
    add_block(of_v, dV, args.dV_sum.data, place(args.dV_sum, d0_v, args.head_dim_v, seq.len_k));
  } else {
    store_block<out_elem>(of_k, dK, static_cast<acc>(args.scale), args.dK.data,
                          place(args.dK, d0, args.head_dim, seq.rows_k), existing);
    store_block<out_elem>(of_v, dV, acc(1), args.dV.data, place(args.dV, d0_v, args.head_dim_v, seq.rows_k),
                          existing);
  }
}

// dQ of TILE_Q queries of one (sequence, query head), by itself: no sum depends on the order in which blocks
// run.
KERNEL(n_threads, blocks_per_sm) bwd_02_tiled__dq(const __grid_constant__ Args args) {
  if constexpr (deterministic) {
    SHARED_MEMORY(SmemDq, smem);
    const int thread = threadIdx.x, lane = thread % 32;
    const i32 n_chunks = static_cast<i32>(ceil_div(args.head_dim, head_dim_tile));
    const i32 own_chunk = static_cast<i32>(blockIdx.x % n_chunks);
    const QueryTile own = query_tile_of(args, blockIdx.x / n_chunks, tile_q);
    if (!own.exists) return;
    const Sequence& seq = own.seq;
    const i32 i0 = own.i0, i1 = smallest(i0 + tile_q, seq.len_q);
    const OfScores of_scores(thread);
    const OfQ of_q(thread);
    const Range keys = i0 < i1 ? visible_keys(args, seq, i0, i1 - 1) : Range{0, 0};
    bool new_queries = true;

    acc dQ[OfQ::rows][OfQ::cols];
    clear(dQ);
    if (keys.begin < keys.end) {
      const HeadRules rules = head_rules_of(args, seq, own.h);
      WalkKeys walk(args.blocks, seq.b, own.h, i0, i1, keys.begin, lane);
#pragma unroll 1
      for (i32 j0 = keys.begin / tile_kv * tile_kv; j0 < keys.end; j0 += tile_kv) {
        if constexpr (has_block_mask) j0 = walk.next(j0);
        if (has_block_mask && j0 >= keys.end) break;
        if (thread < 32) smem.fill_blocks(walk, j0, lane);   // read after the barriers in score_products

        acc S[OfScores::rows][OfScores::cols], dP[OfScores::rows][OfScores::cols];
        clear(S);
        clear(dP);
        score_products<n_threads>(args, smem.tile, of_scores, S, dP, seq, own.h, own.h_k, i0, j0, own_chunk,
                                  new_queries, true, thread);
        new_queries = false;

        const bool full = !asks_blocks && is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv);
        tile_gradient(
            args, smem.tile, of_scores, S, dP, seq, rules, i0, j0, full,
            [&](i32 i, i32 j) { return smem.keeps(walk, i, j0, j); }, [](int, int, i32, i32, acc) {});
        store_shared(of_scores, dP, smem.dS);
        block_sync();   // dS is there
        multiply(of_q, dQ, smem.dS, smem.tile.K);
      }
    }
    store_block<out_elem>(of_q, dQ, static_cast<acc>(args.scale), args.dQ.data,
                          tile_source(args.dQ, seq.array_b, seq.q_row0, own.h, i0, seq.rows_q,
                                      own_chunk * head_dim_tile, args.head_dim),
                          seq.len_q - i0);
  }
}
