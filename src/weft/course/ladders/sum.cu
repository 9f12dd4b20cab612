// The ladder of the sum of all elements, after Harris, "Optimizing Parallel Reduction in CUDA" (NVIDIA, 2007), with what has
// changed since. x: [n] → y: [blocks], a partial sum a block. The host launches the kernel again on y until one is left.
using i64 = long long;
constexpr int THREADS = 256;  // of a block, in every rung

// The sum over the block's threads; thread 0 has it.
template <int RUNG> __device__ float of_block(float mine) {
  __shared__ float part[THREADS];
  const int t = threadIdx.x;
  part[t] = mine;
  __syncthreads();
  if constexpr (RUNG == 1) {  // ---- 1. interleaved: every second, fourth, eighth … thread adds: all warps stay half empty ----
    for (int s = 1; s < THREADS; s *= 2) {
      if (t % (2 * s) == 0) part[t] += part[t + s];
      __syncthreads();
    }
    return part[0];
  }
  if constexpr (RUNG == 2) {  // ---- 2. strided: the first threads add, whole warps leave; their words are 2 s apart: conflicts -
    for (int s = 1; s < THREADS; s *= 2) {
      const int i = 2 * s * t;
      if (i < THREADS) part[i] += part[i + s];
      __syncthreads();
    }
    return part[0];
  }
  // ---- 3. sequential: neighbouring threads add neighbouring words: 32 banks for 32 lanes --------------------------------------
  constexpr int LAST = RUNG >= 5 ? 32 : 0;
  for (int s = THREADS / 2; s > LAST; s /= 2) {
    if (t < s) part[t] += part[t + s];
    __syncthreads();
  }
  if constexpr (RUNG < 5) return part[0];
  // ---- 5. last warp: no barriers among 32 lanes. In 2007 `volatile` was enough, since a warp ran in lockstep; from Volta on lanes
  // ----    are scheduled alone, and what orders them is a shuffle (or __syncwarp). ----------------------------------------------
  float sum = 0.f;
  if (t < 32) {
    sum = part[t] + part[t + 32];
    for (int s = 16; s; s /= 2) sum += __shfl_down_sync(0xffffffffu, sum, s);
  }
  return sum;
}

// ---- rungs 1 to 3: an element a thread; 4 and 5: two, added while they are loaded, so that no thread only copies --------------

template <int RUNG> __global__ void ladder_tree(const float *x, float *y, i64 n) {
  constexpr int EACH = RUNG >= 4 ? 2 : 1;
  const i64 i = i64(blockIdx.x) * (THREADS * EACH) + threadIdx.x;
  float mine = i < n ? x[i] : 0.f;
  if (EACH == 2 && i + THREADS < n) mine += x[i + THREADS];
  const float sum = of_block<RUNG>(mine);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

// ---- 6. grid stride: as many blocks as the GPU holds, each thread adds hundreds of elements before the only tree ---------------
// ---- 7. vectors: 16 bytes an access, four sums a thread: more bytes in flight ----------------------------------------------------

template <bool VECTORS> __device__ float of_thread(const float *x, i64 n) {
  const i64 first = i64(blockIdx.x) * THREADS + threadIdx.x, all = i64(gridDim.x) * THREADS;
  float sum = 0.f;
  i64 done = 0;
  if constexpr (VECTORS) {
    float4 sums = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
    for (i64 i = first; i < n / 4; i += all) {
      const float4 v = reinterpret_cast<const float4 *>(x)[i];
      sums.x += v.x, sums.y += v.y, sums.z += v.z, sums.w += v.w;
    }
    sum = (sums.x + sums.y) + (sums.z + sums.w);
    done = n / 4 * 4;
  }
  for (i64 i = done + first; i < n; i += all) sum += x[i];
  return sum;
}

template <bool VECTORS> __global__ void ladder_grid(const float *x, float *y, i64 n) {
  const float sum = of_block<5>(of_thread<VECTORS>(x, n));
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

// ---- 8. one pass: the block that finishes last adds the partial sums; no second launch ------------------------------------------

__global__ void ladder_one_pass(const float *x, float *parts, float *y, unsigned *ticket, i64 n) {
  __shared__ bool last;
  float sum = of_block<5>(of_thread<true>(x, n));
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = sum;
    __threadfence();  // the partial sum before the ticket
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;  // the last one sets it to 0 for the next launch
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  const volatile float *all = parts;
  sum = 0.f;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += THREADS) sum += all[b];
  sum = of_block<5>(sum);
  if (threadIdx.x == 0) *y = sum;
}
