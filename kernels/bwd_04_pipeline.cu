// bwd_04_pipeline.cu - attention backward on tensor cores, Q and dO double-buffered.   sm_80 and later
//
// Read after   bwd_03_mma.cu          Read next   bwd_05_wgmma.cu
// Changes      Q and dO have two stages: the next tile is asked for before this one is used.  Where a warp
//              makes whole rows of P^T and dS^T they stay in its registers; elsewhere half of the warps makes
//              dK and the other half dV (lib/key_sums.cuh).  Every option of the contract
//
// Algorithm    = tiled_backward.backward.   One block: TILE_KV keys of one (batch, key head).
//                ask for K, V and the first Q, dO
//                for each query head of the group, each query tile that sees these keys:
//                  wait; ask for the next Q, dO
//                  S^T = K Q^T,  dP^T = V dO^T                 registers, STEP_Q queries at a time
//                  P, dS                                       lib/mma_gradient.cuh, masks where needed
//                  dV += P^T dO,  dK += dS^T Q                 registers, over the whole walk
//                  dQ_tiles += dS K                            memory, atomically, whole lines
//                dK * scale, dV -> memory                      (pass_dq_tiles makes dQ of dQ_tiles)
//              Where that leaves too few blocks, n_shares blocks share the heads of a group and add to dK_sum
//              and dV_sum in memory.
//              deterministic: blocks add to a tile of dQ in turn, keys descending: with causal all can go at
//              once.  A block waits for one with a smaller number only, and those have started.
//              float32: products by TF32, one or three each (lib/tf32_shares.cuh); three want finite numbers,
//              so pass_odd looks, and where there are others __careful works in place of this kernel
// Grid         x: tile + n_tiles * share; tiles by sections of heads whose Q, dO, dQ_tiles fit the L2 cache
// Tile         TILE_Q x TILE_KV x HEAD_DIM; each product is cut among the warps so that they read least
// Shared       in 16 bits, chunks permuted: K, V [TILE_KV, .] | Q, dO [2][TILE_Q, .] | dS^T and, unless it
//              stays in registers, P^T [TILE_KV, TILE_Q]; lse, delta [2][TILE_Q] in float32
// Registers    per thread: dK, dV 2 TILE_KV HEAD_DIM / n_threads floats, S and dP STEP_Q TILE_KV / n_threads.
//              No spills without options, but 128 bytes on sm_120 at 256
// Built        bfloat16, causal, NVRTC 12.9: registers of a thread, KB of shared memory, by head_dim
//                        64         96         128        192        256
//              sm_80     251  81    240 129    254 161    200 112    237 144
//              sm_89     236  97    158  80    158  80    230  80    235  66
//              sm_90     249  81    252 109    255 113    252 217    254 225
//              sm_120    236  97    165  80    165  80    230  80    253  66
// Bytes        per block: K, V, dK, dV once; Q, dO, lse, delta and dQ_tiles (an addition) per query tile
// Barriers     2 a tile: "the tile is there, and everyone has used the one before", "P and dS are there";
//              1 of pairs of warps where they trade (lib/shares.cuh)
// Limiter      shared memory, busy 58 to 74 % of the time, and 8 warps an SM that wait for its operands: the
//              tensor cores are busy 43 to 55 %.   What was tried: ATTEMPTS.md
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/blocks.cuh"
#include "lib/key_sums.cuh"

// Queries at a time: S and dP get 64 registers together, beside dK and dV.
constexpr int step_q = 2 * tile_kv * tile_q / n_threads > 64 ? tile_q / 2 : tile_q;
// Of S^T or dP^T, by half of the warps: see Trade.  It pays where products are long and shares small.
using OfHalf = Share<tile_kv, step_q, n_warps / 2>;
constexpr bool trades = (OfHalf::n % 4 == 0 || (OfHalf::n == 2 && is_same<elem, float>)) &&
                        OfHalf::row_blocks * OfHalf::n <= 12 && head_dim_tile + head_dim_v_tile >= 256;
using OfScores = Share<tile_kv, step_q, n_warps,
                       trades ? 2 * OfHalf::across : warps_across(tile_kv, step_q, n_warps)>;   // S^T, dP^T
constexpr bool keeps_P = sizeof(elem) == 2 && OfScores::across == 1 && OfK::across == 1 && OfV::across == 1;

using Walk = BlockWalk<tile_kv, tile_q, block_kv, block_q>;
// In turn, a block visits tiles without kept blocks too: others wait until it has.
constexpr bool asks_blocks = has_block_mask && (deterministic || !Walk::Shape::tiles_are_whole);

