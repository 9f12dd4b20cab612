// All-reduces over memory that every rank maps (no NVLink multicast). Ranks write into each other's buffers: a write over
// NVLink is posted and a read waits for its answer.
//
//   one_shot_flagged  every rank sends its whole input; each 8 bytes carry 4 of data and a flag, so data need no fence and no
//                     second message (NCCL's LL protocol): half of the bandwidth, the least latency
//   one_shot          every rank sends its whole input, then a flag a block behind a fence
//   two_shot          every rank gets one part of every input, adds, and sends the sums: 2 (n - 1)/n instead of n - 1 sizes
//   add_rms_norm      one_shot, flagged or not, a row a block; then the residual is added and the row normalised, in registers
//
// All add in the order of the ranks, in fp32, so all ranks have the same bits. Calls are numbered on the device (a CUDA graph
// replays them): odd and even calls use two halves of the buffers, so a call's data are overwritten two calls later, and to
// come there a rank needs what this one sends in the call between.
#include "symmetric.cuh"

// Where things are in a buffer, in bytes.
struct Layout {
  i64 flagged;       // [2][ranks][flagged_bytes * 2]
  i64 flagged_most;  // bytes of data
  i64 data;          // [2][ranks][most]
  i64 most;
  u32 rank, pad;
};

// 16 bytes of data as two times (word, flag, word, flag).
template <typename T, int C> __device__ __forceinline__ void send_flagged(u64 p, const Words<T, C> &w, u32 flag) {
#pragma unroll
  for (int i = 0; i < 4; i += 2)
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(p + i * 8), "r"(w.word[i]), "r"(w.word[i + 1]),
                 "r"(flag)
                 : "memory");
}

template <typename T, int C> __device__ __forceinline__ Words<T, C> receive_flagged(u64 p, u32 flag) {
  Words<T, C> w;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    u32 first, second;
    do {
      asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.word[i]), "=r"(first), "=r"(w.word[i + 1]), "=r"(second)
                   : "l"(p + i * 8)
                   : "memory");
    } while (first != flag || second != flag);
  }
  return w;
}

template <typename T, int N>
__global__ void __launch_bounds__(512)
    one_shot_flagged(const T *x, T *out, char *mine, Peers peers, Layout at, i64 units) {
  constexpr int C = 16 / sizeof(T);
  const u32 call = begin(mine);
  const i64 half = at.flagged + (call & 1) * N * at.flagged_most * 2;
  const i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
  for (i64 u = first; u < units; u += step) {
    const Words<T, C> w = load<T, C>(x + u * C);
#pragma unroll
    for (int r = 0; r < N; r++)
      if (r != at.rank) send_flagged(peers.base[r] + half + at.rank * at.flagged_most * 2 + u * 32, w, call);
  }
  for (i64 u = first; u < units; u += step) {
    const Words<T, C> own = load<T, C>(x + u * C);
    float sum[C] = {};
#pragma unroll
    for (int r = 0; r < N; r++)
      add(sum, r == at.rank ? own : receive_flagged<T, C>(u64(mine) + half + r * at.flagged_most * 2 + u * 32, call));
    store(out + u * C, pack<T, C>(sum));
  }
  finish(mine, call);
}

template <typename T, int N>
__global__ void __launch_bounds__(512) one_shot(const T *x, T *out, char *mine, Peers peers, Layout at, i64 units) {
  constexpr int C = 16 / sizeof(T);
  const u32 call = begin(mine);
  const i64 half = at.data + (call & 1) * N * at.most;
  const i64 each = (units + gridDim.x - 1) / gridDim.x, from = blockIdx.x * each, to = min(from + each, units);
  for (i64 u = from + threadIdx.x; u < to; u += blockDim.x) {
    const Words<T, C> w = load<T, C>(x + u * C);
#pragma unroll
    for (int r = 0; r < N; r++)
      if (r != at.rank) store(reinterpret_cast<T *>(peers.base[r] + half + at.rank * at.most) + u * C, w);
  }
  tell<N>(peers, at.rank, 0, call);
  await<N>(mine, at.rank, 0, call);
  for (i64 u = from + threadIdx.x; u < to; u += blockDim.x) {
    float sum[C] = {};
#pragma unroll
    for (int r = 0; r < N; r++)
      add(sum, load<T, C>((r == at.rank ? x : reinterpret_cast<const T *>(mine + half + r * at.most)) + u * C));
    store(out + u * C, pack<T, C>(sum));
  }
  finish(mine, call);
}

