// lazy.cuh - the softmax of a fragment whose maximum moves only when it must.
//
// Any number may stand for the maximum: the division at the end makes the result exact.  It is there to keep
// 2^(score - m) in range, and weights up to 2^LAZY_LOG2 are in range of every 16-bit type.  So m stays until
// a score exceeds it by more, and O is seldom multiplied.
#pragma once
#include "fragments.cuh"
#include "warp.cuh"

constexpr acc LAZY_LOG2 = 8;

// S <- weights 2^(late_scale S - m); shrink: what sums made before must be multiplied by, 1 where m stays.
DEVICE void soften_lazily(Fragment<tile_kv>& S, RowState& state, acc (&shrink)[n_rows], acc late_scale) {
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    acc top = S.of_row(r, 0, 0);
#pragma unroll
    for (int c = 0; c < S.n; ++c) top = largest(top, largest(S.of_row(r, c, 0), S.of_row(r, c, 1)));
    const acc found = max_over_lanes<3>(top) * late_scale;
    const bool moves = found - state.m[r] > LAZY_LOG2;   // from -inf too; never to -inf
    const acc m = moves ? found : state.m[r], reference = finite_max(m);
    shrink[r] = moves ? rescaling(state.m[r], reference) : acc(1);
    state.m[r] = m;
    acc l = state.l[r] * shrink[r];
#pragma unroll
    for (int c = 0; c < S.n; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        acc& weight = S.of_row(r, c, e);
        weight = exp2_approx(weight * late_scale - reference);
        l += weight;
      }
    state.l[r] = l;
  }
}

// O <- O * shrink, where any row of the warp needs it.
template <int n_cols> DEVICE void rescale_moved(Fragment<n_cols>& O, const acc (&shrink)[n_rows]) {
  bool moved = false;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) moved = moved || shrink[r] != 1;
  if (any(moved)) rescale(O, shrink);
}

// S <- -inf outside keys [begin, end), per row; begin and end count from the lane's first column.
DEVICE void hide_outside(Fragment<tile_kv>& S, int row, i32 begin, i32 end) {
#pragma unroll
  for (int c = 0; c < S.n; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int col = 8 * c + e;
      if (col >= end || (has_window && col < begin)) S.of_row(row, c, e) = NEG_INF;
    }
}
