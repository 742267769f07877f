// bwd_06_specialize.cu - attention backward on Hopper: one warp copies, two warpgroups multiply.   sm_90a
//
// Read after   bwd_05_wgmma.cu            Read next   bwd_07_cluster.cu
// Changes      a producer warp runs ahead by two stages; the next S and dP are asked for as soon as dV and dK
//              are done, so that exponentials run under dP, dS under dQ, and dQ's additions under dV and dK.
//              Every option of the contract
//
// Algorithm    = tiled_backward.backward.   One block: TILE_KV keys of one (sequence, key head).
//                producer     K, V once; Q, lse and delta, dO of each query tile that sees these keys, of each
//                             query head of the group
//                consumers    64 keys each, rows of S^T = K Q^T and dP^T = V dO^T (lib/key_rows.cuh):
//                  P = 2^(S - lse)                registers; in 16 bits it is the A operand of dV += P^T dO
//                  dS = P (dP - delta)            registers: A of dK += dS^T Q; shared memory: both groups' dS
//                  dQ = dS K                      each group a half of it; added to the sums in memory
//                dK * scale, dV -> memory         (pass_query_tiles__close makes dQ of the sums)
// Grid         x: key tile + n_tiles * (key head + heads_k * (sequence + batch * split)); packed: slots
//              (lib/positions.cuh) for tiles.  Where blocks are few, n_splits of them share a key head's query
//              heads and add to dK_sum and dV_sum.
// Shared       K [TILE_KV, .] | V | Q [2][TILE_Q, .] | dO [2] | dS [2][TILE_KV, TILE_Q] | lse, delta [2]
// Registers    per consumer: dK HEAD_DIM / 2, dV HEAD_DIM_V / 2, S and dP TILE_Q / 2 each, dQ, P, dS
// Bytes        per block: K, V, dK, dV once; Q, dO, rows and an addition to dQ per query tile
// Barriers     KV_full, Q_full[2], dO_full[2]: "it is there"; empty[2]: "Q and dO of this stage are used";
//              dS_full[2]: "both groups' dS is there", one arrival per warp
#include "lib/params.cuh"
#include "lib/accumulators.cuh"
#include "lib/barrier.cuh"
#include "lib/key_rows.cuh"
#include "lib/maps.cuh"
#include "lib/mbarrier.cuh"
#include "lib/panels.cuh"
#include "lib/query_tiles.cuh"

constexpr int SLOT_DALIBI = 0;   // workspace: acc [slots of key tiles, heads], one part of dalibi_slopes each
constexpr int SLOT_DBIAS = 1;    // workspace: acc [batch, heads, len_k], dbias summed over the queries

using Walk = BlockWalk<tile_kv, tile_q, block_kv, block_q>;   // owns keys, walks queries
constexpr bool asks_blocks = has_block_mask && (deterministic || !Walk::Shape::tiles_are_whole);

constexpr int consumers = 256, consumer_warps = consumers / 32;
constexpr bool halves_rows = tile_q == 128;   // of dQ: a group has 64 queries, or half of the columns
constexpr int dQ_cols = halves_rows ? head_dim_tile : head_dim_tile / 2;
constexpr int K_panel = dQ_cols % 64 == 0 ? 64 : dQ_cols % 32 == 0 ? 32 : 16;   // a half is whole panels
// The next S under this step's arithmetic: where registers hold it beside dK and dV.
constexpr bool runs_ahead = head_dim_tile + head_dim_v_tile <= 192;
// k16 steps of V^T that stay in registers: shared memory is the limit.
constexpr bool needs_tests = has_foreign_rows || dbias_case == 1;   // where pairs may be hidden, for dS
constexpr bool rules_differ = !is_plain || has_mask || has_dropout || wants_dbias;   // from head to head
constexpr int held_steps = keeps_weights ? 0 : head_dim_v_tile == 96 ? 6 : head_dim_v_tile == 128 ? 3 : 0;

static_assert(tile_kv == 128 && n_warps == 12 && (tile_q == 64 || tile_q == 128), "bwd_06_specialize: tiles");

