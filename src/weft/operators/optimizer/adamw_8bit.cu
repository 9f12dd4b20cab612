// One step of AdamW for a list of tensors whose moments are codes of 8 bits, in one launch of a block a multiprocessor.
//
// A thread takes 8 elements at a time, a warp 256. Instructions are what bounds such a step, so what can be is saved:
// - A code becomes a number by one look-up, and a number a code by one: of the line that counts the map's intervals around it
//   (dynamic_map.py). Either table has a column for each lane, so no two lanes want the same bank, and an index is the second
//   byte of its address, put there by one byte permutation.
// - The first moment is counted in a unit in which it takes up the gradient as the second one's root does (struct Step).
// - The learning rate is divided into the denominator, once a tensor.
// - A block of threads takes chunks side by side, so what a tensor's elements share is computed for thousands of them.
#include "block_codes.cuh"
#include "table.cuh"

constexpr int TILE = 256;  // elements of a warp

// ---- a tensor --------------------------------------------------------------------------------------------------------

// What a tensor's elements share; each number is rounded once, since its error is that of all elements.
struct Step {
  float root;          // of 1 - beta2, with the gradient's sign: h = root g
  float unit;          // m = unit u
  float keep1;         // u = keep1 m + h
  float keep2;         // v = keep2 v + h h
  float slope, least;  // u / (slope sqrt(v) + least) is subtracted from the weight
  float decay;         // and decay times itself

  // The compiler is to round them here, not in the loop over elements.
  __device__ __forceinline__ void opaque() {
    asm volatile("" : "+f"(root), "+f"(unit), "+f"(keep1), "+f"(keep2), "+f"(slope), "+f"(least), "+f"(decay));
  }
};

template <bool SCALED> __device__ __forceinline__ Step step_of(const float *n, float lr, double step, const Factors &factors) {
  const float root = sqrtf(n[FRESH2]);
  const double unit = double(n[FRESH1]) / root;
  const Descent d = descent_of(n, lr, step, unit);
  Step s;
  s.root = n[SIGN] * root;
  if constexpr (SCALED) s.root *= factor_of(factors);
  s.unit = float(unit);
  s.keep1 = float((1 - double(n[FRESH1])) / unit);
  s.keep2 = n[BETA2];
  s.slope = d.slope;
  s.least = d.least;
  s.decay = d.decay;
  return s;
}

template <typename T> struct Tensors {  // from a thread's first element, a warp's first block on
  T *param;
  const T *gradient;
  unsigned char *codes1, *codes2;
  float *scales1, *scales2;

  // The compiler is to add an offset to them, not to what they have been made of.
  __device__ __forceinline__ void opaque() {
    asm volatile("" : "+l"(param), "+l"(gradient), "+l"(codes1), "+l"(codes2), "+l"(scales1), "+l"(scales2));
  }
};

// The largest of a block's magnitudes, as an integer, of which NaN is the largest. Where several warps have a block, they tell
// each other.
template <int WARPS> __device__ __forceinline__ void of_block(u32 &a, u32 &b, u32 (*maxima)[2]) {
  a = __reduce_max_sync(~0u, a), b = __reduce_max_sync(~0u, b);
  if constexpr (WARPS > 1) {
    const u32 warp = threadIdx.x / 32, team = warp / WARPS, lane = threadIdx.x % 32;
    if (lane == 0) maxima[warp][0] = a, maxima[warp][1] = b;
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(WARPS * 32) : "memory");
    a = __reduce_max_sync(~0u, maxima[team * WARPS + lane % WARPS][0]);
    b = __reduce_max_sync(~0u, maxima[team * WARPS + lane % WARPS][1]);
  }
}

// Q elements share a scale: a warp, which takes 256, has two blocks of 128, or a part of one of more than 256.
template <typename T, int Q> struct Shape {
  static constexpr int VEC = Q < TILE ? 4 : 16 / sizeof(T), PARTS = 8 / VEC, BESIDE = 32 * VEC;  // elements from part to part
  static constexpr int BLOCKS = Q < TILE ? 2 : 1, EACH = 8 / BLOCKS;  // of a thread; elements in each
  static constexpr int WARPS = Q < TILE ? 1 : Q / TILE;               // that have a block
};

