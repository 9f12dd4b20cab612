// The gradients of attention on Hopper (sm_90a): one kernel by tiles of keys, warp-specialised, fed by TMA, computed by wgmma.
//
//   s = k q^T,  p = exp2(scale log2(e) s - base),  dp = v do^T,  ds = p (dp - delta)
//   dv = sum p do,  dk = scale sum ds q,  dq = scale sum ds k
//
// `prepare` makes base and delta of each query and sets the sums of dq to 0; a block of `gradients` has a tile of 128 keys and walks the
// queries that see them; `finish` rounds dq. Tiles of scores are transposed, [keys, queries]: in that form p and ds are in registers what
// wgmma takes as its first operand in the products for dv and dk. Only ds goes through shared memory, for dq, which all tiles of keys
// add to in fp32, in an order that differs from run to run.
//
// A block of `gradients` is three warpgroups. Two multiply, 64 keys each, and each makes half of a tile's dq, 64 x 64, of the ds of both: that
// of the step before, for which neither waits. The second begins half a step after the first, so that one's exponentials run beside
// the other's products. One thread of the third warpgroup fetches: keys and values, and tiles of q and do through a ring of slots.
//
// DRAWN: blocks are persistent and draw tiles from a counter; keys and values have two places, so that the next ones come while these are
// used; warpgroups add to dq from registers. Else a block has one tile, and sums of dq are staged for TMA (cp.reduce.async.bulk), for which
// two more warps wait. With 128 columns the latter is faster.
//
// PACKED: sequences of other lengths follow one another. Each has tiles of its own; a last one that lacks rows has them first, as zeros: nothing
// is read of the next sequence, where NaN may lie. So its first row is a position ahead of the tile's own first one.
#include "hopper_pipeline.cuh"
#include "hopper_wgmma.cuh"
#include "hopper_wgmma_registers.cuh"
#include "packed_sequences.cuh"

#define INFINITE __uint_as_float(0x7f800000u)

constexpr int KEYS = 128, PART = 64 * 64;         // keys of a tile; numbers of dq that a warpgroup makes at a time
template <int D> constexpr int QUERIES = 8192 / D;  // of a tile, which has two parts of dq

// H heads of q, G heads of k and v. A query sees keys from `left` before to `right` behind its position, m + keys - queries. Packed sequences
// are one batch of all tokens, and tiles as many as any lengths could need; `sequences` of them.
struct Sizes { int queries, keys, heads, group, batches, left, right, query_tiles, key_tiles, section, sequences; };
struct Strides { i64 batch, head, row; };

// A tile of M queries: of its sequence's (or head's) the position of its first row, the first that is the tile's own, and the end; their start
// among all tokens; whether these belong to a sequence.
struct Rows {
  int first, own, end, start;
  bool of_sequence;
  template <int M, bool PACKED> static __device__ __forceinline__ Rows of(int tile, const Sizes &sizes, const int *bounds) {
    if constexpr (!PACKED) return {tile * M, tile * M, sizes.queries, 0, true};
    const int b = sequence_of<M>(bounds, sizes.sequences, sizes.queries, tile);
    Rows r;
    extent(bounds, b, sizes.sequences, sizes.queries, sizes.queries, r.start, r.end);
    r.own = (tile - first_tile<M>(bounds, b, sizes.queries)) * M, r.first = min(r.own, r.end - M), r.of_sequence = b >= 0 && b < sizes.sequences;
    return r;
  }
};

// ---- before: o, do [B, H, queries, D]; peak, log_sum, dlse [B, H, queries] ------------------------------------------------

