// votes.cuh - the softmax of a warp whose maximum moves only when it must, and all rows at once.
//
// As in lazy.cuh m stays until a score exceeds it by more than LAZY_LOG2.  Here the warp votes: while
// nobody's score does, no lane needs the maximum of its row, so there is nothing to exchange or to rescale.
#pragma once
#include "fragments.cuh"
#include "warp.cuh"

constexpr float LAZY_LOG2 = 8;

// S <- weights 2^(late_scale S - m).  O and l are rescaled when m moves.
template <int n_cols>
DEVICE void soften_by_vote(Fragment<tile_kv>& S, RowState& state, Fragment<n_cols>& O, float late_scale) {
  float top[n_rows];   // of this lane's columns
  bool moves = false;
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    top[r] = S.of_row(r, 0, 0);
#pragma unroll
    for (int c = 0; c < S.n; ++c) top[r] = largest(top[r], largest(S.of_row(r, c, 0), S.of_row(r, c, 1)));
    top[r] *= late_scale;
    moves |= top[r] > state.m[r] + LAZY_LOG2;   // from -inf too; never to -inf
  }
  if (any(moves)) {
    float shrink[n_rows];
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
      const float m = largest(state.m[r], max_over_lanes<3>(top[r]));
      shrink[r] = rescaling(state.m[r], finite_max(m));
      state.m[r] = m;
      state.l[r] *= shrink[r];
    }
    rescale(O, shrink);
  }
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    const float reference = finite_max(state.m[r]);
    float l = state.l[r];
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
