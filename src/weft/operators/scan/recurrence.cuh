// Gradients of running products, and of logarithms of running sums of exponentials: a factor times a linear recurrence that starts where
// the scan ends (kernels.py: gradient_tiles):
//
//   product      dx[j] = y[j - 1] * r[j]             r[j] = dy[j] + x[j + 1] * r[j + 1]
//   logarithm    dx[j] = exp(x[j] - y[j]) * r[j]     r[j] = dy[j] + exp(y[j] - y[j + 1]) * r[j + 1]
//
// A step is a pair (a, b), r -> a * r + b, and so are any number of them together.
#pragma once
#include "lanes.cuh"
#include "parts.cuh"

struct Step { float a, b; };

__device__ __forceinline__ Step then(Step first, Step second) {
  return {first.a * second.a, second.a * first.b + second.b};
}

// From 0 a product that overflows has no part in it: so it is where the recurrence begins.
__device__ __forceinline__ float after(float r, Step s) { return r == 0.f ? s.b : s.a * r + s.b; }

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
