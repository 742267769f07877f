// fragments.cuh - what a warp holds of the products S and O, and what happens to it between the two.
//
// A warp owns row_blocks x 16 rows of the tile.  Its lane holds, of every 16 x 8 piece, rows lane / 4 and
// + 8, columns 2 (lane % 4) and + 1: the D of mma.cuh.  So the four lanes of a quad share a row, and a lane
// meets n_rows = 2 row_blocks rows; row r is in piece r / 2, upper or lower half r % 2.
#pragma once
#include "mask.cuh"
#include "matrices.cuh"
#include "philox.cuh"
#include "score.cuh"
#include "softmax.cuh"

constexpr int row_blocks = tile_q / (16 * n_warps);
constexpr int n_rows = 2 * row_blocks;
static_assert(row_blocks * 16 * n_warps == tile_q, "fragments: TILE_Q is n_warps times a multiple of 16");

template <int n_cols> struct Fragment {
  static constexpr int n = n_cols / 8;
  float at[row_blocks][n][4];

  DEVICE void clear() {
#pragma unroll
    for (int a = 0; a < row_blocks; ++a)
#pragma unroll
      for (int c = 0; c < n; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) at[a][c][e] = 0;
  }
  // Element e (0, 1) of piece c in row r.
  DEVICE float& of_row(int r, int c, int e) { return at[r / 2][c][r % 2 * 2 + e]; }
};

// Row r of this lane in the tile; the first of its two columns in piece c.
DEVICE int fragment_row(int warp, int lane, int r) {
  return (warp * row_blocks + r / 2) * 16 + r % 2 * 8 + lane / 4;
}
DEVICE int fragment_col(int lane, int c) { return c * 8 + lane % 4 * 2; }

// Where the rows lie that a block reads and writes.  i1, end: the first row of Q and of K, V not to be read.
DEVICE TileSource source_of_Q(const Args& args, const QueryTile& own, i32 i1) {
  return tile_source(args.Q, own.seq.array_b, own.seq.q_row0, own.h, own.i0, i1, 0, args.head_dim);
}
DEVICE TileSource source_of_K(const Args& args, const QueryTile& own, i32 j0, i32 end) {
  return tile_source(args.K, own.seq.array_b, own.seq.k_row0, own.h_k, j0, end, 0, args.head_dim);
}
DEVICE TileSource source_of_V(const Args& args, const QueryTile& own, i32 j0, i32 end) {
  return tile_source(args.V, own.seq.array_b, own.seq.k_row0, own.h_k, j0, end, 0, args.head_dim_v);
}

// ---- scores

// What every score of the block shares.
struct Rules {
  Scoring scoring;
  Masking masking;
  Dropout dropout;
  float late_scale;   // what is left to multiply when the softmax begins
};

// Nothing is added to a score: then scaling waits for the softmax, where it is part of a multiply-add.  (A
// scale of 0 or less would turn the maximum round, so it does not wait.)
constexpr bool scales_late = !has_softcap && !has_alibi && !has_bias;

DEVICE Rules rules_of(const Args& args, const Sequence& seq, i64 h) {
  Rules rules = {scoring_of(args, seq, h), masking_of(args, seq, h), {}, 1};
  if constexpr (has_dropout) rules.dropout = dropout_of(args, seq.b, h);
  if (scales_late && rules.scoring.scale_log2 > 0) rules.late_scale = rules.scoring.scale_log2;
  return rules;
}

// S <- scores in base 2 up to late_scale, -inf where hidden.  i0, j0: of the warp's first row, of column 0.
// tests: false where every element is known to be visible.
template <bool tests, class Kept>
DEVICE void modify_scores(const Args& args, const Sequence& seq, const Rules& rules, Fragment<tile_kv>& S,
                          i32 i0, i32 j0, int lane, Kept is_kept) {
  const bool is_late = scales_late && rules.scoring.scale_log2 > 0;
  if (!tests && is_late) return;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    const i32 i = i0 + fragment_row(0, lane, r);
    Range keys = {0, 0};
    if constexpr (tests) keys = visible_keys(args, seq, i);
#pragma unroll
    for (int c = 0; c < S.n; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const i32 j = j0 + fragment_col(lane, c) + e;
        float& score = S.of_row(r, c, e);
        if (tests && !(visible(args, rules.masking, keys, i, j) && is_kept(i, j))) score = NEG_INF;
        else if (!is_late) score = score_log2(args, rules.scoring, score, i, j);
      }
  }
}

