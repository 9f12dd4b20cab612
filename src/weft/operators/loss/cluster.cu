// Cross entropy over long rows. The formulas stand at the head of kernels.py. Three kernels:
//   cross_entropy_cluster    loss and gradient: a cluster of blocks shares a row (rows.cuh), which is read once
//   cross_entropy_loss       the loss alone: rows are walked, nothing of them is kept
//   cross_entropy_gradient   the gradient alone, from each row's maximum and sum: element by element
//
// In the first a slice stays in registers in its own dtype; exponentials are taken twice, once for the sum against each warp's maximum
// and once for the gradient. The thread that holds the label's column reads that logit by itself, computes the loss, and
// writes that one element of the gradient again after all others, so no column is compared with the label.
#include "rows.cuh"

typedef float4 Sums;  // x: maximum; y: sum of exp(value - maximum); z: sum of values (label smoothing); w: nothing

__device__ __forceinline__ float base_two(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}

// exp(x): as exact as PyTorch's for fp32; for 16-bit results one multiplication and the hardware's ex2.
template <bool ACCURATE> __device__ __forceinline__ float exponential(float x) {
  if constexpr (ACCURATE) return expf(x);
  return base_two(x * 1.4426950408889634f);
}

// cap * tanh(x / cap). For 16-bit logits 1 - 2 / (exp(2u) + 1): its error is absolute, 1e-7 of the cap.
template <bool CAP, bool ACCURATE> __device__ __forceinline__ float capped(float x, float cap) {
  if constexpr (!CAP) return x;
  if constexpr (ACCURATE) return cap * tanhf(x / cap);
  return cap - __fdividef(2.f * cap, base_two(x * (2.885390081777927f / cap)) + 1.f);
}

template <bool ACCURATE, bool SMOOTH> __device__ __forceinline__ Sums warp_total(Sums s) {
  const float top = warp_max(s.x);
  const float sum = warp_sum(s.x == top ? s.y : s.y * exponential<ACCURATE>(s.x - top));
  return {top, sum, SMOOTH ? warp_sum(s.z) : 0.f, 0.f};
}

// One element as it lies in memory: to wait for it only where it becomes a float.
template <typename T> __device__ __forceinline__ u32 read_bits(const T *p) {
  if constexpr (sizeof(T) == 4) return *reinterpret_cast<const volatile u32 *>(p);
  else return *reinterpret_cast<const volatile unsigned short *>(p);
}

template <typename T> __device__ __forceinline__ float from_bits(u32 bits) {
  float f[4 / sizeof(T)];
  unpack(Words<T, 4 / sizeof(T)>{bits}, f);
  return f[0];
}

template <typename T> __device__ __forceinline__ float read_one(const T *p) { return from_bits<T>(read_bits(p)); }

template <typename T> __device__ __forceinline__ void write_one(T *p, float value) {
  if constexpr (sizeof(T) == 4) *reinterpret_cast<volatile float *>(p) = value;
  else *reinterpret_cast<volatile unsigned short *>(p) = (unsigned short)pack_pair(T{}, value, 0.f);
}

