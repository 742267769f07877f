// cluster_gradients.cuh - group 2 of bwd_07_cluster: dS, dK, columns of dQ, and what options sum.   sm_90a
#pragma once
#include "cluster_share.cuh"

constexpr int SLOT_DALIBI = 0;   // workspace: acc [slots of blocks' keys, heads], parts of dalibi_slopes
constexpr int SLOT_DBIAS = 1;    // workspace: acc [batch, heads, len_k], dbias summed over the queries

struct GradientsGroup {
  const MappedArgs& args;
  Smem& smem;
  Owner own = {};
  const int thread, lane;
  i32 j;                      // the lane's keys: j, j + 8
  DqShare share;
  Step step;                  // of the newest dP
  HeadRules rules = {};
  i32 rules_h = -1;           // whose they are
  OptionSums sums = {};
  float dK[head_dim_tile / 2], dP[n_scores], dQ[gradients_cols / 2];
  u32 V[held_V + 1][4];
  Words dS;                   // the A operand of dK

  DEVICE GradientsGroup(const MappedArgs& args, Smem& smem, int thread)
      : args(args), smem(smem), thread(thread), lane(thread % 32), j(0),
        share(args, smem, first_gradients_col(cluster_rank()), thread) {}

  DEVICE void run() {
    const u32 n = walk_tiles(*this);
    if (n == 0) return;
    // What the peer's groups say of the last dS has arrived: nothing reaches into a block that has left.
    wait_empty(smem.dS_empty, n);
    wait_empty(smem.dS_empty, n + 1);
  }

  // A tile of keys, up to dP of its first step n.
  DEVICE void begin(u32 n) {
    own = owner_of(args, tile_of(smem, n));
    j = own.j0 + thread / 32 * 16 + lane / 4;
    const u32 key_tile = stays ? shfl(step.key_tile(), 0) : 0;
    take_keys(args, smem, own, key_tile);
    wait_full(smem.V_full, key_tile);   // V, K_peer
    hold(V, held_V, smem.V, thread);
#pragma unroll
    for (int d = 0; d < head_dim_tile / 2; ++d) dK[d] = 0;
    float next[n_scores];   // new in every tile, as in every step
    ask_dP(next, n);
    wgmma_wait<0>();   // dP
#pragma unroll
    for (int at = 0; at < n_scores; ++at) dP[at] = next[at];
  }

  DEVICE void read_step(u32 n) {
    wait_full(smem.Q_full, n);   // the step is there, and Q
    step = smem.steps.as<Step>(n % n_steps, 0);
  }

  DEVICE void ask_dP(float (&dP)[n_scores], u32 n) {
    for (int part = dO_parts - 1; part > 0; --part) {   // what 16 bits of dO lose
      wait_full(smem.dO_full, dO_use(n, part));
      product(dP, smem.V, V, held_V, smem.dO[0], part < dO_parts - 1);
      wgmma_wait<0>();   // dO is read
      if (thread == 0) arrive_at_both(smem.dO_empty, dO_use(n, part));
    }
    wait_full(smem.dO_full, dO_use(n));   // dO and delta are there
    product(dP, smem.V, V, held_V, smem.dO[n % n_dO], dO_parts > 1);
  }

