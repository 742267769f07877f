// fwd_10_persistent.cu - attention forward on Hopper, a block walks many tiles.   sm_90a
//
// Read after   fwd_09_overlap.cu          Read next   nothing: the last forward rung
// Changes      a block stays and takes one query tile after another: the producer is in the next tile while
//              the consumers finish this one, and O leaves by TMA while they go on: through a buffer of its
//              own or, where heads are wide, through stages of V, which the next query tile needs last.
//              A warpgroup skips key tiles that its own 64 rows do not see, and tests elements only where
//              they see a part.  Every option of the contract, head_dim and head_dim_v to 256
//
// Why          between two blocks of fwd_09 an SM waits for a launch, for Q and K, and for O to leave
// Algorithm    = tiled.forward, as fwd_09_overlap.
//                planner (lib/planner.cuh): take a query tile, announce it; again.  A warp of its own where
//                          walks are short (PLANS), else what the producer does between two query tiles
//                producer (lib/producer.cuh): wait for a query tile; copy Q, K and V; again
//                consumer: wait for a query tile; key tiles from the last to the first:
//                            not seen by my rows: give K and V back
//                            seen in part (the end, the diagonal): S, hide, weights
//                            seen as a whole: S, weights
//                            seen in part (a window's begin): S, hide, weights
//                          O / l -> shared -> O_gmem      m + log l -> lse; again
//                with a block mask key tiles go up, and the producer says which: those with a kept block
// Grid         x: as many blocks as SMs.  Which query tile is next: lib/work.cuh; who asks first gets it
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a consumer owns 64 rows, a quad of lanes shares a row
// Shared       in 16 bits, as panels (lib/panels.cuh): Q [Q_STAGES][TILE_Q, HEAD_DIM] |
//              O [TILE_Q, HEAD_DIM_V] (O_BUFFER 1; 2: through V; 0: from registers) |
//              K [N_STAGES][TILE_KV, HEAD_DIM] | V [N_STAGES][TILE_KV, HEAD_DIM_V]; behind them the work, the
//              barriers, and the kept blocks where elements ask for them
// Registers    consumer: S TILE_KV / 2 and O HEAD_DIM_V / 2 floats, P TILE_KV / 4 words, at once.  No spills
//              without options
// Bytes        per query tile: Q once, K and V of the key tiles that some row sees, O once
// Barriers     Q_full, K_full, V_full, work_full: "is there".  Q_empty, K_empty, V_empty, work_empty: "all
//              consumers have used it"; who reads or writes a record arrives for himself.  V_landed: the tile
//              with a sequence's end, before the producer has cleared what lies behind it.  O_read: O has left
//              V.  Named: 1 + g, the four warps of group g; MAY_PLAN: the planner may take the next tile;
//              TURN + g: group g may issue its products
// Tried        ATTEMPTS.md: a table.  Slower on an H200: Q in registers, a look for the maximum in every
//              tile, tiles in a fixed order, clusters, a first product with the last of the query tile before
#include "lib/params.cuh"
#include "lib/consumer.cuh"
#include "lib/planner.cuh"
#include "lib/producer.cuh"

static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_10_persistent: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "fwd_10_persistent: MappedArgs and launch.py disagree");

// ---- a warpgroup that multiplies: 64 rows of the query tile

struct Consumer : ConsumerParts {
  DEVICE void run() {
    if (group == 1) give_turn();   // group 0 begins
    while (true) {
      work_at.wait_full(smem.work_full);   // the next query tile is known, or the end
      const Work work = smem.work(0, work_at.stage);
      if (work.i0 == NO_WORK) break;
      const QueryTile own = query_tile_of(args, work);
      KeyTiles keys;
      if constexpr (plans) keys = smem.keys(group, work_at.stage);
      else find_key_tiles(args, own, group, keys);
      compute(own, keys);
      write(query_tile_of(args, smem.work(0, work_at.stage)));   // read again: registers are dear in between
      work_at.next();
    }
    if (leads()) bulk_wait_read<0>();   // the block may not end before O has been read
  }

  DEVICE void compute(const QueryTile& own, const KeyTiles& keys) {
    O.clear();
    state = no_keys_yet();
    plain = keys.plain;
    const bool sees = keys.mine.begin < keys.mine.end;
    if (borrows_V && (has_block_mask || !sees || keys.mine.end < keys.all.end)) {   // else: first_step
      give_back_V();
      barrier_sync(1 + group, 128);   // before anyone writes to its place
    }
    if (keys.all.begin == keys.all.end) return;
    rules = rules_of(args, own.seq, own.h);
    Q_at.wait_full(smem.Q_full);   // Q is there
    const i32 i0 = own.i0 + 64 * group;
    if constexpr (has_block_mask) walk_announced(own.seq, i0);
    else walk_range(own.seq, i0, keys.all, keys.mine);
    Q_at.next();
  }

