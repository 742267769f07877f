// votes.cuh - the softmax of a warp whose maximum moves only when it must, and all rows at once.
//
// As in lazy.cuh m stays until a score exceeds it by more than LAZY_LOG2.  Here the warp votes: while
// nobody's score does, no lane needs the maximum of its row, so there is nothing to exchange or to rescale.
//
// And once every row has a maximum of some tile, nobody needs to look for a larger one: weights may be as
// large as their type can hold.  What no type holds ends as an infinity or NaN in the results: then the block
// starts again, and looks.
#pragma once
#include "blocks.cuh"
#include "heads_together.cuh"
#include "parts.cuh"
#include "warp.cuh"

constexpr float LAZY_LOG2 = 8;

constexpr bool asks_blocks =
    has_block_mask && !BlockWalk<tile_q, span, block_q, block_kv>::Shape::tiles_are_whole;
// Scores are scaled products, and position alone hides: a tile that all rows see needs nothing but weights.
constexpr bool is_plain = scales_late && !has_mask && !asks_blocks && !has_dropout;
constexpr bool looks_once = is_plain && n_stages == 2;   // for a maximum: with one stage it costs nothing

// modify_scores (fragments.cuh), where position alone hides and nothing is added, in fewer registers: numbers
// stay where they are, and a scale that cannot wait is a step of its own.
template <bool tests>
DEVICE void hide_scores(const Args& args, const Sequence& seq, const Rules& rules, Fragment<tile_kv>& S,
                        i32 i0, i32 j0, int lane) {
  if (!(rules.scoring.scale_log2 > 0)) {
#pragma unroll
    for (int r = 0; r < n_rows; ++r)
#pragma unroll
      for (int c = 0; c < S.n; ++c) {
        S.of_row(r, c, 0) *= rules.scoring.scale_log2;
        S.of_row(r, c, 1) *= rules.scoring.scale_log2;
      }
  }
  if constexpr (tests) {
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
      const Range keys = visible_keys(args, seq, query_of(i0 + fragment_row(0, lane, r)));
      const i32 j = j0 + fragment_col(lane, 0), begin = keys.begin - j, end = keys.end - j;
#pragma unroll
      for (int c = 0; c < S.n; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * c + e >= end || (has_window && 8 * c + e < begin)) S.of_row(r, c, e) = NEG_INF;
    }
  }
}

// How far below 1 the weight of the first maximum is: weights may grow by 2^(15 + HEADROOM) in float16.  Not
// where each tile is looked at: it would cost lse of scores near 0 their last digits.
constexpr float HEADROOM = is_same<elem, f16> && looks_once ? 4 : 0;

// The same sums under the maximum itself, by exact steps: m + log2(l) would cancel, and log2 is approximate.
template <int n_cols> DEVICE void take_headroom_back(Fragment<n_cols>& O, RowState& state) {
  if constexpr (HEADROOM == 0) return;
  constexpr float factor = 1 << static_cast<int>(HEADROOM);
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    state.m[r] -= HEADROOM;
    state.l[r] *= factor;
#pragma unroll
    for (int c = 0; c < O.n; ++c) O.of_row(r, c, 0) *= factor, O.of_row(r, c, 1) *= factor;
  }
}

// Where a score exceeds m by more than LAZY_LOG2 m moves, and l and O are rescaled.
template <int n_cols>
DEVICE void move_maximum(Fragment<tile_kv>& S, RowState& state, Fragment<n_cols>& O, float late_scale) {
  float top[n_rows];   // of this lane's columns
  bool moves = false;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    top[r] = S.of_row(r, 0, 0);
#pragma unroll
    for (int c = 0; c < S.n; ++c) top[r] = largest(top[r], largest(S.of_row(r, c, 0), S.of_row(r, c, 1)));
    top[r] *= late_scale;
    moves |= top[r] > state.m[r] + (LAZY_LOG2 - HEADROOM);   // from -inf too; never to -inf
  }
  if (any(moves)) {
    float shrink[n_rows];
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
      const float m = largest(state.m[r], max_over_lanes<3>(top[r]) + HEADROOM);
      shrink[r] = rescaling(state.m[r], finite_max(m));
      state.m[r] = m;
      state.l[r] *= shrink[r];
    }
    rescale(O, shrink);
  }
}

// S <- weights 2^(late_scale S - m), l <- their sums too.  fused: in one instruction a score, which takes no
// maximum that is_beyond.
template <bool fused> DEVICE void weigh(Fragment<tile_kv>& S, RowState& state, float late_scale) {
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    const float reference = finite_max(state.m[r]);
    float l = state.l[r];
#pragma unroll
    for (int c = 0; c < S.n; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& weight = S.of_row(r, c, e);
        if constexpr (fused) weight = exp2_approx(fmaf(weight, late_scale, -reference));
        else weight = exp2_approx(rounded_product(weight, late_scale) - reference);
        l += weight;
      }
    state.l[r] = l;
  }
}

// Fused, the weight of the maximum itself is off by half an ulp of the maximum in its exponent: an eighth to
// here, but thousands where scores are beyond 2^37, and then nothing is left of a row.
DEVICE bool is_beyond(const RowState& state) {
  bool beyond = false;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) beyond |= magnitude(finite_max(state.m[r])) > 1 << 21;
  return beyond;
}

DEVICE bool is_set(const RowState& state) {
  bool set = true;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) set = set && state.m[r] != NEG_INF;
  return all(set);
}

// Infinities and NaN among a lane's results.  A sum that overflows says so too: it asks for care in vain.
template <int n_cols> DEVICE bool is_odd(Fragment<n_cols>& O, const RowState& state) {
  bool odd = false;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    float sum = state.l[r];
#pragma unroll
    for (int c = 0; c < O.n; ++c) sum += O.of_row(r, c, 0) + O.of_row(r, c, 1);
    odd |= !(sum - sum == 0);
  }
  return odd;
}
