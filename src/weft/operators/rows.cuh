// Long rows, spread over clusters of blocks (sm_90 and later): block r of a cluster takes slice r of a row, THREADS * EACH
// elements, and keeps it in registers in memory's format, so device memory is read once. What a kernel does with its
// slice is its own; `exchange` brings one value of each block to all, through distributed shared memory.
#pragma once
#include "prelude.cuh"

constexpr int MAX_CLUSTER = 16;

// 64 registers a thread: several blocks share a multiprocessor, and one loads while another computes.
template <int THREADS> constexpr int BLOCKS = 1024 / THREADS;

template <typename T, typename V, int THREADS, int EACH> struct RowSlice {
  static constexpr int COUNT = 16 / sizeof(T);  // elements an access
  static constexpr int VECTORS = EACH / COUNT;  // accesses a thread
  struct Shared {
    u64 told;  // every block's value has arrived
    alignas(16) V per_block[MAX_CLUSTER];
    alignas(16) V per_warp[THREADS / 32];
  };

  u32 rank, blocks;
  i64 row, first;  // the row, and where in it the slice begins
  int elements;    // of the slice that exist: THREADS * EACH, less at the end of a row

  __device__ __forceinline__ RowSlice(i64 N, Shared &shared) : rank(cluster_rank()), blocks(cluster_blocks()) {
    row = blockIdx.x / blocks;
    first = i64(rank) * THREADS * EACH;
    elements = int(max(i64(0), min(N - first, i64(THREADS * EACH))));
    if (blocks > 1) {
      if (threadIdx.x == 0) {
        barrier_init(&shared.told);
        barrier_expect(&shared.told, blocks * sizeof(V));
      }
      cluster_arrive();  // its wait is before the exchange: loads are in flight between them
    }
  }

  // Element of the slice that vector v of this thread begins at.
  __device__ __forceinline__ int at(int v) const { return (v * THREADS + threadIdx.x) * COUNT; }

  // All vectors of this thread are loaded before any is used; `fill` is the value beyond the end of the row.
  __device__ __forceinline__ void load(const T *x, i64 x_row, Words<T, COUNT> (&w)[VECTORS], u32 fill) const {
    x += row * x_row + first;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
#pragma unroll
      for (int i = 0; i < 4; i++) w[v].word[i] = fill;
      if (at(v) < elements) w[v] = load_stream<T, COUNT>(x + at(v));
    }
  }

  // Takes each warp's value and `combine`s 32 lanes' at a time (`empty` where there are fewer): what all blocks give.
  template <typename F> __device__ __forceinline__ V exchange(V of_warp, V empty, F combine, Shared &shared) const {
    const u32 lane = threadIdx.x % 32;
    if (lane == 0) shared.per_warp[threadIdx.x / 32] = of_warp;
    __syncthreads();
    const V of_block = combine(lane < THREADS / 32 ? shared.per_warp[lane] : empty);
    if (blocks == 1) return of_block;
    cluster_wait();  // all blocks' barriers are there
    if (threadIdx.x < blocks) store_remote(&shared.per_block[rank], threadIdx.x, of_block, &shared.told);
    barrier_wait(&shared.told);
    return combine(lane < blocks ? shared.per_block[lane] : empty);
  }
};
