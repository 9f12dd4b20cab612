// Products of up to 8 tokens with a quantised weight: y = x · wᵀ as yᵀ = w · xᵀ on tensor cores (mma.sync).
//
// A tile is 16 rows of the weight. Its units (256 bytes of each row) are shared out to the block's WARPS warps; a block takes every
// gridDim.x-th tile. Every lane copies the words that it will multiply into slots of its own, STAGES units ahead and across tiles
// (cp.async), so that a warp waits for no other until its sums of a tile are complete. x lies in shared memory, zeros past K.
//
// The lane of row lane / 4 has words 4 (lane % 4) … + 3 of each 16: with columns counted in that order, they are operand A as
// mma.m16n8k16 wants it, and 16 bytes of x are its operand B for two products.
//
// NORM: x is rms_norm(x, norm, eps), whose root multiplies the sums. GATED: the weight's first half of rows is the gate, and
// y = silu(gate) · up; a tile has 8 rows of each. RESIDUAL: it is added before the one rounding.
//
// Started early, a block asks for its weights before it waits for the kernel before it.
#include "codes.cuh"

struct Shape {
  i64 N, row_words, x_row, residual_row, scale_row, scale_group, zero_row, zero_group, bias_col;  // N: rows of the weight
  int M, K, groups, units, tiles;
  float eps;
};

// Slices I … SLICES - 1 of four words of a lane's two rows, times x at the same columns.
template <int I, int SLICES, int LENGTH, Format FORMAT, typename T>
__device__ __forceinline__ void multiply_slices(float (&sums)[SLICES][4], const Sixteen &lower, const Sixteen &upper, u32 mask,
                                                const u32 (&minus)[4][2], const T *x) {
  if constexpr (I < SLICES) {
    const Words<T, 8> b = load_shared<T, 8>(x + I * LENGTH);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 word = (i % 2 ? upper : lower).word[half * 2 + i / 2];
        a[i] = pair_of<FORMAT, I>(T{}, word, mask, minus[I][i % 2]);
      }
      multiply(T{}, sums[I], a, b.word[half * 2], b.word[half * 2 + 1]);
    }
    multiply_slices<I + 1, SLICES, LENGTH, FORMAT>(sums, lower, upper, mask, minus, x);
  }
}

