// key_rows.cuh - scores of a Hopper backward, where keys are the rows: S^T = K Q^T, dP^T = V dO^T.
//
// A warp holds 16 keys and TILE_Q queries.  Its lane holds keys lane / 4 and + 8, and of every 8 queries
// 2 (lane % 4) and + 1: S[4 c + 2 half + e] is key j + 8 half and query i0 + 8 c + 2 (lane % 4) + e, with j
// the lane's first key.  Packed, S is the A operand of dV += P^T dO and dK += dS^T Q as it lies.
#pragma once
#include "blocks.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "philox.cuh"
#include "query_tiles.cuh"
#include "score.cuh"
#include "swizzled.cuh"
#include "wgmma.cuh"

// dS needs more of P than its 16 bits.
constexpr bool keeps_weights = has_dropout || has_softcap || wants_dbias || wants_dalibi;
// Rows past a length may hold anything, NaN too.
constexpr bool has_foreign_rows = is_packed || has_query_lengths || has_key_lengths;

constexpr int n_scores = tile_q / 2;   // of a lane; packed they are the A operands of TILE_Q / 16 k16 steps
using Words = u32[tile_q / 16][4];

// What the scores of one (sequence, query head) share.
struct HeadRules {
  Scoring scoring;
  Masking masking;
  Dropout dropout;
  i64 dbias0;   // index of dbias (i = 0, j = 0)
};
DEVICE HeadRules head_rules_of(const Args& args, const Sequence& seq, i64 h) {
  HeadRules rules = {};
  rules.scoring = is_plain ? scoring_of(args, seq, h) : natural_scoring_of(args, seq, h);
  rules.masking = masking_of(args, seq, h);
  if constexpr (has_dropout) rules.dropout = dropout_of(args, seq.b, h);
  if constexpr (wants_dbias) rules.dbias0 = seq.b * args.dbias.batch + h * args.dbias.head;
  return rules;
}

// ---- which queries a tile of keys meets

// Visible by position to the tile at j0: queries; and for which tiles of queries that is every pair: i0 in
// [whole.begin, whole.end).
struct Meeting {
  Range queries;
  Range whole;
};
DEVICE Meeting meeting_of(const Args& args, const Sequence& seq, i32 j0, bool asks_elements) {
  const i32 j1 = smallest(j0 + tile_kv, seq.len_k);
  if (j0 >= j1) return {};
  Meeting meeting = {visible_queries(args, seq, j0, j1 - 1), {}};
  // With j the bounds of its queries move one way: the last key has the latest begin, the first the
  // earliest end.
  const Range first = visible_queries(args, seq, j0, j0);
  const Range last = visible_queries(args, seq, j0 + tile_kv - 1, j0 + tile_kv - 1);
  if (!asks_elements && !masks_every_tile)
    meeting.whole = {last.begin, smallest(first.end, last.end) - tile_q + 1};
  return meeting;
}
DEVICE bool is_whole(const Meeting& meeting, i32 i0) {
  return i0 >= meeting.whole.begin && i0 < meeting.whole.end;
}

// Query tiles that a block of keys visits, head after head.  With a block mask all lanes of a warp call.
template <class Walk> struct QueryWalk {
  const Args& args;
  const Sequence& seq;
  Range queries;
  i32 own0, own1;   // keys
  i32 h_end, lane;
  bool turned;      // from the last query to the first
  i32 h, i0;        // now
  Walk blocks;

  DEVICE QueryWalk(const Args& args, const Sequence& seq, const Range& queries, i32 own0, i32 h_begin,
                   i32 h_end, int lane, bool turned = false)
      : args(args), seq(seq), queries(queries), own0(own0), own1(smallest(own0 + tile_kv, seq.len_k)),
        h_end(queries.begin < queries.end ? h_end : 0), lane(lane), turned(may_turn && turned),
        h(h_begin), i0(start()),
        blocks(args.blocks_of_key, seq.b, h_begin, own0, own0 < own1 ? own1 : own0, queries.begin, lane) {
    settle();
  }
  DEVICE bool exists() const { return h < h_end; }
  DEVICE i32 start() const { return (turned ? queries.end - 1 : queries.begin) / tile_q * tile_q; }
  DEVICE void next() {
    i0 += turned ? -tile_q : tile_q;
    settle();
  }
  // From a place that may be past the head's end, or hold no kept block, to the next one to visit.
  // deterministic: a block visits tiles without kept blocks too, since its neighbours wait for its turn.
  DEVICE void settle() {
    while (exists()) {
      if constexpr (has_block_mask) {
        const i32 kept = blocks.next(i0);
        if (!deterministic) i0 = kept;
      }
      if (turned ? i0 + tile_q > queries.begin : i0 < queries.end) return;
      ++h;
      i0 = start();
      if (has_block_mask && exists())
        blocks = Walk(args.blocks_of_key, seq.b, h, own0, own1, queries.begin, lane);
    }
  }
};