// ---- softmax

// m: largest score so far, base 2; l: sum of the weights of this lane's columns.
struct RowState {
  float m[n_rows], l[n_rows];
};

DEVICE RowState no_keys_yet() {
  RowState state;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) state.m[r] = NEG_INF, state.l[r] = 0;
  return state;
}

// S <- weights 2^(late_scale S - m) under the new maximum; shrink: what sums made before must be multiplied
// by.
DEVICE void soften(Fragment<tile_kv>& S, RowState& state, float (&shrink)[n_rows], float late_scale) {
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    float top = S.of_row(r, 0, 0);
#pragma unroll
    for (int c = 0; c < S.n; ++c) top = largest(top, largest(S.of_row(r, c, 0), S.of_row(r, c, 1)));
    const float m = largest(state.m[r], max_over_lanes<3>(top) * late_scale), reference = finite_max(m);
    shrink[r] = rescaling(state.m[r], reference);
    state.m[r] = m;
    float l = state.l[r] * shrink[r];
#pragma unroll
    for (int c = 0; c < S.n; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& weight = S.of_row(r, c, e);
        weight = exp2_approx(weight * late_scale - reference);
        l += weight;
      }
    state.l[r] = l;
  }
}

template <int n_cols> DEVICE void rescale(Fragment<n_cols>& O, const float (&shrink)[n_rows]) {
#pragma unroll
  for (int r = 0; r < n_rows; ++r)
#pragma unroll
    for (int c = 0; c < O.n; ++c) O.of_row(r, c, 0) *= shrink[r], O.of_row(r, c, 1) *= shrink[r];
}

// Drop weights.  Philox gives 4 neighbouring keys at once and a lane holds 2 of them, in two rows: lanes 2n
// and 2n + 1 ask for one row each and tell the other.
DEVICE void drop(const Dropout& dropout, Fragment<tile_kv>& S, i32 i0, i32 j0, int lane) {
  const int odd = lane % 2;
#pragma unroll
  for (int a = 0; a < row_blocks; ++a)
#pragma unroll
    for (int c = 0; c < S.n; ++c) {
      const i32 i = i0 + fragment_row(0, lane, 2 * a) + 8 * odd;
      const u32 mine = dropout_keeps_4(dropout, i, j0 + c * 8 + lane % 4 / 2 * 4), others = shfl_xor(mine, 1);
      const u32 upper = (odd ? others : mine) >> 2 * odd, lower = (odd ? mine : others) >> 2 * odd;
      float (&weights)[4] = S.at[a][c];
      if (!(upper & 1)) weights[0] = 0;
      if (!(upper & 2)) weights[1] = 0;
      if (!(lower & 1)) weights[2] = 0;
      if (!(lower & 2)) weights[3] = 0;
    }
}

// ---- the end

// Where a block's results go.  lse of row i lies at index_of(lse, .., q_row0 + i) + lse0.
struct Results {
  void* O;
  TileSource O_rows;
  PerRow lse;
  i64 lse0;
  bool takes_sink;   // of the blocks that share the keys of a tile, the first
};