template <typename T, int Q> struct Loaded {  // what a thread reads for 8 elements
  using S = Shape<T, Q>;
  Raw<S::VEC> first[S::PARTS], second[S::PARTS];
  Raw<S::VEC * sizeof(T)> weight[S::PARTS], gradient[S::PARTS];
  float scale1[S::BLOCKS], scale2[S::BLOCKS];
};

// `left`: elements that are there from the thread's first one on.
template <typename T, Format FORMAT, int Q, bool WHOLE>
__device__ __forceinline__ void load_all(Loaded<T, Q> &to, const Tensors<T> &at, u32 offset, int left) {
  using S = Shape<T, Q>;
  const int warp_left = left + int(threadIdx.x % 32) * S::VEC;
#pragma unroll
  for (int i = 0; i < S::PARTS; i++) {
    const int o = i * S::BESIDE;
    to.first[i] = read_codes<S::VEC, WHOLE>(at.codes1 + offset + o, left - o, FORMAT == DYNAMIC ? 127 : 0);
    to.second[i] = read_codes<S::VEC, WHOLE>(at.codes2 + offset + o, left - o, 0);
    to.gradient[i] = read<T, S::VEC, WHOLE>(at.gradient + offset + o, left - o);
    to.weight[i] = read<T, S::VEC, WHOLE>(at.param + offset + o, left - o);
  }
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
    const bool there = WHOLE || warp_left > b * Q;
    to.scale1[b] = there ? __uint_as_float(read_raw<4>(at.scales1 + offset / Q + b).word[0]) : 0.f;
    to.scale2[b] = there ? __uint_as_float(read_raw<4>(at.scales2 + offset / Q + b).word[0]) : 0.f;
  }
}

// A step of a warp's 256 elements. Of whole ones, those at `next` are read in the meantime, into the same registers; then, if
// all of a team `meet`, they wait for each other: warps that drift apart read and write all over a tensor, and memory is slow.
template <typename T, Format FORMAT, int Q, bool WHOLE, int TEAM>
__device__ __forceinline__ void update(Loaded<T, Q> &in, const Tensors<T> &at, u32 offset, u32 next, int left, bool meet,
                                       const Step &s, u32 (*maxima)[2]) {
  using S = Shape<T, Q>;
  constexpr int VEC = S::VEC, PARTS = S::PARTS, BESIDE = S::BESIDE, WARPS = S::WARPS, BLOCKS = S::BLOCKS, EACH = S::EACH;
  constexpr bool FINE = sizeof(T) == 4;  // a weight of 16 bits hides what is off
  constexpr float INVERSE = FORMAT == E4M3 ? 1.f / LARGEST_E4M3 : 1.f;
  const u32 lane = threadIdx.x % 32;
  const int warp_left = left + int(lane) * VEC;
  T *const param = at.param + offset;
  unsigned char *const codes1 = at.codes1 + offset, *const codes2 = at.codes2 + offset;
  float *const scales1 = at.scales1 + offset / Q, *const scales2 = at.scales2 + offset / Q;

  float p[8], g[8], u[8], v[8], root[8];
#pragma unroll
  for (int i = 0; i < PARTS; i++) floats_of<T, VEC>(in.gradient[i], g + i * VEC), floats_of<T, VEC>(in.weight[i], p + i * VEC);
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) in.scale1[b] *= s.keep1 * INVERSE, in.scale2[b] *= s.keep2;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    decode<FORMAT, true>(lane, in.first[i / VEC].word[i % VEC / 4], u + i);
    decode<FORMAT, false>(lane, in.second[i / VEC].word[i % VEC / 4], v + i);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float h = s.root * g[i];
    if (FORMAT == E4M3) v[i] *= INVERSE, v[i] *= v[i];  // INVERSE ** 2 times a small scale would be subnormal
    u[i] = fmaf(u[i], in.scale1[i / EACH], h);
    v[i] = fmaf(v[i], in.scale2[i / EACH], h * h);
    root[i] = FINE ? fine_root(v[i]) : fast_root(v[i]);
    const float size = fmaf(root[i], s.slope, s.least);
    p[i] = fmaf(-u[i], FINE ? fine_inverse(size) : fast_inverse(size), fmaf(-s.decay, p[i], p[i]));
  }
