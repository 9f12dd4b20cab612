// Gradients of running products, and of logarithms of running sums of exponentials, along rows of adjacent elements.
//
// A lane holds VECTORS runs of 16 bytes of x, y and dy as they lie in memory. It goes through them to put its steps together
// (recurrence.cuh), lanes, warps and blocks scan these pairs, and it goes through them again with the r that comes before. An element
// beside a lane's run comes from its neighbour, or from memory. Pairs are put together in one order, so the same bits come out every time.
#include "recurrence.cuh"

// All lanes' steps up to each of them.
template <bool LOG, int LANES> __device__ __forceinline__ Step scanned(Step s, u32 lane) {
#pragma unroll
  for (int by = 1; by < LANES; by *= 2) {
    const Step before = shuffled_up(s, by, LANES);
    if (lane % LANES >= by) s = then<LOG>(before, s);
  }
  return s;
}

// x[M, N] and the others likewise, rows that begin on 16 bytes. DOWN: the recurrence runs from a row's end; LATE: of an exclusive scan.
// A row has `parts` parts of `each` elements (a multiple of a vector's, as N is), all taken by teams like rows: WARPS warps of LANES *
// VECTORS vectors, or a cluster of BLOCKS blocks, each of one team. With LANES < 32 a warp has 32 / LANES rows. units: parts of all rows.
template <typename T, bool LOG, bool DOWN, bool LATE, int MODE, int LANES, int VECTORS, int WARPS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    scan_gradient(const T *x, const T *y, const T *dy, const float *carry, float *totals, float *scales, T *dx, i64 units, i64 N, i64 each,
                  i64 parts, i64 x_row, i64 y_row, i64 dy_row, i64 dx_row) {
  constexpr int COUNT = 16 / sizeof(T), TEAMS = THREADS / (32 * WARPS), SIDE = 32 / LANES;
  static_assert(BLOCKS == 1 || (TEAMS == 1 && SIDE == 1), "a cluster has one row");
  __shared__ u64 arrived[1];  // the steps of the blocks before this one have arrived
  __shared__ alignas(16) float2 of_blocks[16];
  __shared__ float2 of_warps[TEAMS][WARPS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, team = threadIdx.x / (32 * WARPS);
  const u32 rank = BLOCKS > 1 ? cluster_rank() : 0;
  const i64 unit = (i64(blockIdx.x / BLOCKS) * TEAMS + team) * SIDE + lane / LANES;
  const i64 row = parts > 1 ? unit / parts : unit, begin = parts > 1 ? unit % parts * each : 0;
  const i64 length = unit < units ? min(each, N - begin) : 0;
  x += row * x_row, y += row * y_row, dy += row * dy_row, dx += row * dx_row;

  // in the order of the recurrence
  auto first = [&](int v) { return i64(((rank * WARPS + warp) * VECTORS + v) * LANES + lane % LANES) * COUNT; };
  auto there = [&](int v) { return first(v) < length; };
  auto offset = [&](int v) { return begin + (DOWN ? length - COUNT - first(v) : first(v)); };  // where its vector begins in memory
  auto turned = [](int i) { return DOWN ? COUNT - 1 - i : i; };

  if constexpr (BLOCKS > 1) {
    if (threadIdx.x == 0) {
      barrier_init(arrived);
      barrier_expect(arrived, rank * sizeof(float2));
    }
    cluster_arrive();  // cluster_wait is below, before the steps are sent: the loads run in between
  }
  Words<T, COUNT> x_words[VECTORS], y_words[VECTORS], dy_words[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {  // all loads before any use
    x_words[v] = y_words[v] = dy_words[v] = Words<T, COUNT>{};
    if (!there(v)) continue;
    if constexpr (!LOG || MODE != TOTALS) x_words[v] = load_stream<T, COUNT>(x + offset(v));
    if constexpr (LOG || MODE != TOTALS) y_words[v] = load_stream<T, COUNT>(y + offset(v));
    dy_words[v] = load_stream<T, COUNT>(dy + offset(v));
  }

  // What lies beside a lane's vectors: of y the two before (LOG; the second only if LATE) or the one behind, of x, of dy the one before.
  const bool begins = lane % LANES == 0;
  float y_beside[VECTORS], y_second[VECTORS], x_before[VECTORS], dy_before[VECTORS];
  // Element `of_last` from the end of the run before each of a lane's; before a warp's first, from memory.
  auto from_before = [&](const Words<T, COUNT>(&words)[VECTORS], int of_last, const T *memory, float other, float (&found)[VECTORS]) {
    float f[COUNT], previous = 0.f;
    const i64 at = DOWN ? offset(0) + COUNT + of_last : offset(0) - 1 - of_last;
    if (begins && there(0)) previous = at >= 0 && at < N ? to_float(memory[at]) : other;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      unpack(words[v], f);
      const float last = f[turned(COUNT - 1 - of_last)], up = __shfl_up_sync(ALL, last, 1, LANES);
      found[v] = begins ? previous : up;
      if (v + 1 < VECTORS) previous = __shfl_sync(ALL, last, LANES - 1, LANES);
    }
  };
  if constexpr (LOG) {
    from_before(y_words, 0, y, __uint_as_float(0x7f800000u), y_beside);
    if constexpr (LATE) from_before(y_words, 1, y, __uint_as_float(0x7f800000u), y_second);
  } else {
    from_before(x_words, 0, x, 1.f, x_before);
    if constexpr (!LATE && MODE != TOTALS) {
      float next = 1.f;  // behind the run that ends the warp's
#pragma unroll
      for (int v = VECTORS - 1; v >= 0; v--) {
        float f[COUNT];
        unpack(y_words[v], f);
        y_beside[v] = __shfl_down_sync(ALL, f[turned(0)], 1, LANES);
        const bool last = first(v) + COUNT >= length;
        if (last || (v == VECTORS - 1 && lane % LANES == LANES - 1)) {
          const i64 at = DOWN ? offset(v) - 1 : offset(v) + COUNT;
          y_beside[v] = there(v) && at >= 0 && at < N ? to_float(y[at]) : 1.f;
        } else if (lane % LANES == LANES - 1) {
          y_beside[v] = next;
        }
        if (v) next = __shfl_sync(ALL, f[turned(0)], 0, LANES);
      }
    }
  }
  if constexpr (LATE) from_before(dy_words, 0, dy, 0.f, dy_before);

  // The steps of vector v in their order and, LOG, the y that each element's exponential is taken against.
  auto steps = [&](int v, float (&a)[COUNT], float (&b)[COUNT], float (&near)[COUNT]) {
    float f[COUNT];
    unpack(dy_words[v], f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) b[i] = !LATE ? f[turned(i)] : i ? f[turned(i - 1)] : dy_before[v];
    if constexpr (LOG) {
      unpack(y_words[v], f);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        near[i] = !LATE ? f[turned(i)] : i ? f[turned(i - 1)] : y_beside[v];
        const float far = !LATE ? (i ? f[turned(i - 1)] : y_beside[v]) : i > 1 ? f[turned(i - 2)] : i ? y_beside[v] : y_second[v];
        a[i] = passed<T>(near[i], far);
      }
    } else {
      unpack(x_words[v], f);
#pragma unroll
      for (int i = 0; i < COUNT; i++) a[i] = i ? f[turned(i - 1)] : x_before[v];
    }
  };

  Step upto[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    float a[COUNT], b[COUNT], near[COUNT];
    steps(v, a, b, near);
    Step s{a[0], b[0]};
#pragma unroll
    for (int i = 1; i < COUNT; i++) s = then<LOG>(s, Step{a[i], b[i]});
    upto[v] = there(v) ? s : Step{1.f, 0.f};
    if constexpr (sizeof(T) == 2 && MODE != TOTALS) {  // unpacked anew below: as floats there are more than registers
      const u32 zero = u32(N >> 63);                    // which the compiler cannot know to be one
#pragma unroll
      for (int i = 0; i < 4; i++) x_words[v].word[i] ^= zero, y_words[v].word[i] ^= zero, dy_words[v].word[i] ^= zero;
    }
  }
  Step total{1.f, 0.f};
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const Step own = scanned<LOG, LANES>(upto[v], lane), other = shuffled_up(own, 1, LANES);
    upto[v] = begins ? total : then<LOG>(total, other);
    total = then<LOG>(total, shuffled(own, LANES - 1, LANES));
  }
  Step carried{1.f, 0.f};  // before this warp
  if constexpr (WARPS > 1) {
    if (lane == 0) of_warps[team][warp] = float2{total.a, total.b};
    __syncthreads();
    const float2 sent = lane < WARPS ? of_warps[team][lane] : float2{1.f, 0.f};
    const Step all = scanned<LOG, 32>(Step{sent.x, sent.y}, lane);
    const Step earlier = shuffled(all, warp ? warp - 1 : 0, 32);
    if (warp) carried = earlier;
    total = shuffled(all, WARPS - 1, 32);
  }
  if constexpr (BLOCKS > 1) {
    cluster_wait();  // all blocks' barriers are there
    if (threadIdx.x > rank && threadIdx.x < BLOCKS) store_remote(&of_blocks[rank], threadIdx.x, float2{total.a, total.b}, arrived);
    barrier_wait(arrived);
    const float2 sent = lane < rank ? of_blocks[lane] : float2{1.f, 0.f};
    const Step earlier = shuffled(scanned<LOG, 32>(Step{sent.x, sent.y}, lane), 31, 32);
    carried = then<LOG>(earlier, carried);
    total = then<LOG>(earlier, total);
  }
  if constexpr (MODE == TOTALS) {
    if (unit < units && rank == BLOCKS - 1 && warp == 0 && lane % LANES == 0) totals[unit] = total.b, scales[unit] = total.a;
    return;
  }
  float r = carried.b;
  if constexpr (MODE == CARRIED)
    if (unit < units) r = carried.a * carry[unit] + carried.b;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    float a[COUNT], b[COUNT], near[COUNT], f[COUNT], result[COUNT];
    steps(v, a, b, near);
    unpack(LOG ? x_words[v] : y_words[v], f);
    float run = after<LOG>(r, upto[v]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      run = a[i] * run + b[i];
      const float factor = LOG ? power<T>(f[turned(i)] - near[i]) : LATE ? f[turned(i)] : i + 1 < COUNT ? f[turned(i + 1)] : y_beside[v];
      result[turned(i)] = factor * run;
      if (LATE && offset(v) + turned(i) == (DOWN ? N - 1 : 0)) result[turned(i)] = 0.f;  // it is in no result
    }
    if (there(v)) store<T, COUNT>(dx + offset(v), pack<T, COUNT>(result));
  }
}
