// memory.cuh - the only doors to global and shared memory.  On the device a pointer and an array; on the host
// they check and count.
#pragma once
#include "platform.cuh"

#ifndef CUFLASH_EMULATED

// Global memory: an array of T.  Index in elements, 64 bits.
template <class T> struct Global {
  T* data;
  DEVICE explicit Global(void* p) : data(static_cast<T*>(p)) {}
  DEVICE T load(i64 index) const { return data[index]; }
  DEVICE void store(i64 index, T value) const { data[index] = value; }
  // Vector access: V is a plain struct (uint4-like) of whole T's; the address must be a multiple of
  // sizeof(V).
  template <class V> DEVICE V load_as(i64 index) const { return *reinterpret_cast<const V*>(data + index); }
  template <class V> DEVICE void store_as(i64 index, V value) const {
    *reinterpret_cast<V*>(data + index) = value;
  }
  DEVICE void add(i64 index, T value) const { atomicAdd(data + index, value); }
  // The value before.
  DEVICE T fetch_add(i64 index, T value) const { return atomicAdd(data + index, value); }
  // V of 4 floats at a multiple of 16 bytes: each is added, by one instruction on sm_90.
  template <class V> DEVICE void add_as(i64 index, V value) const {
    static_assert(sizeof(T) == 4 && sizeof(V) == 16, "add_as: 4 floats");
    const float* x = reinterpret_cast<const float*>(&value);
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(data + index)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; e++) atomicAdd(data + index + e, x[e]);
#endif
  }
  // The same; where `stores` it takes the place of what was there.  Without a branch; sm_90.
  template <class V> DEVICE void store_or_add_as(bool stores, i64 index, V value) const {
    static_assert(sizeof(T) == 4 && sizeof(V) == 16, "store_or_add_as: 4 floats");
    const float* x = reinterpret_cast<const float*>(&value);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.f32 [%0], {%1, %2, %3, %4}; "
                 "@!p red.global.add.v4.f32 [%0], {%1, %2, %3, %4}; }"
                 :: "l"(__cvta_generic_to_global(data + index)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]),
                    "r"(static_cast<u32>(stores))
                 : "memory");
  }
  // Turns of blocks (T is int): wait until the number is `value`, and what was written before the add that made
  // it so may be read; add, after everything written so far.  One thread of a block waits for a block with a
  // smaller number, which has started: blocks start in order.
  DEVICE void wait_for(i64 index, T value) const {
    T seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                    : "=r"(seen) : "l"(__cvta_generic_to_global(data + index)) : "memory");
    while (seen != value);
  }
  DEVICE void add_release(i64 index, T value) const {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;"
                 :: "l"(__cvta_generic_to_global(data + index)), "r"(value) : "memory");
  }
  // For the copy instructions (cp.async, TMA): the address of n_bytes that will be touched.
  DEVICE T* address(i64 index, u32 n_bytes) const { return data + index; }
};

// Shared memory: [rows][cols], a member of a kernel's struct Smem.  16-byte aligned, so sizeof(Smem) is a
// plain sum of sizes rounded up to 16 (row.shared_bytes on the host).
template <class T, int rows, int cols> struct alignas(16) Shared {
  T data[rows][cols];
  DEVICE T& operator()(int row, int col) { return data[row][col]; }
  // V at an address that is a multiple of sizeof(V).
  template <class V> DEVICE V& as(int row, int col) { return *reinterpret_cast<V*>(&data[row][col]); }
  DEVICE u32 address(int row, int col) const {
    return static_cast<u32>(__cvta_generic_to_shared(&data[row][col]));
  }
};

#else

