// wgmma with A in registers (sm_90a): D[64, N] += A[64, 16] B[N, 16], where a thread has of its warp's 16 rows of A what
// mma.m16n8k16 would want of it. Sums of another product, packed in pairs, are such an A.
#pragma once
#include "hopper_wgmma.cuh"

#define REGISTER_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(int(ACROSS))
#define MULTIPLY_REGISTERS(TYPES)                                                                                            \
  if constexpr (N == 256)                                                                                                   \
    asm volatile(OPEN("%133") "m64n256k16" TYPES " {" P32_0 "," P32_1 "," P32_2 "," P32_3                                     \
                              "}, {%128,%129,%130,%131}, %132, p, 1, 1, %134;\n}"                                             \
                 : D32("f", 0), D32("f", 32), D32("f", 64), D32("f", 96)                                                    \
                 : REGISTER_INPUTS);                                                                                        \
  else if constexpr (N == 192)                                                                                              \
    asm volatile(OPEN("%101") "m64n192k16" TYPES " {" P32_0 "," P32_1 "," P32_2 "}, {%96,%97,%98,%99}, %100, p, 1, 1, %102;\n}" \
                 : D32("f", 0), D32("f", 32), D32("f", 64)                                                                  \
                 : REGISTER_INPUTS);                                                                                        \
  else if constexpr (N == 128)                                                                                              \
    asm volatile(OPEN("%69") "m64n128k16" TYPES " {" P32_0 "," P32_1 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"             \
                 : D32("f", 0), D32("f", 32)                                                                                \
                 : REGISTER_INPUTS);                                                                                        \
  else                                                                                                                      \
    asm volatile(OPEN("%37") "m64n64k16" TYPES " {" P32_0 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}" : D32("f", 0) : REGISTER_INPUTS);

// `ACROSS`: K is not the contiguous axis of B.
template <int N, bool ACROSS> __device__ __forceinline__ void multiply_registers(bf16, float (&d)[N / 2], const u32 (&a)[4], u64 b, int keep) {
  MULTIPLY_REGISTERS(".f32.bf16.bf16")
}
template <int N, bool ACROSS> __device__ __forceinline__ void multiply_registers(fp16, float (&d)[N / 2], const u32 (&a)[4], u64 b, int keep) {
  MULTIPLY_REGISTERS(".f32.f16.f16")
}

template <int COUNT> __device__ __forceinline__ void hold(u32 (&a)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[i][j])::"memory");
}
