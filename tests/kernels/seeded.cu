// seeded.cu - a small kernel of every kind of waiting; tests/test_emulator.py breaks copies of it.
#include "lib/barrier.cuh"
#include "lib/cp_async.cuh"
#include "lib/memory.cuh"
#include "lib/warp.cuh"

struct Probe {
  void* arrays[8];
  int numbers[8];
};
struct alignas(16) Four { float item[4]; };

struct Smem {
  Shared<float, 8, 32> tile;
  Shared<float, 1, 8> sums;
};

// out[b][i] = x[b][i] * (sum of row i / 32 of block b's tile) + the warp's maximum.   x, out: (blocks, 8, 32)
KERNEL(256, 1) seeded_tile(const __grid_constant__ Probe p) {
  SHARED_MEMORY(Smem, smem);
  Global<float> x(p.arrays[0]), out(p.arrays[1]);
  const int t = threadIdx.x, row = t / 32, lane = t % 32;
  const i64 base = 256ll * blockIdx.x;
  if (t < 64) smem.tile.as<Four>(t / 8, t % 8 * 4) = x.load_as<Four>(base + 4 * t);
  block_sync();   // the tile is there
  if (lane == 0) {
    float sum = 0;
    for (int i = 0; i < 32; i++) sum += smem.tile(row, i);
    smem.sums(0, row) = sum;
  }
  block_sync();   // the sums are there
  const float largest = warp_max(smem.tile(row, lane));
  out.store(base + t, smem.tile(7 - row, lane) * smem.sums(0, 7 - row) + largest);
}

struct SmemRing { Shared<float, 2, 128> stages; };

// out[t] = sum over tiles j of x[j][127 - t], two stages, cp.async.   x: (numbers[0], 128), out: (128)
KERNEL(128, 1) seeded_ring(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemRing, smem);
  Global<float> x(p.arrays[0]), out(p.arrays[1]);
  const int t = threadIdx.x, n = p.numbers[0];
  auto request = [&](int j) {
    if (j < n && t < 32) cp_async(smem.stages.address(j % 2, 4 * t), x.address(128ll * j + 4 * t, 16));
    cp_async_commit();
  };
  float sum = 0;
  request(0);
  for (int j = 0; j < n; j++) {
    request(j + 1);
    cp_async_wait<1>();
    block_sync();   // tile j is there
    sum += smem.stages(j % 2, 127 - t);
    block_sync();   // tile j has been read: request(j + 2) may overwrite it
  }
  out.store(t, sum);
}
