// accumulators.cuh - what a warp holds of a wgmma or mma.sync product, stored as rows of an array.
//
// x[4 c + 2 half + e] is row lane / 4 + 8 half, column 8 c + 2 (lane % 4) + e.
#pragma once
#include "matrices.cuh"

// target rows row0 .. + 16 = x * factor; rows from `existing` on get zeros, whatever x holds.
// By 16 bytes where To has 16 bits: of 4 pieces of 8 columns a lane collects one.  By 4 bytes in what is left.
template <class To, int n>
DEVICE void store_rows(const float (&x)[n], float factor, void* data, const TileSource& target, int row0,
                       int existing, int lane) {
  const Global<To> to(data);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + lane / 4 + 8 * half;
    const i64 index = target.base + row * target.stride;
    const auto value = [&](int c, int e) {
      return row < existing ? x[4 * c + 2 * half + e] * factor : 0.f;
    };
    if constexpr (sizeof(To) == 2 && n % 8 == 0) {
      if (target.by_vectors) {
        constexpr int whole = n / 16 * 4;
#pragma unroll
        for (int c = 0; c < whole; c += 4) {
          u32 chunk[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) chunk[m] = pack<To>(value(c + m, 0), value(c + m, 1));
          transpose_quad(chunk, lane);
          const int d = (c + lane % 4) * 8;
          if (row < target.rows && d < target.cols)
            to.store_as(index + d, Pack<u32, 4>{{chunk[0], chunk[1], chunk[2], chunk[3]}});
        }
#pragma unroll
        for (int c = whole; c < n / 4; ++c) {
          const int d = 8 * c + 2 * (lane % 4);
          if (row < target.rows && d < target.cols)
            to.store_as(index + d, Pack<u32, 1>{{pack<To>(value(c, 0), value(c, 1))}});
        }
        continue;
      }
    }
#pragma unroll
    for (int c = 0; c < n / 4; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = 8 * c + 2 * (lane % 4) + e;
        if (row < target.rows && d < target.cols) to.store(index + d, convert<To>(value(c, e)));
      }
  }
}

// sums += x, atomically, where rows and columns exist.  By 16 bytes: of 2 pieces a lane collects half of one.
template <int n>
DEVICE void add_rows(const float (&x)[n], void* data, const TileSource& target, int row0, int lane) {
  const Global<float> to(data);
  const bool odd = lane & 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + lane / 4 + 8 * half;
    const i64 index = target.base + row * target.stride;
#pragma unroll
    for (int c = 0; c < n / 4; c += 2) {
      const int l = 4 * c + 2 * half, r = l + 4;   // this lane's two numbers of the left and the right piece
      const float got0 = shfl_xor(odd ? x[l] : x[r], 1), got1 = shfl_xor(odd ? x[l + 1] : x[r + 1], 1);
      const Vec16<float> four =
          odd ? Vec16<float>{{got0, got1, x[r], x[r + 1]}} : Vec16<float>{{x[l], x[l + 1], got0, got1}};
      const int d = 8 * (c + odd) + lane % 4 / 2 * 4;
      if (row >= target.rows) continue;
      if (target.by_vectors && d < target.cols) {
        to.add_as(index + d, four);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (d + e < target.cols) to.add(index + d + e, four.item[e]);
      }
    }
  }
}
