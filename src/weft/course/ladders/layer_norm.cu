// The ladder of layer normalisation. x, y: [M, N], weight, bias: [N], fp32, contiguous: y = (x - mean) / sqrt(variance + eps) ·
// weight + bias, row by row. What changes is how a row is read, and how its mean and variance are reduced.
using i64 = long long;
constexpr int THREADS = 256;  // of a block, in every rung

// ---- 1. naive: one thread a row. Neighbouring threads read addresses N apart: 32 sectors for the 32 loads of a warp. ------------

__global__ void ladder_naive(const float *x, const float *weight, const float *bias, float *y, i64 M, i64 N, float eps) {
  const i64 row = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (row >= M) return;
  x += row * N, y += row * N;
  double sum = 0., squares = 0.;  // N terms one after the other: in fp32 digits would be lost
  for (i64 n = 0; n < N; n++) sum += x[n];
  const float mean = float(sum / N);
  for (i64 n = 0; n < N; n++) squares += (x[n] - mean) * (x[n] - mean);
  const float rstd = rsqrtf(float(squares / N) + eps);
  for (i64 n = 0; n < N; n++) y[n] = (x[n] - mean) * rstd * weight[n] + bias[n];
}

// ---- 2. coalesced: one block a row, neighbouring threads read neighbouring columns; a tree in shared memory adds. -----------------
// ---- 3. warp shuffle: 32 lanes add in registers; shared memory carries one value a warp, and two barriers replace nine. -----------

template <int RUNG> __device__ float of_block(float mine) {
  if constexpr (RUNG == 2) {
    __shared__ float part[THREADS];
    __syncthreads();  // the last sum has been read
    part[threadIdx.x] = mine;
    for (int half = THREADS / 2; half; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    return part[0];
  } else {
    __shared__ float per_warp[THREADS / 32];
    for (int step = 16; step; step /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    float sum = 0.f;
    for (int w = 0; w < THREADS / 32; w++) sum += per_warp[w];
    return sum;
  }
}

template <int RUNG>
__global__ void ladder_block(const float *x, const float *weight, const float *bias, float *y, i64 M, i64 N, float eps) {
  x += i64(blockIdx.x) * N, y += i64(blockIdx.x) * N;
  float sum = 0.f, squares = 0.f;
  for (i64 n = threadIdx.x; n < N; n += THREADS) sum += x[n];
  const float mean = of_block<RUNG>(sum) / N;
  for (i64 n = threadIdx.x; n < N; n += THREADS) squares += (x[n] - mean) * (x[n] - mean);
  const float rstd = rsqrtf(of_block<RUNG>(squares) / N + eps);
  for (i64 n = threadIdx.x; n < N; n += THREADS) y[n] = (x[n] - mean) * rstd * weight[n] + bias[n];
}

// ---- 4. one pass for both moments: count, mean and squared distance of two parts make those of the whole (Chan, Golub & LeVeque,
// ----    1979). Two reads instead of three; a division for each element. E[x²] - mean² needs none, and cancels. ------------------

struct Moments {
  float count, mean, squares;
  __device__ void add(float count_b, float mean_b, float squares_b) {
    const float all = count + count_b;
    if (all == 0.f) return;
    const float delta = mean_b - mean, share = count_b / all;
    mean += delta * share, squares += squares_b + delta * delta * count * share, count = all;
  }
};

__device__ Moments of_block(Moments m) {
  __shared__ Moments per_warp[THREADS / 32];
  for (int step = 16; step; step /= 2) {
    const float count = __shfl_xor_sync(0xffffffffu, m.count, step), mean = __shfl_xor_sync(0xffffffffu, m.mean, step);
    const float squares = __shfl_xor_sync(0xffffffffu, m.squares, step);
    m.add(count, mean, squares);
  }
  if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = m;
  __syncthreads();
  m = per_warp[0];
  for (int w = 1; w < THREADS / 32; w++) m.add(per_warp[w].count, per_warp[w].mean, per_warp[w].squares);
  return m;
}

__global__ void ladder_moments(const float *x, const float *weight, const float *bias, float *y, i64 M, i64 N, float eps) {
  x += i64(blockIdx.x) * N, y += i64(blockIdx.x) * N;
  Moments m = {0.f, 0.f, 0.f};
  for (i64 n = threadIdx.x; n < N; n += THREADS) m.add(1.f, x[n], 0.f);
  m = of_block(m);
  const float rstd = rsqrtf(m.squares / N + eps);
  for (i64 n = threadIdx.x; n < N; n += THREADS) y[n] = (x[n] - m.mean) * rstd * weight[n] + bias[n];
}

// ---- 5. registers: the row stays there, N <= THREADS * 4 * VECTORS: read once, 16 bytes an access, and the variance from the
// ----    distances to the mean itself, without a division an element. ------------------------------------------------------------

template <int VECTORS>
__global__ void ladder_registers(const float *x, const float *weight, const float *bias, float *y, i64 M, i64 N, float eps) {
  const float4 *x4 = reinterpret_cast<const float4 *>(x + i64(blockIdx.x) * N);
  const float4 *w4 = reinterpret_cast<const float4 *>(weight), *b4 = reinterpret_cast<const float4 *>(bias);
  float4 *y4 = reinterpret_cast<float4 *>(y + i64(blockIdx.x) * N), v[VECTORS];
  const int across = int(N / 4);
  float sum = 0.f, squares = 0.f;
#pragma unroll
  for (int k = 0; k < VECTORS; k++) {
    const int n = k * THREADS + threadIdx.x;
    v[k] = n < across ? x4[n] : float4{0.f, 0.f, 0.f, 0.f};
    sum += (v[k].x + v[k].y) + (v[k].z + v[k].w);
  }
  const float mean = of_block<5>(sum) / N;
#pragma unroll
  for (int k = 0; k < VECTORS; k++) {
    v[k].x -= mean, v[k].y -= mean, v[k].z -= mean, v[k].w -= mean;
    if (k * THREADS + int(threadIdx.x) < across)
      squares += (v[k].x * v[k].x + v[k].y * v[k].y) + (v[k].z * v[k].z + v[k].w * v[k].w);
  }
  const float rstd = rsqrtf(of_block<5>(squares) / N + eps);
#pragma unroll
  for (int k = 0; k < VECTORS; k++) {
    const int n = k * THREADS + threadIdx.x;
    if (n >= across) continue;
    const float4 w = w4[n], b = b4[n];
    y4[n] = {v[k].x * rstd * w.x + b.x, v[k].y * rstd * w.y + b.y, v[k].z * rstd * w.z + b.z, v[k].w * rstd * w.w + b.w};
  }
}
