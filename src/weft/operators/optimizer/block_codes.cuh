// States in 8 bits as in kernels.py, in CUDA C++: codes of eight elements a thread, made without a search.
#pragma once
#include "elements.cuh"

enum Format { DYNAMIC, E4M3 };
constexpr int TABLE = 65536;  // bytes of either one: 256 indices, each with 128 bytes for the signed map and 128 for the other
constexpr u32 DECODER = 1024, ENCODER = DECODER + TABLE;  // addresses: shared memory begins after a KiB of the system's
constexpr float CELL_SCALE = 1.54297f * 32768;            // CELL_SCALE of dynamic_map.py
constexpr float LARGEST_E4M3 = 448;
constexpr float ABOVE = 1 + 0x1p-20f;  // so that the largest magnitude, times its rounded inverse, is not below 1
constexpr float SMALLEST = 0x1p-126f;  // a block whose largest magnitude is below counts as 0
constexpr float MAGIC = 0x1.8p23f;     // its last place is 1

// ---- instructions ----------------------------------------------------------------------------------------------------

// The larger magnitude; NaN where one is.
__device__ __forceinline__ float larger(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(fabsf(a)), "f"(fabsf(b)));
  return r;
}

// x rounded up to a whole number 0 … 255, in the lowest byte.
__device__ __forceinline__ u32 ceiling(float x) {
  float r;
  asm("add.rp.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(MAGIC));
  return __float_as_uint(r);
}

__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float at_shared(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ float2 pair_at_shared(u32 address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}

// Two e4m3 as two fp16.
__device__ __forceinline__ u32 halves_of_e4m3(unsigned short pair) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
  return r;
}

// ---- 8 codes of a thread: PARTS times VEC side by side -------------------------------------------------------------------

// Codes; what is past the end is 0 (of the signed map 127).
template <int VEC, bool WHOLE> __device__ __forceinline__ Raw<VEC> read_codes(const unsigned char *p, int left, u32 zero) {
  if constexpr (WHOLE) return read_raw<VEC>(p);
  Raw<VEC> raw;
#pragma unroll
  for (int i = 0; i < VEC / 4; i++) raw.word[i] = 0;
#pragma unroll
  for (int i = 0; i < VEC; i++) raw.word[i / 4] |= (i < left ? p[i] : zero) << i % 4 * 8;
  return raw;
}

template <int VEC, bool WHOLE> __device__ __forceinline__ void write_codes(unsigned char *p, int left, const Raw<VEC> &raw) {
  if constexpr (WHOLE) {
    write_raw(p, raw);
  } else {
#pragma unroll
    for (int i = 0; i < VEC; i++)
      if (i < left) p[i] = (unsigned char)(raw.word[i / 4] >> i % 4 * 8);
  }
}

// The lowest bytes of four words.
__device__ __forceinline__ u32 lowest_bytes(u32 a, u32 b, u32 c, u32 d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// ---- codes -----------------------------------------------------------------------------------------------------------

// What the codes of a word stand for, of e4m3 times 448.
template <Format FORMAT, bool SIGNED>
__device__ __forceinline__ void decode(u32 lane, u32 word, float *x) {
  if constexpr (FORMAT == DYNAMIC) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      x[i] = at_shared(__byte_perm(word, lane * 4, 0x5504 | i << 4) + DECODER + (SIGNED ? 0 : 128));
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 pair = halves_of_e4m3((unsigned short)(word >> i * 16));
      x[2 * i] = half_to_float((unsigned short)pair);
      x[2 * i + 1] = half_to_float((unsigned short)(pair >> 16));
    }
  }
}

// Codes of four numbers of a block, y = x * factor. Of a second moment in e4m3, x is its root, and `above` says whether it is
// more than 0.
template <Format FORMAT, bool SIGNED>
__device__ __forceinline__ u32 encode(u32 lane, const float *x, const float *above, float factor) {
  if constexpr (FORMAT == DYNAMIC) {
    u32 code[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float y[2] = {x[i] * factor, x[i + 1] * factor};
      const u32 cells = pack_pair(fp16{}, y[0], y[1]);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 at = __byte_perm(cells, lane % 16 * 8, j ? 0x5534 : 0x5514);
        const float2 line = pair_at_shared(at + ENCODER + (SIGNED ? 0 : 128));
        code[i + j] = ceiling(fmaf(y[j], line.x, line.y));
      }
    }
    return lowest_bytes(code[0], code[1], code[2], code[3]);
  } else {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      y[i] = fmaf(x[i], factor, 0.f);  // no negative 0
      if (!SIGNED && above[i] > 0.f) y[i] = fmaxf(y[i], 0x1p-9f);  // e4m3's smallest
    }
    return e4m3_pair(y[0], y[1]) | e4m3_pair(y[2], y[3]) << 16;
  }
}

constexpr u32 LOW = 32u << 23, HIGH = 224u << 23;  // 2**-95 and 2**97: between them the inverse of a number is a normal one

// What the numbers of a block (of a second moment in e4m3 their roots) are multiplied by.
template <Format FORMAT, bool SIGNED> __device__ __forceinline__ float factor_of(float top) {
  if (FORMAT == DYNAMIC) return fast_inverse(top) * (ABOVE * CELL_SCALE);
  return fast_inverse(SIGNED ? top : fast_root(top)) * LARGEST_E4M3;
}

// The same where `top` is any number. In a block that counts as 0 or is lost, numbers are changed so that encode() finds the
// codes of 0 and of what is not finite.
template <Format FORMAT, bool SIGNED, int COUNT>
__device__ __forceinline__ float rare_factor(float *x, float *root, float top, float largest) {
  if (!(largest >= SMALLEST && largest < __uint_as_float(INFINITE))) {
    const float lost = FORMAT == E4M3 ? __uint_as_float(0x7fc00000) : SIGNED ? -CELL_SCALE : 0.f;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = (__float_as_uint(x[i]) & INFINITE) == INFINITE ? lost : 0.f, root[i] = x[i];
    return 1.f;
  }
  if (FORMAT == E4M3 && !SIGNED) return factor_of<FORMAT, SIGNED>(top);
  const float scale = __float_as_uint(top) >= HIGH ? 0x1p-64f : __float_as_uint(top) < LOW ? 0x1p64f : 1.f;
#pragma unroll
  for (int i = 0; i < COUNT; i++) x[i] *= scale;
  return factor_of<FORMAT, SIGNED>(top * scale);
}

// Codes of COUNT numbers of a block. root: theirs, of a second moment.
template <Format FORMAT, bool SIGNED, int COUNT>
__device__ __forceinline__ Raw<COUNT> codes_of(u32 lane, const float *x, const float *root, float factor) {
  Raw<COUNT> made;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
    made.word[i / 4] = encode<FORMAT, SIGNED>(lane, FORMAT == DYNAMIC || SIGNED ? x + i : root + i, x + i, factor);
  return made;
}

template <Format FORMAT, bool SIGNED, int COUNT>
__device__ __forceinline__ Raw<COUNT> rare_codes_of(u32 lane, const float *x, const float *root, float top, float largest) {
  float own[COUNT], own_root[COUNT];  // changing those of the caller would cost moves where it is not rare
#pragma unroll
  for (int i = 0; i < COUNT; i++) own[i] = x[i], own_root[i] = root[i];
  const float factor = rare_factor<FORMAT, SIGNED, COUNT>(own, own_root, top, largest);
  return codes_of<FORMAT, SIGNED, COUNT>(lane, own, own_root, factor);
}