struct Tiles {
  ElemTile<tile_kv, head_dim_tile> K;
  ElemTile<tile_kv, head_dim_v_tile> V;
  ElemTile<tile_q, head_dim_tile> Q[2];   // ring: stage = number of the tile % 2
  ElemTile<tile_q, head_dim_v_tile> dO[2][dO_parts];   // same stage as its Q
  ElemTile<tile_kv, tile_q> of_scores[keeps_P ? 1 : 2];   // dS^T, P^T
  TileNumbers<2> of_rows;
};
template <bool is_needed> struct Trades {
  Trade<OfHalf> trade;
};
template <> struct Trades<false> {
  template <class Part> DEVICE void trade(OfHalf&, Part&, Part&, int, int) {}
};
DEVICE int place_of_scores(int warp) {
  if constexpr (trades) return Trade<OfHalf>::place(warp);
  return warp;
}
struct Smem : Tiles, Trades<trades>, KeptBlocks<Walk, asks_blocks, 2> {};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "bwd_04_pipeline: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "bwd_04_pipeline: Args and launch.py disagree");

// Query tiles in the order in which a block visits them, head after head.
struct Cursor {
  i32 h, i0, h_end;
  DEVICE bool exists() const { return h < h_end; }
};

DEVICE void backward(const Args& args, Smem& smem) {
  const int thread = threadIdx.x;
  int lane = thread % 32, warp = thread / 32;
  const i64 n_tiles = n_slots(args, args.len_k, tile_kv) * args.heads_k;
  const i64 share = blockIdx.x / n_tiles, n_shares = gridDim.x / n_tiles;
  const KeyTile own = key_tile_in_section(args, blockIdx.x % n_tiles);
  if (!own.exists) return;
  const Sequence& seq = own.seq;
  const i32 j0 = own.j0, j1 = smallest(j0 + tile_kv, seq.len_k);
  const Range queries = j0 < j1 ? visible_queries(args, seq, j0, j1 - 1) : Range{0, 0};
  const float scale_log2 = static_cast<float>(args.scale * SCORE_UNIT);

  // A key that nobody sees has no heads to walk: dK = dV = 0.
  const i64 group = queries.begin < queries.end ? args.heads / args.heads_k : 0;
  const i32 i_first = queries.begin / tile_q * tile_q;
  Cursor at = {static_cast<i32>(own.h * group + share * group / n_shares), i_first,
               static_cast<i32>(own.h * group + (share + 1) * group / n_shares)};
  Walk walk(args.blocks_of_key, seq.b, at.h, j0, j0 < j1 ? j1 : j0, queries.begin, lane);
  // From a place that may be past the head's end, or hold no kept block, to the next one to visit.
  const auto settle = [&](Cursor place) {
    while (place.exists()) {
      if constexpr (has_block_mask) {
        const i32 kept = walk.next(place.i0);
        if (!deterministic) place.i0 = kept;
      }
      if (place.i0 < queries.end) break;
      ++place.h;
      place.i0 = i_first;
      if (has_block_mask && place.exists())
        walk = Walk(args.blocks_of_key, seq.b, place.h, j0, j1, queries.begin, lane);
    }
    return place;
  };
  const auto request = [&](const Cursor& place, int stage) {
    request_tile(smem.Q[stage], args.Q.data,
                 query_rows(args.Q, seq, place.h, place.i0, seq.len_q, args.head_dim), thread);
    load_dO<true>(smem.dO[stage], args.dO.data,
                  query_rows(args.dO, seq, place.h, place.i0, seq.len_q, args.head_dim_v), thread);
    if (thread < 32) smem.fill_blocks(walk, place.i0, lane, stage);
    smem.of_rows.load<true>(args, seq, place.h, place.i0, stage, thread);
    cp_async_commit();
  };
  ElemTile<tile_kv, tile_q>&dS_smem = smem.of_scores[0], &P_smem = smem.of_scores[keeps_P ? 0 : 1];

  const Global<float> dQ_tiles(args.workspace[SLOT_DQ]);
  const Global<i32> counts(args.workspace[SLOT_COUNTS]);
  KeySums<splits_warps && !keeps_P> of_keys;
  of_keys.clear();
  at = settle(at);
  if (at.exists()) {
    request_tile(smem.K, args.K.data, key_rows(args.K, seq, own.h, j0, j1, args.head_dim), thread);
    request_tile(smem.V, args.V.data, key_rows(args.V, seq, own.h, j0, j1, args.head_dim_v), thread);
    request(at, 0);
  }
  HeadRules rules = {};
  HeadSums<OfScores> sums;
  i32 h_of_rules = -1;
  int stage = 0;
  i64 my_turn = -1;   // of the tile whose additions are under way
#pragma unroll 1
  while (at.exists()) {
    cp_async_wait<0>();
    block_sync();   // the tile (and K, V) is there; everyone has used the one before: its stage is free
    if (deterministic && thread == 0 && my_turn >= 0) counts.add_release(my_turn, 1);
    const Cursor next = settle({at.h, at.i0 + tile_q, at.h_end});
    if (next.exists()) request(next, stage ^ 1);
    i32 seen = -1;
    if (deterministic && thread == 0)
      seen = early_count(counts, my_turn = 1 + query_tile_number(args, seq, at.h, at.i0));
    if (at.h != h_of_rules) {
      rules = head_rules_of(args, seq, at.h);
      sums.clear();
      h_of_rules = at.h;
    }

    const i32 i0 = at.i0;
    const bool full = !asks_blocks && is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv);
    const auto is_kept = [&](i32 i, i32 j) { return smem.keeps(walk, j, i0, i, stage); };
    const auto visit = [&](int r, i32 i, i32 j, acc d_score) {
      if constexpr (dbias_case == 1)
        Global<bias_elem>(args.dbias.data)
            .store(rules.dbias0 + i * args.dbias.row + j * args.dbias.col, convert<bias_elem>(d_score));
      if constexpr (dbias_case == 2) sums.of_key[r] += d_score;
      if constexpr (wants_dalibi) sums.slope -= d_score * alibi_distance(rules.scoring, i, j);
    };
#pragma unroll 1
    for (int first = 0; first < tile_q; first += step_q) {
      const int here = opaque(thread);   // else addresses of all five products live in registers
      lane = here % 32, warp = here / 32;
      const int place = place_of_scores(warp);
      OfScores S, dP;
      if constexpr (trades) {
        OfHalf mine;
        mine.clear();
        const int half_warp = warp % (n_warps / 2);
        if (warp < n_warps / 2)
          multiply_rows(mine, smem.K, smem.Q[stage], first, half_warp, lane);
        else
          for (auto& dO : smem.dO[stage]) multiply_rows(mine, smem.V, dO, first, half_warp, lane);
        smem.trade(mine, S, dP, warp, lane);
        if constexpr (is_plain) weigh(S, smem.of_rows, stage, scale_log2, first, place, lane);
      } else {
        S.clear();
        dP.clear();
        multiply_rows(S, smem.K, smem.Q[stage], first, warp, lane);
        if constexpr (is_plain) weigh(S, smem.of_rows, stage, scale_log2, first, warp, lane);
        for (auto& dO : smem.dO[stage]) multiply_rows(dP, smem.V, dO, first, warp, lane);
      }
      if constexpr (is_plain) {
        differentiate(S, dP, smem.of_rows, stage, first, place, lane);
        if (!full) hide(args, S, dP, seq, rules, i0, first, j0, place, lane, is_kept);
      } else if (full) {
        share_gradient<false>(args, smem.of_rows, stage, S, dP, seq, rules, i0, first, j0, place, lane,
                              is_kept, visit);
      } else {
        share_gradient<true>(args, smem.of_rows, stage, S, dP, seq, rules, i0, first, j0, place, lane,
                             is_kept, visit);
      }
      store_scores(dP, dS_smem, first, place, lane);
      if constexpr (keeps_P) {
        of_keys.add_own(S, dP, smem.Q[stage], smem.dO[stage], first, warp, lane);
      } else {
        store_scores(S, P_smem, first, place, lane);
      }
    }
    const i64 tile_number = query_tile_number(args, seq, at.h, i0);
    if (deterministic && thread == 0) {
      const i32 last = smallest(i0 + tile_q, seq.len_q) - 1, turn = turn_of(args, seq, i0, last, j0);
      if (seen != turn) counts.wait_for(my_turn, turn);
    }
    block_sync();   // P and dS are there; in turn, everyone before has added to this tile of dQ

    if constexpr (!keeps_P) of_keys.add(P_smem, dS_smem, smem.Q[stage], smem.dO[stage], warp, lane);
#pragma unroll 1
    for (int d0 = 0; d0 < head_dim_tile; d0 += step_d) {
      OfQ dQ;
      dQ.clear();
      multiply_columns(dQ, dS_smem, smem.K, d0, warp, lane);
      add_pieces(dQ, dQ_tiles, dQ_index(tile_number, d0), thread);
    }

    if constexpr (wants_dalibi || dbias_case == 2)
      if (next.h != at.h) {
        block_sync();   // everyone has used dS: it may hold the sums
        store_sums(args, own, at.h, sums, dS_smem, place_of_scores(warp), thread);
      }
    at = next;
    stage ^= 1;
  }
  if constexpr (deterministic) {
    block_sync();   // the last additions are done
    if (thread == 0 && my_turn >= 0) counts.add_release(my_turn, 1);
  }

  of_keys.store(args, own, n_shares > 1, warp, lane);
}

// float32 in three products: where a number is not finite the second kernel works, which takes more care.
KERNEL(n_threads, 1) bwd_04_pipeline(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  if (precision_code == 2 && Global<i32>(args.workspace[SLOT_COUNTS]).load(0) != 0) return;
  if constexpr (precision_code != 3) backward(args, smem);
}
KERNEL(n_threads, 1) bwd_04_pipeline__careful(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  if constexpr (precision_code == 3)
    if (Global<i32>(args.workspace[SLOT_COUNTS]).load(0) != 0) backward(args, smem);
}