// x: [M, K]; words: [N, row_words]; scale: [N], or GROUPED [N, K / LENGTH]; zero likewise; bias: [N]; norm: [K]; y, residual: [M, outputs].
template <typename T, typename S, Format FORMAT, int LENGTH, bool GROUPED, bool HAS_ZERO, bool HAS_BIAS, bool NORM, bool GATED,
          bool RESIDUAL, int WARPS, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    weight_only_stream(const T *x, const u32 *words, const S *scale, const unsigned char *zero, const T *bias, const T *norm,
                       const T *residual, T *y, Shape shape) {
  constexpr int THREADS = 32 * WARPS, SLICES = FORMAT == INT4 ? 4 : 2, UNIT = SLICES * 128;  // columns of a unit
  constexpr int GROUPS = SLICES * 128 / LENGTH, QUADS = (GROUPS + 3) / 4;  // of a unit; each of four lanes fetches its own
  constexpr int PIECES = LENGTH / 32, CHUNKS = 4 / PIECES;                 // of 64 bytes: of a chunk; chunks of a unit
  constexpr int HEIGHT = GATED ? 8 : 16;                                   // rows of y that a tile computes
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32, quarter = lane % 4;
  const int thread = threadIdx.x, step = gridDim.x;
  const i64 outputs = GATED ? shape.N / 2 : shape.N;
  const int filled = shape.units * UNIT, pitch = filled + 32;  // 64 bytes between rows: eight lanes read all banks
  const int pairs = (shape.M + 1) / 2 * 2;

  extern __shared__ __align__(128) unsigned char dynamic[];
  Sixteen *const ring = reinterpret_cast<Sixteen *>(dynamic) + warp * STAGES * 256 + lane;  // [STAGES][4 pieces][2 rows][32 lanes]
  T *const x_shared = reinterpret_cast<T *>(dynamic + WARPS * STAGES * 4096);              // [M][pitch]
  T *const norm_shared = x_shared + shape.M * pitch;                                        // [filled], of NORM
  float *const parts = reinterpret_cast<float *>(norm_shared + (NORM ? filled : 0));        // [2][WARPS][16][pairs]
  float *const squares = parts + 2 * WARPS * 16 * pairs;                                    // [M][WARPS]

  auto row_of = [&](int tile, int h) {  // rows past the edge read the last one, and are not stored
    const i64 row = i64(tile) * HEIGHT + lane / 4;
    return GATED ? min(row, outputs - 1) + h * outputs : min(row + h * 8, outputs - 1);
  };
  int asked_tile = warp < shape.units ? int(blockIdx.x) : shape.tiles, asked_unit = warp;
  auto ask = [&](int slot) {
    if (asked_tile < shape.tiles) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 *const from = words + row_of(asked_tile, h) * shape.row_words + asked_unit * 64 + quarter * 4;
#pragma unroll
        for (int piece = 0; piece < 4; piece++)
          copy_sixteen(shared_address(ring + (slot * 8 + piece * 2 + h) * 32), from + piece * 16);
      }
      if ((asked_unit += WARPS) >= shape.units) asked_unit = warp, asked_tile += step;
    }
    commit_copies();
  };
  S scales[QUADS][2];
  unsigned char zeros[QUADS][2];
  auto fetch_groups = [&](int tile, int unit) {
    if constexpr (GROUPED) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const i64 row = row_of(tile, h);
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
          const i64 g = min(unit * GROUPS + q * 4 + (GROUPS < 4 ? quarter % GROUPS : quarter), shape.groups - 1);
          scales[q][h] = scale[row * shape.scale_row + g * shape.scale_group];
          if constexpr (HAS_ZERO) zeros[q][h] = zero[row * shape.zero_row + g * shape.zero_group];
        }
      }
    }
  };

  // ---- what no kernel writes ----
  if constexpr (NORM) {
    for (int i = thread * 8; i < shape.K; i += THREADS * 8)
      copy_sixteen(shared_address(norm_shared + i), norm + i);
    commit_copies();
  }
