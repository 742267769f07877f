// wgmma.cuh - a warpgroup (4 warps) multiplies straight from shared memory: 64 x 16 by 16 x N.   sm_90a
//
// N    8 to 256 in steps of 8.
// D    float d[N / 2] per thread: warp w of the group holds rows 16 w to 16 w + 15; d[4 j + 2 h + e] is row
//      g + 8 h, column 8 j + 2 t + e with g = lane / 4, t = lane % 4: mma.sync's D, repeated over j.
// A    in shared memory (a descriptor), or in registers: u32 a[4] as for mma_k16 (lib/mma.cuh), the rows of
//      the thread's warp.
// B    in shared memory.
// Both operands in shared memory are K-major (a line holds consecutive k), or with trans = 1 M- or N-major.
//
//   wgmma_fence();                      // registers of D and A were touched by ordinary code
//   for k:  wgmma<elem>(S, Q + k * step, K + k * step, k > 0);   // false: D = A B, true: D += A B
//   wgmma_commit();
//   wgmma_wait<0>();                    // until here D, A and the shared operands may not be touched
//
// Shared operands written by ordinary stores need fence_async_shared() by every writer and a barrier before
// the wgmma.
#pragma once
#include "types.cuh"

// Layouts of an operand: lines of 128, 64 or 32 bytes whose 16-byte chunks are xor-ed with the line number
// (TMA writes the same), or 8 x 16-byte core matrices.
enum class Swizzle : u32 { none = 0, bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };

// Swizzled K-major: stride_bytes from 8 lines to the next 8 (8 * line, when packed); leading_bytes is unused.
// Swizzled, trans: stride_bytes from 8 k to the next 8 k; leading_bytes from one line-wide panel of M or N to
// the next.  To step along k add to the descriptor: bytes / 16 (a k16 step in a K-major line: 2; 16 lines of
// 128 bytes: 128).
DEVICE u64 wgmma_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, Swizzle swizzle) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>((leading_bytes & 0x3ffff) >> 4) << 16 |
         static_cast<u64>((stride_bytes & 0x3ffff) >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

#ifdef CUFLASH_EMULATED
#define WHERE , emulated::Here here = emulated::Here::now()
template <class T, int trans_a = 0, int trans_b = 0, int registers>
DEVICE void wgmma(float (&d)[registers], u64 a, u64 b, bool accumulate WHERE) {
  static_assert(registers % 4 == 0 && registers <= 128, "wgmma: N is a multiple of 8, at most 256");
  emulated::product_issue(
      {d, nullptr, a, b, 2 * registers, is_same<T, bf16>, trans_a != 0, trans_b != 0, accumulate}, here);
}
template <class T, int trans_b = 0, int registers>
DEVICE void wgmma(float (&d)[registers], const u32 (&a)[4], u64 b, bool accumulate WHERE) {
  static_assert(registers % 4 == 0 && registers <= 128, "wgmma: N is a multiple of 8, at most 256");
  emulated::product_issue({d, a, 0, b, 2 * registers, is_same<T, bf16>, false, trans_b != 0, accumulate},
                          here);
}
DEVICE void wgmma_fence() { emulated::product_fence(); }
DEVICE void wgmma_commit() { emulated::product_commit(); }
template <int n_pending> DEVICE void wgmma_wait(emulated::Here here = emulated::Here::now()) {
  emulated::product_wait(n_pending, here);
}
template <class T> DEVICE void pin(T&) {}
DEVICE u32 moved(u32 x) { return x; }
DEVICE void hold_before_wait(float, u32) {}
template <int count> DEVICE void registers_shrink(emulated::Here here = emulated::Here::now()) {
  emulated::set_registers(count, false, here);
}
template <int count> DEVICE void registers_grow(emulated::Here here = emulated::Here::now()) {
  emulated::set_registers(count, true, here);
}
#undef WHERE
#else
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n_pending> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n_pending) : "memory");
}
// No instruction: the compiler may not move uses of x across it.
DEVICE void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void pin(u32& x) { asm volatile("" : "+r"(x)::"memory"); }
// x in another register: what is made while a product is in flight may not be its operand's, and becomes the
// next one's this way.  (An assignment would be optimised away, and the products serialised: C7513.)
DEVICE u32 moved(u32 x) {
  u32 y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// A store that never happens (row sums are not negative) but needs every exponential before the wait that
// follows it: without it ptxas moves the softmax behind the wait.  Measure with and without.
DEVICE void hold_before_wait(float row_sum, u32 any_shared_address) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.b32 [%1], 0; }" ::"f"(row_sum),
               "r"(any_shared_address)
               : "memory");
}
// setmaxnreg, by all four warps of a group: a multiple of 8 from 24 to 256.  Growing waits for what others
// have given back.
template <int count> DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// The instruction names every register of D: %0 to %(R - 1) in its text and "+f"(d[0]) to "+f"(d[R - 1]) as
// operands. WGMMA_TEXT_R and WGMMA_D_R grow by four registers from one R to the next.
#define WGMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_TEXT_4 "%0, %1, %2, %3"
#define WGMMA_D_4 WGMMA_FOUR(0)
#define WGMMA_TEXT_8 WGMMA_TEXT_4 ", %4, %5, %6, %7"
#define WGMMA_D_8 WGMMA_D_4, WGMMA_FOUR(4)
#define WGMMA_TEXT_12 WGMMA_TEXT_8 ", %8, %9, %10, %11"
#define WGMMA_D_12 WGMMA_D_8, WGMMA_FOUR(8)
#define WGMMA_TEXT_16 WGMMA_TEXT_12 ", %12, %13, %14, %15"
#define WGMMA_D_16 WGMMA_D_12, WGMMA_FOUR(12)
#define WGMMA_TEXT_20 WGMMA_TEXT_16 ", %16, %17, %18, %19"
#define WGMMA_D_20 WGMMA_D_16, WGMMA_FOUR(16)
#define WGMMA_TEXT_24 WGMMA_TEXT_20 ", %20, %21, %22, %23"
#define WGMMA_D_24 WGMMA_D_20, WGMMA_FOUR(20)
#define WGMMA_TEXT_28 WGMMA_TEXT_24 ", %24, %25, %26, %27"
#define WGMMA_D_28 WGMMA_D_24, WGMMA_FOUR(24)
#define WGMMA_TEXT_32 WGMMA_TEXT_28 ", %28, %29, %30, %31"
#define WGMMA_D_32 WGMMA_D_28, WGMMA_FOUR(28)
#define WGMMA_TEXT_36 WGMMA_TEXT_32 ", %32, %33, %34, %35"
#define WGMMA_D_36 WGMMA_D_32, WGMMA_FOUR(32)
#define WGMMA_TEXT_40 WGMMA_TEXT_36 ", %36, %37, %38, %39"
#define WGMMA_D_40 WGMMA_D_36, WGMMA_FOUR(36)
#define WGMMA_TEXT_44 WGMMA_TEXT_40 ", %40, %41, %42, %43"
#define WGMMA_D_44 WGMMA_D_40, WGMMA_FOUR(40)
#define WGMMA_TEXT_48 WGMMA_TEXT_44 ", %44, %45, %46, %47"
#define WGMMA_D_48 WGMMA_D_44, WGMMA_FOUR(44)
#define WGMMA_TEXT_52 WGMMA_TEXT_48 ", %48, %49, %50, %51"
#define WGMMA_D_52 WGMMA_D_48, WGMMA_FOUR(48)
#define WGMMA_TEXT_56 WGMMA_TEXT_52 ", %52, %53, %54, %55"
#define WGMMA_D_56 WGMMA_D_52, WGMMA_FOUR(52)
#define WGMMA_TEXT_60 WGMMA_TEXT_56 ", %56, %57, %58, %59"
#define WGMMA_D_60 WGMMA_D_56, WGMMA_FOUR(56)
#define WGMMA_TEXT_64 WGMMA_TEXT_60 ", %60, %61, %62, %63"
#define WGMMA_D_64 WGMMA_D_60, WGMMA_FOUR(60)
#define WGMMA_TEXT_68 WGMMA_TEXT_64 ", %64, %65, %66, %67"
#define WGMMA_D_68 WGMMA_D_64, WGMMA_FOUR(64)
#define WGMMA_TEXT_72 WGMMA_TEXT_68 ", %68, %69, %70, %71"
#define WGMMA_D_72 WGMMA_D_68, WGMMA_FOUR(68)
#define WGMMA_TEXT_76 WGMMA_TEXT_72 ", %72, %73, %74, %75"
#define WGMMA_D_76 WGMMA_D_72, WGMMA_FOUR(72)
#define WGMMA_TEXT_80 WGMMA_TEXT_76 ", %76, %77, %78, %79"
#define WGMMA_D_80 WGMMA_D_76, WGMMA_FOUR(76)
#define WGMMA_TEXT_84 WGMMA_TEXT_80 ", %80, %81, %82, %83"
#define WGMMA_D_84 WGMMA_D_80, WGMMA_FOUR(80)
#define WGMMA_TEXT_88 WGMMA_TEXT_84 ", %84, %85, %86, %87"
#define WGMMA_D_88 WGMMA_D_84, WGMMA_FOUR(84)
#define WGMMA_TEXT_92 WGMMA_TEXT_88 ", %88, %89, %90, %91"
#define WGMMA_D_92 WGMMA_D_88, WGMMA_FOUR(88)
#define WGMMA_TEXT_96 WGMMA_TEXT_92 ", %92, %93, %94, %95"
#define WGMMA_D_96 WGMMA_D_92, WGMMA_FOUR(92)
#define WGMMA_TEXT_100 WGMMA_TEXT_96 ", %96, %97, %98, %99"
#define WGMMA_D_100 WGMMA_D_96, WGMMA_FOUR(96)
#define WGMMA_TEXT_104 WGMMA_TEXT_100 ", %100, %101, %102, %103"
#define WGMMA_D_104 WGMMA_D_100, WGMMA_FOUR(100)
#define WGMMA_TEXT_108 WGMMA_TEXT_104 ", %104, %105, %106, %107"
#define WGMMA_D_108 WGMMA_D_104, WGMMA_FOUR(104)
#define WGMMA_TEXT_112 WGMMA_TEXT_108 ", %108, %109, %110, %111"
#define WGMMA_D_112 WGMMA_D_108, WGMMA_FOUR(108)
#define WGMMA_TEXT_116 WGMMA_TEXT_112 ", %112, %113, %114, %115"
#define WGMMA_D_116 WGMMA_D_112, WGMMA_FOUR(112)
#define WGMMA_TEXT_120 WGMMA_TEXT_116 ", %116, %117, %118, %119"
#define WGMMA_D_120 WGMMA_D_116, WGMMA_FOUR(116)
#define WGMMA_TEXT_124 WGMMA_TEXT_120 ", %120, %121, %122, %123"
#define WGMMA_D_124 WGMMA_D_120, WGMMA_FOUR(120)
#define WGMMA_TEXT_128 WGMMA_TEXT_124 ", %124, %125, %126, %127"
#define WGMMA_D_128 WGMMA_D_124, WGMMA_FOUR(124)