// statistics: [B, H, query tiles, 2, QUERIES], -base and delta of each row, -inf and 0 behind the last; unit: of peaks, in exponents of 2; dq: [B, H, query tiles, 2, PART].
template <typename T, int D, bool PACKED>
__global__ void __launch_bounds__(256)
    prepare(const T *o, const T *d_o, const float *peak, const float *log_sum, const float *dlse, float *statistics, float *dq, const int *bounds,
            Sizes sizes, Strides of_o, Strides of_do, int has_dlse, float unit) {
  constexpr int M = QUERIES<D>, LANES = D / 8, TOGETHER = 256 / LANES;  // lanes of a row, rows of the block at a time
  const int tile = blockIdx.x % sizes.query_tiles, bh = blockIdx.x / sizes.query_tiles, b = bh / sizes.heads, h = bh % sizes.heads;
  const Rows rows = Rows::of<M, PACKED>(tile, sizes, bounds);
  const int lane = threadIdx.x % LANES, at_first = threadIdx.x / LANES, first = rows.first + at_first;
  float *const to = statistics + i64(blockIdx.x) * (2 * M);
  float4 *const zeros = reinterpret_cast<float4 *>(dq + i64(blockIdx.x) * (2 * PART));
#pragma unroll
  for (int i = 0; i < 2 * PART / 4 / 256; i++) zeros[i * 256 + threadIdx.x] = {0.f, 0.f, 0.f, 0.f};
  if (PACKED && rows.own >= rows.end) {  // a number without a tile
    if (threadIdx.x < M) to[threadIdx.x] = -INFINITE, to[M + threadIdx.x] = 0.f;
    return;
  }
  const i64 o_at = b * of_o.batch + h * of_o.head + 8 * lane, do_at = b * of_do.batch + h * of_do.head + 8 * lane;
  Words<T, 8> a[M / TOGETHER], c[M / TOGETHER];
#pragma unroll
  for (int i = 0; i < M / TOGETHER; i++) {
    const i64 row = rows.start + min(PACKED ? max(first + i * TOGETHER, rows.own) : first + i * TOGETHER, rows.end - 1);
    a[i] = load<T, 8>(o + o_at + row * of_o.row), c[i] = load<T, 8>(d_o + do_at + row * of_do.row);
  }
#pragma unroll
  for (int i = 0; i < M / TOGETHER; i++) {
    float x[8], y[8], delta = 0.f;
    unpack(a[i], x);
    unpack(c[i], y);
#pragma unroll
    for (int e = 0; e < 8; e++) delta += x[e] * y[e];
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
    const int row = first + i * TOGETHER;
    if (lane == 0) {
      const i64 at = i64(bh) * sizes.queries + rows.start + row;
      const bool there = row < rows.end && (!PACKED || row >= rows.own);
      const float largest = there ? peak[at] : -INFINITE;
      const bool seen = largest != -INFINITE;  // else the row has no keys: all exponents become -inf
      const int in_tile = at_first + i * TOGETHER;
      to[in_tile] = seen ? -(largest * unit + log_sum[at]) : -INFINITE;
      if (PACKED && !rows.of_sequence) delta = 0.f;  // o is 0 there, and do may be NaN
      to[M + in_tile] = there ? delta - (has_dlse ? dlse[at] : 0.f) : 0.f;
    }
  }
}

// ---- after: dq [B, H, queries, D] -----------------------------------------------------------------------------------------

// A part's rows r, columns c are at thread 32 (r / 16) + 4 (r % 8) + c % 8 / 2, the four (c / 8) of 128 threads, number 2 (r / 8 % 2) + c % 2.
template <typename T, int D, bool PACKED>
__global__ void __launch_bounds__(256) finish(const float *sums, T *dq, const int *bounds, Sizes sizes, Strides of_dq, float scale) {
  const int tile = blockIdx.x % sizes.query_tiles, bh = blockIdx.x / sizes.query_tiles, b = bh / sizes.heads, h = bh % sizes.heads;
  const Rows rows = Rows::of<QUERIES<D>, PACKED>(tile, sizes, bounds);
  const int eight = threadIdx.x % 8, r = threadIdx.x / 8 % 8, warp = threadIdx.x / 64;
  const float4 *const from = reinterpret_cast<const float4 *>(sums + i64(blockIdx.x) * (2 * PART)) + eight * 128 + warp * 32 + r * 4;
  float4 four[2][4];
#pragma unroll
  for (int part = 0; part < 2; part++)
#pragma unroll
    for (int q = 0; q < 4; q++) four[part][q] = from[part * (PART / 4) + q];
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const float4(&f)[4] = four[part];
    const int row = rows.first + (D == 64 ? 64 * part : 0) + warp * 16 + r, column = (D == 64 ? 0 : 64 * part) + 8 * eight;
    T *const to = dq + b * of_dq.batch + h * of_dq.head + column;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float x[8];
#pragma unroll
      for (int q = 0; q < 4; q++) x[2 * q] = scale * (half ? f[q].z : f[q].x), x[2 * q + 1] = scale * (half ? f[q].w : f[q].y);
      const int m = row + 8 * half;
      if (m < rows.end && (!PACKED || m >= rows.own)) store<T, 8>(to + (rows.start + m) * of_dq.row, pack<T>(x));
    }
  }
}

