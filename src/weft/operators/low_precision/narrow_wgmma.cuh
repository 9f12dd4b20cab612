// wgmma for few tokens (sm_90a): D[64, N] += A[64, 16] B[N, 16], N = 8 to 64 tokens; A rows of a weight as pairs of floats in
// registers, where a thread has what mma.m16n8k16 would want of it for its warp's 16 rows.
#pragma once
#include "hopper_wgmma.cuh"

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define P16 P8(0, 1, 2, 3, 4, 5, 6, 7) "," P8(8, 9, 10, 11, 12, 13, 14, 15)
#define NARROW(TYPES)                                                                                                            \
  static __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, int keep) {                       \
    if constexpr (N == 8)                                                                                                        \
      asm volatile(OPEN("%9") "m64n8k16" TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"                               \
                   : D4(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                     \
    else if constexpr (N == 16)                                                                                                  \
      asm volatile(OPEN("%13") "m64n16k16" TYPES " {" P8(0, 1, 2, 3, 4, 5, 6, 7) "}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"       \
                   : D8("f", 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                \
    else if constexpr (N == 32)                                                                                                  \
      asm volatile(OPEN("%21") "m64n32k16" TYPES " {" P16 "}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;\n}"                            \
                   : D8("f", 0), D8("f", 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                    \
    else                                                                                                                         \
      asm volatile(OPEN("%37") "m64n64k16" TYPES " {" P32_0 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"                          \
                   : D32("f", 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                               \
  }

template <typename T, int N> struct Narrow;
template <int N> struct Narrow<bf16, N> { NARROW(".f32.bf16.bf16") };
template <int N> struct Narrow<fp16, N> { NARROW(".f32.f16.f16") };

// Four 8 x 8 matrices of 16-bit elements, a row each from where its lane of 32 says: word lane % 4 of row lane / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// What an asynchronous product reads stays in its registers until the product has been waited for.
template <int A, int B> __device__ __forceinline__ void hold(u32 (&r)[A][B]) {
#pragma unroll
  for (int i = 0; i < A; i++)
#pragma unroll
    for (int j = 0; j < B; j++) asm volatile("" : "+r"(r[i][j])::"memory");
}
