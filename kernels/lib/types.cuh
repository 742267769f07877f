// types.cuh - the number types of a build and the arithmetic whose rounding matters.
// Each instruction has a device and a host body.
#pragma once
#include "params.cuh"

// 16-bit floats are bits with a name: arithmetic happens in acc, never in these.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

template <int code> struct Dtype;
template <> struct Dtype<0> { using type = f16; };
template <> struct Dtype<1> { using type = bf16; };
template <> struct Dtype<2> { using type = float; };
template <> struct Dtype<3> { using type = double; };
template <> struct Dtype<-1> { using type = float; };   // an array that is not there

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;
template <bool first, class A, class B> struct Choice { using type = A; };
template <class A, class B> struct Choice<false, A, B> { using type = B; };

using elem = Dtype<dtype_code>::type;                                    // Q, K, V
using out_elem = Dtype<out_dtype_code>::type;                            // O; in the backward dQ, dK, dV
using o_elem = Dtype<o_dtype_code>::type;                                // backward: O as given
using dout_elem = Dtype<dout_dtype_code>::type;                          // backward: dO as given
using bias_elem = Dtype<bias_dtype_code>::type;                          // bias, dbias
using acc = Choice<is_same<elem, double>, double, float>::type;          // sums, softmax, lse, slopes, sink

// 16 bytes of T, moved by one instruction.
template <class T> struct alignas(16) Vec16 {
  static constexpr int size = 16 / sizeof(T);
  T item[size];
};

constexpr acc NEG_INF = static_cast<acc>(__builtin_bit_cast(float, 0xff800000u));   // NVRTC has no INFINITY
constexpr acc LOG2E = static_cast<acc>(1.4426950408889634074);
constexpr acc LN2 = static_cast<acc>(0.6931471805599453094);

#ifdef CUFLASH_EMULATED
DEVICE float exp2_approx(float x) { emulated::count_exp(); return exp2f(x); }
DEVICE double exp2_approx(double x) { emulated::count_exp(); return exp2(x); }
DEVICE float log2_approx(float x) { return log2f(x); }
DEVICE float f16_to_float(f16 x) {
  const u32 sign = static_cast<u32>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  const float value =
      magnitude < 0x400 ? magnitude * 0x1p-24f : __builtin_bit_cast(float, (magnitude << 13) + (112u << 23));
  return sign ? -value : value;
}
DEVICE f16 float_to_f16(float x) {   // to nearest, ties to even
  const u32 bits = __builtin_bit_cast(u32, x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  u32 half;
  if (magnitude > 0x7f800000) return {0x7fff};   // as a GPU: no NaN has a sign
  if (magnitude >= 0x477ff000) half = 0x7c00;                                    // 65520 and up
  else if (magnitude >= 0x38800000) half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  else half = __builtin_bit_cast(u32, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000;
  return {static_cast<u16>(sign | half)};
}
#else
// double is exact to the last digits: float64 is chosen for accuracy.
DEVICE double exp2_approx(double x) { return exp2(x); }
DEVICE float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_approx(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float f16_to_float(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
DEVICE f16 float_to_f16(float x) { f16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
#endif

// a b, rounded: an addition that follows is not fused with it.
#ifdef CUFLASH_EMULATED
DEVICE float rounded_product(float a, float b) { return a * b; }
#else
DEVICE float rounded_product(float a, float b) {
  float y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
#endif

DEVICE float bf16_to_float(bf16 x) { return __builtin_bit_cast(float, static_cast<u32>(x.bits) << 16); }
DEVICE bf16 float_to_bf16(float x) {
#if !defined(CUFLASH_EMULATED) && __CUDA_ARCH__ >= 800
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  const u32 bits = __builtin_bit_cast(u32, x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};                 // NaN stays NaN
  return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};   // to nearest, ties to even
#endif
}

DEVICE double log2_approx(double x) { return log2(x); }
// e^x to the last digits, where the result is a gradient's factor and not divided by a sum of its kind.  ex2
// takes x * log2(e), whose rounding alone would cost |x| / 2 ulps: what it loses comes back as a factor 1 +
// lost * ln(2).
DEVICE float exp_near(float x) {
  constexpr float log2e_high = 1.44269502162933349609375f, log2e_low = 1.92596299112661746887e-8f;
  x = x < -150.f ? -150.f : x;   // 0 in float; and -inf - (-inf) is not asked for below
  const float t = x * log2e_high, lost = fmaf(x, log2e_high, -t) + x * log2e_low;
  const float y = exp2_approx(t);
  return y + y * (lost * 0.693147182f);
}
DEVICE double exp_near(double x) { return exp(x); }

// The unit of scores inside the softmax.  float: base 2, because ex2 is an instruction.  double: base e,
// because the rounding of score * log2(e) would show.
constexpr double SCORE_UNIT = is_same<acc, double> ? 1 : 1.4426950408889634074;
constexpr acc FROM_UNIT = is_same<acc, double> ? acc(1) : LN2;
DEVICE float exp_score(float x) { return exp2_approx(x); }
DEVICE double exp_score(double x) { return exp_near(x); }
DEVICE float log_score(float x) { return log2_approx(x); }
DEVICE double log_score(double x) { return log(x); }
DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
DEVICE double hyperbolic_tangent(double x) { return tanh(x); }
template <class T> DEVICE T largest(T a, T b) { return a > b || b != b ? a : b; }     // NaN never wins
template <> DEVICE float largest(float a, float b) { return fmaxf(a, b); }
template <class T> DEVICE T smallest(T a, T b) { return a < b ? a : b; }
template <class T> DEVICE T magnitude(T a) { return a < 0 ? -a : a; }
template <class T> DEVICE T clamp(T x, T low, T high) { return x < low ? low : x > high ? high : x; }
DEVICE constexpr i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// convert<To>(x) for every pair of number types.  double to 16 bits goes through float: two roundings.
template <class To, class From> DEVICE To convert(From x) {
  if constexpr (is_same<To, From>) return x;
  else if constexpr (is_same<From, f16>) return convert<To>(f16_to_float(x));
  else if constexpr (is_same<From, bf16>) return convert<To>(bf16_to_float(x));
  else if constexpr (is_same<To, f16>) return float_to_f16(static_cast<float>(x));
  else if constexpr (is_same<To, bf16>) return float_to_bf16(static_cast<float>(x));
  else return static_cast<To>(x);
}