// x, dx: [M, V], rows 16-byte aligned, V a multiple of 16 bytes (dx may be x); target [M]; weight [V]; sums [3] (label_sums.py);
// loss [M]; stats [2, M]: each row's maximum and sum of exponentials; grid M * blocks of a cluster. With SHARED half of a
// slice is in (dynamic) shared memory, so that a multiprocessor holds twice as much of the rows; a thread reads there only
// what it fetched itself, so no barrier is needed.
template <typename T, typename L, typename W, int THREADS, int EACH, bool SHARED, bool WEIGHT, bool MEAN, bool SMOOTH, bool CAP>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    cross_entropy_cluster(const T *x, const L *target, const W *weight, const float *sums, float *loss, float *stats, T *dx,
                          i64 V, i64 x_row, i64 dx_row, i64 target_stride, i64 weight_stride, i64 ignore, float smoothing,
                          float z, float cap) {
  using Slice = RowSlice<T, Sums, THREADS, EACH>;
  constexpr bool ACCURATE = sizeof(T) == 4;
  constexpr int COUNT = Slice::COUNT, VECTORS = Slice::VECTORS, HELD = SHARED ? VECTORS / 2 : VECTORS;
  const float INF = __int_as_float(0x7f800000), NOT_A_NUMBER = __int_as_float(0x7fc00000);
  __shared__ typename Slice::Shared shared;
  extern __shared__ __align__(16) unsigned char dynamic[];

  const i64 label = target[i64(blockIdx.x / cluster_blocks()) * target_stride];  // all waits for it: the first thing asked for
  Slice slice(V, shared);
  const bool counts = label != ignore, known = label >= 0 && label < V;
  const float by_weight = MEAN ? 1.f / sums[0] : 1.f, by_number = MEAN ? 1.f / sums[1] : 1.f;
  dx += slice.row * dx_row + slice.first;

  if (!counts) {  // nothing of the row is read, not even by the other blocks of its cluster
    if (slice.blocks > 1) cluster_wait();
    if (slice.rank == 0 && threadIdx.x == 0) loss[slice.row] = 0.f * by_weight;  // NaN for the mean over no label
    Words<T, COUNT> zeros = {};
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      if (slice.at(v) < slice.elements) store<T, COUNT>(dx + slice.at(v), zeros);
    return;
  }

  // ---- all of the slice is asked for: what is not `there`, past the row's end, is -inf ----
  T *const kept = reinterpret_cast<T *>(dynamic) + threadIdx.x * COUNT;  // a vector every THREADS * COUNT elements
  const auto there = [&](int v) { return slice.at(v) < slice.elements; };
  const T *const from = x + slice.row * x_row + slice.first;
  Words<T, COUNT> w[HELD], nothing;
#pragma unroll
  for (int i = 0; i < 4; i++) nothing.word[i] = minus_infinity_word(T{});
#pragma unroll
  for (int v = HELD; v < VECTORS; v++) {
    T *const to = kept + (v - HELD) * THREADS * COUNT;
    if (there(v)) copy_stream(to, from + slice.at(v));
    else *reinterpret_cast<uint4 *>(to) = {nothing.word[0], nothing.word[1], nothing.word[2], nothing.word[3]};
  }
#pragma unroll
  for (int v = 0; v < HELD; v++) {
    w[v] = nothing;
    if (there(v)) w[v] = load_stream<T, COUNT>(from + slice.at(v));
  }
  const auto in_shared = [&](int v) { return load_shared<T, COUNT>(kept + (v - HELD) * THREADS * COUNT); };

  // ---- who answers for the label: the thread that holds its column; without one, the first ----
  const i64 local = label - slice.first;  // < 2**31 wherever it is used
  const bool holds = known && local >= 0 && local < slice.elements && int(local) / COUNT % THREADS == threadIdx.x;
  const bool answers = known ? holds : slice.rank == 0 && threadIdx.x == 0;
  float of_label = 0.f;  // its logit, read before anything is written over it
  if (holds) of_label = capped<CAP, ACCURATE>(read_one(x + slice.row * x_row + label), cap);
  float of_weight = known ? 1.f : NOT_A_NUMBER;
  if constexpr (WEIGHT)
    if (known) of_weight = read_one(weight + label * weight_stride);

  // ---- the warp's maximum, and its sums ----
  u32 word = w[0].word[0];
  const auto look_at = [&](const Words<T, COUNT> &words) {
#pragma unroll
    for (int i = 0; i < 4; i++) word = word_max(T{}, word, words.word[i]);
  };
#pragma unroll
  for (int v = 0; v < HELD; v++) look_at(w[v]);
  if constexpr (SHARED) copies_wait();
#pragma unroll 2
  for (int v = HELD; v < VECTORS; v++) look_at(in_shared(v));
  float ends[COUNT];
  unpack(Words<T, COUNT>{word, word, word, word}, ends);
  float top = warp_max(fmaxf(ends[0], ends[1]));
  if (CAP && slice.at(0) - int(threadIdx.x % 32) * COUNT < slice.elements)  // a warp past the row's end keeps -inf
    top = capped<CAP, ACCURATE>(top, cap);
  const float base = top == -INF ? 0.f : top;  // only -inf here: exponentials are 0, not NaN
  float sum = 0.f, values = 0.f;
  const auto add_up = [&](const Words<T, COUNT> &words, int v) {
    float f[COUNT];
    unpack(words, f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float value = capped<CAP, ACCURATE>(f[i], cap);
      const float e = exponential<ACCURATE>(value - base);
      sum += CAP && !there(v) ? 0.f : e;
      if constexpr (SMOOTH) values += there(v) ? value : 0.f;
    }
  };
#pragma unroll
  for (int v = 0; v < HELD; v++) add_up(w[v], v);
#pragma unroll 2
  for (int v = HELD; v < VECTORS; v++) add_up(in_shared(v), v);

  // ---- the row's ----
  const Sums all = slice.exchange({top, warp_sum(sum), SMOOTH ? warp_sum(values) : 0.f, 0.f}, {-INF, 0.f, 0.f, 0.f},
                                  [](Sums s) { return warp_total<ACCURATE, SMOOTH>(s); }, shared);
  const float row_lse = all.x + logf(all.y);
  const float at_label = by_weight * of_weight * (1.f - smoothing);
  const float spread = SMOOTH ? by_weight * smoothing / V + 0.f * of_weight : 0.f;  // NaN for a label out of range
  if (answers) {
    float value = at_label * (row_lse - of_label);
    if constexpr (SMOOTH) value += spread * (V * row_lse - all.z);
    loss[slice.row] = value + by_number * z * row_lse * row_lse;
    stats[slice.row] = all.x;
    stats[gridDim.x / slice.blocks + slice.row] = all.y;
  }

  if constexpr (CAP)  // so that the compiler takes tanh again instead of keeping all its results: they would spill
#pragma unroll
    for (int v = 0; v < HELD; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) asm volatile("" : "+r"(w[v].word[i]));

  // ---- the gradient. A row of only -inf is NaN, as in PyTorch: -inf - -inf ----
  const float scale = (at_label + spread * V + by_number * 2.f * z * row_lse) / all.y;
  const auto write = [&](const Words<T, COUNT> &words, int v) {
    float f[COUNT];
    unpack(words, f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float value = capped<CAP, ACCURATE>(f[i], cap), slope = CAP ? value / cap : 0.f;
      f[i] = exponential<ACCURATE>(value - all.x) * scale - spread;
      if constexpr (CAP) f[i] *= 1.f - slope * slope;
    }
    if (there(v)) store<T, COUNT>(dx + slice.at(v), pack<T, COUNT>(f));
  };
#pragma unroll
  for (int v = 0; v < HELD; v++) write(w[v], v);
#pragma unroll 2
  for (int v = HELD; v < VECTORS; v++) write(in_shared(v), v);
  if (holds) {
    const float slope = CAP ? of_label / cap : 0.f;
    const float g = exponential<ACCURATE>(of_label - all.x) * scale - spread - at_label;
    write_one(dx + local, g * (1.f - slope * slope));
  }
}