using TileK = PanelTile<tile_kv, head_dim_tile, K_panel>;
using TileS = PanelTile<tile_kv, tile_q>;   // [keys][queries]
struct Tiles {
  TileK K;
  PanelTile<tile_kv, head_dim_v_tile> V;
  PanelTile<tile_q, head_dim_tile> Q[2];       // ring: stage = number of the query tile % 2
  PanelTile<tile_q, head_dim_v_tile> dO[2];
  TileS dS[2];
  Shared<float, 4, tile_q> rows;               // stage 0: lse_log2, delta; stage 1
  Shared<u64, 1, 9> barriers;
  Shared<float, 1, consumer_warps> sums;       // of dalibi_slopes, a number per warp

  DEVICE u32 KV_full() { return barriers.address(0, 0); }
  DEVICE u32 Q_full(int stage) { return barriers.address(0, 1 + stage); }
  DEVICE u32 dO_full(int stage) { return barriers.address(0, 3 + stage); }
  DEVICE u32 empty(int stage) { return barriers.address(0, 5 + stage); }
  DEVICE u32 dS_full(int stage) { return barriers.address(0, 7 + stage); }
};
struct Smem : Tiles, KeptBlocks<Walk, asks_blocks, 2> {};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "bwd_06_specialize: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes, "bwd_06_specialize: Args and launch.py disagree");

// What a block owns.
struct Own {
  KeyTile keys;
  i64 slot;   // number of the key tile among all sequences'
  i32 h_begin, h_end;
  bool shares;   // adds to dK_sum, dV_sum
};
DEVICE Own own_of(const Args& args) {
  Own own = {};
  const i64 n_blocks = n_slots(args, args.len_k, tile_kv) * args.heads_k;
  const i64 x = blockIdx.x % n_blocks, split = blockIdx.x / n_blocks, n_parts = gridDim.x / n_blocks;
  own.keys = key_tile_along(args, x, own.slot);
  const i64 group = args.heads / args.heads_k;
  own.h_begin = static_cast<i32>(own.keys.h * group + split * group / n_parts);
  own.h_end = static_cast<i32>(own.keys.h * group + (split + 1) * group / n_parts);
  own.shares = n_parts > 1;
  return own;
}

DEVICE void produce(const MappedArgs& args, Smem& smem, const Own& own, const Meeting& meeting, int lane) {
  const Sequence& seq = own.keys.seq;
  const int h_k = static_cast<int>(own.keys.h), b = static_cast<int>(seq.array_b);
  QueryWalk<Walk> at(args, seq, meeting.queries, own.keys.j0, own.h_begin, own.h_end, lane);
  if (!at.exists()) return;
  if (elect_one()) {
    const int row = static_cast<int>(seq.k_row0) + own.keys.j0;
    mbarrier_arrive_expect(smem.KV_full(), smem.K.n_bytes + smem.V.n_bytes);
    smem.K.load(args.maps.K, smem.KV_full(), row, h_k, b);
    smem.V.load(args.maps.V, smem.KV_full(), row, h_k, b);
  }
  const Global<float> rows(args.workspace[SLOT_ROWS]);
  constexpr u32 rows_bytes = 2 * tile_q * sizeof(float);
#pragma unroll 1
  for (int n = 0; at.exists(); at.next(), ++n) {
    const int stage = n % 2, row = static_cast<int>(seq.q_row0) + at.i0;
    mbarrier_wait(smem.empty(stage), (n / 2 & 1) ^ 1);   // both groups have used this stage
    smem.fill_blocks(at.blocks, at.i0, lane, stage);
    warp_sync();   // the kept blocks are written: the arrival below says so too
    if (!elect_one()) continue;
    mbarrier_arrive_expect(smem.Q_full(stage), smem.Q[0].n_bytes + rows_bytes);
    smem.Q[stage].load(args.maps.Q, smem.Q_full(stage), row, at.h, b);
    bulk_load(smem.rows.address(2 * stage, 0),
              rows.address(place_of(args, seq, at.h, at.i0) * 2 * tile_q, rows_bytes), rows_bytes,
              smem.Q_full(stage));
    mbarrier_arrive_expect(smem.dO_full(stage), smem.dO[0].n_bytes);
    smem.dO[stage].load(args.maps.dO, smem.dO_full(stage), row, at.h, b);
  }
}

