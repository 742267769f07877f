// producer.cuh - the warp of a persistent block that copies.   sm_90a
//
// For every query tile that the planner announces it copies Q, and K and V of every key tile that some row
// may see, K one tile ahead of V: the order in which they are used.  It runs ahead of the consumers, into the
// next query tile too, as far as stages are empty: where Q has one place, the first K comes before it.
// All 32 lanes walk, lane 0 copies.  Where other lanes write too, each waits and arrives for itself.
#pragma once
#include "planner.cuh"

// Where Q has one place, it is free after that of K.
constexpr bool K_first = plans && q_stages == 1;

struct Producer {
  const MappedArgs& args;
  Smem& smem;
  const int lane;
  Ring<n_stages> K_at, V_at;
  Ring<2> work_at;
  Ring<q_stages> Q_at;
  Ring<1> landed_at;

  DEVICE void run() {
    if constexpr (!plans) {   // it is the planner too, when it has copied a query tile
      Planner planner{args, smem, lane};
      for (planner.x = blockIdx.x;; planner.x = planner.next()) {
        const Work work = planner.taken();
        planner.announce(work);
        if (work.i0 == NO_WORK) return;
        const QueryTile own = query_tile_of(args, work);
        load(own, tiles_of(keys_of_rows(args, own.seq, own.i0, own.i0 + tile_q)));
        work_at.next();
      }
    }
    while (true) {
      work_at.wait_full(smem.work_full);   // the next query tile is known
      warp_sync();                         // together again
      const Work work = smem.work(0, work_at.stage);
      if (work.i0 == NO_WORK) break;
      load(query_tile_of(args, work), smem.keys(0, work_at.stage).all);
      work_at.next();
    }
  }

  // Keys of a sequence in K and V.
  struct Keys {
    i32 row0, len, head, batch;
  };

  DEVICE void load(const QueryTile& own, Range tiles) {
    const Keys keys = {static_cast<i32>(own.seq.k_row0), own.seq.len_k, static_cast<i32>(own.h_k),
                       static_cast<i32>(own.seq.array_b)};
    const i32 last = tiles.begin * tile_kv;
    i32 first = (tiles.end - 1) * tile_kv;
    const i32 i1 = smallest(own.i0 + tile_q, own.seq.len_q);
    Range seen = {last, 0};
    if constexpr (has_block_mask) seen = keys_of_rows(args, own.seq, own.i0, i1);
    Walk walk(args.blocks, own.seq.b, own.h, own.i0, i1, seen.begin, lane);
    const auto next_tile = [&](i32 after) {   // NO_TILE: the first
      if constexpr (has_block_mask) {
        const i32 j0 = walk.next(after == NO_TILE ? last : after + tile_kv);
        return j0 < seen.end ? j0 : NO_TILE;
      }
      const i32 j0 = after == NO_TILE ? first : after - tile_kv;
      return j0 >= last ? j0 : NO_TILE;
    };
    if (tiles.begin == tiles.end) {
      wait_for_O();   // before: consumers may not be two tiles ahead
      let_plan();
      return;
    }
    if (!K_first) load_Q();
    i32 before = NO_TILE;   // K runs one tile ahead of V, as the consumers do
    do {
      const i32 j0 = next_tile(before);
      if (has_block_mask && before == NO_TILE) first = j0;
      if (before == first) wait_for_O();   // V comes; where there is no tile at all, as above
      if (!has_block_mask && j0 == last) let_plan();
      if (j0 != NO_TILE || has_block_mask) load_K(keys, walk, j0);
      if (before == NO_TILE) {
        if (K_first) load_Q();
      } else {
        load_V(keys, before);
      }
      before = j0;
    } while (before != NO_TILE);
    if (has_block_mask) let_plan();
  }
  DEVICE void wait_for_O() {   // of the query tile before, which left through stages of V
    const u32 phase = work_at.stage;   // one a query tile
    if (borrows_V && lane == 0) mbarrier_wait(smem.O_read.address(0, 0), phase ^ 1);
  }
  DEVICE void let_plan() {
    if constexpr (!plans) return;
    warp_sync();   // together
    barrier_arrive(MAY_PLAN, 64);
  }

  DEVICE void load_Q() {
    if (lane == 0) {
      const QueryTile own = query_tile_of(args, smem.work(0, work_at.stage));   // registers are dear
      Q_at.wait_empty(smem.Q_empty);   // every consumer has used the Q that was here
      const u32 full = smem.Q_full.address(0, Q_at.stage);
      mbarrier_arrive_expect(full, smem.Q[0].n_bytes);
      smem.Q[Q_at.stage].load(args.maps.Q, full, static_cast<i32>(own.seq.q_row0) + own.i0, own.h,
                              own.seq.array_b);
    }
    Q_at.next();
  }

  DEVICE void load_K(const Keys& keys, const Walk& walk, i32 j0) {
    const u32 full = smem.K_full.address(0, K_at.stage);
    const bool writes = asks_blocks || lane == 0;
    if (writes) K_at.wait_empty(smem.K_empty);   // every consumer has multiplied by the tile that was here
    if (asks_blocks && j0 != NO_TILE) smem.fill_blocks(walk, j0, lane, K_at.stage);
    if (asks_blocks && lane > 0) mbarrier_arrive(full);
    if (lane == 0) {
      if (has_block_mask) smem.j0(0, K_at.stage) = j0;
      if (j0 == NO_TILE) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect(full, smem.K[0].n_bytes);
        smem.K[K_at.stage].load(args.maps.K, full, keys.row0 + j0, keys.head, keys.batch);
      }
    }
    K_at.next();
  }

  DEVICE void load_V(const Keys& keys, i32 j0) {
    auto& V = smem.V[V_at.stage];
    const u32 full = smem.V_full.address(0, V_at.stage);
    const bool mends = reads_past_end && j0 + tile_kv > keys.len;
    const u32 landed = mends ? smem.V_landed.address(0, 0) : full;
    if (lane == 0) {
      V_at.wait_empty(smem.V_empty);   // every consumer has multiplied by the tile that was here
      mbarrier_arrive_expect(landed, V.n_bytes);
      V.load(args.maps.V, landed, keys.row0 + j0, keys.head, keys.batch);
    }
    if (mends) {   // rows of others meet weights of 0, and 0 x NaN is NaN
      if (lane == 0) landed_at.wait_full(smem.V_landed);   // the tile is there, as it came
      warp_sync();                                         // as above, for all lanes
      landed_at.next();
      V.clear_rows(keys.len - j0, lane, 32);
      fence_async_shared();
      warp_sync();   // all lanes have cleared theirs: lane 0 may announce the tile
      if (lane == 0) mbarrier_arrive(full);
    }
    V_at.next();
  }
};
