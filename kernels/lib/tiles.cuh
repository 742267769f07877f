// tiles.cuh - a tile asked for now and used later: cp.async where numbers need no conversion, else a load.
#pragma once
#include "cp_async.cuh"
#include "swizzled.cuh"

#if defined(CUFLASH_EMULATED) || __CUDA_ARCH__ >= 800
constexpr bool has_cp_async = true;
#else
constexpr bool has_cp_async = false;
#endif

// tile[r][d] = source, as acc.  All threads of the block; it is there after wait_for_tiles and a block_sync.
template <class From, int rows, int cols, int threads>
DEVICE void request_tile(Swizzled<acc, rows, cols>& tile, const void* data, const TileSource& source,
                         int thread) {
  if constexpr (has_cp_async && is_same<From, acc>) {
    if (source.by_vectors) {
      // A thread stays in its column of chunks and goes down the rows: one addition of the stride per copy.
      constexpr int width = Vec16<acc>::size, chunks = cols / width, step = threads / chunks;
      static_assert(step > 0, "request_tile: fewer threads than chunks in a row");
      const Global<acc> from(const_cast<void*>(data));
      const int first = opaque(thread), chunk = first % chunks;
      const bool is_column = first < step * chunks && chunk * width < source.cols;
      i64 index = source.base + first / chunks * source.stride + chunk * width;
#pragma unroll
      for (int row0 = 0; row0 < rows; row0 += step, index += step * source.stride) {
        const int row = row0 + first / chunks;
        const bool is_there = is_column && row < source.rows;
        const u32 n_bytes = is_there ? 16 : 0;   // the rest of the chunk is filled with zeros
        if (first < step * chunks && (rows % step == 0 || row < rows))
          cp_async(tile.address(row, chunk), from.address(is_there ? index : source.base, n_bytes), n_bytes);
      }
      cp_async_commit();
      return;
    }
  }
  load_swizzled<From, rows, cols, threads>(tile, data, source, thread);
}

// This thread's part of every tile it has asked for is there.
template <bool is_async = has_cp_async> DEVICE void wait_for_tiles() {
  if constexpr (is_async) cp_async_wait<0>();
}
