// What becomes of a tile's sums on Hopper: handed from block to block, activated, mirrored, staged for TMA.
#pragma once
#include "activations.cuh"
#include "hopper_pipeline.cuh"

// ---- sums handed from block to block: 128 threads, all in the same layout ----------------------------------------------------

__device__ __forceinline__ float4 four(const float *x) { return {x[0], x[1], x[2], x[3]}; }
__device__ __forceinline__ int4 four(const int *x) { return {x[0], x[1], x[2], x[3]}; }
// Where a thread's numbers i to i + 3 of a part lie.
template <typename Sum> __device__ __forceinline__ auto &four_at(Sum *part, int i, int thread) {
  return reinterpret_cast<decltype(four(part)) *>(part)[i / 4 * 128 + thread];
}

template <typename Sum, int COUNT> __device__ __forceinline__ void give(Sum *to, const Sum (&sums)[COUNT], u32 *flag, int thread, int meeting) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) four_at(to, i, thread) = four(&sums[i]);
  group_barrier(meeting);  // then thread 0's release is one for the stores of all
  if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}

// Waits for the flag and takes it down, for the next launch.
template <typename Sum, int COUNT> __device__ __forceinline__ void take(Sum (&sums)[COUNT], Sum *from, u32 *flag, int thread, int meeting) {
  if (thread == 0) {
    u32 is;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is) : "l"(flag) : "memory");
    while (!is);
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(0) : "memory");
  }
  group_barrier(meeting);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const auto more = four_at(from, i, thread);
    sums[i] += more.x, sums[i + 1] += more.y, sums[i + 2] += more.z, sums[i + 3] += more.w;
  }
}

// ---- what becomes of the sums ------------------------------------------------------------------------------------------

// Columns `column`, column + 1 of a vector, as floats; 0 past its end.
template <typename O> __device__ __forceinline__ float2 two_of(const O *vector, int column, int columns) {
  float2 pair = {0.f, 0.f};
  if constexpr (sizeof(O) == 4) {
    if (column < columns) pair.x = vector[column];
    if (column + 1 < columns) pair.y = vector[column + 1];
  } else {
    u32 word = 0;
    if (column < columns) word = vector[column].bits;
    if (column + 1 < columns) word |= u32(vector[column + 1].bits) << 16;
    float f[2];
    unpack(Words<O, 2>{word}, f);
    pair = {f[0], f[1]};
  }
  return pair;
}

// Two numbers as fp8, the first in the lower byte: to the nearest, ties to even, within +-448; NaN stays.
__device__ __forceinline__ unsigned short codes_of(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

template <bool FIRST, typename A, typename B> struct Chosen { using Type = A; };
template <typename A, typename B> struct Chosen<false, A, B> { using Type = B; };

template <typename O> constexpr bool INTEGERS = false;
template <> constexpr bool INTEGERS<int> = true;

template <bool FIRST, typename A, typename B> __device__ __forceinline__ auto &either(A &a, B &b) {
  if constexpr (FIRST)
    return a;
  else
    return b;
}

// How many scales there are: one, or as many as A has rows and B columns; what is multiplied before and with the residual.
struct Factors { int a_scales, b_scales; float alpha, beta, gamma; };

// Scales, a_scale and b_scale: none; [M] and [N], or one each; for every 128 of K (a stage of 8-bit operands) [M, K / 128] and
// [N / 128, K / 128], where N / 128 is rounded up.
enum Scales { UNSCALED, SCALED, SCALED_BY_BLOCK };

// ---- C and its mirror image to where TMA takes them from ---------------------------------------------------------------

// Two 8 x 8 matrices of 16-bit floats to shared memory; lanes 0 to 15 say where their rows go.
__device__ __forceinline__ void store_matrices(void *row, u32 upper, u32 lower) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(upper), "r"(lower) : "memory");
}

// The same with columns as rows.
__device__ __forceinline__ void store_turned(void *row, u32 upper, u32 lower) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(upper), "r"(lower) : "memory");
}

