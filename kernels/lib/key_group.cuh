// key_group.cuh - one warpgroup of a Hopper backward: 64 keys of the block's tile, and what it does with
// them.
//
// It holds dK and dV of its keys, and per step S^T and dP^T (lib/key_rows.cuh), P and dS in 16 bits and its
// half of dQ.  Functions named ask_... issue a product and commit it; a wgmma_wait later it is there.  The
// kernel orders them and says what waits for what.
//
// Smem has K, V, Q[], dO[][], dS[] (PanelTile), rows (stage s: lse_log2 in row 2 s, delta in row 2 s + 1),
// sums, and KeptBlocks.
#pragma once
#include "accumulators.cuh"
#include "barrier.cuh"
#include "key_pieces.cuh"
#include "key_rows.cuh"
#include "maps.cuh"
#include "mbarrier.cuh"
#include "panels.cuh"
#include "query_tiles.cuh"

constexpr int SLOT_DALIBI = 0;   // workspace: acc [slots of key tiles, heads], one part of dalibi_slopes each
constexpr int SLOT_DBIAS = 1;    // workspace: acc [batch, heads, len_k], dbias summed over the queries

constexpr int group_threads = 256, group_warps = group_threads / 32;   // of both groups of a block
constexpr bool halves_rows = tile_q == 128;   // of dQ: a group has 64 queries, or half of the columns
constexpr int dQ_cols = halves_rows ? head_dim_tile : head_dim_tile / 2;
constexpr int K_panel = dQ_cols % 64 == 0 ? 64 : dQ_cols % 32 == 0 ? 32 : 16;   // a half is whole panels
constexpr bool rules_differ = !is_plain || has_mask || has_dropout || wants_dbias;   // from head to head
using Walk = BlockWalk<tile_kv, tile_q, block_kv, block_q>;   // owns keys, walks queries
constexpr bool asks_blocks = has_block_mask && (deterministic || !Walk::Shape::tiles_are_whole);
constexpr bool may_hide = causal || has_window || has_foreign_rows;   // pairs that exist, by position
// Options are worked out with no product on its way, and apart from the registers of one: what threads do
// each for itself does not go with wgmma.
constexpr bool overlaps = !rules_differ && !asks_blocks && !converts_dO;
static_assert(piece_threads == group_threads, "key_group: all consumers join pieces");
static_assert(tile_kv == 128 && (tile_q == 64 || tile_q == 128), "key_group: two groups of 64 keys");

using TileK = PanelTile<tile_kv, head_dim_tile, K_panel>;
using TileV = PanelTile<tile_kv, head_dim_v_tile>;
using TileQ = PanelTile<tile_q, head_dim_tile>;
using TiledO = PanelTile<tile_q, head_dim_v_tile>;
using TileS = PanelTile<tile_kv, tile_q>;   // dS: [keys][queries]

// What a block owns for a time: a tile of keys, and the query heads whose queries it walks.  Small enough to
// be passed around.
struct alignas(16) Own {
  i32 b;      // sequence; packed: args.batch is the tail
  i32 h_k;    // key head
  i32 j0;     // first key; NO_WORK: there is no tile of this number
  i32 slot;   // number of the key tile among all sequences'
  i32 h_begin, h_end;
  bool shares;   // adds to dK_sum, dV_sum
  bool exists;   // false: an empty slot of a packed call
  bool turned;   // walks from the last query to the first
  u8 piece;      // of the queries, from 1 on, and slot is the number of a tile that is cut; 0: all of them
};
constexpr i32 NO_WORK = -1;
DEVICE Own same_in_all_lanes(const Own& x) {   // so the compiler sees that it is
  return {shfl(x.b, 0), shfl(x.h_k, 0), shfl(x.j0, 0), shfl(x.slot, 0),
          shfl(x.h_begin, 0), shfl(x.h_end, 0), shfl(int(x.shares), 0) != 0, shfl(int(x.exists), 0) != 0,
          may_turn && shfl(int(x.turned), 0) != 0, static_cast<u8>(cuts ? shfl(int(x.piece), 0) : 0)};
}

