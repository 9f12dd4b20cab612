// Gradients of running products, and of logarithms of running sums of exponentials, down columns (columns.cuh, recurrence.cuh).
//
// Rows are counted in the order of the recurrence, p. What lies beside an element is an element of another row, so each thread reads
// the rows that it needs: of a product x at p - 1, dy at p and y at p + 1, each element once. It puts its steps together column by
// column, groups of a warp by shuffles, warps through shared memory behind one barrier, and it goes through its rows again with the r
// that comes before them. Steps are put together in one order, so the same bits come out every time.
#include "columns.cuh"
#include "recurrence.cuh"

// x, y, dy, dx: [M, N, K], rows of K elements side by side, all of which begin on 16 bytes; carry, totals, scales: [M, parts, K].
// DOWN: the recurrence runs from the last row up; LATE: of an exclusive scan.
template <typename T, bool LOG, bool DOWN, bool LATE, int MODE, int ACROSS, int ROWS, int THREADS, int PER_SM>
__global__ void __launch_bounds__(THREADS, PER_SM)
    gradient_columns(const T *x, const T *y, const T *dy, const float *carry, float *totals, float *scales, T *dx, int N, i64 K, int each,
                     int parts, i64 x_m, i64 x_n, i64 y_m, i64 y_n, i64 dy_m, i64 dy_n, i64 dx_m, i64 dx_n) {
  using Own = Columns<T, DOWN, ACROSS>;
  constexpr int COUNT = Own::COUNT, WARPS = THREADS / 32, STEP = THREADS / ACROSS * ROWS;
  constexpr int NEAR = LOG ? ROWS + 1 : ROWS;  // rows whose steps pass r on: of y one more than of x, since it takes two
  __shared__ alignas(16) float2 of_warps[2][WARPS][Own::WIDTH];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Own c(N, K, each, parts);
  x += c.offset(N, x_m, x_n), y += c.offset(N, y_m, y_n), dy += c.offset(N, dy_m, dy_n), dx += c.offset(N, dx_m, dx_n);
  if (DOWN) x_n = -x_n, y_n = -y_n, dy_n = -dy_n, dx_n = -dx_n;
  int at = threadIdx.x / ACROSS * ROWS;  // the first of this thread's rows in a step, from the part's first on
  const int rows = c.end - c.begin;

  float run[COUNT], scale[COUNT];  // the r of all steps before; TOTALS: what they make of an r before the part
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    run[j] = 0.f, scale[j] = 1.f;
    if (MODE == CARRIED && c.inside) run[j] = carry[c.unit * K + c.column + j];
  }
  // Row `row` of the part of a tensor: also where it is in another part, but not beyond the column, nor for threads without a column.
  auto row_of = [&](const T *tensor, i64 stride, int row, bool wanted, float other) {
    Words<T, COUNT> w = vector_of<T, COUNT>(other);
    if (wanted && c.begin + row >= 0 && c.begin + row < N) w = load_stream<T, COUNT>(tensor + row * stride);
    return w;
  };
  Words<T, COUNT> next_near[NEAR], next_dy[ROWS], next_factor[ROWS];
  auto ask = [&] {
#pragma unroll
    for (int u = 0; u < ROWS; u++) {
      const bool wanted = c.inside && at + u < rows;
      next_dy[u] = row_of(dy, dy_n, at + u - LATE, wanted, 0.f);
      if constexpr (MODE != TOTALS) next_factor[u] = LOG ? row_of(x, x_n, at + u, wanted, 0.f) : row_of(y, y_n, at + u + !LATE, wanted, 1.f);
    }
#pragma unroll
    for (int u = 0; u < NEAR; u++)
      next_near[u] = LOG ? row_of(y, y_n, at + u - 1 - LATE, c.inside && at + max(u - 1, 0) < rows, __uint_as_float(0x7f800000u))
                         : row_of(x, x_n, at + u - 1, c.inside && at + u < rows, 1.f);
  };
  // What passes r on to row u of a thread, and, LOG, the y that its exponential is taken against.
  auto passing = [](const Words<T, COUNT>(&near)[NEAR], int u, float (&a)[COUNT], float (&against)[COUNT]) {
    unpack(near[LOG ? u + 1 : u], against);
    if constexpr (LOG) {
      float far[COUNT];
      unpack(near[u], far);
#pragma unroll
      for (int j = 0; j < COUNT; j++) a[j] = passed<T>(against[j], far[j]);
    } else {
#pragma unroll
      for (int j = 0; j < COUNT; j++) a[j] = against[j];
    }
  };
  ask();
  for (int done = 0, step = 0; done < rows; done += STEP, step ^= 1) {
    Words<T, COUNT> near[NEAR], dys[ROWS], factors[ROWS];
    Step upto[COUNT], before[COUNT];
#pragma unroll
    for (int u = 0; u < NEAR; u++) near[u] = next_near[u];
#pragma unroll
    for (int u = 0; u < ROWS; u++) {
      float a[COUNT], b[COUNT], against[COUNT];
      dys[u] = next_dy[u], factors[u] = next_factor[u];
      passing(near, u, a, against);
      unpack(dys[u], b);
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        Step s{a[j], b[j]};
        if (MODE == TOTALS && at + u >= rows) s = Step{1.f, 0.f};
        upto[j] = u ? then<LOG>(upto[j], s) : s;
      }
    }
    if constexpr (sizeof(T) == 2 && MODE != TOTALS) {  // unpacked anew below: as floats there are more than registers
      const u32 zero = u32(K >> 63);                    // which the compiler cannot know to be one
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int u = 0; u < NEAR; u++) near[u].word[i] ^= zero;
#pragma unroll
        for (int u = 0; u < ROWS; u++) dys[u].word[i] ^= zero, factors[u].word[i] ^= zero;
      }
    }
    const int here = c.inside ? rows - at : 0;
    const int from = at;
    T *const to = dx + at * dx_n;
    at += STEP;
    ask();