#pragma unroll
  for (int i = 0; i < PARTS; i++) write<T, VEC, WHOLE>(param + i * BESIDE, left - i * BESIDE, p + i * VEC);
  if (WHOLE) load_all<T, FORMAT, Q, true>(in, at, next, 0);
  if (WHOLE && WARPS == 1 && meet)  // those of a larger block do so below
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / TEAM + 1), "r"(TEAM) : "memory");

#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    float *const x = u + b * EACH, *const y = v + b * EACH, *const y_root = root + b * EACH;
    float top1 = larger(x[0], x[1]), top2 = larger(y[0], y[1]);
#pragma unroll
    for (int i = 2; i < EACH; i++) top1 = larger(top1, x[i]), top2 = larger(top2, y[i]);
    u32 bits1 = __float_as_uint(top1), bits2 = __float_as_uint(top2);
    of_block<WARPS>(bits1, bits2, maxima);
    top1 = __uint_as_float(bits1), top2 = __uint_as_float(bits2);
    const float largest1 = top1 * s.unit;
    if (lane == 0 && threadIdx.x / 32 % WARPS == 0 && (WHOLE || warp_left > b * Q))
      write_raw(scales1 + b, Raw<4>{__float_as_uint(largest1)}), write_raw(scales2 + b, Raw<4>{bits2});
    Raw<EACH> made1, made2;
    if (bits1 - LOW < HIGH - LOW && bits2 - LOW < HIGH - LOW) {
      made1 = codes_of<FORMAT, true, EACH>(lane, x, y_root, factor_of<FORMAT, true>(top1));
      made2 = codes_of<FORMAT, false, EACH>(lane, y, y_root, factor_of<FORMAT, false>(top2));
    } else {
      made1 = rare_codes_of<FORMAT, true, EACH>(lane, x, y_root, top1, largest1);
      made2 = rare_codes_of<FORMAT, false, EACH>(lane, y, y_root, top2, top2);
    }
#pragma unroll
    for (int i = 0; i < EACH; i += VEC) {
      const int o = (b * EACH + i) / VEC * BESIDE;
      write_codes<VEC, WHOLE>(codes1 + o, left - o, *reinterpret_cast<Raw<VEC> *>(&made1.word[i / 4]));
      write_codes<VEC, WHOLE>(codes2 + o, left - o, *reinterpret_cast<Raw<VEC> *>(&made2.word[i / 4]));
    }
  }
}

