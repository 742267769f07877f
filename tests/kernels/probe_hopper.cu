// probe_hopper.cu - one kernel per group of sm_90a instructions: tests/test_instructions_hopper.py checks
// each.
#include "lib/barrier.cuh"
#include "lib/cluster.cuh"
#include "lib/ldmatrix.cuh"
#include "lib/mbarrier.cuh"
#include "lib/memory.cuh"
#include "lib/tma.cuh"
#include "lib/warp.cuh"
#include "lib/wgmma.cuh"

struct Probe {
  TensorMap maps[2];
  void* arrays[8];
  int numbers[8];
};

struct SmemTile {
  Shared<u8, 128, 128> tile;   // any box of at most 16 KiB
  Shared<u64, 1, 1> full;
};

DEVICE TmaAt place(const Probe& p, int rank) {   // rank is a constant in the caller
  const int* n = p.numbers;
  if (rank == 2) return tma_at(n[1], n[2]);
  if (rank == 3) return tma_at(n[1], n[2], n[3]);
  if (rank == 4) return tma_at(n[1], n[2], n[3], n[4]);
  return tma_at(n[1], n[2], n[3], n[4], n[5]);
}

// numbers: rank, coordinates, box bytes at [6].  arrays[1]: the box as it lies in shared memory.
KERNEL(128, 1) probe_tma_load(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemTile, smem);
  Global<u8> out(p.arrays[1]);
  const u32 full = smem.full.address(0, 0), to = smem.tile.address(0, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  block_sync();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(full, p.numbers[6]);
    if (p.numbers[0] == 2) tma_load(to, p.maps[0], full, place(p, 2));
    else if (p.numbers[0] == 3) tma_load_hint(to, p.maps[0], full, place(p, 3), evict_last);
    else if (p.numbers[0] == 4) tma_load(to, p.maps[0], full, place(p, 4));
    else tma_load(to, p.maps[0], full, place(p, 5));
  }
  mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < p.numbers[6]; i += 128) out.store(i, smem.tile(i / 128, i % 128));
}

// arrays[1]: the box as it lies in shared memory -> arrays[0] through the map; numbers[7]: 1 adds.
KERNEL(128, 1) probe_tma_store(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemTile, smem);
  Global<u8> in(p.arrays[1]);
  for (int i = threadIdx.x; i < p.numbers[6]; i += 128) smem.tile(i / 128, i % 128) = in.load(i);
  fence_async_shared();
  block_sync();
  if (threadIdx.x == 0) {
    const u32 from = smem.tile.address(0, 0);
    if (p.numbers[7]) {
      if (p.numbers[0] == 2) tma_reduce_add(p.maps[0], from, place(p, 2));
      else tma_reduce_add(p.maps[0], from, place(p, 4));
    } else {
      if (p.numbers[0] == 2) tma_store(p.maps[0], from, place(p, 2));
      else if (p.numbers[0] == 3) tma_store(p.maps[0], from, place(p, 3));
      else if (p.numbers[0] == 4) tma_store(p.maps[0], from, place(p, 4));
      else tma_store(p.maps[0], from, place(p, 5));
    }
    bulk_commit();
    bulk_wait_read<0>();
  }
}

struct SmemBulk {
  Shared<float, 1, 64> x;
  Shared<u64, 1, 1> full;
};

// y = x + 1 by a bulk store, sum += x + 1 by a bulk reduce-add: 64 floats a block
KERNEL(64, 1) probe_bulk(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemBulk, smem);
  Global<float> x(p.arrays[0]), y(p.arrays[1]), sum(p.arrays[2]);
  const u32 full = smem.full.address(0, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(full, 256);
    bulk_load(smem.x.address(0, 0), x.address(64 * blockIdx.x, 256), 256, full);
  }
  block_sync();
  mbarrier_wait(full, 0);
  smem.x(0, threadIdx.x) += 1;
  fence_async_shared();
  block_sync();
  if (threadIdx.x == 0) {
    bulk_store(y.address(64 * blockIdx.x, 256), smem.x.address(0, 0), 256);
    bulk_reduce_add(sum.address(0, 256), smem.x.address(0, 0), 256);
    bulk_commit();
    bulk_wait<0>();
  }
}

struct SmemRing {
  Shared<u16, 3 * 8, 64> stages;   // 3 stages of 8 rows, 128 bytes each: swizzled by TMA
  Shared<u64, 1, 3> full, empty;
};

