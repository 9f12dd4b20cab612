// The gradient of GroupNorm (sm_90 and later): a cluster of blocks shares a group (rows.cuh), whose x and dy are read once and
// stay in registers between the sums and dx. A slice is an even share of the group; each warp has a piece of it that lies
// together, so that a piece meets few channels and their sums take few shuffles.
#include "rows.cuh"

// Of some elements: the sums of dy and of dy xhat, times the weight or not.
typedef float2 Pair;

__device__ __forceinline__ Pair warp_total(Pair p) { return {warp_sum(p.x), warp_sum(p.y)}; }

// x, dy, dx: [M, N] groups, 16-byte aligned, N = CG * S, S a multiple of 16 bytes, so that a vector lies in one channel; group m is
// group m % G of its batch entry; w: [G * CG]; mean, rstd: fp32 [M]; dw, db: fp32 [SLOTS, M, CG], with SUMMED: one slot for each
// block that a channel may touch, in their order, zeros behind the last; a slot has `slot` elements. Grid: M * blocks of a
// cluster; block r has the elements r * share ... of its group, at most THREADS * EACH, of at most MOST channels. inverse: 1 / N.
// Dynamic shared memory: a pair for each warp, and a pair and a float for each of MOST channels.
template <typename T, typename W, int THREADS, int EACH, bool WEIGHTED, bool SUMMED>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    group_norm_gradient(const T *x, const T *dy, const W *w, const float *mean, const float *rstd, T *dx, float *dw, float *db, i64 N,
                        i64 slot, u32 share, u32 G, u32 CG, u32 S, u32 SLOTS, u32 MOST, float inverse) {
  using Slice = RowSlice<T, Pair, THREADS, EACH>;
  using Shared = typename Slice::Shared;
  constexpr int COUNT = Slice::COUNT, VECTORS = Slice::VECTORS, WARPS = THREADS / 32, PIECE = 32 * EACH;
  __shared__ Shared shared[1];
  extern __shared__ __align__(16) unsigned char dynamic[];

  Slice slice(N, shared[0]);
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, length = u32(N);
  u32 row = slice.row, &rank = slice.rank;
  u32 first = min(rank * share, length), end = min(first + share, length);
  u32 mine = first + warp * PIECE + lane * COUNT;  // where this thread's vectors begin, a warp's worth apart
  auto after = [](int v) { return v * 32 * COUNT; };

  Words<T, COUNT> of_x[VECTORS], of_dy[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (after(v) >= int(end - mine)) continue;
    of_x[v] = load_stream<T, COUNT>(x + (row * N + mine) + after(v));
    of_dy[v] = load_stream<T, COUNT>(dy + (row * N + mine) + after(v));
  }
  float middle = mean[row], scale = rstd[row];
  const u32 channel = first / S;
  auto there = [&](u32 i) { return first < end && (channel + i) * S < end; };  // whether the slice has some of its channel i
  Pair *of_channel = reinterpret_cast<Pair *>(dynamic);
  float *gain = reinterpret_cast<float *>(of_channel + WARPS + MOST);
  if constexpr (WEIGHTED) {
#pragma unroll 1
    for (u32 i = threadIdx.x; there(i); i += THREADS) gain[i] = to_float(w[row % G * CG + channel + i]);
    __syncthreads();
  }

  // ---- sums ----
  Pair sums[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    sums[v] = {0.f, 0.f};
    if (after(v) >= int(end - mine)) continue;  // the branch also keeps the compiler from unpacking all at once
    float a[COUNT], d[COUNT];
    unpack(of_x[v], a);
    unpack(of_dy[v], d);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      sums[v].x += d[i];
      sums[v].y += d[i] * ((a[i] - middle) * scale);  // far from 0, mean * rstd would err alike in all terms
    }
  }
  // The piece's channels one by one: a channel's index among the sums is its number plus the warp's, since two pieces share at
  // most one channel. No vector's channel is divided for.
  Pair of_warp = {0.f, 0.f};
  const u32 from = first + warp * PIECE, to = min(from + PIECE, end);
  const u32 nearest = from / S;
  u32 c = nearest;
#pragma unroll 1
  for (u32 start = from < to ? c * S : to; start < to; start += S, c++) {
    Pair own = {0.f, 0.f};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const bool here = mine + after(v) - start < S;  // of what lies before it the difference wraps around
      own.x += here ? sums[v].x : 0.f;
      own.y += here ? sums[v].y : 0.f;
    }
    own = warp_total(own);
    if (SUMMED && lane == 0) of_channel[warp + c - channel] = own;
    const float k = WEIGHTED ? gain[c - channel] : 1.f;
    of_warp.x += k * own.x;
    of_warp.y += k * own.y;
  }
  // What comes here is made or read again: there are no registers to keep it in.
  asm volatile("" : "+r"(row), "+r"(rank), "+r"(mine));
  first = min(rank * share, length), end = min(first + share, length);
  middle = mean[row], scale = rstd[row];
  const Pair all = slice.exchange(of_warp, Pair{0.f, 0.f}, [](Pair p) { return warp_total(p); }, shared[0]);

  // ---- dx ----
  c = nearest;
  u32 edge = (c + 1) * S;  // where channel c ends
  const float level = -all.x * inverse * scale, along = -all.y * inverse * scale * scale;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (after(v) >= int(end - mine)) continue;
    float a[COUNT], d[COUNT], by = scale;
    unpack(of_x[v], a);
    unpack(of_dy[v], d);
    if constexpr (WEIGHTED) {
#pragma unroll 1
      for (; mine + after(v) >= edge; edge += S) c++;
      by *= gain[c - channel];
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) a[i] = d[i] * by + ((a[i] - middle) * along + level);
    store<T, COUNT>(dx + (row * N + mine) + after(v), pack<T, COUNT>(a));
  }

  // ---- the channels' sums, last: no block waits for them ----
  if constexpr (SUMMED) {
#pragma unroll 1
    for (u32 i = threadIdx.x; there(i); i += THREADS) {
      const u32 start = (channel + i) * S, low = max(start, first) - first, high = min(start + S, end) - first;
      Pair sum = {0.f, 0.f};
#pragma unroll 1
      for (u32 piece = low / PIECE; piece <= (high - 1) / PIECE; piece++) {
        sum.x += of_channel[piece + i].x;
        sum.y += of_channel[piece + i].y;
      }
      u32 before = start < first ? rank - start / share : 0;  // blocks that have some of it
      i64 at = before * slot + i64(row) * CG + channel + i;
      dw[at] = sum.y;
      db[at] = sum.x;
      if (start + S > end) continue;  // the next block has some of it
#pragma unroll 1
      while (++before < SLOTS) {
        at += slot;
        dw[at] = 0.f;
        db[at] = 0.f;
      }
    }
  }
}
