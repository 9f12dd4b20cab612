// Logarithms of running sums of exponentials down columns: along an axis beside which others lie side by side in memory.
//
// As columns.cu adds and multiplies. Exponentials are taken against a number that is known before a step begins, `base`,
// and so they are added like anything else: down a thread's rows, groups of a warp by shuffles, warps through shared memory.
// Since base + log(run) is what all rows before come to and run is 1 or more, nothing small is lost. Only an element
// far above all before it is too much; then the block walks down that step one element after the other (`walk`), and goes on from there.
// Everything is added in one order, so the same bits come out every time.
#include "columns.cuh"
#include "logarithm.cuh"

constexpr float RENEWED = 0x1p20f;  // a run above is moved into its base

__device__ __forceinline__ void put(float *y, float value) { *y = value; }
template <typename T> __device__ __forceinline__ void put(T *y, float value) { y->bits = (unsigned short)pack_pair(T{}, value, 0.f); }

// The next `rows` rows of `width` columns, each by one thread; base, run: of these columns, before and after. x_n, y_n: to the next row.
template <typename T, bool EXCLUSIVE, bool WRITES, int THREADS>
__device__ __noinline__ void walk(const T *x, T *y, i64 x_n, i64 y_n, int rows, int width, float *base, float *run) {
  using Op = Logarithm<T>;
  for (int c = threadIdx.x; c < width; c += THREADS) {
    float top = base[c], sum = run[c];
    if (sum > Op::LARGEST) top = sum, sum = 1.f;
#pragma unroll 1
    for (int n = 0; n < rows; n++) {
      const float next = to_float(x[n * x_n + c]), e = exponential(next == top ? 0.f : -fabsf(next - top));
      if (WRITES && EXCLUSIVE) put(y + n * y_n + c, logarithm<T>(top, sum));
      sum = next > top ? sum * e + 1.f : sum + e;
      top = fmaxf(next, top);
      if (WRITES && !EXCLUSIVE) put(y + n * y_n + c, logarithm<T>(top, sum));
    }
    base[c] = Op::finite(top), run[c] = top > Op::LARGEST ? top + sum : sum;
  }
}

// x, y: [M, N, K], rows of K elements side by side, all of which begin on 16 bytes; carry, totals: [M, parts, K], of the parts.
template <typename T, bool REVERSE, bool EXCLUSIVE, int MODE, int ACROSS, int ROWS, int THREADS>
__global__ void __launch_bounds__(THREADS, 512 / THREADS)
    log_columns(const T *x, const float *carry, T *y, float *totals, int N, i64 K, int each, int parts, i64 x_m, i64 x_n, i64 y_m, i64 y_n) {
  using Op = Logarithm<T>;
  using Own = Columns<T, REVERSE, ACROSS>;
  constexpr int COUNT = Own::COUNT, WIDTH = Own::WIDTH, WARPS = THREADS / 32, STEP = THREADS / ACROSS * ROWS;
  // Of a thread's rows. 16 bits: all together stay far below 2^127. 32 bits: what rounding takes from an exponent of 20 is 2^-19 of an
  // exponential.
  constexpr float MUCH = sizeof(T) == 4 ? 0x1p20f : 0x1p60f;
  __shared__ alignas(16) float of_warps[2][WARPS][WIDTH];
  __shared__ float walked[2][WIDTH];  // base and run
  __shared__ u32 much[3];             // of this step, the next, and the one after
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Own c(N, K, each, parts);
  x += c.offset(N, x_m, x_n), y += c.offset(N, y_m, y_n);
  if (REVERSE) x_n = -x_n, y_n = -y_n;

  if (threadIdx.x < 3) much[threadIdx.x] = 0;
  __syncthreads();
  float base[COUNT], run[COUNT];
  {
    float first[COUNT];
    Words<T, COUNT> w = vector_of<T, COUNT>(Op::NEUTRAL);
    if (c.inside) w = load<T, COUNT>(x);
    unpack(w, first);
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      float before = Op::NEUTRAL;
      if (MODE == CARRIED && c.inside) before = carry[c.unit * K + c.column + j];
      base[j] = Op::finite(before == Op::NEUTRAL ? first[j] : before);
      run[j] = exponential(before - base[j]);
    }
  }
  const int mine = threadIdx.x / ACROSS * ROWS;  // the first of this thread's rows in a step
  const T *from = x + mine * x_n;
  T *to = y + mine * y_n;
  int left = c.inside ? c.end - c.begin - mine : 0;  // from there on
  Words<T, COUNT> words[ROWS];
  auto ask = [&] {
#pragma unroll
    for (int u = 0; u < ROWS; u++) {
      words[u] = vector_of<T, COUNT>(Op::NEUTRAL);
      if (u < left) words[u] = load_stream<T, COUNT>(from + u * x_n);
    }
  };
  ask();
  int step = 0;
  for (int rows = c.end - c.begin; rows > 0; rows -= STEP, step++, to += STEP * y_n) {
    float e[ROWS][COUNT], upto[COUNT], before[COUNT];  // e: down to each row, of this thread's
    bool too_much = false;
#pragma unroll
    for (int u = 0; u < ROWS; u++) {
      float f[COUNT];
      unpack(words[u], f);
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        e[u][j] = exponential(f[j] - base[j]);
        if (u) e[u][j] += upto[j];
        upto[j] = e[u][j];
      }
    }
    const int here = left;
    left -= STEP, from += STEP * x_n;
    ask();
