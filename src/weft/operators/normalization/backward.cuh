// The gradients of RMSNorm and LayerNorm, in one pass: x and dy are read once, dx is written once, and each block adds up
// the weight's and the bias's gradient of its columns in registers over all rows that it meets.
//
// Clusters are persistent: they take group after group of ROWS rows (so there are few partial sums); a block holds a slice of
// THREADS * EACH columns. Groups pass through a ring buffer of STAGES slots in shared memory, filled by bulk copies well ahead:
// registers alone would not keep enough bytes in flight beside the sums. A group is read twice out of shared memory, for its sums
// and for dx; a block sends the sums of the next group before it computes dx of this one, which hides the latency of the exchange.
// What is done once a group (waiting, fetching, exchanging, unpacking the weight) is a third to a half of all instructions with
// one row of 16-bit floats in a group, and instructions are the limit there (docs/notes/normalization.md).
#pragma once
#include "long_sum.cuh"
#include "rows.cuh"

typedef float2 Pair;

// Groups whose sums may be in flight between two blocks of a cluster. A block sends group g + 1 before it waits for group g, so a
// fast one can have sent group g + 2 to one that has not yet read group g - 1.
constexpr int AHEAD = 4;

// The sum of the pairs of each `width` neighbouring lanes (a power of two), for every lane.
__device__ __forceinline__ Pair total(Pair p, u32 width) {
  for (u32 step = width / 2; step; step /= 2) {
    p.x += __shfl_xor_sync(0xffffffffu, p.x, step);
    p.y += __shfl_xor_sync(0xffffffffu, p.y, step);
  }
  return p;
}

