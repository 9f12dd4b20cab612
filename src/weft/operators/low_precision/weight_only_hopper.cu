// Products of up to 64 tokens with a quantised weight on Hopper (sm_90a): y = x · wᵀ as yᵀ = w · xᵀ.
//
// The weight is wgmma's side of 64 rows and x the narrow one, so that 8 tokens cost no more than one. A thread fetches units of
// LINES * 128 bytes of each of the block's rows, and the columns of x that go with them, through a ring of STAGES slots by TMA: all
// of shared memory is bytes in flight, and no register is. Zeros come for tokens past M and for columns past K. DOWN x ALONG
// warpgroups multiply: each takes 64 rows, and of the units every ALONGth. Words of codes are read by ldmatrix, which gives each
// lane the words that hold its pairs of operand A, and become floats in registers (codes.cuh); a group's scale multiplies its fp32
// sums.
//
// Warpgroups along K, and the BLOCKS blocks of a cluster, hand their sums to one block, which adds them in one order.
//
// Started early, the thread that fetches fills the ring with codes before it waits for the kernel before; nothing is written until
// units of x have come.
#include "prelude.cuh"
#include "hopper_pipeline.cuh"
#include "narrow_wgmma.cuh"
#include "codes.cuh"

struct Shape {
  i64 N, scale_row, scale_group, zero_row, zero_group, bias_col;
  int M, groups, units;  // of a row: groups, and units of LINES * 128 bytes
};

// Words of eight of a row's words' columns as pairs of floats: of slices I … TO - 1, into a[slice - I].
template <int I, int TO, typename T, Format FORMAT, int FROM = I, int HELD>
__device__ __forceinline__ void floats_of(u32 (&a)[HELD][4], const u32 (&words)[4], u32 mask, const u32 (&minus)[4][2]) {
  if constexpr (I < TO) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[I - FROM][i] = pair_of<FORMAT, I>(T{}, words[i], mask, minus[I][i % 2]);
    floats_of<I + 1, TO, T, FORMAT, FROM>(a, words, mask, minus);
  }
}

// How far, in a descriptor's units, a column of a unit lies behind the first: boxes of 64 columns of TOKENS rows follow one another.
template <int TOKENS> __device__ constexpr int column_at(int column) { return (column / 64 * TOKENS * LINE + column % 64 * 2) >> 4; }

// x: [M, K] by boxes of TOKENS x 64; weight: [N, …] by boxes of 64 * DOWN rows of 128 bytes; scale: [N], or GROUPED [N, K / LENGTH];
// zero likewise; y: [M, N], contiguous.
template <typename T, typename S, Format FORMAT, int LENGTH, bool GROUPED, bool HAS_ZERO, bool HAS_BIAS, int TOKENS, int DOWN, int ALONG,
          int BLOCKS, int LINES, int STAGES>
