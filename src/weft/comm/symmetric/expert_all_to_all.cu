// The two exchanges of a mixture of experts whose experts are spread over ranks. Every rank has a slot for each token of each
// rank, so no rank needs to know how many come: a token's row is written into its slot on the ranks of its experts, with the
// experts it is for (-1: another rank's) and their weights.
//
//   dispatch  token t of this rank -> slot [rank][t] of every rank that has one of its experts
//   combine   the rows of slots that were filled -> back to where they came from, where they are added in the order of the ranks
//
// The two alternate. A rank overwrites its peers' slots when their combine has come, and their returned rows when their next
// dispatch has: each comes after the peer has read them.
#include "symmetric.cuh"

// Bytes from the beginning of a buffer.
struct Places {
  i64 experts;   // [ranks][most][k] int
  i64 weights;   // [ranks][most][k] float
  i64 rows;      // [ranks][most][units]
  i64 returned;  // [ranks][most][units]
  i64 most;      // tokens of a rank
  i64 units;     // of 16 bytes, of a row
  u32 rank;
  int k;
  int each;      // experts of a rank
  u32 pad;
};

// The ranks of a token's experts, as bits; experts out of range have none.
template <int N> __device__ __forceinline__ u32 ranks_of(const int *experts, const Places &at) {
  u32 found = 0;
  for (int j = 0; j < at.k; j++) {
    const int e = experts[j];
    if (e >= 0 && e < N * at.each) found |= 1u << (e / at.each);
  }
  return found;
}

template <int N>
__global__ void __launch_bounds__(512, 2)
    dispatch(const float *x, const int *experts, const float *weights, char *mine, Peers peers, Places at, i64 tokens) {
  const u32 call = begin(mine);
  for (i64 t = blockIdx.x; t < at.most; t += gridDim.x) {
    const i64 slot = at.rank * at.most + t;
    for (int i = threadIdx.x; i < N * at.k; i += blockDim.x) {
      const int r = i / at.k, j = i % at.k, e = t < tokens ? experts[t * at.k + j] : -1;
      const bool there = e >= 0 && e / at.each == r;
      const u64 base = base_of<N>(peers, r);
      reinterpret_cast<int *>(base + at.experts)[slot * at.k + j] = there ? e % at.each : -1;
      reinterpret_cast<float *>(base + at.weights)[slot * at.k + j] = there ? weights[t * at.k + j] : 0.f;
    }
    if (t >= tokens) continue;
    const u32 to = ranks_of<N>(experts + t * at.k, at);
    for (i64 u = threadIdx.x; u < at.units; u += blockDim.x) {
      const Words<float, 4> w = load<float, 4>(x + (t * at.units + u) * 4);
#pragma unroll
      for (int r = 0; r < N; r++)
        if (to >> r & 1) store(reinterpret_cast<float *>(peers.base[r] + at.rows) + (slot * at.units + u) * 4, w);
    }
  }
  tell<N>(peers, at.rank, 0, call);
  await<N>(mine, at.rank, 0, call);
  finish(mine, call);
}

// `experts` and `tokens` are those of the dispatch before; y [ranks][most][width], out [tokens, width].
template <typename T, int N>
__global__ void __launch_bounds__(512, 2)
    combine(const T *y, const int *experts, T *out, char *mine, Peers peers, Places at, i64 tokens) {
  constexpr int C = 16 / sizeof(T);
  const u32 call = begin(mine);
  for (i64 t = blockIdx.x; t < at.most; t += gridDim.x)
#pragma unroll
    for (int k = 1; k < N; k++) {  // ranks begin with different ones
      const u32 r = (at.rank + k) % N;
      const i64 slot = r * at.most + t;
      bool filled = false;
      for (int j = 0; j < at.k; j++) filled |= reinterpret_cast<const int *>(mine + at.experts)[slot * at.k + j] >= 0;
      T *const there = reinterpret_cast<T *>(base_of<N>(peers, r) + at.returned) + (at.rank * at.most + t) * at.units * C;
      if (filled)
        for (i64 u = threadIdx.x; u < at.units; u += blockDim.x)
          store(there + u * C, load<T, C>(y + (slot * at.units + u) * C));
    }
  tell<N>(peers, at.rank, 1, call);
  await<N>(mine, at.rank, 1, call);
  for (i64 t = blockIdx.x; t < tokens; t += gridDim.x) {
    const u32 from = ranks_of<N>(experts + t * at.k, at);
    for (i64 u = threadIdx.x; u < at.units; u += blockDim.x) {
      float sum[C] = {};
#pragma unroll
      for (int r = 0; r < N; r++)
        if (from >> r & 1) {
          const T *const rows = r == at.rank ? y : reinterpret_cast<const T *>(mine + at.returned);
          add(sum, load<T, C>(rows + ((r * at.most + t) * at.units + u) * C));
        }
      store(out + (t * at.units + u) * C, pack<T, C>(sum));
    }
  }
  finish(mine, call);
}
