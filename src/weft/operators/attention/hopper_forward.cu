// Attention's forward on Hopper (sm_90a): persistent, warp-specialised, fed by TMA, both products by wgmma.
//
// A block has a tile of GROUPS x 64 queries of a head and walks the tiles of KEYS keys that they see, from the last to the first,
// with an online softmax. One thread of the first warpgroup fetches: the tile's queries, and keys and values through two rings of
// STAGES slots, well ahead, also into the next tile. The other warpgroups compute, 64 queries each: scores by wgmma from shared memory;
// probabilities stay in registers, which are operand A of the product with the values.
//
// Two things hide the exponentials, which take half as long as the products do at 128 columns, and as long at 64. Within a warpgroup the
// scores of the next keys are asked for before the product with the values of these, so the tensor cores have work while the softmax
// runs. Between warpgroups, named barriers let one ask for its products only after the other has: they take turns, one computing
// exponentials while the other's products run.
//
// Tiles are drawn from a counter, longest first where a mask shortens them, a `section` of heads at a time, whose keys and values fit in L2.
// A slot of queries comes with the number of its tile.
#include "hopper_pipeline.cuh"
#include "hopper_wgmma.cuh"
#include "hopper_wgmma_registers.cuh"
#include "packed_sequences.cuh"

constexpr float LOG2E = 1.4426950408889634f;
#define INFINITE __uint_as_float(0x7f800000u)

// queries, keys: of a head (of packed sequences: all of them); heads: of q in a batch, `group` of them to one of k and v; rows: tiles of a
// head; section: heads (of any batch) whose tiles follow one another; all: heads of all batches; left, right: keys that a query sees beside its
// own; sinks: 0 none, 1 of T, 2 of float; columns: of v; sequences: packed ones; o_batch …: strides of the result; mask_batch …: of the mask of
// keys, in bytes; unit: of a score, in exponents of 2; cap, in_cap: c log2(e) and 2 log2(e) scale / c of a soft cap c.
struct Sizes {
  int queries, keys, heads, group, rows, section, all, left, right, sinks, columns, sequences;
  i64 o_batch, o_head, o_row, mask_batch, mask_head, mask_key;
  float unit, cap, in_cap;
};

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of 256 threads: those that wait, and those of the warpgroup that lets them go on.
__device__ __forceinline__ void turn_wait(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void turn_pass(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

// Queries `first` … of a sequence, whose tokens begin at query_start and key_start; they see tiles of keys [from, to).
struct Tile { int batch, head, first, from, to, query_start, key_start, queries, keys; };

// The tile of a number; of packed sequences some numbers have none.
template <int ROWS, int KEYS, bool LEFT, bool RIGHT, bool PACKED>
__device__ __forceinline__ bool find(Tile &t, int number, const Sizes &s, const int *query_bounds, const int *key_bounds) {
  const int section = number / (s.section * s.rows), inside = number % (s.section * s.rows);
  const int heads = min(s.section, s.all - section * s.section), all = section * s.section + inside % heads;
  int row = s.rows - 1 - inside / heads;
  t.batch = all / s.heads, t.head = all % s.heads, t.query_start = t.key_start = 0, t.queries = s.queries, t.keys = s.keys;
  if constexpr (PACKED) {
    const int b = sequence_of<ROWS>(query_bounds, s.sequences, s.queries, row);
    row -= first_tile<ROWS>(query_bounds, b, s.queries);
    extent(query_bounds, b, s.sequences, s.queries, s.queries, t.query_start, t.queries);
    extent(key_bounds, b, s.sequences, s.keys, 0, t.key_start, t.keys);
  }
  t.first = row * ROWS;
  if (PACKED && t.first >= t.queries) return false;
  const int shift = t.keys - t.queries, last = min(t.first + ROWS, t.queries) - 1;
  const int begin = LEFT ? max(t.first + shift - s.left, 0) : 0, end = RIGHT ? min(last + shift + s.right + 1, t.keys) : t.keys;
  t.from = begin / KEYS, t.to = max((end + KEYS - 1) / KEYS, t.from);
  return true;
}

// One step of the online softmax (Milakov & Gimelshein 2018) on scores of 64 queries and KEYS keys: a thread has of queries lane / 4 and
// lane / 4 + 8 of its warp, two neighbouring columns of every 8. Of a query it sees columns [low, high), counted from its own first one.
// Leaves probabilities in s, and in `shrink` what sums so far are to be multiplied by. `hidden`: keys may be hidden before.
template <int KEYS, bool LOW>
__device__ __forceinline__ void softmax(float (&s)[KEYS / 2], float (&peak)[2], float (&total)[2], float (&shrink)[2], float unit, bool masked, bool hidden,
                                        const int (&low)[2], const int (&high)[2]) {
  constexpr int CHAINS = 4;  // of dependent operations for each query
  float most[2][CHAINS], sum[2][CHAINS];
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    const int h = i / 2 % 2, column = i / 4 * 8 + i % 2, chain = i / 4 % 2 * 2 + i % 2;
    if (masked) s[i] = column < high[h] && (!LOW || column >= low[h]) ? s[i] : -INFINITE;
    most[h][chain] = i < 8 ? s[i] : fmaxf(most[h][chain], s[i]);
  }
  float base[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float now = fmaxf(fmaxf(most[h][0], most[h][1]), fmaxf(most[h][2], most[h][3]));
    now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
    now = fmaxf(peak[h], fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2)));
    base[h] = ((masked || hidden) && now == -INFINITE ? 0.f : now) * unit;  // of a query that has seen no key: powers of -inf
    shrink[h] = power_of_two(peak[h] * unit - base[h]);
    peak[h] = now;
  }
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    const int h = i / 2 % 2, chain = i / 4 % 2 * 2 + i % 2;
    s[i] = power_of_two(s[i] * unit - base[h]);
    sum[h][chain] = i < 8 ? s[i] : sum[h][chain] + s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; h++) total[h] = total[h] * shrink[h] + ((sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]));
}

