// Hopper's products with a 2:4 semi-structured matrix (sm_90a): its kept elements in shared memory, their places in registers.
#pragma once
#include "hopper_wgmma.cuh"

// D[64, N] += A[64, 32] B[N, 32] (D = A B unless `keep`). Of A two elements of every four are kept, 32 bytes a row; `places` says which, in
// the two lanes 2 SELECTOR and 2 SELECTOR + 1 of every four: lane 4 g + 2 SELECTOR + h has those of columns 16 h to 16 h + 15, of row g of
// the warp's 16 in the lower and of row g + 8 in the upper half, four bits for four columns (PTX ISA, "Matrix fragments for sparse
// wgmma.mma_async.m64nNk32"). Other lanes' words are not looked at.
#define OPEN_SPARSE(keep) "{\n.reg .pred p;\nsetp.ne.b32 p, " keep ", 0;\nwgmma.mma_async.sp.sync.aligned."
#define SPARSE_INPUTS "l"(a), "l"(b), "r"(places), "n"(SELECTOR), "r"(keep), "n"(int(B_ACROSS))
#define MULTIPLY_SPARSE(TYPES)                                                                                                    \
  if constexpr (N == 256)                                                                                                         \
    asm volatile(OPEN_SPARSE("%132") "m64n256k32" TYPES " {" P32_0 "," P32_1 "," P32_2 "," P32_3                                  \
                                     "}, %128, %129, %130, %131, p, 1, 1, 0, %133;\n}"                                             \
                 : D32("f", 0), D32("f", 32), D32("f", 64), D32("f", 96)                                                          \
                 : SPARSE_INPUTS);                                                                                                \
  else if constexpr (N == 192)                                                                                                    \
    asm volatile(OPEN_SPARSE("%100") "m64n192k32" TYPES " {" P32_0 "," P32_1 "," P32_2 "}, %96, %97, %98, %99, p, 1, 1, 0, %101;\n}" \
                 : D32("f", 0), D32("f", 32), D32("f", 64)                                                                        \
                 : SPARSE_INPUTS);                                                                                                \
  else if constexpr (N == 128)                                                                                                    \
    asm volatile(OPEN_SPARSE("%68") "m64n128k32" TYPES " {" P32_0 "," P32_1 "}, %64, %65, %66, %67, p, 1, 1, 0, %69;\n}"           \
                 : D32("f", 0), D32("f", 32)                                                                                      \
                 : SPARSE_INPUTS);                                                                                                \
  else                                                                                                                            \
    asm volatile(OPEN_SPARSE("%36") "m64n64k32" TYPES " {" P32_0 "}, %32, %33, %34, %35, p, 1, 1, 0, %37;\n}"                      \
                 : D32("f", 0)                                                                                                    \
                 : SPARSE_INPUTS);

template <typename T> struct SparseUnit;
template <> struct SparseUnit<bf16> {
  template <int N, int SELECTOR, bool B_ACROSS>
  static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, u32 places, int keep) {
    MULTIPLY_SPARSE(".f32.bf16.bf16")
  }
};
template <> struct SparseUnit<fp16> {
  template <int N, int SELECTOR, bool B_ACROSS>
  static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, u32 places, int keep) {
    MULTIPLY_SPARSE(".f32.f16.f16")
  }
};
