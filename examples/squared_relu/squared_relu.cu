#include "prelude.cuh"

// 16 bytes a thread: n is a multiple of EACH.
template <typename T> __global__ void squared_relu(const T *x, T *y, i64 n, float scale) {
  constexpr int EACH = 16 / sizeof(T);
  i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * EACH;
  if (i >= n) return;
  float f[EACH];
  unpack(load<T, EACH>(x + i), f);
#pragma unroll
  for (int k = 0; k < EACH; k++) f[k] = f[k] < 0.f ? 0.f : scale * (f[k] * f[k]);
  store(y + i, pack<T>(f));
}
