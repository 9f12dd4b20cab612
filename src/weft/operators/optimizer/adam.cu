// One step of Adam or AdamW for a list of tensors, in one launch of as many blocks as are there at once.
//
// Memory is what bounds such a step, so it must never run out of reads: a thread takes 16 bytes of each of weight, gradient and
// moments at a time, which are copied to shared memory, past the registers. When it begins to compute them, the next two are on
// their way: 128 KiB for the 1024 threads of a multiprocessor. No thread reads what another has copied, so none waits for another.
// A block of threads takes chunks side by side, so it waits for a tensor's row and count of steps once for thousands of elements,
// and while its first copies are on their way.
#include "table.cuh"

// What a tensor's elements share. Where gradients are scaled, the moments take up sqrt(1 - beta2) times the gradient, so that the
// factor takes another's place and an element as many instructions.
struct Step {
  float l2;            // d = g + l2 p is the gradient; scaled: d = fresh2 g + l2 p
  float keep1, fresh1; // m = keep1 m + fresh1 d; the gradient's sign is in fresh1; scaled: in fresh2
  float keep2, fresh2; // v = keep2 v + fresh2 d d; scaled: v = keep2 v + d d
  float slope, least;  // m / (slope sqrt(v) + least) is subtracted from the weight
  float decay;         // and decay times itself
};

template <bool SCALED> __device__ __forceinline__ Step step_of(const float *n, float lr, double step, const Factors &factors) {
  const Descent d = descent_of(n, lr, step, 1);
  Step s;
  s.l2 = n[SIGN] * n[L2];
  s.keep1 = float(1 - double(n[FRESH1]));
  s.fresh1 = n[SIGN] * n[FRESH1];
  s.keep2 = n[BETA2];
  s.fresh2 = n[FRESH2];
  s.slope = d.slope;
  s.least = d.least;
  s.decay = d.decay;
  if constexpr (SCALED) {
    const double root = sqrt(double(n[FRESH2]));
    s.l2 = float(root * n[L2]);
    s.fresh1 = float(n[FRESH1] / root);
    s.fresh2 = float(root * n[SIGN] * factor_of(factors));
  }
  return s;
}

template <typename T> struct Tensors {  // from a thread's first element on
  T *param;
  const T *gradient;
  T *first, *second;

  // The compiler is to add an offset to them, not to what they have been made of.
  __device__ __forceinline__ void opaque() { asm volatile("" : "+l"(param), "+l"(gradient), "+l"(first), "+l"(second)); }
};

struct Loaded { Raw<16> weight, gradient, first, second; };  // what a thread takes at a time

