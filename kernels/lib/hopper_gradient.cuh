// hopper_gradient.cuh - the backward on wgmma's accumulators of S^T = K Q^T and dP^T = V dO^T.   sm_90a
//
// Transposed, because then P^T and dS^T are in the registers that dV += P^T dO and dK += dS^T Q take as their
// first operand.  Rows are keys, columns are queries: a warp has 16 keys, its lane holds of every 16 x 8 piece
// c keys lane / 4 and + 8 (h = 0, 1) and queries 8 c + 2 (lane % 4) and + 1 (e = 0, 1):
// x[4 c + 2 h + e].   lse and delta are then numbers of a column, read from shared memory.
//
// What pass_tiles.cu prepares and finishes, in tiles of tile_q queries, so that one bulk copy reads 64 aligned
// numbers and no sum cares where a sequence ends:
//   lse_tiles     float [heads, slots, tile_q]   lse * log2(e); +inf where a query attends to nothing or does
//                                                not exist: P = 2^(score - lse_log2) is 0 there
//   delta_tiles   float [heads, slots, tile_q]   rowsum(dO * O) - dlse, 0 where a query does not exist
//   dQ_tiles      float [heads, slots, tile_q / 64, HEAD_DIM / 8, 128, 4]   sums of dS K: 8 columns at a time,
//                                                as the 128 threads of a warpgroup hold them
// A sequence's tile has the slot that positions.cuh gives it.
#pragma once
#include "mask.cuh"
#include "panels.cuh"
#include "philox.cuh"
#include "score.cuh"
#include "swizzled.cuh"
#include "warp.cuh"

// Slots of the workspace, after the two of every backward row.
constexpr int SLOT_LSE_TILES = 2, SLOT_DELTA_TILES = 3, SLOT_DQ_TILES = 4;

// ---- query tiles

DEVICE i64 query_slots(const Args& args) { return n_slots(args, args.len_q, tile_q); }

// The number of the tile at i0 (a multiple of tile_q) of query head h among all tiles.
DEVICE i64 query_tile_index(const Args& args, const Sequence& seq, i64 h, i32 i0) {
  const i64 slot = is_packed ? seq.q_row0 / tile_q + seq.b + i0 / tile_q
                             : seq.b * ceil_div(args.len_q, tile_q) + i0 / tile_q;
  return h * query_slots(args) + slot;
}

// Index of a thread's four numbers of column piece `piece`, 64-row group 0, in dQ_tiles.
DEVICE i64 dq_index(i64 tile, int piece, int thread) {
  return tile * (tile_q * head_dim_tile) + (piece * 128 + thread) * 4;
}

// dQ_tiles += dQ, 8 columns an instruction.  first: dq_index of its first column.
template <int n> DEVICE void add_dq(const Args& args, i64 first, const float (&dQ)[n]) {
  const Global<float> sums(args.workspace[SLOT_DQ_TILES]);
#pragma unroll
  for (int c = 0; c < n / 4; ++c)
    sums.add_as(first + c * 512, Vec16<float>{{dQ[4 * c], dQ[4 * c + 1], dQ[4 * c + 2], dQ[4 * c + 3]}});
}

// ---- scores

// What the elements of one (sequence, query head) share.
struct TileRules {
  Scoring scoring;
  Masking masking;
  Dropout dropout;
  i64 dbias0;   // index of dbias (i = 0, j = 0)
};

DEVICE TileRules tile_rules_of(const Args& args, const Sequence& seq, i64 h) {
  TileRules rules = {};
  rules.scoring = scoring_of(args, seq, h);
  rules.masking = masking_of(args, seq, h);
  if constexpr (has_dropout) rules.dropout = dropout_of(args, seq.b, h);
  if constexpr (wants_dbias) rules.dbias0 = seq.b * args.dbias.batch + h * args.dbias.head;
  return rules;
}

// The lane's two keys, j and j + 8, and the queries [begin, end) that may see them by position.
struct LaneKeys {
  i32 j;
  i32 begin[2], end[2];
};
// Otherwise it is len_q: queries from there on have lse = +inf, which hides them as well.
constexpr bool queries_have_end = has_window || (is_packed && (has_bias || has_mask));

DEVICE LaneKeys lane_keys(const Args& args, const Sequence& seq, i32 j) {
  LaneKeys keys = {j, {}, {}};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Range queries = visible_queries(args, seq, j + 8 * h, j + 8 * h);
    keys.begin[h] = queries.begin < queries.end ? queries.begin : 0x7fffffff;
    keys.end[h] = queries.end;
  }
  return keys;
}

// A score of -inf hides its pair, and it may stand anywhere: then gradients ask about weights of 0.
constexpr bool hides_by_value = has_bias;
constexpr bool modifies_scores = has_softcap || has_alibi || has_bias;

