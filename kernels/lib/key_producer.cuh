// key_producer.cuh - the shared memory of a resident Hopper backward, and the warps beside its consumers.
//
// The producer takes tiles of keys one after another, announces each to the others, and copies its K and V,
// then Q, lse and delta, dO of every query tile that sees those keys.  It runs ahead of the consumers, into
// the next tile of keys too, as far as stages are empty.
// All 32 lanes walk, one waits and acts: others that waited could miss two phases of a barrier, unless their
// own arrival ends one of them.
#pragma once
#include "dependent.cuh"
#include "key_group.cuh"
#include "roles.cuh"

struct Tiles {
  TileK K;
  TileV V;
  TileQ Q[n_stages];    // rings
  TiledO dO[n_stages][dO_parts];
  TileS dS[n_stages];
  Shared<float, 2 * n_stages, tile_q> rows;   // of a stage: lse, delta
  Shared<Own, 1, 2> work;                     // what the producer took
  Shared<u64, 1, n_stages> Q_full, dO_full, empty, dS_full;
  Shared<u64, 1, 2> work_full, work_empty;
  Shared<u64, 1, 1> KV_full, KV_empty;
  Shared<u64, 1, n_stages> added;   // in_turn: to dQ
  Shared<float, 1, group_warps> sums;         // of dalibi_slopes, a number per warp
};
struct Smem : Tiles, KeptBlocks<Walk, asks_blocks, n_stages> {};

constexpr int turn_takers = in_turn ? 2 : 0;   // warps that follow the work besides the consumers

DEVICE void start_barriers(Smem& smem) {
  for (int stage = 0; stage < n_stages; ++stage) {
    mbarrier_init(smem.Q_full.address(0, stage), asks_blocks ? 32 : 1);
    mbarrier_init(smem.dO_full.address(0, stage), 1);
    mbarrier_init(smem.empty.address(0, stage), group_threads);
    mbarrier_init(smem.dS_full.address(0, stage), group_threads + turn_takers);
    mbarrier_init(smem.added.address(0, stage), group_threads);
  }
  for (int n = 0; n < 2; ++n) {
    mbarrier_init(smem.work_full.address(0, n), 1);
    mbarrier_init(smem.work_empty.address(0, n), group_threads + 32 * turn_takers);
  }
  mbarrier_init(smem.KV_full.address(0, 0), 1);
  mbarrier_init(smem.KV_empty.address(0, 0), group_threads);
  mbarrier_init_fence();
}

// A block's n-th work, and that a thread needs it no more.
DEVICE Own work_of(Smem& smem, u32 n) {
  mbarrier_wait(smem.work_full.address(0, n % 2), n / 2 & 1);   // the producer has taken it
  return same_in_all_lanes(smem.work(0, n % 2));
}
DEVICE void leave_work(Smem& smem, u32 n) { mbarrier_arrive(smem.work_empty.address(0, n % 2)); }

struct Producer {
  const MappedArgs& args;
  Smem& smem;
  const int lane;
  Ring<n_stages> at_stage;
  Ring<2> work_at;
  Ring<1> KV_at;

  DEVICE void run() {
    bool first = true;   // of this block's tiles
    u32 x = blockIdx.x;
    if constexpr (in_turn) {   // a block that has not started yet may hold no tile that others wait for
      previous_kernel_wait();
      x = take();
    }
    while (true) {
      const Own own = own_of(args, x);
      if (lane == 0) {
        work_at.wait_empty(smem.work_empty);   // everyone has read what was here
        smem.work(0, work_at.stage) = own;
        mbarrier_arrive(smem.work_full.address(0, work_at.stage));
      }
      work_at.next();
      if (own.j0 == NO_WORK) break;
      load(own, first);
      if (first) next_kernel_may_start();
      first = false;
      // Not before: who takes a tile early keeps others from it.
      x = take();
    }
  }
  // The next tile's number.
  DEVICE u32 take() {
    const Global<i32> counter(args.workspace[SLOT_ROWS]);
    const i32 taken = lane == 0 ? counter.fetch_add(counter_index(args), 1) : 0;
    return static_cast<u32>(shfl(taken, 0)) + (in_turn ? 0 : gridDim.x);
  }

