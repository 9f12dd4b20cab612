// The gradients of RMSNorm and LayerNorm, in one pass: x and dy are read once, dx is written once, and each block adds up
// the weight's and the bias's gradient of its columns in registers over all rows that it meets.
//
// Clusters stay and take row after row (so there are few partial sums); a block holds a slice of THREADS * EACH columns.
// Rows come through a ring of STAGES slices in shared memory, filled by bulk copies well ahead: registers alone would not
// keep enough bytes under way beside the sums. A row is gone through twice, for its two sums and for dx, both times out of
// shared memory; the sums of the next row are taken and sent before dx of this one, so that nobody waits for an exchange.
#include "rows.cuh"

typedef float2 Pair;

// Rows that may be under way between two blocks of a cluster. A block sends row r + 1 before it waits for row r, so a fast
// one can have sent row r + 2 to one that has not yet read row r - 1.
constexpr int AHEAD = 4;

// The sum of the pairs of each `width` neighbouring lanes (a power of two), for every lane.
__device__ __forceinline__ Pair total(Pair p, u32 width) {
  for (u32 step = width / 2; step; step /= 2) {
    p.x += __shfl_xor_sync(0xffffffffu, p.x, step);
    p.y += __shfl_xor_sync(0xffffffffu, p.y, step);
  }
  return p;
}

// Adds a term to a long sum; with LONG what rounding loses is kept and added with the next term (Kahan 1965); an infinite
// sum stays one.
template <bool LONG> __device__ __forceinline__ void add(float &sum, float &lost, float term) {
  if constexpr (LONG) {
    const float mended = term - lost, next = sum + mended;
    lost = (next - sum) - mended;
    lost = lost == lost ? lost : 0.f;
    sum = next;
  } else {
    sum += term;
  }
}

// Waits until a barrier's phase is over: its first, third … with parity 0, its second, fourth … with parity 1.
__device__ __forceinline__ void barrier_wait(u64 *barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}