#pragma unroll
    for (int j = 0; j < COUNT; j++) too_much |= upto[j] > MUCH;
#pragma unroll
    for (int by = ACROSS; by < 32; by *= 2)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        const float other = __shfl_up_sync(ALL, upto[j], by);
        if (lane >= by) upto[j] += other;
      }
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      const float other = __shfl_up_sync(ALL, upto[j], ACROSS % 32);
      before[j] = lane < ACROSS ? 0.f : other;
    }
    if (lane >= 32 - ACROSS)
#pragma unroll
      for (int j = 0; j < COUNT; j++) of_warps[step % 2][warp][c.own + j] = upto[j];
    if (too_much) much[step % 3] = 1;
    __syncthreads();
    if (threadIdx.x == 0) much[(step + 2) % 3] = 0;  // no thread reads it any more, and none writes it before the next barrier
    if (much[step % 3]) {
      if (threadIdx.x < ACROSS)
#pragma unroll
        for (int j = 0; j < COUNT; j++) walked[0][c.own + j] = base[j], walked[1][c.own + j] = run[j];
      __syncthreads();
      const i64 skipped = i64(step) * STEP;
      walk<T, EXCLUSIVE, MODE != TOTALS, THREADS>(x + skipped * x_n - c.own, y + skipped * y_n - c.own, x_n, y_n, min(rows, STEP),
                                                  int(min(K - c.first, i64(WIDTH))), walked[0], walked[1]);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < COUNT; j++) base[j] = walked[0][c.own + j], run[j] = walked[1][c.own + j];
      continue;
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        if (w == warp) before[j] += run[j];
        run[j] += of_warps[step % 2][w][c.own + j];
      }
    if constexpr (MODE != TOTALS) {
#pragma unroll
      for (int u = 0; u < ROWS; u++) {
        float result[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
          float sum = before[j];
          if (!EXCLUSIVE) sum += e[u][j];
          if (EXCLUSIVE && u) sum += e[u ? u - 1 : 0][j];
          result[j] = logarithm<T>(base[j], sum);
        }
        if (u < here) store<T, COUNT>(to + u * y_n, pack<T, COUNT>(result));
      }
    }
    bool renew = false;
#pragma unroll
    for (int j = 0; j < COUNT; j++) renew |= run[j] > RENEWED;
    if (renew)
#pragma unroll
      for (int j = 0; j < COUNT; j++)
        if (run[j] > RENEWED && run[j] <= Op::LARGEST) base[j] = logarithm<T>(base[j], run[j]), run[j] = 1.f;
  }
  if constexpr (MODE == TOTALS)
    if (c.inside && threadIdx.x < ACROSS)
#pragma unroll
      for (int j = 0; j < COUNT; j++) totals[c.unit * K + c.column + j] = logarithm<T>(base[j], run[j]);
}
