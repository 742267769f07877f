// memory.cuh - the only doors to global and shared memory.  On the device a pointer and an array; on the host they check and count.
#pragma once
#include "platform.cuh"

#ifndef CUFLASH_EMULATED

// Global memory: an array of T.  Index in elements, 64 bits.
template <class T> struct Global {
  T* data;
  DEVICE explicit Global(void* p) : data(static_cast<T*>(p)) {}
  DEVICE T load(i64 index) const { return data[index]; }
  DEVICE void store(i64 index, T value) const { data[index] = value; }
  // Vector access: V is a plain struct (uint4-like) of whole T's; the address must be a multiple of sizeof(V).
  template <class V> DEVICE V load_as(i64 index) const { return *reinterpret_cast<const V*>(data + index); }
  template <class V> DEVICE void store_as(i64 index, V value) const { *reinterpret_cast<V*>(data + index) = value; }
  DEVICE void add(i64 index, T value) const { atomicAdd(data + index, value); }
  // For the copy instructions (cp.async, TMA): the address of n_bytes that will be touched.
  DEVICE T* address(i64 index, u32 n_bytes) const { return data + index; }
};

// Shared memory: [rows][cols], a member of a kernel's struct Smem.  16-byte aligned, so sizeof(Smem) is a plain sum of
// sizes rounded up to 16 (row.shared_bytes on the host).
template <class T, int rows, int cols> struct alignas(16) Shared {
  T data[rows][cols];
  DEVICE T& operator()(int row, int col) { return data[row][col]; }
  template <class V> DEVICE V& as(int row, int col) { return *reinterpret_cast<V*>(&data[row][col]); }   // aligned vector
  DEVICE u32 address(int row, int col) const { return static_cast<u32>(__cvta_generic_to_shared(&data[row][col])); }
};

#endif
