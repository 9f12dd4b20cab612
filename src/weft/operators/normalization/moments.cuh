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

// Of 32 lanes' sums of `count` elements, and of their squares about each lane's own mean: those of all, `total` elements.
__device__ __forceinline__ float2 warp_moments(float2 sums, float count, float total) {
  const float plain = warp_sum(sums.x), off = sums.x / fmaxf(count, 1.f) - plain / fmaxf(total, 1.f);
  return {plain, warp_sum(sums.y + count * off * off)};
}

__device__ __forceinline__ float4 warp_moments(float4 sums, float count, float total) {  // of two rows
  const float2 a = warp_moments(float2{sums.x, sums.y}, count, total), b = warp_moments(float2{sums.z, sums.w}, count, total);
  return {a.x, a.y, b.x, b.y};
}