constexpr u32 enough_blocks = 132;   // = ENOUGH_BLOCKS of rows_hopper_backward.py
// The x-th tile.  Where tiles are few, parts of a key head's query heads are counted apart: = _splits there.
DEVICE Own own_of(const Args& args, u32 x) {
  Own own = {};
  const u32 heads_k = static_cast<u32>(args.heads_k), group = static_cast<u32>(args.heads) / heads_k;
  const u32 n_blocks = static_cast<u32>(n_slots(args, args.len_k, tile_kv)) * heads_k;
  const u32 parts = deterministic ? 1 : largest(1u, smallest(enough_blocks / n_blocks, group));
  own.j0 = NO_WORK;
  if constexpr (cuts) {   // then there is one part
    const u32 whole = n_blocks - cut_tiles(args, n_blocks);
    if (x >= whole) {
      own.slot = static_cast<i32>((x - whole) / n_pieces);
      own.piece = static_cast<u8>((x - whole) % n_pieces + 1);
      x = whole + own.slot;
    }
  }
  const u32 part = x / n_blocks;
  if (part >= parts) return own;
  i64 slot = 0;
  const KeyTile keys = key_tile_along(args, x - part * n_blocks, slot, own.turned);
  own.b = static_cast<i32>(keys.seq.b);
  own.h_k = static_cast<i32>(keys.h);
  own.j0 = keys.j0;
  if (own.piece == 0) own.slot = static_cast<i32>(slot);
  own.h_begin = own.h_k * group + part * group / parts;
  own.h_end = own.h_k * group + (part + 1) * group / parts;
  own.shares = parts > 1;
  own.exists = keys.exists;
  return own;
}

// The queries that a block walks, and which tiles of them it sees whole.
DEVICE Meeting meeting_of(const Args& args, const Sequence& seq, const Own& own) {
  Meeting meeting = meeting_of(args, seq, own.j0, asks_blocks);
  if (cuts && own.piece > 0) meeting.queries = queries_of_piece(meeting.queries, own.piece - 1);
  return meeting;
}

constexpr u32 dO_bytes = dO_parts * TiledO::n_bytes;

// dO of the tile of queries where the walk stands, by one thread; dO_bytes are expected already.
template <class Smem>
DEVICE void load_dO(const MappedArgs& args, Smem& smem, int stage, u32 mbarrier, const QueryWalk<Walk>& at) {
  const Sequence& seq = at.seq;
  TiledO& dO = smem.dO[stage][0];
  if constexpr (converts_dO) {
    const Global<elem> from(args.workspace[SLOT_DO]);
    const i64 place = place_of(args, seq, at.h, at.i0);
#pragma unroll
    for (int part = 0; part < dO_parts; ++part) {
      const i64 first = (part * all_places(args) + place) * (tile_q * head_dim_v_tile);
      bulk_load(smem.dO[stage][part].address(), from.address(first, dO.n_bytes), dO.n_bytes, mbarrier);
    }
  } else {
    dO.load(args.maps.dO, mbarrier, static_cast<int>(seq.q_row0) + at.i0, at.h,
            static_cast<int>(seq.array_b));
  }
}