DEVICE Results results_of(const Args& args, const QueryTile& own) {
  const Sequence& seq = own.seq;
  const TileSource O_rows =
      tile_source(args.O, seq.array_b, seq.q_row0, own.h, own.i0, seq.rows_q, 0, args.head_dim_v);
  return {args.O.data, O_rows, args.lse, 0, true};
}
// A part over some of the keys, for pass_merge.  workspace[0]: acc [n_splits, batch, len_q, heads,
// head_dim_v], workspace[1]: acc [n_splits, batch, heads, len_q].
DEVICE Results part_of(const Args& args, const QueryTile& own, i64 split) {
  const i64 dim = args.head_dim_v, row = args.heads * dim;
  const Tensor O = {args.workspace[0], args.len_q * row, row, dim, dim % 4 == 0 ? 16 : 0};
  const PerRow lse = {args.workspace[1], args.heads * args.len_q, args.len_q, 1};
  const TileSource O_rows =
      tile_source(O, split * args.batch + own.seq.array_b, 0, own.h, own.i0, own.seq.rows_q, 0, dim);
  return {O.data, O_rows, lse, split * args.batch * lse.batch, split == 0};
}

// Keys of the split-th of n_splits blocks that share them, in steps of `step`: what they walk in.
DEVICE Range share_of(Range keys, i64 split, i32 step = tile_kv) {
  constexpr i64 n = n_splits > 0 ? n_splits : 1;  // 0: a row that never splits
  const i64 first = keys.begin / step, n_steps = ceil_div(keys.end, step) - first;
  const i64 begin = (first + n_steps * split / n) * step;
  const i64 end = (first + n_steps * (split + 1) / n) * step;
  return {static_cast<i32>(largest<i64>(keys.begin, begin)), static_cast<i32>(smallest<i64>(keys.end, end))};
}

// O <- O / l, lse stored.  i0: of the warp's first row.
template <int n_cols>
DEVICE void finish(const Args& args, const QueryTile& own, const Results& results, Fragment<n_cols>& O,
                   const RowState& state, i32 i0, int lane) {
  const Sequence& seq = own.seq;
  const acc sink_log2 = results.takes_sink ? sink_of(args, own.h) : NEG_INF;
  const acc dropout_scale = static_cast<acc>(args.dropout_scale);
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    const i32 i = i0 + fragment_row(0, lane, r);
    RowEnd end = finish_row(state.m[r], sum_over_lanes<3>(state.l[r]), sink_log2, dropout_scale);
    if (i >= seq.len_q) end = {0, NEG_INF, false};   // a row beyond its length does not exist: no sink either
#pragma unroll
    for (int c = 0; c < O.n; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) O.of_row(r, c, e) = end.of(O.of_row(r, c, e));
    if (i < seq.rows_q && lane % 4 == 0)
      Global<acc>(results.lse.data)
          .store(index_of(results.lse, seq.array_b, own.h, seq.q_row0 + i) + results.lse0, end.lse);
  }
}

// target = O, rows of the block's tile.  row0: the warp's first.
template <class To, int n_cols>
DEVICE void store_fragment(Fragment<n_cols>& O, void* data, const TileSource& target, int row0, int lane) {
  const Global<To> to(data);
  constexpr bool is_16_bit = sizeof(To) == 2;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    const int row = row0 + fragment_row(0, lane, r);
    const i64 index = target.base + row * target.stride;
    if constexpr (is_16_bit && n_cols % 32 == 0) {
      if (target.by_vectors) {   // 4 pieces: a lane gets the 8 columns of one and stores 16 bytes
#pragma unroll
        for (int c = 0; c < O.n; c += 4) {
          u32 chunk[4];
#pragma unroll
          for (int n = 0; n < 4; ++n)
            chunk[n] = pack<To>(O.of_row(r, c + n, 0), O.of_row(r, c + n, 1));
          transpose_quad(chunk, lane);
          const int d = (c + lane % 4) * 8;
          if (row < target.rows && d < target.cols)
            to.store_as(index + d, Pack<u32, 4>{{chunk[0], chunk[1], chunk[2], chunk[3]}});
        }
        continue;
      }
    }
#pragma unroll
    for (int c = 0; c < O.n; ++c) {
      const int d = fragment_col(lane, c);
      const To left = convert<To>(O.of_row(r, c, 0)), right = convert<To>(O.of_row(r, c, 1));
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
