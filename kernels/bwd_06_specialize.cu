// bwd_06_specialize.cu - attention backward on Hopper: one warp copies, two warpgroups multiply.   sm_90a
//
// Read after   bwd_05_wgmma.cu            Read next   bwd_07_cluster.cu
// Changes      a producer warp runs ahead by two or three stages, and into the next tile of keys: a block
//              stays on its SM and takes one tile after another.  dQ comes a step late: at head_dim 64 its
//              product runs under dS, above that the warpgroups need not keep step.  Every option of the
//              contract
//
// Algorithm    = tiled_backward.backward.   A block: tiles of TILE_KV keys, each of one (sequence, key head).
//                producer     (lib/key_producer.cuh) takes a tile; K, V once; Q, lse and delta, dO of each
//                             query tile that sees these keys, of each query head of the group; again
//                consumers    64 keys each, rows of S^T = K Q^T and dP^T = V dO^T (lib/key_rows.cuh):
//                  P = 2^(S - lse)                registers; in 16 bits it is the A operand of dV += P^T dO
//                  dS = P (dP - delta)            registers: A of dK += dS^T Q; shared memory: both groups'
//                  dQ = dS K                      each group a half of it; added to the sums in memory
//                dK * scale, dV -> memory         (pass_query_tiles__close makes dQ of the sums)
// In turn      deterministic, and up to length 2,048, where it costs nothing: blocks add to a query tile one
//              after the other, the last keys first.  Who is first stores, so nobody makes zeros; where every
//              query sees a key, who is last makes dq of the sum, and there is no __close.  With causal the
//              last heads are walked the other way round (may_turn): then short walks end the kernel
// Grid         x: as many blocks as SMs.  Which tile is next: a counter in memory; who asks first gets it.  A
//              block's first tile is its own number; in turn it asks for that too, for then nobody waits for
//              a block that has not started.
//              Tiles are numbered key tile + n_tiles * (key head + heads_k * (sequence + batch * part)), with
//              causal the longest of a few heads first, in turn the last keys of a few heads; packed: slots
//              (lib/positions.cuh) for tiles.  Where tiles are few, parts share a key head's query heads and
//              add to dK_sum and dV_sum; long walks: what is left over comes in pieces (lib/key_pieces.cuh).
// Shared       K [TILE_KV, .] | V | rings of N_STAGES: Q [TILE_Q, .], dO, dS [TILE_KV, TILE_Q], lse and delta
// Registers    per consumer: dK HEAD_DIM / 2, dV HEAD_DIM_V / 2, S and dP TILE_Q / 2 each, dQ, P, dS
// Bytes        per tile: K, V, dK, dV once; Q, dO, rows and an addition to dQ per query tile
// Barriers     KV_full, Q_full[], dO_full[]: "it is there"; KV_empty, empty[]: "it is used"; dS_full[]: "both
//              groups' dS is there", in turn also "it is this block's turn"; work_full[2], work_empty[2]:
//              which tile it is; added[]: both groups have added to dQ.  Every thread arrives for itself:
//              compute-sanitizer does not follow a warp_sync and one lane's arrival, and it costs nothing
// Tried        kernels/ATTEMPTS.md
#include "lib/params.cuh"
#include "lib/key_producer.cuh"

static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "bwd_06_specialize: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "bwd_06_specialize: Args and launch.py disagree");

enum class Order { step, ahead, late };   // see run_step, run_ahead
constexpr Order order = !overlaps ? Order::step : n_stages == 3 ? Order::late : Order::ahead;
constexpr int held_steps =
    order != Order::late ? 0 : head_dim_v_tile == 96 ? 6 : head_dim_v_tile == 128 ? 3 : 0;

// A consumer: a warpgroup, and what it waits for.
struct Consumer : KeyGroup<Smem, held_steps> {
  using KeyGroup<Smem, held_steps>::KeyGroup;
  using Stage = Ring<n_stages>;
  const Ends ends = Ends(args, seq, own.j0, own.turned);

  // A step's S and dP.
  DEVICE void ask_scores(const Stage& now, i32 i0) {
    now.wait_full(smem.Q_full);   // Q, lse and delta are there
    if (has_foreign_queries(i0)) {
      now.wait_full(smem.dO_full);   // dO is there: both are cleared at once
      clear_foreign_queries(now.stage, i0);
    }
    ask_S(now.stage);
    now.wait_full(smem.dO_full);   // dO is there
    ask_dP(now.stage);
  }
  // S and dP -> P and dS, with no product on its way at the end.
  DEVICE void finish_scores(const Stage& now, const QueryWalk<Walk>& at) {
    wgmma_wait<overlaps>();   // S
    soften(now.stage, at);
    wgmma_wait<0>();   // dP
    differentiate(now.stage, at);
    hide(at);
  }
  DEVICE void announce_dS(const Stage& now) {
    put_dS(now.stage);
    mbarrier_arrive(smem.dS_full.address(0, now.stage));
  }
  DEVICE void ask_dQ_of(const Stage& step) {
    step.wait_full(smem.dS_full);   // both groups' dS is there, and it is the block's turn
    ask_dQ(step.stage);
  }
  DEVICE void release(const Stage& used) {
    mbarrier_arrive(smem.empty.address(0, used.stage));
  }
  DEVICE void release_KV() {
    mbarrier_arrive(smem.KV_empty.address(0, 0));
  }
  // Where a step's dQ goes.
  struct Sum {
    i32 place, h, i0;
    bool is_first, is_last;   // in_turn, finishes: of the blocks that meet the tile
  };
  DEVICE Sum sum_of(const QueryWalk<Walk>& at) {
    return {place_of(args, seq, at.h, at.i0), at.h, at.i0,
            in_turn && ends_until(args, seq, at.i0, ends.first),
            may_turn ? ends_until(args, seq, at.i0, ends.last) : finishes && own.j0 == 0};
  }
  DEVICE void add(const Stage& step, const Sum& sum) {
    if (finishes && sum.is_last) finish_dQ(sum.place, !sum.is_first, sum.h, sum.i0);
    else add_dQ(sum.place, sum.is_first);
    if constexpr (in_turn) mbarrier_arrive(smem.added.address(0, step.stage));
  }

