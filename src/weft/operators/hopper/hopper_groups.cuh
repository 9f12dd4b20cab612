// Products of groups whose sizes are known to the device alone: rows of A with a matrix of B for each group, or groups of terms.
#pragma once
#include "hopper_pipeline.cuh"
#include "hopper_tiles.cuh"

// WHOLE: no groups. ROWS_IN_GROUPS: rows begin to end - 1 of A and C have the e-th matrix of B; rows past all groups become zeros.
// TERMS_IN_GROUPS: the e-th matrix of C is the sum over terms begin to end - 1, which are rows of A and of B.
//
// A tile of rows may end in the next group, and so may a stage of terms. What must not be stored, or must be read as zeros, lies outside of the
// map. Those of A and B [terms] have dimensions (columns, 64, rows), the last two with the same step: the box at (x, count - 64, row) ends with
// `count` rows from `row` on, after zeros, and the order of terms in a stage is kept. A store at negative coordinates is an illegal instruction (on
// an H200), so that of C [rows] ends instead: `put_rows`.
enum Grouped { WHOLE, ROWS_IN_GROUPS, TERMS_IN_GROUPS };

// Group e has rows offsets[e] to offsets[e + 1] - 1 (offsets[0] counts as 0), number `groups` those past all others. Offsets are
// held to 0 … rows, so that a wrong one reaches nothing outside of a tensor.
struct Offsets {
  const int *offsets;
  int groups, rows;
  __device__ __forceinline__ int begin(int e) const { return e == 0 ? 0 : min(max(offsets[e], 0), rows); }
  __device__ __forceinline__ int end(int e) const { return e < groups ? begin(e + 1) : rows; }
};

// Stores the first `count` rows of a slab of 64, to row `row` and those that follow. The map's dimensions are (columns, PAST, rows + 1, PAST + 1): of the
// second only `count` are left from PAST - count on, the third takes what that lacks to row, less PAST rows, and the last brings them back: its
// step is 2^34 bytes less a row, and PAST times 2^34 is 2^64.
__device__ __forceinline__ void put_rows(const TensorMap &map, const void *from, int x, int row, int count) {
  constexpr int PAST = 1 << 30;
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(shared_address(from)), "r"(x),
               "r"(PAST - count), "r"(row + count), "r"(PAST)
               : "memory");
}

// What all lanes of a warp agree on, so that the compiler sees it: what is loaded may differ, for all it knows.
__device__ __forceinline__ int agreed(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Tiles of HEIGHT x WIDTH, one after another, and the rows or terms of the group that the last one asked for belongs to.
template <int GROUPED, bool SYMMETRIC, int HEIGHT, int WIDTH> struct Schedule : Order<SYMMETRIC, HEIGHT, WIDTH> {
  __device__ __forceinline__ Schedule(const Shape &shape, const int *, const i64 *, int)
      : Order<SYMMETRIC, HEIGHT, WIDTH>{(shape.m + HEIGHT - 1) / HEIGHT, (shape.n + WIDTH - 1) / WIDTH, shape.matrices, shape.group} {}
  __device__ __forceinline__ void agree() {}
  static constexpr int begin = 0, end = 0;
};

// Groups one after another, each with as many rows of tiles as it needs. Whoever asks asks in rising order: groups are passed once.
template <int HEIGHT, int WIDTH> struct Schedule<ROWS_IN_GROUPS, false, HEIGHT, WIDTH> {
  const Offsets of;
  const int columns, height;
  int e = -1, before = 0, here = 0;  // the group; tiles of those before it, and of itself
  int begin = 0, end = 0;

  __device__ __forceinline__ Schedule(const Shape &shape, const int *offsets, const i64 *, int)
      : of{offsets, shape.matrices, shape.m}, columns((shape.n + WIDTH - 1) / WIDTH), height(shape.group) {}
  static __device__ __forceinline__ int rows(int begin, int end) { return max(end - begin + HEIGHT - 1, 0) / HEIGHT; }
  // By a whole warp.
  __device__ __forceinline__ int count() const {
    int sum = 0;
    for (int i = threadIdx.x % 32; i <= of.groups; i += 32) sum += rows(of.begin(i), of.end(i));
    return int(__reduce_add_sync(0xffffffffu, u32(sum))) * columns;
  }
  __device__ __forceinline__ void at(int i, int &row, int &column, int &matrix) {
    while (i - before >= here) {
      before += here, begin = end, end = of.end(++e);
      here = rows(begin, end) * columns;
    }
    Tiles{rows(begin, end), columns, 1, height}.at(i - before, row, column, matrix);
    matrix = e;
  }
  __device__ __forceinline__ void agree() { begin = agreed(begin), end = agreed(end); }
};

// All tiles of a group, then those of the next in `order`, which falls by size. Clusters take them in turns, every second time from the
// last to the first, so that none has the larger of two groups each time.
template <int HEIGHT, int WIDTH> struct Schedule<TERMS_IN_GROUPS, false, HEIGHT, WIDTH> : Schedule<WHOLE, false, HEIGHT, WIDTH> {
  using Tiled = Schedule<WHOLE, false, HEIGHT, WIDTH>;
  const Offsets of;
  const i64 *order;
  const int clusters;
  int begin = 0, end = 0;

  __device__ __forceinline__ Schedule(const Shape &shape, const int *offsets, const i64 *order, int clusters)
      : Tiled(shape, offsets, order, clusters), of{offsets, shape.matrices, shape.k}, order(order), clusters(clusters) {}
  __device__ __forceinline__ void at(int i, int &row, int &column, int &matrix) {
    const int turn = i / clusters, first = turn * clusters;
    if (turn % 2 && first + clusters <= this->count()) i = 2 * first + clusters - 1 - i;
    Tiled::at(i, row, column, matrix);
    matrix = int(order[matrix]);
    begin = of.begin(matrix), end = max(begin, of.end(matrix));
  }
  __device__ __forceinline__ void agree() { begin = agreed(begin), end = agreed(end); }
};