template <typename T, typename W, int THREADS, int EACH, int ROWS, int STAGES, bool CENTERED, bool WEIGHTED, bool MORE, typename... Also>
__device__ __forceinline__ void
    gradient_of_rows(const T *x, const T *dy, const T *more, const W *w, const float *mean, const float *rstd, T *dx, float *dw, float *db,
                     i64 M, i64 N, i64 x_row, i64 dy_row, i64 more_row, i64 dx_row, float eps, Also &...also) {
  constexpr int COUNT = 16 / sizeof(T), VECTORS = EACH / COUNT, SLICE = THREADS * EACH, WARPS = THREADS / 32;
  constexpr int TENSORS = 2 + MORE, SLOT = TENSORS * ROWS * SLICE;
  constexpr bool LONG = sizeof(T) == 4;  // a plain fp32 sum of 256 rows erred by 2e-6 of the sum
  __shared__ u64 full[STAGES], received[AHEAD];
  __shared__ alignas(16) Pair per_block[AHEAD][ROWS][MAX_CLUSTER], per_warp[2][ROWS][WARPS];
  extern __shared__ __align__(128) unsigned char dynamic[];
  T *ring = reinterpret_cast<T *>(dynamic);  // [STAGES, TENSORS, ROWS, SLICE]
  W *gain = reinterpret_cast<W *>(ring + STAGES * SLOT);

  const u32 rank = cluster_rank(), blocks = cluster_blocks(), lane = threadIdx.x % 32;
  const i64 first = i64(rank) * SLICE, step = gridDim.x / blocks, start = blockIdx.x / blocks, groups = (M + ROWS - 1) / ROWS;
  const int elements = int(max(i64(0), min(N - first, i64(SLICE))));
  const u32 bytes = elements * sizeof(T);
  const bool dense = elements == SLICE && x_row == SLICE && dy_row == SLICE && (!MORE || more_row == SLICE);
  const float inverse = 1.f / float(N);

  auto fetch = [&](i64 group, int slot) {
    if (group >= groups) return;
    const i64 row = group * ROWS;
    const int rows = int(min(M - row, i64(ROWS)));
    barrier_expect(&full[slot], rows * TENSORS * bytes);
    if (!bytes) return;
    T *to = ring + slot * SLOT;
    const int copies = dense ? 1 : rows;  // of dense rows one copy takes a group: small copies are slow
    const u32 each = dense ? rows * bytes : bytes;
#pragma unroll 1
    for (int r = 0; r < copies; r++, to += SLICE) {
      copy_bulk(to, x + (row + r) * x_row + first, each, &full[slot]);
      copy_bulk(to + ROWS * SLICE, dy + (row + r) * dy_row + first, each, &full[slot]);
      if (MORE) copy_bulk(to + 2 * ROWS * SLICE, more + (row + r) * more_row + first, each, &full[slot]);
    }
  };
  auto at = [&](int v) { return (v * THREADS + int(threadIdx.x)) * COUNT; };

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(&full[s]);
    for (int s = 0; s < AHEAD; s++) barrier_init(&received[s]);
    for (int s = 0; s < STAGES - 1; s++) fetch(start + s * step, s);
  }
  for (int i = threadIdx.x; i < SLICE; i += THREADS) {
    if (WEIGHTED) gain[i] = i < elements ? w[first + i] : W{};
    if (i >= elements)  // zeros behind the end of a row, so that no thread has to check
      for (int s = 0; s < STAGES * TENSORS * ROWS; s++) ring[s * SLICE + i] = T{};
  }
  __syncthreads();
  if (blocks > 1) {
    cluster_arrive();
    cluster_wait();  // all blocks' barriers are initialised
  }

  struct Group {
    i64 index;
    int slot, parity;               // of the ring
    u32 turn;                        // how many groups came before
    float rstd[ROWS], mean[ROWS];    // CENTERED
    __device__ void next(i64 step) {
      index += step, turn++;
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
  };
  auto statistics = [&](i64 group, float (&deviation)[ROWS], float (&middle)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const i64 row = group * ROWS + r;
      deviation[r] = CENTERED && row < M ? rstd[row] : 0.f;
      middle[r] = CENTERED && row < M ? mean[row] : 0.f;
    }
  };

  // The block's sums of each row: of x² and w dy x, or (CENTERED) of w dy and w dy (x - mean). Every thread passes
  // a barrier here, so the slot of the group before is free afterwards. The sums of a row past the last are not used.
  auto block_sums = [&](const Group &g, Pair (&sums)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = {0.f, 0.f};
    if (g.index < groups) {
      phase_wait(&full[g.slot], g.parity);
      const T *here = ring + g.slot * SLOT;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        float k[COUNT];
        if constexpr (WEIGHTED) unpack(load_shared<W, COUNT>(gain + at(v)), k);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          float a[COUNT], d[COUNT];
          unpack(load_shared<T, COUNT>(here + r * SLICE + at(v)), a);
          unpack(load_shared<T, COUNT>(here + (ROWS + r) * SLICE + at(v)), d);
#pragma unroll
          for (int i = 0; i < COUNT; i++) {
            if (WEIGHTED) d[i] *= k[i];
            sums[r].x += CENTERED ? d[i] : a[i] * a[i];
            sums[r].y += d[i] * (CENTERED ? a[i] - g.mean[r] : a[i]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) sums[r] = total(sums[r], 32);
    }
    if (WARPS == 1) {
      __syncwarp();
      return;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (lane == 0) per_warp[g.turn & 1][r][threadIdx.x / 32] = sums[r];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = total(per_warp[g.turn & 1][r][lane % WARPS], WARPS);
  };
  auto send = [&](const Group &g, const Pair (&sums)[ROWS]) {
    if (blocks == 1 || g.index >= groups) return;
    const int box = g.turn % AHEAD;
    if (threadIdx.x == 0) barrier_expect(&received[box], blocks * ROWS * sizeof(Pair));
    if (threadIdx.x < blocks)
#pragma unroll
      for (int r = 0; r < ROWS; r++) store_remote(&per_block[box][r][rank], threadIdx.x, sums[r], &received[box]);
  };

  float dw_sum[EACH] = {}, db_sum[CENTERED ? EACH : 1] = {};
  float dw_lost[LONG ? EACH : 1] = {}, db_lost[LONG && CENTERED ? EACH : 1] = {};
  Group group = {start, 0, 0, 0};
  statistics(start, group.rstd, group.mean);
  Group ahead = group;
  float next_rstd[ROWS], next_mean[ROWS];
  statistics(start + step, next_rstd, next_mean);
  Pair sums[ROWS], of_next[ROWS];
  block_sums(group, sums);
  send(group, sums);
  for (; group.index < groups; group = ahead) {
    ahead.next(step);
#pragma unroll
    for (int r = 0; r < ROWS; r++) ahead.rstd[r] = next_rstd[r], ahead.mean[r] = next_mean[r];
    statistics(ahead.index + step, next_rstd, next_mean);  // loaded a group before it is used
    block_sums(ahead, of_next);
    if (threadIdx.x == 0) fetch(group.index + (STAGES - 1) * step, group.slot ? group.slot - 1 : STAGES - 1);
    send(ahead, of_next);
    if (blocks > 1) {
      const int box = group.turn % AHEAD;
      phase_wait(&received[box], group.turn / AHEAD & 1);
#pragma unroll
      for (int r = 0; r < ROWS; r++) sums[r] = total(per_block[box][r][lane % blocks], blocks);
    }

    // ---- dx, and this group's part of dw and db ----
    // dx = scale (w dy - level - xhat along), with level the mean of w dy and along that of w dy xhat
    float scale[ROWS], shift[ROWS], level[ROWS], along[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      scale[r] = CENTERED ? group.rstd[r] : 1.f / sqrtf(sums[r].x * inverse + eps);
      shift[r] = -group.mean[r] * scale[r];
      level[r] = CENTERED ? -sums[r].x * inverse * scale[r] : 0.f;
      along[r] = -sums[r].y * scale[r] * inverse * scale[r];
    }
    const T *here = ring + group.slot * SLOT;
    const i64 row = group.index * ROWS;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      float k[COUNT];
      if constexpr (WEIGHTED) unpack(load_shared<W, COUNT>(gain + at(v)), k);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        if (ROWS > 1 && row + r >= M) break;
        float a[COUNT], g[COUNT], m[COUNT];
        unpack(load_shared<T, COUNT>(here + r * SLICE + at(v)), a);
        unpack(load_shared<T, COUNT>(here + (ROWS + r) * SLICE + at(v)), g);
        if constexpr (MORE) unpack(load_shared<T, COUNT>(here + (2 * ROWS + r) * SLICE + at(v)), m);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
          // of 16-bit floats the rounding of mean * rstd is far below their own; one operation instead of two
          const float xhat = !CENTERED ? a[i] * scale[r] : LONG ? (a[i] - group.mean[r]) * scale[r] : a[i] * scale[r] + shift[r];
          if (WEIGHTED) {
            add<LONG>(dw_sum[v * COUNT + i], dw_lost[LONG ? v * COUNT + i : 0], g[i] * xhat);
            if constexpr (CENTERED) add<LONG>(db_sum[v * COUNT + i], db_lost[LONG ? v * COUNT + i : 0], g[i]);
          }
          const float d = WEIGHTED ? g[i] * k[i] : g[i];
          a[i] = d * scale[r] + (CENTERED ? xhat * along[r] + level[r] : xhat * along[r]);
          if constexpr (MORE) a[i] += m[i];
        }
        if (at(v) < elements) {
          store<T, COUNT>(dx + (row + r) * dx_row + first + at(v), pack<T, COUNT>(a));
          (also.write(a, (row + r) * N + first + at(v)), ...);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = of_next[r];
  }

  if (WEIGHTED) {
    dw += start * N + first;
    db += start * N + first;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (at(v) >= elements) continue;
      float part[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; i++) part[i] = dw_sum[v * COUNT + i];
      store<float, COUNT>(dw + at(v), pack<float, COUNT>(part));
      if constexpr (CENTERED) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) part[i] = db_sum[v * COUNT + i];
        store<float, COUNT>(db + at(v), pack<float, COUNT>(part));
      }
    }
  }
  if (blocks > 1) {  // no block leaves while another may still write to it
    cluster_arrive();
    cluster_wait();
  }
}
