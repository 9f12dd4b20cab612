// RMSNorm of long rows: a cluster of blocks shares a row (rows.cuh), which is read once and written once. Blocks exchange
// one number, their sum of squares. The weight's row comes out of L2, asked for before the exchange that its latency hides behind.
#include "rows.cuh"

// x, y: [M, N], rows 16-byte aligned, N a multiple of 16 bytes, w: [N]; grid M * blocks of a cluster.
template <typename T, typename W, int THREADS, int EACH, bool WEIGHTED>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    rms_norm_cluster(const T *x, const W *w, T *y, i64 N, i64 x_row, i64 y_row, float eps) {
  using Slice = RowSlice<T, float, THREADS, EACH>;
  __shared__ typename Slice::Shared shared;

  const Slice slice(N, shared);
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

  Words<W, Slice::COUNT> gain[Slice::VECTORS];
  if constexpr (WEIGHTED) {
#pragma unroll
    for (int v = 0; v < Slice::VECTORS; v++)
      if (slice.at(v) < slice.elements) gain[v] = load<W, Slice::COUNT>(w + slice.first + slice.at(v));
  }
  const float total = slice.exchange(warp_sum(squares), 0.f, [](float s) { return warp_sum(s); }, shared);
  const float rstd = 1.f / sqrtf(total / float(N) + eps);
  y += slice.row * y_row + slice.first;
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    if (slice.at(v) >= slice.elements) continue;
    float f[Slice::COUNT], g[Slice::COUNT];
    unpack(words[v], f);
    if constexpr (WEIGHTED) unpack(gain[v], g);
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++) f[i] = WEIGHTED ? f[i] * rstd * g[i] : f[i] * rstd;
    store<T, Slice::COUNT>(y + slice.at(v), pack<T, Slice::COUNT>(f));
  }
}
