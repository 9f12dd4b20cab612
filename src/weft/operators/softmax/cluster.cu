// Softmax and log-softmax (LOGS) of long rows: a cluster of blocks shares a row (rows.cuh), which is read once and written
// once.
//
// A slice is held in registers in its own dtype, so 16-bit rows take half the registers; exponentials are taken twice, once
// for the sum against each warp's maximum and once for the result against the row's. Blocks exchange one (maximum, sum)
// pair (online softmax, Milakov & Gimelshein 2018).
#include "exponential.cuh"
#include "rows.cuh"

typedef float2 Pair;  // x: maximum; y: sum of exp(value - maximum)

// The pair of all 32 lanes together; where all maxima are -inf, nothing is added.
template <bool ACCURATE> __device__ __forceinline__ Pair warp_total(Pair p) {
  const float top = warp_max(p.x);
  return {top, warp_sum(p.x == top ? p.y : p.y * exponential<ACCURATE>(p.x - top))};
}

// x, y: [M, N], rows 16-byte aligned, N a multiple of 16 bytes; grid M * blocks of a cluster.
template <typename T, int THREADS, int EACH, bool LOGS>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    softmax_cluster(const T *x, T *y, i64 N, i64 x_row, i64 y_row) {
  using Slice = RowSlice<T, Pair, THREADS, EACH>;
  constexpr bool ACCURATE = sizeof(T) == 4;
  const float INF = __int_as_float(0x7f800000);
  __shared__ typename Slice::Shared shared;

  const Slice slice(N, shared);
  Words<T, Slice::COUNT> w[Slice::VECTORS];
  slice.load(x, x_row, w, minus_infinity_word(T{}));

  // ---- the warp's maximum, and its sum ----
  u32 word = w[0].word[0];
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++)
#pragma unroll
    for (int i = 0; i < 4; i++) word = word_max(T{}, word, w[v].word[i]);
  float ends[Slice::COUNT];
  unpack(Words<T, Slice::COUNT>{word, word, word, word}, ends);
  const float top = warp_max(fmaxf(ends[0], ends[1]));
  const float base = top == -INF ? 0.f : top;  // only -inf here: exponentials are 0, not NaN
  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    float f[Slice::COUNT];
    unpack(w[v], f);
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++) sum += exponential<ACCURATE>(f[i] - base);
  }

  // ---- the row's; then the result. A row of only -inf is NaN, as in PyTorch: -inf - -inf ----
  const Pair all = slice.exchange(
      {top, warp_sum(sum)}, {-INF, 0.f}, [](Pair p) { return warp_total<ACCURATE>(p); }, shared);
  const float scale = 1.f / all.y, log_sum = LOGS ? logf(all.y) : 0.f;
  y += slice.row * y_row + slice.first;
  // A zero that the compiler cannot know: it would keep the unpacked values of the sum for the result, and spill them.
  const u32 zero = LOGS ? slice.blocks / 32 : 0;
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    float f[Slice::COUNT];
#pragma unroll
    for (int i = 0; i < 4; i++) w[v].word[i] ^= zero;
    unpack(w[v], f);
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++)
      f[i] = LOGS ? (f[i] - all.x) - log_sum : exponential<ACCURATE>(f[i] - all.x) * scale;
    if (slice.at(v) < slice.elements) store<T, Slice::COUNT>(y + slice.at(v), pack<T, Slice::COUNT>(f));
  }
}
