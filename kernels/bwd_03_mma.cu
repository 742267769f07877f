// bwd_03_mma.cu - attention backward: all five products on tensor cores.   sm_80; sm_75 in float16
//
// Read after   bwd_02_tiled.cu          Read next   bwd_04_pipeline.cu
// Changes      16-bit tiles, products by mma.sync.  Scores come transposed, S^T = K Q^T: then P^T and dS^T
//              lie as dV and dK want them, by rows, and dS^T serves dQ too, read by ldmatrix.trans
//
// Algorithm    = tiled_backward.backward.   One block: TILE_KV keys of one (batch, key head).
//                K, V -> shared, once
//                for each query head of the group, each query tile that sees these keys:
//                  S^T = K Q^T,  dP^T = V dO^T                 registers
//                  P = 2^(scale S - lse),  dS = P (dP - delta) lib/mma_gradient.cuh; both to shared, 16 bits
//                  dV += P^T dO,  dK += dS^T Q                 registers, over the whole walk
//                  dQ_sum += dS K                              memory, atomically, 16 bytes at a time
//                dK * scale, dV -> memory                      (pass_convert makes dQ of dQ_sum)
//              Which operand needs a transpose: see the table in lib/shares.cuh.  An mma wants k along
//              the rows of A and along the columns of B as they lie in memory.  S and dP have d for k, and
//              nothing is turned.  dV and dK have queries for k: dO and Q are turned by ldmatrix.trans on
//              their way.  dQ has keys for k: K is turned, and dS^T turned back
// Grid         x: key head + heads_k * slot, slot: positions.cuh, heaviest tiles first
// Tile         TILE_Q x TILE_KV x HEAD_DIM; each product is cut among the warps so that they read least
// Shared       in 16 bits, chunks permuted: K, V [TILE_KV, .] | Q, dO [TILE_Q, .] | P^T, dS^T [TILE_KV,
//              TILE_Q]; lse, delta [TILE_Q] in float32
// Registers    per thread: dK, dV 2 TILE_KV HEAD_DIM / n_threads floats, S and dP TILE_Q TILE_KV / n_threads.
//              No spills, except on sm_75 from 128 on: up to 500 B
// Built        causal, NVRTC 12.9: registers of a thread, KB of shared memory, bytes of spills, by head_dim
//                                  64            128           256
//              sm_75, float16    228  32   0   255  56 228   255  50  24
//              sm_80, bfloat16   224  32   0   255  56   0   255  50   0
//              sm_90, bfloat16   226  32   0   245  56   0   245  50   0
//              sm_120, bfloat16  214  32   0   245  56   0   238  50   0
// Bytes        per block: K, V, dK, dV once; Q, dO, lse, delta and dQ_sum (an addition) per query tile
// Barriers     3 a tile: "operands are free", "operands are there", "P and dS are there"
// Limiter      nothing is loaded while anything is multiplied
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/mma_gradient.cuh"

using OfScores = Share<tile_kv, tile_q>;   // S^T, dP^T

struct Smem {
  XorTile<tile_kv, head_dim_tile> K;
  XorTile<tile_kv, head_dim_v_tile> V;
  XorTile<tile_q, head_dim_tile> Q;
  XorTile<tile_q, head_dim_v_tile> dO[dO_parts];
  XorTile<tile_kv, tile_q> P;   // transposed, as are S and dP
  XorTile<tile_kv, tile_q> dS;
  TileNumbers<1> of_rows;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "bwd_03_mma: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "bwd_03_mma: Args and launch.py disagree");

KERNEL(n_threads, 1) bwd_03_mma(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const KeyTile own = key_tile_of(args, blockIdx.x, tile_kv, args.heads_k);
  const Sequence& seq = own.seq;
  const i32 j0 = own.j0, j1 = smallest(j0 + tile_kv, seq.len_k);
  const Range queries = j0 < j1 ? visible_queries(args, seq, j0, j1 - 1) : Range{0, 0};
  const i64 group = queries.begin < queries.end ? args.heads / args.heads_k : 0;
  const float scale = static_cast<float>(args.scale);
  const float scale_log2 = static_cast<float>(args.scale * SCORE_UNIT);

  Share<tile_kv, head_dim_tile> dK;
  Share<tile_kv, head_dim_v_tile> dV;
  dK.clear();
  dV.clear();

  if (group > 0) {
    load_tile(smem.K, args.K.data, key_rows(args.K, seq, own.h, j0, j1, args.head_dim), thread);
    load_tile(smem.V, args.V.data, key_rows(args.V, seq, own.h, j0, j1, args.head_dim_v), thread);
  }
#pragma unroll 1
  for (i64 h = own.h * group; h < (own.h + 1) * group; ++h) {
    const HeadRules rules = head_rules_of(args, seq, h);
#pragma unroll 1
    for (i32 i0 = queries.begin / tile_q * tile_q; i0 < queries.end; i0 += tile_q) {
      block_sync();   // every product of the tile before is done: its operands may be overwritten
      load_tile(smem.Q, args.Q.data, query_rows(args.Q, seq, h, i0, seq.len_q, args.head_dim), thread);
      load_dO<false>(smem.dO, args.dO.data, query_rows(args.dO, seq, h, i0, seq.len_q, args.head_dim_v),
                     thread);
      smem.of_rows.load<false>(args, seq, h, i0, 0, thread);
      block_sync();   // the operands (and K, V) are there

      OfScores S, dP;
      S.clear();
      dP.clear();
      multiply_rows(S, smem.K, smem.Q, 0, warp, lane);
      weigh(S, smem.of_rows, 0, scale_log2, 0, warp, lane);
      for (auto& dO : smem.dO) multiply_rows(dP, smem.V, dO, 0, warp, lane);
      differentiate(S, dP, smem.of_rows, 0, 0, warp, lane);
      if (!is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv))
        hide(args, S, dP, seq, rules, i0, 0, j0, warp, lane, [](i32, i32) { return true; });
      store_scores(S, smem.P, 0, warp, lane);
      store_scores(dP, smem.dS, 0, warp, lane);
      block_sync();   // P and dS are there

      for (auto& dO : smem.dO) multiply(dV, smem.P, dO, warp, lane);
      multiply(dK, smem.dS, smem.Q, warp, lane);
      Share<tile_q, head_dim_tile> dQ;
      dQ.clear();
      multiply_columns(dQ, smem.dS, smem.K, 0, warp, lane);
      add_share(dQ, args.dQ_sum.data, query_rows(args.dQ_sum, seq, h, i0, seq.len_q, args.head_dim), warp,
                lane);
    }
  }

  const i32 existing = seq.len_k - j0;
  store_share<out_elem>(dK, scale, args.dK.data, key_rows(args.dK, seq, own.h, j0, seq.rows_k, args.head_dim),
                        existing, warp, lane);
  store_share<out_elem>(dV, 1.f, args.dV.data, key_rows(args.dV, seq, own.h, j0, seq.rows_k, args.head_dim_v),
                        existing, warp, lane);
}
