// Softmax of rows too long for one block: a cluster of blocks shares a row.
//
// Each block keeps its slice of the row in registers, so device memory is read once and written once. Blocks exchange
// one (maximum, sum) pair through distributed shared memory, with a single cluster barrier: every thread takes its
// exponentials against its own maximum and rescales at the end (online softmax, Milakov & Gimelshein 2018).
#include "prelude.cuh"

struct Pair { float top, sum; };  // maximum, and sum of exp(x - maximum)

// exp(x): as exact as PyTorch's for fp32; for 16-bit results one multiplication and the hardware's ex2.
template <bool ACCURATE> __device__ __forceinline__ float exponential(float x) {
  if constexpr (ACCURATE) return expf(x);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.4426950408889634f));
  return e;
}

// exp(top - base), where both -inf means an empty part that adds nothing
template <bool ACCURATE> __device__ __forceinline__ float factor(float top, float base) {
  return top == base ? 1.f : exponential<ACCURATE>(top - base);
}

template <bool ACCURATE> __device__ __forceinline__ Pair combine(Pair a, Pair b) {
  float top = fmaxf(a.top, b.top);
  return {top, a.sum * factor<ACCURATE>(a.top, top) + b.sum * factor<ACCURATE>(b.top, top)};
}

template <bool ACCURATE> __device__ __forceinline__ Pair warp_combine(Pair p) {
#pragma unroll
  for (int step = 16; step; step /= 2)
    p = combine<ACCURATE>(p, {__shfl_xor_sync(0xffffffffu, p.top, step), __shfl_xor_sync(0xffffffffu, p.sum, step)});
  return p;
}

constexpr int MAX_CLUSTER = 16;

// x, y: [M, N] with unit column stride; grid M * cluster: block r of a cluster takes slice r of its row.
// COUNT elements an access (16 bytes, or 1 where rows are not aligned), EACH elements a thread.
template <typename T, int THREADS, int EACH, int COUNT>
__global__ void __launch_bounds__(THREADS) softmax_cluster(const T *x, T *y, i64 N, i64 x_row, i64 y_row) {
  constexpr bool ACCURATE = sizeof(T) == 4;
  constexpr int VECTORS = EACH / COUNT;
  const float INF = __int_as_float(0x7f800000);
  __shared__ Pair per_warp[THREADS / 32];
  __shared__ Pair per_block[MAX_CLUSTER];

  const u32 rank = cluster_rank(), blocks = cluster_blocks();
  const i64 row = blockIdx.x / blocks;
  const i64 slice = i64(rank) * THREADS * EACH;
  x += row * x_row + slice;
  y += row * y_row + slice;
  const int left = int(min(N - slice, i64(THREADS) * EACH));  // of this block's slice; negative: nothing

  // ---- load: all of the slice is asked for before any of it is used ----
  Words<T, COUNT> loaded[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * COUNT;
    if (at < left) loaded[v] = load_streaming<T, COUNT>(x + at);
  }

  // ---- this thread: maximum, exponentials, sum ----
  float e[VECTORS][COUNT];
  Pair mine = {-INF, 0.f};
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    unpack(loaded[v], e[v]);
    const bool inside = int(v * THREADS + threadIdx.x) * COUNT < left;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (!inside) e[v][i] = -INF;
      mine.top = fmaxf(mine.top, e[v][i]);
    }
  }
  const float base = mine.top == -INF ? 0.f : mine.top;  // only -inf here: exponentials are 0, not NaN
#pragma unroll
  for (int v = 0; v < VECTORS; v++)
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      e[v][i] = exponential<ACCURATE>(e[v][i] - base);
      mine.sum += e[v][i];
    }

  // ---- warp, block, cluster ----
  Pair all = warp_combine<ACCURATE>(mine);
  if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = all;
  __syncthreads();
  if (threadIdx.x < 32) {
    all = warp_combine<ACCURATE>(threadIdx.x < THREADS / 32 ? per_warp[threadIdx.x] : Pair{-INF, 0.f});
    if (threadIdx.x < blocks) {  // lane r tells block r
      store_remote(&per_block[rank].top, threadIdx.x, all.top);
      store_remote(&per_block[rank].sum, threadIdx.x, all.sum);
    }
  }
  cluster_barrier();
  all = per_block[0];
  for (int r = 1; r < blocks; r++) all = combine<ACCURATE>(all, per_block[r]);

  // ---- rescale and write; a row of only -inf is NaN, as in PyTorch ----
  float scale = factor<ACCURATE>(mine.top, all.top) / all.sum;
  if (all.top == -INF) scale = __int_as_float(0x7fffffff);
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * COUNT;
#pragma unroll
    for (int i = 0; i < COUNT; i++) e[v][i] *= scale;
    if (at < left) store<T, COUNT>(y + at, pack<T, COUNT>(e[v]));
  }
}
