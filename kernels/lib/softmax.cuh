// softmax.cuh - the running softmax of a row, in base 2 (float64: base e, SCORE_UNIT in types.cuh):
// m = largest score so far, l = sum of 2^(score - m).
#pragma once
#include "args.cuh"
#include "memory.cuh"
#include "types.cuh"
#include "warp.cuh"

// A row that has seen nothing has m = -inf; (-inf) - (-inf) would be NaN, so weights are taken against 0
// then: 2^(-inf - 0) = 0.
DEVICE acc finite_max(acc m) { return m == NEG_INF ? acc(0) : m; }

// What the sums made with m_old must be multiplied by, now that the maximum is m_new (as finite_max gave it).
DEVICE acc rescaling(acc m_old, acc m_new) { return exp_score(m_old - m_new); }

// Maximum and sum over the lanes that share a row: those whose numbers differ only in the bits of lane_bits.
// All of them get the result.
template <int lane_bits> DEVICE acc max_over_lanes(acc x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2)
    if (lane_bits & bit) x = largest(x, shfl_xor(x, bit));
  return x;
}
template <int lane_bits> DEVICE acc sum_over_lanes(acc x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2)
    if (lane_bits & bit) x += shfl_xor(x, bit);
  return x;
}

// The end of a row.  factor: what O is multiplied by; lse: natural logarithm, of the sink too; sees: whether
// anything was visible.  O of a row that sees nothing is 0, whatever its sink, and where V is NaN; a factor
// may also be 0 below a large sink, and O that is not finite stays so.
struct RowEnd {
  acc factor;
  acc lse;
  bool sees;

  DEVICE acc of(acc O) const { return sees ? O * factor : acc(0); }
};

// sink_log2: the head's sink in the unit of scores, ignored without one.  A row that exists but saw nothing
// gets lse -inf or the sink; NaN where the sink is NaN or +inf, as every row has then.
DEVICE RowEnd finish_row(acc m, acc l, acc sink_log2, acc dropout_scale) {
  const bool sees = l != 0;   // the largest score has a weight of 1, or more; NaN, too, was seen
  acc shrink = 1;
  if constexpr (has_sink) {
    const acc m_all = largest(m, sink_log2), reference = finite_max(m_all);
    shrink = exp_score(m - reference);
    l = l * shrink + exp_score(sink_log2 - reference);
    m = m_all;
  }
  RowEnd row = {0, NEG_INF, sees};
  if (l == 0) return row;
  row.factor = shrink / l;
  if constexpr (has_dropout) row.factor *= dropout_scale;
  row.lse = (m + log_score(l)) * FROM_UNIT;
  return row;
}

DEVICE acc sink_of(const Args& args, i64 h) {
  if constexpr (!has_sink) return NEG_INF;
  return Global<acc>(args.sink.data).load(h * args.sink.head) * static_cast<acc>(SCORE_UNIT);
}
