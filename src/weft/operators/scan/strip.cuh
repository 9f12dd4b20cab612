// What a warp holds of a row of adjacent elements while it scans them, 16 bytes an access.
//
// A lane has vectors as they lie in memory: it adds up each, lanes scan these sums by shuffles, and each lane goes through its
// vectors again. What is added is a type with a NEUTRAL and a `join`.
#pragma once
#include "lanes.cuh"

// What some elements come to is an Op::Total, `none()` of no elements; `total(f)` is one of a float.
struct Sum {
  typedef float Total;
  // OF_SUMS: a float is what it stands for, not the logarithm of a sum (logarithm.cuh). SCALED: what many elements come to may be
  // more or less than a float holds.
  enum { OF_SUMS = false, SCALED = false };
  static constexpr float NEUTRAL = 0.f;
  static __device__ __forceinline__ float none() { return NEUTRAL; }
  static __device__ __forceinline__ float total(float f) { return f; }
  static __device__ __forceinline__ float join(float a, float b) { return a + b; }
};

struct Product {
  typedef float Total;
  enum { OF_SUMS = false, SCALED = true };
  static constexpr float NEUTRAL = 1.f;
  static __device__ __forceinline__ float none() { return NEUTRAL; }
  static __device__ __forceinline__ float total(float f) { return f; }
  static __device__ __forceinline__ float join(float a, float b) { return a * b; }
};

// All 32 lanes' values together, for every lane.
template <typename Op> __device__ __forceinline__ typename Op::Total join_lanes(typename Op::Total value) {
  if constexpr (Op::OF_SUMS) {
    return Op::of_lanes(value);
  } else {
#pragma unroll
    for (int step = 16; step; step /= 2) value = Op::join(value, __shfl_xor_sync(ALL, value, step));
    return value;
  }
}

// ---- what a warp holds of a row ----------------------------------------------------------------------------------------

// As a tree.
template <typename Op, int COUNT> __device__ __forceinline__ float joined(float (&f)[COUNT]) {
#pragma unroll
  for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
    for (int i = 0; i + step < COUNT; i += 2 * step) f[i] = Op::join(f[i], f[i + step]);
  return f[0];
}

template <typename T, typename Op, int COUNT> __device__ __forceinline__ float vector_total(const Words<T, COUNT> &w) {
  float f[COUNT];
  unpack(w, f);
  return joined<Op, COUNT>(f);
}

// VECTORS runs of LANES lanes each, one after the other: what comes before each `sum` in all of them, and what they come to.
template <typename Op, int LANES, int VECTORS>
__device__ __forceinline__ float scan_lanes(float (&sum)[VECTORS], float (&before)[VECTORS], u32 lane) {
#pragma unroll
  for (int step = 1; step < LANES; step *= 2)
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const float other = __shfl_up_sync(ALL, sum[v], step, LANES);
      if (lane % LANES >= step) sum[v] = Op::join(other, sum[v]);
    }
  float total = Op::NEUTRAL;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const float other = __shfl_up_sync(ALL, sum[v], 1, LANES);
    before[v] = lane % LANES ? Op::join(total, other) : total;
    total = Op::join(total, __shfl_sync(ALL, sum[v], LANES - 1, LANES));
  }
  return total;
}

// VECTORS times LANES vectors in the order of the scan; with LANES < 32 a warp holds 32 / LANES such strips side by side.
template <typename T, typename Op, int LANES, int VECTORS> struct Strip {
  static constexpr int COUNT = 16 / sizeof(T);
  Words<T, COUNT> w[VECTORS];
  float before[VECTORS];  // what comes before this lane's vector in the strip
  float total;            // of the strip

  // zero: a 0 that the compiler cannot know to be one. It would keep all elements as floats for `result`, more than there are
  // registers; so it has to unpack them anew.
  __device__ __forceinline__ void scan(u32 lane, u32 zero) {
    float sum[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      sum[v] = vector_total<T, Op, COUNT>(w[v]);
      if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) w[v].word[i] ^= zero;
      }
    }
    total = scan_lanes<Op, LANES, VECTORS>(sum, before, lane);
  }

  // The results of this lane's vector v. Backwards, elements are taken from the last: other names, no instruction.
  template <bool REVERSE, bool EXCLUSIVE> __device__ __forceinline__ Words<T, COUNT> result(int v, float carry) const {
    float f[COUNT], y[COUNT], run = Op::join(carry, before[v]);
    unpack(w[v], f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int at = REVERSE ? COUNT - 1 - i : i;
      if (EXCLUSIVE) y[at] = run;
      run = Op::join(run, f[at]);
      if (!EXCLUSIVE) y[at] = run;
    }
    return pack<T, COUNT>(y);
  }
};