  DEVICE void load(const Own& own, bool first) {
    const Sequence seq = sequence_of(args, own.b);
    const Meeting meeting = meeting_of(args, seq, own);
    QueryWalk<Walk> at(args, seq, meeting.queries, own.j0, own.h_begin, own.h_end, lane, own.turned);
    const bool exists = at.exists();
    if (first) {
      if (exists) load_KV(own, seq);
      previous_kernel_wait();   // rows, zeros and the counter are there
    }
    if (!exists) return;
    load_Q(at);
    if (!first) load_KV(own, seq);   // they may be in use longer than the stages
    load_dO_of(at);
    at_stage.next();
#pragma unroll 1
    for (at.next(); at.exists(); at.next(), at_stage.next()) {
      load_Q(at);
      load_dO_of(at);
    }
  }
  DEVICE void load_KV(const Own& own, const Sequence& seq) {
    const int row = static_cast<int>(seq.k_row0) + own.j0, h_k = own.h_k, b = static_cast<int>(seq.array_b);
    const u32 full = smem.KV_full.address(0, 0);
    if (lane == 0) {
      KV_at.wait_empty(smem.KV_empty);   // both groups have used the tile before
      mbarrier_arrive_expect(full, smem.K.n_bytes + smem.V.n_bytes);
      smem.K.load(args.maps.K, full, row, h_k, b);
      smem.V.load(args.maps.V, full, row, h_k, b);
    }
    KV_at.next();
  }
  DEVICE void load_Q(const QueryWalk<Walk>& at) {
    const Global<float> rows(args.workspace[SLOT_ROWS]);
    constexpr u32 rows_bytes = 2 * tile_q * sizeof(float);
    const int stage = at_stage.stage, row = static_cast<int>(at.seq.q_row0) + at.i0;
    const u32 full = smem.Q_full.address(0, stage);
    if (asks_blocks || lane == 0) at_stage.wait_empty(smem.empty);   // both groups have used this stage
    if constexpr (asks_blocks) {   // every lane writes, so it waits and arrives too
      smem.fill_blocks(at.blocks, at.i0, lane, stage);
      if (lane != 0) mbarrier_arrive(full);
    }
    if (lane != 0) return;
    const i64 first_row = static_cast<i64>(place_of(args, at.seq, at.h, at.i0)) * 2 * tile_q;
    mbarrier_arrive_expect(full, smem.Q[0].n_bytes + rows_bytes);
    smem.Q[stage].load(args.maps.Q, full, row, at.h, static_cast<int>(at.seq.array_b));
    bulk_load(smem.rows.address(2 * stage, 0), rows.address(first_row, rows_bytes), rows_bytes, full);
  }
  DEVICE void load_dO_of(const QueryWalk<Walk>& at) {
    if (lane != 0) return;
    const u32 full = smem.dO_full.address(0, at_stage.stage);
    mbarrier_arrive_expect(full, dO_bytes);
    load_dO(args, smem, at_stage.stage, full, at);
  }
};

DEVICE i64 turn_place(const Args& args, const Sequence& seq, const QueryWalk<Walk>& at) {
  return static_cast<i64>(place_of(args, seq, at.h, at.i0)) * 2;
}
// in_turn: two threads keep the turns, so that neither's time counts with the other's (together they take
// longer than a step).  Both arrive at dS_full, where the consumers wait before they make dQ.
//
// Lane 0 of such a warp at every step of every tile of keys: visit(step, counter of the turns, the turn).  It
// comes when dS_full has ended for the step before in this stage: an arrival counts for this one.
template <class Visit, class Leave>
DEVICE void at_every_turn(const Args& args, Smem& smem, int lane, Visit visit, Leave leave) {
  Ring<n_stages> step;
  for (u32 n = 0;; ++n) {
    const Own own = work_of(smem, n);
    if (own.j0 == NO_WORK) break;
    const Sequence seq = sequence_of(args, own.b);
    const Meeting meeting = meeting_of(args, seq, own);
    QueryWalk<Walk> at(args, seq, meeting.queries, own.j0, own.h_begin, own.h_end, lane, own.turned);
#pragma unroll 1
    for (; at.exists(); at.next(), step.next()) {
      if (lane != 0) continue;
      step.wait_empty(smem.dS_full);
      visit(step, 2 * place_of(args, seq, at.h, at.i0), turn_of(args, seq, at.i0, own.j0, own.turned));
    }
    leave(step);
    leave_work(smem, n);
  }
}
DEVICE Ring<n_stages> before(Ring<n_stages> step) {
  step.phase ^= step.stage == 0;
  step.stage = step.stage == 0 ? n_stages - 1 : step.stage - 1;
  return step;
}
// One waits until it is the block's turn to add to the next tile of dQ.
DEVICE void wait_for_turns(const Args& args, Smem& smem, int lane) {
  const Global<i32> turns(args.workspace[SLOT_TURNS]);
  previous_kernel_wait();   // no turn has been taken
  const auto visit = [&](const Ring<n_stages>& step, i32 at, i32 turn) {
    turns.wait_for(at, turn);
    mbarrier_arrive(smem.dS_full.address(0, step.stage));
  };
  at_every_turn(args, smem, lane, visit, [](const Ring<n_stages>&) {});
}
// The other says when the block has added, a step late.  The next dQ waits for it, or it could miss two
// phases of a barrier.
DEVICE void announce_turns(const Args& args, Smem& smem, int lane) {
  const Global<i32> turns(args.workspace[SLOT_TURNS]);
  i32 added = -1;   // counter of the step before, in the same tile of keys
  const auto announce = [&](const Ring<n_stages>& step) {
    if (added < 0) return;
    before(step).wait_full(smem.added);   // both groups have added
    turns.add_release(added, 1);
    added = -1;
  };
  const auto visit = [&](const Ring<n_stages>& step, i32 at, i32) {
    mbarrier_arrive(smem.dS_full.address(0, step.stage));
    announce(step);
    added = at;
  };
  at_every_turn(args, smem, lane, visit, announce);
}