  DEVICE void differentiate(u32 n) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const Pack<float, 2> delta = smem.delta.as<Pack<float, 2>>(n % 2, 8 * c + lane % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) dP[4 * c + e] -= delta.item[e % 2];
    }
    wait_full(smem.P_full, n);   // the other group has written P
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Vec16<u32> packed = smem.P.as<Vec16<u32>>((n % 2 * 4 + k) * 128 + thread, 0);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int at = 4 * k + r;
        const float low = low_of<elem>(packed.item[r]), high = high_of<elem>(packed.item[r]);
        dS[k][r] = pack<elem>(low * dP[2 * at], high * dP[2 * at + 1]);
      }
    }
    if (has_bias || step.tests()) {   // a hidden pair may have met NaN
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Vec16<u32> packed = smem.P.as<Vec16<u32>>((n % 2 * 4 + k) * 128 + thread, 0);
#pragma unroll
        for (int r = 0; r < 4; ++r) dS[k][r] = hide_scores(dS[k][r], packed.item[r]);
      }
    }
  }
  // The same from exact weights, with what options want.
  DEVICE void differentiate_exactly(u32 n) {
    const Sequence& seq = own.tile.seq;
    if (step.h != rules_h) leave_head();
    rules_h = step.h;
    rules = head_rules_of(args, seq, step.h);
    KeptWeights kept = {};
    if constexpr (has_dropout) kept = kept_weights_of(rules.dropout, step.i0, j, lane);
    float weights[n_scores], slopes[n_scores];
    wait_full(smem.P_full, n);   // the other group has written P
    take(smem, weights, 0, thread);
    if constexpr (has_softcap) take(smem, slopes, 8, thread);
    const int row = n % 2;
    if (step.tests()) {
      const Range queries[2] = {visible_queries(args, seq, j, j), visible_queries(args, seq, j + 8, j + 8)};
      make_gradients<true>(args, rules, dP, weights, dS, slopes, kept, smem.delta, row, step.i0, j, queries,
                           sums, lane);
    } else {
      make_gradients<false>(args, rules, dP, weights, dS, slopes, kept, smem.delta, row, step.i0, j, {}, sums,
                            lane);
    }
    pack_scores(dS, dP);
  }

  // The sums of a head's queries -> memory.
  DEVICE void leave_head() {
    const Sequence& seq = own.tile.seq;
    if (rules_h < 0) return;
    if constexpr (dbias_case == 2)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = warp_sum<4>(sums.columns[half]);
        const i32 key = j + 8 * half;
        if (lane % 4 == 0 && key < seq.rows_k)
          Global<acc>(args.workspace[SLOT_DBIAS])
              .store((seq.array_b * args.heads + rules_h) * args.len_k + seq.k_row0 + key, total);
      }
    if constexpr (wants_dalibi) {
      const float mine = warp_sum(sums.slope);
      if (lane == 0) smem.sums(0, thread / 32) = mine;
      barrier_sync(GRADIENTS, 128);   // all warps of the group have written
      const i64 tile = own.j0 / own_keys;   // pass_dalibi counts the blocks' tiles
      const i64 slot = is_packed ? seq.k_row0 / own_keys + seq.b + tile : tile * args.batch + seq.b;
      if (thread == 0 && own.j0 < seq.rows_k)
        Global<acc>(args.workspace[SLOT_DALIBI])
            .store(slot * args.heads + rules_h,
                   smem.sums(0, 0) + smem.sums(0, 1) + smem.sums(0, 2) + smem.sums(0, 3));
      barrier_sync(GRADIENTS, 128);   // the sums are read
    }
    sums = {};
  }

  // dP -> dS of step n, packed for dK, stored here and in the peer for dQ.
  DEVICE void make_dS(u32 n) {
    if (thread == 0) arrive_at_both(smem.dO_empty, dO_use(n));   // dP is complete
    if constexpr (is_exact) differentiate_exactly(n);
    else differentiate(n);
    mbarrier_arrive(at(smem.P_empty, n));   // P is read
    mbarrier_arrive(at(smem.dP_read, n));   // delta is read
    wait_empty(smem.dS_empty, n);   // dQ of step n - 2 is complete in both blocks
    PanelTile<own_keys, tile_q>& mine = smem.dS[n % 2][0];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      stmatrix_x4(mine.address(thread / 32 * 16 + lane % 16, 2 * k + lane / 16), dS[k]);
    fence_async_shared();           // wgmma and the copy to the peer read it
    barrier_sync(GRADIENTS, 128);   // the group's dS is stored, also for wgmma and the copy
    if (thread == 0) {
      const u32 peer = 1 - own.rank;
      mbarrier_arrive_expect(at(smem.dS_full, n), mine.n_bytes);
      bulk_to_peer(cluster_address(smem.dS[n % 2][1].address(), peer), mine.address(), mine.n_bytes,
                   cluster_address(at(smem.dS_full, n), peer));
    }
  }

  // Step n, whose dP is complete, and dP of the next.
  template <bool is_first> DEVICE void go_on(u32 n) {
    make_dS(n);
    add_product(dK, dS, smem.Q[n % n_Q]);
    if (!is_exact && !is_first && step.is_third()) share.add(dQ, n - 2);
    if constexpr (is_first) {
      wgmma_wait<0>();   // dK has read Q and dS
    } else {
      share.start(dQ, n - 1);
      wgmma_wait<1>();   // dK has read Q and dS
    }
    if (thread == 0) arrive_at_both(smem.Q_empty, n);
    float next[n_scores];
    ask_dP(next, n + 1);
    read_step(n + 1);
    if constexpr (!is_first) {
      wgmma_wait<1>();   // dQ has read dS
      if (thread == 0) arrive_at_both(smem.dS_empty, n - 1);
    }
    wgmma_wait<0>();   // dP
#pragma unroll
    for (int at = 0; at < n_scores; ++at) dP[at] = next[at];
    if constexpr (is_exact && !is_first) share.add(dQ, n - 1);   // registers
  }

  // Step n, the last, but for its dQ.
  DEVICE void finish(u32 n) {
    make_dS(n);
    add_product(dK, dS, smem.Q[n % n_Q]);
    wgmma_wait<0>();   // dK
    if (thread == 0) arrive_at_both(smem.Q_empty, n);
    if (!is_exact && step.is_third()) share.add(dQ, n - 2);
    if (step.is_second()) {
      share.start(dQ, n - 1);
      wgmma_wait<0>();   // dQ has read dS
      if (thread == 0) arrive_at_both(smem.dS_empty, n - 1);
      share.add(dQ, n - 1);
    }
    if constexpr (is_exact) leave_head();
    rules_h = -1;
    share.start(dQ, n);
    wgmma_wait<0>();   // dQ
    share.release(n);
    store_keys(args, tile_of(smem, n), dK, static_cast<float>(args.scale), args.dK, args.dK_sum,
               args.head_dim, thread);
    share.add(dQ, n);
  }
};
