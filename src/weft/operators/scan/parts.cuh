// What scans share: the lanes of a warp, and rows or columns in parts.
#pragma once
#include "prelude.cuh"

constexpr u32 ALL = 0xffffffffu;
constexpr int WHOLE = 0, TOTALS = 1, CARRIED = 2;  // all at once; what each of its parts comes to; a part from what comes before it

// COUNT times one number.
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> vector_of(float value) {
  float f[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = value;
  return pack<T, COUNT>(f);
}
