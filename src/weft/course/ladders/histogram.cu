// The ladder of the histogram. x: [n], fp32; y[b] counts the elements of 0 ≤ x ≤ 1 with ⌊256 x⌋ = b, 1 with the last, and is 0 before. What changes is
// where threads count, and so how often they meet.
using i64 = long long;
constexpr int THREADS = 256, BINS = 256;

// Counts in `bins`, of which neighbours are WIDTH words apart.
template <int WIDTH = 1> __device__ void count(unsigned *bins, float x) {
  if (x >= 0.f && x <= 1.f) atomicAdd(bins + min(int(x * BINS), BINS - 1) * WIDTH, 1u);
}

// ---- 1. global atomics: all threads of the GPU add to the same 256 words, in L2 ---------------------------------------------------

__global__ void ladder_global(const float *x, unsigned *y, i64 n) {
  for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < n; i += i64(gridDim.x) * THREADS) count(y, x[i]);
}

// ---- 2. shared memory: a histogram for each block, added to y at the end: 256 global atomics a block -------------------------------
// ---- 3. vectors: 16 bytes an access ---------------------------------------------------------------------------------------------
// ---- 4. copies: a histogram for each warp, so that warps do not meet -------------------------------------------------------------
// ---- 5. lanes: 32 copies, one in each bank: no two lanes of a warp ever meet, whatever the data; 32 KiB -----------------------------

template <int RUNG> __global__ void ladder_shared(const float *x, unsigned *y, i64 n) {
  constexpr int COPIES = RUNG == 5 ? 32 : RUNG == 4 ? THREADS / 32 : 1, WIDTH = RUNG == 5 ? 32 : 1;
  __shared__ unsigned bins[COPIES * BINS];
  for (int b = threadIdx.x; b < COPIES * BINS; b += THREADS) bins[b] = 0;
  __syncthreads();
  unsigned *mine = RUNG == 5 ? bins + threadIdx.x % 32 : RUNG == 4 ? bins + threadIdx.x / 32 * BINS : bins;
  const i64 first = i64(blockIdx.x) * THREADS + threadIdx.x, all = i64(gridDim.x) * THREADS;
  i64 done = 0;
  if constexpr (RUNG >= 3) {
    for (i64 i = first; i < n / 4; i += all) {
      const float4 v = reinterpret_cast<const float4 *>(x)[i];
      count<WIDTH>(mine, v.x), count<WIDTH>(mine, v.y), count<WIDTH>(mine, v.z), count<WIDTH>(mine, v.w);
    }
    done = n / 4 * 4;
  }
  for (i64 i = done + first; i < n; i += all) count<WIDTH>(mine, x[i]);
  __syncthreads();
  unsigned sum = 0;  // THREADS == BINS: one bin a thread
  for (int c = 0; c < COPIES; c++)  // of rung 5 thread t begins at copy t, so that lanes read different banks
    sum += RUNG == 5 ? bins[threadIdx.x * 32 + (c + threadIdx.x) % 32] : bins[c * BINS + threadIdx.x];
  if (sum) atomicAdd(y + threadIdx.x, sum);
}
