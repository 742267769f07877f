// pass_dalibi.cu - the gradient of the ALiBi slopes from the parts that the key tiles left.   any GPU
//
// Read after   bwd_02_tiled.cu
// Algorithm    dalibi[b, h] = sum of workspace[0][slot, h] over the slots of sequence b, in slot order
//              (slopes (heads,): over all slots).  A slot is one key tile of one sequence (positions.cuh);
//              slots without a tile hold zero.
// Grid         x: h + heads * b;   (heads,) slopes: h
// Barriers     lib/reduce.cuh
#include "lib/params.cuh"
#include "lib/positions.cuh"
#include "lib/reduce.cuh"

struct Smem {
  BlockSum<n_threads> sum;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "pass_dalibi: Smem and cuflash/rows.py disagree");

KERNEL(n_threads, 1) pass_dalibi(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const i64 h = blockIdx.x % args.heads, b = blockIdx.x / args.heads;
  const Global<acc> parts(args.workspace[0]);
  i64 first = 0, step = 1, end = n_slots(args, args.len_k, tile_kv);
  if (args.dalibi.batch != 0) {   // one slope per sequence
    if constexpr (is_packed) {
      first = cumulative(args.cu_seqlens_k, b, args.len_k) / tile_kv + b;
      end = cumulative(args.cu_seqlens_k, b + 1, args.len_k) / tile_kv + b + 1;
    } else {
      first = b;
      step = args.batch;
    }
  }
  double mine = 0;
  for (i64 slot = first + threadIdx.x * step; slot < end; slot += n_threads * step)
    mine += parts.load(slot * args.heads + h);
  const double total = smem.sum(mine, threadIdx.x);
  if (threadIdx.x == 0)
    Global<acc>(args.dalibi.data)
        .store(b * args.dalibi.batch + h * args.dalibi.head, static_cast<acc>(total));
}
