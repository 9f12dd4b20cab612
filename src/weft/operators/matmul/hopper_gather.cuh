// Rows of A from anywhere on Hopper (sm_90a): TMA gathers none there, so three warps copy them to where it would have put them.
#pragma once
#include "hopper_groups.cuh"
#include "hopper_pipeline.cuh"

constexpr int GATHERERS = 3;  // the warps beside the one that fetches B

// 16 bytes past the registers to shared memory: `bytes` of them are read, the others become zeros.
__device__ __forceinline__ void copy_sixteen(void *to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

// Tells a place full when this warp's copies are done but for the `PENDING` last stages of them, and wgmma sees what they wrote.
template <int PENDING> __device__ __forceinline__ void gathered(u64 *full, int rank, int lane) {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (lane == 0) barrier_arrive(full, rank);
}

// Row r of A is row source[r] of x [shape.tokens, K], `shape.step` elements from one to the next; NaN where x has no such row, and zeros from a
// group's end on. STAGE: bytes of a stage, A first.
template <typename T, int STAGE, int STAGES, int CLUSTER, typename Pace, typename Order>
__device__ __forceinline__ void gather(Pace &walk, Order &tiles, const Shape &shape, int rank, unsigned char *ring, u64 *full, u64 *empty,
                                       const T *x, const int *source) {
  constexpr int DEPTH = LINE / int(sizeof(T)), SIXTEEN = 16 / int(sizeof(T));
  constexpr int FOURS = ROWS / 4, EACH = (FOURS + GATHERERS - 1) / GATHERERS;  // a warp copies 4 rows at a time
  constexpr int PENDING = STAGES > 3 ? 2 : 1;  // stages under way; with one more, who frees a place would wait for who fills it
  static_assert(STAGES >= 3, "a place is told full after others have been begun");
  constexpr int UNKNOWN = -1, NONE_LEFT = -2;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) - 1, sixteen = lane % 8;
  // Where this lane's part of its first two rows goes; two turns on the rows are 24 further, and swizzled alike.
  const int first = 4 * warp + lane / 8, second = first + 4 * GATHERERS;
  const int to_first = first * LINE + (sixteen ^ first % 8) * 16, to_second = second * LINE + (sixteen ^ second % 8) * 16;
  int place = 0, oldest = 0, begun = 0;
  u32 phase = 1;  // as of the one that fetches
  while (walk.next()) {
    int row, column, matrix, from[EACH];
    tiles.at(walk.tile, row, column, matrix);
    row = tiles.begin + (row * CLUSTER + rank) * ROWS;
    const int end = matrix < shape.matrices ? tiles.end : row;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int r = row + 4 * (warp + GATHERERS * i) + lane / 8;
      from[i] = r < end ? source[r] : NONE_LEFT;
      if (r < end && u32(from[i]) >= u32(shape.tokens)) from[i] = UNKNOWN;
    }
    for (int depth = walk.from * DEPTH; depth < walk.to * DEPTH; depth += DEPTH) {
      barrier_wait(&empty[place], phase);
      const int k = depth + SIXTEEN * sixteen, there = max(0, min(16, (shape.k - k) * int(sizeof(T))));
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (warp + GATHERERS * i >= FOURS) continue;
        asm volatile("" : "+r"(from[i]));  // or the compiler keeps addresses of 64 bits of all rows, more registers than there are
        unsigned char *to = ring + place * STAGE + (i % 2 ? to_second : to_first) + i / 2 * 8 * GATHERERS * LINE;
        const int bytes = from[i] < 0 ? 0 : there;
        if (from[i] == UNKNOWN) {
#pragma unroll
          for (int w = 0; w < 4; w++) reinterpret_cast<u32 *>(to)[w] = 0x7fff7fffu;  // NaN in both 16-bit floats
        } else {
          copy_sixteen(to, bytes ? x + i64(from[i]) * shape.step + k : x, bytes);
        }
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      if (++begun > PENDING) {
        gathered<PENDING>(&full[oldest], rank, lane);
        if (++oldest == STAGES) oldest = 0;
      }
      if (++place == STAGES) place = 0, phase ^= 1;
    }
  }
  for (; oldest != place; oldest = oldest + 1 == STAGES ? 0 : oldest + 1) gathered<0>(&full[oldest], rank, lane);
}
