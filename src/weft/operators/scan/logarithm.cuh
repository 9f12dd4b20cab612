// Logarithms of running sums of exponentials, as scan.cu scans anything.
//
// To join two logarithms takes an exponential and a logarithm, and a scan joins about four times an element. So a warp takes all its
// exponentials against one number, the largest of its strip, and scans their sums like any others: an exponential and a logarithm
// an element. That errs only where a strip begins so far below its largest element that an exponential underflows while nothing
// larger came before it in the strip. Sums grow, so the first one tells; such strips are joined one by one (`scan_apart`).
//
// What a strip comes to is (top, sum), and so is what the warps and blocks that share a row tell each other: one float, top +
// log(sum), is rounded as a result is, and everything that comes after would share that error. Tiles of a ring tell each other the float.
#pragma once
#include "strip.cuh"

// The multiprocessor's approximation, within 2^-22 of itself.
__device__ __forceinline__ float exponential(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.4426950408889634f));
  return e;
}

// top + log(sum). The approximation is within 2^-22 of itself, or of 1 between 1/2 and 2: for float32 it is taken there, and the
// exponent apart.
template <typename T> __device__ __forceinline__ float logarithm(float top, float sum) {
  constexpr float LN2 = 0.6931471805599453f;
  float l;
  if constexpr (sizeof(T) == 4) {
    const u32 bits = __float_as_uint(sum), beyond = (bits - 0x3f3504f3u) & 0xff800000u;  // sqrt(1/2) is the least that stays
    const u32 exponent = bits - 0x00800000u < 0x7f000000u ? beyond : 0u;                 // 0, infinity and NaN stay what they are
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(__uint_as_float(bits - exponent)));
    return float(int(exponent)) * (LN2 / (1 << 23)) + (top + l * LN2);
  }
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(sum));
  return top + l * LN2;
}

// Logarithms joined one by one.
template <typename T> struct Logarithms {
  typedef float Total;
  enum { OF_SUMS = false };
  static constexpr float NEUTRAL = __builtin_bit_cast(float, 0xff800000u);  // -inf
  static __device__ __forceinline__ float join(float a, float b) {
    const float apart = a == b ? 0.f : fabsf(a - b);  // both may be infinite
    return logarithm<T>(fmaxf(a, b), 1.f + exponential(-apart));
  }
};

template <typename T> struct Logarithm : Logarithms<T> {
  typedef float2 Total;  // x: top, finite; y: the sum of exponentials against it
  enum { OF_SUMS = true };
  static constexpr float LARGEST = 3.402823466e38f;
  // A strip's first sum is to be. 16 bits: 2^12 exponentials below 2^-126, lost, are below 2^-24 of it. 32 bits: what rounding takes
  // from an exponent of -30 is 2^-19 of an exponential.
  static constexpr float LEAST = sizeof(T) == 4 ? 0x1p-30f : 0x1p-90f;

  // What exponentials are taken against: finite, so that an infinite element is e^inf or e^-inf. NaN counts for nothing.
  static __device__ __forceinline__ float finite(float x) { return fminf(fmaxf(x, -LARGEST), LARGEST); }

  static __device__ __forceinline__ float2 none() { return {-LARGEST, 0.f}; }
  static __device__ __forceinline__ float2 total(float value) { return {finite(value), exponential(value - finite(value))}; }
  static __device__ __forceinline__ float value(float2 total) { return logarithm<T>(total.x, total.y); }

  using Logarithms<T>::join;
  static __device__ __forceinline__ float2 join(float2 a, float2 b) {
    const float top = fmaxf(a.x, b.x);
    return {top, a.y * exponential(a.x - top) + b.y * exponential(b.x - top)};
  }

  // All 32 lanes' values together, for every lane.
  static __device__ __forceinline__ float of_lanes(float value) {
    const float top = finite(warp_max(value));
    return logarithm<T>(top, warp_sum(exponential(value - top)));
  }
  static __device__ __forceinline__ float2 of_lanes(float2 total) {
    const float top = warp_max(total.x);
    return {top, warp_sum(total.y * exponential(total.x - top))};
  }
};

// The largest element of some vectors of a lane.
template <typename T, int COUNT, int VECTORS> __device__ __forceinline__ float largest(const Words<T, COUNT> (&w)[VECTORS]) {
  u32 top[Words<T, COUNT>::N];
#pragma unroll
  for (int i = 0; i < Words<T, COUNT>::N; i++) {
    top[i] = w[0].word[i];
#pragma unroll
    for (int v = 1; v < VECTORS; v++) top[i] = word_max(T{}, top[i], w[v].word[i]);
  }
  const u32 word = word_max(T{}, word_max(T{}, top[0], top[1]), word_max(T{}, top[2], top[3]));
  if constexpr (sizeof(T) == 4) return __uint_as_float(word);
  float pair[2];
  unpack(Words<T, 2>{word}, pair);
  return fmaxf(pair[0], pair[1]);
}

