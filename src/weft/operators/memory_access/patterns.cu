// Access patterns that Triton would decide by itself: how many bytes an access has, and where data lies in shared memory.
#include "prelude.cuh"

constexpr int THREADS = 256;  // of a block, in every kernel

template <int BYTES> struct Access;
template <> struct Access<2> { typedef unsigned short Type; };
template <> struct Access<4> { typedef u32 Type; };
template <> struct Access<8> { typedef uint2 Type; };
template <> struct Access<16> { typedef uint4 Type; };

// y = x, N elements, in accesses of WIDTH bytes, EACH of them a thread, all loads before any store. x and y lie on WIDTH bytes.
template <typename T, int WIDTH, int EACH> __global__ void __launch_bounds__(THREADS) copy_wide(const T *x, T *y, i64 N) {
  typedef typename Access<WIDTH>::Type V;
  constexpr int COUNT = WIDTH / sizeof(T);
  const i64 whole = N / COUNT, first = i64(blockIdx.x) * THREADS * EACH + threadIdx.x;
  const V *from = reinterpret_cast<const V *>(x);
  V *to = reinterpret_cast<V *>(y), held[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (first + e * THREADS < whole) held[e] = from[first + e * THREADS];
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (first + e * THREADS < whole) to[first + e * THREADS] = held[e];
  const i64 rest = whole * COUNT + threadIdx.x;  // fewer elements than an access has
  if (blockIdx.x == 0 && rest < N) y[rest] = x[rest];
}

// ---- shared memory -----------------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ T narrow(float f) {  // f is one of T's values
  const u32 word = sizeof(T) == 4 ? __float_as_uint(f) : pack_pair(bf16{}, f, 0.f);
  return *reinterpret_cast<const T *>(&word);
}
template <> __device__ __forceinline__ fp16 narrow<fp16>(float f) { return {(unsigned short)pack_pair(fp16{}, f, 0.f)}; }

// Within each tile: y[t] = max over r < READS of x[(t * stride + r) % TILE]. One block a tile, which it keeps in shared memory;
// the lanes of a warp read elements `stride` apart, READS times. Beyond the end of x stands -inf. The tile's first elements
// stand behind its last once more, so that a read is one instruction: `r` is part of its address.
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
