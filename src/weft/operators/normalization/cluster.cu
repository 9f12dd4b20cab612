// RMSNorm and LayerNorm (CENTERED) of long rows, with or without a residual ADDED first: a cluster of blocks shares a row, or
// ROWS of them (rows.cuh), which are read once and written once. Blocks exchange one pair of sums a row. Each block's part of
// weight and bias comes out of L2 into shared memory meanwhile: of 16-bit floats as many bytes as x with a weight, twice as
// many with a bias, and that is more than L2 gives unless two rows share them.
#include "moments.cuh"

// What blocks exchange of each row: RMSNorm the sum of x², alone since every shuffle delays the row. LayerNorm of 16 bits the sums of
// x and of (x - around)², with the row's first element for `around`, so that little cancels. Of 32 bits that is not little enough where
// that element lies four deviations from the mean: there squares are about each thread's own mean, and joined (moments.cuh).
template <bool CENTERED, int ROWS> struct Sums;
template <> struct Sums<false, 1> { typedef float Type; };
template <> struct Sums<true, 1> { typedef float2 Type; };
template <> struct Sums<true, 2> { typedef float4 Type; };

__device__ __forceinline__ void add(float &sums, int, float, float squares) { sums += squares; }
__device__ __forceinline__ void add(float2 &sums, int, float plain, float squares) { sums.x += plain, sums.y += squares; }
__device__ __forceinline__ void add(float4 &sums, int row, float plain, float squares) {
  if (row == 0)
    sums.x += plain, sums.y += squares;
  else
    sums.z += plain, sums.w += squares;
}
__device__ __forceinline__ float warp_total(float sums) { return warp_sum(sums); }
__device__ __forceinline__ float2 warp_total(float2 sums) { return {warp_sum(sums.x), warp_sum(sums.y)}; }
__device__ __forceinline__ float4 warp_total(float4 sums) {
  return {warp_sum(sums.x), warp_sum(sums.y), warp_sum(sums.z), warp_sum(sums.w)};
}
__device__ __forceinline__ float2 of_row(float sums, int) { return {0.f, sums}; }
__device__ __forceinline__ float2 of_row(float2 sums, int) { return sums; }
__device__ __forceinline__ float2 of_row(float4 sums, int row) {
  return row == 0 ? float2{sums.x, sums.y} : float2{sums.z, sums.w};
}

// The first element of x, or of x + r, rounded as it is stored.
template <typename T> __device__ __forceinline__ float first_element(const T *x, const T *r) {
  return to_float(*x) + (r ? to_float(*r) : 0.f);
}

// Blocks on a multiprocessor: half as many where a thread holds more than 128 bytes.
template <typename T, int THREADS, int EACH, int ROWS, bool ADDED>
constexpr int PER_SM = ADDED || ROWS * EACH * sizeof(T) > 128 ? (BLOCKS<THREADS> + 1) / 2 : BLOCKS<THREADS>;