// An 8 x 8 matrix, two columns of a row in each lane, with its lower triangle mirrored into the upper if it is `on_diagonal`. There is no
// branch around this: with one, the compiler no longer sees that a warp's threads agree, and keeps descriptors in registers of threads.
__device__ __forceinline__ u32 mirrored(u32 own, int lane, bool on_diagonal) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(own));
  const int right = lane % 4 * 2 - lane / 4;  // of the diagonal
  const u32 taken = !on_diagonal || right < 0 ? 0u : right == 0 ? 0xffff0000u : ~0u;
  return (own & ~taken) | (turned & taken);
}

// Columns 8 j to 8 j + 7 of a warp's 16 rows to a slab of 64 rows, and their mirror image to the slab that follows. A lane has rows lane / 4
// (`upper`) and lane / 4 + 8 (`lower`), of each columns 2 (lane % 4) and the next. On the `diagonal` the slab is its own image.
__device__ __forceinline__ void store_with_image(unsigned char *place_of_c, u32 upper, u32 lower, int j, int warp, int lane, bool diagonal) {
  // On the diagonal the lower half and its image go to one place, the upper half and its own to another, which is not put.
  unsigned char *const image = place_of_c + ATOM;
  (j % 2 ? lower : upper) = mirrored(j % 2 ? lower : upper, lane, diagonal && j / 2 == warp);
  const int eight = 2 * warp + lane / 8 % 2, r = lane % 8;  // of the slab's rows: which, and which of them
  const auto to = [&](unsigned char *slab, int eight_rows, int sixteen) {
    return slab + (8 * eight_rows + r) * LINE + (sixteen ^ r) * 16;
  };
  store_matrices(to(diagonal && j > eight ? image : place_of_c, eight, j), upper, lower);
  store_turned(to(diagonal && j < eight ? place_of_c : image, j, eight), upper, lower);
}

// Stores the first `left` 16-bit floats of row r of a slab, whose rows have PITCH bytes and the swizzle of TMA, to where they begin anywhere:
// a lane for each 16 bytes of the slab's row, one after another, stores 16 that begin on 16, and elements before the first and after the last of them.
template <int PITCH> __device__ __forceinline__ void store_loose(unsigned short *to, int left, int lane, const unsigned char *slab, int r) {
  constexpr int CHUNKS = PITCH / 16;
  auto chunk = [&](int i) { return slab + r * PITCH + ((i ^ r * PITCH / LINE) % CHUNKS) * 16; };
  const int before = int(-(reinterpret_cast<u64>(to) / 2) % 8), at = before + 8 * lane;  // elements before the first 16 bytes, before this lane's
  const auto low = load_shared<bf16, 8>(reinterpret_cast<const bf16 *>(chunk(lane))), high = load_shared<bf16, 8>(reinterpret_cast<const bf16 *>(chunk(lane + 1)));
  u32 word[8];
#pragma unroll
  for (int i = 0; i < 8; i++) word[i] = i < 4 ? low.word[i] : high.word[i - 4];
#pragma unroll
  for (int i = 0; i < 6; i++) word[i] = before & 4 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < 5; i++) word[i] = before & 2 ? word[i + 1] : word[i];
  Words<bf16, 8> made;
#pragma unroll
  for (int i = 0; i < 4; i++) made.word[i] = before & 1 ? word[i] >> 16 | word[i + 1] << 16 : word[i];
  if (at + 8 <= left) store<bf16, 8>(reinterpret_cast<bf16 *>(to + at), made);
  auto element = [&](int e) { to[e] = *reinterpret_cast<const unsigned short *>(chunk(e / 8) + e % 8 * 2); };
  const int end = before + (left - before) / 8 * 8;
#pragma unroll
  for (int e = lane; e < 8; e += CHUNKS) {
    if (e < min(before, left)) element(e);
    if (end + e < left) element(end + e);
  }
}
