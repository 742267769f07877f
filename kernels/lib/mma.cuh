// mma.cuh - mma.sync: a warp multiplies 16 x k by k x 8 and adds to 16 x 8, everything in registers.
//
// Fragments, with g = lane / 4 and t = lane % 4 (a pair of 16-bit numbers in a register: the lower index in
// the low half):
//   D, C   float d[4]   rows g, g + 8; columns 2t, 2t + 1          d[0], d[1] row g     d[2], d[3] row g + 8
//   A k16  u32 a[4]     a[0] row g, k 2t, 2t + 1   a[1] row g + 8   a[2] row g, k + 8   a[3] row g + 8, k + 8
//   B k16  u32 b0, b1   b0 k 2t, 2t + 1 of column g   b1 k + 8
//   tf32 k8             a[0] row g, k t   a[1] row g + 8   a[2] row g, k t + 4   a[3] row g + 8, k t + 4
//                       b0 k t, b1 k t + 4 of column g
//   f16 k8 (sm_75)      a0 row g, k 2t, 2t + 1   a1 row g + 8;   b0 k 2t, 2t + 1
// So the D of two neighbouring n8 tiles, packed, is the A of one k16 step: P needs no trip through memory.
#pragma once
#include "types.cuh"

// Of a float mma_tf32_k8 takes the first 11 bits and cuts the others: the number is first made larger by half
// a unit of its last bit, within a third.  Numbers of 11 bits stay what they are, NaN and infinity too.
DEVICE float before_tf32(float x) { return x * (1 + 1.f / 3072); }

#ifdef CUFLASH_EMULATED
#define WHERE , emulated::Here here = emulated::Here::now()
template <class T> DEVICE u32 pack(float low, float high) {
  return convert<T>(low).bits | static_cast<u32>(convert<T>(high).bits) << 16;
}
DEVICE u32 to_tf32(float x) {   // 10 bits of mantissa, ties away
  return x != x ? 0x7fffffffu : (__builtin_bit_cast(u32, x) + 0x1000) & 0xffffe000u;
}
template <class T> DEVICE void mma_k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1 WHERE) {
  const u32 b[2] = {b0, b1};
  emulated::multiply_fragments(is_same<T, f16> ? emulated::Mma::f16_k16 : emulated::Mma::bf16_k16, d, a, b,
                               here);
}
DEVICE void mma_tf32_k8(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1 WHERE) {
  const u32 b[2] = {b0, b1};
  emulated::multiply_fragments(emulated::Mma::tf32_k8, d, a, b, here);
}
DEVICE void mma_f16_k8(float (&d)[4], u32 a0, u32 a1, u32 b0 WHERE) {
  const u32 a[2] = {a0, a1};
  emulated::multiply_fragments(emulated::Mma::f16_k8, d, a, &b0, here);
}
#undef WHERE
#else
// Two 16-bit numbers in a register, low in the low half.
template <class T> DEVICE u32 pack(float low, float high) {
  static_assert(is_same<T, f16> || is_same<T, bf16>, "pack: 16-bit types");
  u32 r;
  if constexpr (is_same<T, f16>) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;"
        : "=r"(r)
        : "f"(high), "f"(low));   // the first source goes to the high half
#else
    r = float_to_f16(low).bits | static_cast<u32>(float_to_f16(high).bits) << 16;
#endif
  } else {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    r = float_to_bf16(low).bits | static_cast<u32>(float_to_bf16(high).bits) << 16;
#endif
  }
  return r;
}
DEVICE u32 to_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
DEVICE void mma_f16_k8(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
template <class T> DEVICE void mma_k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(is_same<T, f16> || is_same<T, bf16>, "mma_k16: 16-bit types");
  if constexpr (is_same<T, f16>) {
#if __CUDA_ARCH__ < 800   // in two steps of k8, whose operands are halves of k16's
    mma_f16_k8(d, a[0], a[1], b0);
    mma_f16_k8(d, a[2], a[3], b1);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
  } else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_tf32_k8(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
