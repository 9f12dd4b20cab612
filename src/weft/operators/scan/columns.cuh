// Scans along an axis beside which others lie side by side in memory: what a block has of [M, N, K].
//
// A block walks down ACROSS vectors of 16 bytes, all its threads together, a step of rows at a time: each thread has a few rows of one
// vector, one below the other, and threads ACROSS apart have those below.
#pragma once
#include "lanes.cuh"
#include "parts.cuh"

// A column has `parts` parts of `each` rows in the order of the scan, of which a block has one; REVERSE: that order runs from the end.
template <typename T, bool REVERSE, int ACROSS> struct Columns {
  enum { COUNT = int(16 / sizeof(T)), WIDTH = ACROSS * COUNT };
  i64 unit, units, m, first, column;  // the part, of all columns' parts; the matrix; the block's first column, and this thread's
  int begin, end;              // rows of the part
  u32 own;                     // this thread's first column, of the block's
  bool inside;                 // whether that column is there

  __device__ __forceinline__ Columns(int N, i64 K, int each, int parts) {
    const i64 blocks = (K + WIDTH - 1) / WIDTH;
    unit = blockIdx.x / blocks, units = gridDim.x / blocks, m = unit / parts;
    own = threadIdx.x % ACROSS * COUNT, first = blockIdx.x % blocks * WIDTH, column = first + own;
    begin = int(unit % parts) * each, end = min(begin + each, N);
    inside = column < K;
  }

  // Where this thread's columns of row `begin` lie in a tensor of these strides.
  __device__ __forceinline__ i64 offset(int N, i64 of_m, i64 of_n) const {
    return m * of_m + i64(REVERSE ? N - 1 - begin : begin) * of_n + column;
  }
};
