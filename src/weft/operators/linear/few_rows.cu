// Up to 16 rows of a linear layer: act(rms_norm(x) · wᵀ + bias) + residual, computed as w · xᵀ on tensor cores (mma.sync).
//
// A tile is 16 rows of w. Its units (128 columns) are shared out to the block's WARPS warps; a block takes every gridDim.x-th tile.
// Every lane copies the 16-byte words that it will multiply into slots of its own, STAGES units ahead and across tiles (cp.async), so
// that a warp waits for no other until its sums of a tile are complete.
//
// The lane of row lane / 4 has columns 8 (lane % 4) … + 7 of each 32 of w and of x: with columns counted in that order they are
// operands A and B of two products m16n8k16.
//
// NORM: x times the norm's weight lies in shared memory, zeros past K, and the root of x's mean square multiplies the sums. Else a
// unit's columns of x come in beside w's. GATED: w's first half of rows is the gate; a tile has 8 rows of each half.
//
// Started early, a block asks for w before it waits for the kernel before it.
#include "activations.cuh"
#include "stream.cuh"

struct Shape {
  i64 w_row, x_row, residual_row, bias_col;
  int M, N, K, units, tiles;  // N: columns of y
  float eps;
};

// x: [M, K], M up to 8 · EIGHTS; w: [N, K], GATED [2N, K]; bias: w's rows; norm: [K]; residual, y: [M, N].
template <typename T, int EIGHTS, bool HAS_BIAS, bool NORM, bool GATED, int ACTIVATION, bool RESIDUAL, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS)
    few_rows(const T *x, const T *w, const T *bias, const T *norm, const T *residual, T *y, Shape shape) {
  constexpr int THREADS = 32 * WARPS, UNIT = 128;
  constexpr int HEIGHT = GATED ? 8 : 16;                      // columns of y that a tile computes
  constexpr int STAGE = (NORM ? 8 : 8 + 4 * EIGHTS) * 32;     // of 16 bytes: [4 pieces][2 rows of w][32 lanes], [EIGHTS][4 of x][32]
  static_assert(THREADS >= HEIGHT * 8 * EIGHTS);              // each adds up a result
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32, quarter = lane % 4;
  const int thread = threadIdx.x, step = gridDim.x;
  const int filled = NORM ? shape.units * UNIT : 0, pitch = filled + 32;  // 64 bytes between rows: eight lanes read all banks
  const int pairs = (shape.M + 1) / 2 * 2;

  extern __shared__ __align__(128) unsigned char dynamic[];
  Sixteen *const ring = reinterpret_cast<Sixteen *>(dynamic) + warp * STAGES * STAGE + lane;
  T *const x_shared = reinterpret_cast<T *>(dynamic + WARPS * STAGES * STAGE * 16);         // [M][pitch], of NORM
  T *const norm_shared = x_shared + shape.M * pitch;                                        // [filled]
  float *const squares = reinterpret_cast<float *>(norm_shared + filled);                   // [M][WARPS]
  float *const parts = NORM ? squares + shape.M * WARPS : reinterpret_cast<float *>(x_shared);  // [2][WARPS][16][pairs]

  struct Place { int tile, unit; };
  auto after = [&](Place at) { return at.unit + WARPS < shape.units ? Place{at.tile, at.unit + WARPS} : Place{at.tile + step, warp}; };
  auto ask_w = [&](int slot, Place at) {
    if (at.tile >= shape.tiles) return;
    const int column = at.unit * UNIT + quarter * 8;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int local = at.tile * HEIGHT + lane / 4;  // rows past the edge read the last one, and are not stored
      const i64 row = GATED ? i64(min(local, shape.N - 1)) + h * i64(shape.N) : i64(min(local + h * 8, shape.N - 1));
#pragma unroll
      for (int piece = 0; piece < 4; piece++)
        copy_sixteen(shared_address(ring + slot * STAGE + (piece * 2 + h) * 32), w + row * shape.w_row + column + piece * 32,
                     column + piece * 32 < shape.K);
    }
  };
  auto ask_x = [&](int slot, Place at) {
    if (at.tile >= shape.tiles) return;
    const int column = at.unit * UNIT + quarter * 8;
#pragma unroll
    for (int f = 0; f < EIGHTS; f++) {
      const int m = f * 8 + lane / 4;
      if (m >= shape.M) continue;  // sums of rows past M are not stored
#pragma unroll
      for (int piece = 0; piece < 4; piece++)
        copy_sixteen(shared_address(ring + slot * STAGE + (8 + f * 4 + piece) * 32), x + m * shape.x_row + column + piece * 32,
                     column + piece * 32 < shape.K);
    }
  };

  // ---- what no kernel writes ----
  if constexpr (NORM) {
    for (int i = thread * 8; i < shape.K; i += THREADS * 8) copy_sixteen(shared_address(norm_shared + i), norm + i);
    commit_copies();
  }
  const Place begin = {warp < shape.units ? int(blockIdx.x) : shape.tiles, warp};
  Place asked = begin;
