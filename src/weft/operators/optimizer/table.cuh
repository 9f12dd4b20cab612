// The table of pointers (multi_tensor.py) and what a tensor's elements share in a step of Adam, in CUDA C++.
#pragma once
#include "elements.cuh"

// A tensor's row of the table, and of the numbers of its group: kernels.py and rules.py.
constexpr int ROW = 16, PARAM = 0, FIRST = 1, SECOND = 2, STEP = 6, RATE = 7, SIZE = 8, CHUNKS = 9, GROUP = 11, SCALES = 13, NUMBERS = 12;
enum { LR, SIGN, FRESH1, BETA2, FRESH2, EPS, L2, DECAY, HIGH1, LOW1, HIGH2, LOW2 };

__device__ __forceinline__ double one_minus_power(double step, float log_high, float log_low) {
  return -expm1(step * (double(log_high) + log_low));
}

// A weight loses u / (slope sqrt(v) + least), where m = unit u, and decay times itself. Each number is rounded once, since its
// error is that of all elements.
struct Descent { float slope, least, decay; };

__device__ __forceinline__ Descent descent_of(const float *n, float lr, double step, double unit) {
  const double size = lr / one_minus_power(step, n[HIGH1], n[LOW1]) * unit;
  const double slope = 1 / (size * sqrt(one_minus_power(step, n[HIGH2], n[LOW2])));
  const bool moves = size > 0x1p-100;  // else the denominator is infinite
  return {moves ? float(slope) : 1.f, moves ? float(n[EPS] / size) : __uint_as_float(INFINITE), float(double(lr) * n[DECAY])};
}

// Called by one thread of a block, once for `run` chunks of a tensor: writes the steps so far to `published`. The block that reads
// the count for the tensor's last chunks increments it.
__device__ __forceinline__ void publish_steps(float *published, const i64 *words, u32 *arrivals, i64 row, i64 run) {
  float *const step = reinterpret_cast<float *>(words[STEP]);
  const float before = *const_cast<volatile float *>(step);
  *published = before;
  // run, but known only once the count is: so no block is counted as having read before it has
  if (run == words[CHUNKS] || atomicAdd(arrivals + row, before >= 0.f ? u32(run) : 0) == u32(words[CHUNKS] - run))
    *step = before + 1, arrivals[row] = 0;
}

// Options of a step, each null where it is absent: gradients are multiplied by clip / scale; where `found` is not 0,
// nothing is updated, and the step is counted as skipped.
struct Factors { const float *clip, *scale, *found; float *skipped; };

__device__ __forceinline__ float factor_of(const Factors &factors) {
  return (factors.clip ? *factors.clip : 1.f) / (factors.scale ? *factors.scale : 1.f);
}

__device__ __forceinline__ bool is_skipped(const Factors &factors) {
  const bool skip = factors.found && *factors.found != 0.f;
  if (skip && factors.skipped && blockIdx.x == 0 && threadIdx.x == 0) *factors.skipped += 1.f;
  return skip;
}

__device__ __forceinline__ float rate_of(const i64 *words, const float *n) {
  return words[RATE] ? *reinterpret_cast<const float *>(words[RATE]) : n[LR];
}
