// bwd_06_specialize.cu - attention backward on Hopper: one warp copies, two warpgroups multiply.   sm_90a
//
// Read after   bwd_05_wgmma.cu            Read next   bwd_07_cluster.cu
// Changes      a producer warp runs ahead by two stages; the next S and dP are asked for as soon as dV and dK
//              are done, so that exponentials run under dP, dS under dQ, and dQ's additions under dV and dK
//              (head_dim to 96; at 128 dK and dV leave no registers for that).  Every option of the contract
//
// Algorithm    = tiled_backward.backward.   One block: TILE_KV keys of one (sequence, key head).
//                producer     K, V once; Q, lse and delta, dO of each query tile that sees these keys, of
//                             each query head of the group
//                consumers    64 keys each, rows of S^T = K Q^T and dP^T = V dO^T (lib/key_rows.cuh):
//                  P = 2^(S - lse)                registers; in 16 bits it is the A operand of dV += P^T dO
//                  dS = P (dP - delta)            registers: A of dK += dS^T Q; shared memory: both groups'
//                  dQ = dS K                      each group a half of it; added to the sums in memory
//                dK * scale, dV -> memory         (pass_query_tiles__close makes dQ of the sums)
// Grid         x: key tile + n_tiles * (key head + heads_k * (sequence + batch * split)); packed: slots
//              (lib/positions.cuh) for tiles.  Where blocks are few, n_splits of them share a key head's
//              query heads and add to dK_sum and dV_sum.
// Shared       K [TILE_KV, .] | V | Q [2][TILE_Q, .] | dO [2] | dS [2][TILE_KV, TILE_Q] | lse, delta [2]
// Registers    per consumer: dK HEAD_DIM / 2, dV HEAD_DIM_V / 2, S and dP TILE_Q / 2 each, dQ, P, dS
// Bytes        per block: K, V, dK, dV once; Q, dO, rows and an addition to dQ per query tile
// Barriers     KV_full, Q_full[2], dO_full[2]: "it is there"; empty[2]: "Q and dO of this stage are used";
//              dS_full[2]: "both groups' dS is there", one arrival per warp; deterministic: turn[2], added[2]
//              between a group and the thread that takes turns for it
// Tried        kernels/README.md: idle warps for the passes (dropped), orders of the products, V in registers
#include "lib/params.cuh"
#include "lib/dependent.cuh"
#include "lib/key_group.cuh"

// The next S under this step's arithmetic: where registers hold it beside dK and dV.
constexpr bool runs_ahead = overlaps && head_dim_tile + head_dim_v_tile <= 192;
// lse and delta are fetched while the product runs that they wait for, where registers hold them.
constexpr bool fetches_early = runs_ahead && tile_q == 64;
constexpr int held_steps = !overlaps ? 0 : head_dim_v_tile == 96 ? 6 : head_dim_v_tile == 128 ? 3 : 0;

struct Tiles {
  TileK K;
  TileV V;
  TileQ Q[2];    // ring: stage = number of the query tile % 2
  TiledO dO[2][dO_parts];
  TileS dS[2];
  Shared<float, 4, tile_q> rows;         // stage 0: lse_log2, delta; stage 1
  Shared<u64, 1, 13> barriers;
  Shared<float, 1, group_warps> sums;    // of dalibi_slopes, a number per warp

  DEVICE u32 KV_full() { return barriers.address(0, 0); }
  DEVICE u32 Q_full(int stage) { return barriers.address(0, 1 + stage); }
  DEVICE u32 dO_full(int stage) { return barriers.address(0, 3 + stage); }
  DEVICE u32 empty(int stage) { return barriers.address(0, 5 + stage); }
  DEVICE u32 dS_full(int stage) { return barriers.address(0, 7 + stage); }
  DEVICE u32 turn(int group) { return barriers.address(0, 9 + group); }
  DEVICE u32 added(int group) { return barriers.address(0, 11 + group); }
};
struct Smem : Tiles, KeptBlocks<Walk, asks_blocks, 2> {};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "bwd_06_specialize: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "bwd_06_specialize: Args and launch.py disagree");