// ---- the loss alone ---------------------------------------------------------------------------------------------------

// Some vectors of a thread into its maximum, its sum of exponentials against that, and its sum of values (online softmax,
// Milakov & Gimelshein 2018). Of those that are not `there` the words are -inf.
template <bool CAP, bool SMOOTH, bool WHOLE, typename T, int COUNT, int VECTORS>
__device__ __forceinline__ void add(Sums &s, const Words<T, COUNT> (&w)[VECTORS], int there, float cap) {
  constexpr bool ACCURATE = sizeof(T) == 4;
  const float INF = __int_as_float(0x7f800000);
  u32 word = w[0].word[0];
#pragma unroll
  for (int v = 0; v < VECTORS; v++)
#pragma unroll
    for (int i = 0; i < 4; i++) word = word_max(T{}, word, w[v].word[i]);
  float ends[COUNT];
  unpack(Words<T, COUNT>{word, word, word, word}, ends);
  float top = fmaxf(ends[0], ends[1]);
  if (CAP && (WHOLE || there > 0)) top = capped<CAP, ACCURATE>(top, cap);
  top = fmaxf(s.x, top);
  const float base = top == -INF ? 0.f : top;  // only -inf so far: exponentials are 0, not NaN
  s.y *= exponential<ACCURATE>(s.x - base);
  s.x = top;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    float f[COUNT], sum = 0.f, values = 0.f;
    unpack(w[v], f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float value = capped<CAP, ACCURATE>(f[i], cap);
      sum += exponential<ACCURATE>(value - base);
      if constexpr (SMOOTH) values += value;
    }
    if ((CAP || SMOOTH) && !WHOLE && v >= there) continue;
    s.y += sum;
    if constexpr (SMOOTH) s.z += values;
  }
}

