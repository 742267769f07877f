// fwd_02_tiled.cu - attention forward: a K/V tile in shared memory serves a whole query tile.   any GPU
//
// Read after   fwd_01_naive.cu          Read next   fwd_03_mma.cu
// Changes      a block owns TILE_Q rows; K and V come to shared memory once per block and not once per row,
//              and every number read from there is used 8 times from a register
//
// Algorithm    = tiled.forward.   One block: TILE_Q rows of one (batch, head), and one chunk of V's columns.
//                for each key tile that some row may see:
//                  S = Q K^T             in chunks of HEAD_DIM columns; a head_dim that fits keeps Q in place
//                  S <- score, mask      lib/score.cuh, lib/mask.cuh; tiles visible as a whole are not tested
//                  m, l, O <- rescale    lib/softmax.cuh
//                  P -> shared memory
//                  O += P V
//                O / l -> O_gmem      m + log l -> lse
//              head_dim_v above HEAD_DIM_V: one block per chunk of V, each makes S again.
// Grid         x: v_chunk + n_v_chunks * (head + heads * slot), slot: positions.cuh, heaviest tiles first
// Tile         TILE_Q x TILE_KV; a warp owns TILE_Q / n_warps rows, lanes_x lanes share a row
// Shared       in acc, swizzled: Q [TILE_Q, HEAD_DIM] | K [TILE_KV, HEAD_DIM] | V [TILE_KV, HEAD_DIM_V] |
//              P [TILE_Q, TILE_KV]; before them the kept blocks, where elements ask for them
// Registers    per thread: S and O, TILE_Q / n_warps / 32 * TILE_KV and * HEAD_DIM_V numbers.  No spills
//              without options; with all of them up to 400 B at 64 numbers of S a thread
// Bytes        per block: Q once (once per key tile when walked in chunks), K and V of its key range, O once
// Barriers     2 block_sync a key tile, each saying that one of K and V has come and the other may be
//              overwritten. V is copied while S is made and the next K while P V is (lib/tiles.cuh); 16-bit
//              inputs convert
// Tried        all loads before S: 36.7 and 34.2 TFLOP/s at head_dim 64 and 128, now 40.1 and 38.4; at
//              head_dim 64 tiles of 64 x 64 (34.4), 128 x 128 (34.8), 128 x 32 (34.3); products unrolled
//              twice: the same (float32, H200, 2026-11)
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/blocks.cuh"
#include "lib/mask.cuh"
#include "lib/philox.cuh"
#include "lib/products.cuh"
#include "lib/score.cuh"
#include "lib/softmax.cuh"
#include "lib/tiles.cuh"

constexpr int width = Vec16<acc>::size;
using Walk = BlockWalk<tile_q, tile_kv, block_q, block_kv>;
constexpr bool asks_blocks = has_block_mask && !Walk::Shape::tiles_are_whole;

struct Smem : KeptBlocks<Walk, asks_blocks> {
  Swizzled<acc, tile_q, head_dim_tile> Q;
  Swizzled<acc, tile_kv, head_dim_tile> K;
  Swizzled<acc, tile_kv, head_dim_v_tile> V;
  Swizzled<acc, tile_q, tile_kv> P;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_02_tiled: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "fwd_02_tiled: Args and launch.py disagree");

// Who holds what of a [TILE_Q, n_cols] result: as Partition in products.cuh, but a row never leaves its warp,
// so that S, P and O of a row meet in the same lanes.  Lane bits 0 and 2 up count along a row, 1 and the rest
// from row to row: a 16-byte read that lanes share then serves two quarter-warps at once (+5 % at head_dim
// 128, H200, 2026-11).
template <int lanes>
constexpr bool divide = head_dim_v_tile % (lanes * width) == 0 && tile_kv % (lanes * width) == 0;
constexpr int lanes_x = head_dim_v_tile >= 128 && divide<16> ? 16 : divide<8> ? 8 : 4;
constexpr int lane_bits = 1 | (lanes_x - 2) << 1;   // those that count along a row