// The same two types with checks: index inside the array that was passed in, vectors aligned, bytes counted
// by array.
template <class T> struct Global {
  using Here = emulated::Here;
  T* data;
  const emulated::Buffer* buffer;
  CHECKED explicit Global(void* p) : data(static_cast<T*>(p)), buffer(emulated::find_buffer(p)) {}
  template <class V> CHECKED V* at(i64 index, Here here) const {
    return reinterpret_cast<V*>(emulated::checked_global(buffer, data, index * static_cast<i64>(sizeof(T)),
                                                         sizeof(V), sizeof(V), here));
  }
  template <class V> CHECKED V load_as(i64 index, Here here = Here::now()) const {
    V* p = at<V>(index, here);
    emulated::count_read(buffer, p, sizeof(V));
    return *p;
  }
  template <class V> CHECKED void store_as(i64 index, V value, Here here = Here::now()) const {
    V* p = at<V>(index, here);
    emulated::count_write(buffer, p, sizeof(V));
    *p = value;
  }
  CHECKED T load(i64 index, Here here = Here::now()) const { return load_as<T>(index, here); }
  CHECKED void store(i64 index, T value, Here here = Here::now()) const { store_as<T>(index, value, here); }
  CHECKED T fetch_add(i64 index, T value, Here here = Here::now()) const {
    T* p = at<T>(index, here);
    emulated::count_add(buffer, p, sizeof(T));
    return emulated::atomic_add(p, value);
  }
  CHECKED void add(i64 index, T value, Here here = Here::now()) const { fetch_add(index, value, here); }
  template <class V> CHECKED void add_as(i64 index, V value, Here here = Here::now()) const {
    static_assert(sizeof(T) == 4 && sizeof(V) == 16, "add_as: 4 floats");
    V* p = at<V>(index, here);
    emulated::count_add(buffer, p, sizeof(V));
    for (int e = 0; e < 4; e++)
      emulated::atomic_add(reinterpret_cast<float*>(p) + e, reinterpret_cast<const float*>(&value)[e]);
  }
  template <class V>
  CHECKED void store_or_add_as(bool stores, i64 index, V value, Here here = Here::now()) const {
    if (stores) store_as(index, value, here);
    else add_as(index, value, here);
  }
  void wait_for(i64 index, T value, Here here = Here::now()) const {
    T* p = at<T>(index, here);
    emulated::count_read(buffer, p, sizeof(T));   // once, however long it takes
    while (__atomic_load_n(p, __ATOMIC_ACQUIRE) != value) emulated::pause(here);
  }
  void add_release(i64 index, T value, Here here = Here::now()) const { fetch_add(index, value, here); }
  // Counted by the instruction that copies.
  CHECKED T* address(i64 index, u32 n_bytes, Here here = Here::now()) const {
    emulated::self->hint_address = data + index;
    emulated::self->hint_buffer = buffer;
    if (n_bytes != 0)
      emulated::checked_global(buffer, data, index * static_cast<i64>(sizeof(T)), n_bytes, 1, here);
    return data + index;
  }
};

template <class T, int rows, int cols> struct alignas(16) Shared {
  using Here = emulated::Here;
  T data[rows][cols];
  template <class V> CHECKED V& as(int row, int col, Here here = Here::now()) {
    T* p = &data[0][0] + static_cast<i64>(row) * cols + col;
    if (__builtin_expect(row < 0 || row >= rows || col < 0 ||
                             col + static_cast<int>(sizeof(V) / sizeof(T)) > cols ||
                             reinterpret_cast<u64>(p) % sizeof(V) != 0,
                         0))
      emulated::bad_shared(row, col, rows, cols, sizeof(V) / sizeof(T), p, sizeof(V), here);
    emulated::count_shared(p, sizeof(V));
    return *reinterpret_cast<V*>(p);
  }
  CHECKED T& operator()(int row, int col, Here here = Here::now()) { return as<T>(row, col, here); }
  CHECKED u32 address(int row, int col,
                      Here here = Here::now()) {   // checked and counted by the instruction that uses it
    if (row < 0 || row > rows || col < 0 || col > cols)
      emulated::bad_shared(row, col, rows, cols, 0, data, 1, here);
    return emulated::shared_address(&data[0][0] + static_cast<i64>(row) * cols + col);
  }
};

#endif