template <int THREADS, typename T>
__device__ __forceinline__ void copy_all(Raw<16> *to, const Tensors<T> &at, u32 offset, bool there) {
  if (there) {
    copy_stream(to, at.gradient + offset);
    copy_stream(to + THREADS, at.first + offset);
    copy_stream(to + 2 * THREADS, at.second + offset);
    copy_stream(to + 3 * THREADS, at.param + offset);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ Raw<16> copied(const Raw<16> *p) {
  const Words<u32, 4> w = load_shared<u32, 4>(p->word);
  return {w.word[0], w.word[1], w.word[2], w.word[3]};
}

// Of the oldest of STAGES copies, once it is there.
template <int THREADS, int STAGES> __device__ __forceinline__ Loaded copied_all(const Raw<16> *from) {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
  return {copied(from + 3 * THREADS), copied(from), copied(from + THREADS), copied(from + 2 * THREADS)};
}

// The same element by element. `left`: those that are there.
template <typename T> __device__ __forceinline__ Loaded read_all(const Tensors<T> &at, u32 offset, int left) {
  constexpr int VEC = 16 / sizeof(T);
  return {read<T, VEC, false>(at.param + offset, left), read<T, VEC, false>(at.gradient + offset, left),
          read<T, VEC, false>(at.first + offset, left), read<T, VEC, false>(at.second + offset, left)};
}

template <typename T, bool WHOLE, bool SCALED>
__device__ __forceinline__ void update(const Loaded &in, const Tensors<T> &at, u32 offset, int left, const Step &s) {
  constexpr int VEC = 16 / sizeof(T);
  constexpr bool FINE = sizeof(T) == 4;  // a weight of 16 bits hides what is off
  float p[VEC], g[VEC], m[VEC], v[VEC];
  floats_of<T, VEC>(in.weight, p), floats_of<T, VEC>(in.gradient, g);
  floats_of<T, VEC>(in.first, m), floats_of<T, VEC>(in.second, v);
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    const float d = fmaf(s.l2, p[i], SCALED ? s.fresh2 * g[i] : g[i]);
    m[i] = fmaf(s.fresh1, d, s.keep1 * m[i]);
    v[i] = fmaf(SCALED ? d : s.fresh2 * d, d, s.keep2 * v[i]);
    const float size = fmaf(FINE ? fine_root(v[i]) : fast_root(v[i]), s.slope, s.least);
    p[i] = fmaf(-m[i], FINE ? fine_inverse(size) : fast_inverse(size), fmaf(-s.decay, p[i], p[i]));
  }
  write<T, VEC, WHOLE>(at.first + offset, left, m);
  write<T, VEC, WHOLE>(at.second + offset, left, v);
  write<T, VEC, WHOLE>(at.param + offset, left, p);
}

template <typename T, int THREADS, int STAGES, bool SCALED>
__device__ __forceinline__ void update_all(const i64 *gradients, const i64 *table, const i64 *chunks, const float *numbers,
                                           u32 *arrivals, i64 count, i64 elements, const Factors &factors) {
  constexpr int VEC = 16 / sizeof(T), PASS = THREADS * VEC, STAGE = 4 * THREADS;
  extern __shared__ __align__(16) unsigned char memory[];
  Raw<16> *const mine = reinterpret_cast<Raw<16> *>(memory) + threadIdx.x, *const last = mine + (STAGES - 1) * STAGE;
  Step *const steps = reinterpret_cast<Step *>(memory + STAGES * STAGE * 16);  // of two tensors
  const u32 end = u32(count * (blockIdx.x + 1) / gridDim.x);
  u32 slot = 0;  // so that one barrier a tensor is enough
  for (u32 c = u32(count * blockIdx.x / gridDim.x); c < end; slot ^= 1) {
    const i64 entry = chunks[c], row = entry & 0xffffffff, chunk = entry >> 32;
    const i64 *const words = table + row * ROW;
    const i64 run = min(min(i64(end - c), words[CHUNKS] - chunk), (1ll << 30) / elements);  // chunks of this tensor
    c += u32(run);
    const i64 gradient = gradients[row], at = chunk * elements + threadIdx.x * VEC;
    Tensors<T> here = {reinterpret_cast<T *>(words[PARAM]) + at, reinterpret_cast<const T *>(gradient) + at,
                       reinterpret_cast<T *>(words[FIRST]) + at, reinterpret_cast<T *>(words[SECOND]) + at};
    here.opaque();
    const int left = int(min(words[SIZE], (chunk + run) * elements) - at);  // elements from this thread's first one on
    const bool aligned = ((words[PARAM] | gradient | words[FIRST] | words[SECOND]) & 15) == 0;
    const u32 whole = left < VEC || !aligned ? 0 : ((left - VEC) / PASS + 1) * PASS;
#pragma unroll
    for (u32 i = 0; i < STAGES - 1; i++) copy_all<THREADS>(mine + i * STAGE, here, i * PASS, i * PASS < whole);

    if (threadIdx.x == 0) {
      float before;
      publish_steps(&before, words, arrivals, row, run);
      const float *const n = numbers + words[GROUP] * NUMBERS;
      steps[slot] = step_of<SCALED>(n, rate_of(words, n), before + 1, factors);
    }
    __syncthreads();
    const Step s = steps[slot];

    Raw<16> *from = mine, *to = last;
    u32 offset = 0;
    for (; offset != whole; offset += PASS) {
      const u32 ahead = offset + (STAGES - 1) * PASS;
      copy_all<THREADS>(to, here, ahead, ahead < whole);
      update<T, true, SCALED>(copied_all<THREADS, STAGES>(from), here, offset, 0, s);
      to = from, from = from == last ? mine : from + STAGE;
    }
    for (; int(offset) < left; offset += PASS)
      update<T, false, SCALED>(read_all(here, offset, left - int(offset)), here, offset, left - int(offset), s);
  }
}

// Arguments: as those of kernels.update, and
//   STAGES: passes that a thread has room for: the one that it computes, and what is on its way.
//   count: chunks in all, of `elements` each, a multiple of 16 bytes. A block takes as many as any other, side by side.
template <typename T, int THREADS, int STAGES>
__global__ __launch_bounds__(THREADS, 1024 / THREADS) void adam(const i64 *gradients, const i64 *table, const i64 *chunks,
                                                                const float *numbers, u32 *arrivals, i64 count, i64 elements) {
  update_all<T, THREADS, STAGES, false>(gradients, table, chunks, numbers, arrivals, count, elements, {});
}

// A step that scales or clips gradients, or may be skipped (struct Factors).
template <typename T, int THREADS, int STAGES>
__global__ __launch_bounds__(THREADS, 1024 / THREADS) void adam_scaled(const i64 *gradients, const i64 *table, const i64 *chunks,
                                                                      const float *numbers, u32 *arrivals, const float *clip,
                                                                      const float *scale, const float *found, float *skipped,
                                                                      i64 count, i64 elements) {
  const Factors factors = {clip, scale, found, skipped};
  if (is_skipped(factors)) return;
  update_all<T, THREADS, STAGES, true>(gradients, table, chunks, numbers, arrivals, count, elements, factors);
}