__global__ void __launch_bounds__(128 * DOWN * ALONG + 32, 1)
    weight_only_hopper(const S *scale, const unsigned char *zero, const T *bias, T *y, const __grid_constant__ TensorMap x_map,
                  const __grid_constant__ TensorMap weight_map, Shape shape) {
  constexpr int WORKERS = 128 * DOWN * ALONG, HEIGHT = 64 * DOWN, PARTS = ALONG * BLOCKS, OWN = HEIGHT / BLOCKS;
  constexpr int SLICES = FORMAT == INT4 ? 4 : 2, BOXES = LINES * SLICES;  // of x, in a unit
  constexpr int X_BOX = TOKENS * LINE, W_BOX = HEIGHT * LINE, STAGE = LINES * W_BOX + BOXES * X_BOX;
  constexpr int PITCH = TOKENS + 2;  // of sums in shared memory: pairs of tokens of a row, and rows two banks apart
  static_assert(OWN * BLOCKS == HEIGHT && LINES == 2, "whole rows and whole chunks");
  // With another's units between its own, a warpgroup could take the phase before that for its unit's: they have the same parity.
  static_assert(STAGES % ALONG == 0, "a slot is always the same warpgroup's");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  unsigned char *const ring = dynamic;
  float *const parts = reinterpret_cast<float *>(ring + STAGES * STAGE);
  u64 *const full = reinterpret_cast<u64 *>(parts + PARTS * OWN * PITCH), *const empty = full + STAGES;
  u64 *const sums_arrived = empty + STAGES;

  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int rank = BLOCKS > 1 ? int(cluster_rank()) : 0;
  const i64 n = i64(blockIdx.x / BLOCKS) * HEIGHT;
  const int each = (shape.units + BLOCKS - 1) / BLOCKS, first = min(rank * each, shape.units), last = min(first + each, shape.units);

  if (threadIdx.x == WORKERS) {
    prefetch(weight_map);
    prefetch(x_map);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], 4 * DOWN);  // the warps that read a unit
    }
    barrier_init(sums_arrived, 1);
    if (BLOCKS > 1) barrier_expect(sums_arrived, (PARTS - ALONG) * OWN * TOKENS * sizeof(float));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (BLOCKS > 1) cluster_arrive();  // its other half is before the sums are sent: the products go on between them

  constexpr int SUMS = TOKENS / 2;
  // Slices of a word have sums of their own as long as there is room; else words are read again for each.
  constexpr bool TOGETHER = !GROUPED || TOKENS <= 16;
  constexpr int SETS = GROUPED && TOGETHER ? SLICES : 1, HELD = TOGETHER ? 2 : 1, PASSES = SLICES / HELD;
  float total[SUMS] = {};
  const int group = warp / 4, down = group % DOWN, along = group / DOWN, top = down * 64 + warp % 4 * 16 + lane / 4;

  if (warp == WORKERS / 32) {
    // ---- one thread fetches ----
    if (elected()) {
      auto fetch_weight = [&](int unit, int slot) {
        barrier_expect(&full[slot], STAGE);
#pragma unroll
        for (int line = 0; line < LINES; line++)
          fetch(ring + slot * STAGE + line * W_BOX, weight_map, (unit * LINES + line) * 32, int(n), 0, &full[slot]);
      };
      auto fetch_x = [&](int unit, int slot) {
#pragma unroll
        for (int box = 0; box < BOXES; box++)
          fetch(ring + slot * STAGE + LINES * W_BOX + box * X_BOX, x_map, (unit * BOXES + box) * 64, 0, 0, &full[slot]);
      };
      const int ahead = min(last - first, STAGES);
      for (int i = 0; i < ahead; i++) fetch_weight(first + i, i);
      wait_for_predecessor();
      for (int i = 0; i < ahead; i++) fetch_x(first + i, i);
      int slot = 0;
      u32 parity = 0;
      for (int unit = first + STAGES; unit < last; unit++) {
        barrier_wait(&empty[slot], parity);
        fetch_weight(unit, slot);
        fetch_x(unit, slot);
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    // ---- codes, through registers ----
    // A constant that the compiler must take for a lane's own: lop3 has room for one, and that is the magic number beside it.
    const u32 mask = MASK<T, FORMAT> + (u32(shape.units) >> 31 & lane);
    constexpr int CHUNK = LENGTH / 16, CHUNKS = 8 / CHUNK;         // steps of 8 words: of a chunk; chunks of a unit
    constexpr int GROUPS = SLICES * CHUNKS, QUADS = (GROUPS + 3) / 4;  // of a unit; each of four lanes fetches its own
    const int quarter = lane % 4;
    i64 mine[2];  // rows past the edge read the last one's scales, and are not stored
#pragma unroll
    for (int h = 0; h < 2; h++) mine[h] = min(n + top + h * 8, shape.N - 1);
    S scales[QUADS][2];
    unsigned char zeros[QUADS][2];
    auto fetch_groups = [&](int unit) {
      if constexpr (GROUPED) {
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
          const i64 g = max(min(unit * GROUPS + q * 4 + (GROUPS < 4 ? quarter % GROUPS : quarter), shape.groups - 1), 0);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            scales[q][h] = scale[mine[h] * shape.scale_row + g * shape.scale_group];
            if constexpr (HAS_ZERO) zeros[q][h] = zero[mine[h] * shape.zero_row + g * shape.zero_group];
          }
        }
      }
    };
    if (first + along < last) fetch_groups(first + along);
    // Of ldmatrix: rows 0 … 7 and 8 … 15 of the first 16 bytes, then of the next 16; the swizzle exchanges them by the row's number.
    const int row = lane % 16, across = (lane / 16 ^ lane % 8) * 16;
    const u32 rows_at = u32((down * 64 + warp % 4 * 16 + row) * LINE);
    float sums[SETS][SUMS] = {};
    u32 a[2][HELD][4] = {};
    int slot = along;
    u32 parity = 0;
#pragma unroll 1
    for (int unit = first + along; unit < last; unit += ALONG) {
      S by[QUADS][2];
      unsigned char off[QUADS][2];
      if constexpr (GROUPED) {
#pragma unroll
        for (int q = 0; q < QUADS; q++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            by[q][h] = scales[q][h];
            if constexpr (HAS_ZERO) off[q][h] = zeros[q][h];
          }
        if (unit + ALONG < last) fetch_groups(unit + ALONG);
      }
      u32 minus[4][2];
#pragma unroll
      for (int i = 0; i < 4; i++) minus[i][0] = minus[i][1] = minus_pair(T{}, 8);
      barrier_wait(&full[slot], parity);
      const u32 stage = shared_address(ring + slot * STAGE);
      const u64 x = descriptor(stage + LINES * W_BOX, 0);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if constexpr (HAS_ZERO) {
#pragma unroll
          for (int i = 0; i < SLICES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const int g = chunk * SLICES + i;
              minus[i][h] = minus_pair(T{}, __shfl_sync(0xffffffffu, u32(off[g / 4][h]), g % 4, 4));
            }
        }
        // HELD slices of a step's words become floats while the tensor cores read those before.
        u32 words[4];
        auto load_words = [&](int t) {
          const int s = chunk * CHUNK + t;  // of the unit
          load_matrices(words, stage + s / 4 * W_BOX + rows_at + (across ^ s % 4 * 32));
        };
        auto products = [&](int t, int pass, int half) {
          wgmma_wait<1>();
          hold(a[half]);
          if (pass == 0) floats_of<0, HELD, T, FORMAT>(a[half], words, mask, minus);
          if constexpr (PASSES > 1)
            if (pass == 1) floats_of<HELD, 2 * HELD, T, FORMAT>(a[half], words, mask, minus);
          if constexpr (PASSES > 2) {
            if (pass == 2) floats_of<2 * HELD, 3 * HELD, T, FORMAT>(a[half], words, mask, minus);
            if (pass == 3) floats_of<3 * HELD, 4 * HELD, T, FORMAT>(a[half], words, mask, minus);
          }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < HELD; i++) {
            const int slice = pass * HELD + i, column = (chunk * SLICES + slice) * LENGTH + t * 16;
            Narrow<T, TOKENS>::multiply(sums[slice % SETS], a[half][i], x + column_at<TOKENS>(column), !GROUPED || t);
          }
          wgmma_commit();
        };
        auto scaled = [&](int slice) {
          const int g = chunk * SLICES + slice;
          float factor[2];
#pragma unroll
          for (int h = 0; h < 2; h++) factor[h] = __shfl_sync(0xffffffffu, to_float(by[g / 4][h]), g % 4, 4);
          hold(sums[slice % SETS]);
#pragma unroll
          for (int e = 0; e < SUMS; e++) total[e] += factor[e / 2 % 2] * sums[slice % SETS][e];
        };
        if constexpr (TOGETHER) {
#pragma unroll
          for (int t = 0; t < CHUNK; t++) {
            load_words(t);
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++) products(t, pass, (t * PASSES + pass) % 2);
          }
          if constexpr (GROUPED) {
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < SLICES; i++) scaled(i);
          }
        } else {
#pragma unroll
          for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll
            for (int t = 0; t < CHUNK; t++) {
              load_words(t);
              products(t, pass, t % 2);
            }
            wgmma_wait<0>();
            scaled(pass);
          }
        }
      }
      if constexpr (!GROUPED) wgmma_wait<0>();
      if (lane == 0) barrier_arrive(&empty[slot]);
      slot += ALONG;
      if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
    if constexpr (!GROUPED) {
      hold(sums[0]);
#pragma unroll
      for (int e = 0; e < SUMS; e++) total[e] = sums[0][e];
    }
  }

  // ---- sums of the parts of K: to the block that owns the row, which adds them up in one order ----
  if constexpr (BLOCKS > 1) cluster_wait();
  if (warp < WORKERS / 32) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int local = top + h * 8, owner = local / OWN;
      float *const to = parts + ((rank * ALONG + along) * OWN + local % OWN) * PITCH + lane % 4 * 2;
