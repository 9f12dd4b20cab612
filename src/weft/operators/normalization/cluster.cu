// RMSNorm of rows too long for one block: a cluster of blocks shares a row, each keeps its slice in registers, and one
// number a block (its sum of squares) goes through distributed shared memory. Device memory is read once, written once.
#include "prelude.cuh"

constexpr int MAX_CLUSTER = 16;

// x, y: [M, N] with unit column stride, w: [N]; grid M * cluster: block r of a cluster takes slice r of its row.
// COUNT elements an access (16 bytes, or 1 where rows are not aligned), EACH elements a thread.
template <typename T, typename W, int THREADS, int EACH, int COUNT, bool WEIGHTED>
__global__ void __launch_bounds__(THREADS)
    rms_norm_cluster(const T *x, const W *w, T *y, i64 N, i64 x_row, i64 y_row, float eps) {
  constexpr int VECTORS = EACH / COUNT;
  __shared__ float per_warp[THREADS / 32];
  __shared__ float per_block[MAX_CLUSTER];

  const u32 rank = cluster_rank(), blocks = cluster_blocks();
  const i64 row = blockIdx.x / blocks;
  const i64 slice = i64(rank) * THREADS * EACH;
  x += row * x_row + slice;
  y += row * y_row + slice;
  w += slice;
  const int left = int(min(N - slice, i64(THREADS) * EACH));  // of this block's slice; negative: nothing

  // ---- load: all of the slice is asked for before any of it is used ----
  Words<T, COUNT> loaded[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * COUNT;
    if (at < left) loaded[v] = load_streaming<T, COUNT>(x + at);
  }

  Words<W, COUNT> weight[VECTORS];  // asked for here too, so that it arrives while the sums are taken
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * COUNT;
    if (WEIGHTED && at < left) weight[v] = load_shared_by_all<W, COUNT>(w + at);
  }

  // ---- sum of squares: thread, warp, block, cluster ----
  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    float f[COUNT];
    unpack(loaded[v], f);
    const bool inside = int(v * THREADS + threadIdx.x) * COUNT < left;
#pragma unroll
    for (int i = 0; i < COUNT; i++) squares += inside ? f[i] * f[i] : 0.f;
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  if (threadIdx.x < 32) {
    squares = warp_sum(threadIdx.x < THREADS / 32 ? per_warp[threadIdx.x] : 0.f);
    if (threadIdx.x < blocks) store_remote(&per_block[rank], threadIdx.x, squares);  // lane r tells block r
  }
  cluster_barrier();
  float total = 0.f;
  for (int r = 0; r < blocks; r++) total += per_block[r];
  const float rstd = 1.f / sqrtf(total / float(N) + eps);

  // ---- scale and write ----
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * COUNT;
    if (at >= left) continue;
    float f[COUNT], g[COUNT];
    unpack(loaded[v], f);
    if constexpr (WEIGHTED) unpack(weight[v], g);
#pragma unroll
    for (int i = 0; i < COUNT; i++) f[i] = WEIGHTED ? f[i] * rstd * g[i] : f[i] * rstd;
    store<T, COUNT>(y + at, pack<T, COUNT>(f));
  }
}
