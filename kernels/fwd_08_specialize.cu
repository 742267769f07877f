// fwd_08_specialize.cu - attention forward, one warp copies and warpgroups multiply.   sm_90a
//
// Read after   fwd_07_tma.cu          Read next   fwd_09_overlap.cu
// Changes      a warpgroup of its own for the copies: nobody who multiplies waits for somebody else who does.
//              A stage is given back by an mbarrier of its own (K_empty, V_empty), K before V.  Registers
//              that copying does not need go to the consumers (setmaxnreg)
//
// Why          block_sync held all consumers together: all wanted the tensor cores at once, all did their
//              softmax at once.  Alone, one group's softmax runs under another's products
// Algorithm    = tiled.forward, as fwd_06_wgmma, in two roles
//                producer: Q; for each key tile: K when its stage is empty, V when its stage is
//                consumer: for each key tile: wait K; S = Q K^T; give K back; score, mask; m, l, O <- rescale;
//                          wait V; O += P V; give V back
//                          O / l -> O_gmem      m + log l -> lse
// Grid         x: tiles by sections of heads whose K and V fit the L2 cache, the heaviest of a section first
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a consumer owns 64 rows, a quad of lanes shares a row
// Shared       in 16 bits, as panels of 64 columns (lib/panels.cuh): Q [TILE_Q, HEAD_DIM] |
//              K [N_STAGES][TILE_KV, HEAD_DIM] | V [N_STAGES][TILE_KV, HEAD_DIM_V]; behind them the barriers
// Registers    consumer: S TILE_KV / 2, O HEAD_DIM_V / 2 floats, P TILE_KV / 4 words.  No spills.  How many
//              each role has: lib/roles.cuh
// Bytes        per block: Q once, K and V of the key tiles it visits, O once
// Barriers     K_full, V_full, Q_full: "is there".  K_empty, V_empty: "all consumers have used it"
// Limiter      one group's own products and softmax still come one after the other
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/fragments.cuh"
#include "lib/maps.cuh"
#include "lib/mbarrier.cuh"
#include "lib/panels.cuh"
#include "lib/roles.cuh"
#include "lib/sections.cuh"

struct Smem {
  PanelTile<tile_q, head_dim_tile> Q;
  PanelTile<tile_kv, head_dim_tile> K[n_stages];     // ring: stage = number of the tile % n_stages
  PanelTile<tile_kv, head_dim_v_tile> V[n_stages];   // same stage as its K
  Shared<u64, 1, n_stages> K_full, K_empty, V_full, V_empty;
  Shared<u64, 1, 1> Q_full;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_08_specialize: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "fwd_08_specialize: Args and launch.py disagree");

KERNEL(n_role_threads, 1) fwd_08_specialize(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int role = shfl(static_cast<int>(threadIdx.x) / 128, 0);   // 0: producer.  Uniform in a warp
  const QueryTile own = query_tile_in_section<elem>(args, blockIdx.x, tile_q);
  const Sequence& seq = own.seq;
  const i32 i0 = own.i0, i1 = smallest(i0 + tile_q, seq.len_q);
  const Range keys = visible_keys(args, seq, i0, i1 - 1);
  i32 j0 = keys.begin / tile_kv * tile_kv;
  Ring<n_stages> at;

  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < n_stages; ++s) {
      mbarrier_init(smem.K_full.address(0, s), 1);
      mbarrier_init(smem.V_full.address(0, s), 1);
      mbarrier_init(smem.K_empty.address(0, s), n_groups);
      mbarrier_init(smem.V_empty.address(0, s), n_groups);
    }
    mbarrier_init(smem.Q_full.address(0, 0), 1);
    mbarrier_init_fence();
  }
  block_sync();   // the barriers are there

  if (role == 0) {
    registers_shrink<producer_registers>();
    if (threadIdx.x == 0 && j0 < keys.end) {
      mbarrier_arrive_expect(smem.Q_full.address(0, 0), smem.Q.n_bytes);
      smem.Q.load(args.maps.Q, smem.Q_full.address(0, 0), i0, own.h, seq.array_b);
#pragma unroll 1
      for (; j0 < keys.end; j0 += tile_kv, at.next()) {
        const u32 K_full = smem.K_full.address(0, at.stage), V_full = smem.V_full.address(0, at.stage);
        at.wait_empty(smem.K_empty);   // all consumers have used the K that was here
        mbarrier_arrive_expect(K_full, smem.K[0].n_bytes);
        smem.K[at.stage].load(args.maps.K, K_full, j0, own.h_k, seq.array_b);
        at.wait_empty(smem.V_empty);   // all consumers have used the V that was here
        mbarrier_arrive_expect(V_full, smem.V[0].n_bytes);
        smem.V[at.stage].load(args.maps.V, V_full, j0, own.h_k, seq.array_b);
      }
    }
    return;
  }

  registers_grow<consumer_registers>();
  const int thread = threadIdx.x - 128, lane = thread % 32;
  const int warp_row = thread / 32 * 16, group_row = 64 * (role - 1);   // the first of its rows in the tile
  const bool leads = thread % 128 == 0;   // speaks for the group
  const Rules rules = rules_of(args, seq, own.h);
  const auto is_kept = [](i32, i32) { return true; };

  Fragment<head_dim_v_tile> O;
  O.clear();
  RowState state = no_keys_yet();

  if (j0 < keys.end) mbarrier_wait(smem.Q_full.address(0, 0), 0);   // Q is there
#pragma unroll 1
  for (; j0 < keys.end; j0 += tile_kv, at.next()) {
    Fragment<tile_kv> S;
    at.wait_full(smem.K_full);   // K of tile j0 is there
    wgmma_fence();               // S is written anew by wgmma
#pragma unroll
    for (int k = 0; k < head_dim_tile / 16; ++k)
      wgmma<elem>(registers_of(S), smem.Q.descriptor_K(k, group_row), smem.K[at.stage].descriptor_K(k),
                  k > 0);
    wgmma_commit();
    wgmma_wait<0>();   // S is there, K is used
    if (leads) mbarrier_arrive(smem.K_empty.address(0, at.stage));

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
    at.wait_full(smem.V_full);   // V of tile j0 is there
    wgmma_fence();               // P and O were written by ordinary code
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k)
      wgmma<elem, 1>(registers_of(O), P[k], smem.V[at.stage].descriptor_MN(k), true);
    wgmma_commit();
    wgmma_wait<0>();   // O is there, V is used
    if (leads) mbarrier_arrive(smem.V_empty.address(0, at.stage));
  }

  const Results results = results_of(args, own);
  finish(args, own, results, O, state, i0 + warp_row, lane);
  store_fragment<out_elem>(O, results.O, results.O_rows, warp_row, lane);
}
