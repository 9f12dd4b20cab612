// Activations in fp32 of sums that are rounded to type O afterwards.
#pragma once

// SILU divides as IEEE asks, in 21 instructions with a branch; SILU_FAST takes the hardware's reciprocal, in 5. Grouped products have
// been measured with the former.
enum Activation { NONE, RELU, SILU, GELU, GELU_TANH, SILU_FAST };

// x / (1 + 2^t): x times the logistic function of -t ln 2. Of t = inf 0 x, so NaN for -inf, as in PyTorch.
__device__ __forceinline__ float times_logistic(float x, float t) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return x * inverse;
}

// Of results of type O. Numbers of 16 bits take gelu's normal distribution as elementwise/curves.py does: log2 of Phi(x) / Phi(-x) by a
// polynomial, less than half a unit in the last place of fp16 off.
template <int ACTIVATION, typename O> __device__ __forceinline__ float activated(float x) {
  if constexpr (ACTIVATION == RELU) return x < 0.f ? 0.f : x;  // NaN stays
  if constexpr (ACTIVATION == SILU) return x / (1.f + __expf(-x));
  if constexpr (ACTIVATION == SILU_FAST) return times_logistic(x, -1.44269504f * x);
  if constexpr (ACTIVATION == GELU && sizeof(O) == 4) return 0.5f * x * (1.f + erff(x * 0.70710678f));
  if constexpr (ACTIVATION == GELU && sizeof(O) != 4) {
    const float s = fminf(x * x, 36.f);
    float q = 3.394939028e-09f - 2.230787179e-11f * s;
    q = 6.702333398e-06f + s * (-2.10922951e-07f + s * q);
    q = -4.43768993e-04f + s * (-1.005590223e-04f + s * q);
    q = 2.3015770884f + s * (0.105716228466f + s * q);
    return times_logistic(x, -x * q);
  }
  if constexpr (ACTIVATION == GELU_TANH) return times_logistic(x, x * (-2.3022082f - 0.10294324f * (x * x)));
  return x;
}