// x, dy, more: [M, N], rows 16-byte aligned, N a multiple of 16 bytes; w: [N]; mean, rstd: [M] (CENTERED: LayerNorm; else
// rstd is computed here from eps); more: added to dx (the gradient that reaches x past the norm, with MORE); dx: [M, N];
// dw, db: [clusters, N] partial sums. Grid: clusters * blocks of a cluster. Dynamic shared memory: the ring, then w.
template <typename T, typename W, int THREADS, int EACH, int STAGES, int PER_SM, bool CENTERED, bool WEIGHTED, bool MORE>
__global__ void __launch_bounds__(THREADS, PER_SM)
    norm_backward(const T *x, const T *dy, const T *more, const W *w, const float *mean, const float *rstd, T *dx, float *dw,
                  float *db, i64 M, i64 N, i64 x_row, i64 dy_row, i64 more_row, i64 dx_row, float eps) {
  constexpr int COUNT = 16 / sizeof(T), VECTORS = EACH / COUNT, SLICE = THREADS * EACH, TENSORS = 2 + MORE, WARPS = THREADS / 32;
  constexpr bool LONG = sizeof(T) == 4;  // a plain fp32 sum of 256 rows erred by 2e-6 of the sum
  __shared__ u64 full[STAGES], told[AHEAD];
  __shared__ alignas(16) Pair per_block[AHEAD][MAX_CLUSTER], per_warp[2][WARPS];
  extern __shared__ __align__(128) unsigned char dynamic[];
  T *ring = reinterpret_cast<T *>(dynamic);
  W *gain = reinterpret_cast<W *>(ring + STAGES * TENSORS * SLICE);

  const u32 rank = cluster_rank(), blocks = cluster_blocks(), lane = threadIdx.x % 32;
  const i64 first = i64(rank) * SLICE, step = gridDim.x / blocks, start = blockIdx.x / blocks;
  const int elements = int(max(i64(0), min(N - first, i64(SLICE))));
  const u32 bytes = elements * sizeof(T);
  const float inverse = 1.f / float(N);

  auto fetch = [&](i64 row, int slot) {
    if (row >= M) return;
    barrier_expect(&full[slot], TENSORS * bytes);
    if (!bytes) return;
    T *to = ring + slot * TENSORS * SLICE;
    copy_bulk(to, x + row * x_row + first, bytes, &full[slot]);
    copy_bulk(to + SLICE, dy + row * dy_row + first, bytes, &full[slot]);
    if (MORE) copy_bulk(to + 2 * SLICE, more + row * more_row + first, bytes, &full[slot]);
  };
  auto at = [&](int v) { return (v * THREADS + int(threadIdx.x)) * COUNT; };

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(&full[s]);
    for (int s = 0; s < AHEAD; s++) barrier_init(&told[s]);
    for (int s = 0; s < STAGES - 1; s++) fetch(start + s * step, s);
  }
  for (int i = threadIdx.x; i < SLICE; i += THREADS) {
    if (WEIGHTED) gain[i] = i < elements ? w[first + i] : W{};
    if (i >= elements)  // where a row has ended there are zeros, so that no one has to ask
      for (int s = 0; s < STAGES * TENSORS; s++) ring[s * SLICE + i] = T{};
  }
  __syncthreads();
  if (blocks > 1) {
    cluster_arrive();
    cluster_wait();  // all blocks' barriers are there
  }

  struct Row {
    i64 index;
    int slot, parity;      // of the ring
    u32 turn;              // how many rows came before
    float rstd, mean;      // CENTERED
    __device__ void next(i64 step) {
      index += step, turn++;
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
  };
  auto statistics = [&](i64 row) { return CENTERED && row < M ? Pair{rstd[row], mean[row]} : Pair{0.f, 0.f}; };

  // The block's sums of a row: of x² and w dy x, or (CENTERED) of w dy and w dy xhat. Every thread comes by, and whatever
  // slot was worked on before is free afterwards.
  auto block_sums = [&](const Row &r) -> Pair {
    Pair sums = {0.f, 0.f};
    if (r.index < M) {
      barrier_wait(&full[r.slot], r.parity);
      const T *here = ring + r.slot * TENSORS * SLICE;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        float a[COUNT], g[COUNT], k[COUNT];
        unpack(load_shared<T, COUNT>(here + at(v)), a);
        unpack(load_shared<T, COUNT>(here + SLICE + at(v)), g);
        if constexpr (WEIGHTED) unpack(load_shared<W, COUNT>(gain + at(v)), k);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
          const float d = WEIGHTED ? g[i] * k[i] : g[i];
          sums.x += CENTERED ? d : a[i] * a[i];
          sums.y += CENTERED ? d * ((a[i] - r.mean) * r.rstd) : d * a[i];
        }
      }
      sums = total(sums, 32);
    }
    if (WARPS == 1) {
      __syncwarp();
      return sums;
    }
    if (lane == 0) per_warp[r.turn & 1][threadIdx.x / 32] = sums;
    __syncthreads();
    return total(per_warp[r.turn & 1][lane % WARPS], WARPS);
  };
  auto send = [&](const Row &r, Pair sums) {
    if (blocks == 1 || r.index >= M) return;
    const int box = r.turn % AHEAD;
    if (threadIdx.x == 0) barrier_expect(&told[box], blocks * sizeof(Pair));
    if (threadIdx.x < blocks) store_remote(&per_block[box][rank], threadIdx.x, sums, &told[box]);
  };

  float dw_sum[EACH] = {}, db_sum[CENTERED ? EACH : 1] = {};
  float dw_lost[LONG ? EACH : 1] = {}, db_lost[LONG && CENTERED ? EACH : 1] = {};
  Pair known = statistics(start);
  Row row = {start, 0, 0, 0, known.x, known.y}, ahead = row;
  known = statistics(start + step);
  Pair sums = block_sums(row);
  send(row, sums);
  for (; row.index < M; row = ahead) {
    ahead.next(step);
    ahead.rstd = known.x, ahead.mean = known.y;
    known = statistics(ahead.index + step);  // asked for a row before it is used
    const Pair of_next = block_sums(ahead);
    if (threadIdx.x == 0) fetch(row.index + (STAGES - 1) * step, row.slot ? row.slot - 1 : STAGES - 1);
    send(ahead, of_next);
    if (blocks > 1) {
      const int box = row.turn % AHEAD;
      barrier_wait(&told[box], row.turn / AHEAD & 1);
      sums = total(per_block[box][lane % blocks], blocks);
    }

    // ---- dx, and this row's part of dw and db ----
    // dx = scale (w dy - level - xhat along), with level the mean of w dy and along that of w dy xhat
    const float scale = CENTERED ? row.rstd : 1.f / sqrtf(sums.x * inverse + eps);
    const float along = (CENTERED ? sums.y : sums.y * scale) * inverse;
    const float level = CENTERED ? sums.x * inverse : 0.f;
    const T *here = ring + row.slot * TENSORS * SLICE;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      float a[COUNT], g[COUNT], k[COUNT], m[COUNT];
      unpack(load_shared<T, COUNT>(here + at(v)), a);
      unpack(load_shared<T, COUNT>(here + SLICE + at(v)), g);
      if constexpr (WEIGHTED) unpack(load_shared<W, COUNT>(gain + at(v)), k);
      if constexpr (MORE) unpack(load_shared<T, COUNT>(here + 2 * SLICE + at(v)), m);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const float xhat = (CENTERED ? a[i] - row.mean : a[i]) * scale;
        if (WEIGHTED) {
          add<LONG>(dw_sum[v * COUNT + i], dw_lost[LONG ? v * COUNT + i : 0], g[i] * xhat);
          if constexpr (CENTERED) add<LONG>(db_sum[v * COUNT + i], db_lost[LONG ? v * COUNT + i : 0], g[i]);
        }
        const float d = WEIGHTED ? g[i] * k[i] : g[i];
        a[i] = scale * (d - level - xhat * along) + (MORE ? m[i] : 0.f);
      }
      if (at(v) < elements) store<T, COUNT>(dx + row.index * dx_row + first + at(v), pack<T, COUNT>(a));
    }
    sums = of_next;
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
