// bwd_07_cluster.cu - attention backward for head_dim up to 256: two blocks share Q and dO.   sm_90a
//
// Read after   bwd_06_specialize.cu       Read next   nothing: the last backward rung
// Changes      registers hold dK and dV of 64 keys at head_dim 256, not of 128.  So a cluster of two blocks
//              takes 128 keys, and shares what would double: Q and dO are loaded once for both, each block
//              makes dQ of all 128 keys, but half of the columns, and the warpgroups divide the products and
//              not the keys
//
// Algorithm    = tiled_backward.backward.   One cluster: 128 keys of one (sequence, key head), 64 a block.
//                K, V -> shared, once; and of the peer's K the columns whose dQ this block makes
//                for each query head of the group, each tile of 64 queries that sees these keys:
//                  weights   S^T = K Q^T,   P = 2^(S - lse)            dV += P^T dO     P -> the other group
//                  gradients dP^T = V dO^T, dS = P (dP - delta)        dK += dS^T Q     dS -> both blocks
//                  both      dQ sums += dS K, one tile late: its columns are shared out among the four
//                dK * scale, dV -> memory                (pass_query_tiles__close makes dQ of the sums)
// Grid         x: rank + 2 * (tile of 128 keys + tiles * (sequence, key head)): clusters of one head run
//              together, they read the same Q and dO
//              Few clusters: n_splits of them share a key head's query heads and add to dK_sum and dV_sum.
// Groups       0 (lib/cluster_loader.cuh): a warp loads; one makes zeros of rows that do not exist; two keep
//              the turns of a deterministic backward      1 weights      2 gradients
// Shared       (lib/cluster_block.cuh) K, V [64, .] | K_peer [64, 128] | Q [2][64, .] | dO [N_STAGES][64, .]
//              | dS [2][own, peer][64, 64] | P [2], as registers hold it | lse, delta | steps | barriers
// Registers    per thread at 256: dV or dK 128, S or dP 32, dQ 32, P or dS packed 16; loader 24, groups 240
//              No spills without options that change or sum scores; with them up to 1.6 KB, where all meet
// Bytes        per block: K, V, dK, dV once; half of Q and dO, an addition to half of dQ per query tile
// Barriers     <operand>_full: landed.  Q_empty, dO_empty, dS_empty: both groups of both blocks have used it.
//              S_read, dP_read: lse and the step, delta have been read.  P_full, P_empty, by number: between
//              the groups.  may_add, added, announced: turns
// Tried        H200, 2026-11-30, length 8,192.  dQ added after S is asked for: 256 587 -> 539, 192 551 -> 538
//              Descriptors kept in registers: 592 -> 552.  K and V of a block in registers, 4 and 12 steps of
//              12: 192 555 -> 585.  Passes before and after inside idle warps: see bwd_06_specialize
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/cluster_block.cuh"
#include "lib/cluster_loader.cuh"
#include "lib/cluster_share.cuh"

constexpr int SLOT_DALIBI = 0;   // workspace: acc [slots of blocks' keys, heads], parts of dalibi_slopes
constexpr int SLOT_DBIAS = 1;    // workspace: acc [batch, heads, len_k], dbias summed over the queries

static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes,
              "bwd_07_cluster: Smem and its row in cuflash/rows_cluster.py disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "bwd_07_cluster: Args and launch.py disagree");

// ---- group 1: P and dV

struct WeightsGroup {
  const MappedArgs& args;
  Smem& smem;
  const Owner& own;
  const int thread, lane;
  const i32 j;                // the lane's keys: j, j + 8
  const Walk blocks;          // says where the cluster's blocks of keys begin
  DqShare share;
  Step step;                  // of the newest S
  float dV[head_dim_v_tile / 2], dQ[weights_cols / 2];
  u32 K[held_K + 1][4];
  Words P;                    // the A operand of dV

  DEVICE WeightsGroup(const MappedArgs& args, Smem& smem, const Owner& own, int thread)
      : args(args), smem(smem), own(own), thread(thread), lane(thread % 32),
        j(own.j0 + thread / 32 * 16 + thread % 32 / 4),
        blocks(args.blocks_of_key, 0, 0, own.tile.j0, own.tile.j0, 0, thread % 32),
        share(args, smem, own, first_weights_col(own.rank), thread) {}

