// fwd_04_swizzle.cu - attention forward on tensor cores without bank conflicts.   sm_80 and later
//
// Read after   fwd_03_mma.cu          Read next   fwd_05_pipeline.cu
// Changes      chunk c of row r lies at chunk c xor (r % 8): XorTile for PlainTile, nothing else
//
// Why          ldmatrix reads 16 bytes of 8 neighbouring rows at once.  A row of 64 numbers is 128 bytes, all
//              32 banks, so the 8 pieces lie in the same 4 banks and come one after the other.  With the xor
//              each has 4 banks of its own.  Writers and readers permute alike; nobody else notices.
//              Rows of 96 or 32 numbers start in 2 different places already: 4 chunks change places, every
//              second row.  An address along a row costs one xor with a constant, as a tile starts at a
//              multiple of 128 bytes.
// Algorithm    = tiled.forward, as fwd_03_mma
// Grid         x: head + heads * slot, slot: positions.cuh, heaviest tiles first
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a warp owns TILE_Q / n_warps rows, a quad of lanes shares a row
// Shared       in 16 bits, permuted: Q [TILE_Q, HEAD_DIM] | K [TILE_KV, HEAD_DIM] | V [TILE_KV, HEAD_DIM_V]
// Registers    as fwd_03_mma, and no spills
// Built        causal, NVRTC 12.9: registers of a thread, KB of shared memory, bytes of spills, by head_dim
//                                  64            128           256
//              sm_80, bfloat16   144  24   0   194  48   0   244  64   0
//              sm_90, bfloat16   150  24   0   199  48   0   245  64   0
//              sm_120, bfloat16  166  24   0   206  48   0   244  64   0
// Bytes        as fwd_03_mma
// Barriers     2 block_sync a key tile: "everyone has used K and V", "K and V are there"
// Limiter      nobody multiplies while a tile is on its way
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/fragments.cuh"

struct Smem {
  XorTile<tile_q, head_dim_tile> Q;
  XorTile<tile_kv, head_dim_tile> K;
  XorTile<tile_kv, head_dim_v_tile> V;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_04_swizzle: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "fwd_04_swizzle: Args and launch.py disagree");

KERNEL(n_threads, 1) fwd_04_swizzle(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * row_blocks * 16;   // of the warp's first row in the tile
  const QueryTile own = query_tile_of(args, blockIdx.x, tile_q);
  if (!own.exists) return;
  const Sequence& seq = own.seq;
  const i32 i0 = own.i0, i1 = smallest(i0 + tile_q, seq.len_q);
  const Range keys = i0 < i1 ? visible_keys(args, seq, i0, i1 - 1) : Range{0, 0};
  const Rules rules = rules_of(args, seq, own.h);
  const auto is_kept = [](i32, i32) { return true; };

  Fragment<head_dim_v_tile> O;
  O.clear();
  RowState state = no_keys_yet();

  if (keys.begin < keys.end)
    load_tile(smem.Q, args.Q.data, source_of_Q(args, own, i1), thread);
#pragma unroll 1
  for (i32 j0 = keys.begin / tile_kv * tile_kv; j0 < keys.end; j0 += tile_kv) {
    block_sync();   // everyone has used K and V of the tile before: they may be overwritten
    load_tile(smem.K, args.K.data, source_of_K(args, own, j0, keys.end), thread);
    load_tile(smem.V, args.V.data, source_of_V(args, own, j0, keys.end), thread);
    block_sync();   // Q, K and V are there

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
        ldmatrix_x4(K, smem.K.along(address_of_B(smem.K, 16 * c, lane), 2 * k));
#pragma unroll
        for (int a = 0; a < row_blocks; ++a) {
          mma_k16<elem>(S.at[a][2 * c], Q[a], K[0], K[1]);
          mma_k16<elem>(S.at[a][2 * c + 1], Q[a], K[2], K[3]);
        }
      }
    }

    if (is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv))
      modify_scores<false>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    else
      modify_scores<true>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    float shrink[n_rows];
    soften(S, state, shrink, rules.late_scale);
    rescale(O, shrink);

#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k) {
      u32 P[row_blocks][4];
#pragma unroll
      for (int a = 0; a < row_blocks; ++a) repack(P[a], S.at[a][2 * k], S.at[a][2 * k + 1]);
#pragma unroll
      for (int c = 0; c < head_dim_v_tile / 16; ++c) {
        u32 V[4];
        ldmatrix_x4_trans(V, smem.V.along(address_of_B_trans(smem.V, 16 * k, lane), 2 * c));
#pragma unroll
        for (int a = 0; a < row_blocks; ++a) {
          mma_k16<elem>(O.at[a][2 * c], P[a], V[0], V[1]);
          mma_k16<elem>(O.at[a][2 * c + 1], P[a], V[2], V[3]);
        }
      }
    }
  }

  const Results results = results_of(args, own);
  finish(args, own, results, O, state, i0 + warp_row, lane);
  store_fragment<out_elem>(O, results.O, results.O_rows, warp_row, lane);
}
