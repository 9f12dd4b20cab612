// Dequantisation in packed conversions: a thread writes 16 bytes at a time and has several such vectors in flight.
//
// What neighbouring lanes write lies side by side, and so do the 8 (of int4 4) bytes that they read: nothing is exchanged between
// lanes. A vector of V elements has one scale, but for columns' scales, where a thread keeps V of them for EACH rows.
#include "prelude.cuh"

// A divisor below 2^31 of numbers below 2^31, as Python makes it: ceil(2^(31 + shift) / divisor) and the shift above it.
struct Quotient {
  u32 factor, shift;
  __device__ __forceinline__ explicit Quotient(i64 packed) : factor(u32(packed)), shift(u32(packed >> 32)) {}
  __device__ __forceinline__ u32 of(u32 x) const { return u32(u64(2 * x) * factor >> 32) >> shift; }
};

// ---- formats: codes as they lie in memory → exact fp32 ---------------------------------------------------------------------

__device__ __forceinline__ u32 pair_of_e4m3(unsigned short codes) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes));
  return r;
}

__device__ __forceinline__ u32 multiply_add_pair(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

struct E4m3 {
  static constexpr int PER_BYTE = 1;
  template <int V> static __device__ __forceinline__ void decode(const u32 *codes, float (&f)[V]) {
    Words<fp16, V> w;
#pragma unroll
    for (int i = 0; i < V / 2; i++) w.word[i] = pair_of_e4m3((unsigned short)(codes[i / 2] >> i % 2 * 16));
    unpack(w, f);
  }
};

// The upper byte of an fp16.
struct E5m2 {
  static constexpr int PER_BYTE = 1;
  template <int V> static __device__ __forceinline__ void decode(const u32 *codes, float (&f)[V]) {
    Words<fp16, V> w;
#pragma unroll
    for (int i = 0; i < V / 2; i++) w.word[i] = __byte_perm(codes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
    unpack(w, f);
  }
};

// Below an fp32's exponent of 2^23 a byte is 2^23 + byte; its upper bit inverted, that is 2^23 + 128 + code.
struct Int8 {
  static constexpr int PER_BYTE = 1;
  template <int V> static __device__ __forceinline__ void decode(const u32 *codes, float (&f)[V]) {
#pragma unroll
    for (int i = 0; i < V; i++)
      f[i] = __uint_as_float(__byte_perm(codes[i / 4] ^ 0x80808080u, 0x4b000000, 0x7440 | i % 4)) - 8388736.f;
  }
};

// Four bits below an fp16's exponent of 2^10, their upper bit inverted, are 1032 + code; four bits higher up, 1024 + 16 (8 + code).
struct Int4 {
  static constexpr int PER_BYTE = 2;
  template <int V> static __device__ __forceinline__ void decode(const u32 *codes, float (&f)[V]) {
    const u32 x = V == 8 ? codes[0] : codes[0] | codes[0] << 8;  // element i is four bits at 4 i, i + V / 2 sixteen bits higher
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
      const u32 moved = x >> i / 2 * 8;
      const u32 two = i % 2 ? multiply_add_pair((moved & 0x00f000f0) ^ 0x64806480, 0x2c002c00, 0xd480d480)  // / 16 - 72
                            : multiply_add_pair((moved & 0x000f000f) ^ 0x64086408, 0x3c003c00, 0xe408e408);  // - 1032
      f[i] = half_to_float((unsigned short)two), f[i + V / 2] = half_to_float((unsigned short)(two >> 16));
    }
  }
};

// ---- a vector ----------------------------------------------------------------------------------------------------------------

// With L2::evict_last, as load_stream of prelude.cuh says.
template <int BYTES> __device__ __forceinline__ void load_codes(const unsigned char *p, u32 *codes) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  if constexpr (BYTES == 8)
    asm volatile("ld.global.L1::evict_last.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(codes[0]), "=r"(codes[1])
                 : "l"(p), "l"(policy));
  else if constexpr (BYTES == 4)
    asm volatile("ld.global.L1::evict_last.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(codes[0]) : "l"(p), "l"(policy));
  else
    codes[0] = *reinterpret_cast<const unsigned short *>(p);
}

// Each product in fp32, rounded once more to T. scale: V numbers, or one for all.
template <typename T, typename FORMAT, int V, int SCALES>
__device__ __forceinline__ void write(T *out, const u32 *codes, const float (&scale)[SCALES]) {
  float f[V];
  FORMAT::template decode<V>(codes, f);
#pragma unroll
  for (int i = 0; i < V; i++) f[i] *= scale[SCALES == 1 ? 0 : i];
  store<T, V>(out, pack<T, V>(f));
}

// ---- kernels: out [M, N] dense, of `vectors` vectors, `per_row` a row; of_* are quotients by what they count vectors or rows of --

enum Scales { TENSOR, LINES, GROUPS, BLOCKS, COLUMNS };

// Of the scales of blocks, those of a row: 128 rows of a matrix share a line.
__device__ __forceinline__ u32 line_of_blocks(u32 row, u32 matrix, i64 of_matrix) {
  const u32 m = Quotient(of_matrix).of(row);
  return m * ((matrix + 127) / 128) + (row - m * matrix) / 128;
}

// Values lie in rows, v_row bytes apart. TENSOR, LINES: without a gap; one scale, or one for each line of vectors (of_row).
// GROUPS: a row has s_row scales, one for so many vectors (of_group). BLOCKS: so do 128 rows of a matrix of `matrix` rows.
template <typename T, typename FORMAT, int BY, int THREADS, int EACH>
__global__ void __launch_bounds__(THREADS)
    dequantize_vectors(const unsigned char *values, const float *scale, T *out, i64 vectors, i64 per_row, i64 of_row, i64 of_group,
                       i64 matrix, i64 of_matrix, i64 s_row, i64 v_row) {
  constexpr int V = 16 / sizeof(T), BYTES = V / FORMAT::PER_BYTE;
  const u32 last = u32(vectors) - 1, first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
  u32 codes[EACH][2];
  float scales[EACH][1];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const u32 vector = min(first + e * THREADS, last);  // no branch: all loads leave before the first is waited for
    if constexpr (BY == TENSOR || BY == LINES) {
      load_codes<BYTES>(values + i64(vector) * BYTES, codes[e]);
      scales[e][0] = scale[BY == LINES ? Quotient(of_row).of(vector) : 0];
    } else {
      const u32 row = Quotient(of_row).of(vector), column = vector - row * u32(per_row), group = Quotient(of_group).of(column);
      const u32 line = BY == BLOCKS ? line_of_blocks(row, u32(matrix), of_matrix) : row;
      load_codes<BYTES>(values + row * v_row + i64(column) * BYTES, codes[e]);
      scales[e][0] = scale[line * s_row + group];
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const u32 vector = first + e * THREADS;
    if (vector <= last) write<T, FORMAT, V>(out + i64(vector) * V, codes[e], scales[e]);
  }
}

// One scale a column: a thread has the same V columns in EACH rows.
template <typename T, typename FORMAT, int THREADS, int EACH>
__global__ void __launch_bounds__(THREADS)
    dequantize_columns(const unsigned char *values, const float *scale, T *out, i64 rows, i64 per_row, i64 of_row, i64 v_row) {
  constexpr int V = 16 / sizeof(T), BYTES = V / FORMAT::PER_BYTE;
  const u32 thread = blockIdx.x * THREADS + threadIdx.x, group = Quotient(of_row).of(thread);
  const u32 column = thread - group * u32(per_row);
  const i64 first = i64(group) * EACH;
  if (first >= rows) return;
  float scales[V];
  unpack(load<float, V>(scale + i64(column) * V), scales);
  u32 codes[EACH][2];
#pragma unroll
  for (int e = 0; e < EACH; e++) load_codes<BYTES>(values + min(first + e, rows - 1) * v_row + i64(column) * BYTES, codes[e]);
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (first + e < rows) write<T, FORMAT, V>(out + ((first + e) * per_row + column) * V, codes[e], scales);
}

// ---- rows of any length, values that begin anywhere ----------------------------------------------------------------------------

// BYTES codes from any byte on, in words that are on four bytes; `shift`: bits to move them by, once they are there.
template <int BYTES> __device__ __forceinline__ void load_words(const unsigned char *p, u32 *words, u32 &shift) {
  if constexpr (BYTES == 2) {
    words[0] = p[0] | p[1] << 8, words[1] = shift = 0;
  } else {
    const unsigned char *const from = p - (u64(p) & 3);
    shift = u32(u64(p) & 3) * 8;
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++) load_codes<4>(from + 4 * i, words + i);
    words[BYTES / 4] = 0;
    if (shift) load_codes<4>(from + BYTES, words + BYTES / 4);
  }
}

