// fwd_05_pipeline.cu - attention forward on tensor cores, K and V double-buffered.   sm_80 and later
//
// Read after   fwd_04_swizzle.cu          Read next   nothing yet: the last forward rung
// Changes      K and V have two stages: tile j + 1 is asked for before tile j is used, and one barrier a tile
//              is left.  Every option of the contract
//
// Algorithm    = tiled.forward.   One block: TILE_Q rows of one (batch, head); 16 of them are one mma's.
//                ask for Q and the first K, V
//                for each key tile that some row may see:
//                  wait; ask for the next K, V
//                  S = Q K^T             ldmatrix, mma.sync; float32 in registers
//                  S <- score, mask      lib/fragments.cuh; tiles visible as a whole are not tested
//                  m, l, O <- rescale    scale is part of the exponent's multiply-add where nothing is added
//                  O += P V              P = S packed to 16 bits; V is transposed by ldmatrix
//                O / l -> O_gmem      m + log l -> lse
// Grid         x: split + n_splits * tile.  Tiles by sections of heads whose K and V fit the L2 cache, the
//              heaviest of a section first (lib/sections.cuh).
//              Where query tiles are too few to fill the GPU, blocks share the keys of a tile: each writes a
//              part, and pass_merge puts them together
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a warp owns TILE_Q / n_warps rows, a quad of lanes shares a row
// Shared       in 16 bits, permuted: Q [TILE_Q, HEAD_DIM] | K [2][TILE_KV, HEAD_DIM] |
//              V [2][TILE_KV, HEAD_DIM_V]; behind them the kept blocks, where elements ask for them
// Registers    per thread, of 16 rows a warp: S TILE_KV / 2 and O HEAD_DIM_V / 2 floats.  No spills without
//              options
// Bytes        per block: Q once, K and V of its key range, O once
// Barriers     1 block_sync a key tile: "tile j is there, and everyone has used tile j - 1"
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/blocks.cuh"
#include "lib/fragments.cuh"
#include "lib/sections.cuh"

using Walk = BlockWalk<tile_q, tile_kv, block_q, block_kv>;
constexpr bool asks_blocks = has_block_mask && !Walk::Shape::tiles_are_whole;

struct Tiles {
  XorTile<tile_q, head_dim_tile> Q;
  XorTile<tile_kv, head_dim_tile> K[2];     // ring: stage = number of the tile % 2
  XorTile<tile_kv, head_dim_v_tile> V[2];   // same stage as its K
};
struct Smem : Tiles, KeptBlocks<Walk, asks_blocks, 2> {};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_05_pipeline: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "fwd_05_pipeline: Args and launch.py disagree");

KERNEL(n_threads, 1) fwd_05_pipeline(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * row_blocks * 16;   // of the warp's first row in the tile
  const i64 n_shares = is_split ? n_splits : 1, split = blockIdx.x % n_shares;
  const QueryTile own = query_tile_in_section<elem>(args, blockIdx.x / n_shares, tile_q);
  if (!own.exists) return;
  const Sequence& seq = own.seq;
  const i32 i0 = own.i0, i1 = smallest(i0 + tile_q, seq.len_q);
  Range keys = i0 < i1 ? visible_keys(args, seq, i0, i1 - 1) : Range{0, 0};
  if constexpr (is_split) keys = share_of(keys, split);
  const Rules rules = rules_of(args, seq, own.h);
  Walk walk(args.blocks, seq.b, own.h, i0, i1, keys.begin, lane);
  const auto next_tile = [&](i32 j) {
    if constexpr (has_block_mask) return walk.next(j);
    return j;
  };
  const auto request_KV = [&](i32 j, int stage) {
    request_tile(smem.K[stage], args.K.data, source_of_K(args, own, j, keys.end), thread);
    request_tile(smem.V[stage], args.V.data, source_of_V(args, own, j, keys.end), thread);
    if (thread < 32) smem.fill_blocks(walk, j, lane, stage);
    cp_async_commit();
  };

  Fragment<head_dim_v_tile> O;
  O.clear();
  RowState state = no_keys_yet();

  i32 j0 = next_tile(keys.begin / tile_kv * tile_kv);
  int stage = 0;
  if (j0 < keys.end) {
    request_tile(smem.Q, args.Q.data, source_of_Q(args, own, i1), thread);
    request_KV(j0, stage);
  }
#pragma unroll 1
  while (j0 < keys.end) {
    cp_async_wait<0>();
    block_sync();   // tile j0 (and Q) is there; everyone has used the one before: its stage may be refilled
    const i32 j_next = next_tile(j0 + tile_kv);
    if (j_next < keys.end) request_KV(j_next, stage ^ 1);

    Fragment<tile_kv> S;
    S.clear();
#pragma unroll
    for (int k = 0; k < head_dim_tile / 16; ++k) {
      u32 Q[row_blocks][4];
#pragma unroll
      for (int a = 0; a < row_blocks; ++a)
        ldmatrix_x4(Q[a], smem.Q.along(address_of_A(smem.Q, warp_row + 16 * a, lane), 2 * k));
#pragma unroll
      for (int c = 0; c < tile_kv / 16; ++c) {
        u32 K[4];
        ldmatrix_x4(K, smem.K[0].along(address_of_B(smem.K[stage], 16 * c, lane), 2 * k));
#pragma unroll
        for (int a = 0; a < row_blocks; ++a) {
          mma_k16<elem>(S.at[a][2 * c], Q[a], K[0], K[1]);
          mma_k16<elem>(S.at[a][2 * c + 1], Q[a], K[2], K[3]);
        }
      }
    }

    const auto is_kept = [&](i32 i, i32 j) { return smem.keeps(walk, i, j0, j, stage); };
    if (!asks_blocks && is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv))
      modify_scores<false>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    else
      modify_scores<true>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    float shrink[n_rows];
    soften(S, state, shrink, rules.late_scale);
    rescale(O, shrink);
    if constexpr (has_dropout) drop(rules.dropout, S, i0 + warp_row, j0, lane);

#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k) {
      u32 P[row_blocks][4];
#pragma unroll
      for (int a = 0; a < row_blocks; ++a) repack(P[a], S.at[a][2 * k], S.at[a][2 * k + 1]);
#pragma unroll
      for (int c = 0; c < head_dim_v_tile / 16; ++c) {
        u32 V[4];
        ldmatrix_x4_trans(V, smem.V[0].along(address_of_B_trans(smem.V[stage], 16 * k, lane), 2 * c));
#pragma unroll
        for (int a = 0; a < row_blocks; ++a) {
          mma_k16<elem>(O.at[a][2 * c], P[a], V[0], V[1]);
          mma_k16<elem>(O.at[a][2 * c + 1], P[a], V[2], V[3]);
        }
      }
    }
    j0 = j_next;
    stage ^= 1;
  }

  const Results results = is_split ? part_of(args, own, split) : results_of(args, own);
  finish(args, own, results, O, state, i0 + warp_row, lane);
  if constexpr (is_split) store_fragment<acc>(O, results.O, results.O_rows, warp_row, lane);
  else store_fragment<out_elem>(O, results.O, results.O_rows, warp_row, lane);
}
