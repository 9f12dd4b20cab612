// Packed sequences: tokens bounds[b] to bounds[b + 1] are sequence b's; those ahead of the first (b = -1) and behind the last belong to none.
#pragma once
#include "prelude.cuh"

// First token and length of sequence b, or of the tokens, up to `rest`, that belong to none. Bounds out of range are clamped.
__device__ __forceinline__ void extent(const int *bounds, int b, int sequences, int tokens, int rest, int &start, int &length) {
  start = b < 0 ? 0 : min(max(bounds[b], 0), tokens);
  const int end = b < sequences ? bounds[b + 1] : rest;
  length = max(min(b < 0 ? min(end, rest) : end, tokens) - start, 0);
}

// Of sequence b's tiles of SIZE tokens the first one's number: room for any lengths is left, so that some numbers have no tile.
template <int SIZE> __device__ __forceinline__ int first_tile(const int *bounds, int b, int tokens) {
  return (b < 0 ? 0 : min(max(bounds[b], 0), tokens) / SIZE) + b + 1;
}

// The sequence of a tile, by bisection.
template <int SIZE> __device__ __forceinline__ int sequence_of(const int *bounds, int sequences, int tokens, int tile) {
  int b = -1, high = sequences;
  while (b < high) {
    const int middle = (b + high + 1) / 2;
    if (first_tile<SIZE>(bounds, middle, tokens) <= tile)
      b = middle;
    else
      high = middle - 1;
  }
  return b;
}

// What all lanes of a warp agree on, in a uniform register: after a shuffle instead the compiler would keep slots and descriptors in
// registers of threads.
__device__ __forceinline__ int agreed(int x) { return int(__reduce_or_sync(0xffffffffu, u32(x))); }