// As cross_entropy_cluster without a gradient; dx is not looked at. A block walks `each` elements of a row (a multiple of 16
// bytes), 8 vectors a thread at a time; with more blocks than one these are a cluster. Blocks are small and many, so that
// while one waits for its label, its last lines or its warps, others keep the memory busy.
template <typename T, typename L, typename W, int THREADS, bool WEIGHT, bool MEAN, bool SMOOTH, bool CAP>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    cross_entropy_loss(const T *x, const L *target, const W *weight, const float *sums, float *loss, float *stats, T *,
                       i64 V, i64 x_row, i64, i64 target_stride, i64 weight_stride, i64 ignore, float smoothing, float z,
                       float cap, i64 each) {
  constexpr int COUNT = 16 / sizeof(T), VECTORS = 8, STEP = THREADS * COUNT, ROUND = VECTORS * STEP;
  using Slice = RowSlice<T, Sums, THREADS, VECTORS * COUNT>;
  constexpr bool ACCURATE = sizeof(T) == 4;
  const float INF = __int_as_float(0x7f800000), NOT_A_NUMBER = __int_as_float(0x7fc00000);
  __shared__ typename Slice::Shared shared;

  Slice slice(V, shared);
  const i64 first = slice.rank * each;
  const i64 label = target[slice.row * target_stride];
  const bool known = label >= 0 && label < V, answers = slice.rank == 0 && threadIdx.x == 0;
  const float weights = MEAN ? sums[0] : 1.f, number = MEAN ? sums[1] : 1.f;
  if (label == ignore) {  // nothing of the row is read, not even by the other blocks of its cluster
    if (slice.blocks > 1) cluster_wait();
    if (answers) loss[slice.row] = 0.f * (1.f / weights);  // NaN for the mean over no label
    return;
  }
  x += slice.row * x_row;
  const i64 at_label = known ? label : 0;  // read by all, without a branch: nobody waits for it before the end
  const u32 of_label = read_bits(x + at_label), of_class = WEIGHT ? read_bits(weight + at_label * weight_stride) : 0;

  // ---- the thread's sums ----
  Sums own = {-INF, 0.f, 0.f, 0.f};
  Words<T, COUNT> w[VECTORS];
  int left = int(max(i64(0), min(V - first, each)));
  x += first + threadIdx.x * COUNT;
#pragma unroll 1
  for (; left >= ROUND; left -= ROUND, x += ROUND) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) w[v] = load<T, COUNT>(x + v * STEP);
    add<CAP, SMOOTH, true>(own, w, VECTORS, cap);
  }
  if (left > 0) {
    const int there = max(0, (left - int(threadIdx.x) * COUNT + STEP - 1) / STEP);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
#pragma unroll
      for (int i = 0; i < 4; i++) w[v].word[i] = minus_infinity_word(T{});
      if (v < there) w[v] = load<T, COUNT>(x + v * STEP);
    }
    add<CAP, SMOOTH, false>(own, w, there, cap);
  }

  // ---- the row's ----
  const Sums all = slice.exchange(warp_total<ACCURATE, SMOOTH>(own), {-INF, 0.f, 0.f, 0.f},
                                  [](Sums s) { return warp_total<ACCURATE, SMOOTH>(s); }, shared);
  if (!answers) return;
  const float row_lse = all.x + logf(all.y);
  const float of_weight = !known ? NOT_A_NUMBER : WEIGHT ? from_bits<W>(of_class) : 1.f;
  const float by_weight = 1.f / weights, by_number = 1.f / number;
  float value = by_weight * of_weight * (1.f - smoothing) * (row_lse - capped<CAP, ACCURATE>(from_bits<T>(of_label), cap));
  if constexpr (SMOOTH) value += by_weight * smoothing / V * (V * row_lse - all.z);
  loss[slice.row] = value + by_number * z * row_lse * row_lse;
  stats[slice.row] = all.x;
  stats[gridDim.x / slice.blocks + slice.row] = all.y;
}

