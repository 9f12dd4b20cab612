// The main loop of matrix products on Hopper (sm_90a): persistent, warp-specialised, fed by TMA, computed by wgmma.
//
// A block is three warpgroups. One thread of the first fetches tiles of A and B through a ring of STAGES places in shared
// memory, well ahead; the other two multiply, 64 rows of the tile each, and keep their sums in registers. Full and empty
// places are told by mbarriers, so nobody meets at a block-wide barrier. Blocks stay and take tile after tile; while one
// tile is stored (through shared memory, by TMA), the next one's places are being filled. CLUSTER blocks that lie on one
// another in C take the same columns of B: each fetches a part and sends it to all.
//
// A stage holds 128 bytes along K: rows of 128 bytes in the 128-byte swizzle that TMA writes and wgmma reads. An operand
// whose K is not the contiguous axis (16-bit floats only) lies as blocks of 64 rows of K by 64 elements.
#include "prelude.cuh"

struct e4m3 { unsigned char bits; };
struct s8 { signed char value; };
struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int ROWS = 128;      // of a tile: two consumer warpgroups of 64
constexpr int LINE = 128;      // bytes of a row in a stage
constexpr int THREADS = 384, CONSUMERS = 256;
constexpr int ATOM = 64 * LINE;  // bytes of a 64 x 64 block of 16-bit floats, and of what wgmma's 64 rows take of a stage

// ---- barriers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u64 *barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Waits until a phase is over: the first, third … with parity 0, the others with 1.
__device__ __forceinline__ void barrier_wait(u64 *barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(
                   shared_address(barrier)),
               "r"(parity)
               : "memory");
}

// Arrives at the same barrier of block `rank` of the cluster. Not releasing at the cluster's scope: that is MEMBAR.ALL.GPU, once a stage,
// for ordinary stores that nobody waits for; what wgmma has read it has read when its wait is over.
__device__ __forceinline__ void barrier_arrive(u64 *barrier, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, rank)) : "memory");
}

// One thread of a whole warp; unlike a comparison it tells the compiler that there is but one.
__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
  return is;
}

// Of one warpgroup: 128 threads.
__device__ __forceinline__ void group_barrier(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// ---- TMA -----------------------------------------------------------------------------------------------------------

// Fetches a box at (x, y) of matrix z; what lies outside of the tensor comes as zeros, and counts as bytes.
__device__ __forceinline__ void fetch(void *to, const TensorMap &map, int x, int y, int z, u64 *barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
               : "memory");
}

// The same for all blocks of the cluster in `mask`, to the same place of each.
__device__ __forceinline__ void fetch_for(unsigned short mask, void *to, const TensorMap &map, int x, int y, int z, u64 *barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
               "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(mask)
               : "memory");
}

