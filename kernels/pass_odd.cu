// pass_odd.cu - is any number of Q, K, V, dO not finite?  TF32 products in parts must know.   any GPU
//
// Read after   bwd_04_pipeline.cu
// Algorithm    workspace[SLOT_COUNTS][0] <- 1 if there is one, rows beyond a length included; else it stays 0
// Grid         x: a warp per row of all heads: of Q, then dO, K, V
// Bytes        each array once; a lane has 4 chunks on the way
#include "lib/params.cuh"
#include "lib/positions.cuh"
#include "lib/swizzled.cuh"
#include "lib/warp.cuh"

constexpr int SLOT_COUNTS = 2;   // workspace: i32 [1 ..]

// Is any number of this lane's part of a row of all heads not finite?
template <class From> DEVICE bool is_odd(const Tensor& tensor, i64 b, i64 row, i32 heads, i32 dim, int lane) {
  const Global<From> from(tensor.data);
  const i64 first = b * tensor.batch + row * tensor.row;
  constexpr int width = Vec16<From>::size;
  bool odd = false;
  if (tensor.vector_bytes == 16) {
    const i32 chunks = dim / width, n = heads * chunks;
#pragma unroll 4
    for (i32 at = lane; at < n; at += 32) {
      const Vec16<From> chunk =
          from.template load_as<Vec16<From>>(first + at / chunks * tensor.head + at % chunks * width);
#pragma unroll
      for (int e = 0; e < width; ++e) {
        const float x = convert<float>(chunk.item[e]);
        odd |= !(x - x == 0);
      }
    }
  } else {
    for (i32 at = lane; at < heads * dim; at += 32) {
      const float x = convert<float>(from.load(first + at / dim * tensor.head + at % dim));
      odd |= !(x - x == 0);
    }
  }
  return odd;
}

KERNEL(n_threads, 1) pass_odd(const __grid_constant__ Args args) {
  const int lane = threadIdx.x % 32;
  const i64 batch = is_packed ? 1 : args.batch;
  const i64 n_q = batch * args.len_q, n_k = batch * args.len_k;
  i64 at = static_cast<i64>(blockIdx.x) * n_warps + threadIdx.x / 32;
  if (at >= 2 * n_q + 2 * n_k) return;
  const bool of_queries = at < 2 * n_q;
  if (!of_queries) at -= 2 * n_q;
  const i64 n = of_queries ? n_q : n_k, len = of_queries ? args.len_q : args.len_k;
  const bool is_second = at >= n;   // dO, V
  at -= is_second ? n : 0;
  const i64 b = at / len, row = at % len;
  const i32 heads = static_cast<i32>(of_queries ? args.heads : args.heads_k);
  const i32 dim = static_cast<i32>(is_second ? args.head_dim_v : args.head_dim);
  bool odd;
  if (of_queries)
    odd = is_second ? is_odd<dout_elem>(args.dO, b, row, heads, dim, lane)
                    : is_odd<elem>(args.Q, b, row, heads, dim, lane);
  else
    odd = is_odd<elem>(is_second ? args.V : args.K, b, row, heads, dim, lane);
  if (any(odd) && lane == 0) Global<i32>(args.workspace[SLOT_COUNTS]).store(0, 1);
}
