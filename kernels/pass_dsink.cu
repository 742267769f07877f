// pass_dsink.cu - the gradient of the sink: a logit in every row's sum that owns no value.   any GPU
//
// Read after   pass_delta.cu
// Algorithm    dsink[h] = -sum over b, i of P_sink * delta,   P_sink = e^(sink - lse)
//              A row that attends to nothing else has P_sink = 1 and delta = -dlse; with a sink of -inf its
//              lse is -inf and P_sink 0.
// Grid         x: head
// Barriers     lib/reduce.cuh
#include "lib/params.cuh"
#include "lib/positions.cuh"
#include "lib/reduce.cuh"

struct Smem {
  BlockSum<n_threads> sum;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "pass_dsink: Smem and cuflash/rows.py disagree");

KERNEL(n_threads, 1) pass_dsink(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const i64 h = blockIdx.x, n_arrays = is_packed ? 1 : args.batch;
  const acc sink = Global<acc>(args.sink.data).load(h * args.sink.head);
  double mine = 0;
  for (i64 at = threadIdx.x; at < n_arrays * args.len_q; at += n_threads) {
    const i64 b = at / args.len_q, row = at % args.len_q;
    if (row >= existing_rows(args, b)) continue;
    const acc lse = Global<acc>(args.lse.data).load(index_of(args.lse, b, h, row));
    const acc delta = Global<acc>(args.delta.data).load(index_of(args.delta, b, h, row));
    const acc P_sink = lse == NEG_INF ? acc(0) : exp_near(sink - lse);
    mine -= static_cast<double>(P_sink * delta);
  }
  const double total = smem.sum(mine, threadIdx.x);
  if (threadIdx.x == 0) Global<acc>(args.dsink.data).store(h * args.dsink.head, static_cast<acc>(total));
}