  // Key tiles from the last to the first, as far as these rows see.
  DEVICE void walk_range(const Sequence& seq, i32 i0, Range all, Range mine) {
    const bool sees = mine.begin < mine.end;
    i32 t = all.end - 1;
#pragma unroll 1
    for (; t >= mine.end; --t) {   // tiles that these rows do not see; V lags one behind K, as below
      skip_K();
      if (t < all.end - 1) skip_V();
    }
    if (sees) first_step(seq, i0, t * tile_kv, mine.begin < t), --t;
    if (mine.end < all.end) skip_V();
    if (sees) {
      if constexpr (causal || has_window || asks_elements) {
#pragma unroll 1
        for (; t >= plain.end; --t) step<Tests::all>(seq, i0, t * tile_kv);
      }
      if constexpr (!masks_every_tile) {
#pragma unroll 1
        for (; t >= plain.begin; --t) step<Tests::none>(seq, i0, t * tile_kv);
      }
      if constexpr (has_window) {
#pragma unroll 1
        for (; t >= mine.begin; --t) step<Tests::all>(seq, i0, t * tile_kv);
      }
    }
    release_Q();
    if (sees) last_step();
    if constexpr (has_window)
#pragma unroll 1
      for (; t >= all.begin; --t) skip_K(), skip_V();
  }

  // Key tiles that hold a kept block, as the producer finds them.
  DEVICE void walk_announced(const Sequence& seq, i32 i0) {
    i32 j0 = announced();
    const bool any_tile = j0 != NO_TILE;
    if (any_tile) first_step(seq, i0, j0, false);
#pragma unroll 1
    for (j0 = any_tile ? announced() : NO_TILE; j0 != NO_TILE; j0 = announced())
      step<Tests::asked>(seq, i0, j0);
    release_K();   // of the stage that said so
    release_Q();
    if (any_tile) last_step();
  }
  DEVICE i32 announced() {
    K_at.wait_full(smem.K_full);   // the stage's j0 is there
    return shfl(lane == 0 ? smem.j0(0, K_at.stage) : 0, 0);   // who reads it gives the stage back
  }

  // S of a query tile's first key tile -> P.  more: these rows see other key tiles too.  (Of few keys one may
  // have all the weight, which should be 1, exactly.)
  DEVICE void begin(const Sequence& seq, i32 i0, i32 j0, bool more, Fragment<tile_kv>& S) {
    if constexpr (!asks_blocks) release_K();
    change<Tests::asked>(seq, i0, j0, S);
    if (begins_at_0 && more && weigh_under_0(S)) return;
    state = no_keys_yet();
    acc shrink[n_rows];
    soften(i0, j0, S, shrink);
    keep_weights(S);
  }

  DEVICE void first_step(const Sequence& seq, i32 i0, i32 j0, bool more) {
    Fragment<tile_kv> S;
    take_turn();
    multiply_QK(S);
    give_turn();
    if (borrows_V) give_back_V();
    wgmma_wait<0>();   // S is there; K has been read
    begin(seq, i0, j0, more, S);
  }

  template <Tests tests> DEVICE void step(const Sequence& seq, i32 i0, i32 j0) {
    Fragment<tile_kv> S;
    take_turn();
    multiply_QK(S);
    multiply_PV();
    give_turn();
    wgmma_wait<1>();   // S is there; K has been read
    if constexpr (!asks_blocks) release_K();
    change<tests>(seq, i0, j0, S);
    acc sum[n_rows] = {TRUSTED_SUM}, shrink[n_rows];
    u32 weights[tile_kv / 16][4];
    if constexpr (trusts && weighs_ahead) {
      weigh(S, state, rules.late_scale, weights, sum);
      hold_before_wait(state.l[0] + state.l[1] + sum[0] + sum[1], smem.Q_full.address(0, 0));
    }
    wgmma_wait<0>();   // O has the tile before; V has been read, and P may be written
    release_V();
#pragma unroll
    for (int n = 0; n < head_dim_v_tile / 2; ++n) pin(registers_of(O)[n]);
    if constexpr (trusts && !weighs_ahead) weigh(S, state, rules.late_scale, P, sum);
    if (trusts && are_trusted(sum)) {
#pragma unroll
      for (int r = 0; r < n_rows; ++r) state.l[r] += sum[r];
      if constexpr (weighs_ahead)
#pragma unroll
        for (int k = 0; k < tile_kv / 16; ++k)
#pragma unroll
          for (int n = 0; n < 4; ++n) P[k][n] = moved(weights[k][n]);
    } else {
      soften(i0, j0, S, shrink);
      rescale(O, shrink);
      keep_weights(S);
    }
  }

  DEVICE void last_step() {
    multiply_PV();
    wgmma_wait<0>();   // O is complete; V has been read
    if (borrows_V) barrier_sync(1 + group, 128);   // by all four warps: O may come to its place
    release_V();
#pragma unroll
    for (int n = 0; n < head_dim_v_tile / 2; ++n) pin(registers_of(O)[n]);
  }
};

KERNEL(n_role_threads, 1) fwd_10_persistent(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int role = shfl(static_cast<int>(threadIdx.x) / 128, 0);   // 0: producer.  Uniform in a warp
  const int thread = threadIdx.x % 128, lane = thread % 32;
  if (threadIdx.x == 0) {
    tma_prefetch_map(args.maps.Q);
    tma_prefetch_map(args.maps.K);
    tma_prefetch_map(args.maps.V);
    init_barriers(smem);
  }
  block_sync();   // the barriers are there
  if (role == 0) {
    registers_shrink<producer_registers>();
    if (threadIdx.x < 32) Producer{args, smem, lane}.run();
    else if (plans && threadIdx.x < 64) Planner{args, smem, lane}.run();
  } else {
    registers_grow<consumer_registers>();
    Consumer{{args, smem, role - 1, thread, lane, 64 * (role - 1) + thread / 32 * 16}}.run();
  }
}
