// The ladder of the running sum of one long row. x, y: [n], fp32; y[i] = x[0] + … + x[i].
using i64 = long long;
using u64 = unsigned long long;
constexpr int THREADS = 256;  // of a block, in every rung but the first

// ---- 1. doubling: y[i] = x[i] + x[i - d] for d = 1, 2, 4 …: a launch and two passes over memory for each (Hillis & Steele, 1986) -

__global__ void ladder_doubling(const float *x, float *y, i64 n, i64 d) {
  const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (i < n) y[i] = i < d ? x[i] : x[i] + x[i - d];
}

// The sums before a thread's value and of all values of its block.
struct Sums {
  float before, all;
};

template <int RUNG> __device__ Sums of_block(float mine) {
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  if constexpr (RUNG <= 3) {
    __shared__ float part[THREADS];
    part[t] = mine;
    if constexpr (RUNG == 2) {  // ---- 2. tiles: the same doubling in shared memory: n log n additions, but memory sees none of it --
      for (int d = 1; d < THREADS; d *= 2) {
        __syncthreads();
        const float left = t >= d ? part[t - d] : 0.f;
        __syncthreads();
        part[t] += left;
      }
    } else {  // ---- 3. tree: up to the sum of all and down again: 2 n additions (Blelloch, 1990), by ever fewer threads, on words 2 d
              // ----    apart: conflicts -------------------------------------------------------------------------------------------
      for (int d = 1; d < THREADS; d *= 2) {
        __syncthreads();
        const int i = (t + 1) * 2 * d - 1;
        if (i < THREADS) part[i] += part[i - d];
      }
      for (int d = THREADS / 4; d; d /= 2) {
        __syncthreads();
        const int i = (t + 1) * 2 * d - 1 + d;
        if (i < THREADS) part[i] += part[i - d];
      }
    }
    __syncthreads();
    return {t ? part[t - 1] : 0.f, part[THREADS - 1]};
  }
  // ---- 4. warp shuffle: five steps in registers; shared memory carries one value a warp ------------------------------------------
  __shared__ float per_warp[THREADS / 32];
  float sum = mine;
  for (int d = 1; d < 32; d *= 2) {
    const float left = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += left;
  }
  if (lane == 31) per_warp[warp] = sum;
  __syncthreads();
  const float left = __shfl_up_sync(0xffffffffu, sum, 1);
  Sums s = {lane ? left : 0.f, 0.f};
  for (int w = 0; w < THREADS / 32; w++) {
    if (w < warp) s.before += per_warp[w];
    s.all += per_warp[w];
  }
  return s;
}

// ---- rungs 2 to 4: scan each tile; scan the tiles' sums in the same way; add to each tile what comes before it: 4 n elements moved -

template <int RUNG> __global__ void ladder_tiles(const float *x, float *y, float *sums, i64 n) {
  const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
  const float mine = i < n ? x[i] : 0.f;
  const Sums s = of_block<RUNG>(mine);
  if (i < n) y[i] = s.before + mine;
  if (threadIdx.x == 0) sums[blockIdx.x] = s.all;
}

template <int EACH> __global__ void ladder_add(const float *sums, float *y, i64 n) {  // sums: running ones
  const i64 first = i64(blockIdx.x) * (THREADS * EACH) + threadIdx.x;
  const float before = blockIdx.x ? sums[blockIdx.x - 1] : 0.f;
  for (int k = 0; k < EACH; k++)
    if (first + k * THREADS < n) y[first + k * THREADS] += before;
}

// ---- 5. vectors: four neighbours a thread, one access: a quarter of the shuffles, and fewer levels ------------------------------

__device__ float4 load4(const float *x, i64 i, i64 n) {
  if (i + 4 <= n) return *reinterpret_cast<const float4 *>(x + i);
  return {i < n ? x[i] : 0.f, i + 1 < n ? x[i + 1] : 0.f, i + 2 < n ? x[i + 2] : 0.f, 0.f};
}

__device__ void store4(float *y, i64 i, i64 n, float before, float4 v) {
  v.x += before, v.y += v.x, v.z += v.y, v.w += v.z;
  if (i + 4 <= n) {
    *reinterpret_cast<float4 *>(y + i) = v;
    return;
  }
  if (i < n) y[i] = v.x;
  if (i + 1 < n) y[i + 1] = v.y;
  if (i + 2 < n) y[i + 2] = v.z;
}

