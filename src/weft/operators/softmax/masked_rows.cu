// softmax(scale * x + mask) of rows that a block holds, with a causal, a boolean or an additive mask, and the causal one's
// gradient: THREADS threads hold a row in registers, EACH elements a thread.
//
// Work follows what a row sees: of a causal row a warp neither reads nor computes what lies after the diagonal, it writes
// zeros there. Rows of the same mask row (the heads of a batch, say) are taken one after another, SHARE of them, with the mask
// in registers: else it comes out of L2 for each, as many bytes as x where it is of x's dtype.
#include "exponential.cuh"
#include "prelude.cuh"

struct None {};              // no mask, or a causal one
struct Boolean { char byte; };  // an element of a boolean mask
template <typename M> constexpr bool MASKS = true;
template <> constexpr bool MASKS<None> = false;

// Rows of one warp each share a block.
template <int THREADS> constexpr int GROUPS = THREADS == 32 ? 4 : 1;
template <int THREADS> constexpr int BLOCK = THREADS * GROUPS<THREADS>;
template <int THREADS> constexpr int BLOCKS = 1024 / BLOCK<THREADS>;  // of a multiprocessor: 64 registers a thread

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// ---- masks: COUNT elements of a row of the mask, and what they add -----------------------------------------------------

// 4, 8 or 16 bytes at a time.
template <typename M, int COUNT> __device__ __forceinline__ Words<M, COUNT> load_mask(const M *p) {
  Words<M, COUNT> w;
  const u32 *from = reinterpret_cast<const u32 *>(p);
  if constexpr (w.N == 1) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(w.word[0]) : "l"(from));
  } else if constexpr (w.N == 2) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w.word[0]), "=r"(w.word[1]) : "l"(from));
  } else {
    return load<M, COUNT>(p);
  }
  return w;
}

template <int COUNT> __device__ __forceinline__ void unpack(const Words<Boolean, COUNT> &w, float (&f)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = w.word[i / 4] & 0xffu << i % 4 * 8 ? 0.f : -infinity();
}

// ---- a row of THREADS threads --------------------------------------------------------------------------------------------

template <typename T, int THREADS, int EACH> struct RowOfThreads {
  static constexpr int COUNT = 16 / sizeof(T);  // elements an access
  static constexpr int VECTORS = EACH / COUNT;  // accesses a thread
  struct Shared { float highest[THREADS / 32], total[THREADS / 32]; };

  u32 unit;  // index of the row, or of the group of rows that share a mask
  u32 thread = threadIdx.x % THREADS;

  __device__ __forceinline__ RowOfThreads() : unit(blockIdx.x * GROUPS<THREADS> + threadIdx.x / THREADS) {}

  // The column that vector v of this thread begins at, and that of this warp's first thread.
  __device__ __forceinline__ int at(int v) const { return (v * THREADS + thread) * COUNT; }
  __device__ __forceinline__ int warp_at(int v) const { return (v * THREADS + thread / 32 * 32) * COUNT; }

  __device__ __forceinline__ void load(const T *row, int columns, Words<T, COUNT> (&w)[VECTORS]) const {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      if (at(v) < columns) w[v] = load_stream<T, COUNT>(row + at(v));
  }

  // Columns that the row does not see become `fill`.
  __device__ __forceinline__ void cut(float (&f)[COUNT], int v, int sees, float fill) const {
    const int left = sees - at(v);
    if (left >= COUNT) return;
#pragma unroll
    for (int i = 0; i < COUNT; i++) f[i] = i < left ? f[i] : fill;
  }

  // Maximum and sum of the row. Before one array is written again, every thread has passed the barrier of the other.
  __device__ __forceinline__ float highest(float x, Shared &shared) const {
    x = warp_max(x);
    if constexpr (THREADS == 32) return x;
    if (thread % 32 == 0) shared.highest[thread / 32] = x;
    __syncthreads();
    return warp_max(shared.highest[thread % 32 % (THREADS / 32)]);
  }

  __device__ __forceinline__ float total(float x, Shared &shared) const {
    x = warp_sum(x);
    if constexpr (THREADS == 32) return x;
    if (thread % 32 == 0) shared.total[thread / 32] = x;
    __syncthreads();
    return warp_sum(thread % 32 < THREADS / 32 ? shared.total[thread % 32] : 0.f);
  }
};

// How many columns a causal row sees, if over 0: those up to its own position, the last row's being the last column.
__device__ __forceinline__ int visible(u32 row, int N, u32 S) { return int(row % S) + 1 + (N - int(S)); }

// ---- softmax(scale * x + mask) ---------------------------------------------------------------------------------------------

