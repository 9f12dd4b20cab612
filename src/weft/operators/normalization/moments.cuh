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

// x: a mean; y: the sum of squares about it. Of 32 lanes' `count` elements each: those of all, `1 / inverse` elements. Both sums are
// about lane 0's mean, so that neither waits for the other.
__device__ __forceinline__ float2 warp_moments(float2 of, float count, float inverse) {
  const float around = __shfl_sync(0xffffffffu, of.x, 0), off = of.x - around;
  const float sum = warp_sum(count * off), squares = warp_sum(of.y + count * off * off);
  return {around + sum * inverse, squares - sum * sum * inverse};
}

__device__ __forceinline__ float4 warp_moments(float4 of, float count, float inverse) {  // of two rows
  const float2 a = warp_moments(float2{of.x, of.y}, count, inverse), b = warp_moments(float2{of.z, of.w}, count, inverse);
  return {a.x, a.y, b.x, b.y};
}
