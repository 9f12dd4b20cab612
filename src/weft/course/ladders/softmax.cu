// The ladder of softmax: six kernels, each one idea further than the last. x, y: [M, N], row-major, contiguous.
//
// All compute y = exp(x - max) / sum row by row. What changes is how a row is read and how its maximum and sum are reduced.
#include "prelude.cuh"

constexpr int THREADS = 256;  // of a block, in every rung
#define MINUS_INFINITY __int_as_float(0xff800000)

template <typename T> __device__ __forceinline__ void set(T *p, float f) {
  if constexpr (sizeof(T) == 4)
    *p = f;
  else
    p->bits = (unsigned short)pack_pair(T{}, f, 0.f);
}

struct Max {
  template <typename F> static __device__ __forceinline__ F of(F a, F b) { return b > a ? b : a; }
};
struct Sum {
  template <typename F> static __device__ __forceinline__ F of(F a, F b) { return a + b; }
};

// ---- 1. naive: one thread a row. Neighbouring threads read addresses N apart, so every load of a warp takes 32 lines. --

template <typename T> __global__ void ladder_naive(const T *x, T *y, i64 M, i64 N) {
  const i64 row = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (row >= M) return;
  x += row * N, y += row * N;
  float top = MINUS_INFINITY;
  double sum = 0.;  // N terms one after the other: in fp32 the sum would lose about sqrt(N) units in its last place
  for (i64 n = 0; n < N; n++) top = fmaxf(top, to_float(x[n]));
  for (i64 n = 0; n < N; n++) sum += expf(to_float(x[n]) - top);
  for (i64 n = 0; n < N; n++) set(y + n, expf(to_float(x[n]) - top) / float(sum));
}

// ---- 2. coalesced: one block a row, neighbouring threads read neighbouring columns. One thread adds up the partials. ---

template <typename Op> __device__ float reduce_serially(float mine) {
  __shared__ float partial[THREADS];
  partial[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    double all = partial[0];  // as in rung 1: many terms one after the other
    for (int t = 1; t < THREADS; t++) all = Op::of(all, double(partial[t]));
    partial[0] = float(all);
  }
  __syncthreads();
  const float all = partial[0];
  __syncthreads();  // before the next reduction writes
  return all;
}

// ---- 3. shared memory: a tree of log2(THREADS) steps instead of THREADS, each with a barrier. --------------------------

template <typename Op> __device__ float reduce_in_shared_memory(float mine) {
  __shared__ float partial[THREADS];
  partial[threadIdx.x] = mine;
  for (int half = THREADS / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] = Op::of(partial[threadIdx.x], partial[threadIdx.x + half]);
  }
  __syncthreads();
  const float all = partial[0];
  __syncthreads();
  return all;
}

// ---- 4. warp shuffle: 32 lanes reduce in 5 register exchanges; shared memory carries one value a warp. -----------------

template <typename Op> __device__ float reduce_by_shuffles(float mine) {
  __shared__ float per_warp[THREADS / 32];
#pragma unroll
  for (int step = 16; step; step /= 2) mine = Op::of(mine, __shfl_xor_sync(0xffffffffu, mine, step));
  if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  float all = per_warp[0];
#pragma unroll
  for (int w = 1; w < THREADS / 32; w++) all = Op::of(all, per_warp[w]);
  __syncthreads();
  return all;
}

template <int RUNG, typename Op> __device__ __forceinline__ float reduce(float mine) {
  if constexpr (RUNG == 2)
    return reduce_serially<Op>(mine);
  else if constexpr (RUNG == 3)
    return reduce_in_shared_memory<Op>(mine);
  else
    return reduce_by_shuffles<Op>(mine);
}

template <typename T, int RUNG> __global__ void ladder_block(const T *x, T *y, i64 M, i64 N) {
  x += i64(blockIdx.x) * N, y += i64(blockIdx.x) * N;
  float top = MINUS_INFINITY, sum = 0.f;
  for (i64 n = threadIdx.x; n < N; n += THREADS) top = fmaxf(top, to_float(x[n]));
  top = reduce<RUNG, Max>(top);
  for (i64 n = threadIdx.x; n < N; n += THREADS) sum += expf(to_float(x[n]) - top);
  sum = reduce<RUNG, Sum>(sum);
  for (i64 n = threadIdx.x; n < N; n += THREADS) set(y + n, expf(to_float(x[n]) - top) / sum);
}