// x, y: [rows, N] and the mask 16-byte accesses of x apart; rows count (i0, i1, i2) of bases m1 and m2, of which the mask's
// lie s0, s1, s2 apart. With SHARE over 1, s1 is 0 and SHARE divides m1. Of a causal mask S is the rows of a matrix.
template <typename T, typename M, bool CAUSAL, int THREADS, int EACH, int SHARE>
__global__ void __launch_bounds__(BLOCK<THREADS>, BLOCKS<THREADS>)
    masked_softmax(const T *x, const M *mask, T *y, u32 rows, u32 N_, u32 S, u32 m1, u32 m2, i64 x_row, i64 y_row, i64 s0,
                   i64 s1, i64 s2, float scale) {
  using Row = RowOfThreads<T, THREADS, EACH>;
  using Shared = typename Row::Shared;
  constexpr int COUNT = Row::COUNT, VECTORS = Row::VECTORS;
  constexpr bool MASKED = MASKS<M>, ACCURATE = sizeof(T) == 4;
  __shared__ Shared shared[1];
  const Row r;
  const int N = int(N_);
  if (GROUPS<THREADS> > 1 && r.unit >= rows / SHARE) return;

  const u32 i2 = r.unit % m2, i1 = r.unit / m2 % (m1 / SHARE) * SHARE, i0 = r.unit / m2 / (m1 / SHARE);
  u32 row = (i0 * m1 + i1) * m2 + i2;
  const int sees = CAUSAL ? visible(row, N, S) : N;
  Words<T, COUNT> w[VECTORS];
  r.load(x + i64(row) * x_row, sees, w);
  Words<M, COUNT> adds[VECTORS];
  if constexpr (MASKED) {
    mask += i0 * s0 + i1 * s1 + i2 * s2;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      if (r.at(v) < N) adds[v] = load_mask<M, COUNT>(mask + r.at(v));
  }

#pragma unroll 1
  for (int k = 0; k < SHARE; k++, row += m2) {
    float f[VECTORS][COUNT], top = -infinity();
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (r.warp_at(v) >= sees) continue;
      unpack(w[v], f[v]);
      float more[COUNT];
      if constexpr (MASKED) unpack(adds[v], more);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        f[v][i] = __fmul_rn(f[v][i], scale);  // no fma: a score that overflows is infinite, as in PyTorch
        if constexpr (MASKED) f[v][i] += more[i];
      }
      r.cut(f[v], v, sees, -infinity());
#pragma unroll
      for (int i = 0; i < COUNT; i++) top = fmaxf(top, f[v][i]);  // NaN comes into the sum
    }
    if (k + 1 < SHARE) r.load(x + i64(row + m2) * x_row, sees, w);
    top = r.highest(top, shared[0]);
    float sum = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (r.warp_at(v) >= sees) continue;
#pragma unroll
      for (int i = 0; i < COUNT; i++) sum += f[v][i] = exponential<ACCURATE>(f[v][i] - top);
    }
    // A row that sees nothing is NaN, as in PyTorch: -inf - -inf, or 0 / 0.
    const float factor = 1.f / r.total(sum, shared[0]);
    float none[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) none[i] = factor * 0.f;
    T *out = y + i64(row) * y_row;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (r.at(v) >= N) continue;
      if (r.warp_at(v) >= sees) {
        store<T, COUNT>(out + r.at(v), pack<T, COUNT>(none));
        continue;
      }
#pragma unroll
      for (int i = 0; i < COUNT; i++) f[v][i] *= factor;
      store<T, COUNT>(out + r.at(v), pack<T, COUNT>(f[v]));
    }
  }
}

// ---- the gradient of a causal softmax -------------------------------------------------------------------------------------

// dx = scale * y * (dy - sum(y * dy)); what a row does not see is neither read nor given a gradient.
template <typename T, int THREADS, int EACH>
__global__ void __launch_bounds__(BLOCK<THREADS>, BLOCKS<THREADS>)
    causal_softmax_backward(const T *y, const T *dy, T *dx, u32 rows, u32 N_, u32 S, i64 y_row, i64 dy_row, i64 dx_row,
                            float scale) {
  using Row = RowOfThreads<T, THREADS, EACH>;
  using Shared = typename Row::Shared;
  constexpr int COUNT = Row::COUNT, VECTORS = Row::VECTORS;
  __shared__ Shared shared[1];
  const Row r;
  const int N = int(N_);
  if (GROUPS<THREADS> > 1 && r.unit >= rows) return;

  const int sees = visible(r.unit, N, S);
  Words<T, COUNT> a[VECTORS], b[VECTORS];
  r.load(y + i64(r.unit) * y_row, sees, a);
  r.load(dy + i64(r.unit) * dy_row, sees, b);
  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (r.warp_at(v) >= sees) continue;
    float f[COUNT], g[COUNT];
    unpack(a[v], f);
    unpack(b[v], g);
#pragma unroll
    for (int i = 0; i < COUNT; i++) f[i] *= g[i];
    r.cut(f, v, sees, 0.f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += f[i];
  }
  sum = r.total(sum, shared[0]);
  T *out = dx + i64(r.unit) * dx_row;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (r.at(v) >= N) continue;
    float f[COUNT] = {}, g[COUNT];
    if (r.warp_at(v) < sees) {
      unpack(a[v], f);
      unpack(b[v], g);
#pragma unroll
      for (int i = 0; i < COUNT; i++) f[i] = scale * f[i] * (g[i] - sum);
      r.cut(f, v, sees, 0.f);
    }
    store<T, COUNT>(out + r.at(v), pack<T, COUNT>(f));
  }
}
