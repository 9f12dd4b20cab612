// Running sums and products down columns: along an axis beside which others lie side by side in memory.
//
// Group g of ACROSS threads has rows g * ROWS … of a step, and asks for its next ones before it works on these. A thread adds up its rows
// column by column, groups of a warp by shuffles, warps through shared memory behind one barrier, and it goes through its rows again from
// what comes before them. Everything is joined in one order, so the same bits come out every time.
#include "columns.cuh"
#include "strip.cuh"

// Takes the powers of two out of a product, which is between 1 and 2 then, unless it is 0, less than 2^-126, infinite or NaN.
__device__ __forceinline__ int scaled(float &product) {
  const u32 bits = __float_as_uint(product), field = bits >> 23 & 0xffu;
  if (field - 1 >= 254) return 0;
  product = __uint_as_float((bits & 0x807fffffu) | 0x3f800000u);
  return int(field) - 127;
}

// x, y: [M, N, K], rows of K elements side by side, all of which begin on 16 bytes; carry, totals: [M, parts, K], of the parts; of
// what is SCALED, totals are [2, M, parts, K], their powers of two behind them.
template <typename T, typename Op, bool REVERSE, bool EXCLUSIVE, int MODE, int ACROSS, int ROWS, int THREADS>
__global__ void __launch_bounds__(THREADS, 512 / THREADS)
    scan_columns(const T *x, const float *carry, T *y, float *totals, int N, i64 K, int each, int parts, i64 x_m, i64 x_n, i64 y_m, i64 y_n) {
  using Own = Columns<T, REVERSE, ACROSS>;
  constexpr int COUNT = Own::COUNT, WARPS = THREADS / 32, STEP = THREADS / ACROSS * ROWS;
  __shared__ alignas(16) float of_warps[2][WARPS][Own::WIDTH];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Own c(N, K, each, parts);
  x += c.offset(N, x_m, x_n), y += c.offset(N, y_m, y_n);
  if (REVERSE) x_n = -x_n, y_n = -y_n;
  const int mine = threadIdx.x / ACROSS * ROWS;  // the first of this thread's rows in a step
  x += mine * x_n, y += mine * y_n;
  int left = c.inside ? c.end - c.begin - mine : 0;  // from there on

  float run[COUNT];  // what all steps before come to
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    run[j] = Op::NEUTRAL;
    if (MODE == CARRIED && c.inside) run[j] = carry[c.unit * K + c.column + j];
  }
  constexpr bool SCALED = MODE == TOTALS && Op::SCALED;
  int power[SCALED ? COUNT : 1] = {};
  Words<T, COUNT> next[ROWS];
  auto ask = [&] {
#pragma unroll
    for (int u = 0; u < ROWS; u++) {
      next[u] = vector_of<T, COUNT>(Op::NEUTRAL);
      if (u < left) next[u] = load_stream<T, COUNT>(x + u * x_n);
    }
  };
  ask();
  int step = 0;
  for (int rows = c.end - c.begin; rows > 0; rows -= STEP, step ^= 1, y += STEP * y_n) {
    Words<T, COUNT> words[ROWS];
    float upto[COUNT], before[COUNT];
#pragma unroll
    for (int u = 0; u < ROWS; u++) {
      float f[COUNT];
      words[u] = next[u];
      unpack(words[u], f);
#pragma unroll
      for (int j = 0; j < COUNT; j++) upto[j] = u ? Op::join(upto[j], f[j]) : f[j];
      if constexpr (sizeof(T) == 2) {  // unpacked anew below: as floats there are more than registers
#pragma unroll
        for (int i = 0; i < 4; i++) words[u].word[i] ^= u32(K >> 63);  // a 0 that the compiler cannot know to be one
      }
    }
    const int here = left;
    left -= STEP, x += STEP * x_n;
    ask();
#pragma unroll
    for (int by = ACROSS; by < 32; by *= 2)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        const float other = __shfl_up_sync(ALL, upto[j], by);
        if (lane >= by) upto[j] = Op::join(other, upto[j]);
      }
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      const float other = __shfl_up_sync(ALL, upto[j], ACROSS % 32);
      before[j] = lane < ACROSS ? Op::NEUTRAL : other;
    }
    if (lane >= 32 - ACROSS)
#pragma unroll
      for (int j = 0; j < COUNT; j++) of_warps[step][warp][c.own + j] = upto[j];
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        if (w == warp) before[j] = Op::join(run[j], before[j]);
        run[j] = Op::join(run[j], of_warps[step][w][c.own + j]);
        if constexpr (SCALED) power[j] += scaled(run[j]);
      }
    if constexpr (MODE != TOTALS)
#pragma unroll
      for (int u = 0; u < ROWS; u++) {
        float f[COUNT], result[COUNT];
        unpack(words[u], f);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
          if (EXCLUSIVE) result[j] = before[j];
          before[j] = Op::join(before[j], f[j]);
          if (!EXCLUSIVE) result[j] = before[j];
        }
        if (u < here) store<T, COUNT>(y + u * y_n, pack<T, COUNT>(result));
      }
  }
  if constexpr (MODE == TOTALS)
    if (c.inside && threadIdx.x < ACROSS)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        totals[c.unit * K + c.column + j] = run[j];
        if constexpr (SCALED) totals[(c.units + c.unit) * K + c.column + j] = float(power[j]);
      }
}
