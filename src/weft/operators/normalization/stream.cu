// The gradients of RMSNorm and LayerNorm of long rows in one pass, a row shared by a group of blocks of any number: columns
// stay, rows stream.
//
// One block a multiprocessor, all at work at the same time (a cooperative launch). A block keeps one slice of the columns for
// good: the weight's slice and the gradients of weight and bias lie in registers. The slices of x and dy of ROWS rows, a step,
// come into a place of a ring in shared memory and stay there until dx is written. Each warp has one part in the life of a step:
//
//   producer     has it copied; at most LOADS steps are under way
//   ADDERS       add up its sums, each warp its columns
//   teller       joins the warps' sums and publishes them, one word in memory a row and block
//   GATHERERS    read the words of all blocks, each warp for every GATHERERS-th step, and make dx's factors of them
//   WRITERS      write dx, add to the gradients of weight and bias, free the place
//
// Between teller and writers lies a trip through L2. Nobody stands still meanwhile: steps that came later are added up and told,
// and steps that came earlier are written. Everything is joined in one order, so the same bits come out every time.
#include "long_sum.cuh"
#include "prelude.cuh"

typedef float2 Pair;

constexpr u32 ALL = 0xffffffffu;
constexpr int GATHERERS = 4, FIRST_ADDER = 2 + GATHERERS;
constexpr u32 PATIENCE = 1u << 26;  // questions, tens of seconds

// What the writers must know of a row: dx = scale w dy + level + along xhat, xhat = scale x + shift (of fp32: scale (x - shift)).
struct alignas(16) Factors { float scale, shift, level, along; };

__device__ __forceinline__ void barrier_init(u64 *barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// ---- words: two sums, and that they are there, in 64 bits that are never 0, so one access brings all and nothing is fenced ----

__device__ __forceinline__ u64 word_of(Pair p) {
  const u64 word = u64(__float_as_uint(p.y)) << 32 | __float_as_uint(p.x);
  return word ? word : 0x80000000ull;  // of two zeros one is -0
}

__device__ __forceinline__ Pair pair_of(u64 word) { return {__uint_as_float(u32(word)), __uint_as_float(u32(word >> 32))}; }

__device__ __forceinline__ void publish(u64 *word, Pair p) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(word_of(p)) : "memory");
}

__device__ __forceinline__ u64 look(const u64 *word) {
  u64 found;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(word) : "memory");
  return found;
}

// Reads COUNT words, the i-th at from(i), each as soon as it is there; those that are not 0 before are not asked for. Blocks of a
// cooperative launch are all at work, so words come within microseconds; if one never does (a fault of this file), the launch
// fails after PATIENCE questions instead of holding the card for ever. Questions are counted, not time: a process that is set
// aside asks none.
template <int COUNT, typename F> __device__ __forceinline__ void await(F from, u64 (&found)[COUNT]) {
  for (u32 asked = 0;; asked++) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (!found[i]) found[i] = look(from(i));
#pragma unroll
    for (int i = 0; i < COUNT; i++) all = all && found[i];
    if (all) break;
    if (asked == PATIENCE) __trap();
  }
  __syncwarp();
}

// The sums over a warp's lanes of COUNT values (a power of two): of value v in lanes 32 / COUNT * v and on. Lanes exchange
// halves of what they hold, so each step has half as many values.
template <int COUNT, int STEP = 16> __device__ __forceinline__ float totals(const float (&value)[COUNT], u32 lane) {
  if constexpr (COUNT == 1) {
    float total = value[0];
#pragma unroll
    for (int step = STEP; step; step /= 2) total += __shfl_xor_sync(ALL, total, step);
    return total;
  } else {
    const bool upper = lane & STEP;
    float half[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      const float low = value[i], high = value[i + COUNT / 2];
      half[i] = (upper ? high : low) + __shfl_xor_sync(ALL, upper ? low : high, STEP);
    }
    return totals<COUNT / 2, STEP / 2>(half, lane);
  }
}

// x, dy, more: [M, N], rows 16-byte aligned, N a multiple of 16 bytes; w: [N]; mean, rstd: [M] (CENTERED: LayerNorm; else
// rstd is computed here from eps); more: added to dx (the gradient that reaches x past the norm, with MORE); dx: [M, N];
// dw, db: [groups, N], sums over the rows of each group of blocks. A group is `members` neighbouring blocks, each with `slice`
// vectors of 16 bytes of a row; it takes every groups-th step. words: zeroed, a row of steps * ROWS for each member, then one
// more with RELAYED: there one block in turn joins the words of a step and publishes what comes out, which the others read.
// ADDED, EACH: vectors of a lane of an adder and of a writer; WIDE: words of a row that a lane reads.
template <typename T, typename W, typename S, int ADDERS, int ADDED, int WRITERS, int EACH, int ROWS, int PLACES, int LOADS, int WIDE,
          bool RELAYED, bool CENTERED, bool WEIGHTED, bool MORE>