__device__ __forceinline__ void put(const TensorMap &map, const void *from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// ---- wgmma: D[64, N] += A[64, 32 bytes of K] B[N, 32 bytes of K], both in shared memory ---------------------------------

// Where an operand lies: 128-byte swizzle; `leading` bytes from one block of 64 elements to the next (K not contiguous),
// `stride` from 8 rows to the next 8.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading) {
  constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = u64(8 * LINE >> 4) << 32;
  return SWIZZLE_128 | EIGHT_ROWS | u64(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}

#define P8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define P32_0 P8(0, 1, 2, 3, 4, 5, 6, 7) "," P8(8, 9, 10, 11, 12, 13, 14, 15) "," P8(16, 17, 18, 19, 20, 21, 22, 23) "," P8(24, 25, 26, 27, 28, 29, 30, 31)
#define P32_1 P8(32, 33, 34, 35, 36, 37, 38, 39) "," P8(40, 41, 42, 43, 44, 45, 46, 47) "," P8(48, 49, 50, 51, 52, 53, 54, 55) "," P8(56, 57, 58, 59, 60, 61, 62, 63)
#define P32_2 P8(64, 65, 66, 67, 68, 69, 70, 71) "," P8(72, 73, 74, 75, 76, 77, 78, 79) "," P8(80, 81, 82, 83, 84, 85, 86, 87) "," P8(88, 89, 90, 91, 92, 93, 94, 95)
#define P32_3 P8(96, 97, 98, 99, 100, 101, 102, 103) "," P8(104, 105, 106, 107, 108, 109, 110, 111) "," P8(112, 113, 114, 115, 116, 117, 118, 119) "," P8(120, 121, 122, 123, 124, 125, 126, 127)
#define D8(c, i) "+" c(d[i]), "+" c(d[i + 1]), "+" c(d[i + 2]), "+" c(d[i + 3]), "+" c(d[i + 4]), "+" c(d[i + 5]), "+" c(d[i + 6]), "+" c(d[i + 7])
#define D32(c, i) D8(c, i), D8(c, i + 8), D8(c, i + 16), D8(c, i + 24)
#define OPEN(keep) "{\n.reg .pred p;\nsetp.ne.b32 p, " keep ", 0;\nwgmma.mma_async.sync.aligned."
// D += A B (D = A B unless `keep`); K and TYPES as in the instruction's name, C the constraint of D, TAIL what follows p.
#define MULTIPLY(K, TYPES, C, TAIL)                                                                                         \
  if constexpr (N == 256)                                                                                                   \
    asm volatile(OPEN("%130") "m64n256k" K TYPES " {" P32_0 "," P32_1 "," P32_2 "," P32_3 "}, %128, %129, p" TAIL ";\n}"     \
                 : D32(C, 0), D32(C, 32), D32(C, 64), D32(C, 96)                                                            \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 192)                                                                                              \
    asm volatile(OPEN("%98") "m64n192k" K TYPES " {" P32_0 "," P32_1 "," P32_2 "}, %96, %97, p" TAIL ";\n}"                  \
                 : D32(C, 0), D32(C, 32), D32(C, 64)                                                                        \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else if constexpr (N == 128)                                                                                              \
    asm volatile(OPEN("%66") "m64n128k" K TYPES " {" P32_0 "," P32_1 "}, %64, %65, p" TAIL ";\n}"                            \
                 : D32(C, 0), D32(C, 32)                                                                                    \
                 : "l"(a), "l"(b), "r"(keep));                                                                              \
  else                                                                                                                      \
    asm volatile(OPEN("%34") "m64n64k" K TYPES " {" P32_0 "}, %32, %33, p" TAIL ";\n}" : D32(C, 0) : "l"(a), "l"(b), "r"(keep));
#define MULTIPLY_ANY_LAYOUT(TYPES)                                                                \
  if constexpr (!A_ACROSS && !B_ACROSS) { MULTIPLY("16", TYPES, "f", ", 1, 1, 0, 0") }               \
  if constexpr (!A_ACROSS && B_ACROSS) { MULTIPLY("16", TYPES, "f", ", 1, 1, 0, 1") }                \
  if constexpr (A_ACROSS && !B_ACROSS) { MULTIPLY("16", TYPES, "f", ", 1, 1, 1, 0") }                \
  if constexpr (A_ACROSS && B_ACROSS) { MULTIPLY("16", TYPES, "f", ", 1, 1, 1, 1") }

// `ACROSS`: K is not the contiguous axis.
template <typename T> struct Unit;
template <> struct Unit<bf16> {
  typedef float Sum;
  template <int N, bool A_ACROSS, bool B_ACROSS> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY_ANY_LAYOUT(".f32.bf16.bf16")
  }
};
template <> struct Unit<fp16> {
  typedef float Sum;
  template <int N, bool A_ACROSS, bool B_ACROSS> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY_ANY_LAYOUT(".f32.f16.f16")
  }
};
template <> struct Unit<float> {  // tf32: the lower 13 bits of the mantissa are not looked at
  typedef float Sum;
  template <int N, bool, bool> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY("8", ".f32.tf32.tf32", "f", ", 1, 1")
  }
};
template <> struct Unit<e4m3> {
  typedef float Sum;
  template <int N, bool, bool> static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY("32", ".f32.e4m3.e4m3", "f", ", 1, 1")
  }
};
template <> struct Unit<s8> {
  typedef int Sum;
  template <int N, bool, bool> static __device__ __forceinline__ void multiply(int (&d)[N / 2], u64 a, u64 b, int keep) {
    MULTIPLY("32", ".s32.s8.s8", "r", "")
  }
};

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler may neither move nor copy what an asynchronous product is still writing.
template <int COUNT> __device__ __forceinline__ void hold(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT> __device__ __forceinline__ void hold(int (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// ---- which tile, when ------------------------------------------------------------------------------------------------

// Sizes of a launch. n: columns of C; group: of tiles, below; streamed: tiles that are divided among clusters (`Walk`), in shares of
// `share` stages of which the first `longer` have one more.
struct Shape { int m, n, k, matrices, group, streamed, share, longer; };

// Tiles in groups of GROUP rows of tiles: within a group columns of tiles follow one another, so that blocks which run at a
// time share rows of A and columns of B in L2. `first` and `step` count clusters.
struct Tiles {
  int rows, columns, matrices, group;  // how many
  __device__ __forceinline__ int count() const { return rows * columns * matrices; }
  __device__ __forceinline__ void at(int i, int &row, int &column, int &matrix) const {
    matrix = i / (rows * columns);
    i -= matrix * rows * columns;
    const int in_group = group * columns, first = i / in_group * group, height = min(group, rows - first);
    i %= in_group;
    row = first + i % height;
    column = i / height;
  }
};

// What a cluster computes, one after another: stages [from, to) of a tile.
//
// STREAM: the `streamed` first tiles, all stages of one behind those of the other, are cut into as many equal shares as there
// are clusters; the other tiles are whole waves. Whoever has the first stages of a tile owns it and waits for the sums of the others.
// A share begins with what belongs to somebody else, and cluster i has the i-th share from the end: so what an owner waits for
// waits for nobody, was begun by blocks launched before, and is there already if a share is longer than a tile.
template <bool STREAM> struct Walk {
  int tile, from, to;
  int upcoming, step, count, depths;
  int number, pieces, all, whole;  // pieces so far, of the share, with the tiles that follow; the first of those
  int share, begin, end;           // its number; its stages, counted from those of the first tile that it touches
  const Shape &shape;

  __device__ __forceinline__ Walk(int first, int clusters, int tiles, int stages, const Shape &shape)
      : upcoming(first), step(clusters), count(tiles), depths(stages), shape(shape) {
    if constexpr (STREAM) {
      number = 0, whole = shape.streamed + first, share = clusters - 1 - first, upcoming = begin_of(share) / depths;
      begin = begin_of(share) - upcoming * depths, end = begin_of(share + 1) - upcoming * depths;
      pieces = (end + depths - 1) / depths, all = pieces + (count - shape.streamed) / step;
    }
  }
  __device__ __forceinline__ int begin_of(int i) const { return i * shape.share + min(i, shape.longer); }
  // So written that the compiler sees a warp's threads agree on it, and keeps descriptors of stages in uniform registers.
  __device__ __forceinline__ bool next() {
    tile = upcoming, from = 0, to = depths;
    if constexpr (STREAM) {
      const int i = number++;
      upcoming = i + 1 == pieces ? whole : upcoming + (i < pieces ? 1 : step);
      from = i == 0 ? begin : 0;
      to = i < pieces ? min(depths, end - i * depths) : depths;
      return i < all;
    }
    upcoming += step;
    return tile < count;
  }
};

// ---- sums handed from block to block: 128 threads, all in the same layout ----------------------------------------------------

__device__ __forceinline__ float4 four(const float *x) { return {x[0], x[1], x[2], x[3]}; }
__device__ __forceinline__ int4 four(const int *x) { return {x[0], x[1], x[2], x[3]}; }
// Where a thread's numbers i to i + 3 of a part lie.
template <typename Sum> __device__ __forceinline__ auto &four_at(Sum *part, int i, int thread) {
  return reinterpret_cast<decltype(four(part)) *>(part)[i / 4 * 128 + thread];
}

template <typename Sum, int COUNT> __device__ __forceinline__ void give(Sum *to, const Sum (&sums)[COUNT], u32 *flag, int thread, int meeting) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) four_at(to, i, thread) = four(&sums[i]);
  group_barrier(meeting);  // then thread 0's release is one for the stores of all
  if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}

// Waits for the flag and takes it down, for the next launch.
template <typename Sum, int COUNT> __device__ __forceinline__ void take(Sum (&sums)[COUNT], Sum *from, u32 *flag, int thread, int meeting) {
  if (thread == 0) {
    u32 is;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is) : "l"(flag) : "memory");
    while (!is);
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(0) : "memory");
  }
  group_barrier(meeting);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const auto more = four_at(from, i, thread);
    sums[i] += more.x, sums[i + 1] += more.y, sums[i + 2] += more.z, sums[i + 3] += more.w;
  }
}

