// The warpgroup that fetches on Hopper (sm_90a): one thread fills a ring of stages, well ahead of the warpgroups that multiply.
#pragma once
#include "hopper_groups.cuh"
#include "hopper_pipeline.cuh"
#include "hopper_tiles.cuh"

// Fetches A and B of every tile of `walk` into the ring, as soon as a place is empty. DEPTH: elements of K in a stage. A tile takes
// COLUMNS of B, WIDTH of C; with GATED those past WIDTH are of up_map. Of a cluster each block, by its `rank`, fetches a part of B for all,
// or with ABREAST of A.
template <int COLUMNS, int WIDTH, int DEPTH, int STAGES, int CLUSTER, bool A_ACROSS, bool B_ACROSS, bool GATED, int GROUPED, bool ABREAST,
          bool STREAM, typename Order>
__device__ __forceinline__ void produce(Walk<STREAM> &walk, Order &tiles, const Shape &shape, int rank, unsigned char *ring, u64 *full,
                                        u64 *empty, const TensorMap &a_map, const TensorMap &b_map, const TensorMap &up_map) {
  constexpr int A_BYTES = ROWS * LINE, STAGE = A_BYTES + COLUMNS * LINE;
  constexpr int STACKED = ABREAST ? 1 : CLUSTER, BESIDE = ABREAST ? CLUSTER : 1;  // blocks on one another, beside one another
  constexpr int PART = COLUMNS / STACKED, BOX = B_ACROSS ? 64 : PART < WIDTH ? PART : WIDTH;  // of B: what a block fetches; at a time
  // Boxes of 64 columns cannot be divided evenly if they are three: then a block fetches a part of each box's rows of K.
  constexpr bool BY_DEPTH = B_ACROSS && PART % BOX != 0;
  static_assert((PART % BOX == 0 || BY_DEPTH) && WIDTH % BOX == 0, "the tile is too narrow");
  static_assert(!ABREAST || CLUSTER == 2, "blocks beside one another fetch 64 rows of A each");
  const int rank_down = ABREAST ? 0 : rank, rank_beside = ABREAST ? rank : 0;
  int place = 0;
  u32 parity = 1;  // a fresh place counts as emptied
  while (walk.next()) {
    int row, column, matrix;
    tiles.at(walk.tile, row, column, matrix);
    row = (row * STACKED + rank_down) * ROWS, column = (column * BESIDE + rank_beside) * WIDTH;
    if constexpr (GROUPED == ROWS_IN_GROUPS) row = matrix < shape.matrices ? tiles.begin + row : shape.m;  // zeros for rows past all groups
    if constexpr (GROUPED == TERMS_IN_GROUPS) walk.to = (tiles.end - tiles.begin + DEPTH - 1) / DEPTH;
    for (int depth = walk.from * DEPTH; depth < walk.to * DEPTH; depth += DEPTH) {
      // Where terms begin, and in which matrix of A and of B; of a group of terms no more than are left (hopper_groups.cuh).
      const int left = min(DEPTH, tiles.end - tiles.begin - depth), down = GROUPED == TERMS_IN_GROUPS ? left - DEPTH : depth;
      const int of_b = GROUPED == TERMS_IN_GROUPS ? tiles.begin + depth : matrix, of_a = GROUPED == ROWS_IN_GROUPS ? 0 : of_b;
      barrier_wait(&empty[place], parity);
      barrier_expect(&full[place], STAGE);
      unsigned char *a = ring + place * STAGE, *b = a + A_BYTES;
      if constexpr (ABREAST) {
        const int r = rank * 64;
        fetch_for((1 << CLUSTER) - 1, a + r * LINE, a_map, A_ACROSS ? row + r : depth, A_ACROSS ? down : row + r, of_a, &full[place]);
      } else if constexpr (A_ACROSS) {
        for (int r = 0; r < ROWS; r += 64) fetch(a + r * LINE, a_map, row + r, down, of_a, &full[place]);
      } else {
        fetch(a, a_map, depth, row, of_a, &full[place]);
      }
#pragma unroll
      for (int i = 0; i < (BY_DEPTH ? COLUMNS : PART); i += BOX) {
        const int c = BY_DEPTH ? i : rank_down * PART + i, deeper = BY_DEPTH ? rank_down * (DEPTH / CLUSTER) : 0;
        const TensorMap &map = GATED && c >= WIDTH ? up_map : b_map;
        const int from = column + c % WIDTH, x = B_ACROSS ? from : depth, y = B_ACROSS ? down + deeper : from;
        if constexpr (STACKED > 1)
          fetch_for((1 << CLUSTER) - 1, b + (c + deeper) * LINE, map, x, y, of_b, &full[place]);
        else
          fetch(b + c * LINE, map, x, y, of_b, &full[place]);
      }
      if (++place == STAGES) place = 0, parity ^= 1;
    }
  }
  // No block exits while another may still write into it or arrive at its barriers: wait until every stage has been read.
  for (int s = 0; CLUSTER > 1 && s < STAGES; s++) {
    barrier_wait(&empty[place], parity);
    if (++place == STAGES) place = 0, parity ^= 1;
  }
}
