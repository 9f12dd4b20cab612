// Codes of a prepared weight (quantized_weight.py has its layout) as pairs of 16-bit floats, under a magic number: no subnormals
// but fp8's in bf16, where `fma` keeps them.
#pragma once
#include "stream.cuh"

__device__ __forceinline__ u32 fma_pair(bf16, u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

__device__ __forceinline__ u32 fma_pair(fp16, u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// (a & b) | c, or (~a & b) | c
template <int TABLE> __device__ __forceinline__ u32 bits_of(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return r;
}
constexpr int UNDER = 0xea, WITHOUT = 0xae;

// ---- codes to floats: the pair of slice i of a word ------------------------------------------------------------------------

enum Format { INT4, INT8, FP8 };

// What is added to int4's codes under their magic number, 128 + code in bf16 and 1024 + code in fp16: the same of the zero point,
// negative.
__device__ __forceinline__ u32 minus_pair(bf16, u32 zero) { return zero * 0x00010001u | 0xc300c300u; }
__device__ __forceinline__ u32 minus_pair(fp16, u32 zero) { return zero * 0x00010001u | 0xe400e400u; }

// One instruction takes bits under a mask and puts a magic number beside them, but only one of the two may be a constant in it.
template <typename T, Format FORMAT> constexpr u32 MASK = 0;
template <typename T> constexpr u32 MASK<T, INT4> = 0x000f000f;
template <> constexpr u32 MASK<bf16, INT8> = 0x007f007f;
template <> constexpr u32 MASK<bf16, FP8> = 0x07f007f0;
template <> constexpr u32 MASK<fp16, FP8> = 0x3f803f80;

template <Format FORMAT, int SLICE> __device__ __forceinline__ u32 pair_of(bf16, u32 word, u32 mask, u32 minus) {
  constexpr u32 ONE = 0x3f803f80, MAGIC = 0x43004300;
  if constexpr (FORMAT == INT4) return fma_pair(bf16{}, (word >> 4 * SLICE & mask) | MAGIC, ONE, minus);
  if constexpr (FORMAT == INT8) {  // seven bits fit beside the magic number; the eighth says whether 128 or 256 goes off again
    const u32 u = word >> 8 * SLICE;
    return fma_pair(bf16{}, (u & mask) | MAGIC, ONE, bits_of<WITHOUT>(u, mask ^ 0x00ff00ff, 0xc300c300));
  }
  const u32 sign = (SLICE ? word : word << 8) & 0x80008000, size = SLICE ? word >> 4 : word << 4;  // · 2⁻¹²⁰
  return fma_pair(bf16{}, (size & mask) | sign, 0x7b807b80, 0x80008000);
}

template <Format FORMAT, int SLICE> __device__ __forceinline__ u32 pair_of(fp16, u32 word, u32 mask, u32 minus) {
  constexpr u32 ONE = 0x3c003c00, MAGIC = 0x64006400;
  if constexpr (FORMAT == INT4) return fma_pair(fp16{}, (word >> 4 * SLICE & mask) | MAGIC, ONE, minus);
  if constexpr (FORMAT == INT8) return fma_pair(fp16{}, __byte_perm(word, 0x64646464, SLICE ? 0x4341 : 0x4240), ONE, 0xe480e480);
  const u32 sign = (SLICE ? word : word << 8) & 0x80008000, size = SLICE ? word >> 1 : word << 7;  // · 2⁻⁸, as it stays until the end
  return (size & mask) | sign;
}

// What fp8's values have left to be multiplied by.
__device__ __forceinline__ float fp8_unit(bf16) { return 1.f; }
__device__ __forceinline__ float fp8_unit(fp16) { return 256.f; }