// o[b, h, i] = Σ_j p[i, j] v[b, h / group, j], p = softmax of unit q·k; peak (in exponents of 2) and log_sum, log2 of the sum of powers
// relative to it, are [batches, heads, queries]. counter is 0 before a launch and after it. D and DV: columns of q and k, and of v.
// Maps have boxes of 64 columns, by GROUPS x 64 queries and KEYS keys. PACKED: sequences of other lengths follow one another, from the tokens
// on that the bounds say. Then the map of keys (and that of values) steps from row to row in its second and its third dimension, of which the
// second one has KEYS: what a tile lacks comes as zeros ahead of it, and nothing is read of the next sequence. CAP: peaks are natural, as the
// portable backward takes them where there is a soft cap. MASK: bytes of 0 hide keys from all queries.
template <typename T, int D, int DV, int GROUPS, int KEYS, int STAGES, int Q_STAGES, bool TURNS, bool LEFT, bool RIGHT, bool PACKED, bool CAP, bool MASK>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attention_hopper(T *o, float *peaks, float *log_sums, const void *sinks, u32 *counter, const int *query_bounds, const int *key_bounds,
                     const unsigned char *mask, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, Sizes sizes) {
  constexpr int ROWS = 64 * GROUPS;
  constexpr int Q_BLOCK = ROWS * LINE, BLOCK = KEYS * LINE;  // bytes of 64 columns
  constexpr int Q_BYTES = D / 64 * Q_BLOCK, K_BYTES = D / 64 * BLOCK, V_BYTES = DV / 64 * BLOCK;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  unsigned char *const queries = dynamic, *const keys = queries + Q_STAGES * Q_BYTES, *const values = keys + STAGES * K_BYTES;
  u64 *const q_full = reinterpret_cast<u64 *>(values + STAGES * V_BYTES), *const q_empty = q_full + Q_STAGES;
  u64 *const k_full = q_empty + Q_STAGES, *const k_empty = k_full + STAGES, *const v_full = k_empty + STAGES, *const v_empty = v_full + STAGES;
  int *const numbers = reinterpret_cast<int *>(v_empty + STAGES);  // of the tiles in the slots of queries; -1: there are no more
  Tile *const tiles = reinterpret_cast<Tile *>(numbers + Q_STAGES);

  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Q_STAGES; s++) barrier_init(&q_full[s], 1), barrier_init(&q_empty[s], 4 * GROUPS);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(&k_full[s], 1), barrier_init(&k_empty[s], 4 * GROUPS);
      barrier_init(&v_full[s], 1), barrier_init(&v_empty[s], 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warpgroup == 0) {
    // ---- the producer: one thread ----
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : 32));
    if (__shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) == 0 && elected()) {
      const int count = sizes.rows * sizes.all;
      int q_slot = 0, k_slot = 0, v_slot = 0;
      u32 q_parity = 1, k_parity = 1, v_parity = 1;  // fresh slots count as emptied
      for (int number = blockIdx.x; number < count;) {
        const int drawn = atomicAdd(counter, 1u);  // before it is needed: it takes a trip to L2
        Tile tile;
        const bool there = find<ROWS, KEYS, LEFT, RIGHT, PACKED>(tile, number, sizes, query_bounds, key_bounds);
        const int of_k = tile.head / sizes.group;
        auto fetch_tile = [&](unsigned char *to, const TensorMap &map, int blocks, int at, u64 *full) {
          const int lacking = PACKED ? max((at + 1) * KEYS - tile.keys, 0) : 0;
          barrier_expect(full, blocks * BLOCK);
          for (int c = 0; c < blocks; c++)
            if constexpr (PACKED)
              fetch(to + c * BLOCK, map, c * 64, -lacking, tile.key_start + at * KEYS, of_k, full);
            else
              fetch(to + c * BLOCK, map, c * 64, at * KEYS, of_k, tile.batch, full);
        };
        auto fetch_keys = [&](int at) {
          barrier_wait(&k_empty[k_slot], k_parity);
          fetch_tile(keys + k_slot * K_BYTES, k_map, D / 64, at, &k_full[k_slot]);
          if (++k_slot == STAGES) k_slot = 0, k_parity ^= 1;
        };
        if (there) {
          if (tile.from < tile.to) fetch_keys(tile.to - 1);
          barrier_wait(&q_empty[q_slot], q_parity);
          numbers[q_slot] = number;
          if (PACKED) tiles[q_slot] = tile;
          barrier_expect(&q_full[q_slot], Q_BYTES);
          for (int c = 0; c < D / 64; c++)
            fetch(queries + q_slot * Q_BYTES + c * Q_BLOCK, q_map, c * 64, tile.query_start + tile.first, tile.head, tile.batch, &q_full[q_slot]);
          if (++q_slot == Q_STAGES) q_slot = 0, q_parity ^= 1;
          for (int at = tile.to - 1; at >= tile.from; at--) {
            if (at > tile.from) fetch_keys(at - 1);
            barrier_wait(&v_empty[v_slot], v_parity);
            fetch_tile(values + v_slot * V_BYTES, v_map, DV / 64, at, &v_full[v_slot]);
            if (++v_slot == STAGES) v_slot = 0, v_parity ^= 1;
          }
        }
        number = gridDim.x + drawn;
        if (drawn == count - 1) *counter = 0;  // each block draws once in vain: this was the last draw of all
      }
      barrier_wait(&q_empty[q_slot], q_parity);
      numbers[q_slot] = -1;
      barrier_arrive(&q_full[q_slot]);
    }
  } else {
    // ---- the consumers: 64 queries each ----
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : 160));
    const int mine = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int own_turn = 1 + mine, next_turn = 1 + (mine + 1) % GROUPS;
    if (TURNS && mine == GROUPS - 1) turn_pass(next_turn);  // the first warpgroup begins
    int q_slot = 0, k_slot = 0, v_slot = 0;
    u32 q_parity = 0, k_parity = 0, v_parity = 0;
    auto release = [&](u64 *barrier) {  // by every warp: waiting for a product says nothing about other warps' rows
      if (lane == 0) barrier_arrive(barrier);
    };
    while (true) {
      barrier_wait(&q_full[q_slot], q_parity);
      const int number = agreed(numbers[q_slot]);
      if (number < 0) break;
      Tile tile;
      if constexpr (PACKED) {  // found once, by the producer: bounds are read from memory
        tile = tiles[q_slot];
        tile.from = agreed(tile.from), tile.to = agreed(tile.to);
      } else {
        find<ROWS, KEYS, LEFT, RIGHT, PACKED>(tile, number, sizes, query_bounds, key_bounds);
      }
      __syncwarp();  // all lanes have read what the producer overwrites once a lane of each warp has arrived
      const int all_queries = PACKED ? tile.queries : sizes.queries, all_keys = PACKED ? tile.keys : sizes.keys, shift = all_keys - all_queries;
      const int first = tile.first + 64 * mine, row = first + 16 * warp + lane / 4;
      const u32 q_at = shared_address(queries + q_slot * Q_BYTES) + mine * ATOM;
      float s[KEYS / 2], o_sums[DV / 2], peak[2] = {-INFINITE, -INFINITE}, total[2] = {0.f, 0.f}, shrink[2];
      u32 p[KEYS / 16][4];
#pragma unroll
      for (int i = 0; i < DV / 2; i++) o_sums[i] = 0.f;

      auto multiply_keys = [&] {  // s = q kᵀ
        const u64 q = descriptor(q_at, 0), k = descriptor(shared_address(keys + k_slot * K_BYTES), 0);
        hold(s);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < D / 16; d++)
          Unit<T>::template multiply<KEYS, false, false>(s, q + (d / 4 * Q_BLOCK + d % 4 * 32 >> 4), k + (d / 4 * BLOCK + d % 4 * 32 >> 4), d != 0);
        wgmma_commit();
      };
      auto multiply_values = [&] {  // o += p v
        const u64 v = descriptor(shared_address(values + v_slot * V_BYTES), BLOCK);
        hold(o_sums);
        hold(p);
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < KEYS / 16; t++) multiply_registers<DV, true>(T{}, o_sums, p[t], v + (t * 16 * LINE >> 4), 1);
        wgmma_commit();
      };
      auto release_keys = [&] {
        release(&k_empty[k_slot]);
        if (++k_slot == STAGES) k_slot = 0, k_parity ^= 1;
      };
      auto release_values = [&] {
        release(&v_empty[v_slot]);
        if (++v_slot == STAGES) v_slot = 0, v_parity ^= 1;
      };
      constexpr int WORDS = MASK ? (KEYS + 31) / 32 : 1;
      u32 bytes[WORDS];  // of lanes' keys: whether they are hidden
      const unsigned char *const mask_at = mask + tile.batch * sizes.mask_batch + tile.head * sizes.mask_head;
      auto load_mask = [&](int at) {  // ahead of use
        if constexpr (MASK) {
#pragma unroll
          for (int w = 0; w < WORDS; w++) {
            const int key = at * KEYS + 32 * w + lane;
            bytes[w] = (32 * w + lane < KEYS && key < all_keys) ? mask_at[key * sizes.mask_key] == 0 : 0;
          }
        }
      };
      auto weigh = [&](int at, bool masked) {
        if constexpr (CAP) {  // c tanh(x / c) = c - 2 c / (exp(2 x / c) + 1)
#pragma unroll
          for (int i = 0; i < KEYS / 2; i++) s[i] = sizes.cap - 2.f * sizes.cap * inverse(power_of_two(s[i] * sizes.in_cap) + 1.f);
        }
        if constexpr (MASK) {
          u32 hidden[WORDS], any = 0;
#pragma unroll
          for (int w = 0; w < WORDS; w++) any |= hidden[w] = agreed(bytes[w] << lane), hidden[w] >>= lane % 4 * 2;
          if (any)
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
              const int column = i / 4 * 8 + i % 2;
              if (hidden[column / 32] >> column % 32 & 1) s[i] = -INFINITE;
            }
        }
        int low[2], high[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int position = row + 8 * h + shift, least = at * KEYS;
          const int begin = (PACKED ? min(least + KEYS, all_keys) - KEYS : least) + lane % 4 * 2;  // key of the thread's first column
          low[h] = (PACKED && LEFT ? max(position - sizes.left, least) : PACKED ? least : position - sizes.left) - begin;
          high[h] = (RIGHT ? min(all_keys, position + sizes.right + 1) : all_keys) - begin;
        }
        softmax<KEYS, LEFT || PACKED>(s, peak, total, shrink, CAP ? 1.f : sizes.unit, masked, MASK, low, high);
      };
      auto pack_all = [&] {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) p[i / 4][i % 4] = pack_pair(T{}, s[2 * i], s[2 * i + 1]);
      };
      auto step = [&](int at, bool masked) {
        load_mask(at);
        barrier_wait(&k_full[k_slot], k_parity);
        if constexpr (TURNS) turn_wait(own_turn);
        multiply_keys();
        barrier_wait(&v_full[v_slot], v_parity);
        multiply_values();
        if constexpr (TURNS) turn_pass(next_turn);
        wgmma_wait<1>();
        hold(s);
        release_keys();
        weigh(at, masked);
        wgmma_wait<0>();
        hold(o_sums);
        hold(p);
        release_values();
#pragma unroll
        for (int i = 0; i < DV / 2; i++) o_sums[i] *= shrink[i / 2 % 2];
        pack_all();
      };

      int at = tile.to - 1;
      if (at >= tile.from) {
        load_mask(at);
        barrier_wait(&k_full[k_slot], k_parity);
        multiply_keys();
        wgmma_wait<0>();
        hold(s);
        release_keys();
        weigh(at, true);
        pack_all();
        at--;
        // Keys that all of the warpgroup's queries see begin at `inner` and end before `outer`.
        int outer = RIGHT ? min(all_keys, first + shift + sizes.right + 1) : all_keys;
        int inner = LEFT ? max((first + 63 + shift - sizes.left + KEYS - 1) / KEYS, tile.from) : tile.from;
        if (PACKED) outer = agreed(outer), inner = agreed(inner);
        if constexpr (RIGHT)
          for (; at >= tile.from && (at + 1) * KEYS > outer; at--) step(at, true);
        for (; at >= inner; at--) step(at, false);
        if constexpr (LEFT)
          for (; at >= tile.from; at--) step(at, true);
      }
      release(&q_empty[q_slot]);
      if (++q_slot == Q_STAGES) q_slot = 0, q_parity ^= 1;
      if (tile.to > tile.from) {
        barrier_wait(&v_full[v_slot], v_parity);
        multiply_values();
        wgmma_wait<0>();
        hold(o_sums);
        release_values();
      }

      // ---- o: queries lane / 4 (+ 8) of the warp, columns 8 j + 2 (lane % 4) (+ 1) are this thread's ----
      const i64 of_all = i64(tile.batch * sizes.heads + tile.head) * sizes.queries + tile.query_start;
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
        float top = CAP ? peak[h] : peak[h] * sizes.unit;
        factor[h] = 1.f;
        if (sizes.sinks) {  // one more logit, of a key without a value
          const float sink = LOG2E * (sizes.sinks == 1 ? to_float(static_cast<const T *>(sinks)[tile.head]) : static_cast<const float *>(sinks)[tile.head]);
          const float now = fmaxf(top, sink), base = now == -INFINITE ? 0.f : now;
          factor[h] = power_of_two(top - base);
          total[h] = total[h] * factor[h] + power_of_two(sink - base);
          top = now;
        }
        if (total[h] == 0.f) total[h] = 1.f;
        factor[h] /= total[h];
        const int i = row + 8 * h;
        if (lane % 4 == 0 && i < all_queries) {
          peaks[of_all + i] = CAP ? top * (1.f / LOG2E) : top;
          log_sums[of_all + i] = log2f(total[h]);
        }
      }
      T *const at_o = o + tile.batch * sizes.o_batch + tile.head * sizes.o_head + tile.query_start * sizes.o_row;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = row + 8 * h;
#pragma unroll
        for (int j = 0; j < DV / 8; j += 4) {  // four lanes exchange pairs, so that each has 8 neighbouring columns
          Words<T, 8> w;
#pragma unroll
          for (int k = 0; k < 4; k++) w.word[k] = pack_pair(T{}, o_sums[4 * (j + k) + 2 * h] * factor[h], o_sums[4 * (j + k) + 2 * h + 1] * factor[h]);
#pragma unroll
          for (int apart = 1; apart <= 2; apart *= 2)
#pragma unroll
            for (int k = 0; k < 4; k++)
              if (!(k & apart)) {
                const bool upper = lane & apart;
                const u32 other = __shfl_xor_sync(0xffffffffu, upper ? w.word[k] : w.word[k | apart], apart);
                w.word[k] = upper ? other : w.word[k], w.word[k | apart] = upper ? w.word[k | apart] : other;
              }
          if (i < all_queries && 8 * (j + lane % 4) < sizes.columns) store(at_o + i * sizes.o_row + 8 * (j + lane % 4), w);
        }
      }
    }
  }
}