  DEVICE void run() {
#pragma unroll
    for (int d = 0; d < head_dim_v_tile / 2; ++d) dV[d] = 0;
    u32 n = 0;
    hold(K, held_K, smem.K, thread);
    read_step(0);
    if (step.exists()) {
      float S[n_scores];
      product(S, smem.K, K, held_K, smem.Q[0]);
      wgmma_wait<0>();   // S
      make_P(S, 0);
      wait_full(smem.V_full, 0);   // K_peer
      if (!step.is_last()) go_on<true>(n++);
#pragma unroll 1
      while (!step.is_last()) go_on<false>(n++);
      finish(n);
    }
    store_keys(args, dV, 1, args.dV, args.dV_sum, args.head_dim_v, thread);
    if (step.exists()) {   // the other group's last dS was made meanwhile
      share.start(dQ, n);
      wgmma_wait<0>();   // dQ
      share.add(dQ, n);
      // The other group's last arrivals, which nobody has waited for.
      if (n + 1 >= n_P) barrier_sync(P_empty(n + 1), 256);
      if (n_P == 2) barrier_sync(P_empty(n), 256);
    }
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
  DEVICE void make_P(float (&S)[n_scores], u32 n) {
    float slopes[n_scores];
    const HeadRules rules = head_rules_of(args, own.tile.seq, step.h);
    const auto is_kept = [&](i32 i, i32 key) { return smem.keeps(blocks, key, step.i0, i, n % n_Q); };
    if (step.tests()) {   // made here, because few steps need them: registers
      const Range queries[2] = {visible_queries(args, own.tile.seq, j, j),
                                visible_queries(args, own.tile.seq, j + 8, j + 8)};
      make_weights<true>(args, rules, S, slopes, smem.lse, n % n_Q, step.i0, j, queries, lane, is_kept);
    } else make_weights<false>(args, rules, S, slopes, smem.lse, n % n_Q, step.i0, j, {}, lane, is_kept);
    if (thread == 0) arrive_at_both(smem.Q_empty, n);   // S is complete
    if (n >= n_P) barrier_sync(P_empty(n), 256);   // the other group has read what this overwrites
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
    barrier_arrive(P_full(n), 256);   // P is written
    warp_sync();                      // the warp has read lse and the step
    if (lane == 0) mbarrier_arrive(at(smem.S_read, n));
  }

  // Step n, whose P is made, and S and P of the next.
  template <bool is_first> DEVICE void go_on(u32 n) {
    wait_dO(n);
    add_product(dV, P, smem.dO[n % n_dO]);
    if (!is_exact && !is_first && n > 1) share.add(dQ, n - 2);
    read_step(n + 1);
    float S[n_scores];   // new in every step: the compiler need not carry it from one to the next
    product(S, smem.K, K, held_K, smem.Q[(n + 1) % n_Q]);
    wgmma_wait<1>();   // dV has read dO and P
    if (thread == 0) arrive_at_both(smem.dO_empty, dO_use(n));   // of four arrivals one
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
    make_P(S, n + 1);
    wgmma_wait<0>();   // dQ has read dS
    if (!is_exact && !is_first && thread == 0) arrive_at_both(smem.dS_empty, n - 1);
  }

  // Step n, the last, but for its dQ.
  DEVICE void finish(u32 n) {
    wait_dO(n);
    add_product(dV, P, smem.dO[n % n_dO]);
    if (!is_exact && n > 1) share.add(dQ, n - 2);
    wgmma_wait<0>();   // dV
    if (n > 0) {
      share.start(dQ, n - 1);
      wgmma_wait<0>();   // dQ
      share.add(dQ, n - 1);
    }
  }
};

// ---- group 2: dS and dK

struct GradientsGroup {
  const MappedArgs& args;
  Smem& smem;
  const Owner& own;
  const int thread, lane;
  const i32 j;                // the lane's keys: j, j + 8
  DqShare share;
  Step step;                  // of the newest dP
  HeadRules rules = {};
  i32 rules_h = -1;           // whose they are
  OptionSums sums = {};
  float dK[head_dim_tile / 2], dP[n_scores], dQ[gradients_cols / 2];
  u32 V[held_V + 1][4];
  Words dS;                   // the A operand of dK

