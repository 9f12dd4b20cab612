// Hopper's products whose first operand is in registers (sm_90a), as the sums of another product leave it there.
#pragma once
#include "hopper_wgmma.cuh"

// D[64, N] += A[64, 16] B[N, 16]. A's four words of a thread are 16-bit pairs: rows lane / 4 and that + 8 of columns 2 (lane % 4) (+ 1), then
// the same of columns 8 more: of sums in order, packed by twos, words 4 i to 4 i + 3 are columns 16 i to 16 i + 15.
#define MULTIPLY_REGISTERS(TYPES, TAIL)                                                                                    \
  if constexpr (N == 128)                                                                                                   \
    asm volatile(OPEN("%69") "m64n128k16" TYPES " {" P32_0 "," P32_1 "}, {%64, %65, %66, %67}, %68, p, 1, 1" TAIL ";\n}"      \
                 : D32("f", 0), D32("f", 32)                                                                                \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(keep));                                                  \
  else                                                                                                                      \
    asm volatile(OPEN("%37") "m64n64k16" TYPES " {" P32_0 "}, {%32, %33, %34, %35}, %36, p, 1, 1" TAIL ";\n}"                \
                 : D32("f", 0)                                                                                              \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(keep));

template <typename T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;

template <typename T> struct FromRegisters {
  template <int N, bool B_ACROSS> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int keep) {
    static_assert(N == 64 || N == 128, "widths that something uses");
    if constexpr (IS_BF16<T> && B_ACROSS) { MULTIPLY_REGISTERS(".f32.bf16.bf16", ", 1") }
    if constexpr (IS_BF16<T> && !B_ACROSS) { MULTIPLY_REGISTERS(".f32.bf16.bf16", ", 0") }
    if constexpr (!IS_BF16<T> && B_ACROSS) { MULTIPLY_REGISTERS(".f32.f16.f16", ", 1") }
    if constexpr (!IS_BF16<T> && !B_ACROSS) { MULTIPLY_REGISTERS(".f32.f16.f16", ", 0") }
  }
};

template <int COUNT> __device__ __forceinline__ void hold(u32 (&a)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// Four 8 x 8 matrices of 16-bit floats to shared memory: lanes 8 i to 8 i + 7 say where the rows of the i-th go, as two words of a
// product's first operand and the next two lie.
__device__ __forceinline__ void store_four(void *row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
