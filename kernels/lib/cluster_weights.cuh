// cluster_weights.cuh - group 1 of bwd_07_cluster: P, dV, columns of dQ.   sm_90a
#pragma once
#include "cluster_share.cuh"

constexpr bool fetches_early = has_room;   // lse, while products run

struct WeightsGroup {
  const MappedArgs& args;
  Smem& smem;
  Owner own = {};
  const int thread, lane;
  i32 j;                      // the lane's keys: j, j + 8
  Walk blocks;                // says where the cluster's blocks of keys begin
  DqShare share;
  Step step;                  // of the newest S
  float scale_log2;           // made once: it is a product of doubles
  float dV[head_dim_v_tile / 2], dQ[weights_cols / 2];
  u32 K[held_K + 1][4];
  Words P;                    // the A operand of dV

  DEVICE WeightsGroup(const MappedArgs& args, Smem& smem, int thread)
      : args(args), smem(smem), thread(thread), lane(thread % 32), j(0),
        blocks(args.blocks_of_key, 0, 0, 0, 0, 0, thread % 32),
        share(args, smem, first_weights_col(cluster_rank()), thread) {}

  DEVICE void run() {
    scale_log2 = head_rules_of(args, sequence_of(args, 0), 0).scoring.scale_log2;
    pin(scale_log2);
    walk_tiles(*this);
  }

  // A tile of keys, up to P of its first step n.
  DEVICE void begin(u32 n) {
    own = owner_of(args, tile_of(smem, n));
    j = own.j0 + thread / 32 * 16 + lane / 4;
    if constexpr (has_block_mask) blocks = Walk(args.blocks_of_key, 0, 0, own.tile.j0, own.tile.j0, 0, lane);
    const u32 key_tile = stays ? shfl(step.key_tile(), 0) : 0;
    take_keys(args, smem, own, key_tile);
    hold(K, held_K, smem.K, thread);
#pragma unroll
    for (int d = 0; d < head_dim_v_tile / 2; ++d) dV[d] = 0;
    float S[n_scores];
    product(S, smem.K, K, held_K, smem.Q[n % n_Q]);
    wgmma_wait<0>();   // S
    make_P(S, n, smem.lse, n % n_Q);
    wait_full(smem.V_full, key_tile);   // K_peer
  }

  DEVICE void read_step(u32 n) {
    wait_full(smem.Q_full, n);   // Q, lse and the step are there
    step = smem.steps.as<Step>(n % n_steps, 0);
  }

  // dO's first part has landed; dV does not need the others.
  DEVICE void wait_dO(u32 n) {
    for (int part = dO_parts - 1; part > 0; --part) {
      wait_full(smem.dO_full, dO_use(n, part));
      if (thread == 0) arrive_at_both(smem.dO_empty, dO_use(n, part));
    }
    wait_full(smem.dO_full, dO_use(n));
  }

  // S -> P of the newest step: packed for dV, and for the other group.
  template <class Rows> DEVICE void make_P(float (&S)[n_scores], u32 n, Rows& lse, int row) {
    float slopes[n_scores];
    HeadRules rules = head_rules_of(args, own.tile.seq, step.h);
    rules.scoring.scale_log2 = scale_log2;
    const auto is_kept = [&](i32 i, i32 key) { return smem.keeps(blocks, key, step.i0, i, n % n_Q); };
    if (step.tests()) {   // made here, because few steps need them: registers
      const Range queries[2] = {visible_queries(args, own.tile.seq, j, j),
                                visible_queries(args, own.tile.seq, j + 8, j + 8)};
      make_weights<true>(args, rules, S, slopes, lse, row, step.i0, j, queries, lane, is_kept);
    } else make_weights<false>(args, rules, S, slopes, lse, row, step.i0, j, {}, lane, is_kept);
    if (thread == 0) arrive_at_both(smem.Q_empty, n);   // S is complete
    wait_empty(smem.P_empty, n);   // the other group has read what this overwrites
    if constexpr (is_exact) {
      give(smem, S, 0, thread);
      if constexpr (has_softcap) give(smem, slopes, 8, thread);
      KeptWeights kept = {};
      if constexpr (has_dropout) kept = kept_weights_of(rules.dropout, step.i0, j, lane);
      pack_weights(args, P, S, kept);
    } else {
      pack_scores(P, S);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        smem.P.as<Vec16<u32>>((n % 2 * 4 + k) * 128 + thread, 0) = {{P[k][0], P[k][1], P[k][2], P[k][3]}};
    }
    mbarrier_arrive(at(smem.P_full, n));   // P is written
    mbarrier_arrive(at(smem.S_read, n));   // lse and the step are read
  }

  // Step n, whose P is made, and S and P of the next.
  template <bool is_first> DEVICE void go_on(u32 n) {
    wait_dO(n);
    add_product(dV, P, smem.dO[n % n_dO]);
    if (!is_exact && !is_first && step.is_third()) share.add(dQ, n - 2);
    read_step(n + 1);
    float S[n_scores];   // new in every step: the compiler need not carry it from one to the next
    product(S, smem.K, K, held_K, smem.Q[(n + 1) % n_Q]);
    wgmma_wait<1>();   // dV has read dO and P
    if (thread == 0) arrive_at_both(smem.dO_empty, dO_use(n));   // of four arrivals one
    HeldRow lse;   // on its way while products run
    if constexpr (fetches_early) lse.fetch(smem.lse, (n + 1) % n_Q, lane);
    if constexpr (is_first) {
      wgmma_wait<0>();   // S
    } else {
      share.start(dQ, n - 1);
      wgmma_wait<1>();   // S
      if constexpr (is_exact) {   // registers
        wgmma_wait<0>();   // dQ has read dS
        if (thread == 0) arrive_at_both(smem.dS_empty, n - 1);
        share.add(dQ, n - 1);
      }
    }
    if constexpr (fetches_early) make_P(S, n + 1, lse, 0);
    else make_P(S, n + 1, smem.lse, (n + 1) % n_Q);
    wgmma_wait<0>();   // dQ has read dS
    if (!is_exact && !is_first && thread == 0) arrive_at_both(smem.dS_empty, n - 1);
  }

  // Step n, the last, but for its dQ.
  DEVICE void finish(u32 n) {
    wait_dO(n);
    add_product(dV, P, smem.dO[n % n_dO]);
    if (!is_exact && step.is_third()) share.add(dQ, n - 2);
    wgmma_wait<0>();   // dV
    if (thread == 0) arrive_at_both(smem.dO_empty, dO_use(n));
    if (step.is_second()) {
      share.start(dQ, n - 1);
      wgmma_wait<0>();   // dQ has read dS
      if (thread == 0) arrive_at_both(smem.dS_empty, n - 1);
      share.add(dQ, n - 1);
    }
    share.start(dQ, n);
    wgmma_wait<0>();   // dQ
    share.release(n);
    store_keys(args, tile_of(smem, n), dV, 1, args.dV, args.dV_sum, args.head_dim_v, thread);
    share.add(dQ, n);
  }
};