// ---- 5. vectorised: 16 bytes an access instead of 2 or 4, so fewer instructions and more bytes under way. --------------

template <typename T> __global__ void ladder_vectorised(const T *x, T *y, i64 M, i64 N) {
  constexpr int COUNT = 16 / sizeof(T);
  x += i64(blockIdx.x) * N, y += i64(blockIdx.x) * N;
  float top = MINUS_INFINITY, sum = 0.f, f[COUNT];
  for (i64 n = threadIdx.x * COUNT; n < N; n += THREADS * COUNT) {
    unpack(load<T, COUNT>(x + n), f);
    for (int i = 0; i < COUNT; i++) top = fmaxf(top, f[i]);
  }
  top = reduce_by_shuffles<Max>(top);
  for (i64 n = threadIdx.x * COUNT; n < N; n += THREADS * COUNT) {
    unpack(load<T, COUNT>(x + n), f);
    for (int i = 0; i < COUNT; i++) sum += expf(f[i] - top);
  }
  sum = reduce_by_shuffles<Sum>(sum);
  for (i64 n = threadIdx.x * COUNT; n < N; n += THREADS * COUNT) {
    unpack(load<T, COUNT>(x + n), f);
    for (int i = 0; i < COUNT; i++) f[i] = expf(f[i] - top) / sum;
    store<T, COUNT>(y + n, pack<T, COUNT>(f));
  }
}

// ---- 6. one pass: the row stays in registers, so it is read once instead of three times. N <= THREADS * EACH. ----------
// ---- 7. cheap arithmetic: one division a row instead of one an element; for 16-bit results the hardware's ex2. ---------
// ---- 8. evict last: a hint that L2 should give up written lines before read ones. --------------------------------------

template <bool CHEAP> __device__ __forceinline__ float exponential(float x) {
  if constexpr (!CHEAP) return expf(x);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.4426950408889634f));
  return e;
}

template <typename T, int EACH, bool CHEAP, bool EVICT_LAST> __global__ void ladder_one_pass(const T *x, T *y, i64 M, i64 N) {
  constexpr int COUNT = 16 / sizeof(T), VECTORS = EACH / COUNT;
  x += i64(blockIdx.x) * N, y += i64(blockIdx.x) * N;
  Words<T, COUNT> w[VECTORS];  // all asked for before any is used
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int n = (v * THREADS + threadIdx.x) * COUNT;
#pragma unroll
    for (int i = 0; i < 4; i++) w[v].word[i] = 0;
    if (n < N) w[v] = EVICT_LAST ? load_stream<T, COUNT>(x + n) : load<T, COUNT>(x + n);
  }
  float f[VECTORS][COUNT], top = MINUS_INFINITY, sum = 0.f;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    unpack(w[v], f[v]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if ((v * THREADS + threadIdx.x) * COUNT >= N) f[v][i] = MINUS_INFINITY;
      top = fmaxf(top, f[v][i]);
    }
  }
  top = reduce_by_shuffles<Max>(top);
#pragma unroll
  for (int v = 0; v < VECTORS; v++)
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      f[v][i] = (v * THREADS + threadIdx.x) * COUNT < N ? exponential<CHEAP && sizeof(T) == 2>(f[v][i] - top) : 0.f;
      sum += f[v][i];
    }
  sum = reduce_by_shuffles<Sum>(sum);
  const float scale = 1.f / sum;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int n = (v * THREADS + threadIdx.x) * COUNT;
#pragma unroll
    for (int i = 0; i < COUNT; i++) f[v][i] = CHEAP ? f[v][i] * scale : f[v][i] / sum;
    if (n < N) store<T, COUNT>(y + n, pack<T, COUNT>(f[v]));
  }
}
