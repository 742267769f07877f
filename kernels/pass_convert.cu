// pass_convert.cu - sums of a backward kernel in the dtype asked for, times a number.   any GPU
//
// pass_convert__dq            dQ = dQ_sum * scale: sums in acc, target of any strides
// pass_convert__dk, __dv      the same for dK_sum (times scale) and dV_sum, where a kernel leaves such sums
// Grid         x: one warp per row of the last axis
// Bytes        source and target once
#include "lib/params.cuh"
#include "lib/positions.cuh"

DEVICE i64 warp_number() { return static_cast<i64>(blockIdx.x) * n_warps + threadIdx.x / 32; }

// target[b, row, h, :dim] = source * scale
DEVICE void convert_rows(const Tensor& source, const Tensor& target, i64 batch, i64 len, i64 heads, i64 dim,
                         acc scale) {
  const i64 at = warp_number();
  if (at >= batch * len * heads) return;
  const i64 h = at % heads, row = at / heads % len, b = at / heads / len;
  const i64 from = index_of(source, b, h, row), to = index_of(target, b, h, row);
  for (i64 d = threadIdx.x % 32; d < dim; d += 32)
    Global<out_elem>(target.data)
        .store(to + d, convert<out_elem>(Global<acc>(source.data).load(from + d) * scale));
}

KERNEL(n_threads, 1) pass_convert__dq(const __grid_constant__ Args args) {
  convert_rows(args.dQ_sum, args.dQ, is_packed ? 1 : args.batch, args.len_q, args.heads, args.head_dim,
               static_cast<acc>(args.scale));
}
KERNEL(n_threads, 1) pass_convert__dk(const __grid_constant__ Args args) {
  convert_rows(args.dK_sum, args.dK, is_packed ? 1 : args.batch, args.len_k, args.heads_k, args.head_dim,
               static_cast<acc>(args.scale));
}
KERNEL(n_threads, 1) pass_convert__dv(const __grid_constant__ Args args) {
  convert_rows(args.dV_sum, args.dV, is_packed ? 1 : args.batch, args.len_k, args.heads_k, args.head_dim_v,
               acc(1));
}