#pragma unroll
      for (int tile = 0; tile < TOKENS / 8; tile++) {
        const float2 pair = {total[tile * 4 + 2 * h], total[tile * 4 + 2 * h + 1]};
        if (BLOCKS == 1 || owner == rank)
          *reinterpret_cast<float2 *>(to + tile * 8) = pair;
        else
          store_remote(reinterpret_cast<float2 *>(to + tile * 8), owner, pair, sums_arrived);
      }
    }
  }
  __syncthreads();
  if constexpr (BLOCKS > 1) {
    barrier_wait(sums_arrived);
    __syncwarp();
    cluster_arrive();  // what was sent here has come
  }
  for (int i = threadIdx.x; i < OWN * shape.M; i += WORKERS + 32) {
    const int m = i / OWN, local = i % OWN;
    const i64 column = n + rank * OWN + local;
    if (column >= shape.N) continue;
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += parts[(part * OWN + local) * PITCH + m];
    if constexpr (!GROUPED) sum *= to_float(scale[column * shape.scale_row]);
    if constexpr (FORMAT == FP8) sum *= fp8_unit(T{});
    if constexpr (HAS_BIAS) sum += to_float(bias[column * shape.bias_col]);
    y[m * shape.N + column].bits = (unsigned short)pack_pair(T{}, sum, 0.f);
  }
  if constexpr (BLOCKS > 1) {
    __syncwarp();
    cluster_wait();  // and what was sent from here: no block leaves while a message to or from it is in flight
  }
}