__global__ void __launch_bounds__(32 * (FIRST_ADDER + ADDERS + WRITERS), 1)
    norm_backward_stream(const T *x, const T *dy, const T *more, const W *w, const float *mean, const float *rstd, u64 *words, T *dx,
                         S *dw, S *db, i64 M, i64 N, i64 x_row, i64 dy_row, i64 more_row, i64 dx_row, u32 members, u32 slice,
                         float eps) {
  constexpr int COUNT = 16 / sizeof(T), SLICE = 32 * (ADDERS * ADDED > WRITERS * EACH ? ADDERS * ADDED : WRITERS * EACH) * COUNT;
  constexpr int TENSORS = 2 + MORE, PLACE = TENSORS * ROWS * SLICE, VALUES = 2 * ROWS;
  constexpr bool LONG = sizeof(T) == 4;  // a plain fp32 sum of 256 rows erred by 2e-6 of the sum
  static_assert(LOADS <= PLACES && GATHERERS <= PLACES && ROWS <= 4, "");  // GATHERERS: whoever waits for a phase has seen the one before
  extern __shared__ __align__(1024) unsigned char dynamic[];
  T *const ring = reinterpret_cast<T *>(dynamic);                         // [PLACES, TENSORS, ROWS, SLICE]
  Factors *const factors = reinterpret_cast<Factors *>(ring + PLACES * PLACE);  // [PLACES, ROWS]
  Pair *const statistics = reinterpret_cast<Pair *>(factors + PLACES * ROWS);   // [PLACES, ROWS]: mean, rstd
  float *const of_warps = reinterpret_cast<float *>(statistics + PLACES * ROWS);  // [PLACES, ADDERS, ROWS, 2]
  u64 *const full = reinterpret_cast<u64 *>(of_warps + PLACES * ADDERS * VALUES);  // copied in
  u64 *const added = full + PLACES, *const known = added + PLACES;                 // added up; its factors are there
  u64 *const empty = known + PLACES;                                               // dx is written

  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 member = blockIdx.x % members, group = blockIdx.x / members, groups = gridDim.x / members;
  const i64 steps = (M + ROWS - 1) / ROWS;
  const u32 turns = u32((steps - group + groups - 1) / groups);  // steps of this group
  const i64 first = i64(member) * slice * COUNT;
  const int elements = int(max(i64(0), min(N - first, i64(slice) * COUNT)));
  auto step_of = [&](u32 turn) { return i64(turn) * groups + group; };

  if (threadIdx.x == 0)
    for (int p = 0; p < PLACES; p++) {
      barrier_init(&full[p], 1);
      barrier_init(&added[p], ADDERS);
      barrier_init(&known[p], 1);
      barrier_init(&empty[p], WRITERS);
    }
  for (int i = elements + int(threadIdx.x); i < SLICE; i += 32 * (FIRST_ADDER + ADDERS + WRITERS))
    for (int r = 0; r < PLACES * TENSORS * ROWS; r++) ring[r * SLICE + i] = T{};  // behind the slice's end, so that no one has to ask
  __syncthreads();

  if (warp == 0) {  // ---- the producer ----
    const u32 bytes = elements * sizeof(T);
    auto statistics_of = [&](u32 turn) {
      const i64 row = step_of(turn) * ROWS + lane;
      const bool there = CENTERED && lane < ROWS && row < M;
      return Pair{there ? mean[row] : 0.f, there ? rstd[row] : 0.f};
    };
    Pair next = statistics_of(0);
    for (u32 turn = 0; turn < turns; turn++) {
      const u32 place = turn % PLACES;
      const Pair now = next;
      next = statistics_of(turn + 1);  // asked for a step before it is used
      if (turn >= PLACES) phase_wait(&empty[place], (turn / PLACES - 1) & 1);
      if (turn >= LOADS) phase_wait(&full[(turn - LOADS) % PLACES], (turn - LOADS) / PLACES & 1);
      if (CENTERED && lane < ROWS) statistics[place * ROWS + lane] = now;
      __syncwarp();
      if (lane) continue;
      const i64 row = step_of(turn) * ROWS;
      const int rows = int(min(M - row, i64(ROWS)));
      barrier_expect(&full[place], rows * TENSORS * bytes);
      if (!bytes) continue;
      T *to = ring + place * PLACE;
#pragma unroll 1
      for (int r = 0; r < rows; r++, to += SLICE) {
        copy_bulk_stream(to, x + (row + r) * x_row + first, bytes, &full[place]);
        copy_bulk_stream(to + ROWS * SLICE, dy + (row + r) * dy_row + first, bytes, &full[place]);
        if (MORE) copy_bulk_stream(to + 2 * ROWS * SLICE, more + (row + r) * more_row + first, bytes, &full[place]);
      }
    }
    return;
  }

  if (warp == 1) {  // ---- the teller: lanes 2 r and 2 r + 1 have the two sums of row r ----
    for (u32 turn = 0; turn < turns; turn++) {
      const u32 place = turn % PLACES;
      phase_wait(&added[place], turn / PLACES & 1);
      float sum = 0.f;
#pragma unroll
      for (int a = 0; a < ADDERS; a++) sum += lane < VALUES ? of_warps[(place * ADDERS + a) * VALUES + lane] : 0.f;
      const float other = __shfl_xor_sync(ALL, sum, 1);
      if (lane < VALUES && lane % 2 == 0) publish(words + (step_of(turn) * ROWS + lane / 2) * members + member, Pair{sum, other});
    }
    return;
  }

  if (warp < FIRST_ADDER) {  // ---- a gatherer: lane r makes the factors of row r ----
    const float inverse = 1.f / float(N);
    u64 *const joined = words + steps * ROWS * members;
    for (u32 turn = warp - 2; turn < turns; turn += GATHERERS) {
      const u32 place = turn % PLACES;
      const i64 row = step_of(turn) * ROWS;
      phase_wait(&added[place], turn / PLACES & 1);  // before this block has its sums, the others hardly have theirs
      Pair sums = {0.f, 0.f};
      if (RELAYED && turn % members != member) {
        u64 found[1] = {u64(lane >= ROWS)};
        await([&](int) { return joined + row + lane; }, found);
        sums = pair_of(found[0]);
      } else {
        const u64 *const of_step = words + row * members + lane;
        u64 found[ROWS * WIDE];
#pragma unroll
        for (int i = 0; i < ROWS * WIDE; i++) found[i] = i % WIDE * 32 + lane < members ? 0 : 0x80000000ull;
        await([&](int i) { return of_step + (i / WIDE * members + i % WIDE * 32); }, found);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          Pair total = pair_of(found[r * WIDE]);
#pragma unroll
          for (int i = 1; i < WIDE; i++) {
            const Pair more_of = pair_of(found[r * WIDE + i]);
            total.x += more_of.x, total.y += more_of.y;
          }
#pragma unroll
          for (int step = 16; step; step /= 2) {
            total.x += __shfl_xor_sync(ALL, total.x, step);
            total.y += __shfl_xor_sync(ALL, total.y, step);
          }
          if (lane == r) sums = total;
        }
        if (RELAYED && lane < ROWS) publish(joined + row + lane, sums);
      }
      if (lane < ROWS) {
        const Pair of_row = CENTERED ? statistics[place * ROWS + lane] : Pair{0.f, 0.f};
        Factors f;
        f.scale = CENTERED ? of_row.y : 1.f / sqrtf(sums.x * inverse + eps);
        f.shift = LONG ? of_row.x : -of_row.x * f.scale;
        f.level = CENTERED ? -sums.x * inverse * f.scale : 0.f;
        f.along = -sums.y * f.scale * inverse * f.scale;
        factors[place * ROWS + lane] = f;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&known[place]);
    }
    return;
  }

  if (warp < FIRST_ADDER + ADDERS) {  // ---- an adder: of x² and w dy x, or (CENTERED) of w dy and w dy (x - mean) ----
    const u32 adder = warp - FIRST_ADDER;
    auto at = [&](int v) { return int((v * ADDERS + adder) * 32 + lane) * COUNT; };
    float k[ADDED][COUNT];
#pragma unroll
    for (int v = 0; v < ADDED; v++) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) k[v][i] = 0.f;
      if (WEIGHTED && at(v) < elements) unpack(load<W, COUNT>(w + first + at(v)), k[v]);
    }
    for (u32 turn = 0; turn < turns; turn++) {
      const u32 place = turn % PLACES;
      const T *const here = ring + place * PLACE;
      phase_wait(&full[place], turn / PLACES & 1);
      float sums[VALUES], middle[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        sums[2 * r] = sums[2 * r + 1] = 0.f;
        middle[r] = CENTERED ? statistics[place * ROWS + r].x : 0.f;
      }
#pragma unroll
      for (int v = 0; v < ADDED; v++) {
        Words<T, COUNT> xs[ROWS], ds[ROWS];  // a row past the last gives numbers that no one uses
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          xs[r] = load_shared<T, COUNT>(here + r * SLICE + at(v));
          ds[r] = load_shared<T, COUNT>(here + (ROWS + r) * SLICE + at(v));
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          float a[COUNT], d[COUNT];
          unpack(xs[r], a);
          unpack(ds[r], d);
#pragma unroll
          for (int i = 0; i < COUNT; i++) {
            if (WEIGHTED) d[i] *= k[v][i];
            sums[2 * r] += CENTERED ? d[i] : a[i] * a[i];
            sums[2 * r + 1] += d[i] * (CENTERED ? a[i] - middle[r] : a[i]);
          }
        }
      }
      const float total = totals<VALUES>(sums, lane);
      if (lane % (32 / VALUES) == 0) of_warps[(place * ADDERS + adder) * VALUES + lane / (32 / VALUES)] = total;
      __syncwarp();
      if (lane == 0) barrier_arrive(&added[place]);
    }
    return;
  }

  // ---- a writer ----
  const u32 writer = warp - FIRST_ADDER - ADDERS;
  auto at = [&](int v) { return int((v * WRITERS + writer) * 32 + lane) * COUNT; };
  float k[EACH][COUNT] = {};
  float dw_sum[EACH][COUNT] = {}, db_sum[CENTERED ? EACH : 1][COUNT] = {};
  float dw_lost[LONG ? EACH : 1][COUNT] = {}, db_lost[LONG && CENTERED ? EACH : 1][COUNT] = {};
