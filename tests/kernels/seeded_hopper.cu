// seeded_hopper.cu - a small TMA and wgmma pipeline that tests/test_emulator_async.py breaks.   sm_90a
#include "lib/barrier.cuh"
#include "lib/ldmatrix.cuh"
#include "lib/mbarrier.cuh"
#include "lib/memory.cuh"
#include "lib/mma.cuh"
#include "lib/tma.cuh"
#include "lib/warp.cuh"
#include "lib/wgmma.cuh"

struct Probe {
  TensorMap maps[2];   // 0: Q and K in one array of rows, 64 rows a box; 1: O
  void* arrays[8];
  int numbers[8];
};

struct Smem {
  Shared<bf16, 64, 64> Q;          //     0   all tiles: 128-byte lines, swizzled
  Shared<bf16, 2 * 64, 64> K;      //  8192   ring of two stages
  Shared<bf16, 64, 64> P;          // 24576   S rounded; at the end O
  Shared<u64, 1, 2> full, empty;
  Shared<u64, 1, 1> Q_full;
};

// O = sum over tiles j of bf16(Q K_j^T)^T K_j: rows 0-63 of the array are Q, then numbers[0] tiles K_j.  One
// consumer warpgroup, one producer warp.
KERNEL(160, 1) seeded_pipeline(const __grid_constant__ Probe p) {
  SHARED_MEMORY(Smem, smem);
  const int warp = shfl(static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32, n = p.numbers[0];
  const u32 Q_full = smem.Q_full.address(0, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; s++) {
      mbarrier_init(smem.full.address(0, s), 1);
      mbarrier_init(smem.empty.address(0, s), 4);
    }
    mbarrier_init(Q_full, 1);
    mbarrier_init_fence();
  }
  block_sync();   // the mbarriers are initialised

  if (warp == 4) {
    if (elect_one()) {
      mbarrier_arrive_expect(Q_full, 8192);
      tma_load(smem.Q.address(0, 0), p.maps[0], Q_full, tma_at(0, 0));
      for (int j = 0; j < n; j++) {
        const u32 full = smem.full.address(0, j % 2);
        mbarrier_wait(smem.empty.address(0, j % 2), ((j / 2) & 1) ^ 1);
        mbarrier_arrive_expect(full, 8192);
        tma_load(smem.K.address(64 * (j % 2), 0), p.maps[0], full, tma_at(0, 64 * (j + 1)));
      }
    }
    return;
  }

  const u64 Q = wgmma_descriptor(smem.Q.address(0, 0), 16, 1024, Swizzle::bytes_128);
  const u64 P = wgmma_descriptor(smem.P.address(0, 0), 16, 1024, Swizzle::bytes_128);
  const int row = 16 * warp + (lane & 15);
  float O[32], S[32];
  u32 packed[4];
  auto put = [&](float (&from)[32]) {   // a 64 x 64 accumulator -> smem.P as bf16, swizzled
    for (int g = 0; g < 4; g++) {
      for (int i = 0; i < 4; i++) packed[i] = pack<bf16>(from[8 * g + 2 * i], from[8 * g + 2 * i + 1]);
      stmatrix_x4(smem.P.address(row, 8 * ((2 * g + (lane >> 4)) ^ (row & 7))), packed);
    }
  };
  mbarrier_wait(Q_full, 0);
  for (int j = 0; j < n; j++) {
    const u32 K_tile = smem.K.address(64 * (j % 2), 0);
    const u64 K = wgmma_descriptor(K_tile, 16, 1024, Swizzle::bytes_128);
    mbarrier_wait(smem.full.address(0, j % 2), (j / 2) & 1);
    wgmma_fence();   // S = Q K^T
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<bf16>(S, Q + 2 * k, K + 2 * k, k > 0);
    wgmma_commit();
    wgmma_wait<0>();   // S may be read
    put(S);
    fence_async_shared();
    barrier_sync(1, 128);   // P is there
    wgmma_fence();   // O += P^T K
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<bf16, 1, 1>(O, P + 128 * k, K + 128 * k, j > 0 || k > 0);
    wgmma_commit();
    wgmma_wait<0>();   // K and P have been read
    if (lane == 0) mbarrier_arrive(smem.empty.address(0, j % 2));
  }
  put(O);
  fence_async_shared();
  barrier_sync(2, 128);   // O is there
  if (threadIdx.x == 0) {
    tma_store(p.maps[1], smem.P.address(0, 0), tma_at(0, 0));
    bulk_commit();
    bulk_wait_read<0>();
  }
}
