// tiles.cuh - a tile of rows from global to shared memory, converted to acc, zeros where there is nothing.
#pragma once
#include "args.cuh"
#include "memory.cuh"
#include "types.cuh"

// Rows [0, n_rows) x columns [0, n_cols) of `source` from element `first` on; the tile is rows x cols, its rest becomes 0.
// vector: rows are 16-byte aligned and n_cols is a whole number of 16-byte chunks (Tensor::vector_bytes).
template <int rows, int cols, int threads, class T, int pitch>
DEVICE void load_tile(Shared<acc, rows, pitch>& tile, Global<T> source, i64 first, i64 row_stride,
                      i32 n_rows, i32 n_cols, bool vector, int thread) {
  constexpr int size = Vec16<T>::size, out_size = Vec16<acc>::size;   // a chunk: 16 bytes of T
  if (vector) {
    for (int n = thread; n < rows * (cols / size); n += threads) {
      const int row = n / (cols / size), col = n % (cols / size) * size;
      Vec16<T> chunk = {};
      if (row < n_rows && col < n_cols) chunk = source.template load_as<Vec16<T>>(first + row * row_stride + col);
#pragma unroll
      for (int part = 0; part < size; part += out_size) {
        Vec16<acc> numbers;
#pragma unroll
        for (int e = 0; e < out_size; ++e) numbers.item[e] = convert<acc>(chunk.item[part + e]);
        tile.template as<Vec16<acc>>(row, col + part) = numbers;
      }
    }
  } else {
    for (int n = thread; n < rows * cols; n += threads) {
      const int row = n / cols, col = n % cols;
      acc number = 0;
      if (row < n_rows && col < n_cols) number = convert<acc>(source.load(first + row * row_stride + col));
      tile(row, col) = number;
    }
  }
}