  DEVICE GradientsGroup(const MappedArgs& args, Smem& smem, const Owner& own, int thread)
      : args(args), smem(smem), own(own), thread(thread), lane(thread % 32),
        j(own.j0 + thread / 32 * 16 + thread % 32 / 4),
        share(args, smem, own, first_gradients_col(own.rank), thread) {}

  DEVICE void run() {
#pragma unroll
    for (int d = 0; d < head_dim_tile / 2; ++d) dK[d] = 0;
    wait_full(smem.V_full, 0);   // V, K_peer
    hold(V, held_V, smem.V, thread);
    read_step(0);
    if (step.exists()) {
      ask_dP(dP, 0);
      wgmma_wait<0>();   // dP
      u32 n = 0;
      if (!step.is_last()) go_on<true>(n++);
#pragma unroll 1
      while (!step.is_last()) go_on<false>(n++);
      finish(n);
      if constexpr (is_exact) leave_head();
    }
    store_keys(args, dK, static_cast<float>(args.scale), args.dK, args.dK_sum, args.head_dim, thread);
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
    barrier_sync(P_full(n), 256);   // the other group has written P
    const bool hides = has_bias || step.tests();   // a weight of 0 may meet NaN
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Vec16<u32> packed = smem.P.as<Vec16<u32>>((n % 2 * 4 + k) * 128 + thread, 0);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int at = 4 * k + r;
        const float low = low_of<elem>(packed.item[r]), high = high_of<elem>(packed.item[r]);
        dS[k][r] = pack<elem>(hides && low == 0 ? 0.f : low * dP[2 * at],
                              hides && high == 0 ? 0.f : high * dP[2 * at + 1]);
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
    barrier_sync(P_full(n), 256);   // the other group has written P
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
    barrier_arrive(P_empty(n), 256);   // P is read
    warp_sync();                       // the warp has read delta
    if (lane == 0) mbarrier_arrive(at(smem.dP_read, n));
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
    if (!is_exact && !is_first && n > 1) share.add(dQ, n - 2);
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

  // Step n, the last.
  DEVICE void finish(u32 n) {
    make_dS(n);
    add_product(dK, dS, smem.Q[n % n_Q]);
    wgmma_wait<0>();   // dK
    if (!is_exact && n > 1) share.add(dQ, n - 2);
    if (n > 0) {
      share.start(dQ, n - 1);
      wgmma_wait<0>();   // dQ
      share.add(dQ, n - 1);
    }
    share.start(dQ, n);
    wgmma_wait<0>();   // dQ
    share.add(dQ, n);
  }
};

CLUSTER_KERNEL(n_threads, 1, 2, bwd_07_cluster)(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int group = shfl(static_cast<int>(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  const Owner own = owner_of(args);
  if (!own.tile.exists) {   // both blocks of the cluster
    previous_kernel_wait();
    return;
  }
  if (threadIdx.x == 0) {
    init_barriers(smem);
    load_keys(args, smem, own);
  }
  cluster_sync();   // the barriers are ready, here and in the peer

  if (group == 0) {
    registers_shrink<24>();
    if (thread < 32) load_operands(args, smem, own, thread);
    else if (cleans_queries && thread < 64) clean_queries(smem, own.tile.seq, thread - 32);
    else if (deterministic && thread / 32 == 2) wait_for_turns(args, smem, own, thread - 64);
    else if (deterministic && thread / 32 == 3) announce_turns(args, smem, own, thread - 96);
  } else {
    registers_grow<240>();
    wait_full(smem.K_full, 0);   // K has landed
    if constexpr (cleans_keys) {
      wait_full(smem.V_full, 0);   // V and the peer's keys have landed: nothing overwrites the zeros
      const i32 end = own.tile.seq.len_k;
      const auto rows = [&](i32 j0) { return clamp(end - j0, 0, own_keys); };
      smem.K.clear_rows(rows(own.j0), threadIdx.x - 128, 256);
      smem.K_peer.clear_rows(rows(own.tile.j0 + own_keys * (1 - own.rank)), threadIdx.x - 128, 256);
      fence_async_shared();
      barrier_sync(KEYS_ARE_CLEAN, 256);   // keys that do not exist are zeros, also to wgmma
    }
    if (group == 1) WeightsGroup(args, smem, own, thread).run();
    else GradientsGroup(args, smem, own, thread).run();
  }
  cluster_sync();   // nobody reaches into a block that has left
}
