// pass_merge.cu - attention over disjoint sets of keys, put together: exact, not an average.   any GPU
//
// Algorithm    = merge.merge.   lse = log sum_s e^(lse_s),   O = sum_s e^(lse_s - lse) O_s
//              nothing in any part: O 0, lse -inf
//              A part of O 0 and lse NaN saw nothing but a sink of +inf or NaN: the others say whether O is 0
// Parts        workspace[0]: acc [n_parts, batch, len_q, heads, head_dim_v]
//              workspace[1]: acc [n_parts, batch, heads, len_q]          (packed: batch 1)
//              n_parts: n_splits of the build, or args.n_splits where it is not split
// Grid         x: one warp per query row
// Bytes        parts once, O and lse once
// Loads        a lane has the weight of one part of 32, so that many loads of O are on their way
#include "lib/params.cuh"
#include "lib/positions.cuh"
#include "lib/warp.cuh"

KERNEL(n_threads, 1) pass_merge(const __grid_constant__ Args args) {
  const i64 at = static_cast<i64>(blockIdx.x) * n_warps + threadIdx.x / 32,
            n_arrays = is_packed ? 1 : args.batch;
  if (at >= n_arrays * args.len_q * args.heads) return;
  const i64 h = at % args.heads, row = at / args.heads % args.len_q, b = at / args.heads / args.len_q;
  const int lane = threadIdx.x % 32;
  const i64 n_parts = is_split ? n_splits : args.n_splits;
  const Global<acc> O_parts(args.workspace[0]), lse_parts(args.workspace[1]);
  const i64 of_lse = (b * args.heads + h) * args.len_q + row, lse_step = n_arrays * args.heads * args.len_q;

  acc m = NEG_INF, sum = 0;
  for (i64 s = lane; s < n_parts; s += 32) m = largest(m, lse_parts.load(of_lse + s * lse_step));
  m = warp_max(m);
  const bool is_empty =
      m == NEG_INF;   // a NaN among the parts is lost here and comes back through its weight
  const acc reference = is_empty ? acc(0) : m;
  const auto weight_of = [&](i64 s) {
    return s < n_parts ? exp2_approx((lse_parts.load(of_lse + s * lse_step) - reference) * LOG2E) : acc(0);
  };
  for (i64 s = lane; s < n_parts; s += 32) sum += weight_of(s);
  sum = warp_sum(sum);

  const i64 dim = args.head_dim_v, O_step = n_arrays * args.len_q * args.heads * dim;
  const i64 to = index_of(args.O, b, h, row);
  constexpr int n = 4;   // columns of a lane at a time
  for (i64 d0 = lane; d0 - lane < dim; d0 += 32 * n) {
    acc O[n] = {};
    bool sees[n] = {};
    for (i64 s0 = 0; s0 < n_parts; s0 += 32) {
      const acc weight = weight_of(s0 + lane);   // a lane has one part's
      const int here = static_cast<int>(smallest<i64>(n_parts - s0, 32));
#pragma unroll 4
      for (int s = 0; s < here; s++) {
        const acc of_part = shfl(weight, s);
#pragma unroll
        for (int e = 0; e < n; e++)
          if (of_part != 0 && d0 + 32 * e < dim) {   // a part that saw nothing is not read
            const acc part = O_parts.load(at * dim + d0 + 32 * e + (s0 + s) * O_step);
            sees[e] = sees[e] || of_part == of_part || part != 0;
            O[e] += of_part * part;
          }
      }
    }
#pragma unroll
    for (int e = 0; e < n; e++)
      if (d0 + 32 * e < dim)
        Global<out_elem>(args.O.data)
            .store(to + d0 + 32 * e, convert<out_elem>(sees[e] ? O[e] / sum : acc(0)));
  }
  const acc lse = sum == 0 ? NEG_INF : reference + log2_approx(sum) * LN2;
  if (lane == 0) Global<acc>(args.lse.data).store(index_of(args.lse, b, h, row), lse);
}