// ---- between ----------------------------------------------------------------------------------------------------------------

// Which tile of keys a block has, and which tiles of queries see it. `section` heads of k at a time, so that what their blocks read lies in
// L2; in a section first the first tiles, which most queries see if those after a key do.
// n: position of the first key, `own` of the first that is the tile's own; queries, keys: of its sequence, their starts among all tokens, and the
// number of its first tile of queries.
struct Task { int b, g, n, own, begin, end, queries, keys, query_start, key_start, first_tile; };

// False for a number that has no tile.
template <int M, bool PACKED>
__device__ __forceinline__ bool find(Task &t, const Sizes &sizes, int id, const int *query_bounds, const int *key_bounds) {
  const int all = sizes.batches * (sizes.heads / sizes.group), section = id / (sizes.section * sizes.key_tiles);
  const int from = section * sizes.section, heads = min(sizes.section, all - from), i = id - from * sizes.key_tiles, head = from + i % heads;
  t.b = head / (sizes.heads / sizes.group), t.g = head % (sizes.heads / sizes.group), t.n = t.own = i / heads * KEYS;
  t.queries = sizes.queries, t.keys = sizes.keys, t.query_start = t.key_start = t.first_tile = 0;
  if constexpr (PACKED) {
    const int s = sequence_of<KEYS>(key_bounds, sizes.sequences, sizes.keys, i / heads);
    extent(key_bounds, s, sizes.sequences, sizes.keys, sizes.keys, t.key_start, t.keys);
    extent(query_bounds, s, sizes.sequences, sizes.queries, 0, t.query_start, t.queries);
    t.own = (i / heads - first_tile<KEYS>(key_bounds, s, sizes.keys)) * KEYS, t.n = min(t.own, t.keys - KEYS);
    t.first_tile = first_tile<M>(query_bounds, s, sizes.queries);
    if (t.own >= t.keys) return false;
  }
  const int shift = t.keys - t.queries;
  const int first = max(0, t.own - shift - sizes.right), last = min(t.queries - 1, min(t.own + KEYS, t.keys) - 1 - shift + sizes.left);
  t.begin = first / M, t.end = last < first ? t.begin : last / M + 1;
  return true;
}

