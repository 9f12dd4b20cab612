// The exponential of the kernels of this folder.
#pragma once

// exp(x): as exact as PyTorch's for fp32; for 16-bit results one multiplication and the hardware's ex2.
template <bool ACCURATE> __device__ __forceinline__ float exponential(float x) {
  if constexpr (ACCURATE) return expf(x);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.4426950408889634f));
  return e;
}
