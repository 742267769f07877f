// warp.cuh - what the 32 lanes of a warp do together: shuffles, votes, reductions.  All live lanes must call.
#pragma once
#include "platform.cuh"

constexpr u32 all_lanes = 0xffffffffu;

#ifdef CUFLASH_EMULATED
namespace emulated {
template <class T> inline T lane_value(const u8* slots, int lane) {
  T value;
  memcpy(&value, slots + 64 * (lane & 31), sizeof(T));
  return value;
}
}
#define WHERE , emulated::Here here = emulated::Here::now()

template <class T> DEVICE T shfl(T x, int lane WHERE) {
  return emulated::lane_value<T>(emulated::warp_exchange("shfl", &x, sizeof x, nullptr, here), lane);
}
template <class T> DEVICE T shfl_xor(T x, int mask WHERE) {
  return emulated::lane_value<T>(emulated::warp_exchange("shfl_xor", &x, sizeof x, nullptr, here),
                                 emulated::self->lane ^ mask);
}
template <class T> DEVICE T shfl_down(T x, int delta WHERE) {
  const int lane = emulated::self->lane;
  return emulated::lane_value<T>(emulated::warp_exchange("shfl_down", &x, sizeof x, nullptr, here),
                                 lane + delta < 32 ? lane + delta : lane);
}
template <class T> DEVICE T shfl_up(T x, int delta WHERE) {
  const int lane = emulated::self->lane;
  return emulated::lane_value<T>(emulated::warp_exchange("shfl_up", &x, sizeof x, nullptr, here),
                                 lane >= delta ? lane - delta : lane);
}
DEVICE u32 ballot(bool mine WHERE) {
  const u32 one = mine;
  const u8* slots = emulated::warp_exchange("ballot", &one, sizeof one, nullptr, here);
  u32 votes = 0;
  for (int lane = 0; lane < 32; lane++)
    votes |= (emulated::lane_value<u32>(slots, lane) == 1 ? 1u : 0u) << lane;   // lanes that left hold ~0
  return votes;
}
DEVICE bool any(bool mine WHERE) { return ballot(mine, here) != 0; }
DEVICE bool all(bool mine WHERE) { return ballot(!mine, here) == 0; }
DEVICE void warp_sync(emulated::Here here = emulated::Here::now()) {
  emulated::warp_exchange("warp_sync", &here, 0, nullptr, here);
}
#undef WHERE
#else
template <class T> DEVICE T shfl(T x, int lane) { return __shfl_sync(all_lanes, x, lane); }
template <class T> DEVICE T shfl_xor(T x, int mask) { return __shfl_xor_sync(all_lanes, x, mask); }
template <class T> DEVICE T shfl_down(T x, int delta) {
  return __shfl_down_sync(all_lanes, x, delta);
}   // lanes past the end keep theirs
template <class T> DEVICE T shfl_up(T x, int delta) { return __shfl_up_sync(all_lanes, x, delta); }
DEVICE u32 ballot(bool mine) { return __ballot_sync(all_lanes, mine); }
DEVICE bool any(bool mine) { return __any_sync(all_lanes, mine); }
DEVICE bool all(bool mine) { return __all_sync(all_lanes, mine); }
DEVICE void warp_sync() { __syncwarp(); }   // also orders the warp's accesses to shared memory
#endif

// Reductions by butterfly: every lane gets the result, with the same rounding in every lane.  width lanes at
// a time: 32 is the warp, 4 the quad that shares the rows of an accumulator fragment.
template <int width = 32, class T> DEVICE T warp_sum(T x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) x = x + shfl_xor(x, step);
  return x;
}
template <int width = 32, class T> DEVICE T warp_max(T x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) {
    const T other = shfl_xor(x, step);
    x = other > x || x != x ? other : x;   // NaN never wins
  }
  return x;
}
template <int width = 32, class T> DEVICE T warp_min(T x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) {
    const T other = shfl_xor(x, step);
    x = other < x || x != x ? other : x;
  }
  return x;
}