__device__ constexpr int divisor(int a, int b) { return b ? divisor(b, a % b) : a; }

// The tiles, HEIGHT x WIDTH each, that touch the lower triangle of a square matrix; fields are those of `Tiles`. A group of rows begins
// with the columns that all its rows have, one after another, and ends with the rest row by row.
template <int HEIGHT, int WIDTH> struct Triangle {
  int rows, columns, matrices, group;
  static constexpr int P = HEIGHT / divisor(HEIGHT, WIDTH), Q = WIDTH / divisor(HEIGHT, WIDTH);

  // Tiles of the rows before the r-th: the i-th has i P / Q, rounded up (the last may be cut off by the matrix's end).
  static __device__ __forceinline__ int before(int r) {
    int added = 0;
#pragma unroll
    for (int i = 1; i < Q; i++) added += (r + Q - i) / Q * ((Q - i * P % Q) % Q);
    return (P * (r * (r + 1) / 2) + added) / Q;
  }
  __device__ __forceinline__ int width(int r) const { return before(r + 1) - before(r); }
  __device__ __forceinline__ int count() const { return (before(rows - 1) + columns) * matrices; }
  __device__ __forceinline__ void at(int i, int &row, int &column, int &matrix) const {
    const int all = before(rows - 1) + columns;
    matrix = i / all;
    i -= matrix * all;
    int r = min(rows - 1, int(sqrtf(2.f * Q / P * i)) + 1);  // not too few: before(r) > r * r * P / Q / 2
    while (before(r) > i) r--;
    const int first = r / group * group, height = min(rows - first, group), shared = width(first);
    i -= before(first);
    if (i < height * shared) {
      row = first + i % height, column = i / height;
    } else {
      i -= height * shared;
      for (row = first + 1; i >= width(row) - shared; row++) i -= width(row) - shared;
      column = shared + i;
    }
  }
};