// One warpgroup: 64 keys.
struct Consumer {
  const MappedArgs& args;
  Smem& smem;
  const Own& own;
  const Sequence& seq;
  const Meeting meeting;
  const int group, warp, lane;
  const i32 key0, j;    // first key of the warp, of this lane
  Range queries[2];     // that this lane's two keys may see
  HeadRules rules = {};
  i32 rules_h = -1;     // whose they are
  OptionSums sums = {};
  Turns turns;
  float dK[head_dim_tile / 2], dV[head_dim_v_tile / 2];
  float S[n_scores], dP[n_scores], slopes[n_scores], dQ[dQ_cols / 2];
  u32 P[tile_q / 16][4], dS[tile_q / 16][4], V[held_steps + 1][4];
  KeptWeights kept = {};

  DEVICE Consumer(const MappedArgs& args, Smem& smem, const Own& own, const Meeting& meeting, int group,
                  int thread)
      : args(args), smem(smem), own(own), seq(own.keys.seq), meeting(meeting), group(group),
        warp(thread / 32), lane(thread % 32), key0(own.keys.j0 + group * 64 + warp * 16), j(key0 + lane / 4),
        turns(args, group, thread) {
    queries[0] = visible_queries(args, seq, j, j);
    queries[1] = visible_queries(args, seq, j + 8, j + 8);
    clear(dK);
    clear(dV);
    clear(dQ);
  }
  template <int n> DEVICE static void clear(float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = 0;
  }

  // ---- the products: asked for here, there after a wgmma_wait

