// Hopper's products of matrices in shared memory (sm_90a), for every type of operand and width of tile.
#pragma once
#include "hopper_pipeline.cuh"

struct e4m3 { unsigned char bits; };
struct s8 { signed char value; };

// ---- wgmma: D[64, N] += A[64, 32 bytes of K] B[N, 32 bytes of K], both in shared memory ---------------------------------

// Where an operand lies: 128-byte swizzle; `leading` bytes from one block of 64 elements to the next (K not contiguous),
// `stride` from 8 rows to the next 8.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading) {
  constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = u64(8 * LINE >> 4) << 32;
  return SWIZZLE_128 | EIGHT_ROWS | u64(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}

#define P8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define P32_0 P8(0, 1, 2, 3, 4, 5, 6, 7) "," P8(8, 9, 10, 11, 12, 13, 14, 15) "," P8(16, 17, 18, 19, 20, 21, 22, 23) "," P8(24, 25, 26, 27, 28, 29, 30, 31)
#define P32_1 P8(32, 33, 34, 35, 36, 37, 38, 39) "," P8(40, 41, 42, 43, 44, 45, 46, 47) "," P8(48, 49, 50, 51, 52, 53, 54, 55) "," P8(56, 57, 58, 59, 60, 61, 62, 63)
#define P16_1 P8(32, 33, 34, 35, 36, 37, 38, 39) "," P8(40, 41, 42, 43, 44, 45, 46, 47)
#define P16_2 P8(64, 65, 66, 67, 68, 69, 70, 71) "," P8(72, 73, 74, 75, 76, 77, 78, 79)
#define P32_2 P16_2 "," P8(80, 81, 82, 83, 84, 85, 86, 87) "," P8(88, 89, 90, 91, 92, 93, 94, 95)
#define P32_3 P8(96, 97, 98, 99, 100, 101, 102, 103) "," P8(104, 105, 106, 107, 108, 109, 110, 111) "," P8(112, 113, 114, 115, 116, 117, 118, 119) "," P8(120, 121, 122, 123, 124, 125, 126, 127)
#define D8(c, i) "+" c(d[i]), "+" c(d[i + 1]), "+" c(d[i + 2]), "+" c(d[i + 3]), "+" c(d[i + 4]), "+" c(d[i + 5]), "+" c(d[i + 6]), "+" c(d[i + 7])
#define D32(c, i) D8(c, i), D8(c, i + 8), D8(c, i + 16), D8(c, i + 24)
#define OPEN(keep) "{\n.reg .pred p;\nsetp.ne.b32 p, " keep ", 0;\nwgmma.mma_async.sync.aligned."
// D += A B (D = A B unless `keep`); K and TYPES as in the instruction's name, C the constraint of D, TAIL what follows p.
#define MULTIPLY(K, TYPES, C, TAIL)                                                                                         \
  if constexpr (N == 256)                                                                                                   \
    asm volatile(OPEN("%130") "m64n256k" K TYPES " {" P32_0 "," P32_1 "," P32_2 "," P32_3 "}, %128, %129, p" TAIL ";\n}"     \
                 : D32(C, 0), D32(C, 32), D32(C, 64), D32(C, 96)                                                            \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 192)                                                                                              \
    asm volatile(OPEN("%98") "m64n192k" K TYPES " {" P32_0 "," P32_1 "," P32_2 "}, %96, %97, p" TAIL ";\n}"                  \
                 : D32(C, 0), D32(C, 32), D32(C, 64)                                                                        \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 176)                                                                                              \
    asm volatile(OPEN("%90") "m64n176k" K TYPES " {" P32_0 "," P32_1 "," P16_2 "," P8(80, 81, 82, 83, 84, 85, 86, 87)        \
                             "}, %88, %89, p" TAIL ";\n}"                                                                    \
                 : D32(C, 0), D32(C, 32), D8(C, 64), D8(C, 72), D8(C, 80)                                                   \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 160)                                                                                              \
    asm volatile(OPEN("%82") "m64n160k" K TYPES " {" P32_0 "," P32_1 "," P16_2 "}, %80, %81, p" TAIL ";\n}"                  \
                 : D32(C, 0), D32(C, 32), D8(C, 64), D8(C, 72)                                                              \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 128)                                                                                              \
    asm volatile(OPEN("%66") "m64n128k" K TYPES " {" P32_0 "," P32_1 "}, %64, %65, p" TAIL ";\n}"                            \
                 : D32(C, 0), D32(C, 32)                                                                                    \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 112)                                                                                              \
    asm volatile(OPEN("%58") "m64n112k" K TYPES " {" P32_0 "," P16_1 "," P8(48, 49, 50, 51, 52, 53, 54, 55) "}, %56, %57, p" TAIL ";\n}" \
                 : D32(C, 0), D8(C, 32), D8(C, 40), D8(C, 48)                                                               \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 96)                                                                                               \
    asm volatile(OPEN("%50") "m64n96k" K TYPES " {" P32_0 "," P16_1 "}, %48, %49, p" TAIL ";\n}"                              \
                 : D32(C, 0), D8(C, 32), D8(C, 40)                                                                          \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 80)                                                                                               \
    asm volatile(OPEN("%42") "m64n80k" K TYPES " {" P32_0 "," P8(32, 33, 34, 35, 36, 37, 38, 39) "}, %40, %41, p" TAIL ";\n}" \
                 : D32(C, 0), D8(C, 32)                                                                                     \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else                                                                                                                      \
    asm volatile(OPEN("%34") "m64n64k" K TYPES " {" P32_0 "}, %32, %33, p" TAIL ";\n}" : D32(C, 0) : "l"(a), "l"(b), "r"(keep));
#define MULTIPLY_ANY_LAYOUT(TYPES)                                                                \
  if constexpr (!A_ACROSS && !B_ACROSS) { MULTIPLY("16", TYPES, "f", ", 1, 1, 0, 0") }               \
  if constexpr (!A_ACROSS && B_ACROSS) { MULTIPLY("16", TYPES, "f", ", 1, 1, 0, 1") }                \
  if constexpr (A_ACROSS && !B_ACROSS) { MULTIPLY("16", TYPES, "f", ", 1, 1, 1, 0") }                \
  if constexpr (A_ACROSS && B_ACROSS) { MULTIPLY("16", TYPES, "f", ", 1, 1, 1, 1") }

// `ACROSS`: K is not the contiguous axis.
template <typename T> struct Unit;
template <> struct Unit<bf16> {
  typedef float Sum;
  template <int N, bool A_ACROSS, bool B_ACROSS> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY_ANY_LAYOUT(".f32.bf16.bf16")
  }
};
template <> struct Unit<fp16> {
  typedef float Sum;
  template <int N, bool A_ACROSS, bool B_ACROSS> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY_ANY_LAYOUT(".f32.f16.f16")
  }
};
template <> struct Unit<float> {  // tf32: the lower 13 bits of the mantissa are not looked at
  typedef float Sum;
  template <int N, bool, bool> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY("8", ".f32.tf32.tf32", "f", ", 1, 1")
  }
};
template <> struct Unit<e4m3> {
  typedef float Sum;
  template <int N, bool, bool> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY("32", ".f32.e4m3.e4m3", "f", ", 1, 1")
  }
};
template <> struct Unit<s8> {
  typedef int Sum;
  template <int N, bool, bool> static __device__ __forceinline__ void multiply(int (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY("32", ".s32.s8.s8", "r", "")
  }
};

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler may neither move nor copy what an asynchronous product is still writing.
template <int COUNT> __device__ __forceinline__ void hold(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT> __device__ __forceinline__ void hold(int (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
}