template <bool SYMMETRIC, int HEIGHT, int WIDTH> struct Order : Tiles {};
template <int HEIGHT, int WIDTH> struct Order<true, HEIGHT, WIDTH> : Triangle<HEIGHT, WIDTH> {};

// ---- a tile and its mirror image -----------------------------------------------------------------------------------------

// Two 8 x 8 matrices of 16-bit floats to shared memory, each with its columns as rows; lanes 0 to 15 say where these go.
__device__ __forceinline__ void store_turned(void *row, u32 upper, u32 lower) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(upper), "r"(lower) : "memory");
}

// An 8 x 8 matrix, two columns of a row in each lane, with its lower triangle mirrored into the upper if it is `on_diagonal`. There is no
// branch around this: with one, the compiler no longer sees that a warp's threads agree, and keeps descriptors in registers of threads.
__device__ __forceinline__ u32 mirrored(u32 own, int lane, bool on_diagonal) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(own));
  const int right = lane % 4 * 2 - lane / 4;  // of the diagonal
  const u32 taken = !on_diagonal || right < 0 ? 0u : right == 0 ? 0xffff0000u : ~0u;
  return (own & ~taken) | (turned & taken);
}

// ---- what becomes of the sums ------------------------------------------------------------------------------------------

enum Activation { NONE, RELU, SILU, GELU, GELU_TANH };

template <int ACTIVATION> __device__ __forceinline__ float activated(float x) {
  if constexpr (ACTIVATION == RELU) return x > 0.f ? x : x * 0.f;  // NaN stays
  if constexpr (ACTIVATION == SILU) return x / (1.f + __expf(-x));
  if constexpr (ACTIVATION == GELU) return 0.5f * x * (1.f + erff(x * 0.70710678f));
  if constexpr (ACTIVATION == GELU_TANH) {
    const float u = 0.79788456f * (x + 0.044715f * x * x * x);
    return x - x / (1.f + __expf(2.f * u));
  }
  return x;
}

// Columns `column`, column + 1 of a vector, as floats; 0 past its end.
template <typename O> __device__ __forceinline__ float2 two_of(const O *vector, int column, int columns) {
  float2 pair = {0.f, 0.f};
  if constexpr (sizeof(O) == 4) {
    if (column < columns) pair.x = vector[column];
    if (column + 1 < columns) pair.y = vector[column + 1];
  } else {
    u32 word = 0;
    if (column < columns) word = vector[column].bits;
    if (column + 1 < columns) word |= u32(vector[column + 1].bits) << 16;
    float f[2];
    unpack(Words<O, 2>{word}, f);
    pair = {f[0], f[1]};
  }
  return pair;
}

template <typename O> constexpr bool INTEGERS = false;
template <> constexpr bool INTEGERS<int> = true;