DEVICE void produce(const MappedArgs& args, Smem& smem, const Own& own, const Meeting& meeting, int lane) {
  const Sequence& seq = own.keys.seq;
  const int h_k = static_cast<int>(own.keys.h), b = static_cast<int>(seq.array_b);
  QueryWalk<Walk> at(args, seq, meeting.queries, own.keys.j0, own.h_begin, own.h_end, lane);
  if (at.exists() && elect_one()) {
    const int row = static_cast<int>(seq.k_row0) + own.keys.j0;
    mbarrier_arrive_expect(smem.KV_full(), smem.K.n_bytes + smem.V.n_bytes);
    smem.K.load(args.maps.K, smem.KV_full(), row, h_k, b);
    smem.V.load(args.maps.V, smem.KV_full(), row, h_k, b);
  }
  previous_kernel_wait();   // rows and zeros are there
  next_kernel_may_start();
  const Global<float> rows(args.workspace[SLOT_ROWS]);
  constexpr u32 rows_bytes = 2 * tile_q * sizeof(float);
#pragma unroll 1
  for (int n = 0; at.exists(); at.next(), ++n) {
    const int stage = n % 2, row = static_cast<int>(seq.q_row0) + at.i0;
    mbarrier_wait(smem.empty(stage), (n / 2 & 1) ^ 1);   // both groups have used this stage
    smem.fill_blocks(at.blocks, at.i0, lane, stage);
    warp_sync();   // the kept blocks are written: the arrival below says so too
    if (!elect_one()) continue;
    const i64 first_row = static_cast<i64>(place_of(args, seq, at.h, at.i0)) * 2 * tile_q;
    mbarrier_arrive_expect(smem.Q_full(stage), smem.Q[0].n_bytes + rows_bytes);
    smem.Q[stage].load(args.maps.Q, smem.Q_full(stage), row, at.h, b);
    bulk_load(smem.rows.address(2 * stage, 0),
              rows.address(first_row, rows_bytes), rows_bytes,
              smem.Q_full(stage));
    mbarrier_arrive_expect(smem.dO_full(stage), dO_bytes);
    load_dO(args, smem, stage, smem.dO_full(stage), at);
  }
}

// deterministic: one thread per consumer waits until it is the group's turn to add to the next tile of dQ,
// and says when it has.  The consumers do not see how long that takes.
DEVICE void take_turns(const Args& args, Smem& smem, const Own& own, const Meeting& meeting, int group,
                       int lane) {
  const Sequence& seq = own.keys.seq;
  const Global<i32> turns(args.workspace[SLOT_TURNS]);
  QueryWalk<Walk> at(args, seq, meeting.queries, own.keys.j0, own.h_begin, own.h_end, lane);
#pragma unroll 1
  for (int n = 0; at.exists(); at.next(), ++n) {
    if (lane != 0) continue;
    const i64 mine = place_of(args, seq, at.h, at.i0) * 2 + group;
    turns.wait_for(mine, turn_of(args, seq, at.i0, own.keys.j0));
    mbarrier_arrive(smem.turn(group));
    mbarrier_wait(smem.added(group), n & 1);   // all warps of the group have added
    turns.add_release(mine, 1);
  }
}

// A consumer: a warpgroup, and what it waits for.
struct Consumer : KeyGroup<Smem, held_steps> {
  using KeyGroup<Smem, held_steps>::KeyGroup;

  // Step n's S and dP.
  DEVICE void ask_scores(int n, i32 i0) {
    const int stage = n % 2, parity = n / 2 & 1;
    mbarrier_wait(smem.Q_full(stage), parity);
    if (has_foreign_queries(i0)) {
      mbarrier_wait(smem.dO_full(stage), parity);
      clear_foreign_queries(stage, i0);
    }
    ask_S(stage);
    mbarrier_wait(smem.dO_full(stage), parity);
    ask_dP(stage);
  }
  DEVICE void announce_dS(int stage) {
    put_dS(stage);
    warp_sync();   // all lanes have written
    if (lane == 0) mbarrier_arrive(smem.dS_full(stage));
  }
  DEVICE void wait_dS(int n) { mbarrier_wait(smem.dS_full(n % 2), n / 2 & 1); }
  DEVICE void release(int stage) {
    if (lane == 0) mbarrier_arrive(smem.empty(stage));
  }
  // Step n's dQ.
  DEVICE void add(int n, i64 place) {
    if constexpr (deterministic) mbarrier_wait(smem.turn(group), n & 1);
    add_dQ(place);
    if constexpr (deterministic) {
      warp_sync();   // all lanes have added
      if (lane == 0) mbarrier_arrive(smem.added(group));
    }
  }

