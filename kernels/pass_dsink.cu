// pass_dsink.cu - the gradient of the sink: a logit that takes part in every row's sum and owns no value.   any GPU
//
// Read after   pass_delta.cu
// Algorithm    dsink[h] = -sum over b, i of P_sink * delta,   P_sink = 2^(sink * log2(e) - lse_log2)
//              A row that attends to nothing else has P_sink = 1 and delta = -dlse.  A row that does not exist has lse_log2 = +inf.
// Grid         x: head
// Barriers     lib/reduce.cuh
#include "lib/params.cuh"
#include "lib/args.cuh"
#include "lib/reduce.cuh"
#include "lib/types.cuh"

struct Smem {
  BlockSum<n_threads> sum;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "pass_dsink: Smem and cuflash/rows.py disagree");

KERNEL(n_threads, 1) pass_dsink(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const i64 h = blockIdx.x, n_arrays = is_packed ? 1 : args.batch;
  const acc sink_log2 = Global<acc>(args.sink.data).load(h * args.sink.head) * LOG2E;
  double mine = 0;
  for (i64 at = threadIdx.x; at < n_arrays * args.len_q; at += n_threads) {
    const i64 b = at / args.len_q, row = at % args.len_q;
    const acc lse_log2 = Global<acc>(args.lse_log2.data).load(b * args.lse_log2.batch + h * args.lse_log2.head + row * args.lse_log2.row);
    const acc delta = Global<acc>(args.delta.data).load(b * args.delta.batch + h * args.delta.head + row * args.delta.row);
    mine -= static_cast<double>(exp2_approx(sink_log2 - lse_log2) * delta);
  }
  const double total = smem.sum(mine, threadIdx.x);
  if (threadIdx.x == 0) Global<acc>(args.dsink.data).store(h * args.dsink.head, static_cast<acc>(total));
}
