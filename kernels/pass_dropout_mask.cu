// pass_dropout_mask.cu - which weights dropout keeps, as an array.   any GPU
//
// Algorithm    = philox.dropout_keep, bit for bit.   mask[b, h, i, j] = Philox word of (i, j) >= threshold
//              u8, written where args.mask points
// Grid         x: one warp per row of the mask;  a lane takes 4 neighbouring keys: one Philox call
#include "lib/params.cuh"
#include "lib/philox.cuh"

KERNEL(n_threads, 1) pass_dropout_mask(const __grid_constant__ Args args) {
  const i64 at = static_cast<i64>(blockIdx.x) * n_warps + threadIdx.x / 32;
  if (at >= args.batch * args.heads * args.len_q) return;
  const i64 i = at % args.len_q, h = at / args.len_q % args.heads, b = at / args.len_q / args.heads;
  const Dropout dropout = dropout_of(args, b, h);
  const Global<u8> mask(args.mask.data);
  const i64 first = b * args.mask.batch + h * args.mask.head + i * args.mask.row;
  for (i64 j = threadIdx.x % 32 * 4; j < args.len_k; j += 128) {
    const u32 keeps = dropout_keeps_4(dropout, i, j);
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (j + e < args.len_k) mask.store(first + (j + e) * args.mask.col, static_cast<u8>(keeps >> e & 1));
  }
}