template <bool FIRST, typename A, typename B> __device__ __forceinline__ auto &either(A &a, B &b) {
  if constexpr (FIRST)
    return a;
  else
    return b;
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

// What a launch is given besides its tensors.
// How many scales there are: one, or as many as A has rows and B columns; what is multiplied before and with the residual.
struct Factors { int a_scales, b_scales; float alpha, beta, gamma; };

// Scales, a_scale and b_scale: none; [M] and [N], or one each; for every 128 of K (a stage of 8-bit operands) [M, K / 128] and
// [N / 128, K / 128], where N / 128 is rounded up.
enum Scales { UNSCALED, SCALED, SCALED_BY_BLOCK };

// C[z] = act(alpha scale A[z] B[z] + bias) + beta R[z], A: [M, K], B: [K, N], R, C: [M, N]. GATED: act(gate) up + beta R with
// gate = alpha scale A B + bias and up the same of the matrix of up_map; scales and bias of up follow those of B. AMAX: the largest
// |c| before it is rounded goes to *amax (which must have been set to 0); NaN counts as largest.
// The tensor cores add up fp8 products to about 14 bits; TWO_LEVELS has them add up a stage alone, half of 256 columns (a third of 192) at a time
// since registers hold no more, and adds the stages in fp32. Scales of blocks need that.
//
// STREAM: tiles that do not fill a wave are divided among all blocks by stages of K (`Walk`). A part of another block's tile goes to
// `workspace`: COLUMNS x 64 sums for each warpgroup of each block; `flags`, one for each as well, say that it is there. They are 0
// before a launch and after it. Parts are added in the order of K, so results do not depend on who was first.
//
// SYMMETRIC: A B and R are symmetric (M = N), and so is C, to the bit: what is on and below the diagonal is computed and also stored where it
// is mirrored, 64 x 64 at a time, of which a slab and its image are held. SECOND: gamma S is added as beta R is; up_map is that of S.
// R and S have elements of type Added, as wide as those of C.
//
// Maps have boxes of A: 128 rows (64 x 64 with A_ACROSS); B, up: the rows of their [N, K] view that a block fetches at a time (with
// B_ACROSS 64 columns by 64 of K, or by 32 if two blocks share 192 columns); R, C: 64 rows of 128 bytes.
template <typename T, typename O, int COLUMNS, int STAGES, int CLUSTER, bool A_ACROSS, bool B_ACROSS, int SCALES, bool TWO_LEVELS, bool BIASED,
          int ACTIVATION, bool RESIDUAL = false, bool GATED = false, bool AMAX = false, bool STREAM = false,
          bool SYMMETRIC = false, bool SECOND = false, typename Added = O>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_hopper(const float *a_scale, const float *b_scale, const O *bias, float *amax, float *workspace, u32 *flags,
                  const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap up_map,
                  const __grid_constant__ TensorMap r_map, const __grid_constant__ TensorMap c_map, Shape shape, Factors factors) {
  using Sum = typename Unit<T>::Sum;
  constexpr int DEPTH = LINE / int(sizeof(T));  // elements of K in a stage
  constexpr int A_BYTES = ROWS * LINE, B_BYTES = COLUMNS * LINE, STAGE = A_BYTES + B_BYTES;
  constexpr int WIDTH = GATED ? COLUMNS / 2 : COLUMNS;  // of C in a tile; the other half of B's columns are those of up
  constexpr int SLAB = LINE / int(sizeof(O)), SLABS = WIDTH / SLAB, HELD = SYMMETRIC || SLABS % 2 ? 1 : 2;  // of C, in columns; at a time
  constexpr int PART = COLUMNS / CLUSTER, BOX = B_ACROSS ? 64 : PART < WIDTH ? PART : WIDTH;  // of B: what a block fetches; at a time
  static_assert(!INTEGERS<O> || (INTEGERS<Sum> && !SCALES && !TWO_LEVELS && !BIASED && !ACTIVATION && !RESIDUAL && !GATED && !AMAX),
                "sums in int32 leave as they are");
  constexpr int STAGED = SYMMETRIC ? 2 : HELD, ADDED = SECOND ? 2 : HELD;  // places for C; what a residual fills of them
  static_assert(!SYMMETRIC || (sizeof(O) == 2 && !SCALES && !TWO_LEVELS && !BIASED && !ACTIVATION && !GATED && !AMAX),
                "the mirror image is of 16-bit floats, and of nothing that rows and columns do not share");
  static_assert((!SECOND || (SYMMETRIC && RESIDUAL)) && sizeof(Added) == sizeof(O), "a second residual is of symmetric products");
  // Boxes of 64 columns cannot be divided evenly if they are three: then a block fetches a part of each box's rows of K.
  constexpr bool BY_DEPTH = B_ACROSS && PART % BOX != 0;
  static_assert((PART % BOX == 0 || BY_DEPTH) && WIDTH % BOX == 0 && WIDTH % SLAB == 0, "the tile is too narrow");
  constexpr int PARTS = TWO_LEVELS && COLUMNS > 128 ? COLUMNS == 192 ? 3 : 2 : 1;  // no part has two scales of blocks
  static_assert(SCALES != SCALED_BY_BLOCK || (TWO_LEVELS && sizeof(T) == 1 && !GATED), "a stage of 8-bit operands is a block of scales");
  static_assert(!TWO_LEVELS || !(A_ACROSS || B_ACROSS), "only what lies along K");
  extern __shared__ __align__(1024) unsigned char dynamic[];  // all there is: the swizzle asks for 1024 bytes' alignment
  unsigned char *ring = dynamic, *out = ring + STAGES * STAGE;
  u64 *full = reinterpret_cast<u64 *>(out + 2 * STAGED * ATOM), *empty = full + STAGES, *residual = empty + STAGES;

  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0), rank = CLUSTER > 1 ? int(cluster_rank()) : 0;
  const Order<SYMMETRIC, ROWS * CLUSTER, WIDTH> tiles = {(shape.m + ROWS * CLUSTER - 1) / (ROWS * CLUSTER), (shape.n + WIDTH - 1) / WIDTH, shape.matrices, shape.group};
  const int depths = (shape.k + DEPTH - 1) / DEPTH, first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  Walk<STREAM> walk(first, step, tiles.count(), depths, shape);

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], CONSUMERS / 32 * CLUSTER);  // the warps of every block that reads what this one fetches
    }
    for (int c = 0; c < 2; c++) barrier_init(&residual[c], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }

  if (warpgroup == 0) {
    // ---- the producer: one thread ----
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (__shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) == 0 && elected()) {
      int place = 0;
      u32 parity = 1;  // a fresh place counts as emptied
      while (walk.next()) {
        int row, column, matrix;
        tiles.at(walk.tile, row, column, matrix);
        row = (row * CLUSTER + rank) * ROWS, column *= WIDTH;
        for (int depth = walk.from * DEPTH; depth < walk.to * DEPTH; depth += DEPTH) {
          barrier_wait(&empty[place], parity);
          barrier_expect(&full[place], STAGE);
          unsigned char *a = ring + place * STAGE, *b = a + A_BYTES;
          if constexpr (A_ACROSS) {
            for (int r = 0; r < ROWS; r += 64) fetch(a + r * LINE, a_map, row + r, depth, matrix, &full[place]);
          } else {
            fetch(a, a_map, depth, row, matrix, &full[place]);
          }
#pragma unroll
          for (int i = 0; i < (BY_DEPTH ? COLUMNS : PART); i += BOX) {
            const int c = BY_DEPTH ? i : rank * PART + i, deeper = BY_DEPTH ? rank * (DEPTH / CLUSTER) : 0;
            const TensorMap &map = GATED && c >= WIDTH ? up_map : b_map;
            const int from = column + c % WIDTH, x = B_ACROSS ? from : depth, y = B_ACROSS ? depth + deeper : from;
            if constexpr (CLUSTER > 1)
              fetch_for((1 << CLUSTER) - 1, b + (c + deeper) * LINE, map, x, y, matrix, &full[place]);
            else
              fetch(b + c * LINE, map, x, y, matrix, &full[place]);
          }
          if (++place == STAGES) place = 0, parity ^= 1;
        }
      }
      // No block leaves while another may still write into it, or arrive at it: whoever does has read a stage, or lets it be read.
      for (int s = 0; CLUSTER > 1 && s < STAGES; s++) {
        barrier_wait(&empty[place], parity);
        if (++place == STAGES) place = 0, parity ^= 1;
      }
    }
  } else {
    // ---- the consumers: 64 rows each ----
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int mine = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    unsigned char *staged = out + mine * STAGED * ATOM;
    // Bytes from one step of wgmma's K to the next: within a swizzled line, or two groups of 8 rows further.
    constexpr u64 A_STEP = (A_ACROSS ? 2 * 8 * LINE : 32) >> 4, B_STEP = (B_ACROSS ? 2 * 8 * LINE : 32) >> 4;
    // By every warp: waiting for a product says nothing about the rows of other warps.
    auto release = [&](int place) {
      if (lane < CLUSTER) barrier_arrive(&empty[place], lane);
    };
    // The residual of the next slabs comes to where C is going to be staged, as soon as what was put before has left.
    auto fetch_residual = [&](int row, int column, int matrix) {
      if (SYMMETRIC && column > row) return;  // nothing of it is stored
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      barrier_expect(&residual[mine], ADDED * ATOM);
      for (int slab = 0; slab < HELD; slab++) fetch(staged + slab * ATOM, r_map, column + slab * SLAB, row, matrix, &residual[mine]);
      if constexpr (SECOND) fetch(staged + ATOM, up_map, column, row, matrix, &residual[mine]);
    };
    int place = 0, before = 0;
    u32 parity = 0, residual_parity = 0, largest = 0;
    while (walk.next()) {
      int row, column, matrix;
      tiles.at(walk.tile, row, column, matrix);
      row = (row * CLUSTER + rank) * ROWS + mine * 64, column *= WIDTH;
      if (RESIDUAL && thread == 0 && walk.from == 0) fetch_residual(row, column, matrix);
      Sum sums[COLUMNS / PARTS / 2];
      float totals[TWO_LEVELS ? COLUMNS / 2 : 1];
      const float *a_next[2], *b_next[PARTS];  // the next stage's scales
      float a_by[2], b_by[PARTS];
      if constexpr (TWO_LEVELS) {
#pragma unroll
        for (int c = 0; c < COLUMNS / 2; c++) totals[c] = 0.f;
      }
      if (SCALES == SCALED_BY_BLOCK && depths) {
#pragma unroll
        for (int h = 0; h < 2; h++) a_by[h] = *(a_next[h] = a_scale + i64(min(row + 16 * warp + lane / 4 + 8 * h, shape.m - 1)) * depths + walk.from);
#pragma unroll
        for (int p = 0; p < PARTS; p++) b_by[p] = *(b_next[p] = b_scale + i64(min((column + p * (COLUMNS / PARTS)) / 128, (shape.n - 1) / 128)) * depths + walk.from);
      }
      for (int depth = walk.from; depth < walk.to; depth++) {
        barrier_wait(&full[place], parity);
        const u32 a_at = shared_address(ring + place * STAGE) + mine * ATOM, b_at = shared_address(ring + place * STAGE) + A_BYTES;
        const u64 a = descriptor(a_at, 0), b = descriptor(b_at, B_ACROSS ? ATOM : 0);
        if constexpr (TWO_LEVELS) {
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            hold(sums);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++)
              Unit<T>::template multiply<COLUMNS / PARTS, false, false>(sums, a + s * A_STEP, b + p * (COLUMNS / PARTS * LINE >> 4) + s * B_STEP, s != 0);
            wgmma_commit();
            wgmma_wait<0>();  // the other warpgroup's products go on
            hold(sums);
            if (p + 1 == PARTS) release(place);
            const float by[2] = {SCALES == SCALED_BY_BLOCK ? a_by[0] * b_by[p] : 1.f, SCALES == SCALED_BY_BLOCK ? a_by[1] * b_by[p] : 1.f};
#pragma unroll
            for (int c = 0; c < COLUMNS / PARTS / 2; c++) {
              float &total = totals[p * COLUMNS / PARTS / 2 + c];
              total = SCALES == SCALED_BY_BLOCK ? float(sums[c]) * by[c % 4 / 2] + total : float(sums[c]) + total;
            }
          }
          if (SCALES == SCALED_BY_BLOCK && depth + 1 < walk.to) {  // there before the next stage's sums are
#pragma unroll
            for (int h = 0; h < 2; h++) a_by[h] = *++a_next[h];
#pragma unroll
            for (int p = 0; p < PARTS; p++) b_by[p] = *++b_next[p];
          }
        } else {
          hold(sums);
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < 4; s++)
            Unit<T>::template multiply<COLUMNS, A_ACROSS, B_ACROSS>(sums, a + s * A_STEP, b + s * B_STEP, depth - walk.from + s != 0);
          wgmma_commit();
          wgmma_wait<1>();  // the products of the place before are done
          hold(sums);
          if (depth != walk.from) release(before);
          before = place;
        }
        if (++place == STAGES) place = 0, parity ^= 1;
      }
      if constexpr (!TWO_LEVELS) {
        wgmma_wait<0>();
        hold(sums);
        if (depths) release(before);
        if (!depths) {
#pragma unroll
          for (int e = 0; e < COLUMNS / 2; e++) sums[e] = 0;
        }
      }

      if constexpr (STREAM) {
        auto &part = either<TWO_LEVELS>(totals, sums);
        auto *const parts = reinterpret_cast<decltype(&part[0])>(workspace);
        const auto slot = [&](int block) { return parts + i64(2 * block + mine) * (64 * COLUMNS); };
        if (walk.from) {
          give(slot(blockIdx.x), part, flags + 2 * blockIdx.x + mine, thread, 1 + mine);
          continue;
        }
        for (int share = walk.share + 1; walk.to < depths && walk.begin_of(share) < (walk.tile + 1) * depths; share++) {
          const int block = blockIdx.x - (share - walk.share) * CLUSTER;
          take(part, slot(block), flags + 2 * block + mine, thread, 1 + mine);
        }
      }

      // ---- C: rows 16 warp + lane / 4 (+ 8), columns 8 j + 2 (lane % 4) (+ 1) are this thread's ----
      float by_row[2] = {1.f, 1.f};
      if constexpr (SCALES == SCALED) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = row + 16 * warp + lane / 4 + 8 * h;
          by_row[h] = factors.a_scales == 1 ? a_scale[0] : r < shape.m ? a_scale[r] : 0.f;
        }
      }
      // Of the product with B (half 0) or up (half 1): two columns from c on, whose sums are the `of`th four.
      auto scaled = [&](int half, int of, int c, float (&v)[4]) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = 4 * (of + half * WIDTH / 8) + e;
          if constexpr (TWO_LEVELS)
            v[e] = totals[i];
          else
            v[e] = INTEGERS<O> ? __uint_as_float(u32(sums[i])) : float(sums[i]);
        }
        if constexpr (SCALES == SCALED) {
          const float *scale = b_scale + half * (factors.b_scales == 1 ? 1 : shape.n);
          const float2 by = factors.b_scales == 1 ? float2{scale[0], scale[0]} : two_of(scale, c, shape.n);
#pragma unroll
          for (int e = 0; e < 4; e++) v[e] *= by_row[e / 2] * (e % 2 ? by.y : by.x);
        }
