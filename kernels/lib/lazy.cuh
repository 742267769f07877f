// lazy.cuh - the softmax of a fragment whose maximum moves only when it must.
//
// Any number may stand for the maximum: the division at the end makes the result exact.  It is there to keep
// 2^(score - m) in range, and weights up to 2^LAZY_LOG2 are in range of every 16-bit type.  So m stays until
// a score exceeds it by more, and O is seldom multiplied.
//
// weigh() goes further and does not even look for the maximum: it takes the weights under m as it stands.  A
// sum of weights that is small says that none was large, and then m would have stayed.
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
        // The maximum was rounded.  Fused, half an ulp of it would be left: 2^64 and more where scores are
        // beyond 2^30, and weights inf or 0.  weigh() may fuse: what it makes too large comes here.
        weight = exp2_approx(rounded_product(weight, late_scale) - reference);
        l += weight;
      }
    state.l[r] = l;
  }
}

// Sums of one lane's weights below this, and m may stay: no weight is larger.
constexpr acc TRUSTED_SUM = 4096;

// P <- weights of S under m as it stands, packed for P V; sum: of this lane's columns.  S is left as it is:
// where a sum is TRUSTED_SUM or more, or NaN, soften_lazily(S) is to be called instead.
DEVICE void weigh(Fragment<tile_kv>& S, const RowState& state, acc late_scale, u32 (&P)[tile_kv / 16][4],
                  acc (&sum)[n_rows]) {
#pragma unroll
  for (int r = 0; r < n_rows; ++r) sum[r] = 0;
#pragma unroll
  for (int c = 0; c < S.n; ++c)
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
      const acc left = exp2_approx(fmaf(S.of_row(r, c, 0), late_scale, -state.m[r]));
      const acc right = exp2_approx(fmaf(S.of_row(r, c, 1), late_scale, -state.m[r]));
      sum[r] += left + right;
      P[c / 2][c % 2 * 2 + r] = pack<elem>(left, right);
    }
}
DEVICE bool are_trusted(const acc (&sum)[n_rows]) {
  bool trusted = true;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) trusted = trusted && sum[r] < TRUSTED_SUM;
  return all(trusted);
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
