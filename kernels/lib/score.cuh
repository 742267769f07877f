// score.cuh - from a raw product q.k to the score that softmax sees, in contract order: scale, softcap,
// ALiBi, bias.  Derivatives for the backward beside each step.
// Scores are in base 2 (times log2(e); float64: base e, SCORE_UNIT in types.cuh).  natural_scoring_of makes
// the same functions give natural scores: where lse is given, e^(score - lse) is nearer to the truth when the
// two large numbers meet before anything else is rounded.
#pragma once
#include "positions.cuh"

// What the scores of one (sequence, head) share.
struct Scoring {
  acc scale_log2;       // scale * log2(e)
  acc scale_over_cap;   // softcap: cap * tanh(s * scale / cap)
  acc cap_log2;
  acc slope_log2;       // ALiBi
  i64 offset;
  i64 bias0;            // index of bias (i = 0, j = 0)
  acc unit;             // log2(e), natural scores: 1
};

DEVICE Scoring scoring_in(const Args& args, const Sequence& seq, i64 h, double unit) {
  Scoring c = {};
  c.unit = static_cast<acc>(unit);
  c.scale_log2 = static_cast<acc>(args.scale * unit);
  if constexpr (has_softcap) c.scale_over_cap = static_cast<acc>(args.scale / args.softcap);
  if constexpr (has_softcap) c.cap_log2 = static_cast<acc>(args.softcap * unit);
  if constexpr (has_alibi)
    if (seq.b < args.batch)   // the tail of a packed call has no entry
      c.slope_log2 = Global<acc>(args.alibi.data).load(index_of(args.alibi, seq.b, h)) * c.unit;
  if constexpr (has_alibi) c.offset = seq.offset;
  if constexpr (has_bias) c.bias0 = seq.b * args.bias.batch + h * args.bias.head;
  return c;
}

DEVICE Scoring scoring_of(const Args& args, const Sequence& seq, i64 h) {
  return scoring_in(args, seq, h, SCORE_UNIT);
}
DEVICE Scoring natural_scoring_of(const Args& args, const Sequence& seq, i64 h) {
  return scoring_in(args, seq, h, 1);
}

// Step 1: scale and softcap.  raw = q.k
DEVICE acc capped_log2(const Scoring& c, acc raw) {
  if constexpr (has_softcap) return c.cap_log2 * hyperbolic_tangent(raw * c.scale_over_cap);
  return raw * c.scale_log2;
}

// d capped / d (scale * raw), from the capped value: 1 - tanh^2.
DEVICE acc softcap_slope(const Scoring& c, acc capped) {
  if constexpr (!has_softcap) return 1;
  const acc t = capped / c.cap_log2;
  return 1 - t * t;
}

// |i + offset - j|: minus this is d score / d slope.
DEVICE acc alibi_distance(const Scoring& c, i32 i, i32 j) {
  return static_cast<acc>(magnitude<i64>(i + c.offset - j));
}

// Step 2: ALiBi and bias.  (i, j) must lie inside the sequence: bias is read there.
DEVICE acc biased_log2(const Args& args, const Scoring& c, acc capped, i32 i, i32 j) {
  acc score = capped;
  if constexpr (has_alibi) score -= c.slope_log2 * alibi_distance(c, i, j);
  if constexpr (has_bias) {
    const Global<bias_elem> biases(args.bias.data);
    const acc bias = convert<acc>(biases.load(c.bias0 + i * args.bias.row + j * args.bias.col));
    score += bias * c.unit;
  }
  return score;
}

DEVICE acc score_log2(const Args& args, const Scoring& c, acc raw, i32 i, i32 j) {
  return biased_log2(args, c, capped_log2(c, raw), i, j);
}
