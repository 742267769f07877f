// consumer.cuh - the parts of a warpgroup that multiplies, which the loop of fwd_10_persistent puts together.
//                sm_90a
//
// It owns 64 rows of the query tile; a quad of lanes shares a row.
#pragma once
#include "lazy.cuh"
#include "persistent_block.cuh"

constexpr bool stores_by_tma = (has_o_buffer || borrows_V) && sizeof(out_elem) == 2;
static_assert(!borrows_V || (n_groups == 2 && n_stages >= 2 && tile_kv >= 64), "consumer: no V to borrow");
constexpr bool trusts = !has_dropout;   // that the maximum stays, till a sum says otherwise

// Weights of the first key tile are made under a maximum of 0, near which scores mostly lie, if their sums
// allow it: LEAST_SUM is far from what float32 and bfloat16 cannot hold, and leaves float16 the bits of all
// weights that count.  With causal it was faster only where groups multiply in turn (ATTEMPTS.md).
constexpr bool begins_at_0 = trusts && n_groups == 2 && (!causal || in_turns);
constexpr acc LEAST_SUM = is_same<elem, bf16> ? 1e-18f : 1;

enum class Tests { none, all, asked };   // of elements in a key tile; asked: as its place says

struct ConsumerParts {
  const MappedArgs& args;
  Smem& smem;
  const int group, thread, lane;   // thread: in the group
  const int warp_row;              // of the warp's first row in the tile
  Ring<n_stages> K_at, V_at;
  Ring<2> work_at;
  Ring<q_stages> Q_at;

  Rules rules;
  Fragment<head_dim_v_tile> O;
  u32 P[tile_kv / 16][4];   // weights of the tile whose P V is due
  RowState state;
  bool owes_V = false;      // a stage, where O of the query tile before was put
  Range plain;              // tiles that all 64 rows see as a whole

  DEVICE bool leads() const { return thread == 0; }
  DEVICE bool releases_K() const { return asks_blocks || (has_block_mask ? lane == 0 : leads()); }

  // Around the products of every key tile, and where there are none.
  DEVICE void take_turn() const {
    if constexpr (in_turns) barrier_sync(TURN + group, 256);   // the other group has issued its products
  }
  DEVICE void give_turn() const {
    if constexpr (in_turns) barrier_arrive(TURN + 1 - group, 256);   // these are issued: the other may
  }

  // Of a tile that these rows do not see.
  DEVICE void skip_K() {
    take_turn();
    give_turn();
    K_at.wait_full(smem.K_full);    // only a stage that is full may be given back
    barrier_sync(1 + group, 128);   // all have seen it: without a product none may lag two rounds behind
    release_K();
  }
  DEVICE void skip_V() {
    V_at.wait_full(smem.V_full);    // as above
    barrier_sync(1 + group, 128);   // as above
    release_V();
  }
  DEVICE void release_K() {
    if (releases_K()) mbarrier_arrive(smem.K_empty.address(0, K_at.stage));
    K_at.next();
  }
  DEVICE void release_V() {
    if (leads()) mbarrier_arrive(smem.V_empty.address(0, V_at.stage));
    V_at.next();
  }
  DEVICE void release_Q() {   // no product of this group reads it any more
    if (leads()) mbarrier_arrive(smem.Q_empty.address(0, Q_at.stage));
  }

