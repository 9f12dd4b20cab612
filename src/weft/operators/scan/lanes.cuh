// What scans share: the lanes of a warp and their vectors.
#pragma once
#include "prelude.cuh"

constexpr u32 ALL = 0xffffffffu;

// COUNT times one number.
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> vector_of(float value) {
  float f[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = value;
  return pack<T, COUNT>(f);
}
