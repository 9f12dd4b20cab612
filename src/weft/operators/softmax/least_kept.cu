// The least logit of each row that top-k, min-p and top-p keep: a token is kept if its logit is at least this, so equal logits
// stay together. Nothing is sorted: a pass over the row counts its logits (top-k), or sums its weights (top-p), in bins from the
// largest logit down; the next one divides the bin in which the wanted number is reached by the order of the floats' bits, until
// a bin holds one value. Passes after the first read the row from L2.
//
// Sums are of whole numbers: a weight relative to its bin's, in units of 2^-21. So they are the same in any order, and for any
// number of blocks, which are a cluster.
#include "prelude.cuh"

constexpr int COPIES = 8, GROUP = 8;
constexpr float LARGE = 3e38f, SMALL = 1e-35f;
constexpr float WHOLE = 8388608.f;  // 2^23: what is added to it is rounded to a whole number, which its low bits then are
constexpr float UNITS = 2097152.f;  // of the weight 1: 2^21
constexpr float LOG2_E = 1.4426950408889634f;
enum { TOP_K = 1, TOP_P = 2, MIN_P = 4 };

// Low bits of a float32 that are 0 in every number of the type.
template <typename T> constexpr int UNUSED = 0;
template <> constexpr int UNUSED<bf16> = 16;
template <> constexpr int UNUSED<fp16> = 13;

template <int BINS> struct SharedOf {
  u32 sums[BINS * COPIES];  // a bin's copies are of different lanes, which then seldom add to the same word
  u32 carries[BINS];        // of 2^32
  double per_warp[32];
  float largest[32], smallest[32], least[32];
  u32 found;  // BINS less the bin
  double before, inside;
  u64 told[2];
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ float exp2_of(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}

// Numbers in the order of the floats; 0 and -0 have the same one.
template <typename T> __device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return (bits >> 31 ? ~bits : bits | 0x80000000u) >> UNUSED<T>;
}

template <typename T> __device__ __forceinline__ float value_of(u32 key) {
  key <<= UNUSED<T>;
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~(key | ((1u << UNUSED<T>) - 1)));
}

// Bins of equal width from the largest logit down, and weights within them.
template <int BINS> struct Scale {
  float top, per_logit, per_bin;  // bins of a difference of 1; log2 of the ratio of two neighbours' weights

  __device__ __forceinline__ Scale(float top, float least, float temperature) : top(top) {
    const float width = fminf(fmaxf(top - least, SMALL), LARGE);
    per_logit = (BINS - 1) / width;
    per_bin = LOG2_E * (width / (BINS - 1) / temperature);
  }
  __device__ __forceinline__ float distance(float x) const { return fminf(top - x, LARGE) * per_logit; }
  __device__ __forceinline__ u32 bin(float distance) const {
    return min(__float_as_uint(distance + WHOLE) & 0x7fffffu, u32(BINS - 1));
  }
  // A weight relative to the bin's, in units.
  __device__ __forceinline__ u32 weight(float distance, float bin) const {
    return __float_as_uint(exp2_of((bin - distance) * per_bin) * UNITS + WHOLE) & 0x7fffffu;
  }
  // Of a bin, and a little more on both sides.
  __device__ __forceinline__ float highest(int bin) const { return top - (bin - 0.52f) / per_logit + margin(); }
  __device__ __forceinline__ float lowest(int bin) const { return top - (bin + 0.52f) / per_logit - margin(); }
  __device__ __forceinline__ float margin() const { return fabsf(top) * 5e-7f; }
};