// x, r, y, h: [M, N], rows 16-byte aligned, N a multiple of 16 bytes; w, b: [N]; mean, rstd: fp32 [M], written if SAVED; grid
// ceil(M / ROWS) * blocks of a cluster; dynamic shared memory for THREADS * EACH elements of w, and as many of b. h = x + r is
// normalised. Where M is odd, the last two of ROWS are the same row, written twice alike.
template <typename T, typename W, int THREADS, int EACH, int ROWS, bool CENTERED, bool WEIGHTED, bool BIASED, bool ADDED, bool SAVED>
__global__ void __launch_bounds__(THREADS, PER_SM<T, THREADS, EACH, ROWS, ADDED>)
    norm_cluster(const T *x, const T *r, const W *w, const W *b, T *y, T *h, float *mean, float *rstd, i64 M, i64 N, i64 x_row,
                 i64 r_row, i64 y_row, i64 h_row, float eps) {
  using All = typename Sums<CENTERED, ROWS>::Type;
  using Slice = RowSlice<T, All, THREADS, EACH>;
  using Shared = typename Slice::Shared;
  constexpr bool MOMENTS = CENTERED && sizeof(T) == 4;
  __shared__ Shared shared[1];
  __shared__ u64 gain_there[1];
  extern __shared__ __align__(16) unsigned char dynamic[];
  W *gain = reinterpret_cast<W *>(dynamic), *bias = gain + THREADS * EACH;

  const Slice slice(N, shared[0]);
  if (WEIGHTED && threadIdx.x == 0) {
    const u32 bytes = slice.elements * sizeof(W);
    barrier_init(gain_there);
    barrier_expect(gain_there, bytes * (1 + BIASED));
    if (bytes) {
      copy_bulk(gain, w + slice.first, bytes, gain_there);
      if (BIASED) copy_bulk(bias, b + slice.first, bytes, gain_there);
    }
  }
  i64 row[ROWS];
  Words<T, Slice::COUNT> words[ROWS][Slice::VECTORS], more[ADDED ? ROWS : 1][ADDED ? Slice::VECTORS : 1];
  float around[ROWS] = {};
#pragma unroll
  for (int k = 0; k < ROWS; k++) {
    row[k] = min(slice.row * ROWS + k, M - 1);
    slice.load(x + (row[k] - slice.row) * x_row, x_row, words[k], 0);
    if constexpr (ADDED) slice.load(r + (row[k] - slice.row) * r_row, r_row, more[k], 0);
    if constexpr (CENTERED && !MOMENTS) around[k] = first_element(x + row[k] * x_row, ADDED ? r + row[k] * r_row : nullptr);
  }

  All sums = {};
#pragma unroll
  for (int k = 0; k < ROWS; k++)
#pragma unroll
    for (int v = 0; v < Slice::VECTORS; v++) {
      if (slice.at(v) >= slice.elements) continue;  // the branch also keeps the compiler from unpacking all at once: it spilled
      float f[Slice::COUNT], g[Slice::COUNT];
      unpack(words[k][v], f);
      if constexpr (ADDED) {
        unpack(more[k][v], g);
#pragma unroll
        for (int i = 0; i < Slice::COUNT; i++) f[i] += g[i];
        words[k][v] = pack<T, Slice::COUNT>(f);  // what is normalised is what the next layer gets
        unpack(words[k][v], f);
        store<T, Slice::COUNT>(h + row[k] * h_row + slice.first + slice.at(v), words[k][v]);
      }
#pragma unroll
      for (int i = 0; i < Slice::COUNT; i++) {
        const float d = CENTERED ? f[i] - around[k] : f[i];
        add(sums, k, f[i], MOMENTS ? 0.f : d * d);
      }
    }

  All all;
  if constexpr (MOMENTS) {
    int mine = 0;
#pragma unroll
    for (int v = 0; v < Slice::VECTORS; v++) mine += slice.at(v) < slice.elements ? Slice::COUNT : 0;
    const float in_mine = inverse_of(float(mine));
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
      const float own = of_row(sums, k).x * in_mine;
#pragma unroll
      for (int v = 0; v < Slice::VECTORS; v++) {
        if (slice.at(v) >= slice.elements) continue;
        float f[Slice::COUNT];
        unpack(words[k][v], f);
#pragma unroll
        for (int i = 0; i < Slice::COUNT; i++) add(sums, k, 0.f, (f[i] - own) * (f[i] - own));
      }
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float of_warps = lane < THREADS / 32 ? elements_of_warp<THREADS, Slice::COUNT>(slice.elements, lane) : 0.f;
    const float of_blocks = lane < slice.blocks ? elements_of_block<THREADS * EACH>(N, lane) : 0.f;
    const float in_warp = inverse_of(elements_of_warp<THREADS, Slice::COUNT>(slice.elements, warp));
    const float in_warps = inverse_of(of_warps), in_blocks = inverse_of(of_blocks), in_block = inverse_of(float(slice.elements));
    bool warps = true;  // first the block's warps are joined, then the blocks
    auto join = [&](All of_lane) {
      const All joined = warps ? warp_moments(of_lane, of_warps, in_warps, in_block) : warp_moments(of_lane, of_blocks, in_blocks, 1.f / float(N));
      warps = false;
      return joined;
    };
    all = slice.exchange(warp_moments(sums, float(mine), in_mine, in_warp), All{}, join, shared[0]);
  } else {
    all = slice.exchange(warp_total(sums), All{}, [](All a) { return warp_total(a); }, shared[0]);
  }
  float scale[ROWS], shift[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; k++) {
    const float2 of = of_row(all, k);
    const float middle = of.x / float(N);
    const float variance = CENTERED && !MOMENTS ? of.y / float(N) - (middle - around[k]) * (middle - around[k]) : of.y / float(N);
    scale[k] = 1.f / sqrtf((variance < 0.f ? 0.f : variance) + eps);  // a NaN stays one
    shift[k] = -middle * scale[k];
    if (SAVED && slice.rank == 0 && threadIdx.x == 0) mean[row[k]] = middle, rstd[row[k]] = scale[k];
  }
  if (WEIGHTED) barrier_wait(gain_there);
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    if (slice.at(v) >= slice.elements) continue;
    float g[Slice::COUNT], c[Slice::COUNT];
    if constexpr (WEIGHTED) unpack(load_shared<W, Slice::COUNT>(gain + slice.at(v)), g);
    if constexpr (BIASED) unpack(load_shared<W, Slice::COUNT>(bias + slice.at(v)), c);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
      float f[Slice::COUNT];
      unpack(words[k][v], f);
#pragma unroll
      for (int i = 0; i < Slice::COUNT; i++) {
        const float xhat = CENTERED ? f[i] * scale[k] + shift[k] : f[i] * scale[k];
        f[i] = WEIGHTED ? (BIASED ? xhat * g[i] + c[i] : xhat * g[i]) : xhat;
      }
      store<T, Slice::COUNT>(y + row[k] * y_row + slice.first + slice.at(v), pack<T, Slice::COUNT>(f));
    }
  }
}
