// The gradients of softmax and log-softmax of long rows: a cluster of blocks shares a row (rows.cuh). y and dy are read once
// and dx is written once; the blocks exchange one sum.
//
// y is held in registers as it lies in memory. dy is held in registers too, or (SHARED) in shared memory, which then holds as much of
// the rows as the registers do: half as many blocks take a row. A thread reads there only what it fetched itself, so no
// barrier is needed.
#include "rows.cuh"

// y, dy, dx: [M, N], rows 16-byte aligned, N a multiple of 16 bytes; grid M * blocks of a cluster. Dynamic shared memory:
// THREADS * EACH elements with SHARED. dx = y (dy - sum(y dy)), or with LOGS dy - exp(y) sum(dy).
template <typename T, int THREADS, int EACH, bool SHARED, bool LOGS>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    softmax_backward_cluster(const T *y, const T *dy, T *dx, i64 N, i64 y_row, i64 dy_row, i64 dx_row) {
  using Slice = RowSlice<T, float, THREADS, EACH>;
  constexpr int COUNT = Slice::COUNT, VECTORS = Slice::VECTORS;
  __shared__ typename Slice::Shared shared;
  extern __shared__ __align__(16) unsigned char dynamic[];
  T *shared_dy = reinterpret_cast<T *>(dynamic);

  const Slice slice(N, shared);
  Words<T, COUNT> results[VECTORS], gradients[SHARED ? 1 : VECTORS];
  if constexpr (SHARED) {
    const T *from = dy + slice.row * dy_row + slice.first;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      copy_stream(shared_dy + slice.at(v), from + slice.at(v), slice.at(v) < slice.elements);
  } else {
    slice.load(dy, dy_row, gradients, 0);
  }
  slice.load(y, y_row, results, 0);
  if constexpr (SHARED) copies_wait();

  auto take = [&](int v, float (&p)[COUNT], float (&g)[COUNT]) {
    unpack(results[v], p);
    if constexpr (SHARED)
      unpack(load_shared<T, COUNT>(shared_dy + slice.at(v)), g);
    else
      unpack(gradients[v], g);
  };
  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (slice.at(v) >= slice.elements) continue;  // the branch also keeps the compiler from unpacking all at once: it spilled
    float p[COUNT], g[COUNT];
    take(v, p, g);
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += LOGS ? g[i] : p[i] * g[i];
  }
  sum = slice.exchange(warp_sum(sum), 0.f, [](float s) { return warp_sum(s); }, shared);

  dx += slice.row * dx_row + slice.first;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (slice.at(v) >= slice.elements) continue;
    float p[COUNT], g[COUNT];
    take(v, p, g);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if constexpr (LOGS)  // for 16-bit results the hardware's exponential is exact enough
        g[i] -= (sizeof(T) == 4 ? expf(p[i]) : __expf(p[i])) * sum;
      else
        g[i] = p[i] * (g[i] - sum);
    }
    store<T, COUNT>(dx + slice.at(v), pack<T, COUNT>(g));
  }
}