template <typename T, bool ALIGNED, bool CLUSTER, int THREADS> struct Row {
  static constexpr int WARPS = THREADS / 32, BINS = THREADS / 2, SENT = BINS + 1;  // the bins, and what lies below them
  using Shared = SharedOf<BINS>;
  static_assert(sizeof(Shared) <= 36 * BINS + 1024, "what draw_tokens.py asks for");
  const T *logits;
  int V;
  u32 rank, blocks, exchanges = 0;
  Shared &shared;
  u64 *arrived;  // [2, blocks, SENT], what the cluster's blocks send

  __device__ __forceinline__ Row(const T *logits, int V, unsigned char *memory)
      : logits(logits), V(V), rank(0), blocks(1), shared(*reinterpret_cast<Shared *>(memory)),
        arrived(reinterpret_cast<u64 *>(memory + sizeof(Shared))) {
    if constexpr (CLUSTER) {
      rank = cluster_rank(), blocks = cluster_blocks();
      if (threadIdx.x == 0) barrier_init(&shared.told[0]), barrier_init(&shared.told[1]);
      cluster_arrive();
      cluster_wait();
    }
  }

  // Calls `each(x)` with this thread's logits, -inf past the row's end. The next ones are in flight meanwhile.
  template <typename F> __device__ __forceinline__ void walk(F each) const {
    const int whole = ALIGNED ? V / GROUP : 0, step = int(blocks) * THREADS;
    int g = int(rank) * THREADS + threadIdx.x;
    Words<T, GROUP> next;
    if (g < whole) next = load<T, GROUP>(logits + g * GROUP);
    for (; g < groups(); g += step) {
      float f[GROUP];
      unpack(next, f);
      if (g + step < whole) next = load<T, GROUP>(logits + (g + step) * GROUP);
      if (g >= whole) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
          const int at = g * GROUP + i;
          f[i] = at < V ? to_float(logits[at]) : -infinity();
        }
      }
#pragma unroll
      for (int i = 0; i < GROUP; i++) each(f[i]);
    }
  }
  __device__ __forceinline__ int groups() const { return (V + GROUP - 1) / GROUP; }

  // Number `at` of `count` that each block has, summed (or whatever `combine` does) over the cluster.
  template <typename F> __device__ __forceinline__ u64 exchange(u64 own, int at, int count, F combine) {
    if constexpr (!CLUSTER) return own;
    u64 *slots = arrived + (exchanges % 2) * blocks * SENT, *told = &shared.told[exchanges % 2];
    if (threadIdx.x == 0) barrier_expect(told, blocks * count * sizeof(u64));
    if (at < count)
#pragma unroll 1  // unrolled, registers are spilled
      for (u32 to = 0; to < blocks; to++) {
        const float2 halves = {__uint_as_float(u32(own)), __uint_as_float(u32(own >> 32))};
        store_remote(reinterpret_cast<float2 *>(slots + rank * SENT + at), to, halves, told);
      }
    if (threadIdx.x < 32) phase_wait(told, exchanges / 2 % 2);
    __syncthreads();
    exchanges++;
    if (at >= count) return own;
    u64 all = slots[at];
#pragma unroll 1
    for (u32 from = 1; from < blocks; from++) all = combine(all, slots[from * SENT + at]);
    return all;
  }

  // The largest logit; the smallest that is not -inf; one that at least `threads()` others reach.
  __device__ __forceinline__ void extremes(float &largest, float &smallest, float &reached) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    largest = -infinity(), smallest = infinity();
    walk([&](float x) {
      largest = fmaxf(largest, x);
      if (x > -infinity()) smallest = fminf(smallest, x);
    });
    reached = int(rank) * THREADS + int(threadIdx.x) < groups() ? largest : infinity();
    largest = warp_max(largest), smallest = -warp_max(-smallest), reached = -warp_max(-reached);
    if (lane == 0) shared.largest[warp] = largest, shared.smallest[warp] = smallest, shared.least[warp] = reached;
    __syncthreads();
    largest = warp_max(shared.largest[lane % WARPS]);
    smallest = -warp_max(-shared.smallest[lane % WARPS]), reached = -warp_max(-shared.least[lane % WARPS]);
    if constexpr (CLUSTER) {
      const float mine = threadIdx.x == 0 ? largest : threadIdx.x == 1 ? -smallest : -reached;
      const u64 all = exchange(__float_as_uint(mine), int(threadIdx.x), 3, [](u64 a, u64 b) {
        return u64(__float_as_uint(fmaxf(__uint_as_float(u32(a)), __uint_as_float(u32(b)))));
      });
      float *const of_cluster = reinterpret_cast<float *>(shared.per_warp);  // others may still read the block's
      if (threadIdx.x < 3) of_cluster[threadIdx.x] = __uint_as_float(u32(all));
      __syncthreads();
      largest = of_cluster[0], smallest = -of_cluster[1], reached = -of_cluster[2];
    }
  }
  // At least so many threads have a logit: each one's largest is at least the least of them.
  __device__ __forceinline__ int threads() const { return min(groups(), int(blocks) * THREADS); }

  __device__ __forceinline__ void clear() {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS * COPIES; i += THREADS) shared.sums[i] = 0;
    if (threadIdx.x < BINS) shared.carries[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.found = 0;
    __syncthreads();
  }
  template <bool SUMMED> __device__ __forceinline__ void add(u32 bin, u32 units) {
    const u32 before = atomicAdd(&shared.sums[bin * COPIES + threadIdx.x % COPIES], units);
    if (SUMMED && before > ~units) atomicAdd(&shared.carries[bin], 1u);
  }
  // The cluster's sum of this thread's bin, of thread BINS that of `below`; 0 of other threads.
  __device__ __forceinline__ u64 collected(u64 below) {
    const int at = threadIdx.x;
    __syncthreads();
    u64 own = at == BINS ? below : 0;
    if (at < BINS) {
      own = u64(shared.carries[at]) << 32;
#pragma unroll
      for (int i = 0; i < COPIES; i++) own += shared.sums[at * COPIES + i];
    }
    const u64 all = exchange(own, at, SENT, [](u64 a, u64 b) { return a + b; });
    return at < SENT ? all : 0;
  }

  // The sum of `value` over the threads up to this one; `total` over all.
  __device__ __forceinline__ double running(double value, double &total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = running(value);
    if (lane == 31) shared.per_warp[warp] = value;
    __syncthreads();
    const double of_warps = running(lane < WARPS ? shared.per_warp[lane] : 0.0);
    total = __shfl_sync(0xffffffffu, of_warps, 31);
    const double before = __shfl_sync(0xffffffffu, of_warps, max(int(warp) - 1, 0));
    return warp ? before + value : value;
  }
  static __device__ __forceinline__ double running(double value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double other = __shfl_up_sync(0xffffffffu, value, step);
      if (int(threadIdx.x % 32) >= step) value += other;
    }
    return value;
  }

  // The first bin in which the running sum reaches `target`, or else the last that is not empty; what lies before it, and its
  // own sum.
  __device__ __forceinline__ int reach(double value, double sum, double target, double &before, double &inside) {
    const int at = threadIdx.x;
    if (at < BINS && value > 0) {
      const u32 from_end = BINS - at;
      if (sum >= target) atomicMax(&shared.found, from_end + BINS);
      else atomicMax(&shared.found, u32(at) + 1);  // of these the last
    }
    __syncthreads();
    const int found = int(shared.found), bin = found > BINS ? 2 * BINS - found : max(found - 1, 0);
    if (at == bin) shared.before = sum - value, shared.inside = value;
    __syncthreads();
    before = shared.before, inside = shared.inside;
    return bin;
  }

  // The largest t for which the logits in [t, top] are k, or (SUMMED) have the share p of the weights of all that are at least
  // `floor`. Bins go down to `least`, below which t is not; -inf where there are fewer than k.
  template <bool SUMMED>
  __device__ __forceinline__ float search(float top, float least, float floor, float temperature, double wanted) {
    const Scale<BINS> scale(top, least, temperature);
    u64 below = 0;
    clear();
    walk([&](float x) {
      if (!(x >= (SUMMED ? floor : least))) return;
      const float distance = scale.distance(x);
      const u32 bin = scale.bin(distance);
      if (x >= least)
        add<SUMMED>(bin, SUMMED ? scale.weight(distance, float(bin)) : 1u);
      else if constexpr (SUMMED)
        below += scale.weight(distance, float(BINS - 1));
    });
    if constexpr (SUMMED) {  // its sum over the block, in thread BINS
#pragma unroll
      for (int step = 16; step; step /= 2) below += __shfl_xor_sync(0xffffffffu, below, step);
      u64 *const per_warp = reinterpret_cast<u64 *>(shared.per_warp);
      if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = below;
      __syncthreads();
      below = 0;
      for (int w = 0; w < WARPS; w++) below += per_warp[w];
      __syncthreads();
    }
    const int at = threadIdx.x;
    double value = double(collected(below)), total, before, inside;
    if constexpr (SUMMED) value *= exp2_of(-float(min(at, BINS - 1)) * scale.per_bin);
    double sum = running(value, total);
    if (SUMMED ? !(total > 0) : total < wanted) return -infinity();
    if constexpr (SUMMED) wanted *= total;
    const u32 bin = u32(reach(value, sum, wanted, before, inside));
    wanted -= before;
    if constexpr (SUMMED) {
      const double of_bin = exp2_of(-float(bin) * scale.per_bin);
      wanted = fmax(1.0, fmin(wanted, inside) / of_bin);
    }

    u32 high = min(key_of<T>(scale.highest(bin)), key_of<T>(top)), low = min(key_of<T>(scale.lowest(bin)), high);
    while (true) {
      int shift = 0;
      while ((high - low) >> shift >= BINS) shift++;
      const float from = value_of<T>(low), to = value_of<T>(high);
      clear();
      walk([&](float x) {
        if (!(x >= from && x <= to && x >= least)) return;
        const float distance = scale.distance(x);
        if (scale.bin(distance) == bin)
          add<SUMMED>((high - key_of<T>(x)) >> shift, SUMMED ? scale.weight(distance, float(bin)) : 1u);
      });
      value = double(collected(0)), sum = running(value, total);
      const u32 part = u32(reach(value, sum, wanted, before, inside));
      high -= part << shift;
      if (shift == 0) return value_of<T>(high);
      low = max(low, high - ((1u << shift) - 1));
      wanted -= before;
    }
  }
};