// One raw score -> its weight 2^(score - lse_log2), 0 where hidden.  slope: of softcap.
template <bool tests, class Kept>
DEVICE float weight_of(const Args& args, const TileRules& rules, const LaneKeys& keys, float raw, float lse_log2,
                       i32 i, int h, Kept is_kept, float& slope) {
  const i32 j = keys.j + 8 * h;
  bool sees = !tests || (i >= keys.begin[h] && (!queries_have_end || i < keys.end[h]));
  if constexpr (tests && has_mask)
    sees = sees && Global<u8>(args.mask.data)
                           .load(rules.masking.mask0 + i * args.mask.row + j * args.mask.col) != 0;
  if constexpr (tests && has_block_mask) sees = sees && is_kept(i, j);
  if constexpr (!modifies_scores) {
    const float weight = exp2_approx(raw * rules.scoring.scale_log2 - lse_log2);
    return sees ? weight : 0.f;
  }
  if (!sees) return 0;
  const float capped = capped_log2(rules.scoring, raw);
  if constexpr (has_softcap) slope = softcap_slope(rules.scoring, capped);
  const float score = biased_log2(args, rules.scoring, capped, i, j);
  return score == NEG_INF || lse_log2 == -NEG_INF ? 0.f : exp2_approx(score - lse_log2);
}

// S <- weights; slopes <- softcap's (where there is one).  lse_of(c): lse_log2 of the lane's two queries of
// piece c.  is_kept(i, j): the block mask.  tests: some pair of the tile may be hidden.
template <bool tests, int n, int n_slopes, class Lse, class Kept>
DEVICE void weigh(const Args& args, const TileRules& rules, const LaneKeys& keys, float (&S)[n],
                  float (&slopes)[n_slopes], i32 i0, int lane, Lse lse_of, Kept is_kept) {
  static_assert(n_slopes == n || !has_softcap, "weigh: a slope for every score");
  const i32 first = i0 + lane % 4 * 2;
#pragma unroll
  for (int c = 0; c < n / 4; ++c) {
    const Pack<float, 2> lse = lse_of(c);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 4 * c + 2 * h + e;
        S[at] = weight_of<tests>(args, rules, keys, S[at], lse.item[e], first + 8 * c + e, h, is_kept,
                                 slopes[has_softcap ? at : 0]);
      }
  }
}

// ---- dropout

// Which weights of 64 queries are kept.  Philox gives 4 neighbouring keys of a query at once, and 4 lanes hold
// those keys: each asks for one of the four (query, keys) of a piece and tells the others.
struct KeptWeights {
  u32 words[4];   // of (h, e): words[2 h + e], 4 bits a piece
  int key;
  DEVICE bool keeps(int c, int h, int e) const { return words[2 * h + e] >> (4 * c + key) & 1; }
};

DEVICE KeptWeights kept_weights(const Dropout& dropout, i32 i0, const LaneKeys& keys, int lane) {
  const int key = lane / 4 % 4, e = key % 2, h = key / 2;
  u32 mine = 0;
#pragma unroll
  for (int c = 0; c < 8; ++c)
    mine |= dropout_keeps_4(dropout, i0 + 8 * c + lane % 4 * 2 + e, keys.j - key + 8 * h) << (4 * c);
  KeptWeights kept;
  kept.key = key;
#pragma unroll
  for (int from = 0; from < 4; ++from) kept.words[from] = shfl(mine, (lane & ~12) | from << 2);
  return kept;
}

// ---- the end

// target = x * scale, rows row0 + lane / 4 and + 8 of a tile; rows from `existing` on are 0.  Four pieces go
// through the four lanes of a quad, so that a lane stores 16 bytes.
template <class To, int n>
DEVICE void store_rows(const float (&x)[n], float scale, void* data, const TileSource& target, i32 existing,
                       int row0, int lane) {
  const Global<To> to(data);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + lane / 4 + 8 * h;
    const i64 index = target.base + row * target.stride;
    const bool exists = row < existing;
    if constexpr (sizeof(To) == 2 && n % 16 == 0) {
      if (target.by_vectors) {
#pragma unroll
        for (int c = 0; c < n / 4; c += 4) {
          u32 chunk[4];
#pragma unroll
          for (int p = 0; p < 4; ++p) {
            const int at = 4 * (c + p) + 2 * h;
            chunk[p] = exists ? pack<To>(x[at] * scale, x[at + 1] * scale) : 0u;
          }
#pragma unroll
          for (int step = 1; step < 4; step *= 2)
#pragma unroll
            for (int p = 0; p < 4; ++p)
              if (!(p & step)) {   // lane t ends with piece t of the four
                const bool upper = lane & step;
                const u32 got = shfl_xor(upper ? chunk[p] : chunk[p + step], step);
                (upper ? chunk[p] : chunk[p + step]) = got;
              }
          const int d = (c + lane % 4) * 8;
          if (row < target.rows && d < target.cols)
            to.store_as(index + d, Pack<u32, 4>{{chunk[0], chunk[1], chunk[2], chunk[3]}});
        }
        continue;
      }
    }
#pragma unroll
    for (int c = 0; c < n / 4; ++c) {
      const int d = 8 * c + lane % 4 * 2, at = 4 * c + 2 * h;
      const To left = convert<To>(exists ? x[at] * scale : 0.f);
      const To right = convert<To>(exists ? x[at + 1] * scale : 0.f);
      if (row >= target.rows) continue;
      if (target.by_vectors && d < target.cols) {
        to.store_as(index + d, Pack<To, 2>{{left, right}});
      } else {
        if (d < target.cols) to.store(index + d, left);
        if (d + 1 < target.cols) to.store(index + d + 1, right);
      }
    }
  }
}
