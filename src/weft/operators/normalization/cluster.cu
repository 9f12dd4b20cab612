// RMSNorm and LayerNorm (CENTERED) of long rows, with or without a residual ADDED first: a cluster of blocks shares a row
// (rows.cuh), which is read once and written once. Blocks exchange one pair of sums. Each block's part of weight and bias
// comes out of L2 into shared memory meanwhile.
#include "rows.cuh"

// What blocks exchange: LayerNorm the sums of x and of (x - around)², with the row's first element for `around`, so that
// little cancels; RMSNorm the sum of x², alone since every shuffle delays the row.
template <bool CENTERED> struct Sums { typedef float2 Type; };
template <> struct Sums<false> { typedef float Type; };

__device__ __forceinline__ void add(float2 &sums, float plain, float squares) { sums.x += plain, sums.y += squares; }
__device__ __forceinline__ void add(float &sums, float, float squares) { sums += squares; }
__device__ __forceinline__ float2 warp_total(float2 sums) { return {warp_sum(sums.x), warp_sum(sums.y)}; }
__device__ __forceinline__ float warp_total(float sums) { return warp_sum(sums); }

// The first element of x, or of x + r, rounded as it is stored.
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) { return half_to_float(x.bits); }
template <typename T> __device__ __forceinline__ float first_element(const T *x, const T *r) {
  return to_float(*x) + (r ? to_float(*r) : 0.f);
}

// x, r, y, h: [M, N], rows 16-byte aligned, N a multiple of 16 bytes; w, b: [N]; mean, rstd: fp32 [M], written if KEPT; grid
// M * blocks of a cluster; dynamic shared memory for THREADS * EACH elements of w, and as many of b. h = x + r is normalised.
template <typename T, typename W, int THREADS, int EACH, bool CENTERED, bool WEIGHTED, bool BIASED, bool ADDED, bool KEPT>
__global__ void __launch_bounds__(THREADS, ADDED ? (BLOCKS<THREADS> + 1) / 2 : BLOCKS<THREADS>)
    norm_cluster(const T *x, const T *r, const W *w, const W *b, T *y, T *h, float *mean, float *rstd, i64 N, i64 x_row,
                 i64 r_row, i64 y_row, i64 h_row, float eps) {
  using Pair = typename Sums<CENTERED>::Type;
  using Slice = RowSlice<T, Pair, THREADS, EACH>;
  __shared__ typename Slice::Shared shared;
  __shared__ u64 gain_there;
  extern __shared__ __align__(16) unsigned char dynamic[];
  W *gain = reinterpret_cast<W *>(dynamic), *bias = gain + THREADS * EACH;

  const Slice slice(N, shared);
  if (WEIGHTED && threadIdx.x == 0) {
    const u32 bytes = slice.elements * sizeof(W);
    barrier_init(&gain_there);
    barrier_expect(&gain_there, bytes * (1 + BIASED));
    if (bytes) {
      copy_bulk(gain, w + slice.first, bytes, &gain_there);
      if (BIASED) copy_bulk(bias, b + slice.first, bytes, &gain_there);
    }
  }
  Words<T, Slice::COUNT> words[Slice::VECTORS], more[ADDED ? Slice::VECTORS : 1];
  slice.load(x, x_row, words, 0);
  if constexpr (ADDED) slice.load(r, r_row, more, 0);
  float around = 0.f;
  if constexpr (CENTERED) around = first_element(x + slice.row * x_row, ADDED ? r + slice.row * r_row : nullptr);

  Pair sums = {};
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    if (slice.at(v) >= slice.elements) continue;  // the branch also keeps the compiler from unpacking all at once: it spilled
    float f[Slice::COUNT], g[Slice::COUNT];
    unpack(words[v], f);
    if constexpr (ADDED) {
      unpack(more[v], g);
#pragma unroll
      for (int i = 0; i < Slice::COUNT; i++) f[i] += g[i];
      words[v] = pack<T, Slice::COUNT>(f);  // what is normalised is what the next layer gets
      unpack(words[v], f);
      store<T, Slice::COUNT>(h + slice.row * h_row + slice.first + slice.at(v), words[v]);
    }
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++) {
      const float d = CENTERED ? f[i] - around : f[i];
      add(sums, f[i], d * d);
    }
  }

  const Pair all = slice.exchange(warp_total(sums), Pair{}, [](Pair p) { return warp_total(p); }, shared);
  float middle = 0.f, variance;
  if constexpr (CENTERED) {
    middle = all.x / float(N);
    variance = all.y / float(N) - (middle - around) * (middle - around);
  } else {
    variance = all / float(N);
  }
  const float scale = 1.f / sqrtf((variance < 0.f ? 0.f : variance) + eps);  // a NaN stays one
  const float shift = -middle * scale;
  if (KEPT && slice.rank == 0 && threadIdx.x == 0) mean[slice.row] = middle, rstd[slice.row] = scale;
  if (WEIGHTED) barrier_wait(&gain_there);
  y += slice.row * y_row + slice.first;
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    if (slice.at(v) >= slice.elements) continue;
    float f[Slice::COUNT], g[Slice::COUNT], k[Slice::COUNT];
    unpack(words[v], f);
    if constexpr (WEIGHTED) unpack(load_shared<W, Slice::COUNT>(gain + slice.at(v)), g);
    if constexpr (BIASED) unpack(load_shared<W, Slice::COUNT>(bias + slice.at(v)), k);
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++) {
      const float xhat = CENTERED ? f[i] * scale + shift : f[i] * scale;
      f[i] = WEIGHTED ? (BIASED ? xhat * g[i] + k[i] : xhat * g[i]) : xhat;
    }
    store<T, Slice::COUNT>(y + slice.at(v), pack<T, Slice::COUNT>(f));
  }
}
