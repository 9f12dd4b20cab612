// The ladder of a sparse matrix times a vector. y[row] = Σ values[i] · x[columns[i]] over offsets[row] ≤ i < offsets[row + 1]; CSR, fp32,
// int32. What changes is which threads take which elements. Threads add in fp64: a row may have a million elements, and one after the
// other in fp32 they would lose digits.
constexpr int THREADS = 256;  // of a block, in every rung
constexpr int PIECE = 8 * THREADS;  // elements of a block in the last rungs

// ---- 1. scalar: one thread a row. Neighbouring threads read elements a row's length apart, and a warp waits for its longest row. --

__global__ void ladder_scalar(const int *offsets, const int *columns, const float *values, const float *x, float *y, int M) {
  const int row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= M) return;
  double sum = 0.;
  for (int i = offsets[row]; i < offsets[row + 1]; i++) sum += values[i] * x[columns[i]];
  y[row] = float(sum);
}

// ---- 2. vector: one warp a row: neighbouring lanes read neighbouring elements; most lanes idle in rows of fewer than 32. -----------
// ---- 3. fitted: as many lanes a row as its mean length fills (Bell & Garland, 2009; Reguly & Giles, 2012). --------------------------

template <int LANES>
__global__ void ladder_lanes(const int *offsets, const int *columns, const float *values, const float *x, float *y, int M) {
  const int row = (blockIdx.x * THREADS + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
  double mine = 0.;
  if (row < M)
    for (int i = offsets[row] + lane; i < offsets[row + 1]; i += LANES) mine += values[i] * x[columns[i]];
  float sum = float(mine);
  for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);  // all lanes, also past the end
  if (row < M && lane == 0) y[row] = sum;
}

// ---- 4. pieces: equal shares of the elements instead of the rows. A block brings the products of PIECE elements to shared memory,
// ----    coalesced whatever the rows; then one thread a row adds them (Greathouse & Daga, 2014). Rows that go on in another block are
// ----    added by atomics, so their last bits may differ from call to call. y is 0 before. ---------------------------------------------
// ---- 5. adaptive: a piece of few rows, and so of long ones, gives each a warp instead of a thread. ------------------------------------

// The row of element i: the last that begins at or before it.
__device__ int row_of(const int *offsets, int M, int i) {
  int low = 0, high = M;  // offsets[low] <= i < offsets[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= i) low = middle;
    else high = middle;
  }
  return low;
}

template <bool ADAPTIVE>
__global__ void ladder_pieces(const int *offsets, const int *columns, const float *values, const float *x, float *y, int M) {
  __shared__ float product[PIECE];
  __shared__ int rows[2];
  const int begin = blockIdx.x * PIECE, end = min(begin + PIECE, offsets[M]);
  if (threadIdx.x < 2) rows[threadIdx.x] = row_of(offsets, M, threadIdx.x ? end - 1 : begin);
  for (int i = begin + threadIdx.x; i < end; i += THREADS) product[i - begin] = values[i] * x[columns[i]];
  __syncthreads();
  const bool by_warp = ADAPTIVE && rows[1] - rows[0] < THREADS / 32 * 4;
  const int lanes = by_warp ? 32 : 1, lane = threadIdx.x % lanes;
  for (int row = rows[0] + threadIdx.x / lanes; row <= rows[1]; row += THREADS / lanes) {
    const int from = max(offsets[row], begin), to = min(offsets[row + 1], end);
    double mine = 0.;
    for (int i = from + lane; i < to; i += lanes) mine += product[i - begin];
    float sum = float(mine);
    if (by_warp)
      for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane) continue;
    if (offsets[row] >= begin && offsets[row + 1] <= end) y[row] = sum;
    else atomicAdd(y + row, sum);
  }
}