#pragma unroll
  for (int v = 0; v < EACH; v++)
    if (WEIGHTED && at(v) < elements) unpack(load<W, COUNT>(w + first + at(v)), k[v]);
  for (u32 turn = 0; turn < turns; turn++) {
    const u32 place = turn % PLACES;
    const T *const here = ring + place * PLACE;
    const i64 row = step_of(turn) * ROWS;
    phase_wait(&full[place], turn / PLACES & 1);
    phase_wait(&known[place], turn / PLACES & 1);
#pragma unroll
    for (int v = 0; v < EACH; v++) {
      Words<T, COUNT> xs[ROWS], ds[ROWS], ms[MORE ? ROWS : 1];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        xs[r] = load_shared<T, COUNT>(here + r * SLICE + at(v));
        ds[r] = load_shared<T, COUNT>(here + (ROWS + r) * SLICE + at(v));
        if constexpr (MORE) ms[r] = load_shared<T, COUNT>(here + (2 * ROWS + r) * SLICE + at(v));
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        if (ROWS > 1 && row + r >= M) break;
        const Factors f = factors[place * ROWS + r];
        float a[COUNT], g[COUNT], m[COUNT];
        unpack(xs[r], a);
        unpack(ds[r], g);
        if constexpr (MORE) unpack(ms[r], m);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
          // of 16-bit floats the rounding of mean * rstd is far below their own; one operation instead of two
          const float xhat = !CENTERED ? a[i] * f.scale : LONG ? (a[i] - f.shift) * f.scale : a[i] * f.scale + f.shift;
          if (WEIGHTED) {
            add<LONG>(dw_sum[v][i], dw_lost[LONG ? v : 0][i], g[i] * xhat);
            if constexpr (CENTERED) add<LONG>(db_sum[v][i], db_lost[LONG ? v : 0][i], g[i]);
          }
          const float d = WEIGHTED ? g[i] * k[v][i] : g[i];
          a[i] = d * f.scale + (CENTERED ? xhat * f.along + f.level : xhat * f.along);
          if constexpr (MORE) a[i] += m[i];
        }
        if (at(v) < elements) store<T, COUNT>(dx + (row + r) * dx_row + first + at(v), pack<T, COUNT>(a));
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[place]);
  }
  if (WEIGHTED) {
    const i64 column = i64(group) * N + first;
#pragma unroll
    for (int v = 0; v < EACH; v++) {
      if (at(v) >= elements) continue;
      store<S, COUNT>(dw + column + at(v), pack<S, COUNT>(dw_sum[v]));
      if constexpr (CENTERED) store<S, COUNT>(db + column + at(v), pack<S, COUNT>(db_sum[v]));
    }
  }
}
