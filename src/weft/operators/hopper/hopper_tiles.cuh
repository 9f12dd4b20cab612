// Which block computes which tile of C, and when: all tiles or those of a triangle, whole or in shares of stages.
#pragma once
#include "prelude.cuh"

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
// are clusters; the other tiles are whole waves. The block with the first stages of a tile owns it and waits for the others' sums.
// A share begins with another block's tile, and cluster i has the i-th share from the end: so the sums that an owner waits for
// wait for no other block, were begun by blocks launched before, and are complete already if a share is longer than a tile.
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

// ---- the tiles of a symmetric matrix --------------------------------------------------------------------------------

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
