// swizzled.cuh - tiles in shared memory with permuted 16-byte chunks: products.cuh reads without conflicts.
#pragma once
#include "args.cuh"
#include "memory.cuh"
#include "types.cuh"

// [rows, cols] in shared memory.  Chunk c of row r lies at chunk c xor ((r / Vec16::size) & mask): rows are
// used in groups of Vec16::size, so the xor must change from group to group and not from row to row.
template <class T, int n_rows, int n_cols> struct Swizzled {
  static constexpr int rows = n_rows, cols = n_cols, width = Vec16<T>::size;
  static constexpr int mask = cols / width >= 8 ? 7 : cols / width - 1;
  static_assert(cols % width == 0 && (cols / width) % (mask + 1) == 0 && (mask & (mask + 1)) == 0,
                "Swizzled: cols");
  Shared<T, n_rows, n_cols> cells;
  DEVICE Vec16<T>& chunk(int row, int at) { return keyed(row, row / width & mask, at); }
  // key = row / width & mask: the products keep it, so that an address costs one xor, not four instructions.
  DEVICE Vec16<T>& keyed(int row, int key, int at) {
    return cells.template as<Vec16<T>>(row, (at ^ key) * width);
  }
  DEVICE u32 address(int row, int at) { return cells.address(row, (at ^ (row / width & mask)) * width); }
};

// n numbers moved by one instruction.
template <class T, int n> struct alignas(sizeof(T) * n) Pack {
  T item[n];
};

// Where a tile lies: element (row, d) at base + row * stride + d, for row < rows, d < cols; the rest is zero.
struct TileSource {
  i64 base;
  i64 stride;
  i32 rows;
  i32 cols;
  bool by_vectors;   // address, strides and cols allow whole chunks
};

// The tile of a head from sequence row `row` and column d0 on.  row0: where the sequence starts in the array.
DEVICE TileSource tile_source(const Tensor& tensor, i64 batch, i64 row0, i64 head, i32 row, i32 row_end,
                              i32 d0, i64 dim) {
  const i64 base = batch * tensor.batch + (row0 + row) * tensor.row + head * tensor.head + d0;
  return {base, tensor.row, row_end - row, static_cast<i32>(clamp<i64>(dim - d0, 0, 1 << 20)),
          tensor.vector_bytes == 16};
}

// x, of which the compiler must not know where it comes from.  A loop over tiles would otherwise keep every
// offset of every load in a register of its own, for the whole loop: more registers than the products have.
DEVICE int opaque(int x) {
#ifndef CUFLASH_EMULATED
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// tile[r][d] = source, as acc.  All threads of the block; the caller synchronises.
template <class From, int rows, int cols, int threads>
DEVICE void load_swizzled(Swizzled<acc, rows, cols>& tile, const void* data, const TileSource& source,
                          int thread) {
  constexpr int width = Vec16<acc>::size, chunks = cols / width, n = rows * chunks;
  constexpr int steps = (n + threads - 1) / threads,
                batch = steps < 4 ? steps : 4;   // loads in flight before the first store
  const Global<From> from(const_cast<void*>(data));
  thread = opaque(thread);
  if (sizeof(From) <= sizeof(acc) && source.by_vectors) {
#pragma unroll 1
    for (int at0 = thread; at0 < n; at0 += batch * threads) {
      Pack<From, width> loaded[batch];
#pragma unroll
      for (int s = 0; s < batch; s++) {
        const int at = at0 + s * threads, row = at / chunks, d = at % chunks * width;
        loaded[s] = {};
        if (at < n && row < source.rows && d < source.cols)
          loaded[s] = from.template load_as<Pack<From, width>>(source.base + row * source.stride + d);
      }
#pragma unroll
      for (int s = 0; s < batch; s++) {
        const int at = at0 + s * threads;
        Vec16<acc> chunk;
#pragma unroll
        for (int e = 0; e < width; e++) chunk.item[e] = convert<acc>(loaded[s].item[e]);
        if (at < n) tile.chunk(at / chunks, at % chunks) = chunk;
      }
    }
  } else {
#pragma unroll 1
    for (int at = thread; at < n; at += threads) {
      const int row = at / chunks, d = at % chunks * width;
      Vec16<acc> chunk;
#pragma unroll
      for (int e = 0; e < width; e++) {
        chunk.item[e] = 0;
        if (row < source.rows && d + e < source.cols)
          chunk.item[e] = convert<acc>(from.load(source.base + row * source.stride + d + e));
      }
      tile.chunk(row, at % chunks) = chunk;
    }
  }
}

// Atomically add 16 bytes: one instruction from sm_90 on.
DEVICE void add_chunk(const Global<double>& to, i64 index, Vec16<double> value) {
  to.add(index, value.item[0]);
  to.add(index + 1, value.item[1]);
}
DEVICE void add_chunk(const Global<float>& to, i64 index, Vec16<float> value) {
#if !defined(CUFLASH_EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to.address(index, 16)),
               "f"(value.item[0]), "f"(value.item[1]), "f"(value.item[2]), "f"(value.item[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; e++) to.add(index + e, value.item[e]);
#endif
}