// Sum over numbers[0] tiles of 8 rows of x (rows, 64) u16, by a producer warp and two consumer warps.  out:
// (64, 2) u32
KERNEL(96, 1) probe_ring(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemRing, smem);
  Global<u32> out(p.arrays[1]);
  const int warp = threadIdx.x / 32, n = p.numbers[0];
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; s++) {
      mbarrier_init(smem.full.address(0, s), 1);
      mbarrier_init(smem.empty.address(0, s), 2);
    }
    mbarrier_init_fence();
  }
  block_sync();
  if (warp == 2) {
    if (elect_one())
      for (int j = 0; j < n; j++) {
        const u32 full = smem.full.address(0, j % 3);
        mbarrier_wait(smem.empty.address(0, j % 3), ((j / 3) & 1) ^ 1);
        mbarrier_arrive_expect(full, 1024);
        tma_load(smem.stages.address(8 * (j % 3), 0), p.maps[0], full, tma_at(0, 8 * j));
      }
    return;
  }
  u32 sum[2] = {};
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  for (int j = 0; j < n; j++) {
    mbarrier_wait(smem.full.address(0, j % 3), (j / 3) & 1);
    for (int e = 0; e < 8; e++) sum[e / 4] += smem.stages(8 * (j % 3) + row, 8 * (chunk ^ row) + e);
    warp_sync();   // all lanes have read the stage
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem.empty.address(0, j % 3));
  }
  out.store(2 * threadIdx.x, sum[0]);
  out.store(2 * threadIdx.x + 1, sum[1]);
}

struct SmemMatrices { Shared<u16, 64, 16> cells; };

// registers (4, 32) u32 -> (64, 16) u16: x4 into rows 0-31 columns 0-7, x4.trans into columns 8-15, x2 and
// x2.trans below
KERNEL(32, 1) probe_stmatrix(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemMatrices, smem);
  Global<u32> in(p.arrays[0]);
  Global<u16> out(p.arrays[1]);
  const int lane = threadIdx.x;
  for (int i = 0; i < 2; i++)
    for (int c = 0; c < 16; c++) smem.cells(32 * i + lane, c) = 0;
  warp_sync();
  const u32 r[4] = {in.load(lane), in.load(32 + lane), in.load(64 + lane), in.load(96 + lane)};
  const u32 two[2] = {r[1], r[2]};
  stmatrix_x4(smem.cells.address(lane, 0), r);
  stmatrix_x4_trans(smem.cells.address(lane, 8), r);
  stmatrix_x2(smem.cells.address(32 + lane % 16, 0), two);
  stmatrix_x2_trans(smem.cells.address(32 + lane % 16, 8), two);
  warp_sync();
  for (int i = 0; i < 2; i++)
    for (int c = 0; c < 16; c++) out.store((32 * i + lane) * 16 + c, smem.cells(32 * i + lane, c));
}

struct SmemWgmma {
  Shared<u8, 64, 128> A;
  Shared<u8, 256, 128> B;
};

// D (64, N) = A B with both operands given as they lie in shared memory (arrays 0 and 1, numbers 6 and 7
// bytes), or A in registers from a row-major (64, 16 steps) array.  arrays[2]: D.  arrays[3]: for each k16
// step the byte offsets in A and B. numbers: steps, A leading, A stride, B leading, B stride, layout code.
template <class T, int N, int trans_a, int trans_b, bool a_in_registers>
DEVICE void multiply_probe(const Probe& p) {
  SHARED_MEMORY(SmemWgmma, smem);
  Global<u8> A(p.arrays[0]), B(p.arrays[1]);
  Global<u16> A_rows(p.arrays[0]);
  Global<float> D(p.arrays[2]);
  Global<int> offsets(p.arrays[3]);
  const int* n = p.numbers;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (!a_in_registers)
    for (int i = threadIdx.x; i < n[6]; i += 128) smem.A(i / 128, i % 128) = A.load(i);
  for (int i = threadIdx.x; i < n[7]; i += 128) smem.B(i / 128, i % 128) = B.load(i);
  fence_async_shared();
  block_sync();

  float d[N / 2];
  for (int i = 0; i < N / 2; i++) d[i] = 1;
  u32 a[4][4];
  for (int k = 0; k < 4; k++)
    for (int i = 0; i < 4; i++) {
      const int at = (16 * warp + g + 8 * (i % 2)) * 16 * n[0] + 16 * k + 2 * t + 8 * (i / 2);
      a[k][i] = 0;
      if (a_in_registers && k < n[0]) a[k][i] = A_rows.load(at) | static_cast<u32>(A_rows.load(at + 1)) << 16;
    }
  u64 descriptor_a[4], descriptor_b[4];
  for (int k = 0; k < 4; k++) {
    const int at = k < n[0] ? k : 0;
    const u32 from_a = smem.A.address(0, 0) + offsets.load(2 * at);
    const u32 from_b = smem.B.address(0, 0) + offsets.load(2 * at + 1);
    descriptor_a[k] = wgmma_descriptor(from_a, n[1], n[2], static_cast<Swizzle>(n[5]));
    descriptor_b[k] = wgmma_descriptor(from_b, n[3], n[4], static_cast<Swizzle>(n[5]));
  }
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if constexpr (a_in_registers) wgmma<T, trans_b>(d, a[k], descriptor_b[k], k > 0);
    else wgmma<T, trans_a, trans_b>(d, descriptor_a[k], descriptor_b[k], k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < N / 2; i++)
    D.store((16 * warp + g + 8 * (i >> 1 & 1)) * N + 8 * (i >> 2) + 2 * t + (i & 1), d[i]);
}

