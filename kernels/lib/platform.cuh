// platform.cuh - the words a kernel is written in.  Device: what NVRTC lacks.  Host: the emulator's header, included here.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

#ifdef CUFLASH_EMULATED
#include "emulated.cuh"
#else
#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks_per_sm) extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm)
// For a kernel whose blocks run as clusters of `cluster` along x: CLUSTER_KERNEL(n_threads, 1, 2, bwd_07_cluster)(const ... args) { }
#define CLUSTER_KERNEL(threads, blocks_per_sm, cluster, name) \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, blocks_per_sm) name
#define SHARED_MEMORY(type, name) extern __shared__ __align__(1024) u8 cuflash_shared[]; type& name = *reinterpret_cast<type*>(cuflash_shared)
#endif
