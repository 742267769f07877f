// pass_delta.cu - what a backward kernel reads of a query row: delta and the scaled lse.   any GPU
//
// Algorithm    = tiled_backward.backward, step 1.   delta = rowsum(dO * O) - dlse,   lse_log2 = lse * log2(e)
//              lse_log2, for the rows of the plan that want it, is +inf where a query attends to nothing
//              (lse = -inf) or does not exist: P = 2^(score - lse_log2) is then 0 without a test.
//              A row that does not exist is not read.
// Grid         x: rows of the arrays, lanes_per_row lanes each, rows_per_block a block
// Registers    8 numbers of O and 8 of dO in flight per lane
// Bytes        O, dO, lse, dlse once; delta, lse_log2 once
#include "lib/params.cuh"
#include "lib/positions.cuh"
#include "lib/swizzled.cuh"
#include "lib/warp.cuh"

constexpr int lane_items = 8;   // numbers a lane reads at once: 16 bytes of a 16-bit array
constexpr int lanes_per_row = head_dim_v_tile >= 128  ? 16
                              : head_dim_v_tile >= 64 ? 8
                              : head_dim_v_tile >= 32 ? 4
                                                      : 2;
constexpr int rows_per_block = n_threads / lanes_per_row;

// numbers = row[d .. d + 8), zeros from `dim` on.
template <class From>
DEVICE void load_items(acc (&numbers)[lane_items], const Tensor& tensor, i64 first, i64 d, i64 dim) {
  const Global<From> from(tensor.data);
  constexpr int size = Vec16<From>::size;
  if (tensor.vector_bytes == 16 && d + lane_items <= dim) {
#pragma unroll
    for (int part = 0; part < lane_items; part += size) {
      const Vec16<From> chunk = from.template load_as<Vec16<From>>(first + d + part);
#pragma unroll
      for (int e = 0; e < size; e++) numbers[part + e] = convert<acc>(chunk.item[e]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < lane_items; e++)
      numbers[e] = d + e < dim ? convert<acc>(from.load(first + d + e)) : acc(0);
  }
}

KERNEL(n_threads, 1) pass_delta(const __grid_constant__ Args args) {
  const int thread = threadIdx.x, lane = thread % lanes_per_row;
  const i64 n_arrays = is_packed ? 1 : args.batch;
  const i64 at = static_cast<i64>(blockIdx.x) * rows_per_block + thread / lanes_per_row;
  const bool is_row = at < n_arrays * args.heads * args.len_q;   // all lanes go on: they meet in the sum
  const i64 row = is_row ? at % args.len_q : 0, h = is_row ? at / args.len_q % args.heads : 0;
  const i64 b = is_row ? at / args.len_q / args.heads : 0;

  const bool exists = is_row && row < existing_rows(args, b);

  acc sum = 0;
  if (exists)
    for (i64 d = lane * lane_items; d < args.head_dim_v; d += lanes_per_row * lane_items) {
      acc O[lane_items], dO[lane_items];
      load_items<o_elem>(O, args.O, index_of(args.O, b, h, row), d, args.head_dim_v);
      load_items<dout_elem>(dO, args.dO, index_of(args.dO, b, h, row), d, args.head_dim_v);
#pragma unroll
      for (int e = 0; e < lane_items; e++)
        if (O[e] != 0)
          sum +=
              O[e] * dO[e];   // a row that attends to nothing has O = 0, and its dO may be anything, NaN too
    }
  sum = warp_sum<lanes_per_row>(sum);

  if (lane != 0 || !is_row) return;
  acc delta = 0, lse_log2 = -NEG_INF;
  if (exists) {
    delta = sum;
    if constexpr (has_dlse) delta -= Global<acc>(args.dlse.data).load(index_of(args.dlse, b, h, row));
    const acc lse = Global<acc>(args.lse.data).load(index_of(args.lse, b, h, row));
    if (lse != NEG_INF) lse_log2 = lse * LOG2E;
  }
  Global<acc>(args.delta.data).store(index_of(args.delta, b, h, row), delta);
  if (args.lse_log2.data != nullptr)   // rows that want it have a slot of this name
    Global<acc>(args.lse_log2.data).store(index_of(args.lse_log2, b, h, row), lse_log2);
}
