// The warpgroup that fetches on Hopper (sm_90a): one thread fills a ring of stages, well ahead of the warpgroups that multiply.
#pragma once
#include "hopper_pipeline.cuh"
#include "hopper_tiles.cuh"

// Fetches A and B of every tile of `walk` into the ring, as soon as a place is empty. DEPTH: elements of K in a stage. A tile takes
// COLUMNS of B, WIDTH of C; with GATED those past WIDTH are of up_map. Of a cluster each block, by its `rank`, fetches a part of B for all.
template <int COLUMNS, int WIDTH, int DEPTH, int STAGES, int CLUSTER, bool A_ACROSS, bool B_ACROSS, bool GATED, bool STREAM, typename Order>
__device__ __forceinline__ void produce(Walk<STREAM> &walk, const Order &tiles, int rank, unsigned char *ring, u64 *full, u64 *empty,
                                        const TensorMap &a_map, const TensorMap &b_map, const TensorMap &up_map) {
  constexpr int A_BYTES = ROWS * LINE, STAGE = A_BYTES + COLUMNS * LINE;
  constexpr int PART = COLUMNS / CLUSTER, BOX = B_ACROSS ? 64 : PART < WIDTH ? PART : WIDTH;  // of B: what a block fetches; at a time
  // Boxes of 64 columns cannot be divided evenly if they are three: then a block fetches a part of each box's rows of K.
  constexpr bool BY_DEPTH = B_ACROSS && PART % BOX != 0;
  static_assert((PART % BOX == 0 || BY_DEPTH) && WIDTH % BOX == 0, "the tile is too narrow");
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
