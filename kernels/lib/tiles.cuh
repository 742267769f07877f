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
      constexpr int width = Vec16<acc>::size, chunks = cols / width;
      const Global<acc> from(const_cast<void*>(data));
#pragma unroll 4
      for (int at = opaque(thread); at < rows * chunks; at += threads) {
        const int row = at / chunks, chunk = at % chunks;
        const bool is_there = row < source.rows && chunk * width < source.cols;
        const i64 index = source.base + (is_there ? row * source.stride + chunk * width : 0);
        const u32 n_bytes = is_there ? 16 : 0;   // the rest of the chunk is filled with zeros
        cp_async(tile.address(row, chunk), from.address(index, n_bytes), n_bytes);
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