KERNEL(128, 1) probe_wgmma_bf16_n64(const __grid_constant__ Probe p) {
  multiply_probe<bf16, 64, 0, 0, false>(p);
}
KERNEL(128, 1) probe_wgmma_f16_n8(const __grid_constant__ Probe p) {
  multiply_probe<f16, 8, 0, 0, false>(p);
}
KERNEL(128, 1) probe_wgmma_bf16_n80(const __grid_constant__ Probe p) {
  multiply_probe<bf16, 80, 0, 0, false>(p);
}
KERNEL(128, 1) probe_wgmma_bf16_n128_tb(const __grid_constant__ Probe p) {
  multiply_probe<bf16, 128, 0, 1, false>(p);
}
KERNEL(128, 1) probe_wgmma_f16_n96_ta_tb(const __grid_constant__ Probe p) {
  multiply_probe<f16, 96, 1, 1, false>(p);
}
KERNEL(128, 1) probe_wgmma_bf16_n256(const __grid_constant__ Probe p) {
  multiply_probe<bf16, 256, 0, 0, false>(p);
}
KERNEL(128, 1) probe_wgmma_bf16_n256_ta(const __grid_constant__ Probe p) {
  multiply_probe<bf16, 256, 1, 0, false>(p);
}
KERNEL(128, 1) probe_wgmma_bf16_n64_rs_tb(const __grid_constant__ Probe p) {
  multiply_probe<bf16, 64, 0, 1, true>(p);
}
KERNEL(128, 1) probe_wgmma_f16_n176_rs(const __grid_constant__ Probe p) {
  multiply_probe<f16, 176, 0, 0, true>(p);
}

struct SmemCluster {
  Shared<u8, 8, 128> tile;        // the same box in both blocks
  Shared<u32, 1, 64> mine, theirs;
  Shared<u64, 1, 3> full;         // 0: the box, 1: theirs, 2: the peer has read it
};

// Two blocks: a multicast load (rank 0 asks for rows 0-3, rank 1 for rows 4-7), a bulk copy to the peer,
// DSMEM, remote arrivals.  out (blocks, 4 + 64 + 1024): ranks, sizes, a word read from the peer, one written
// by it; theirs; tile
CLUSTER_KERNEL(64, 1, 2, probe_cluster)(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemCluster, smem);
  Global<u32> out(p.arrays[1]);
  const u32 rank = cluster_rank(), peer = 1 - rank;
  const i64 base = 324ll * blockIdx.x;
  const int t = threadIdx.x;
  const u32 box = smem.full.address(0, 0), exchange = smem.full.address(0, 1), read = smem.full.address(0, 2);
  smem.mine(0, t) = 1000 * blockIdx.x + t;
  smem.theirs(0, t) = 0;
  if (t == 0) {
    for (int i = 0; i < 3; i++) mbarrier_init(smem.full.address(0, i), 1);
    mbarrier_init_fence();
  }
  fence_async_shared();
  cluster_sync();
  if (t == 0) {
    mbarrier_arrive_expect(box, 1024);
    tma_load_multicast(smem.tile.address(4 * rank, 0), p.maps[0], box, tma_at(0, 4 * rank), 3);
    mbarrier_arrive_expect(exchange, 256);
    bulk_to_peer(cluster_address(smem.theirs.address(0, 0), peer), smem.mine.address(0, 0), 256,
                 cluster_address(exchange, peer));
  }
  mbarrier_wait(box, 0);
  mbarrier_wait(exchange, 0);
  out.store(base + 4 + t, smem.theirs(0, t));
  for (int i = t; i < 256; i += 64) {
    u32 word = 0;
    for (int e = 0; e < 4; e++) word |= static_cast<u32>(smem.tile(i / 32, i % 32 * 4 + e)) << 8 * e;
    out.store(base + 68 + i, word);
  }
  block_sync();                                       // everyone has read theirs
  if (t == 0) mbarrier_arrive_remote(read, peer);
  mbarrier_wait(read, 0);                             // the peer has read its own: word 1 of it may change
  if (t == 0) {
    out.store(base, rank);
    out.store(base + 1, cluster_size());
    out.store(base + 2, cluster_load<u32>(cluster_address(smem.mine.address(0, 5), peer)));
    cluster_store<u32>(cluster_address(smem.theirs.address(0, 1), peer), 77 + rank);
  }
  cluster_sync();
  if (t == 0) out.store(base + 3, smem.theirs(0, 1));
}

// The same with two blocks on an SM: half the registers.
KERNEL(384, 2) probe_roles_of_two(const __grid_constant__ Probe p) {
  Global<int> out(p.arrays[0]);
  const int warp = shfl(static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) registers_shrink<24>();
  else registers_grow<104>();
  if (elect_one()) out.add(warp, 1);
}

// One warpgroup gives registers to two others; every warp elects one lane.  out: 12 ints, elections per warp
KERNEL(384, 1) probe_roles(const __grid_constant__ Probe p) {
  Global<int> out(p.arrays[0]);
  const int warp = shfl(static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) registers_shrink<24>();
  else registers_grow<240>();
  if (elect_one()) out.add(warp, 1);
}
