// RMSNorm and LayerNorm (CENTERED) of the longest rows, with or without a residual ADDED first, by persistent clusters of blocks: a
// cluster takes row after row, and each block keeps its slice's weight and bias in registers. cluster.cu fetches them for every row,
// which for the longest rows is more bytes through L2 than x, and takes the shared memory of a whole multiprocessor.
//
// Rows pass through a ring buffer of SLOTS in shared memory, filled by bulk copies. A row is read twice out of shared memory: for
// its sums, and for y. A block sends the sums of the next row before it writes y of this one, which hides the latency of the
// exchange. (backward.cuh does the same with the gradients.)
#include "moments.cuh"

// Rows whose sums may be in flight between two blocks of a cluster: a block sends row k + 1 before it waits for row k, so a fast one can
// have sent row k + 2 to one that has not yet read row k - 1.
constexpr int AHEAD = 4;

// x, r, y, h: [M, N], rows 16-byte aligned, N a whole slice of THREADS * EACH elements for each block of a cluster; w, b: [N];
// mean, rstd: fp32 [M], written if SAVED; grid clusters * blocks of a cluster, at least two; dynamic shared memory: the ring.
// h = x + r is normalised.
template <typename T, typename W, int THREADS, int EACH, int SLOTS, int PER_SM, bool CENTERED, bool WEIGHTED, bool BIASED, bool ADDED,
          bool SAVED>
