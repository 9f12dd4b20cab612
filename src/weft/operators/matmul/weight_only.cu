// Products of up to 16 tokens with a quantised weight (quantized_weight.py has its layout): y = x · wᵀ.
//
// A warp takes 16 rows of the weight and a part of K. Words go from memory straight into registers, 16 bytes a lane, 4 KiB of a
// warp on their way at a time; a lane's are just what mma.sync wants of it as operand A: row lane / 4, and in each slice the
// columns 8 · (lane % 4) … + 7 of 32. Any permutation of K within a product is free as long as both operands agree, so
// operand B is the same eight columns of x: one 16-byte read of shared memory for two products. Codes become floats under a
// magic number (no subnormals but fp8's in bf16, where `fma` keeps them) and are not scaled: the sums of a group are.
//
// Warps of a block, and blocks of a cluster, share out K; their sums meet in shared memory and are added in one order.
#include "prelude.cuh"
#include "weight_only_codes.cuh"

struct Shape {
  i64 N, x_row, x_col, word_row, scale_row, scale_group, zero_row, zero_group, bias_col;
  int M, K, steps, stage;  // steps of a row: 64 words; of those, what x lies in shared memory for at a time
};

constexpr int STEP = 64;  // words

// ---- instructions -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mma(bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

__device__ __forceinline__ void mma(fp16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

// 16 bytes into shared memory past the registers; zeros where there is nothing to read.
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

// ---- the kernel -----------------------------------------------------------------------------------------------------------

// The products of one slice of 16 words of each row: 32 columns.
template <typename T, Format FORMAT, int SLICE, int TILES>
__device__ __forceinline__ void multiply(float (&sums)[TILES][4], const Words<T, 8> &upper, const Words<T, 8> &lower,
                                         const Words<T, 8> (&x)[TILES], u32 mask, u32 upper_minus, u32 lower_minus) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[2 * i] = pair_of<FORMAT, SLICE>(T{}, upper.word[half + i], mask, upper_minus);
      a[2 * i + 1] = pair_of<FORMAT, SLICE>(T{}, lower.word[half + i], mask, lower_minus);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) mma(T{}, sums[tile], a, x[tile].word[half], x[tile].word[half + 1]);
  }
}

// The same with x [token][column] from shared memory, from column `from` on; nothing for a slice that words of this format lack.
// (A template, not a lambda that takes any type: NVRTC 13.0 does not compile those for a device.)
template <int I, int LENGTH, typename T, Format FORMAT, int SLICES, int SETS, int TILES>
__device__ __forceinline__ void slice(float (&sums)[SETS][TILES][4], const Words<T, 8> &upper, const Words<T, 8> &lower,
                                      const T *(&x)[TILES], int from, u32 mask, const u32 (&minus)[SLICES][2]) {
  if constexpr (I < SLICES) {
    Words<T, 8> tokens[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) tokens[tile] = load_shared<T, 8>(x[tile] + from + I * LENGTH);
    multiply<T, FORMAT, I, TILES>(sums[I % SETS], upper, lower, tokens, mask, minus[I][0], minus[I][1]);
  }
}

// x: [M, K], M <= 8 * TILES; with VECTORS its rows begin on 16 bytes and K is a multiple of 8. words: [N, 64 * steps], rows on
// 16 bytes; scale: [N], or GROUPED [N, K / LENGTH]; zero likewise; y: [M, N], contiguous. A cluster of BLOCKS blocks takes 16 * DOWN
// rows of the weight, each block a part of K that it shares out to ALONG warps side by side.
template <typename T, typename S, Format FORMAT, int LENGTH, bool GROUPED, bool HAS_ZERO, bool HAS_BIAS, bool VECTORS, int TILES,
          int DOWN, int ALONG, int BLOCKS>