// What a warp's strip comes to, for every lane; its vectors are 32 to a row, in any order.
template <typename T, int COUNT, int VECTORS> __device__ __forceinline__ float strip_total(const Words<T, COUNT> (&w)[VECTORS]) {
  const float top = Logarithm<T>::finite(warp_max(largest<T, COUNT, VECTORS>(w)));
  float sum[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    float f[COUNT];
    unpack(w[v], f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) f[i] = exponential(f[i] - top);
    sum[v] = joined<Sum, COUNT>(f);
  }
  return logarithm<T>(top, warp_sum(joined<Sum, VECTORS>(sum)));
}

template <typename T, int LANES, int VECTORS> struct Strip<T, Logarithm<T>, LANES, VECTORS> {
  using Op = Logarithm<T>;
  static constexpr int COUNT = 16 / sizeof(T);
  Words<T, COUNT> w[VECTORS];
  float e[VECTORS][COUNT];  // each element's exponential, against `top`, as they lie in memory
  float before[VECTORS];    // the sum of those before this lane's vector in the strip
  float top;
  float2 total;  // of the strip

  __device__ __forceinline__ void scan(u32 lane, u32) {
    top = largest<T, COUNT, VECTORS>(w);
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    top = Op::finite(top);
    float sum[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      float f[COUNT];
      unpack(w[v], f);
#pragma unroll
      for (int i = 0; i < COUNT; i++) f[i] = e[v][i] = exponential(f[i] - top);
      sum[v] = joined<Sum, COUNT>(f);
    }
    total = {top, scan_lanes<Sum, LANES, VECTORS>(sum, before, lane)};
  }

  // Whether the warp has a strip whose first sum is too small to carry the next ones. `lacking`: elements of this lane's first vector,
  // in the order of the scan, that come before the row's.
  template <bool REVERSE> __device__ __forceinline__ bool begins_low(u32 lane, int lacking = 0) const {
    float first = e[0][REVERSE ? COUNT - 1 : 0];
#pragma unroll
    for (int i = 1; i < COUNT; i++) first = i == lacking ? e[0][REVERSE ? COUNT - 1 - i : i] : first;
    return __any_sync(ALL, lane % LANES == 0 && first < Op::LEAST && top > -Op::LARGEST);  // nothing but -inf is in order
  }

  template <bool REVERSE, bool EXCLUSIVE> __device__ __forceinline__ Words<T, COUNT> result(int v, float2 carry) const {
    const float base = fmaxf(carry.x, top), share = exponential(top - base);
    float y[COUNT], run = carry.y * exponential(carry.x - base) + share * before[v];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int at = REVERSE ? COUNT - 1 - i : i;
      if (EXCLUSIVE) y[at] = i == 0 && before[v] == 0.f ? Op::value(carry) : logarithm<T>(base, run);  // alone it may be far below the strip
      run += share * e[v][at];
      if (!EXCLUSIVE) y[at] = logarithm<T>(base, run);
    }
    return pack<T, COUNT>(y);
  }
};

// A strip of a row, read again and joined one by one. x, y: where this lane's first vector lies; of its vectors, LANES apart, those
// exist that begin before `left`.
template <typename T, bool REVERSE, bool EXCLUSIVE, int LANES, int VECTORS>
__device__ __noinline__ void scan_apart(const T *x, T *y, int left, u32 lane, float carry) {
  using Op = Logarithms<T>;
  constexpr int COUNT = 16 / sizeof(T), APART = (REVERSE ? -LANES : LANES) * COUNT;
#pragma unroll 1
  for (int v = 0; v < VECTORS; v++) {
    const bool there = v * LANES < left;
    Strip<T, Op, LANES, 1> strip;
    strip.w[0] = vector_of<T, COUNT>(Op::NEUTRAL);
    if (there) strip.w[0] = load<T, COUNT>(x + v * APART);
    strip.scan(lane, 0);
    if (there) store<T, COUNT>(y + v * APART, strip.template result<REVERSE, EXCLUSIVE>(0, carry));
    carry = Op::join(carry, strip.total);
  }
}

// The same of a row of n elements that begins anywhere, of which this lane's first vector is to have those from `first` on.
template <typename T, bool REVERSE, bool EXCLUSIVE, int LANES, int VECTORS>
__device__ __noinline__ void scan_apart_anywhere(const T *x, T *y, i64 first, i64 n, u32 lane, float carry) {
  constexpr int COUNT = 16 / sizeof(T), STEP = LANES * COUNT;
#pragma unroll 1
  for (int v = 0; v < VECTORS; v++) {
    Strip<T, Logarithms<T>, LANES, 1> strip;
    strip.w[0] = load_elements<T, COUNT>(x, first, n, Logarithms<T>::NEUTRAL);
    strip.scan(lane, 0);
    store_elements<T, COUNT>(y, first, n, strip.template result<REVERSE, EXCLUSIVE>(0, carry));
    carry = Logarithms<T>::join(carry, strip.total);
    first += REVERSE ? -STEP : STEP;
  }
}