// out is written as one stretch of vectors. A vector may be of several rows and groups (of `length` columns), with a scale for each
// of its pieces; TWO: it has at most two. of_row, of_group: quotients by n and `length`; of int4 both are even. Other arguments
// as above; values that are no neighbours (v_col) are read one by one.
template <typename T, typename FORMAT, int BY, bool TWO, int THREADS, int EACH>
__global__ void __launch_bounds__(THREADS)
    dequantize_unaligned(const unsigned char *values, const float *scale, T *out, i64 elements, i64 n, i64 of_row, i64 length,
                         i64 of_group, i64 matrix, i64 of_matrix, i64 s_row, i64 v_row, i64 v_col) {
  constexpr int V = 16 / sizeof(T), PER_BYTE = FORMAT::PER_BYTE, BYTES = V / PER_BYTE;
  const u32 width = u32(n), first = (blockIdx.x * (THREADS * EACH) + threadIdx.x) * V;
  const bool dense = v_row * PER_BYTE == n;
  const auto scale_of = [&](u32 row, u32 group) {
    return scale[(BY == BLOCKS ? line_of_blocks(row, u32(matrix), of_matrix) : row) * s_row + group];
  };
  u32 words[EACH][3], shifts[EACH], pieces[EACH];  // elements of a first piece
  float scales[EACH][2];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const u32 at = min(first + e * (THREADS * V), u32(elements) - 1), row = Quotient(of_row).of(at), column = at - row * width;
    if (v_col == 1 && at + V <= u32(elements) && (dense || column + V <= width)) {
      load_words<BYTES>(values + row * v_row + column / PER_BYTE, words[e], shifts[e]);
    } else {
      words[e][0] = words[e][1] = words[e][2] = shifts[e] = 0;
      u32 r = row, c = column;
#pragma unroll
      for (int i = 0; i < BYTES; i++) {
        if (at + i * PER_BYTE < u32(elements)) words[e][i / 4] |= u32(values[r * v_row + c / PER_BYTE * v_col]) << i % 4 * 8;
        if ((c += PER_BYTE) >= width) c = 0, r++;
      }
    }
    if constexpr (TWO) {
      const u32 group = Quotient(of_group).of(column);
      const u32 last = column + min(u32(elements) - at, u32(V)) - 1, down = last >= width;
      pieces[e] = min(width, (group + 1) * u32(length)) - column;
      scales[e][0] = scale_of(row, group);
      scales[e][1] = scale_of(row + down, Quotient(of_group).of(down ? last - width : last));
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const u32 at = first + e * (THREADS * V);
    if (at >= u32(elements)) return;
    const u32 there = min(u32(elements) - at, u32(V)), *const w = words[e];
    const u32 codes[2] = {u32((u64(w[1]) << 32 | w[0]) >> shifts[e]), u32((u64(w[2]) << 32 | w[1]) >> shifts[e])};
    float f[V];
    FORMAT::template decode<V>(codes, f);
    u32 row = Quotient(of_row).of(at), column = at - row * width;
    if constexpr (TWO) {
#pragma unroll
      for (u32 i = 0; i < V; i++) f[i] *= i < pieces[e] ? scales[e][0] : scales[e][1];
    } else if constexpr (BY == TENSOR || BY == COLUMNS) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        f[i] *= scale[BY == COLUMNS ? column : 0];
        if (++column == width) column = 0;
      }
    } else {
      for (u32 i = 0, end; i < there; i = end) {
        const u32 group = Quotient(of_group).of(column);
        end = min(there, i + min(width, (group + 1) * u32(length)) - column);
        const float s = scale_of(row, group);
#pragma unroll
        for (u32 k = 0; k < V; k++)
          if (k >= i && k < end) f[k] *= s;
        if ((column += end - i) == width) column = 0, row++;
      }
    }
    const Words<T, V> packed = pack<T, V>(f);
    if (there == V) store<T, V>(out + at, packed);
#pragma unroll
    for (u32 i = 0; i < V; i++) {
      if (there < V && i < there) {
        if constexpr (sizeof(T) == 4)
          reinterpret_cast<u32 *>(out)[at + i] = packed.word[i];
        else
          reinterpret_cast<unsigned short *>(out)[at + i] = (unsigned short)(packed.word[i / 2] >> i % 2 * 16);
      }
    }
  }
}