// `units` is a multiple of N: part p of a buffer is rank p's to add.
template <typename T, int N>
__global__ void __launch_bounds__(512) two_shot(const T *x, T *out, char *mine, Peers peers, Layout at, i64 units) {
  constexpr int C = 16 / sizeof(T);
  const u32 call = begin(mine);
  const i64 half = at.data + (call & 1) * N * at.most;
  const i64 part = units / N, each = (part + gridDim.x - 1) / gridDim.x;
  const i64 from = blockIdx.x * each, to = min(from + each, part);
#pragma unroll
  for (int k = 1; k < N; k++) {  // ranks begin with different ones
    const u32 r = (at.rank + k) % N;
    T *const there = reinterpret_cast<T *>(base_of<N>(peers, r) + half + at.rank * at.most);
    for (i64 u = from + threadIdx.x; u < to; u += blockDim.x)
      store(there + u * C, load<T, C>(x + (r * part + u) * C));
  }
  tell<N>(peers, at.rank, 0, call);
  await<N>(mine, at.rank, 0, call);
  for (i64 u = from + threadIdx.x; u < to; u += blockDim.x) {
    float sum[C] = {};
#pragma unroll
    for (int r = 0; r < N; r++)
      add(sum, r == at.rank ? load<T, C>(x + (at.rank * part + u) * C)
                            : load<T, C>(reinterpret_cast<const T *>(mine + half + r * at.most) + u * C));
    const Words<T, C> w = pack<T, C>(sum);
    store(out + (at.rank * part + u) * C, w);
#pragma unroll
    for (int r = 0; r < N; r++)  // sums lie behind the parts: half of `most` holds either
      if (r != at.rank) store(reinterpret_cast<T *>(peers.base[r] + half + at.rank * at.most + at.most / 2) + u * C, w);
  }
  tell<N>(peers, at.rank, 1, call);
  await<N>(mine, at.rank, 1, call);
#pragma unroll
  for (int k = 1; k < N; k++) {
    const u32 r = (at.rank + k) % N;
    for (i64 u = from + threadIdx.x; u < to; u += blockDim.x)
      store(out + (r * part + u) * C,
            load<T, C>(reinterpret_cast<const T *>(mine + half + r * at.most + at.most / 2) + u * C));
  }
  finish(mine, call);
}

// A row [width] a block, up to EACH units of 16 bytes a thread: h = (sum over the ranks of x) + residual, rounded, is written
// to `hidden`; out = h / sqrt(mean(h^2) + eps) * weight.
template <typename T, int N, int EACH, bool FLAGGED>
__global__ void __launch_bounds__(1024)
    add_rms_norm(const T *x, const T *residual, const T *weight, T *out, T *hidden, char *mine, Peers peers, Layout at,
                 i64 units, float eps) {
  constexpr int C = 16 / sizeof(T);
  __shared__ float of_warp[32];
  const u32 call = begin(mine);
  const i64 most = FLAGGED ? at.flagged_most * 2 : at.most, row = blockIdx.x * units;
  const i64 half = (FLAGGED ? at.flagged : at.data) + (call & 1) * N * most;
  Words<T, C> kept[EACH];
#pragma unroll
  for (int k = 0; k < EACH; k++) {
    const i64 u = i64(k) * blockDim.x + threadIdx.x;
    if (u < units) {
      kept[k] = load<T, C>(x + (row + u) * C);
#pragma unroll
      for (int r = 0; r < N; r++)
        if (r != at.rank) {
          const u64 there = peers.base[r] + half + at.rank * most;
          if constexpr (FLAGGED)
            send_flagged(there + (row + u) * 32, kept[k], call);
          else
            store(reinterpret_cast<T *>(there) + (row + u) * C, kept[k]);
        }
    }
  }
  if constexpr (!FLAGGED) tell<N>(peers, at.rank, 0, call);
  Words<T, C> scale[EACH], rest[EACH];  // asked for while the peers' data are in flight
#pragma unroll
  for (int k = 0; k < EACH; k++) {
    const i64 u = i64(k) * blockDim.x + threadIdx.x;
    if (u < units) {
      rest[k] = load<T, C>(residual + (row + u) * C);
      scale[k] = load<T, C>(weight + u * C);
    }
  }
  if constexpr (!FLAGGED) await<N>(mine, at.rank, 0, call);
  float squares = 0;
#pragma unroll
  for (int k = 0; k < EACH; k++) {
    const i64 u = i64(k) * blockDim.x + threadIdx.x;
    if (u < units) {
      float h[C] = {};
#pragma unroll
      for (int r = 0; r < N; r++) {
        const char *const here = mine + half + r * most;
        if (r == at.rank)
          add(h, kept[k]);
        else if constexpr (FLAGGED)
          add(h, receive_flagged<T, C>(u64(here) + (row + u) * 32, call));
        else
          add(h, load<T, C>(reinterpret_cast<const T *>(here) + (row + u) * C));
      }
      add(h, rest[k]);
      kept[k] = pack<T, C>(h);
      store(hidden + (row + u) * C, kept[k]);
      unpack(kept[k], h);
#pragma unroll
      for (int i = 0; i < C; i++) squares += h[i] * h[i];
    }
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.f);
  const float inverse = rsqrtf(squares / (float(units) * C) + eps);
#pragma unroll
  for (int k = 0; k < EACH; k++) {
    const i64 u = i64(k) * blockDim.x + threadIdx.x;
    if (u < units) {
      float h[C], g[C];
      unpack(kept[k], h);
      unpack(scale[k], g);
#pragma unroll
      for (int i = 0; i < C; i++) h[i] = h[i] * inverse * g[i];
      store(out + (row + u) * C, pack<T, C>(h));
    }
  }
  finish(mine, call);
}