// Of heads whose queries, dO and sums of dQ are to stay in the L2 cache together: 64 tiles are 16 MB at
// head_dim 256, whatever the length, 256 of head_dim 64 as much.  In turn with causal 128 are better at 96
// (H200, 2026-12-01: length 512 + 4 %, 2,048 + 1.6 %).
constexpr u32 section_tiles = head_dim_tile > 128 ? 64 : may_turn && head_dim_tile == 96 ? 128 : 256;

// The x-th key tile: tiles of a head side by side.  With causal the heaviest tiles of a section of heads come
// first, so that light ones fill the end; where blocks take turns the last keys do, and those whose turn is
// after theirs come when most of it is over.  may_turn: in the last sections the heaviest tiles come first
// all the same, and are turned.  slot: its number among all sequences' tiles, as pass_dalibi counts.
DEVICE KeyTile key_tile_along(const Args& args, i64 x, i64& slot, bool& turned) {
  KeyTile t = {};
  turned = false;
  const u32 block = static_cast<u32>(x);   // of a grid: 32 bits are enough, and divided sooner
  if constexpr (is_packed) {
    const u32 slots = static_cast<u32>(n_slots(args, args.len_k, tile_kv));
    slot = deterministic || in_turn ? slots - 1 - block % slots : block % slots;
    t.h = block / slots;
    const Slot owner = slot_owner(args, args.cu_seqlens_k, args.len_k, slot, tile_kv);
    t.seq = sequence_of(args, owner.b);
    t.j0 = owner.tile * tile_kv;
    t.exists = t.j0 < t.seq.rows_k;
  } else {
    const u32 n_tiles = static_cast<u32>(ceil_div(args.len_k, tile_kv));
    const u32 heads_k = static_cast<u32>(args.heads_k);
    u32 head = block / n_tiles, tile = block % n_tiles;
    if constexpr (causal || deterministic || in_turn) {
      const u32 all = heads_k * static_cast<u32>(args.batch);
      const u32 wide = smallest(largest(section_tiles / n_tiles, 1u), all);
      const u32 n_turned = may_turn && all >= 4 * wide ? 2 * wide : 0, n_others = all - n_turned;
      const bool is_turned = may_turn && block >= n_others * n_tiles;
      const u32 begin = is_turned ? n_others : block / (wide * n_tiles) * wide;
      const u32 here = is_turned ? n_turned : smallest(wide, n_others - begin);   // the last may be smaller
      const u32 place = block - begin * n_tiles;
      tile = place / here;
      head = begin + place - tile * here;
      if ((deterministic || in_turn) && !is_turned) tile = n_tiles - 1 - tile;
      turned = is_turned;
    }
    t.h = head % heads_k;
    t.seq = sequence_of(args, head / heads_k);
    t.j0 = static_cast<i32>(tile) * tile_kv;
    t.exists = true;
    slot = tile * args.batch + t.seq.b;
  }
  return t;
}

DEVICE KeyTile key_tile_along(const Args& args, i64 x, i64& slot) {
  bool turned;
  return key_tile_along(args, x, slot, turned);
}

// ---- P

// Which weights dropout keeps, a bit per score.
struct KeptWeights {
  u32 word[n_scores / 32 + 1];
  DEVICE bool operator()(int n) const { return word[n / 32] >> n % 32 & 1; }
};

// Philox gives 4 neighbouring keys of one query, which lie in lanes 4 apart.  Those four lanes need 4 calls
// for 8 queries: 2 queries, 2 groups of keys.  Each makes one and passes on the bits.
DEVICE KeptWeights kept_weights_of(const Dropout& dropout, i32 i0, i32 j, int lane) {
  KeptWeights kept = {};
  const int mine = lane / 4 % 4;   // of the four calls; also which of 4 keys this lane has
#pragma unroll
  for (int c = 0; c < n_scores / 4; ++c) {
    const i32 i = i0 + 8 * c + 2 * (lane % 4) + mine % 2;
    u32 bits = dropout_keeps_4(dropout, i, j - mine + 8 * (mine / 2)) << 4 * mine;
    bits |= shfl_xor(bits, 4);
    bits |= shfl_xor(bits, 8);
#pragma unroll
    for (int n = 0; n < 4; ++n)   // n = 2 half + e
      kept.word[(4 * c + n) / 32] |= (bits >> (4 * n + mine) & 1) << (4 * c + n) % 32;
  }
  return kept;
}

