// fwd_10_persistent.cu - attention forward on Hopper, a block walks many tiles.   sm_90a
//
// Read after   fwd_09_overlap.cu          Read next   nothing: the last forward rung
// Changes      a block stays and takes one query tile after another: the producer is in the next tile while
//              the consumers finish this one, and O has a buffer of its own, stored by TMA while they go on.
//              A warpgroup skips key tiles that its own 64 rows do not see, and tests elements only where
//              they see a part.  Every option of the contract, head_dim and head_dim_v to 256
//
// Why          between two blocks of fwd_09 an SM waits for a launch, for Q and K, and for O to leave
// Algorithm    = tiled.forward, as fwd_09_overlap.
//                producer (lib/producer.cuh): take a query tile, announce it, copy Q, K and V; again
//                consumer: wait for a query tile; key tiles from the last to the first:
//                            not seen by my rows: give K and V back
//                            seen in part (the end, the diagonal): S, hide, weights
//                            seen as a whole: S, weights
//                            seen in part (a window's begin): S, hide, weights
//                          O / l -> its buffer -> O_gmem      m + log l -> lse; again
//                with a block mask key tiles go up, and the producer says which: those with a kept block
// Grid         x: as many blocks as SMs.  Which query tile is next: lib/work.cuh; who asks first gets it
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a consumer owns 64 rows, a quad of lanes shares a row
// Shared       in 16 bits, as panels (lib/panels.cuh): Q [Q_STAGES][TILE_Q, HEAD_DIM] |
//              O [TILE_Q, HEAD_DIM_V] (O_BUFFER 0: not there, O leaves from registers) |
//              K [N_STAGES][TILE_KV, HEAD_DIM] | V [N_STAGES][TILE_KV, HEAD_DIM_V]; behind them the work, the
//              barriers, and the kept blocks where elements ask for them
// Registers    consumer: S TILE_KV / 2 and O HEAD_DIM_V / 2 floats, P TILE_KV / 4 words, at once.  No spills
//              without options
// Bytes        per query tile: Q once, K and V of the key tiles that some row sees, O once
// Barriers     Q_full, K_full, V_full, work_full: "is there".  Q_empty, K_empty, V_empty, work_empty: "all
//              consumers have used it".  V_landed: the tile with a sequence's end, before the producer has
//              cleared what lies behind it.  Named: 1 + g, the four warps of group g
// Tried        README.md: a table.  Slower on an H200: Q in registers, a look for the maximum in every tile,
//              tiles in a fixed order, results that leave under the next tile's first product
#include "lib/params.cuh"
#include "lib/lazy.cuh"
#include "lib/producer.cuh"

static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_10_persistent: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "fwd_10_persistent: MappedArgs and launch.py disagree");

constexpr bool stores_by_tma = has_o_buffer && sizeof(out_elem) == 2;
constexpr bool trusts = !has_dropout;   // that the maximum stays, till a sum says otherwise

// ---- a warpgroup that multiplies: 64 rows of the query tile

enum class Tests { none, all, asked };   // of elements in a key tile; asked: as its place says

struct Consumer {
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
  Range plain;              // tiles that all 64 rows see as a whole

  DEVICE void run() {
    while (true) {
      work_at.wait_full(smem.work_full);
      const Work work = smem.work(0, work_at.stage);
      if (work.i0 == NO_WORK) break;
      compute(query_tile_of(args, work));
      write(query_tile_of(args, smem.work(0, work_at.stage)));   // read again: registers are dear in between
      work_at.next();
    }
    if (thread == 0) bulk_wait_read<0>();   // the block may not end before O has been read
  }

  DEVICE bool leads() const { return thread == 0; }

  DEVICE void compute(const QueryTile& own) {
    const Sequence& seq = own.seq;
    const i32 i0 = own.i0 + 64 * group;
    const Range all = tiles_of(keys_of_rows(args, seq, own.i0, own.i0 + tile_q));
    O.clear();
    state = no_keys_yet();
    if (all.begin == all.end) return;
    rules = rules_of(args, seq, own.h);
    Range mine = tiles_of(keys_of_rows(args, seq, i0, i0 + 64));
    if (mine.begin == mine.end) mine = {all.begin, all.begin};
    plain = plain_tiles(seq, i0, mine);

    Q_at.wait_full(smem.Q_full);   // Q is there
    if constexpr (has_block_mask) walk_announced(seq, i0);
    else walk_range(seq, i0, all, mine);
    Q_at.next();
  }