__device__ float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }

__global__ void ladder_vectors(const float *x, float *y, float *sums, i64 n) {
  const i64 i = (i64(blockIdx.x) * THREADS + threadIdx.x) * 4;
  const float4 v = load4(x, i, n);
  const Sums s = of_block<5>(sum4(v));
  store4(y, i, n, s.before, v);
  if (threadIdx.x == 0) sums[blockIdx.x] = s.all;
}

// ---- 6. reduce first: the tiles' sums alone are written; then each tile is read again and scanned with what comes before it: 3 n --

__global__ void ladder_sums(const float *x, float *sums, i64 n) {
  const i64 i = (i64(blockIdx.x) * THREADS + threadIdx.x) * 4;
  const Sums s = of_block<6>(sum4(load4(x, i, n)));
  if (threadIdx.x == 0) sums[blockIdx.x] = s.all;
}

__global__ void ladder_scan(const float *x, const float *sums, float *y, i64 n) {  // sums: running ones
  const i64 i = (i64(blockIdx.x) * THREADS + threadIdx.x) * 4;
  const float4 v = load4(x, i, n);
  const Sums s = of_block<6>(sum4(v));
  store4(y, i, n, s.before + (blockIdx.x ? sums[blockIdx.x - 1] : 0.f), v);
}

// ---- 7. look back: one pass, 2 n. A tile publishes its sum, then its running sum; the next tiles add the sums of those before them
// ----    until they meet a running one (Merrill & Garland, 2016). Flag and value are one word, so no fence is needed. The number of a
// ----    tile is drawn, so the tiles before it have begun. Which sums are met differs, so the last bits may. ------------------------

__device__ u64 word(u64 flag, float value) { return flag << 32 | __float_as_uint(value); }

template <int EACH> __global__ void ladder_look_back(const float *x, float *y, u64 *state, unsigned *drawn, i64 n) {
  __shared__ unsigned number;
  __shared__ float before_tile;
  if (threadIdx.x == 0) number = atomicAdd(drawn, 1u);
  __syncthreads();
  const i64 tile = number;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = (tile * THREADS + warp * 32) * (4 * EACH) + lane * 4;  // of a warp: EACH times 128 elements
  float4 v[EACH];
  float before[EACH], of_warp = 0.f;  // what comes before a vector in its warp's elements
#pragma unroll
  for (int k = 0; k < EACH; k++) v[k] = load4(x, first + k * 128, n);
#pragma unroll
  for (int k = 0; k < EACH; k++) {
    const float mine = sum4(v[k]);
    float sum = mine;
    for (int d = 1; d < 32; d *= 2) {
      const float left = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += left;
    }
    const float left = __shfl_up_sync(0xffffffffu, sum, 1);
    before[k] = of_warp + (lane ? left : 0.f);
    of_warp += __shfl_sync(0xffffffffu, sum, 31);
  }
  const Sums s = of_block<7>(lane == 0 ? of_warp : 0.f);  // lane 0's: what the warps before have
  const float before_warp = __shfl_sync(0xffffffffu, s.before, 0);
  if (warp == 0) {
    volatile u64 *states = state;
    if (lane == 0) states[tile] = word(tile ? 1 : 2, s.all);
    float sum = 0.f;
    for (i64 at = tile - 1; tile; at -= 32) {  // 32 tiles at a time, lane 0 the nearest
      u64 found;
      do found = at - lane < 0 ? word(2, 0.f) : states[at - lane];
      while (__any_sync(0xffffffffu, found >> 32 == 0));
      const unsigned running = __ballot_sync(0xffffffffu, found >> 32 == 2);
      const bool beyond = running & ((1u << lane) - 1);  // of a nearer tile's running sum
      float part = beyond ? 0.f : __uint_as_float(unsigned(found));
      for (int d = 16; d; d /= 2) part += __shfl_xor_sync(0xffffffffu, part, d);
      sum += part;
      if (running) break;
    }
    if (lane == 0) {
      if (tile) states[tile] = word(2, sum + s.all);
      before_tile = sum;
    }
  }
  __syncthreads();
  const float all_before = before_tile + before_warp;
#pragma unroll
  for (int k = 0; k < EACH; k++) store4(y, first + k * 128, n, all_before + before[k], v[k]);
}
