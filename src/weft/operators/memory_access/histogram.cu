// y[b] += how many of x [n] have min(⌊256 x⌋, 255) = b and 0 ≤ x ≤ 1. y is 0 before; x begins on 16 bytes. Each block counts in
// shared memory, where additions of a warp to one word are one instruction, and adds its counts to y at the end.
using i64 = long long;
constexpr int THREADS = 256, BINS = 256;

__device__ void count(unsigned *bins, float x) {
  if (x >= 0.f && x <= 1.f) atomicAdd(bins + min(int(x * BINS), BINS - 1), 1u);
}

__global__ void count_bins(const float *x, unsigned *y, i64 n) {
  __shared__ unsigned bins[BINS];
  bins[threadIdx.x] = 0;
  __syncthreads();
  const i64 first = i64(blockIdx.x) * THREADS + threadIdx.x, all = i64(gridDim.x) * THREADS;
  for (i64 i = first; i < n / 4; i += all) {
    const float4 v = reinterpret_cast<const float4 *>(x)[i];
    count(bins, v.x), count(bins, v.y), count(bins, v.z), count(bins, v.w);
  }
  for (i64 i = n / 4 * 4 + first; i < n; i += all) count(bins, x[i]);
  __syncthreads();
  if (bins[threadIdx.x]) atomicAdd(y + threadIdx.x, bins[threadIdx.x]);
}
