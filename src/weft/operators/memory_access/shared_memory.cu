// Reads of shared memory by lanes some elements apart. Triton decides by itself what lies there, so this pattern is CUDA C++.
#include "prelude.cuh"

constexpr int THREADS = 256;

template <typename T> __device__ __forceinline__ T narrow(float f) {  // f is one of T's values
  const u32 word = sizeof(T) == 4 ? __float_as_uint(f) : pack_pair(bf16{}, f, 0.f);
  return *reinterpret_cast<const T *>(&word);
}
template <> __device__ __forceinline__ fp16 narrow<fp16>(float f) { return {(unsigned short)pack_pair(fp16{}, f, 0.f)}; }

// Within each tile: y[t] = max over r < READS of x[(t * stride + r) % TILE]. One block a tile, which it keeps in shared memory;
// the lanes of a warp read elements `stride` apart, READS times. Elements beyond x count as -inf. The tile's first elements
// are repeated behind its last, so that a read is one instruction: `r` is part of its address.
template <typename T, int TILE, int READS>
__global__ void __launch_bounds__(THREADS) shared_strided(const T *x, T *y, i64 N, int stride) {
  constexpr int EACH = TILE / THREADS;
  __shared__ T tile[TILE + READS - 1];
  const i64 first = i64(blockIdx.x) * TILE;
  const float none = __int_as_float(0xff800000);
  T mine[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const i64 at = first + i * THREADS + threadIdx.x;
    mine[i] = at < N ? x[at] : narrow<T>(none);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) tile[i * THREADS + threadIdx.x] = mine[i];
  if (threadIdx.x < READS - 1) tile[TILE + threadIdx.x] = mine[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int t = i * THREADS + threadIdx.x;
    const T *from = tile + (u32(t) * u32(stride)) % TILE;
    float best = to_float(from[0]);
#pragma unroll
    for (int r = 1; r < READS; r++) best = fmaxf(best, to_float(from[r]));
    if (first + t < N) y[first + t] = narrow<T>(best);
  }
}