#pragma unroll
  for (int slot = 0; slot < STAGES; slot++) ask(slot);
  if (warp < shape.units && int(blockIdx.x) < shape.tiles) fetch_groups(blockIdx.x, warp);
  wait_for_predecessor();

  // ---- x ----
  for (int m = 0; m < shape.M; m++) {
    float sum = 0.f;
    for (int first = thread * 8; first < filled; first += 4 * THREADS * 8) {
      Words<T, 8> w[4] = {};
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (const int i = first + j * THREADS * 8; i < shape.K) w[j] = load<T, 8>(x + m * shape.x_row + i);
      if (NORM && m == 0 && first == thread * 8) wait_copies<STAGES>();  // its own part of the norm's weight
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int i = first + j * THREADS * 8;
        if (NORM && i < shape.K) {
          float f[8], by[8];
          unpack(w[j], f);
          unpack(load_shared<T, 8>(norm_shared + i), by);
#pragma unroll
          for (int e = 0; e < 8; e++) sum += f[e] * f[e], f[e] *= by[e] * norm_unit(T{});
          w[j] = pack<T, 8>(f);
        }
        if (i < filled) put(x_shared + m * pitch + i, w[j]);
      }
    }
    if constexpr (NORM) {
      sum = warp_sum(sum);
      if (lane == 0) squares[m * WARPS + warp] = sum;
    }
  }
  __syncthreads();

  // ---- tiles ----
  // A constant that the compiler must take for a lane's own: lop3 has room for one, and that is the magic number beside it.
  const u32 mask = MASK<T, FORMAT> + (u32(shape.units) >> 31 & lane);
  const T *const x_lane = x_shared + min(lane / 4, shape.M - 1) * pitch + quarter * 8;  // sums of tokens past M are not stored
  const int token = thread / HEIGHT, local = thread % HEIGHT;                           // of the result that this thread adds up
  float root = 1.f;
  if (NORM && token < shape.M) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += squares[token * WARPS + i];
    root = 1.f / (sqrtf(sum / shape.K + shape.eps) * norm_unit(T{}));
  }
  int slot = 0, buffer = 0;
  for (int tile = blockIdx.x; tile < shape.tiles; tile += step) {
    const i64 column = i64(tile) * HEIGHT + local;
    const bool adds = token < shape.M && column < outputs;
    float plus[2] = {}, times[2] = {root, root}, before = 0.f;
    if (adds) {
#pragma unroll
      for (int h = 0; h < (GATED ? 2 : 1); h++) {
        if constexpr (!GROUPED) times[h] *= to_float(scale[(column + h * outputs) * shape.scale_row]);
        if constexpr (HAS_BIAS) plus[h] = to_float(bias[(column + h * outputs) * shape.bias_col]);
      }
      if constexpr (RESIDUAL) before = to_float(residual[token * shape.residual_row + column]);
    }
    float total[4] = {}, sums[SLICES][4] = {};
    for (int unit = warp; unit < shape.units; unit += WARPS) {
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
        const bool here = unit + WARPS < shape.units;
        if (here || tile + step < shape.tiles) fetch_groups(here ? tile : tile + step, here ? unit + WARPS : warp);
      }
      wait_copies<STAGES - 1>();
      const Sixteen *const stage = ring + slot * 256;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        u32 minus[4][2];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            minus[i][h] = minus_pair(T{}, 8);
            if constexpr (HAS_ZERO) {
              const int g = chunk * SLICES + i;
              minus[i][h] = minus_pair(T{}, __shfl_sync(0xffffffffu, u32(off[g / 4][h]), g % 4, 4));
            }
          }
        if constexpr (GROUPED) {
#pragma unroll
          for (int i = 0; i < SLICES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][e] = 0.f;
        }
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
          const Sixteen lower = stage[(chunk * PIECES + piece) * 64], upper = stage[(chunk * PIECES + piece) * 64 + 32];
          multiply_slices<0, SLICES, LENGTH, FORMAT>(sums, lower, upper, mask, minus,
                                                     x_lane + unit * UNIT + chunk * SLICES * LENGTH + piece * 32);
        }
        if constexpr (GROUPED) {
#pragma unroll
          for (int i = 0; i < SLICES; i++) {
            const int g = chunk * SLICES + i;
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const float factor = __shfl_sync(0xffffffffu, to_float(by[g / 4][h]), g % 4, 4);
              total[2 * h] += factor * sums[i][2 * h];
              total[2 * h + 1] += factor * sums[i][2 * h + 1];
            }
          }
        }
      }
      ask(slot);
      if (++slot == STAGES) slot = 0;
    }
    if constexpr (!GROUPED) {
#pragma unroll
      for (int i = 0; i < SLICES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) total[e] += sums[i][e];
    }

    // ---- sums of the warps: added in one order while the next tile's go to the other buffer ----
    float *const sent = parts + buffer * WARPS * 16 * pairs;
    if (quarter * 2 < shape.M) {
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<float2 *>(sent + (warp * 16 + lane / 4 + h * 8) * pairs + quarter * 2) = {total[2 * h], total[2 * h + 1]};
    }
    __syncthreads();
    buffer ^= 1;
    if (adds) {
      float sum[2] = {};
#pragma unroll
      for (int h = 0; h < (GATED ? 2 : 1); h++) {
#pragma unroll
        for (int from = 0; from < WARPS; from++) sum[h] += sent[(from * 16 + local + h * 8) * pairs + token];
        sum[h] *= times[h];
        if constexpr (FORMAT == FP8) sum[h] *= fp8_unit(T{});
        sum[h] += plus[h];
      }
      float result = sum[0];
      if constexpr (GATED) result = sum[0] / (1.f + __expf(-sum[0])) * sum[1];
      if constexpr (RESIDUAL) result += before;
      y[token * outputs + column].bits = (unsigned short)pack_pair(T{}, result, 0.f);
    }
  }
}
