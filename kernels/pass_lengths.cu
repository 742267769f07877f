// pass_lengths.cu - lengths that the caller gives on the host, to global memory by way of the kernel's arguments.   any GPU
//
// Changes      nothing of attention: a copy that needs no pinned memory, never waits, and is kept by value in a CUDA graph
// Grid         one block; cuflash/backends.py calls again for every 480 numbers (4 KiB of arguments is what any GPU takes)
#include "lib/memory.cuh"

struct Words {
  i64* target;
  i64 n;
  i64 values[480];
};

KERNEL(128, 1) pass_lengths(const __grid_constant__ Words words) {
  const Global<i64> target(words.target);
  for (i64 n = threadIdx.x; n < words.n; n += 128) target.store(n, words.values[n]);
}