template <int n_cols> struct RowPart {
  static constexpr int lanes_y = 32 / lanes_x;
  static constexpr int rows = tile_q / (lanes_y * n_warps);
  static constexpr int cols = n_cols / lanes_x;
  static constexpr int row_group = rows < width ? rows : width;
  static constexpr int col_groups = cols / width;
  static_assert(rows * lanes_y * n_warps == tile_q && rows % row_group == 0, "fwd_02_tiled: TILE_Q, lanes");
  static_assert(col_groups * width * lanes_x == n_cols, "fwd_02_tiled: columns and lanes");
  int first_row, first_chunk;

  DEVICE explicit RowPart(int thread) {
    const int lane = thread % 32, warp = thread / 32;
    first_row = (warp * lanes_y + ((lane >> 1 & 1) | lane / (2 * lanes_x) << 1)) * row_group;
    first_chunk = (lane & 1) | (lane >> 1 & (lanes_x - 2));
  }
  DEVICE int row(int r) const {
    return first_row + r / row_group * (lanes_y * n_warps * row_group) + r % row_group;
  }
  DEVICE int chunk(int group) const { return first_chunk + group * lanes_x; }
  DEVICE int col(int c) const { return chunk(c / width) * width + c % width; }
};
using ScorePart = RowPart<tile_kv>;
using OutPart = RowPart<head_dim_v_tile>;

// What every score of the block shares.
struct Rules {
  Scoring scoring;
  Masking masking;
  Dropout dropout;
};

// S <- scores in base 2, -inf where hidden.  tests: false where every element is known to be visible.
template <bool tests, class Kept>
DEVICE void modify_scores(const Args& args, const Sequence& seq, const Rules& rules, const ScorePart& part,
                          acc (&S)[ScorePart::rows][ScorePart::cols], i32 i0, i32 j0, Kept is_kept) {
#pragma unroll
  for (int r = 0; r < ScorePart::rows; ++r) {
    const i32 i = i0 + part.row(r);
    Range keys = {0, 0};
    if constexpr (tests) keys = visible_keys(args, seq, i);
#pragma unroll
    for (int c = 0; c < ScorePart::cols; ++c) {
      const i32 j = j0 + part.col(c);
      if (!tests || (visible(args, rules.masking, keys, i, j) && is_kept(i, j)))
        S[r][c] = score_log2(args, rules.scoring, S[r][c], i, j);
      else
        S[r][c] = NEG_INF;
    }
  }
}

// Drop weights of 4 (float64: 2) neighbouring keys.  What is kept is scaled once, at the end.
DEVICE void drop(const Dropout& dropout, Vec16<acc>& weights, i32 i, i32 j) {
  const u32 keeps = dropout_keeps_4(dropout, i, j);
#pragma unroll
  for (int e = 0; e < width; ++e)
    if (!(keeps >> e & 1)) weights.item[e] = 0;
}

