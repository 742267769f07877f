// fwd_03_mma.cu - attention forward: both products on tensor cores.   sm_80; sm_75 in float16
//
// Read after   fwd_02_tiled.cu          Read next   fwd_04_swizzle.cu
// Changes      16-bit tiles as they are; S = Q K^T and O += P V by mma.sync.  The registers in which S comes
//              out are those in which P goes in: no trip through memory
//
// Algorithm    = tiled.forward.   One block: TILE_Q rows of one (batch, head); 16 of them are one mma's.
//                for each key tile that some row may see:
//                  S = Q K^T             ldmatrix, mma.sync; float32 in registers
//                  S <- hidden           lib/fragments.cuh; tiles visible as a whole are not tested
//                  m, l, O <- rescale    scale is part of the exponent's multiply-add
//                  O += P V              P = S packed to 16 bits; V is transposed by ldmatrix
//                O / l -> O_gmem      m + log l -> lse
// Grid         x: head + heads * slot, slot: positions.cuh, heaviest tiles first
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a warp owns TILE_Q / n_warps rows, a quad of lanes shares a row
// Shared       in 16 bits: Q [TILE_Q, HEAD_DIM] | K [TILE_KV, HEAD_DIM] | V [TILE_KV, HEAD_DIM_V], padded
//              with zeros beyond head_dim
// Registers    per thread, of 16 rows a warp: S TILE_KV / 2 and O HEAD_DIM_V / 2 floats.  No spills,
//              except on sm_75 at 256: up to 500 B
// Built        causal, NVRTC 12.9: registers of a thread, KB of shared memory, bytes of spills, by head_dim
//                                  64            128           256
//              sm_75, float16    152  24   0   205  48   0   255  64 420
//              sm_80, bfloat16   146  24   0   184  48   0   243  64   0
//              sm_90, bfloat16   152  24   0   189  48   0   244  64   0
//              sm_120, bfloat16  141  24   0   180  48   0   241  64   0
// Bytes        per block: Q once, K and V of its key range, O once
// Barriers     2 block_sync a key tile: "everyone has used K and V", "K and V are there"
// Limiter      bank conflicts: the 8 rows that ldmatrix reads at once start in one bank, so it takes 8 turns
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/fragments.cuh"

struct Smem {
  PlainTile<tile_q, head_dim_tile> Q;
  PlainTile<tile_kv, head_dim_tile> K;
  PlainTile<tile_kv, head_dim_v_tile> V;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_03_mma: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "fwd_03_mma: Args and launch.py disagree");

KERNEL(n_threads, 1) fwd_03_mma(const __grid_constant__ Args args) {
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