// held_steps: k16 steps of V^T that stay in registers: shared memory is the limit.
template <class Smem, int held_steps> struct KeyGroup {
  const MappedArgs& args;
  Smem& smem;
  const Own& own;
  const Sequence& seq;
  const Meeting meeting;
  const int group, warp, lane;
  const i32 key0, j;    // first key of the warp, of this lane
  Range queries[2];     // that this lane's two keys may see
  HeadRules rules = {};   // of head rules_h; of all, where they do not differ
  i32 rules_h = -1;
  OptionSums sums = {};
  float dK[head_dim_tile / 2], dV[head_dim_v_tile / 2];
  float S[n_scores], dP[n_scores], dQ[dQ_cols / 2];
  float weights[n_scores], slopes[n_scores];   // where options ask for them
  u32 P[tile_q / 16][4], dS[tile_q / 16][4], V[held_steps + 1][4];
  KeptWeights kept = {};

  DEVICE KeyGroup(const MappedArgs& args, Smem& smem, const Own& own, const Sequence& seq,
                  const Meeting& meeting, int group, int thread)
      : args(args), smem(smem), own(own), seq(seq), meeting(meeting), group(group), warp(thread / 32),
        lane(thread % 32), key0(own.j0 + group * 64 + warp * 16), j(key0 + lane / 4) {
    if constexpr (!rules_differ) rules = head_rules_of(args, seq, own.h_begin);
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
  template <int n> DEVICE static void copy(float (&to)[n], const float (&from)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) to[i] = from[i];
  }

  // ---- the products: asked for here, there after a wgmma_wait

  // Descriptors of K and V are the same in every step, and the compiler would keep each in a register.  One
  // is enough: those of a tile's k16 steps are numbers apart.
  struct Steps {
    u64 high;
    u32 low;
    DEVICE explicit Steps(u64 first) : high(first & 0xffffffff00000000ull), low(static_cast<u32>(first)) {
      pin(low);
    }
    DEVICE u64 operator()(u32 step) const { return high | (low + step); }   // step in 16 bytes
  };
  template <class Tile> DEVICE static constexpr u32 step_K(int k) {   // of descriptor_K
    constexpr int steps = Tile::panel_cols / 16;   // in a panel
    return (k / steps * Tile::panel_bytes + k % steps * 32) / 16;
  }
  DEVICE void ask_S(int stage) {
    if constexpr (!overlaps) clear(S);
    const Steps K(smem.K.descriptor_K(0, group * 64));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < head_dim_tile / 16; ++k)
      wgmma<elem>(S, K(step_K<TileK>(k)), smem.Q[stage].descriptor_K(k), k > 0);
    wgmma_commit();
  }
  DEVICE void ask_dP(int stage) {
    if constexpr (!overlaps) clear(dP);
    const Steps V_steps(smem.V.descriptor_K(0, group * 64));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < head_dim_v_tile / 16; ++k) {
      const u64 step = smem.dO[stage][0].descriptor_K(k);
      if (k < held_steps) wgmma<elem>(dP, V[k < held_steps ? k : 0], step, k > 0);
      else wgmma<elem>(dP, V_steps(step_K<TileV>(k)), step, k > 0);
#pragma unroll
      for (int part = 1; part < dO_parts; ++part)
        wgmma<elem>(dP, smem.V.descriptor_K(k, group * 64), smem.dO[stage][part].descriptor_K(k), true);
    }
    wgmma_commit();
  }
  DEVICE void ask_dV(int stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k) wgmma<elem, 1>(dV, P[k], smem.dO[stage][0].descriptor_MN(k), true);
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
    const Steps K(smem.K.descriptor(first_K, TileK::panel_bytes));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k)
      wgmma<elem, 1, 1>(dQ, smem.dS[stage].descriptor(first + k * TileS::line_bytes, TileS::panel_bytes),
                        K(k * TileK::line_bytes), k > 0);
    wgmma_commit();
  }

  // ---- what happens between them

  // K and V have arrived.
  DEVICE void begin() {
    if constexpr (has_foreign_rows)
      if (own.j0 + tile_kv > seq.len_k) {   // dS is 0 there, and 0 x NaN is NaN
        // dQ alone must find zeros: they are fenced and waited for with the first dS.
        smem.K.clear_rows(seq.len_k - own.j0, group * 128 + warp * 32 + lane, group_threads);
      }
#pragma unroll
    for (int k = 0; k < held_steps; ++k)
      ldmatrix_x4(V[k], smem.V.address(group * 64 + warp * 16 + lane % 16, 2 * k + lane / 16));
  }

  DEVICE bool has_foreign_queries(i32 i0) {
    return (is_packed || has_query_lengths) && i0 + tile_q > seq.len_q;
  }
  // Q and dO of the tile at i0 have arrived: P and dS are 0 in rows past the end, and 0 x NaN is NaN.
  DEVICE void clear_foreign_queries(int stage, i32 i0) {
    const int thread = group * 128 + warp * 32 + lane;
    smem.Q[stage].clear_rows(seq.len_q - i0, thread, group_threads);
    smem.dO[stage][0].clear_rows(seq.len_q - i0, thread, group_threads);
    fence_async_shared();
    barrier_sync(1, group_threads);   // the rows are zeros for both groups
  }

  // S -> P, in 16 bits too.  lse: of the tile's queries, in shared memory or held.
  DEVICE void soften(int stage, const QueryWalk<Walk>& at) { soften(stage, at, smem.rows, 2 * stage); }
  template <class Rows> DEVICE void soften(int stage, const QueryWalk<Walk>& at, Rows& lse, int row) {
    enter_head(at.h);
    const auto is_kept = [&](i32 i, i32 key) { return smem.keeps(at.blocks, key, at.i0, i, stage); };
    if constexpr (overlaps) {   // position alone hides: what is packed
      make_weights<false>(args, rules, S, slopes, lse, row, at.i0, j, queries, lane, is_kept);
      pack_scores(P, S);
      if (!is_whole(meeting, at.i0)) hide_weights(P, at.i0, queries, lane);
      return;
    }
    float(&x)[n_scores] = weights;
    copy(weights, S);
    if (is_whole(meeting, at.i0))
      make_weights<false>(args, rules, x, slopes, lse, row, at.i0, j, queries, lane, is_kept);
    else make_weights<true>(args, rules, x, slopes, lse, row, at.i0, j, queries, lane, is_kept);
    if constexpr (has_dropout) kept = kept_weights_of(rules.dropout, at.i0, j, lane);
    pack_weights(args, P, x, kept);
  }

  // dP -> dS.
  DEVICE void differentiate(int stage, const QueryWalk<Walk>& at) {
    differentiate(at, smem.rows, 2 * stage + 1);
  }
  template <class Rows> DEVICE void differentiate(const QueryWalk<Walk>& at, Rows& delta, int row) {
    const i32 i0 = at.i0;
    if constexpr (overlaps) {
      make_gradients<false>(args, rules, dP, S, P, slopes, kept, delta, row, i0, j, queries, sums, lane);
      pack_scores(dS, dP);
    } else {
      float x[n_scores];
      copy(x, dP);
      if (is_whole(meeting, i0))
        make_gradients<false>(args, rules, x, weights, P, slopes, kept, delta, row, i0, j, queries, sums,
                              lane);
      else
        make_gradients<true>(args, rules, x, weights, P, slopes, kept, delta, row, i0, j, queries, sums,
                             lane);
      pack_scores(dS, x);
    }
  }

  // After differentiate, best with no product on its way: dS of pairs that are hidden.
  DEVICE void hide(const QueryWalk<Walk>& at) {
    if constexpr (overlaps && may_hide)
      if (!is_whole(meeting, at.i0)) hide_scores(dS, P);
  }

  // dS -> shared memory, where the other group's dQ needs it too: the caller announces it.
  DEVICE void put_dS(int stage) {
    const u32 first = smem.dS[stage].address(group * 64 + warp * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k)   // chunk 2 k + lane / 16: an xor inside the swizzle
      stmatrix_x4((first ^ k % 4 * 32) + k / 4 * TileS::panel_bytes, dS[k]);
    fence_async_shared();   // wgmma reads it
  }

  // dQ of the tile at `place` -> its sum.  stores: there is none yet.
  DEVICE void add_dQ(i64 place, bool stores = false) {
    const Global<float> to(args.workspace[SLOT_DQ]);
    const int r = halves_rows ? group * 4 + warp : warp, c0 = halves_rows ? 0 : group * dQ_cols / 8;
    const i64 first = dQ_index(place, r, c0, lane);
#pragma unroll
    for (int c = 0; c < dQ_cols / 8; ++c) {
      const Vec16<float> four = {{dQ[4 * c], dQ[4 * c + 1], dQ[4 * c + 2], dQ[4 * c + 3]}};
      if constexpr (in_turn) to.store_or_add_as(stores, first + c * 128, four);
      else to.add_as(first + c * 128, four);
    }
  }

  // The last block that meets a tile: the sum and dQ -> dq.  is_sum: there is a sum.
  DEVICE void finish_dQ(i64 place, bool is_sum, i32 h, i32 i0) {
    const Global<float> sums_at(args.workspace[SLOT_DQ]);
    const int r = halves_rows ? group * 4 + warp : warp, c0 = halves_rows ? 0 : group * dQ_cols / 8;
    const i64 first = dQ_index(place, r, c0, lane);
    if (is_sum)
#pragma unroll
      for (int c = 0; c < dQ_cols / 8; ++c) {
        const Vec16<float> four = sums_at.load_as<Vec16<float>>(first + c * 128);
#pragma unroll
        for (int e = 0; e < 4; ++e) dQ[4 * c + e] += four.item[e];
      }
    store_rows<out_elem>(dQ, static_cast<float>(args.scale), args.dQ.data,
                         tile_source(args.dQ, seq.array_b, seq.q_row0, h, i0, seq.rows_q, c0 * 8,
                                     args.head_dim),
                         16 * r, seq.len_q - i0, lane);
  }

  // ---- gradients of options

  DEVICE void enter_head(i32 h) {
    if (!rules_differ || h == rules_h) return;
    leave_head();
    rules = head_rules_of(args, seq, h);
    rules_h = h;
  }
  // The sums of a head's queries -> memory.
  DEVICE void leave_head() {
    if (!rules_differ || rules_h < 0) return;
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
      barrier_sync(1, group_threads);   // all warps have written
      if (group == 0 && warp == 0 && lane == 0) {
        float total = 0;
        for (int w = 0; w < group_warps; ++w) total += smem.sums(0, w);
        Global<acc>(args.workspace[SLOT_DALIBI]).store(own.slot * args.heads + rules_h, total);
      }
      barrier_sync(1, group_threads);   // the sums are read
    }
    sums = {};
  }

  // dK, dV -> memory.  own, seq: as at the start; known anew, they need no registers in between.
  DEVICE void finish(const Own& own, const Sequence& seq) {
    if constexpr (cuts) {
      const int thread = group * 128 + warp * 32 + lane;
      if (own.piece > 0 && !join_pieces(args, own.slot, own.piece - 1, dK, dV, thread)) return;
    }
    const i32 key0 = own.j0 + group * 64 + warp * 16, existing = seq.len_k - key0;
    const float scale = static_cast<float>(args.scale);
    const auto rows_of = [&](const Tensor& tensor, i64 dim, i32 end) {
      return tile_source(tensor, seq.array_b, seq.k_row0, own.h_k, key0, end, 0, dim);
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