#pragma unroll
        for (int e = 0; RESIDUAL && e < 4; e++) v[e] *= factors.alpha;
        if constexpr (BIASED) {
          const float2 plus = two_of(bias + half * shape.n, c, shape.n);
#pragma unroll
          for (int e = 0; e < 4; e++) v[e] += e % 2 ? plus.y : plus.x;
        }
      };
#pragma unroll
      for (int held = 0; held < SLABS; held += HELD) {
        if (SYMMETRIC && column + held * SLAB > row) continue;  // above the diagonal; with `break` the compiler loses sight of uniform descriptors
        const bool diagonal = SYMMETRIC && column + held * SLAB == row;
        if constexpr (RESIDUAL) {
          barrier_wait(&residual[mine], residual_parity);
          residual_parity ^= 1;
        } else {
          asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // what was put before has left its place
          group_barrier(1 + mine);
        }
#pragma unroll
        for (int slab = 0; slab < HELD; slab++) {
          unsigned char *place_of_c = staged + slab * ATOM;
          // The 16 bytes of a row change places with the row's number, as in TMA's swizzle.
          auto mine_of_c = [&](int j, int h) {
            const int r = 16 * warp + lane / 4 + 8 * h, sixteen = sizeof(O) == 2 ? j : 2 * j + lane % 4 / 2;
            return place_of_c + r * LINE + ((sixteen ^ r % 8) * 16) + (sizeof(O) == 2 ? lane % 4 * 4 : lane % 2 * 8);
          };
          float values[SLAB / 8][4];
#pragma unroll
          for (int j = 0; j < SLAB / 8; j++) {  // before the first store: no scale is waited for alone
            const int of = (held + slab) * SLAB / 8 + j, c = column + 8 * of + 2 * (lane % 4);
            float(&v)[4] = values[j];
            scaled(0, of, c, v);
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = activated<ACTIVATION>(v[e]);
            if constexpr (GATED) {
              float up[4];
              scaled(1, of, c, up);
#pragma unroll
              for (int e = 0; e < 4; e++) v[e] *= up[e];
            }
            if constexpr (RESIDUAL) {
#pragma unroll
              for (int h = 0; h < 2; h++) {
                float r[2];
                unpack(*reinterpret_cast<const Words<Added, 2> *>(mine_of_c(j, h)), r);
                v[2 * h] += factors.beta * r[0], v[2 * h + 1] += factors.beta * r[1];
                if constexpr (SECOND) {
                  unpack(*reinterpret_cast<const Words<Added, 2> *>(mine_of_c(j, h) + ATOM), r);
                  v[2 * h] += factors.gamma * r[0], v[2 * h + 1] += factors.gamma * r[1];
                }
              }
            }
#pragma unroll
            for (int e = 0; AMAX && e < 4; e++)
              if (row + 16 * warp + lane / 4 + e / 2 * 8 < shape.m && c + e % 2 < shape.n) largest = max(largest, __float_as_uint(fabsf(v[e])));
          }
          if constexpr (SECOND) group_barrier(1 + mine);  // other warps' images go to where S was; on the diagonal to an upper half of R, unused
#pragma unroll
          for (int j = 0; j < SLAB / 8; j++) {
            const float(&v)[4] = values[j];
            if constexpr (SYMMETRIC) {
              // On the diagonal the lower half and its image go to one place, the upper half and its own to another, which is not put.
              unsigned char *const image = place_of_c + ATOM;
              u32 upper = pack_pair(O{}, v[0], v[1]), lower = pack_pair(O{}, v[2], v[3]);
              (j % 2 ? lower : upper) = mirrored(j % 2 ? lower : upper, lane, diagonal && j / 2 == warp);
              const int eight = 2 * warp + lane / 8 % 2, r = lane % 8;  // of the slab's rows: which, and which of them
              const auto to = [&](unsigned char *slab, int eight_rows, int sixteen) {
                return slab + (8 * eight_rows + r) * LINE + (sixteen ^ r) * 16;
              };
              asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(
                               shared_address(to(diagonal && j > eight ? image : place_of_c, eight, j))),
                           "r"(upper), "r"(lower)
                           : "memory");
              store_turned(to(diagonal && j < eight ? place_of_c : image, j, eight), upper, lower);
            } else if constexpr (sizeof(O) == 2) {  // 8 rows of 16 bytes a matrix
              const u32 upper = pack_pair(O{}, v[0], v[1]), lower = pack_pair(O{}, v[2], v[3]);
              const int r = 16 * warp + lane % 16;
              asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(
                               shared_address(place_of_c + r * LINE + ((j ^ r % 8) * 16))),
                           "r"(upper), "r"(lower)
                           : "memory");
            } else {
#pragma unroll
              for (int h = 0; h < 2; h++) *reinterpret_cast<float2 *>(mine_of_c(j, h)) = {v[2 * h], v[2 * h + 1]};
            }
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        group_barrier(1 + mine);
        if (thread == 0) {
#pragma unroll
          for (int slab = 0; slab < HELD; slab++) put(c_map, staged + slab * ATOM, column + (held + slab) * SLAB, row, matrix);
          if (SYMMETRIC && !diagonal) put(c_map, staged + ATOM, row, column + held * SLAB, matrix);
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
          if (RESIDUAL && held + HELD < SLABS) fetch_residual(row, column + (held + HELD) * SLAB, matrix);
        }
      }
    }
    if constexpr (AMAX) {
      largest = __reduce_max_sync(0xffffffffu, largest);  // as integers, floats that are not negative have the same order
      if (lane == 0) atomicMax(reinterpret_cast<u32 *>(amax), largest);
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
