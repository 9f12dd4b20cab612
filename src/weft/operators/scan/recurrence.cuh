// Gradients of running products, and of logarithms of running sums of exponentials: a factor times a linear recurrence that starts where
// the scan ends (kernels.py: gradient_tiles):
//
//   product      dx[j] = y[j - 1] * r[j]             r[j] = dy[j] + x[j + 1] * r[j + 1]
//   logarithm    dx[j] = exp(x[j] - y[j]) * r[j]     r[j] = dy[j] + exp(y[j] - y[j + 1]) * r[j + 1]
//
// A step is a pair (a, b), r -> a * r + b, and so are any number of them together. Finite factors of a product may overflow together
// where r is 0 before them, or one of them is 0, and then count for nothing: so products of factors stay finite (NaN stays NaN).
#pragma once
#include "lanes.cuh"
#include "parts.cuh"

struct Step { float a, b; };

__device__ __forceinline__ float finite(float x) {  // the largest float for an infinity, of its sign
  constexpr float LARGEST = 3.402823466e38f;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 860
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(LARGEST));
#else
  if (fabsf(x) > LARGEST) x = copysignf(LARGEST, x);
#endif
  return x;
}

template <bool LOG> __device__ __forceinline__ Step then(Step first, Step second) {
  const float a = first.a * second.a;  // of logarithms 1 at most
  return {LOG ? a : finite(a), second.a * first.b + second.b};
}

template <bool LOG> __device__ __forceinline__ float after(float r, Step s) { return LOG && r == 0.f ? s.b : s.a * r + s.b; }

__device__ __forceinline__ Step shuffled_up(Step s, int by, int width = 32) {
  return {__shfl_up_sync(ALL, s.a, by, width), __shfl_up_sync(ALL, s.b, by, width)};
}

__device__ __forceinline__ Step shuffled(Step s, int from, int width) {
  return {__shfl_sync(ALL, s.a, from, width), __shfl_sync(ALL, s.b, from, width)};
}

// The exponential of a difference, as exact as T asks for.
template <typename T> __device__ __forceinline__ float power(float t) {
  if constexpr (sizeof(T) == 4) return expf(t);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t * 1.4426950408889634f));
  return e;
}

// What one y leaves of r on its way past another; both may be infinite.
template <typename T> __device__ __forceinline__ float passed(float near, float far) { return near == far ? 1.f : power<T>(near - far); }