KERNEL(n_threads, 1) fwd_02_tiled(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, lane = thread % 32;
  const i64 n_v_chunks = ceil_div(args.head_dim_v, head_dim_v_tile);
  const i32 v0 = static_cast<i32>(blockIdx.x % n_v_chunks) * head_dim_v_tile;
  const QueryTile own = query_tile_of(args, blockIdx.x / n_v_chunks, tile_q);
  if (!own.exists) return;
  const Sequence& seq = own.seq;
  const i32 i0 = own.i0;
  const ScorePart part(thread);
  const OutPart out_part(thread);

  Rules rules = {scoring_of(args, seq, own.h), masking_of(args, seq, own.h), {}};
  if constexpr (has_dropout) rules.dropout = dropout_of(args, seq.b, own.h);

  acc O[OutPart::rows][OutPart::cols], m[OutPart::rows], l[OutPart::rows];   // l: of this lane's columns only
  clear(O);
#pragma unroll
  for (int r = 0; r < OutPart::rows; ++r) m[r] = NEG_INF, l[r] = 0;

  const i32 i1 = smallest(i0 + tile_q, seq.len_q);
  const Range keys = i0 < i1 ? visible_keys(args, seq, i0, i1 - 1) : Range{0, 0};
  Walk walk(args.blocks, seq.b, own.h, i0, i1, keys.begin, lane);
  const auto next_tile = [&](i32 j) {
    if constexpr (has_block_mask) return walk.next(j);
    return j;
  };
  const auto request_Q = [&](i32 d0) {
    const TileSource source = tile_source(args.Q, seq.array_b, seq.q_row0, own.h, i0, i1, d0, args.head_dim);
    request_tile<elem, tile_q, head_dim_tile, n_threads>(smem.Q, args.Q.data, source, thread);
  };
  const auto request_K = [&](i32 j, i32 d0) {
    const TileSource source =
        tile_source(args.K, seq.array_b, seq.k_row0, own.h_k, j, keys.end, d0, args.head_dim);
    request_tile<elem, tile_kv, head_dim_tile, n_threads>(smem.K, args.K.data, source, thread);
  };
  const auto request_V = [&](i32 j) {
    const TileSource source =
        tile_source(args.V, seq.array_b, seq.k_row0, own.h_k, j, keys.end, v0, args.head_dim_v);
    request_tile<elem, tile_kv, head_dim_v_tile, n_threads>(smem.V, args.V.data, source, thread);
  };

  i32 j0 = next_tile(keys.begin / tile_kv * tile_kv);
  if (j0 < keys.end) {
    request_Q(0);
    request_K(j0, 0);
    if (thread < 32) smem.fill_blocks(walk, j0, lane);
  }
#pragma unroll 1
  while (j0 < keys.end) {
    acc S[ScorePart::rows][ScorePart::cols];
    clear(S);
    wait_for_tiles();
    block_sync();   // Q, K and the kept blocks are there; everyone has used V and P of the tile before
    request_V(j0);
    multiply_rows(part, S, smem.Q, smem.K);
#pragma unroll 1
    for (i32 d0 = head_dim_tile; d0 < args.head_dim; d0 += head_dim_tile) {   // the other chunks
      block_sync();   // everyone has used the chunk before: it may be overwritten
      request_Q(d0);
      request_K(j0, d0);
      wait_for_tiles();
      block_sync();   // the chunk is there
      multiply_rows(part, S, smem.Q, smem.K);
    }

    const auto is_kept = [&](i32 i, i32 j) { return smem.keeps(walk, i, j0, j); };
    if (!asks_blocks && is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv))
      modify_scores<false>(args, seq, rules, part, S, i0, j0, is_kept);
    else
      modify_scores<true>(args, seq, rules, part, S, i0, j0, is_kept);

#pragma unroll
    for (int r = 0; r < ScorePart::rows; ++r) {
      acc m_new = m[r];
#pragma unroll
      for (int c = 0; c < ScorePart::cols; ++c) m_new = largest(m_new, S[r][c]);
      m_new = max_over_lanes<lane_bits>(m_new);
      const acc reference = finite_max(m_new), shrink = rescaling(m[r], reference);
      m[r] = m_new;
      l[r] *= shrink;
#pragma unroll
      for (int c = 0; c < OutPart::cols; ++c) O[r][c] *= shrink;
#pragma unroll
      for (int g = 0; g < ScorePart::col_groups; ++g) {
        Vec16<acc> P;
#pragma unroll
        for (int e = 0; e < width; ++e) {
          P.item[e] = exp_score(S[r][g * width + e] - reference);
          l[r] += P.item[e];
        }
        if constexpr (has_dropout) drop(rules.dropout, P, i0 + part.row(r), j0 + part.chunk(g) * width);
        smem.P.chunk(part.row(r), part.chunk(g)) = P;
      }
    }
    wait_for_tiles();
    block_sync();   // V and P are there; everyone has used K and the kept blocks: they may be overwritten
    const i32 j_next = next_tile(j0 + tile_kv);
    if (j_next < keys.end) {
      if (args.head_dim > head_dim_tile) request_Q(0);   // else all of Q stays
      request_K(j_next, 0);
      if (thread < 32) smem.fill_blocks(walk, j_next, lane);
    }
    multiply(out_part, O, smem.P, smem.V);
    j0 = j_next;
  }

  const acc sink_log2 = sink_of(args, own.h), dropout_scale = static_cast<acc>(args.dropout_scale);
#pragma unroll
  for (int r = 0; r < OutPart::rows; ++r) {
    const i32 i = i0 + out_part.row(r);
    RowEnd end = finish_row(m[r], sum_over_lanes<lane_bits>(l[r]), sink_log2, dropout_scale);
    if (i >= seq.len_q) end = {0, NEG_INF, false};   // a row beyond its length does not exist: no sink either
#pragma unroll
    for (int c = 0; c < OutPart::cols; ++c) O[r][c] = end.of(O[r][c]);
    if (i < seq.rows_q && v0 == 0 && out_part.first_chunk == 0)
      Global<acc>(args.lse.data).store(index_of(args.lse, seq.array_b, own.h, seq.q_row0 + i), end.lse);
  }
  const TileSource target =
      tile_source(args.O, seq.array_b, seq.q_row0, own.h, i0, seq.rows_q, v0, args.head_dim_v);
  store_block<out_elem>(out_part, O, 1, args.O.data, target);
}