// logits [R, V], the others [R] or not there (`given`); least [R]: -inf where all are kept. A cluster, or a block, for each row.
template <typename T, bool ALIGNED, bool CLUSTER, int THREADS>
__global__ void __launch_bounds__(THREADS)
    least_kept(const T *logits, const float *temperature, const int *top_k, const float *top_p, const float *min_p,
               float *least, int V, int given, i64 row, i64 of_temperature, i64 of_top_k, i64 of_top_p, i64 of_min_p) {
  extern __shared__ __align__(16) unsigned char memory[];
  const i64 r = CLUSTER ? blockIdx.x / cluster_blocks() : blockIdx.x;
  const float t = temperature[r * of_temperature];
  const int k = given & TOP_K ? top_k[r * of_top_k] : 0;
  const float p = given & TOP_P ? top_p[r * of_top_p] : 1.f, share = given & MIN_P ? min_p[r * of_min_p] : 0.f;
  const bool by_count = k > 0 && k < V;
  if (!(t > 0) || !(by_count || p < 1 || share > 0)) {
    if (threadIdx.x == 0) least[r] = -infinity();
    return;
  }
  Row<T, ALIGNED, CLUSTER, THREADS> of(logits + r * row, V, memory);
  float top, smallest, reached, floor = -infinity();
  of.extremes(top, smallest, reached);
  if (fabsf(top) < infinity()) {
    if (by_count) {
      const float from = k <= of.threads() ? fmaxf(reached, smallest) : smallest;
      floor = of.template search<false>(top, from, from, 1.f, k);
    }
    if (share > 0) floor = fmaxf(floor, share < 1 ? fminf(top, top + t * logf(share)) : top);
    if (p < 1) {
      const float from = fmaxf(floor, top - t * (logf(float(V) / (1.f - p)) + 1.f));  // all below it weigh less than 1 - p
      floor = fmaxf(floor, of.template search<true>(top, from, floor, t, fmaxf(p, 0.f)));
    }
  }
  if (of.rank == 0 && threadIdx.x == 0) least[r] = floor;
}