  DEVICE void multiply_QK(Fragment<tile_kv>& S) {
    K_at.wait_full(smem.K_full);   // K of this tile is there
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < head_dim_tile / 16; ++k)
      wgmma<elem>(registers_of(S), smem.Q[Q_at.stage].descriptor_K(k, 64 * group),
                  smem.K[K_at.stage].descriptor_K(k), k > 0);
    wgmma_commit();
  }
  DEVICE void multiply_PV() {
    V_at.wait_full(smem.V_full);   // V of the tile that P belongs to is there
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k)
      wgmma<elem, 1>(registers_of(O), P[k], smem.V[V_at.stage].descriptor_MN(k), true);
    wgmma_commit();
  }

  // Hide what is hidden, and change scores where options do.
  template <bool tests> DEVICE void modify(const Sequence& seq, i32 row0, i32 j0, Fragment<tile_kv>& S) {
    const auto is_kept = [&](i32 i, i32 j) {
      if constexpr (tests && asks_blocks)
        return keeps(smem, K_at.stage, i / block_q - (row0 - warp_row) / block_q,
                     j / block_kv - j0 / block_kv);
      return true;
    };
    if constexpr (!only_scales || (tests && asks_elements))
      modify_scores<tests && asks_elements>(args, seq, rules, S, row0, j0, lane, is_kept);
    if constexpr (tests && !asks_elements)
#pragma unroll
      for (int r = 0; r < n_rows; ++r) {   // positions alone decide
        const Range keys = visible_keys(args, seq, row0 + fragment_row(0, lane, r));
        const i32 col = j0 + fragment_col(lane, 0);
        hide_outside(S, r, keys.begin - col, keys.end - col);
      }
  }

  // S -> scores: what is hidden is -inf, and options have changed the rest.
  template <Tests tests> DEVICE void change(const Sequence& seq, i32 i0, i32 j0, Fragment<tile_kv>& S) {
    const i32 row0 = i0 - 64 * group + warp_row;
    const bool is_plain = plain.begin * tile_kv <= j0 && j0 < plain.end * tile_kv;
    if (tests == Tests::none || (tests == Tests::asked && is_plain)) modify<false>(seq, row0, j0, S);
    else modify<true>(seq, row0, j0, S);
    if constexpr (asks_blocks) release_K();   // of the stage's kept blocks too
  }
  // S -> weights, with a look for the maximum; shrink: of what was summed before.
  DEVICE void soften(i32 i0, i32 j0, Fragment<tile_kv>& S, acc (&shrink)[n_rows]) {
    soften_lazily(S, state, shrink, rules.late_scale);
    if constexpr (has_dropout) drop(rules.dropout, S, i0 - 64 * group + warp_row, j0, lane);
  }
  DEVICE void keep_weights(Fragment<tile_kv>& S) {
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k) repack(P[k], S.at[0][2 * k], S.at[0][2 * k + 1]);
  }
  // P <- weights of S under a maximum of 0.  False: sums say that it will not do; S is left as it is.
  DEVICE bool weigh_under_0(Fragment<tile_kv>& S) {
    acc sum[n_rows];
    bool fits = true;
#pragma unroll
    for (int r = 0; r < n_rows; ++r) state.m[r] = 0;
    weigh(S, state, rules.late_scale, P, sum);
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
      const acc row_sum = sum_over_lanes<3>(sum[r]);
      fits = fits && LEAST_SUM < row_sum && row_sum < TRUSTED_SUM;
      state.l[r] = sum[r];
    }
    return all(fits);
  }

  // O of the query tile before has left its stage of V: a V may come there.
  DEVICE void give_back_V() {
    if (leads() && owes_V) {
      bulk_wait_read<0>();
      mbarrier_arrive(smem.O_read.address(0, 0));
    }
    owes_V = false;
  }
  // O / l and lse to memory.  Where O borrows V, group 0 has the stage that the next query tile's first V
  // gets, group 1 the other.
  DEVICE void write(const QueryTile& own) {
    const Results results = results_of(args, own);
    finish(args, own, results, O, state, own.i0 + warp_row, lane);
    const i32 i0 = own.i0 + 64 * group;
    const bool is_whole = !is_packed || i0 + 64 <= own.seq.rows_q;   // else into the next sequence's rows
    const bool by_tma = stores_by_tma && is_mapped(args, args.maps.O) && is_whole;
    Ring<n_stages> place = V_at;
    if (borrows_V && group == 1) place.next();
    if (by_tma) {
      if constexpr (borrows_V) {
        place.wait_empty(smem.V_empty);   // every consumer has multiplied by the V that was here
        const int row0 = warp_row - 64 * group;   // of the stage
        if constexpr (stores_by_tma) store_panels<out_elem>(O, smem.V[place.stage], row0, lane);
      } else {
        if (leads()) bulk_wait_read<0>();
        barrier_sync(1 + group, 128);   // the last tile's O has been read: its buffer may be overwritten
        if constexpr (stores_by_tma) store_panels<out_elem>(O, smem.buffer(), warp_row, lane);
      }
      fence_async_shared();
    } else {
      store_fragment<out_elem>(O, results.O, results.O_rows, warp_row, lane);
    }
    const i32 row = static_cast<i32>(own.seq.q_row0) + i0, head = own.h, batch = own.seq.array_b;
    const bool is_there = i0 < own.seq.rows_q;
    barrier_sync(1 + group, 128);   // O of all four warps is in its buffer
    if (leads() && by_tma && is_there) {
      if constexpr (borrows_V) smem.V[place.stage].store(args.maps.O, 0, row, head, batch);
      else smem.buffer().store(args.maps.O, 64 * group, row, head, batch);
      bulk_commit();
    }
    mbarrier_arrive(smem.work_empty.address(0, work_at.stage));   // by everyone: `own` has been read
    owes_V = borrows_V;
  }
};
