// Mean and sum of squares about it, of slices of rows that warps and blocks share (rows.cuh): how many elements each of them has, and
// what theirs come to together (Chan, Golub & LeVeque 1979).
#pragma once
#include "rows.cuh"

// Of a slice: 32 vectors of each whole round of the block, and some of the last round.
template <int THREADS, int COUNT> __device__ __forceinline__ float elements_of_warp(int elements, int warp) {
  constexpr int ROUND = THREADS * COUNT, MINE = 32 * COUNT;
  return float(elements / ROUND * MINE + max(0, min(elements % ROUND - warp * MINE, MINE)));
}

template <int SLICE> __device__ __forceinline__ float elements_of_block(i64 N, int rank) {
  return max(i64(0), min(N - i64(rank) * SLICE, i64(SLICE)));
}

// x: the sum of `count` elements (1 / `inverse`); y: the sum of their squares about their mean. Combines those of 32 lanes. The means'
// squares are about lane 0's mean, so that no sum waits for another; x is a sum of the elements themselves, since sums about a mean
// err by more than the rounding of their own mean. A product that overflows where the squares do not would leave no variance at all.
__device__ __forceinline__ float2 warp_moments(float2 of, float count, float inverse, float inverse_of_all) {
  const float mean = of.x * inverse, off = mean - __shfl_sync(0xffffffffu, mean, 0);
  const float plain = warp_sum(of.x), sum = warp_sum(count * off), squares = warp_sum(of.y + count * off * off);
  return {plain, squares - fminf(sum * (sum * inverse_of_all), 3.402823466e38f)};
}

__device__ __forceinline__ float4 warp_moments(float4 of, float count, float inverse, float inverse_of_all) {  // of two rows
  const float2 a = warp_moments(float2{of.x, of.y}, count, inverse, inverse_of_all),
               b = warp_moments(float2{of.z, of.w}, count, inverse, inverse_of_all);
  return {a.x, a.y, b.x, b.y};
}

__device__ __forceinline__ float inverse_of(float count) { return 1.f / fmaxf(count, 1.f); }