  // Key tiles from the last to the first, as far as these rows see.
  DEVICE void walk_range(const Sequence& seq, i32 i0, Range all, Range mine) {
    i32 t = all.end - 1;
#pragma unroll 1
    for (; t >= mine.end; --t) {   // tiles that these rows do not see; V lags one behind K, as below
      skip_K();
      if (t < all.end - 1) skip_V();
    }
    if (mine.begin < mine.end) {
      if (plain.begin <= t && t < plain.end) first_step<Tests::none>(seq, i0, t * tile_kv);
      else first_step<Tests::all>(seq, i0, t * tile_kv);
      --t;
      if (mine.end < all.end) skip_V();
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
    if (mine.begin < mine.end) last_step();
    else if (mine.end < all.end) skip_V();
#pragma unroll 1
    for (; t >= all.begin; --t) skip_K(), skip_V();
  }

  // Key tiles that hold a kept block, as the producer finds them.
  DEVICE void walk_announced(const Sequence& seq, i32 i0) {
    i32 j0 = announced();
    const bool any_tile = j0 != NO_TILE;
    if (any_tile) first_step<Tests::asked>(seq, i0, j0);
#pragma unroll 1
    for (j0 = any_tile ? announced() : NO_TILE; j0 != NO_TILE; j0 = announced())
      step<Tests::asked>(seq, i0, j0);
    barrier_sync(1 + group, 128);   // all have seen the stage that said so, and may not lag
    release_K();
    release_Q();
    if (any_tile) last_step();
  }
  DEVICE i32 announced() {
    K_at.wait_full(smem.K_full);   // the stage's j0 is there
    return smem.j0(0, K_at.stage);
  }

  // Of the tiles in `mine`, those that all 64 rows see as a whole.
  DEVICE Range plain_tiles(const Sequence& seq, i32 i0, Range mine) {
    const i32 i1 = smallest(i0 + 64, seq.len_q);
    Range plain = {mine.begin, mine.begin};
    if (masks_every_tile || asks_blocks || i0 >= i1) return plain;
    if (has_bias && i0 + 64 > last_query(args, seq)) return plain;   // rows that do not exist have no bias
    const i32 begin = visible_keys(args, seq, i1 - 1).begin, end = visible_keys(args, seq, i0).end;
    plain.begin = clamp((begin + tile_kv - 1) / tile_kv, mine.begin, mine.end);
    plain.end = clamp(end / tile_kv, plain.begin, mine.end);
    return plain;
  }

  // Of a tile that these rows do not see.
  DEVICE void skip_K() {
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
    if (leads()) mbarrier_arrive(smem.K_empty.address(0, K_at.stage));
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
    if constexpr (asks_blocks) {
      barrier_sync(1 + group, 128);   // everyone has asked for the stage's kept blocks
      release_K();
    }
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
  template <Tests tests> DEVICE void first_step(const Sequence& seq, i32 i0, i32 j0) {
    Fragment<tile_kv> S;
    multiply_QK(S);
    wgmma_wait<0>();   // S is there; K has been read
    if constexpr (!asks_blocks) release_K();
    change<tests>(seq, i0, j0, S);
    acc shrink[n_rows];
    soften(i0, j0, S, shrink);
    keep_weights(S);
  }

  template <Tests tests> DEVICE void step(const Sequence& seq, i32 i0, i32 j0) {
    Fragment<tile_kv> S;
    multiply_QK(S);
    multiply_PV();
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
    release_V();
#pragma unroll
    for (int n = 0; n < head_dim_v_tile / 2; ++n) pin(registers_of(O)[n]);
  }

  // O / l and lse to memory.
  DEVICE void write(const QueryTile& own) {
    const Results results = results_of(args, own);
    finish(args, own, results, O, state, own.i0 + warp_row, lane);
    const i32 i0 = own.i0 + 64 * group;
    const bool is_whole = !is_packed || i0 + 64 <= own.seq.rows_q;   // else into the next sequence's rows
    const bool by_tma = stores_by_tma && is_mapped(args, args.maps.O) && is_whole;
    if (by_tma) {
      if (leads()) bulk_wait_read<0>();
      barrier_sync(1 + group, 128);   // the last tile's O has been read: its buffer may be overwritten
      if constexpr (stores_by_tma) store_panels<out_elem>(O, smem.buffer(), warp_row, lane);
      fence_async_shared();
    } else {
      store_fragment<out_elem>(O, results.O, results.O_rows, warp_row, lane);
    }
    const i32 row = static_cast<i32>(own.seq.q_row0) + i0, head = own.h, batch = own.seq.array_b;
    const bool is_there = i0 < own.seq.rows_q;
    barrier_sync(1 + group, 128);   // O of all four warps is in its buffer; everyone has read `own`
    if (leads()) {
      if (by_tma && is_there) {
        smem.buffer().store(args.maps.O, 64 * group, row, head, batch);
        bulk_commit();
      }
      mbarrier_arrive(smem.work_empty.address(0, work_at.stage));
    }
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
#pragma unroll
    for (int s = 0; s < n_stages; ++s) {
      mbarrier_init(smem.K_full.address(0, s), 1);
      mbarrier_init(smem.V_full.address(0, s), 1);
      mbarrier_init(smem.K_empty.address(0, s), n_groups);
      mbarrier_init(smem.V_empty.address(0, s), n_groups);
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(smem.work_full.address(0, s), 1);
      mbarrier_init(smem.work_empty.address(0, s), n_groups);
    }
#pragma unroll
    for (int s = 0; s < q_stages; ++s) {
      mbarrier_init(smem.Q_full.address(0, s), 1);
      mbarrier_init(smem.Q_empty.address(0, s), n_groups);
    }
    mbarrier_init(smem.V_landed.address(0, 0), 1);
    mbarrier_init_fence();
  }
  block_sync();   // the barriers are there
  if (role == 0) {
    registers_shrink<producer_registers>();
    if (threadIdx.x < 32) Producer{args, smem, lane}.run();
  } else {
    registers_grow<consumer_registers>();
    Consumer{args, smem, role - 1, thread, lane, 64 * (role - 1) + thread / 32 * 16}.run();
  }
}