template <typename T, Format FORMAT, int Q, int THREADS, bool SCALED>
__device__ __forceinline__ void update_all(const i64 *gradients, const i64 *table, const i64 *chunks, const float *numbers,
                                           u32 *arrivals, const float *tables, i64 count, i64 elements, const Factors &factors) {
  constexpr int VEC = Shape<T, Q>::VEC, WARPS = Shape<T, Q>::WARPS, PASS = THREADS * 8, TEAM = THREADS < 256 ? THREADS : 256;
  extern __shared__ __align__(1024) unsigned char memory[];
  u32(*const maxima)[2] = reinterpret_cast<u32(*)[2]>(memory + (FORMAT == DYNAMIC ? 2 * TABLE : 0));  // of two passes
  float *const done = reinterpret_cast<float *>(maxima + 2 * THREADS / 32);
  u32 *const end = reinterpret_cast<u32 *>(done + 1);  // a register of each thread would be one too many
  if constexpr (FORMAT == DYNAMIC) {
    if (shared_address(memory) != DECODER) __trap();
    for (u32 i = threadIdx.x; i < TABLE / 4; i += THREADS) {
      const u32 index = i / 64, map = i / 32 % 2;
      reinterpret_cast<float *>(memory)[i] = tables[map * 256 + index];
      reinterpret_cast<float *>(memory + TABLE)[i] = tables[512 + index * 4 + map * 2 + i % 2];
    }
  }

  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) *end = u32(count * (blockIdx.x + 1) / gridDim.x);
  __syncthreads();
  for (u32 c = u32(count * blockIdx.x / gridDim.x); c < *end;) {
    const i64 entry = chunks[c], row = entry & 0xffffffff, chunk = entry >> 32;
    const i64 *const words = table + row * ROW;
    const i64 run = min(min(i64(*end - c), words[CHUNKS] - chunk), (1ll << 30) / elements);  // chunks of this tensor
    c += u32(run);
    if (threadIdx.x == 0) publish_steps(done, words, arrivals, row, run);
    __syncthreads();
    const float *const n = numbers + words[GROUP] * NUMBERS;
    Step s = step_of<SCALED>(n, rate_of(words, n), *done + 1, factors);
    s.opaque();
    __syncthreads();  // the next tensor's count may come

    const i64 gradient = gradients[row], first = chunk * elements + warp * TILE, at = first + threadIdx.x % 32 * VEC;
    Tensors<T> here = {reinterpret_cast<T *>(words[PARAM]) + at,
                       reinterpret_cast<const T *>(gradient) + at,
                       reinterpret_cast<unsigned char *>(words[FIRST]) + at,
                       reinterpret_cast<unsigned char *>(words[SECOND]) + at,
                       reinterpret_cast<float *>(words[SCALES]) + first / Q,
                       reinterpret_cast<float *>(words[SCALES + 1]) + first / Q};
    here.opaque();
    const i64 end_of_run = min(words[SIZE], (chunk + run) * elements);
    const int left = int(end_of_run - first) + warp % WARPS * TILE;  // elements from the first block of this warp on
    const bool aligned = ((words[PARAM] | gradient | words[FIRST] | words[SECOND]) & 15) == 0;
    const u32 whole = left < WARPS * TILE || !aligned ? 0 : ((left - WARPS * TILE) / PASS + 1) * PASS;
    const u32 of_all = aligned ? u32(end_of_run - chunk * elements) / PASS * PASS : 0;  // passes that every warp has
    u32 offset = 0;
    u32(*slot)[2] = maxima;
    Loaded<T, Q> in;
    if (whole) load_all<T, FORMAT, Q, true>(in, here, 0, 0);
    for (; offset != whole; offset += PASS) {
      // of the last pass this one's again: nothing is made of them, and a branch costs more
      update<T, FORMAT, Q, true, TEAM>(in, here, offset, offset + PASS == whole ? offset : offset + PASS, 0, offset < of_all, s, slot);
      if (WARPS > 1) slot = slot == maxima ? maxima + THREADS / 32 : maxima;
    }
    for (; int(offset) < left; offset += PASS) {
      const int mine = left - int(offset) - warp % WARPS * TILE - int(threadIdx.x % 32) * VEC;
      load_all<T, FORMAT, Q, false>(in, here, offset, mine);
      update<T, FORMAT, Q, false, TEAM>(in, here, offset, 0, mine, false, s, slot);
      if (WARPS > 1) slot = slot == maxima ? maxima + THREADS / 32 : maxima;
    }
  }
}

// Arguments: as those of kernels.update, and
//   tables: 512 floats that codes stand for, of the signed map, then of the other; and lines of 256 cells (lookup_tables of dynamic_map.py).
//   count: chunks in all, of `elements` each, a multiple of Q and of 256. A block takes as many as any other, side by side.
template <typename T, Format FORMAT, int Q, int THREADS>
__global__ __launch_bounds__(THREADS, 1) void adamw_8bit(const i64 *gradients, const i64 *table, const i64 *chunks,
                                                         const float *numbers, u32 *arrivals, const float *tables, i64 count,
                                                         i64 elements) {
  update_all<T, FORMAT, Q, THREADS, false>(gradients, table, chunks, numbers, arrivals, tables, count, elements, {});
}

// A step that scales or clips gradients, or may be skipped (struct Factors).
template <typename T, Format FORMAT, int Q, int THREADS>
__global__ __launch_bounds__(THREADS, 1) void adamw_8bit_scaled(const i64 *gradients, const i64 *table, const i64 *chunks,
                                                               const float *numbers, u32 *arrivals, const float *tables,
                                                               const float *clip, const float *scale, const float *found,
                                                               float *skipped, i64 count, i64 elements) {
  const Factors factors = {clip, scale, found, skipped};
  if (is_skipped(factors)) return;
  update_all<T, FORMAT, Q, THREADS, true>(gradients, table, chunks, numbers, arrivals, tables, count, elements, factors);
}
