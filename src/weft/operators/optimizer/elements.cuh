// What a step of Adam does with the elements of a thread, in CUDA C++: roots and inverses, and how it reads and writes them.
#pragma once
#include "prelude.cuh"

constexpr u32 INFINITE = 0x7f800000u;

// ---- roots and inverses ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float fast_root(float x) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float fast_inverse(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float fast_inverse_root(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// The same to half a unit of last place, by a step of Newton's. Where its correction is NaN (of 0 and of infinity), a bound of
// it takes its place, which changes neither.
__device__ __forceinline__ float fine_root(float x) {
  const float r = fast_root(x);
  return fmaf(fminf(fmaf(-r, r, x) * fast_inverse_root(x), r * 0x1p-20f), 0.5f, r);
}

__device__ __forceinline__ float fine_inverse(float x) {
  const float r = fast_inverse(x);
  return fmaf(fminf(fmaf(-x, r, 1.f), 0x1p-20f), r, r);
}

// ---- VEC elements side by side -----------------------------------------------------------------------------------------

template <int BYTES> struct Raw { u32 word[BYTES / 4]; };

template <int BYTES> __device__ __forceinline__ Raw<BYTES> read_raw(const void *p) {
  Raw<BYTES> r;
  if constexpr (BYTES == 16)
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3])
                 : "l"(p));
  else if constexpr (BYTES == 8)
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.word[0]), "=r"(r.word[1]) : "l"(p));
  else
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(r.word[0]) : "l"(p));
  return r;
}

template <int BYTES> __device__ __forceinline__ void write_raw(void *p, const Raw<BYTES> &r) {
  if constexpr (BYTES == 16)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(r.word[0]), "r"(r.word[1]), "r"(r.word[2]),
                 "r"(r.word[3])
                 : "memory");
  else if constexpr (BYTES == 8)
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(r.word[0]), "r"(r.word[1]) : "memory");
  else
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(r.word[0]) : "memory");
}

// Numbers as in memory; what is past the end is 0.
template <typename T, int VEC, bool WHOLE> __device__ __forceinline__ Raw<VEC * sizeof(T)> read(const T *p, int left) {
  if constexpr (WHOLE) return read_raw<VEC * sizeof(T)>(p);
  Raw<VEC * sizeof(T)> raw;
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    if constexpr (sizeof(T) == 4)
      raw.word[i] = i < left ? __float_as_uint(p[i]) : 0;
    else
      raw.word[i / 2] = i % 2 ? raw.word[i / 2] | u32(i < left ? p[i].bits : 0) << 16 : (i < left ? p[i].bits : 0);
  }
  return raw;
}

template <typename T, int VEC> __device__ __forceinline__ void floats_of(const Raw<VEC * sizeof(T)> &raw, float *x) {
  Words<T, VEC> w;
#pragma unroll
  for (int i = 0; i < w.N; i++) w.word[i] = raw.word[i];
  unpack(w, *reinterpret_cast<float(*)[VEC]>(x));
}

template <typename T, int VEC, bool WHOLE> __device__ __forceinline__ void write(T *p, int left, const float *x) {
  const Words<T, VEC> w = pack<T>(*reinterpret_cast<const float(*)[VEC]>(x));
  Raw<VEC * sizeof(T)> raw;
#pragma unroll
  for (int i = 0; i < w.N; i++) raw.word[i] = w.word[i];
  if constexpr (WHOLE) {
    write_raw(p, raw);
  } else {
#pragma unroll
    for (int i = 0; i < VEC; i++)
      if (i < left) {
        if constexpr (sizeof(T) == 4)
          p[i] = x[i];
        else
          p[i].bits = (unsigned short)(raw.word[i / 2] >> i % 2 * 16);
      }
  }
}
