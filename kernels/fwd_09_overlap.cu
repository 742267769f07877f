// fwd_09_overlap.cu - attention forward, a warpgroup's products run under its own softmax.   sm_90a
//
// Read after   fwd_08_specialize.cu          Read next   fwd_10_persistent.cu
// Changes      S of the next tile is issued before O += P V of this one: the tensor cores have two products
//              in hand when a group waits.  The softmax no longer looks for the maximum: weights are taken
//              under the one of the first tile, and their sum says if that was right (lib/lazy.cuh)
//
// Why          a comparison an element is an eighth of the softmax, and no exponential could begin before the
//              last one was made.  Any number may stand for the maximum, as long as 2^(score - m) is in range
// Algorithm    = tiled.forward.  Consumer:
//                S = Q K_0^T; m, l, P <- S
//                for each key tile j from 1 on:
//                  issue S = Q K_j^T; issue O += P V_{j-1}; wait for S, give K back; wait for O, give V back
//                  P <- 2^(scale S - m), l += their sum.  A sum that is too large: m, O <- as before
//                O += P V_last;  O / l -> O_gmem;  m + log l -> lse
// Grid, tile, shared, barriers        as fwd_08_specialize
// Registers    consumer: S TILE_KV / 2 and O HEAD_DIM_V / 2 floats, P TILE_KV / 4 words, at once.  No spills
// Bytes        as fwd_08_specialize
// Limiter      a block that writes O leaves its SM idle until the next one's first tile is there
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/lazy.cuh"
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
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_09_overlap: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "fwd_09_overlap: Args and launch.py disagree");

KERNEL(n_role_threads, 1) fwd_09_overlap(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int role = shfl(static_cast<int>(threadIdx.x) / 128, 0);   // 0: producer.  Uniform in a warp
  const QueryTile own = query_tile_in_section<elem>(args, blockIdx.x, tile_q);
  const Sequence& seq = own.seq;
  const i32 i0 = own.i0, i1 = smallest(i0 + tile_q, seq.len_q);
  const Range keys = visible_keys(args, seq, i0, i1 - 1);
  i32 j0 = keys.begin / tile_kv * tile_kv;
  Ring<n_stages> K_at, V_at;

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
      for (; j0 < keys.end; j0 += tile_kv, K_at.next()) {
        const u32 K_full = smem.K_full.address(0, K_at.stage), V_full = smem.V_full.address(0, K_at.stage);
        K_at.wait_empty(smem.K_empty);   // all consumers have used the K that was here
        mbarrier_arrive_expect(K_full, smem.K[0].n_bytes);
        smem.K[K_at.stage].load(args.maps.K, K_full, j0, own.h_k, seq.array_b);
        K_at.wait_empty(smem.V_empty);   // all consumers have used the V that was here
        mbarrier_arrive_expect(V_full, smem.V[0].n_bytes);
        smem.V[K_at.stage].load(args.maps.V, V_full, j0, own.h_k, seq.array_b);
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
  const auto release = [&](Shared<u64, 1, n_stages>& empty, Ring<n_stages>& at) {
    if (leads) mbarrier_arrive(empty.address(0, at.stage));
    at.next();
  };

  Fragment<tile_kv> S;
  Fragment<head_dim_v_tile> O;
  u32 P[tile_kv / 16][4];   // weights of the tile whose P V is due
  O.clear();
  RowState state = no_keys_yet();

  const auto issue_S = [&] {
    K_at.wait_full(smem.K_full);   // K of tile j0 is there
    wgmma_fence();                 // S is written anew by wgmma
#pragma unroll
    for (int k = 0; k < head_dim_tile / 16; ++k)
      wgmma<elem>(registers_of(S), smem.Q.descriptor_K(k, group_row), smem.K[K_at.stage].descriptor_K(k),
                  k > 0);
    wgmma_commit();
  };
  const auto issue_O = [&] {
    V_at.wait_full(smem.V_full);   // V of the tile before is there
    wgmma_fence();                 // P and O were written by ordinary code
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k)
      wgmma<elem, 1>(registers_of(O), P[k], smem.V[V_at.stage].descriptor_MN(k), true);
    wgmma_commit();
  };
  const auto change_S = [&] {
    if (is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv))
      modify_scores<false>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    else
      modify_scores<true>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
  };
  const auto soften_S = [&] {
    float shrink[n_rows];
    soften_lazily(S, state, shrink, rules.late_scale);
    rescale(O, shrink);
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k) repack(P[k], S.at[0][2 * k], S.at[0][2 * k + 1]);
  };

  const bool sees_keys = j0 < keys.end;
  if (sees_keys) {
    mbarrier_wait(smem.Q_full.address(0, 0), 0);   // Q is there
    issue_S();
    wgmma_wait<0>();   // S is there, K is used
    release(smem.K_empty, K_at);
    change_S();
    soften_S();
    j0 += tile_kv;
  }
#pragma unroll 1
  for (; j0 < keys.end; j0 += tile_kv) {
    issue_S();
    issue_O();
    wgmma_wait<1>();   // S is there, K is used
    release(smem.K_empty, K_at);
    wgmma_wait<0>();   // O has the tile before, V is used; P may be written
    release(smem.V_empty, V_at);
    change_S();
    float sum[n_rows];
    weigh(S, state, rules.late_scale, P, sum);
    if (are_trusted(sum)) {
#pragma unroll
      for (int r = 0; r < n_rows; ++r) state.l[r] += sum[r];
    } else {
      soften_S();
    }
  }
  if (sees_keys) {
    issue_O();
    wgmma_wait<0>();   // O is there
  }

  const Results results = results_of(args, own);
  finish(args, own, results, O, state, i0 + warp_row, lane);
  store_fragment<out_elem>(O, results.O, results.O_rows, warp_row, lane);
}