__global__ void __launch_bounds__(THREADS, PER_SM)
    norm_persistent(const T *x, const T *r, const W *w, const W *b, T *y, T *h, float *mean, float *rstd, i64 M, i64 N, i64 x_row,
                 i64 r_row, i64 y_row, i64 h_row, float eps) {
  constexpr int COUNT = 16 / sizeof(T), VECTORS = EACH / COUNT, SLICE = THREADS * EACH, WARPS = THREADS / 32, TENSORS = 1 + ADDED;
  constexpr bool EXACT = sizeof(T) == 4;  // the rounding of mean * scale counts
  __shared__ u64 full[SLOTS], received[AHEAD];
  __shared__ alignas(16) float2 per_block[AHEAD][MAX_CLUSTER], per_warp[2][WARPS];
  extern __shared__ __align__(128) unsigned char dynamic[];
  T *const ring = reinterpret_cast<T *>(dynamic);  // [SLOTS, TENSORS, SLICE]

  const u32 rank = cluster_rank(), blocks = cluster_blocks(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = i64(rank) * SLICE, step = gridDim.x / blocks, start = blockIdx.x / blocks;
  auto at = [&](int v) { return (v * THREADS + int(threadIdx.x)) * COUNT; };

  auto fetch = [&](i64 row, int slot) {
    if (row >= M) return;
    constexpr u32 BYTES = SLICE * sizeof(T);
    barrier_expect(&full[slot], TENSORS * BYTES);
    T *const to = ring + slot * TENSORS * SLICE;
    copy_bulk_stream(to, x + row * x_row + first, BYTES, &full[slot]);
    if (ADDED) copy_bulk_stream(to + SLICE, r + row * r_row + first, BYTES, &full[slot]);
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; s++) barrier_init(&full[s]);
    for (int s = 0; s < AHEAD; s++) barrier_init(&received[s]);
    for (int s = 0; s < SLOTS - 1; s++) fetch(start + s * step, s);
  }
  Words<W, COUNT> gain[WEIGHTED ? VECTORS : 1], bias[BIASED ? VECTORS : 1];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if constexpr (WEIGHTED) gain[v] = load<W, COUNT>(w + first + at(v));
    if constexpr (BIASED) bias[v] = load<W, COUNT>(b + first + at(v));
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();  // all blocks' barriers are initialised

  // What is normalised, read from a slot: x, or x + r rounded as it is stored.
  auto take = [&](const T *slot, int v, float (&f)[COUNT]) {
    Words<T, COUNT> words = load_shared<T, COUNT>(slot + at(v));
    unpack(words, f);
    if constexpr (ADDED) {
      float g[COUNT];
      unpack(load_shared<T, COUNT>(slot + SLICE + at(v)), g);
#pragma unroll
      for (int i = 0; i < COUNT; i++) f[i] += g[i];
      words = pack<T, COUNT>(f);
      unpack(words, f);
    }
    return words;
  };
  // Combines the sums of `lanes` lanes, `count` elements each, 1 / `inverse_of_all` in all: LayerNorm's as in moments.cuh, RMSNorm's
  // squares.
  auto joined = [&](float2 of, u32 lanes, float count, float inverse_of_all) {
    const bool there = lane < lanes;
    if (!there) of = {0.f, 0.f};
    if constexpr (CENTERED) return warp_moments(of, there ? count : 0.f, 1.f / count, inverse_of_all);
    return float2{0.f, warp_sum(of.y)};
  };
  const float in_row = 1.f / float(N);

  // The block's sums of a row; a thread takes its own about the mean of its first vector. Every thread passes __syncthreads here, so
  // the slot of the row before is free afterwards.
  auto block_sums = [&](i64 row, u32 turn) {
    float2 of = {0.f, 0.f};
    if (row < M) {
      const int slot = turn % SLOTS;
      phase_wait(&full[slot], turn / SLOTS & 1);
      const T *const here = ring + slot * TENSORS * SLICE;
      float around = 0.f, off = 0.f, squares = 0.f;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        float f[COUNT];
        take(here, v, f);
        if (CENTERED && v == 0) {
#pragma unroll
          for (int i = 0; i < COUNT; i++) around += f[i];
          around *= 1.f / COUNT;
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
          const float d = CENTERED ? f[i] - around : f[i];
          off += d;
          squares += d * d;
        }
      }
      of = joined({off + EACH * around, CENTERED ? squares - fminf(off * (off / EACH), 3.402823466e38f) : squares}, 32, EACH,
                  1.f / (32 * EACH));
    }
    if (lane == 0) per_warp[turn & 1][warp] = of;
    __syncthreads();
    return joined(per_warp[turn & 1][lane % WARPS], WARPS, 32 * EACH, 1.f / SLICE);
  };
  auto send = [&](i64 row, u32 turn, float2 of) {
    if (row >= M) return;
    const int box = turn % AHEAD;
    if (threadIdx.x == 0) barrier_expect(&received[box], blocks * sizeof(float2));
    if (threadIdx.x < blocks) store_remote(&per_block[box][rank], threadIdx.x, of, &received[box]);
  };

  send(start, 0, block_sums(start, 0));
  u32 turn = 0;
  for (i64 row = start; row < M; row += step, turn++) {
    const float2 next = block_sums(row + step, turn + 1);
    if (threadIdx.x == 0) fetch(row + (SLOTS - 1) * step, (turn + SLOTS - 1) % SLOTS);
    send(row + step, turn + 1, next);
    phase_wait(&received[turn % AHEAD], turn / AHEAD & 1);
    const float2 all = joined(per_block[turn % AHEAD][lane % MAX_CLUSTER], blocks, SLICE, in_row);

    const float middle = all.x * in_row, variance = all.y * in_row;
    const float scale = 1.f / sqrtf((variance < 0.f ? 0.f : variance) + eps);  // a NaN stays one
    const float shift = -middle * scale;
    if (SAVED && rank == 0 && threadIdx.x == 0) mean[row] = middle, rstd[row] = scale;
    const T *const here = ring + turn % SLOTS * TENSORS * SLICE;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      float f[COUNT], g[COUNT], c[COUNT];
      const Words<T, COUNT> words = take(here, v, f);
      if constexpr (ADDED) store<T, COUNT>(h + row * h_row + first + at(v), words);
      if constexpr (WEIGHTED) unpack(gain[v], g);
      if constexpr (BIASED) unpack(bias[v], c);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const float xhat = !CENTERED ? f[i] * scale : EXACT ? (f[i] - middle) * scale : f[i] * scale + shift;
        f[i] = WEIGHTED ? (BIASED ? xhat * g[i] + c[i] : xhat * g[i]) : xhat;
      }
      store<T, COUNT>(y + row * y_row + first + at(v), pack<T, COUNT>(f));
    }
  }
  cluster_arrive();
  cluster_wait();
}