  // Step n + 1's S and dP run under step n's arithmetic: its dQ comes a step late.
  DEVICE void run_ahead(QueryWalk<Walk>& at) {
    HeldRow held;   // lse or delta, on their way while a product runs
    ask_scores(0, at.i0);
    wgmma_wait<1>();   // S
    soften(0, at);
    wgmma_wait<0>();   // dP
    differentiate(0, at);
    hide(at);
    i32 place = place_of(args, seq, at.h, at.i0), place_before = place;
    int n = 0;
#pragma unroll 1
    while (true) {
      const int stage = n % 2, next = stage ^ 1;
      announce_dS(stage);
      ask_dV(stage);
      ask_dK(stage);
      if (n > 0) add(n - 1, place_before);
      wgmma_wait<0>();
      release(stage);
      place_before = place;
      at.next();
      if (!at.exists()) break;
      ask_scores(n + 1, at.i0);
      if constexpr (fetches_early) held.fetch(smem.rows, 2 * next, lane);
      wgmma_wait<1>();   // S
      if constexpr (fetches_early) soften(next, at, held, 0);
      else soften(next, at);
      wait_dS(n);
      ask_dQ(stage);
      if constexpr (fetches_early) held.fetch(smem.rows, 2 * next + 1, lane);
      wgmma_wait<1>();   // dP
      if constexpr (fetches_early) differentiate(at, held, 0);
      else differentiate(next, at);
      wgmma_wait<0>();   // dQ
      hide(at);
      place = place_of(args, seq, at.h, at.i0);
      ++n;
    }
    wait_dS(n);
    ask_dQ(n % 2);
    wgmma_wait<0>();
    add(n, place_before);
  }

  // A step at a time, where dK and dV leave no registers for the next.
  DEVICE void run(QueryWalk<Walk>& at) {
#pragma unroll 1
    for (int n = 0; at.exists(); ++n, at.next()) {
      const int stage = n % 2;
      ask_scores(n, at.i0);
      wgmma_wait<overlaps>();   // S
      soften(stage, at);
      wgmma_wait<0>();          // dP
      differentiate(stage, at);
      hide(at);
      announce_dS(stage);
      ask_dV(stage);            // while the other group's dS is on its way
      wait_dS(n);
      ask_dQ(stage);
      ask_dK(stage);
      wgmma_wait<1>();   // dV, dQ
      add(n, place_of(args, seq, at.h, at.i0));
      wgmma_wait<0>();
      release(stage);
    }
  }
};

KERNEL(n_threads, 1) bwd_06_specialize(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int warpgroup = shfl(static_cast<int>(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  const Own own = own_of(args);
  if (!own.keys.exists) {
    previous_kernel_wait();
    return;
  }
  const Meeting meeting = meeting_of(args, own.keys.seq, own.keys.j0, asks_blocks);
  if (threadIdx.x == 0) {
    mbarrier_init(smem.KV_full(), 1);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(smem.Q_full(stage), 1);
      mbarrier_init(smem.dO_full(stage), 1);
      mbarrier_init(smem.empty(stage), group_warps);
      mbarrier_init(smem.dS_full(stage), group_warps);
    }
    for (int group = 0; group < 2; ++group) {
      mbarrier_init(smem.turn(group), 1);
      mbarrier_init(smem.added(group), group_warps / 2);
    }
    mbarrier_init_fence();
  }
  block_sync();   // the barriers are there

  if (warpgroup == 0) {
    registers_shrink<24>();
    const int warp = shfl(thread / 32, 0);
    if (warp == 0) produce(args, smem, own, meeting, thread);
    else if (deterministic && warp < 3) take_turns(args, smem, own, meeting, warp - 1, thread % 32);
    return;
  }
  registers_grow<240>();
  Consumer mine(args, smem, own, meeting, warpgroup - 1, thread);
  QueryWalk<Walk> at(args, own.keys.seq, meeting.queries, own.keys.j0, own.h_begin, own.h_end, thread % 32);
  if (at.exists()) {
    mbarrier_wait(smem.KV_full(), 0);
    mine.begin();
    if constexpr (runs_ahead) mine.run_ahead(at);
    else mine.run(at);
    mine.leave_head();
  }
  mine.finish();
}