// wgmma of one shape.  n0 to n6 are R to R + 6, the numbers of the operands behind D.
template <int registers> struct WgmmaShape;
#define WGMMA_SHAPE(N, R, n0, n1, n2, n3, n4, n5, n6)                                            \
  template <> struct WgmmaShape<R> {                                                             \
    template <int trans_a, int trans_b>                                                          \
    DEVICE static void f16_shared(float (&d)[R], u64 a, u64 b, int accumulate) {                 \
      WGMMA_SHARED("f16", N, R, n0, n1, n2, n3, n4);                                             \
    }                                                                                            \
    template <int trans_a, int trans_b>                                                          \
    DEVICE static void bf16_shared(float (&d)[R], u64 a, u64 b, int accumulate) {                \
      WGMMA_SHARED("bf16", N, R, n0, n1, n2, n3, n4);                                            \
    }                                                                                            \
    template <int trans_b>                                                                       \
    DEVICE static void f16_registers(float (&d)[R], const u32 (&a)[4], u64 b, int accumulate) {  \
      WGMMA_REGISTERS("f16", N, R, n0, n1, n2, n3, n4, n5, n6);                                  \
    }                                                                                            \
    template <int trans_b>                                                                       \
    DEVICE static void bf16_registers(float (&d)[R], const u32 (&a)[4], u64 b, int accumulate) { \
      WGMMA_REGISTERS("bf16", N, R, n0, n1, n2, n3, n4, n5, n6);                                 \
    }                                                                                            \
  };