__global__ void __launch_bounds__(32 * DOWN * ALONG)
    weight_only(const T *x, const u32 *words, const S *scale, const unsigned char *zero, const T *bias, T *y, Shape shape) {
  constexpr int THREADS = 32 * DOWN * ALONG, TOKENS = 8 * TILES, PARTS = ALONG * BLOCKS;
  constexpr int SLICES = FORMAT == INT4 ? 4 : FORMAT == WIDE ? 1 : 2, COLUMNS = SLICES * 2 * STEP;  // of a step
  constexpr int RUNS = LENGTH / 32;                                            // of 16 words: a chunk
  constexpr int GROUPS = SLICES * 4 / RUNS, QUADS = (GROUPS + 3) / 4;          // of a step; each of four lanes fetches its own
  // Scales are fetched a step before, unless registers are few and they are not wanted before the step's end.
  constexpr bool AHEAD = RUNS < 4 || HAS_ZERO || TILES == 1;
  constexpr int SETS = GROUPED || TILES == 1 ? SLICES : 1;  // of sums
  constexpr int OWN = 16 * DOWN / BLOCKS;                                      // rows of a cluster that a block adds up
  static_assert(OWN * BLOCKS == 16 * DOWN && RUNS * 32 == LENGTH && RUNS <= 4, "whole rows and whole chunks");
  extern __shared__ __align__(1024) unsigned char shared[];
  u64 *const told = reinterpret_cast<u64 *>(shared);  // the sums of other blocks have come
  float *const parts = reinterpret_cast<float *>(shared + 16);
  T *const x_shared = reinterpret_cast<T *>(parts + PARTS * OWN * TOKENS);

  // A zero that the compiler cannot know: it would make the constant anew for every use.
  const u32 mask = MASK<T, FORMAT> ^ u32(shape.steps) >> 31;
  const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4, warp = threadIdx.x / 32;
  const int down = warp % DOWN, along = warp / DOWN, rank = BLOCKS > 1 ? int(cluster_rank()) : 0;
  const i64 n = i64(blockIdx.x / BLOCKS) * (16 * DOWN);
  const int each = (shape.steps + BLOCKS - 1) / BLOCKS, first = min(rank * each, shape.steps), last = min(first + each, shape.steps);
  int mine[2];  // rows past the edge are read from the last, and not stored
#pragma unroll
  for (int h = 0; h < 2; h++) mine[h] = int(min(n + down * 16 + h * 8 + row, shape.N - 1));

  // ---- what comes from memory a step ahead ----
  const T *next[2];  // words, under the name that `load` wants
#pragma unroll
  for (int h = 0; h < 2; h++)
    next[h] = reinterpret_cast<const T *>(words + mine[h] * shape.word_row + i64(first + along) * STEP + quarter * 4);
  Words<T, 8> held[4][2];
  S scales[QUADS][2];
  unsigned char zeros[QUADS][2];
  const int groups = shape.K / LENGTH;
  auto fetch_groups = [&](int step) {
    if constexpr (GROUPED) {
#pragma unroll
      for (int q = 0; q < QUADS; q++) {
        const i64 group = max(min(step * GROUPS + q * 4 + (GROUPS < 4 ? quarter % GROUPS : quarter), groups - 1), 0);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          scales[q][h] = scale[mine[h] * shape.scale_row + group * shape.scale_group];
          if constexpr (HAS_ZERO) zeros[q][h] = zero[mine[h] * shape.zero_row + group * shape.zero_group];
        }
      }
    }
  };
  if (first + along < last) {
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) held[r][h] = load<T, 8>(next[h] + r * 32);
    if constexpr (AHEAD) fetch_groups(first + along);
  }
  if constexpr (BLOCKS > 1) {
    if (threadIdx.x == 0) {
      barrier_init(told);
      barrier_expect(told, (PARTS - ALONG) * OWN * TOKENS * sizeof(float));
    }
    cluster_arrive();  // its other half stands before the sums are told: the products go on between them
  }

  // ---- products ----
  float total[TILES][4] = {}, sums[SETS][TILES][4] = {};
  const int pitch = shape.stage * COLUMNS + 32;  // of x in shared memory: eight lanes, of two tokens, meet all banks
  const T *at[TILES];  // tokens past the edge are the last, and not stored
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) at[tile] = x_shared + min(tile * 8 + row, shape.M - 1) * pitch + quarter * 8;
  for (int begin = first; begin < last; begin += shape.stage) {
    const int end = min(begin + shape.stage, last), columns = (end - begin) * COLUMNS;
    if (begin > first) __syncthreads();
    if constexpr (VECTORS) {
      const u32 vectors = columns / 8;
      for (u32 i = threadIdx.x; i < shape.M * vectors; i += THREADS) {
        const u32 m = i / vectors, column = i % vectors * 8;
        const i64 k = i64(begin) * COLUMNS + column;
        const bool there = k < shape.K;
        copy_async(x_shared + m * pitch + column, there ? x + m * shape.x_row + k : x, there);
      }
      copies_wait();
    } else {
      for (u32 i = threadIdx.x; i < u32(shape.M) * columns; i += THREADS) {
        const u32 m = i / columns, column = i % columns;
        const i64 k = i64(begin) * COLUMNS + column;
        unsigned short bits = 0;
        if (k < shape.K) bits = x[m * shape.x_row + k * shape.x_col].bits;
        x_shared[m * pitch + column].bits = bits;
      }
    }
    __syncthreads();
    for (int step = begin + along; step < end; step += ALONG) {
      const bool more = step + ALONG < last;
      S by[QUADS][2];
      unsigned char off[QUADS][2];
      if constexpr (!AHEAD) fetch_groups(step);
      if constexpr (GROUPED) {
#pragma unroll
        for (int q = 0; q < QUADS; q++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            by[q][h] = scales[q][h];
            if constexpr (HAS_ZERO) off[q][h] = zeros[q][h];
          }
        if (AHEAD && more) fetch_groups(step + ALONG);
      }
      u32 minus[SLICES][2];
#pragma unroll
      for (int i = 0; i < SLICES; i++) minus[i][0] = minus[i][1] = minus_pair(T{}, 8);
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int chunk = r / RUNS, run = r % RUNS;
        if constexpr (HAS_ZERO) {
          if (run == 0) {
#pragma unroll
            for (int i = 0; i < SLICES; i++)
#pragma unroll
              for (int h = 0; h < 2; h++) {
                const int group = chunk * SLICES + i;
                minus[i][h] = minus_pair(T{}, __shfl_sync(0xffffffffu, u32(off[group / 4][h]), group % 4, 4));
              }
          }
        }
        const int from = (step - begin) * COLUMNS + chunk * SLICES * LENGTH + run * 32;
        slice<0, LENGTH, T, FORMAT>(sums, held[r][0], held[r][1], at, from, mask, minus);
        slice<1, LENGTH, T, FORMAT>(sums, held[r][0], held[r][1], at, from, mask, minus);
        slice<2, LENGTH, T, FORMAT>(sums, held[r][0], held[r][1], at, from, mask, minus);
        slice<3, LENGTH, T, FORMAT>(sums, held[r][0], held[r][1], at, from, mask, minus);
        if (more) {
#pragma unroll
          for (int h = 0; h < 2; h++) held[r][h] = load<T, 8>(next[h] + ALONG * STEP * 2 + r * 32);
        }
        if constexpr (GROUPED) {
          if (run == RUNS - 1) {
#pragma unroll
            for (int i = 0; i < SLICES; i++)
#pragma unroll
              for (int h = 0; h < 2; h++) {
                const int group = chunk * SLICES + i;
                const float factor = __shfl_sync(0xffffffffu, to_float(by[group / 4][h]), group % 4, 4);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                  for (int e = 2 * h; e < 2 * h + 2; e++) total[tile][e] += factor * sums[i][tile][e], sums[i][tile][e] = 0.f;
              }
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) next[h] += ALONG * STEP * 2;
    }
  }
  if constexpr (!GROUPED) {
#pragma unroll
    for (int i = 0; i < SETS; i++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) total[tile][e] += sums[i][tile][e];
  }

  // ---- sums of the parts of K: to the block that owns the row, which adds them up in one order ----
  if constexpr (BLOCKS > 1) cluster_wait();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int local = down * 16 + h * 8 + row, owner = local / OWN;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float *const to = parts + ((rank * ALONG + along) * OWN + local % OWN) * TOKENS + tile * 8 + quarter * 2;
      const float2 pair = {total[tile][2 * h], total[tile][2 * h + 1]};
      if (BLOCKS == 1 || owner == rank)
        *reinterpret_cast<float2 *>(to) = pair;
      else
        store_remote(reinterpret_cast<float2 *>(to), owner, pair, told);
    }
  }
  __syncthreads();
  if constexpr (BLOCKS > 1) barrier_wait(told);
  for (int i = threadIdx.x; i < OWN * shape.M; i += THREADS) {
    const int m = i / OWN, local = i % OWN;
    const i64 column = n + rank * OWN + local;
    if (column >= shape.N) continue;
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += parts[(part * OWN + local) * TOKENS + m];
    if constexpr (!GROUPED && FORMAT != WIDE) sum *= to_float(scale[column * shape.scale_row]);
    if constexpr (FORMAT == FP8) sum *= fp8_unit(T{});
    if constexpr (HAS_BIAS) sum += to_float(bias[column * shape.bias_col]);
    y[m * shape.N + column].bits = (unsigned short)pack_pair(T{}, sum, 0.f);
  }
}
