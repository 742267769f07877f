// pass_merge.cu - attention over disjoint sets of keys, put together: exact, not an average.   any GPU
//
// Algorithm    = merge.merge.   lse = log sum_s e^(lse_s),   O = sum_s e^(lse_s - lse) O_s
//              nothing in any part: O 0, lse -inf
// Parts        workspace[0]: acc [n_parts, batch, len_q, heads, head_dim_v]
//              workspace[1]: acc [n_parts, batch, heads, len_q]          (packed: batch 1)
//              n_parts: n_splits of the build, or args.n_splits where it is not split
// Grid         x: one warp per query row
// Bytes        parts once, O and lse once
#include "lib/params.cuh"
#include "lib/positions.cuh"

KERNEL(n_threads, 1) pass_merge(const __grid_constant__ Args args) {
  const i64 at = static_cast<i64>(blockIdx.x) * n_warps + threadIdx.x / 32,
            n_arrays = is_packed ? 1 : args.batch;
  if (at >= n_arrays * args.len_q * args.heads) return;
  const i64 h = at % args.heads, row = at / args.heads % args.len_q, b = at / args.heads / args.len_q;
  const int lane = threadIdx.x % 32;
  const i64 n_parts = is_split ? n_splits : args.n_splits;
  const Global<acc> O_parts(args.workspace[0]), lse_parts(args.workspace[1]);
  const i64 of_lse = (b * args.heads + h) * args.len_q + row, lse_step = n_arrays * args.heads * args.len_q;

  acc m = NEG_INF;
  for (i64 s = 0; s < n_parts; s++) m = largest(m, lse_parts.load(of_lse + s * lse_step));
  const bool is_empty =
      m == NEG_INF;   // a NaN among the parts is lost here and comes back through its weight
  const acc reference = is_empty ? acc(0) : m;
  acc sum = 0;
  for (i64 s = 0; s < n_parts; s++)
    sum += exp2_approx((lse_parts.load(of_lse + s * lse_step) - reference) * LOG2E);

  const i64 O_step = n_arrays * args.len_q * args.heads * args.head_dim_v;
  const i64 to = index_of(args.O, b, h, row);
  for (i64 d = lane; d < args.head_dim_v; d += 32) {
    acc O = 0;
    for (i64 s = 0; s < n_parts; s++) {
      const acc weight = exp2_approx((lse_parts.load(of_lse + s * lse_step) - reference) * LOG2E);
      if (weight != 0)
        O += weight *
             O_parts.load(at * args.head_dim_v + d + s * O_step);   // a part that saw nothing is not read
    }
    Global<out_elem>(args.O.data).store(to + d, convert<out_elem>(sum == 0 ? acc(0) : O / sum));
  }
  const acc lse = sum == 0 ? NEG_INF : reference + log2_approx(sum) * LN2;
  if (lane == 0) Global<acc>(args.lse.data).store(index_of(args.lse, b, h, row), lse);
}