#define WGMMA_SHARED(T, N, R, n0, n1, n2, n3, n4)                                                       \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N       \
               "k16.f32." T "." T " {" WGMMA_TEXT_##R "}, %" #n0 ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4 \
                                                      "; }"                                             \
               : WGMMA_D_##R                                                                            \
               : "l"(a), "l"(b), "r"(accumulate), "n"(trans_a), "n"(trans_b))
#define WGMMA_REGISTERS(T, N, R, n0, n1, n2, n3, n4, n5, n6)                                               \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N          \
               "k16.f32." T "." T " {" WGMMA_TEXT_##R "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 \
                                                      ", p, 1, 1, %" #n6 "; }"                             \
               : WGMMA_D_##R                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(trans_b))
WGMMA_SHAPE(8, 4, 4, 5, 6, 7, 8, 9, 10)
WGMMA_SHAPE(16, 8, 8, 9, 10, 11, 12, 13, 14)
WGMMA_SHAPE(24, 12, 12, 13, 14, 15, 16, 17, 18)
WGMMA_SHAPE(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_SHAPE(40, 20, 20, 21, 22, 23, 24, 25, 26)
WGMMA_SHAPE(48, 24, 24, 25, 26, 27, 28, 29, 30)
WGMMA_SHAPE(56, 28, 28, 29, 30, 31, 32, 33, 34)
WGMMA_SHAPE(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_SHAPE(72, 36, 36, 37, 38, 39, 40, 41, 42)
WGMMA_SHAPE(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_SHAPE(88, 44, 44, 45, 46, 47, 48, 49, 50)
WGMMA_SHAPE(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_SHAPE(104, 52, 52, 53, 54, 55, 56, 57, 58)
WGMMA_SHAPE(112, 56, 56, 57, 58, 59, 60, 61, 62)
WGMMA_SHAPE(120, 60, 60, 61, 62, 63, 64, 65, 66)
WGMMA_SHAPE(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_SHAPE(136, 68, 68, 69, 70, 71, 72, 73, 74)
WGMMA_SHAPE(144, 72, 72, 73, 74, 75, 76, 77, 78)
WGMMA_SHAPE(152, 76, 76, 77, 78, 79, 80, 81, 82)
WGMMA_SHAPE(160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA_SHAPE(168, 84, 84, 85, 86, 87, 88, 89, 90)
WGMMA_SHAPE(176, 88, 88, 89, 90, 91, 92, 93, 94)
WGMMA_SHAPE(184, 92, 92, 93, 94, 95, 96, 97, 98)
WGMMA_SHAPE(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_SHAPE(200, 100, 100, 101, 102, 103, 104, 105, 106)
WGMMA_SHAPE(208, 104, 104, 105, 106, 107, 108, 109, 110)
WGMMA_SHAPE(216, 108, 108, 109, 110, 111, 112, 113, 114)
WGMMA_SHAPE(224, 112, 112, 113, 114, 115, 116, 117, 118)
WGMMA_SHAPE(232, 116, 116, 117, 118, 119, 120, 121, 122)
WGMMA_SHAPE(240, 120, 120, 121, 122, 123, 124, 125, 126)
WGMMA_SHAPE(248, 124, 124, 125, 126, 127, 128, 129, 130)
WGMMA_SHAPE(256, 128, 128, 129, 130, 131, 132, 133, 134)

template <class T, int trans_a = 0, int trans_b = 0, int registers>
DEVICE void wgmma(float (&d)[registers], u64 a, u64 b, bool accumulate) {
  if constexpr (is_same<T, f16>)
    WgmmaShape<registers>::template f16_shared<trans_a, trans_b>(d, a, b, accumulate);
  else
    WgmmaShape<registers>::template bf16_shared<trans_a, trans_b>(d, a, b, accumulate);
}
template <class T, int trans_b = 0, int registers>
DEVICE void wgmma(float (&d)[registers], const u32 (&a)[4], u64 b, bool accumulate) {
  if constexpr (is_same<T, f16>)
    WgmmaShape<registers>::template f16_registers<trans_b>(d, a, b, accumulate);
  else
    WgmmaShape<registers>::template bf16_registers<trans_b>(d, a, b, accumulate);
}
#endif