  DEVICE void ask_S(int stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < head_dim_tile / 16; ++k)
      wgmma<elem>(S, smem.K.descriptor_K(k, group * 64), smem.Q[stage].descriptor_K(k), k > 0);
    wgmma_commit();
  }
  DEVICE void ask_dP(int stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < head_dim_v_tile / 16; ++k) {
      const u64 step = smem.dO[stage].descriptor_K(k);
      if (k < held_steps) wgmma<elem>(dP, V[k < held_steps ? k : 0], step, k > 0);
      else wgmma<elem>(dP, smem.V.descriptor_K(k, group * 64), step, k > 0);
    }
    wgmma_commit();
  }
  DEVICE void ask_dV(int stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k) wgmma<elem, 1>(dV, P[k], smem.dO[stage].descriptor_MN(k), true);
    wgmma_commit();
  }
  DEVICE void ask_dK(int stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k) wgmma<elem, 1>(dK, dS[k], smem.Q[stage].descriptor_MN(k), true);
    wgmma_commit();
  }
  DEVICE void ask_dQ(int stage) {
    const u32 first = halves_rows ? group * TileS::panel_bytes / 16 : 0;
    const u32 first_K = halves_rows ? 0 : group * (dQ_cols / TileK::panel_cols) * TileK::panel_bytes / 16;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k)
      wgmma<elem, 1, 1>(dQ, smem.dS[stage].descriptor(first + k * TileS::line_bytes, TileS::panel_bytes),
                        smem.K.descriptor(first_K + k * TileK::line_bytes, TileK::panel_bytes), k > 0);
    wgmma_commit();
  }

  // ---- what happens between them

  // K and V are there, the products may begin.
  DEVICE void begin() {
    mbarrier_wait(smem.KV_full(), 0);
    if constexpr (has_foreign_rows)
      if (own.keys.j0 + tile_kv > seq.len_k) {   // dS is 0 there, and 0 x NaN is NaN
        smem.K.clear_rows(seq.len_k - own.keys.j0, group * 128 + warp * 32 + lane, consumers);
        fence_async_shared();
        barrier_sync(1, consumers);   // the rows are zeros for both groups
      }
#pragma unroll
    for (int k = 0; k < held_steps; ++k)
      ldmatrix_x4(V[k], smem.V.address(group * 64 + warp * 16 + lane % 16, 2 * k + lane / 16));
  }

  // Step n's Q and dO: S and dP are asked for.
  DEVICE void ask_scores(int n, i32 i0) {
    const int stage = n % 2, parity = n / 2 & 1;
    mbarrier_wait(smem.Q_full(stage), parity);
    if constexpr (is_packed || has_query_lengths)
      if (i0 + tile_q > seq.len_q) {   // P and dS are 0 there
        mbarrier_wait(smem.dO_full(stage), parity);
        const int thread = group * 128 + warp * 32 + lane;
        smem.Q[stage].clear_rows(seq.len_q - i0, thread, consumers);
        smem.dO[stage].clear_rows(seq.len_q - i0, thread, consumers);
        fence_async_shared();
        barrier_sync(1, consumers);   // the rows are zeros for both groups
      }
    ask_S(stage);
    mbarrier_wait(smem.dO_full(stage), parity);
    ask_dP(stage);
  }

  // S -> P, in 16 bits too.
  DEVICE void soften(int n, const QueryWalk<Walk>& at) {
    enter_head(at.h);
    const int row = n % 2 * 2;
    const auto is_kept = [&](i32 i, i32 key) { return smem.keeps(at.blocks, key, at.i0, i, n % 2); };
    if (is_whole(meeting, at.i0))
      make_weights<false>(args, rules, S, slopes, smem.rows, row, at.i0, j, queries, lane, is_kept);
    else
      make_weights<true>(args, rules, S, slopes, smem.rows, row, at.i0, j, queries, lane, is_kept);
    if constexpr (has_dropout) kept = kept_weights_of(rules.dropout, at.i0, j, lane);
    pack_weights(args, P, S, kept);
  }

  // dP -> dS.
  DEVICE void differentiate(int n, const QueryWalk<Walk>& at) {
    const int row = n % 2 * 2 + 1;
    if (!needs_tests || is_whole(meeting, at.i0))
      make_gradients<false>(args, rules, dP, S, P, slopes, kept, smem.rows, row, at.i0, j, queries, sums, lane);
    else
      make_gradients<true>(args, rules, dP, S, P, slopes, kept, smem.rows, row, at.i0, j, queries, sums, lane);
    pack_scores(dS, dP);
  }

  // dS -> shared memory, where the other group's dQ needs it too.
  DEVICE void put_dS(int stage) {
    const u32 first = smem.dS[stage].address(group * 64 + warp * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k)   // chunk 2 k + lane / 16: an xor inside the swizzle
      stmatrix_x4((first ^ k % 4 * 32) + k / 4 * TileS::panel_bytes, dS[k]);
    fence_async_shared();
    warp_sync();
    if (lane == 0) mbarrier_arrive(smem.dS_full(stage));
  }

  DEVICE void add_dQ(const QueryWalk<Walk>& at, i64 place, i32 turn) {
    if constexpr (deterministic) turns.wait(place, turn);
    const Global<float> to(args.workspace[SLOT_DQ]);
    const int r = halves_rows ? group * 4 + warp : warp, c0 = halves_rows ? 0 : group * dQ_cols / 8;
#pragma unroll
    for (int c = 0; c < dQ_cols / 8; ++c)
      to.add_as(dQ_index(place, r, c0 + c, lane),
                Vec16<float>{{dQ[4 * c], dQ[4 * c + 1], dQ[4 * c + 2], dQ[4 * c + 3]}});
  }

  // ---- gradients of options

  DEVICE void enter_head(i32 h) {
    if constexpr (!rules_differ) {
      if (rules_h < 0) rules = head_rules_of(args, seq, h);
    } else if (h != rules_h) {
      leave_head();
      rules = head_rules_of(args, seq, h);
    }
    rules_h = h;
  }
  // The sums of a head's queries -> memory.
  DEVICE void leave_head() {
    if (rules_h < 0) return;
    if constexpr (dbias_case == 2)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = warp_sum<4>(sums.columns[half]);
        if (lane % 4 == 0 && j + 8 * half < seq.rows_k)
          Global<acc>(args.workspace[SLOT_DBIAS])
              .store((seq.array_b * args.heads + rules_h) * args.len_k + seq.k_row0 + j + 8 * half, total);
      }
    if constexpr (wants_dalibi) {
      const float mine = warp_sum(sums.slope);
      if (lane == 0) smem.sums(0, group * 4 + warp) = mine;
      barrier_sync(1, consumers);   // all warps have written
      if (group == 0 && warp == 0 && lane == 0) {
        float total = 0;
        for (int w = 0; w < consumer_warps; ++w) total += smem.sums(0, w);
        Global<acc>(args.workspace[SLOT_DALIBI]).store(own.slot * args.heads + rules_h, total);
      }
      barrier_sync(1, consumers);   // the sums are read
    }
    sums = {};
  }

  DEVICE void release(int stage) {
    if (lane == 0) mbarrier_arrive(smem.empty(stage));
  }
  DEVICE void wait_dS(int n) { mbarrier_wait(smem.dS_full(n % 2), n / 2 & 1); }

  // ---- the walk

  // Step n + 1's S and dP run under step n's arithmetic.
  DEVICE void run_ahead(QueryWalk<Walk>& at) {
    ask_scores(0, at.i0);
    wgmma_wait<1>();
    soften(0, at);
    wgmma_wait<0>();
    differentiate(0, at);
    i64 place = place_of(args, seq, at.h, at.i0), place_before = place;
    i32 turn = 0, turn_before = 0;
    int n = 0;
#pragma unroll 1
    while (true) {
      const int stage = n % 2;
      put_dS(stage);
      ask_dV(stage);
      ask_dK(stage);
      if (n > 0) add_dQ(at, place_before, turn_before);   // of step n - 1
      wgmma_wait<0>();
      release(stage);
      place_before = place;
      if constexpr (deterministic) turn_before = turn_of(args, seq, at.i0, own.keys.j0);
      at.next();
      if (!at.exists()) break;
      ask_scores(n + 1, at.i0);
      wgmma_wait<1>();
      soften(n + 1, at);
      wait_dS(n);
      ask_dQ(stage);
      wgmma_wait<1>();   // dP
      differentiate(n + 1, at);
      wgmma_wait<0>();   // dQ
      place = place_of(args, seq, at.h, at.i0);
      ++n;
    }
    wait_dS(n);
    ask_dQ(n % 2);
    wgmma_wait<0>();
    add_dQ(at, place_before, turn_before);
  }

  // A step at a time, where dK and dV leave no registers for the next.
  DEVICE void run(QueryWalk<Walk>& at) {
#pragma unroll 1
    for (int n = 0; at.exists(); ++n, at.next()) {
      const int stage = n % 2;
      ask_scores(n, at.i0);
      wgmma_wait<1>();
      soften(n, at);
      ask_dV(stage);
      wgmma_wait<1>();   // dP
      differentiate(n, at);
      put_dS(stage);
      wait_dS(n);
      ask_dQ(stage);
      ask_dK(stage);
      wgmma_wait<1>();   // dV, dQ
      add_dQ(at, place_of(args, seq, at.h, at.i0), deterministic ? turn_of(args, seq, at.i0, own.keys.j0) : 0);
      wgmma_wait<0>();
      release(stage);
    }
  }

  // dK, dV -> memory.
  DEVICE void finish() {
    const i32 existing = seq.len_k - key0;
    const float scale = static_cast<float>(args.scale);
    const auto rows_of = [&](const Tensor& tensor, i64 dim, i32 end) {
      return tile_source(tensor, seq.array_b, seq.k_row0, own.keys.h, key0, end, 0, dim);
    };
    if (own.shares) {
      add_rows(dK, args.dK_sum.data, rows_of(args.dK_sum, args.head_dim, seq.len_k), 0, lane);
      add_rows(dV, args.dV_sum.data, rows_of(args.dV_sum, args.head_dim_v, seq.len_k), 0, lane);
    } else {
      store_rows<out_elem>(dK, scale, args.dK.data, rows_of(args.dK, args.head_dim, seq.rows_k), 0, existing,
                           lane);
      store_rows<out_elem>(dV, 1, args.dV.data, rows_of(args.dV, args.head_dim_v, seq.rows_k), 0, existing,
                           lane);
    }
  }
};