__device__ __forceinline__ void put_tile(const TensorMap &map, const void *from, int x, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(shared_address(from)),
               "r"(x), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// [64 ROWS, D] as blocks of 64 columns, each [64 ROWS, 64].
template <int ROWS_64, int D>
__device__ __forceinline__ void fetch_tile(unsigned char *to, const TensorMap &map, int row, int head, int batch, u64 *barrier) {
#pragma unroll
  for (int x = 0; x < D; x += 64)
#pragma unroll
    for (int r = 0; r < ROWS_64; r++) fetch(to + (x / 64 * ROWS_64 + r) * ATOM, map, x, row + 64 * r, head, batch, barrier);
}

// The same of packed sequences, by maps of boxes of all rows (``PackedHeads``): the last rows that come are those from `row` on, zeros before them.
template <int ROWS_64, int D>
__device__ __forceinline__ void fetch_packed(unsigned char *to, const TensorMap &map, int lacking, int row, int head, u64 *barrier) {
#pragma unroll
  for (int x = 0; x < D; x += 64) fetch(to + x / 64 * ROWS_64 * ATOM, map, x, -lacking, row, head, barrier);
}

// Four 8 x 8 matrices of 16-bit floats to shared memory, as the words of operand A lie: lanes 8 i to 8 i + 7 say where the i-th's rows go.
__device__ __forceinline__ void store_four(void *row, const u32 (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(a[0]), "r"(a[1]), "r"(a[2]),
               "r"(a[3])
               : "memory");
}

__device__ __forceinline__ void add_four(float *to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void add_bulk(float *to, const void *from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// Of `count` threads; those that arrive go on.
__device__ __forceinline__ void meet(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
__device__ __forceinline__ void arrive(int id, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory"); }

enum Meeting { READ = 1, BEGUN = 8, STAGED = 2, TAKEN = 4, STORED = 6 };  // those of a warpgroup are two

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log_of_2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A soft cap c on a score s: c tanh(s / c), in exponents of 2.
struct Cap {
  float cap, in_cap, out_of_cap;  // c log2(e); 2 log2(e) scale / c; 1 / (c log2(e))
  __device__ __forceinline__ float of(float x) const {
    return x == -INFINITE ? x : cap - 2.f * cap * inverse(power_of_2(x * in_cap) + 1.f);  // what is hidden stays so
  }
  // Its derivative, by a probability, which is exp2(capped + base): no score need be kept.
  __device__ __forceinline__ float slope(float p, float base) const {
    const float t = fmaxf((log_of_2(p) - base) * out_of_cap, -1.f);
    return 1.f - t * t;
  }
};

// sums [64, D] += a [64, 16 DEPTHS] b [16 DEPTHS, D], b's rows in shared memory, 128 bytes each of 64 columns.
template <typename T, int D, int DEPTHS> __device__ __forceinline__ void add_product(float (&sums)[D / 2], const u32 (&a)[DEPTHS][4], u64 b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < DEPTHS; i++) multiply_registers<D, true>(T{}, sums, a[i], b + i * (2 * 8 * LINE >> 4), 1);
  wgmma_commit();
}

// Maps: q, k, v, do, dk, dv as (D, rows, heads, batches), in boxes of 64 x 64. PACKED: in boxes of 64 columns by a tile's rows, those of dk and dv
// unused. MASK: bytes of 0 hide keys from all queries; of_mask's rows are keys.
template <typename T, int D, int SLOTS, bool DRAWN, bool PACKED, bool CAP, bool MASK>
__global__ void __launch_bounds__(THREADS, 1)
    gradients(const float *statistics, float *dq, u32 *drawn, T *dk_tokens, T *dv_tokens, const int *query_bounds, const int *key_bounds,
              const unsigned char *mask, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map, const __grid_constant__ TensorMap dk_map,
              const __grid_constant__ TensorMap dv_map, Sizes sizes, Strides of_dk, Strides of_dv, Strides of_mask,
              float scale, float scale_log2, Cap cap) {
  constexpr int M = QUERIES<D>, OF_KEYS = KEYS * D * 2, OF_QUERIES = M * D * 2, OF_SCORES = KEYS * M * 2, ROW_STATISTICS = 2 * M * 4;
  constexpr int HALVES = DRAWN ? 2 : 1, DS_TILES = 3;  // places of keys and values; of ds
  extern __shared__ __align__(1024) unsigned char dynamic[];  // all there is: the swizzle asks for 1024 bytes' alignment
  unsigned char *const k_tiles = dynamic, *const v_tiles = k_tiles + HALVES * OF_KEYS, *const q_ring = v_tiles + HALVES * OF_KEYS;
  unsigned char *const do_ring = q_ring + SLOTS * OF_QUERIES, *const ds_tiles = do_ring + SLOTS * OF_QUERIES;
  unsigned char *const staged = ds_tiles + DS_TILES * OF_SCORES, *const rows = staged + (DRAWN ? 0 : 2 * PART * 4);
  u64 *const q_full = reinterpret_cast<u64 *>(rows + SLOTS * ROW_STATISTICS), *const q_empty = q_full + SLOTS;
  u64 *const do_full = q_empty + SLOTS, *const do_empty = do_full + SLOTS, *const k_full = do_empty + SLOTS, *const v_full = k_full + 2;
  u64 *const k_empty = v_full + 2, *const ds_full = k_empty + 2;
  volatile int *const tasks = reinterpret_cast<int *>(ds_full + DS_TILES);
  Task *const found = reinterpret_cast<Task *>(ds_full + DS_TILES + 1);  // of packed sequences: bounds are read from memory

  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; s++) {
      barrier_init(&q_full[s], 1), barrier_init(&do_full[s], 1);
      barrier_init(&q_empty[s], CONSUMERS / 32), barrier_init(&do_empty[s], CONSUMERS / 32);
    }
    for (int s = 0; s < 2; s++) barrier_init(&k_full[s], 1), barrier_init(&v_full[s], 1), barrier_init(&k_empty[s], 2);
    for (int s = 0; s < DS_TILES; s++) barrier_init(&ds_full[s], CONSUMERS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
    if (warp == 0 && elected()) {
      // ---- the thread that fetches, and draws tiles of keys ----
      const int all = sizes.batches * (sizes.heads / sizes.group) * sizes.key_tiles;
      int slot = 0;
      u32 parity = 1;  // a fresh slot counts as emptied
      for (int turn = 0;; turn++) {
        const int half = DRAWN ? turn % 2 : 0, id = DRAWN ? atomicAdd(drawn, 1) : blockIdx.x;
        if (DRAWN) barrier_wait(&k_empty[half], turn / 2 % 2 ^ 1), tasks[half] = id < all ? id : -1;
        if (DRAWN && id >= all) {
          barrier_arrive(&k_full[half]);
          if (id == all + int(gridDim.x) - 1) *drawn = 0;  // the last one, for the next launch
          break;
        }
        Task task;
        const bool there = find<M, PACKED>(task, sizes, id, query_bounds, key_bounds);
        auto fetch_keys = [&](unsigned char *to, const TensorMap &map, u64 *full) {
          barrier_expect(full, OF_KEYS);
          if constexpr (PACKED)
            fetch_packed<2, D>(to + half * OF_KEYS, map, task.own - task.n, task.key_start + task.own, task.g, full);
          else
            fetch_tile<2, D>(to + half * OF_KEYS, map, task.n, task.g, task.b, full);
        };
        auto fetch_queries = [&](unsigned char *to, const TensorMap &map, int tile, int h, u64 *full) {
          if constexpr (PACKED)
            fetch_packed<M / 64, D>(to, map, max((tile + 1) * M - task.queries, 0), task.query_start + tile * M, h, full);
          else
            fetch_tile<M / 64, D>(to, map, tile * M, h, task.b, full);
        };
        if constexpr (PACKED) {
          found[half] = task;
          if (!there) {
            if (!DRAWN) found[half].b = -1, barrier_arrive(&k_full[half]);
            if (!DRAWN) break;
            turn--;
            continue;
          }
        }
        fetch_keys(k_tiles, k_map, &k_full[half]);
        bool first = true;
        for (int h = task.g * sizes.group; h < (task.g + 1) * sizes.group; h++) {
          const float *of_tile = statistics + (i64(task.b * sizes.heads + h) * sizes.query_tiles + task.first_tile + task.begin) * (2 * M);
          for (int tile = task.begin; tile < task.end; tile++, of_tile += 2 * M) {
            barrier_wait(&q_empty[slot], parity);
            barrier_expect(&q_full[slot], OF_QUERIES + ROW_STATISTICS);
            fetch_queries(q_ring + slot * OF_QUERIES, q_map, tile, h, &q_full[slot]);
            copy_bulk(rows + slot * ROW_STATISTICS, of_tile, ROW_STATISTICS, &q_full[slot]);
            if (first) fetch_keys(v_tiles, v_map, &v_full[half]);
            first = false;
            barrier_wait(&do_empty[slot], parity);
            barrier_expect(&do_full[slot], OF_QUERIES);
            fetch_queries(do_ring + slot * OF_QUERIES, do_map, tile, h, &do_full[slot]);
            if (++slot == SLOTS) slot = 0, parity ^= 1;
          }
        }
        if (first) barrier_arrive(&v_full[half]);
        if (!DRAWN) break;
      }
    } else if (!DRAWN && (warp == 1 || warp == 2)) {
      Task task;
      const int lane = threadIdx.x % 32;
      if constexpr (PACKED) {
        barrier_wait(&k_full[0], 0);
        task = found[0];
        if (task.b < 0) return;
      } else {
        find<M, PACKED>(task, sizes, blockIdx.x, query_bounds, key_bounds);
      }
      // ---- a warp that adds a warpgroup's parts to dq ----
      const int of = warp - 1;
      for (int h = task.g * sizes.group; h < (task.g + 1) * sizes.group; h++) {
        float *to = dq + ((i64(task.b * sizes.heads + h) * sizes.query_tiles + task.first_tile + task.begin) * 2 + of) * PART;
        for (int tile = task.begin; tile < task.end; tile++, to += 2 * PART) {
          arrive(TAKEN + of, 160);
          meet(STAGED + of, 160);
          if (lane == 0) {
            add_bulk(to, staged + of * PART * 4, PART * 4);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
          }
          __syncwarp();
        }
      }
      if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
  } else {
    // ---- the consumers: 64 keys each ----
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int mine = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    int slot = 0;
    u32 parity = 0;
    int ds_at = 0, ds_before = DS_TILES - 1;
    u32 ds_parity = 0, before_parity = 0;
    for (int turn = 0;; turn++) {
      const int half = DRAWN ? turn % 2 : 0;
      barrier_wait(&k_full[half], DRAWN ? turn / 2 % 2 : 0);
      const int id = DRAWN ? __shfl_sync(0xffffffffu, tasks[half], 0) : blockIdx.x;
      if (DRAWN && id < 0) break;
      Task task;
      if constexpr (PACKED) {
        task = found[half];
        if (task.b < 0) break;
        task.n = agreed(task.n), task.own = agreed(task.own), task.begin = agreed(task.begin), task.end = agreed(task.end);
        task.queries = agreed(task.queries), task.keys = agreed(task.keys), task.first_tile = agreed(task.first_tile), task.g = agreed(task.g);
      } else {
        find<M, PACKED>(task, sizes, id, query_bounds, key_bounds);
      }
      unsigned char *const k_tile = k_tiles + half * OF_KEYS, *const v_tile = v_tiles + half * OF_KEYS;
      const int steps = (task.end - task.begin) * sizes.group;
      // Bytes, in sixteens, from one step of wgmma's depth to the next: within a swizzled line, or two groups of 8 rows further.
      constexpr u64 ALONG = 32 >> 4, DOWN = 2 * 8 * LINE >> 4;
      const u64 k_rows = descriptor(shared_address(k_tile) + mine * ATOM, 0), v_rows = descriptor(shared_address(v_tile) + mine * ATOM, 0);
      const u64 k_columns = descriptor(shared_address(k_tile) + (D == 128 ? mine * 2 * ATOM : 0), 2 * ATOM);
      const u64 q_line = descriptor(shared_address(q_ring), 0), do_line = descriptor(shared_address(do_ring), 0);
      const u64 q_rows = descriptor(shared_address(q_ring), M * LINE), do_rows = descriptor(shared_address(do_ring), M * LINE);
      const u64 ds_columns = descriptor(shared_address(ds_tiles) + (D == 64 ? mine * 2 * ATOM : 0), 2 * ATOM);
      float dk[D / 2], dv[D / 2], s[M / 2];
#pragma unroll
      for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.f;

      // [64 keys, M] of the products of rows of k (v) and of rows of a slot
      auto scores = [&](float(&d)[M / 2], u64 of_keys, u64 of_queries, int slot) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
          Unit<T>::template multiply<M, false, false>(d, of_keys + (i / 4 * (2 * ATOM) >> 4) + i % 4 * ALONG,
                                                      of_queries + (slot * OF_QUERIES + i / 4 * (M * LINE) >> 4) + i % 4 * ALONG, i != 0);
        wgmma_commit();
      };
      auto product_of_ds = [&](float(&d)[32], int at) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
          Unit<T>::template multiply<64, true, true>(d, ds_columns + (at * OF_SCORES >> 4) + i * DOWN, k_columns + i * DOWN, i != 0);
        wgmma_commit();
      };
      auto add_to_dq = [&](float(&of_q)[32], float *to) {
        if constexpr (DRAWN) {
#pragma unroll
          for (int i = 0; i < 8; i++) add_four(to + i * 512, of_q[4 * i], of_q[4 * i + 1], of_q[4 * i + 2], of_q[4 * i + 3]);
        } else {
          meet(TAKEN + mine, 160);
          float4 *const at = reinterpret_cast<float4 *>(staged + mine * PART * 4) + thread;
#pragma unroll
          for (int i = 0; i < 8; i++) at[i * 128] = {of_q[4 * i], of_q[4 * i + 1], of_q[4 * i + 2], of_q[4 * i + 3]};
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          arrive(STAGED + mine, 160);
        }
      };
      auto release = [&](u64 *barrier) {
        if (lane == 0) barrier_arrive(barrier);
      };

      const int shift = task.keys - task.queries, own = task.n + 64 * mine + 16 * warp + lane / 4;  // and own + 8 are this thread's keys
      int tile = task.begin;
      const unsigned char *mask_at = mask + task.b * of_mask.batch + task.g * sizes.group * of_mask.head;
      float *to = dq + ((i64(task.b * sizes.heads + task.g * sizes.group) * sizes.query_tiles + task.first_tile + tile) * 2 + mine) * PART + 4 * thread, *before = to;
      if (steps) {
        if (mine) meet(BEGUN, CONSUMERS);  // half a step behind the other
        barrier_wait(&q_full[slot], parity);
        scores(s, k_rows, q_line, slot);
      }
      if (DRAWN && thread == 0 && turn) {
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        barrier_arrive(&k_empty[half ^ 1]);
      }
      barrier_wait(&v_full[half], DRAWN ? turn / 2 % 2 : 0);
      for (int step = 0; steps; step++) {
        float dp[M / 2];
        barrier_wait(&do_full[slot], parity);
        wgmma_wait<0>();
        hold(s);
        scores(dp, v_rows, do_line, slot);

        // ---- p ----
        const int m = PACKED ? min(tile * M, task.queries - M) : tile * M;
        const float *const of_rows = reinterpret_cast<const float *>(rows + slot * ROW_STATISTICS) + 2 * (lane % 4);
        bool hidden[2] = {};
        if constexpr (MASK) {
#pragma unroll
          for (int half = 0; half < 2; half++) hidden[half] = own + 8 * half < task.keys && mask_at[(own + 8 * half) * of_mask.row] == 0;
        }
        const bool all_seen = (!MASK || !agreed(hidden[0] || hidden[1])) && (PACKED ? task.n == task.own : task.n + KEYS <= sizes.keys) && task.n + KEYS - 1 <= m + shift + sizes.right && task.n >= m + M - 1 + shift - sizes.left;
        if (!all_seen) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int j = own + 8 * half, from = j - shift - sizes.right - m - 2 * (lane % 4), seen = (PACKED ? j >= task.own : j < sizes.keys) && !hidden[half] ? sizes.left + sizes.right : -1;
#pragma unroll
            for (int i = 0; i < M / 8; i++)
#pragma unroll
              for (int e = 0; e < 2; e++) {
                const int x = 8 * i + e - from;
                if (x < 0 || x > seen) s[4 * i + 2 * half + e] = -INFINITE;
              }
          }
        }
        u32 p[2][M / 32][4];
#pragma unroll
        for (int part = 0; part < 2; part++) {
#pragma unroll
          for (int i = 0; i < M / 16; i++) {
            const int at = part * (M / 4) + 4 * i;
            const float2 base = *reinterpret_cast<const float2 *>(of_rows + 2 * at);
#pragma unroll
            for (int half = 0; half < 2; half++) {
              float &x = s[at + 2 * half], &y = s[at + 2 * half + 1];
              if constexpr (CAP)
                x = power_of_2(cap.of(x) + base.x), y = power_of_2(cap.of(y) + base.y);
              else
                x = power_of_2(x * scale_log2 + base.x), y = power_of_2(y * scale_log2 + base.y);
            }
          }
          if (D == 64 && part) {
            wgmma_wait<0>();
            hold(dp), hold(p[0]);
          }
#pragma unroll
          for (int i = 0; i < M / 8; i++) p[part][i / 4][i % 4] = pack_pair(T{}, s[part * (M / 4) + 2 * i], s[part * (M / 4) + 2 * i + 1]);
          add_product<T, D>(dv, p[part], do_rows + (slot * OF_QUERIES >> 4) + part * (M / 32) * DOWN);
        }
        if (D == 128) {
          wgmma_wait<1>();
          hold(dp), hold(p[0]);
        }

        if (!mine && step == 0) arrive(BEGUN, CONSUMERS);

        // ---- ds ----
        u32 ds[M / 16][4];
#pragma unroll
        for (int i = 0; i < M / 8; i++) {
          const float2 delta = *reinterpret_cast<const float2 *>(of_rows + M + 8 * i);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int at = 4 * i + 2 * half;
            if constexpr (CAP) {
              const float2 base = *reinterpret_cast<const float2 *>(of_rows + 8 * i);
              s[at] *= cap.slope(s[at], base.x), s[at + 1] *= cap.slope(s[at + 1], base.y);
            }
            ds[i / 2][i % 2 * 2 + half] = pack_pair(T{}, s[at] * (dp[at] - delta.x), s[at + 1] * (dp[at + 1] - delta.y));
          }
        }
        add_product<T, D>(dk, ds, q_rows + (slot * OF_QUERIES >> 4));
        if (step) barrier_wait(&ds_full[ds_before], before_parity);  // and so has what this step's place held been read
        // To shared memory, [keys, 64 queries] by lines; of two tiles, the one that the products before the last have read.
        unsigned char *const ds_tile = ds_tiles + ds_at * OF_SCORES + (64 * mine + 16 * warp + lane % 16) * LINE;
#pragma unroll
        for (int i = 0; i < M / 8; i += 2) {
          const int chunk = i % 8 + lane / 16;
          store_four(ds_tile + i / 8 * (2 * ATOM) + ((chunk ^ lane % 8) << 4), ds[i / 2]);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        release(&ds_full[ds_at]);

        // ---- dq, 64 queries by 64 columns: of all keys ----
        float of_q[32];
        product_of_ds(of_q, ds_before);
        wgmma_wait<1>();
        hold(dk), hold(dv), hold(p[1]), hold(ds);
        release(&q_empty[slot]), release(&do_empty[slot]);
        const int next = slot + 1 == SLOTS ? 0 : slot + 1;
        const u32 next_parity = next ? parity : parity ^ 1;
        const bool last = step + 1 == steps;
        if (!last) barrier_wait(&q_full[next], next_parity);
        scores(s, k_rows, q_line, next);  // after the last ones of nothing
        wgmma_wait<1>();
        hold(of_q);
        if (step) add_to_dq(of_q, before);
        before = to, before_parity = ds_parity, ds_before = ds_at;
        ds_at = ds_at == DS_TILES - 1 ? 0 : ds_at + 1, ds_parity ^= ds_at == 0;
        to += 2 * PART;
        slot = next, parity = next_parity;
        if (last) break;
        if (++tile == task.end) tile = task.begin, mask_at += of_mask.head, to += i64(sizes.query_tiles - (task.end - task.begin)) * (2 * PART);
      }
      wgmma_wait<0>();
      hold(s);
      if (steps) {  // the last step's dq
        barrier_wait(&ds_full[ds_before], before_parity);
        float of_q[32];
        product_of_ds(of_q, ds_before);
        wgmma_wait<0>();
        hold(of_q);
        add_to_dq(of_q, before);
      }

      // ---- dk and dv, through the memory of k and v ----
      meet(READ, CONSUMERS);  // k, by both
#pragma unroll
      for (int which = 0; which < 2; which++) {
        float(&sums)[D / 2] = which ? dk : dv;
        const float by = which ? scale : 1.f;
        unsigned char *const to = (which ? k_tile : v_tile) + (64 * mine + 16 * warp + lane % 16) * LINE;
#pragma unroll
        for (int i = 0; i < D / 8; i += 2) {
          u32 w[4];
#pragma unroll
          for (int e = 0; e < 4; e++) w[e] = pack_pair(T{}, by * sums[4 * i + 2 * e], by * sums[4 * i + 2 * e + 1]);
          store_four(to + i / 8 * (2 * ATOM) + ((i % 8 + lane / 16 ^ lane % 8) << 4), w);
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      meet(STORED + mine, 128);
      if constexpr (PACKED) {  // without the rows that are not the tile's own: of a store no coordinate may be negative
#pragma unroll
        for (int i = thread; i < 64 * D / 8; i += 128) {
          const int r = i / (D / 8), row = 64 * mine + r, c = i % (D / 8), at = (c / 8 * 2 + mine) * ATOM + r * LINE + ((c ^ r) % 8 << 4);
          if (task.n + row >= task.own) {
            const i64 token = task.key_start + task.n + row;
            const uint4 of_v = *reinterpret_cast<const uint4 *>(v_tile + at), of_k = *reinterpret_cast<const uint4 *>(k_tile + at);
            *reinterpret_cast<uint4 *>(dv_tokens + task.g * of_dv.head + token * of_dv.row + 8 * c) = of_v;
            *reinterpret_cast<uint4 *>(dk_tokens + task.g * of_dk.head + token * of_dk.row + 8 * c) = of_k;
          }
        }
        meet(STORED + mine, 128);  // all have read what the next tile's keys and values may take the place of
      } else if (thread == 0) {
#pragma unroll
        for (int x = 0; x < D; x += 64) {
          put_tile(dv_map, v_tile + (x / 64 * 2 + mine) * ATOM, x, task.n + 64 * mine, task.g, task.b);
          put_tile(dk_map, k_tile + (x / 64 * 2 + mine) * ATOM, x, task.n + 64 * mine, task.g, task.b);
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
      if (!DRAWN) break;
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
