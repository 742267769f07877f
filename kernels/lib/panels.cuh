// panels.cuh - a tile of 16-bit numbers as TMA writes it and wgmma reads it: panels of 128 bytes.   sm_90a
//
// PanelTile<rows, cols>: the columns are cut into panels of 64 numbers; a panel is [rows][64], chunk c (16
// bytes) of row r lies at c xor (r % 8): the 128-byte swizzle.  Where cols is no multiple of 64, panels are
// 32 (64-byte swizzle, c xor (r / 2 % 4)) or 16 numbers wide (32-byte swizzle, c xor (r / 4 % 2)).
// Its tensor map has the box (panel_cols, rows, 1, 1) and the swizzle line_bytes: one load a panel.
//
//   operand                         descriptor          a k16 step
//   Q, K of S = Q K^T               descriptor_K        16 columns     rows are M or N, columns are k
//   V of O = P V                    descriptor_MN       16 rows        columns are N, rows are k
//
// Accumulators: wgmma's float d[N / 2] of a thread is the Fragment<N> of lib/fragments.cuh for a warp of 16
// rows, so registers_of(S) is what wgmma takes and S is what modify_scores, drop and finish take.
#pragma once
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "wgmma.cuh"

// panel: numbers in a line, 0: as wide as it goes.
template <int n_rows_, int n_cols, int panel = 0> struct alignas(1024) PanelTile {
  static constexpr int rows = n_rows_, cols = n_cols;
  static constexpr int panel_cols = panel ? panel : cols % 64 == 0 ? 64 : cols % 32 == 0 ? 32 : 16;
  static constexpr int n_panels = cols / panel_cols, line_bytes = 2 * panel_cols;
  static constexpr int panel_bytes = rows * line_bytes, n_bytes = n_panels * panel_bytes;
  static constexpr Swizzle swizzle =
      panel_cols == 64 ? Swizzle::bytes_128 : panel_cols == 32 ? Swizzle::bytes_64 : Swizzle::bytes_32;
  static_assert(cols % 16 == 0 && panel_bytes % 1024 == 0, "PanelTile: a panel is whole swizzle patterns");

  Shared<elem, n_panels * rows, panel_cols> cells;

  // The 8 numbers from column 8 * at on.
  DEVICE static int place(int row, int at) {   // of the chunk in its panel's row
    return (at % (panel_cols / 8)) ^ (row / (8 / (panel_cols / 8)) % (panel_cols / 8));
  }
  DEVICE Vec16<elem>& chunk(int row, int at) {
    return cells.template as<Vec16<elem>>(at / (panel_cols / 8) * rows + row, place(row, at) * 8);
  }
  DEVICE u32 address(int row, int at) {
    return cells.address(at / (panel_cols / 8) * rows + row, place(row, at) * 8);
  }
  DEVICE u32 address() { return cells.address(0, 0); }

  // Descriptors.  k: the k16 step.  row0 (K-major): the first row, a multiple of 8; of a warpgroup's A 64
  // times its number.  Only the low word depends on any of them, so a step is one 32-bit addition.
  DEVICE u64 descriptor_K(int k, int row0 = 0) {
    constexpr int steps = panel_cols / 16;   // in a panel
    return descriptor((k / steps * panel_bytes + k % steps * 32 + row0 * line_bytes) / 16, 16);
  }
  DEVICE u64 descriptor_MN(int k) { return descriptor(k * 16 * line_bytes / 16, panel_bytes); }
  DEVICE u64 descriptor(u32 step, u32 leading_bytes) {   // step in 16 bytes
    const u64 first = wgmma_descriptor(address(), leading_bytes, 8 * line_bytes, swizzle);
    return (first & 0xffffffff00000000ull) | (static_cast<u32>(first) + step);
  }

  // All panels, by one thread, from a map over (column, row, head, batch).  n_bytes are credited to the
  // mbarrier: expect them before.
  DEVICE void load(const TensorMap& map, u32 mbarrier, int row, int head, int batch, u64 policy = 0) {
#pragma unroll
    for (int p = 0; p < n_panels; ++p) {
      const TmaAt at = tma_at(p * panel_cols, row, head, batch);
      const u32 to = cells.address(p * rows, 0);
      if (policy != 0) tma_load_hint(to, map, mbarrier, at, policy);
      else tma_load(to, map, mbarrier, at);
    }
  }
  // n_stored rows from row0 on, by one thread, through a map with the box (panel_cols, n_stored, 1, 1); the
  // caller commits.  Writers: fence_async_shared() and a barrier before.
  DEVICE void store(const TensorMap& map, int row0, int row, int head, int batch) {
#pragma unroll
    for (int p = 0; p < n_panels; ++p)
      tma_store(map, cells.address(p * rows + row0, 0), tma_at(p * panel_cols, row, head, batch));
  }

  // Zeros in rows [from, rows), by `n` threads of which this is `thread`.  A V or dO that TMA read past a
  // sequence's end meets weights of 0 there, and 0 x NaN is NaN.  Then fence_async_shared() and a barrier.
  DEVICE void clear_rows(int from, int thread, int n) {
    constexpr int chunks = cols / 8;
    for (int at = from * chunks + thread; at < rows * chunks; at += n) chunk(at / chunks, at % chunks) = {};
  }
};

// The two views of an accumulator.
template <class Fragment> DEVICE float (&registers_of(Fragment& x))[Fragment::n * 4] {
  static_assert(sizeof(x.at) == sizeof(float) * Fragment::n * 4, "registers_of: a warp of 16 rows");
  return reinterpret_cast<float (&)[Fragment::n * 4]>(x.at);
}

// tile rows row0 .. + 16, a warp's, = x as To (16 bits), by stmatrix.
template <class To, class Fragment, class Tile>
DEVICE void store_panels(Fragment& x, Tile& tile, int row0, int lane) {
  static_assert(Fragment::n * 8 == Tile::cols, "store_panels: the fragment is as wide as the tile");
#pragma unroll
  for (int c = 0; c < Fragment::n; c += 2) {
    const float (&left)[4] = x.at[0][c], (&right)[4] = x.at[0][c + 1];
    const u32 packed[4] = {pack<To>(left[0], left[1]), pack<To>(left[2], left[3]),
                           pack<To>(right[0], right[1]), pack<To>(right[2], right[3])};
    stmatrix_x4(tile.address(row0 + lane % 16, c + lane / 16), packed);
  }
}