KERNEL(n_threads, 1) bwd_06_specialize(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int warpgroup = shfl(static_cast<int>(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  const Own own = own_of(args);
  if (!own.keys.exists) return;
  const Meeting meeting = meeting_of(args, own.keys.seq, own.keys.j0, asks_blocks);
  if (threadIdx.x == 0) {
    mbarrier_init(smem.KV_full(), 1);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(smem.Q_full(stage), 1);
      mbarrier_init(smem.dO_full(stage), 1);
      mbarrier_init(smem.empty(stage), consumer_warps);
      mbarrier_init(smem.dS_full(stage), consumer_warps);
    }
    mbarrier_init_fence();
  }
  block_sync();   // the barriers are there

  if (warpgroup == 0) {
    registers_shrink<24>();
    if (thread < 32) produce(args, smem, own, meeting, thread);
    return;
  }
  registers_grow<240>();
  Consumer mine(args, smem, own, meeting, warpgroup - 1, thread);
  QueryWalk<Walk> at(args, own.keys.seq, meeting.queries, own.keys.j0, own.h_begin, own.h_end, thread % 32);
  if (at.exists()) {
    mine.begin();
    if constexpr (runs_ahead) mine.run_ahead(at);
    else mine.run(at);
    mine.leave_head();
    if constexpr (deterministic) mine.turns.announce();
  }
  mine.finish();
}