// ---- the gradient alone -----------------------------------------------------------------------------------------------

// dx (may be x) from x, stats as the other kernels leave them, and the gradient of each row's loss (dloss; stride 0 where it
// is one number). Grid M * parts of a row, THREADS * EACH elements each.
template <typename T, typename L, typename W, typename D, int THREADS, int EACH, bool WEIGHT, bool MEAN, bool SMOOTH, bool CAP>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    cross_entropy_gradient(const T *x, const L *target, const W *weight, const float *sums, const float *stats,
                           const D *dloss, T *dx, i64 V, i64 x_row, i64 dx_row, i64 target_stride, i64 weight_stride,
                           i64 dloss_stride, i64 ignore, float smoothing, float z, float cap, u32 parts) {
  constexpr int COUNT = 16 / sizeof(T), VECTORS = EACH / COUNT, STEP = THREADS * COUNT;
  constexpr bool ACCURATE = sizeof(T) == 4;
  const float NOT_A_NUMBER = __int_as_float(0x7fc00000);
  const i64 row = blockIdx.x / parts, first = i64(blockIdx.x % parts) * THREADS * EACH + threadIdx.x * COUNT;
  // of this thread's vectors, STEP elements apart, those that exist
  const int there = int(max(i64(0), min(V - first + STEP - 1, i64(VECTORS * STEP)) / STEP));
  const i64 label = target[row * target_stride];
  const bool known = label >= 0 && label < V;
  const float weights = MEAN ? sums[0] : 1.f, number = MEAN ? sums[1] : 1.f;
  const float top = stats[row], total = stats[gridDim.x / parts + row];
  const u32 of_loss = read_bits(dloss + row * dloss_stride);
  dx += row * dx_row + first;

  if (label == ignore) {  // nothing of the row is read
    const Words<T, COUNT> zeros = {};
#pragma unroll 1
    for (int v = 0; v < there; v++) store<T, COUNT>(dx + v * STEP, zeros);
    return;
  }
  x += row * x_row + first;
  Words<T, COUNT> w[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    w[v] = {};
    if (v < there) w[v] = load_stream<T, COUNT>(x + v * STEP);
  }

  float of_weight = known ? 1.f : NOT_A_NUMBER;
  if constexpr (WEIGHT)
    if (known) of_weight = read_one(weight + label * weight_stride);
  const float by_weight = 1.f / weights, by_number = 1.f / number, factor = from_bits<D>(of_loss);
  const float at_label = by_weight * of_weight * (1.f - smoothing) * factor;
  const float spread = SMOOTH ? by_weight * smoothing / V * factor + 0.f * of_weight : 0.f;  // NaN for a label out of range
  const float scale = (at_label + spread * V + by_number * 2.f * z * (top + logf(total)) * factor) / total;
  const float by_cap = 1.f / cap;
  const i64 local = label - first;
  const int here = local >= 0 && local < VECTORS * STEP ? int(local) : -1;  // the label's place among them
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    float f[COUNT], slope[COUNT];
    unpack(w[v], f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float value = capped<CAP, ACCURATE>(f[i], cap);
      slope[i] = !CAP ? 0.f : ACCURATE ? value / cap : value * by_cap;
      f[i] = exponential<ACCURATE>(value - top) * scale - spread;
    }
    if (u32(here - v * STEP) < u32(COUNT)) {  // one vector of the row
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        if (here - v * STEP == i) f[i] -= at_label;
    }
    if constexpr (CAP)
#pragma unroll
      for (int i = 0; i < COUNT; i++) f[i] *= 1.f - slope[i] * slope[i];
    if (v < there) store<T, COUNT>(dx + v * STEP, pack<T, COUNT>(f));
  }
}
