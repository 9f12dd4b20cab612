// Kernels over memory that every rank of a host maps: the peers' addresses, the number of a call, and how blocks of the same
// number on all ranks meet. A buffer begins with the call's number and a count of blocks; flags of two meetings are at 256.
#pragma once
#include "prelude.cuh"

constexpr int MOST_RANKS = 8, MOST_BLOCKS = 256;

struct Peers {
  u64 base[MOST_RANKS];  // each rank's buffer, at this rank's address for it
};

// Rank r's, without an index into the parameters, which would put them on the stack.
template <int N> __device__ __forceinline__ u64 base_of(const Peers &peers, u32 r) {
  u64 p = peers.base[0];
#pragma unroll
  for (int k = 1; k < N; k++)
    if (k == r) p = peers.base[k];
  return p;
}

__device__ __forceinline__ u32 read_word(const void *p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u32 acquire(const void *p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void release(void *p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// The number of this call. Every block reads it before the last one to end (`finish`) counts on.
__device__ __forceinline__ u32 begin(const char *mine) { return read_word(mine) + 1; }

__device__ __forceinline__ void finish(char *mine, u32 call) {
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 *const state = reinterpret_cast<u32 *>(mine);
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(state + 1) : "memory");
    if (before == gridDim.x - 1) {
      state[1] = 0;
      state[0] = call;
    }
  }
}

// A block tells the blocks of its number on the other ranks that what it has sent in this call is there: flags only grow.
// `kind` 0 or 1: of two meetings.
__device__ __forceinline__ u64 flags_of(int kind) { return 256 + u64(kind * MOST_BLOCKS + blockIdx.x) * MOST_RANKS * 4; }

template <int N> __device__ __forceinline__ void tell(const Peers &peers, u32 rank, int kind, u32 call) {
  __syncthreads();
  const u32 r = threadIdx.x;
  if (r < N && r != rank) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    release(reinterpret_cast<void *>(base_of<N>(peers, r) + flags_of(kind) + rank * 4), call);
  }
}

template <int N> __device__ __forceinline__ void await(const char *mine, u32 rank, int kind, u32 call) {
  const u32 r = threadIdx.x;
  if (r < N && r != rank)
    while (int(acquire(mine + flags_of(kind) + r * 4) - call) < 0) {  // another rank may be further
    }
  __syncthreads();
}

template <typename T, int C> __device__ __forceinline__ void add(float (&sum)[C], const Words<T, C> &w) {
  float f[C];
  unpack(w, f);
#pragma unroll
  for (int i = 0; i < C; i++) sum[i] += f[i];
}