#pragma unroll
    for (int by = ACROSS; by < 32; by *= 2)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        const Step other = shuffled_up(upto[j], by);
        if (lane >= by) upto[j] = then<LOG>(other, upto[j]);
      }
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      const Step other = shuffled_up(upto[j], ACROSS % 32);
      before[j] = lane < ACROSS ? Step{1.f, 0.f} : other;
    }
    if (lane >= 32 - ACROSS)
#pragma unroll
      for (int j = 0; j < COUNT; j++) of_warps[step][warp][c.own + j] = float2{upto[j].a, upto[j].b};
    __syncthreads();
    float r[COUNT];
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        const float2 sent = of_warps[step][w][c.own + j];
        if constexpr (MODE == TOTALS) {
          const Step all = then<LOG>(Step{scale[j], run[j]}, Step{sent.x, sent.y});
          scale[j] = all.a, run[j] = all.b;
        } else {
          if (w == warp) r[j] = after<LOG>(run[j], before[j]);
          run[j] = after<LOG>(run[j], Step{sent.x, sent.y});
        }
      }
    if constexpr (MODE != TOTALS)
#pragma unroll
      for (int u = 0; u < ROWS; u++) {
        float a[COUNT], b[COUNT], against[COUNT], factor[COUNT], result[COUNT];
        passing(near, u, a, against);
        unpack(dys[u], b);
        unpack(factors[u], factor);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
          r[j] = a[j] * r[j] + b[j];
          result[j] = (LOG ? power<T>(factor[j] - against[j]) : factor[j]) * r[j];
          if (LATE && c.begin + from + u == 0) result[j] = 0.f;  // it is in no result
        }
        if (u < here) store<T, COUNT>(to + u * dx_n, pack<T, COUNT>(result));
      }
  }
  if constexpr (MODE == TOTALS)
    if (c.inside && threadIdx.x < ACROSS)
#pragma unroll
      for (int j = 0; j < COUNT; j++) totals[c.unit * K + c.column + j] = run[j], scales[c.unit * K + c.column + j] = scale[j];
}