// Statistics (lse or delta) of the queries 8 c + 2 (lane % 4) and + 1, from shared memory.
template <int rows>
DEVICE Pack<float, 2> pair_of(Shared<float, rows, tile_q>& statistics, int row, int c, int lane) {
  return statistics.template as<Pack<float, 2>>(row, 8 * c + 2 * (lane % 4));
}
// A row of them that a lane has fetched ahead of its use.
struct HeldRow {
  Pack<float, 2> pair[n_scores / 4];
  template <class Rows> DEVICE void fetch(Rows& statistics, int row, int lane) {
#pragma unroll
    for (int c = 0; c < n_scores / 4; ++c) {
      pair[c] = pair_of(statistics, row, c, lane);
      pin(pair[c].item[0]);
      pin(pair[c].item[1]);
    }
  }
};
DEVICE Pack<float, 2> pair_of(HeldRow& held, int, int c, int) { return held.pair[c]; }

// The weight of a hidden pair: it adds nothing, and is told from one that is so small that it is 0.
constexpr float HIDDEN = -0.f;
DEVICE bool is_hidden(float P) { return __builtin_bit_cast(u32, P) == 0x80000000u; }

// S <- P = e^(score - lse), HIDDEN where hidden.  slopes, with softcap: d score / d (scale q.k).
// statistics(row, .): lse of the tile's queries, as query_tiles.cuh keeps it.  keys: what the lane's two
// keys may see. tests: false where every pair is known to be visible.
template <bool tests, class Rows, class Kept>
DEVICE void make_weights(const Args& args, const HeadRules& rules, float (&S)[n_scores],
                         float (&slopes)[n_scores], Rows& statistics, int row, i32 i0, i32 j,
                         const Range (&queries)[2], int lane, Kept is_kept) {
  const float scale_log2 = rules.scoring.scale_log2;
#pragma unroll
  for (int c = 0; c < n_scores / 4; ++c) {
    const int col = 8 * c + 2 * (lane % 4);
    const Pack<float, 2> lse = pair_of(statistics, row, c, lane);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int half = n / 2, e = n % 2;
      const i32 i = i0 + col + e, key = j + 8 * half;
      float& x = S[4 * c + n];
      bool seen = true;
      if constexpr (tests) {
        seen = i >= queries[half].begin && i < queries[half].end;
        if constexpr (has_mask)
          seen = seen && Global<u8>(args.mask.data)
                                 .load(rules.masking.mask0 + i * args.mask.row + key * args.mask.col) != 0;
        seen = seen && is_kept(i, key);
      }
      if constexpr (is_plain) {
        x = exp2_approx(x * scale_log2 - lse.item[e]);
        if (tests && !seen) x = HIDDEN;
      } else {
        float weight = HIDDEN;
        if (seen) {
          const float capped = capped_log2(rules.scoring, x);
          if constexpr (has_softcap) slopes[4 * c + n] = softcap_slope(rules.scoring, capped);
          const float score = biased_log2(args, rules.scoring, capped, i, key);
          if (score != NEG_INF) weight = exp_near(score - lse.item[e]);   // lse may be NaN
        } else if constexpr (has_softcap) {
          slopes[4 * c + n] = 0;
        }
        x = weight;
      }
    }
  }
}

DEVICE void pack_scores(Words& words, const float (&x)[n_scores]) {
#pragma unroll
  for (int n = 0; n < n_scores / 2; ++n) words[n / 4][n % 4] = pack<elem>(x[2 * n], x[2 * n + 1]);
}

// P <- HIDDEN for pairs that position hides.
DEVICE void hide_weights(Words& P, i32 i0, const Range (&queries)[2], int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 first = i0 + 2 * (lane % 4) - queries[half].begin;   // of the lane's queries, among those seen
    const u32 seen = static_cast<u32>(queries[half].end - queries[half].begin);
#pragma unroll
    for (int c = 0; c < n_scores / 4; ++c) {
      const int n = 2 * c + half;
      const u32 low = static_cast<u32>(first + 8 * c) < seen ? 0xffffu : 0;
      const u32 high = static_cast<u32>(first + 8 * c + 1) < seen ? 0xffff0000u : 0;
      P[n / 4][n % 4] = (P[n / 4][n % 4] & (low | high)) | (0x80008000u & ~(low | high));
    }
  }
}

