// RMSNorm of long rows: a cluster of blocks shares a row (rows.cuh), which is read once and written once. Blocks exchange
// one number, their sum of squares. Each block's part of the weight comes out of L2 into shared memory meanwhile.
#include "rows.cuh"

// x, y: [M, N], rows 16-byte aligned, N a multiple of 16 bytes, w: [N]; grid M * blocks of a cluster; dynamic shared memory
// for THREADS * EACH elements of w.
template <typename T, typename W, int THREADS, int EACH, bool WEIGHTED>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    rms_norm_cluster(const T *x, const W *w, T *y, i64 N, i64 x_row, i64 y_row, float eps) {
  using Slice = RowSlice<T, float, THREADS, EACH>;
  __shared__ typename Slice::Shared shared;
  __shared__ u64 gain_there;
  extern __shared__ __align__(16) unsigned char dynamic[];
  W *gain = reinterpret_cast<W *>(dynamic);

  const Slice slice(N, shared);
  if (WEIGHTED && threadIdx.x == 0) {
    const u32 bytes = slice.elements * sizeof(W);
    barrier_init(&gain_there);
    barrier_expect(&gain_there, bytes);
    if (bytes) copy_bulk(gain, w + slice.first, bytes, &gain_there);
  }
  Words<T, Slice::COUNT> words[Slice::VECTORS];
  slice.load(x, x_row, words, 0);
  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    float f[Slice::COUNT];
    unpack(words[v], f);
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++) squares += f[i] * f[i];
  }

  const float total = slice.exchange(warp_sum(squares), 0.f, [](float s) { return warp_sum(s); }, shared);
  const float rstd = 1.f / sqrtf(total / float(N) + eps);
  if (WEIGHTED) barrier_wait(&gain_there);
  y += slice.row * y_row + slice.first;
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    if (slice.at(v) >= slice.elements) continue;
    float f[Slice::COUNT], g[Slice::COUNT];
    unpack(words[v], f);
    if constexpr (WEIGHTED) unpack(load_shared<W, Slice::COUNT>(gain + slice.at(v)), g);
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++) f[i] = WEIGHTED ? f[i] * rstd * g[i] : f[i] * rstd;
    store<T, Slice::COUNT>(y + slice.at(v), pack<T, Slice::COUNT>(f));
  }
}