#pragma unroll
  for (int slot = 0; slot < STAGES; slot++, asked = after(asked)) ask_w(slot, asked), commit_copies();
  wait_for_predecessor();

  // ---- x ----
  if constexpr (!NORM) {
    asked = begin;
#pragma unroll
    for (int slot = 0; slot < STAGES; slot++, asked = after(asked)) ask_x(slot, asked), commit_copies();
  } else {
#pragma unroll
    for (int first = 0; first < 8 * EIGHTS; first += 8) {
      float sums[8] = {};
      for (int i = thread * 8; i < filled; i += THREADS * 8) {
        Words<T, 8> rows[8] = {}, by = {};
#pragma unroll
        for (int r = 0; r < 8; r++)
          if (first + r < shape.M && i < shape.K) rows[r] = load<T, 8>(x + (first + r) * shape.x_row + i);
        if (first == 0 && i == thread * 8) wait_copies<STAGES>();  // its own part of the norm's weight
        if (i < shape.K) by = load_shared<T, 8>(norm_shared + i);
#pragma unroll
        for (int r = 0; r < 8; r++) {
          float f[8], g[8];
          unpack(rows[r], f);
          unpack(by, g);
#pragma unroll
          for (int e = 0; e < 8; e++) sums[r] += f[e] * f[e], f[e] *= g[e] * norm_unit(T{});
          if (first + r < shape.M) put(x_shared + (first + r) * pitch + i, pack<T, 8>(f));
        }
      }
#pragma unroll
      for (int r = 0; r < 8; r++) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0 && first + r < shape.M) squares[(first + r) * WARPS + warp] = sum;
      }
    }
    __syncthreads();
  }

  // ---- tiles ----
  const int token = thread / HEIGHT, local = thread % HEIGHT;  // of the result that this thread adds up
  float root = 1.f;
  if (NORM && token < shape.M) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += squares[token * WARPS + i];
    root = 1.f / (sqrtf(sum / shape.K + shape.eps) * norm_unit(T{}));
  }
  int slot = 0, buffer = 0;
  for (int tile = blockIdx.x; tile < shape.tiles; tile += step) {
    const int column = tile * HEIGHT + local;
    const bool adds = token < shape.M && column < shape.N;
    float plus[2] = {}, before = 0.f;
    if (adds) {
      if constexpr (HAS_BIAS) {
#pragma unroll
        for (int h = 0; h < (GATED ? 2 : 1); h++) plus[h] = to_float(bias[(column + h * i64(shape.N)) * shape.bias_col]);
      }
      if constexpr (RESIDUAL) before = to_float(residual[token * shape.residual_row + column]);
    }
    float sums[EIGHTS][2][4] = {};
    for (int unit = warp; unit < shape.units; unit += WARPS) {
      wait_copies<STAGES - 1>();
      const Sixteen *const stage = ring + slot * STAGE;
#pragma unroll
      for (int piece = 0; piece < 4; piece++) {
        const Sixteen lower = stage[piece * 64], upper = stage[piece * 64 + 32];
#pragma unroll
        for (int f = 0; f < EIGHTS; f++) {
          const int m = min(f * 8 + lane / 4, shape.M - 1);
          const Words<T, 8> b = load_shared<T, 8>(NORM ? x_shared + m * pitch + unit * UNIT + piece * 32 + quarter * 8
                                                       : reinterpret_cast<const T *>(stage + (8 + f * 4 + piece) * 32));
#pragma unroll
          for (int half = 0; half < 4; half += 2) {
            const u32 a[4] = {lower.word[half], upper.word[half], lower.word[half + 1], upper.word[half + 1]};
            multiply(T{}, sums[f][piece % 2], a, b.word[half], b.word[half + 1]);
          }
        }
      }
      ask_w(slot, asked);
      if constexpr (!NORM) ask_x(slot, asked);
      commit_copies();
      asked = after(asked);
      if (++slot == STAGES) slot = 0;
    }

    // ---- sums of the warps: added in one order while the next tile's go to the other buffer ----
    float *const sent = parts + buffer * WARPS * 16 * pairs;
#pragma unroll
    for (int f = 0; f < EIGHTS; f++) {
      const int m = f * 8 + quarter * 2;
      if (m >= shape.M) continue;
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<float2 *>(sent + (warp * 16 + lane / 4 + h * 8) * pairs + m) = {
            sums[f][0][2 * h] + sums[f][1][2 * h], sums[f][0][2 * h + 1] + sums[f][1][2 * h + 1]};
    }
    __syncthreads();
    buffer ^= 1;
    if (adds) {
      float sum[2] = {};
#pragma unroll
      for (int h = 0; h < (GATED ? 2 : 1); h++) {
#pragma unroll
        for (int from = 0; from < WARPS; from++) sum[h] += sent[(from * 16 + local + h * 8) * pairs + token];
        sum[h] = sum[h] * root + plus[h];
      }
      float result = activated<ACTIVATION, T>(sum[0]);
      if constexpr (GATED) result *= sum[1];
      if constexpr (RESIDUAL) result += before;
      y[token * i64(shape.N) + column].bits = (unsigned short)pack_pair(T{}, result, 0.f);
    }
  }
}