  // now: stage of the next step, here and after.

  // dQ comes a step late, and what runs under what depends on the registers that are left:
  //   ahead   exponentials run under dP, dS under dQ of the step before, dQ's additions under dK
  //   late    dS is made under dV, and a group that is behind holds nobody up.  A stage is given back when
  //           its dS is used too
  DEVICE void run_ahead(QueryWalk<Walk>& at, Stage& now) {
    constexpr bool is_late = order == Order::late;
    ask_scores(now, at.i0);
    finish_scores(now, at);
    announce_dS(now);
    ask_dV(now.stage);
    ask_dK(now.stage);
    Sum sum = sum_of(at);
    wgmma_wait<0>();   // dV, dK
    if constexpr (!is_late) release(now);
    Stage before = now;
    now.next();
#pragma unroll 1
    for (at.next(); at.exists(); at.next()) {
      ask_scores(now, at.i0);
      wgmma_wait<1>();   // S
      soften(now.stage, at);
      if constexpr (is_late) ask_dV(now.stage);
      else ask_dQ_of(before);
      wgmma_wait<1>();   // dP
      differentiate(now.stage, at);
      if constexpr (!is_late) wgmma_wait<0>();   // dQ
      hide(at);
      announce_dS(now);
      if constexpr (is_late) ask_dQ_of(before);
      else ask_dV(now.stage);
      if constexpr (!is_late) add(before, sum);
      ask_dK(now.stage);
      if constexpr (is_late) {
        wgmma_wait<1>();   // dV, dQ
        release(before);
        add(before, sum);
      }
      sum = sum_of(at);
      before = now;
      now.next();
      wgmma_wait<0>();   // dV, dK
      if constexpr (!is_late) release(before);
    }
    ask_dQ_of(before);
    wgmma_wait<0>();   // dQ
    if constexpr (is_late) release(before);
    release_KV();
    add(before, sum);
  }

  // A step at a time, where options need the registers.
  DEVICE void run_step(QueryWalk<Walk>& at, Stage& now) {
#pragma unroll 1
    for (; at.exists(); at.next(), now.next()) {
      ask_scores(now, at.i0);
      finish_scores(now, at);
      announce_dS(now);
      ask_dV(now.stage);   // while the other group's dS is on its way
      ask_dQ_of(now);
      ask_dK(now.stage);
      wgmma_wait<1>();   // dV, dQ
      add(now, sum_of(at));
      wgmma_wait<0>();   // dK
      release(now);
    }
    release_KV();
  }
};

KERNEL(n_threads, 1) bwd_06_specialize(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int warpgroup = shfl(static_cast<int>(threadIdx.x) / 128, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) start_barriers(smem);
  block_sync();   // the barriers are there

  if (warpgroup == 0) {
    registers_shrink<24>();
    const int warp = shfl(static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) Producer{args, smem, lane}.run();
    else if (in_turn && warp == 1) wait_for_turns(args, smem, lane);
    else if (in_turn && warp == 2) announce_turns(args, smem, lane);
    return;
  }
  registers_grow<240>();
  Ring<n_stages> now;
  Ring<1> KV_at;
#pragma unroll 1
  for (u32 n = 0;; ++n) {
    const Own own = work_of(smem, n);
    if (own.j0 == NO_WORK) break;
    const Sequence seq = sequence_of(args, own.b);
    const Meeting meeting = meeting_of(args, seq, own);
    // moved: else the compiler asks for threadIdx again in every step.
    Consumer mine(args, smem, own, seq, meeting, warpgroup - 1, moved(threadIdx.x % 128));
    QueryWalk<Walk> at(args, seq, meeting.queries, own.j0, own.h_begin, own.h_end, lane, own.turned);
    if (at.exists()) {
      KV_at.wait_full(smem.KV_full);   // K and V are there
      KV_at.next();
      mine.begin();
      if constexpr (order == Order::step) mine.run_step(at, now);
      else mine.run_ahead(at, now);
      mine.leave_head();
    }
    const Own again = work_of(smem, n);
    if (again.exists) mine.finish(again, sequence_of(args, again.b));
    leave_work(smem, n);
  }
}
