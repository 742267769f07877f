// fwd_07_tma.cu - attention forward, one thread copies a tile and a barrier counts bytes.   sm_90a
//
// Read after   fwd_06_wgmma.cu          Read next   fwd_08_specialize.cu
// Changes      TMA for cp.async: one thread names a box of the array (tensor maps, lib/maps.cuh), the copy
//              unit computes all addresses, writes the swizzle, and zeros beyond the array.  An mbarrier in
//              shared memory knows when all bytes are there; wgmma needs no fence for what TMA wrote
//
// Why          256 threads computed an address, a comparison and a copy for every 16 bytes, in registers and
//              issue slots that the softmax wants
// Algorithm    = tiled.forward, as fwd_06_wgmma
//                thread 0 asks for Q and the first K, V
//                for each key tile that some row may see:
//                  thread 0 asks for the next K, V; all wait for this one
//                  S = Q K^T; score, mask; m, l, O <- rescale; O += P V
//                O / l -> O_gmem      m + log l -> lse
// Grid         x: tiles by sections of heads whose K and V fit the L2 cache, the heaviest of a section first
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a warpgroup owns 64 rows, a quad of lanes shares a row
// Shared       in 16 bits, as panels of 64 columns (lib/panels.cuh): Q [TILE_Q, HEAD_DIM] |
//              K [2][TILE_KV, HEAD_DIM] | V [2][TILE_KV, HEAD_DIM_V]; behind them KV_full [2]
// Registers    per thread: S TILE_KV / 2, O HEAD_DIM_V / 2 floats, P TILE_KV / 4 words.  No spills
// Bytes        per block: Q once, K and V of the key tiles it visits, O once
// Barriers     KV_full[stage]: "K, V (and the first time Q) are there".  1 block_sync a key tile: "everyone
//              has used tile j - 1"
// Limiter      all eight warps stop at the block_sync before the next tile is asked for
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/fragments.cuh"
#include "lib/maps.cuh"
#include "lib/mbarrier.cuh"
#include "lib/panels.cuh"
#include "lib/sections.cuh"

struct Smem {
  PanelTile<tile_q, head_dim_tile> Q;
  PanelTile<tile_kv, head_dim_tile> K[2];     // ring: stage = number of the tile % 2
  PanelTile<tile_kv, head_dim_v_tile> V[2];   // same stage as its K
  Shared<u64, 1, 2> KV_full;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_07_tma: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes, "fwd_07_tma: Args and launch.py disagree");

KERNEL(n_threads, 1) fwd_07_tma(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * 16, group_row = thread / 128 * 64;   // the first of its rows in the tile
  const QueryTile own = query_tile_in_section<elem>(args, blockIdx.x, tile_q);
  const Sequence& seq = own.seq;
  const i32 i0 = own.i0, i1 = smallest(i0 + tile_q, seq.len_q);
  const Range keys = visible_keys(args, seq, i0, i1 - 1);
  const Rules rules = rules_of(args, seq, own.h);
  const auto is_kept = [](i32, i32) { return true; };
  const auto request_KV = [&](i32 j, int stage) {   // by one thread
    const u32 full = smem.KV_full.address(0, stage);
    mbarrier_arrive_expect(full, smem.K[0].n_bytes + smem.V[0].n_bytes);
    smem.K[stage].load(args.maps.K, full, j, own.h_k, seq.array_b);
    smem.V[stage].load(args.maps.V, full, j, own.h_k, seq.array_b);
  };

  Fragment<head_dim_v_tile> O;
  O.clear();
  RowState state = no_keys_yet();

  i32 j0 = keys.begin / tile_kv * tile_kv;
  int stage = 0;
  u32 phase = 0;   // of both stages: it changes when the ring begins anew
  if (thread == 0) {
    mbarrier_init(smem.KV_full.address(0, 0), 1);
    mbarrier_init(smem.KV_full.address(0, 1), 1);
    mbarrier_init_fence();
    if (j0 < keys.end) {
      mbarrier_expect(smem.KV_full.address(0, 0), smem.Q.n_bytes);   // Q is there when the first K, V are
      smem.Q.load(args.maps.Q, smem.KV_full.address(0, 0), i0, own.h, seq.array_b);
      request_KV(j0, 0);
    }
  }
#pragma unroll 1
  for (; j0 < keys.end; j0 += tile_kv) {
    block_sync();   // the barriers are there; everyone has used the tile before: its stage may be refilled
    if (thread == 0 && j0 + tile_kv < keys.end) request_KV(j0 + tile_kv, stage ^ 1);
    mbarrier_wait(smem.KV_full.address(0, stage), phase);   // tile j0 (and Q) is there

    Fragment<tile_kv> S;
    wgmma_fence();   // S is written anew by wgmma
#pragma unroll
    for (int k = 0; k < head_dim_tile / 16; ++k)
      wgmma<elem>(registers_of(S), smem.Q.descriptor_K(k, group_row), smem.K[stage].descriptor_K(k), k > 0);
    wgmma_commit();
    wgmma_wait<0>();   // S is there

    if (is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv))
      modify_scores<false>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    else
      modify_scores<true>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    float shrink[n_rows];
    soften(S, state, shrink, rules.late_scale);
    rescale(O, shrink);

    u32 P[tile_kv / 16][4];
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k) repack(P[k], S.at[0][2 * k], S.at[0][2 * k + 1]);
    wgmma_fence();   // P and O were written by ordinary code
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k)
      wgmma<elem, 1>(registers_of(O), P[k], smem.V[stage].descriptor_MN(k), true);
    wgmma_commit();
    wgmma_wait<0>();   // O is there, K and V are used
    stage ^= 1;
    if (stage == 0) phase ^= 1;
  }

  const Results results = results_of(args, own);
  finish(args, own, results, O, state, i0 + warp_row, lane);
  store_fragment<out_elem>(O, results.O, results.O_rows, warp_row, lane);
}