// Each half is all ones where its highest bit is set, else 0.
DEVICE u32 spread_signs(u32 x) {
#ifdef CUFLASH_EMULATED
  return (x & 0x8000 ? 0xffffu : 0) | (x & 0x80000000u ? 0xffff0000u : 0);
#else
  u32 y;
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(y) : "r"(x));
  return y;
#endif
}

// Two numbers of dS, 0 where P is HIDDEN: there dP - delta may be NaN, of a row of V or O that the pair has
// nothing to do with.
DEVICE u32 hide_scores(u32 dS, u32 P) { return dS & ~spread_signs(P); }   // no other weight is negative
DEVICE void hide_scores(Words& dS, const Words& P) {
#pragma unroll
  for (int n = 0; n < n_scores / 2; ++n) dS[n / 4][n % 4] = hide_scores(dS[n / 4][n % 4], P[n / 4][n % 4]);
}

// words <- P as dV needs it: dropped and scaled, in 16 bits.
DEVICE void pack_weights(const Args& args, Words& words, const float (&P)[n_scores],
                         const KeptWeights& kept) {
  const float scale = static_cast<float>(args.dropout_scale);
#pragma unroll
  for (int n = 0; n < n_scores / 2; ++n) {
    float low = P[2 * n], high = P[2 * n + 1];
    if constexpr (has_dropout) {
      low = kept(2 * n) ? low * scale : 0.f;
      high = kept(2 * n + 1) ? high * scale : 0.f;
    }
    words[n / 4][n % 4] = pack<elem>(low, high);
  }
}

template <class T> DEVICE float low_of(u32 word) {
  if constexpr (is_same<T, bf16>) return __builtin_bit_cast(float, word << 16);
  else return f16_to_float({static_cast<u16>(word)});
}
template <class T> DEVICE float high_of(u32 word) {
  if constexpr (is_same<T, bf16>) return __builtin_bit_cast(float, word & 0xffff0000u);
  else return f16_to_float({static_cast<u16>(word >> 16)});
}

// ---- dS

// What a lane sums for gradients of options over the queries of one head: of its two keys.
struct OptionSums {
  float columns[2];   // dbias, summed over queries
  float slope;        // of alibi_slopes
};

// dP <- dS = P (dP - delta), times softcap's slope.  P comes from `weights`, or from `words` where 16 bits of
// it are enough.  d_score, before that slope, is what dbias and dalibi_slopes are made of.
template <bool tests, class Rows>
DEVICE void make_gradients(const Args& args, const HeadRules& rules, float (&dP)[n_scores],
                           const float (&weights)[n_scores], const Words& words,
                           const float (&slopes)[n_scores], const KeptWeights& kept, Rows& statistics,
                           int row, i32 i0, i32 j, const Range (&queries)[2], OptionSums& sums, int lane) {
#pragma unroll
  for (int c = 0; c < n_scores / 4; ++c) {
    const int col = 8 * c + 2 * (lane % 4);
    const Pack<float, 2> delta = pair_of(statistics, row, c, lane);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int half = n / 2, e = n % 2, at = 4 * c + n;
      const i32 i = i0 + col + e, key = j + 8 * half;
      float P;
      if constexpr (keeps_weights) P = weights[at];
      else P = e == 0 ? low_of<elem>(words[at / 8][at / 2 % 4]) : high_of<elem>(words[at / 8][at / 2 % 4]);
      float x = dP[at];
      if constexpr (has_dropout) x = kept(at) ? x * static_cast<float>(args.dropout_scale) : 0.f;
      float d_score = P * (x - delta.item[e]);
      bool seen = true;
      if constexpr (tests && dbias_case == 1) seen = i >= queries[half].begin && i < queries[half].end;
      // A bias of -inf hides too: what the pair meets does not matter.
      if constexpr (tests || !is_plain)
        if (is_hidden(P)) d_score = 0;   // 0 x NaN
      if constexpr (dbias_case == 1)
        if (seen)
          Global<bias_elem>(args.dbias.data)
              .store(rules.dbias0 + i * args.dbias.row + key * args.dbias.col, convert<bias_elem>(d_score));
      if constexpr (dbias_case == 2) sums.columns[half] += d_score;
      if constexpr (wants_dalibi) sums.slope -= d_score * alibi_distance(rules.scoring, i, key);
      dP[at] = has_softcap ? d_score * slopes[at] : d_score;
    }
  }
}
