// GroupNorm of long groups (sm_90 and later): a cluster of blocks shares a group (rows.cuh), which is read once and written
// once. Each block has the weights and biases of its few channels in shared memory.
#include "moments.cuh"

// Of some elements x: their mean, and y: the sum of squares about it. Warps, then blocks exchange theirs.
typedef float2 Pair;

// Of 32 lanes' pairs, each of `count` elements (Chan, Golub & LeVeque 1979). About lane 0's mean, an estimate from few elements,
// terms share its distance to the mean, and their sum errs by it: fp32 results show that (TWICE), 16-bit ones do not.
template <bool TWICE> __device__ __forceinline__ Pair warp_joined(Pair p, float count) {
  const float near = __shfl_sync(0xffffffffu, p.x, 0);  // far from 0, a sum of means would lose their last places
  const float away = warp_sum(count * (p.x - near)), total = fmaxf(warp_sum(count), 1.f);
  float mean = near + away / total;
  if constexpr (TWICE) mean += warp_sum(count * (p.x - mean)) / total;
  const float off = p.x - mean;
  return {mean, warp_sum(p.y + count * off * off)};
}

// x, y: [M, N] groups, 16-byte aligned, N = CG * S, S a multiple of 16 bytes, so that a vector lies in one channel; group m is
// group m % G of its batch entry; w, b: [G * CG]; mean, rstd: fp32 [M], written if SAVED. Grid: M * blocks of a cluster. Dynamic
// shared memory: two floats for each channel that THREADS * EACH elements may touch.
template <typename T, typename W, int THREADS, int EACH, bool WEIGHTED, bool BIASED, bool SAVED>
__global__ void __launch_bounds__(THREADS, BLOCKS<THREADS>)
    group_norm_cluster(const T *x, const W *w, const W *b, T *y, float *mean, float *rstd, i64 N, i64 x_row, i64 y_row, u32 G,
                       u32 CG, u32 S, float eps) {
  using Slice = RowSlice<T, Pair, THREADS, EACH>;
  constexpr bool TWICE = sizeof(T) == 4;
  using Shared = typename Slice::Shared;
  __shared__ Shared shared[1];
  extern __shared__ __align__(16) unsigned char dynamic[];

  const Slice slice(N, shared[0]);
  Words<T, Slice::COUNT> words[Slice::VECTORS];
  slice.load(x, x_row, words, 0);

  const u32 first = u32(slice.first) / S, last = slice.elements ? u32(slice.first + slice.elements - 1) / S : first;
  float *gain = reinterpret_cast<float *>(dynamic), *bias = gain + (last - first + 1);
  const u32 channel = u32(slice.row) % G * CG + first;
  for (u32 i = threadIdx.x; i <= last - first && slice.elements; i += THREADS) {
    if constexpr (WEIGHTED) gain[i] = to_float(w[channel + i]);
    if constexpr (BIASED) bias[i] = to_float(b[channel + i]);
  }

  // A thread takes its squares about its own first element, so that little cancels and one pass is enough. Its mean is of the
  // elements themselves: about an element far from the mean, all partial sums would be large, and err as much.
  Pair sums = {0.f, 0.f};
  float near = 0.f;
  int mine = 0;
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    float f[Slice::COUNT];
    unpack(words[v], f);
    if (v == 0) near = f[0];
    const bool there = slice.at(v) < slice.elements;
    mine += there ? Slice::COUNT : 0;
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++) {
      const float d = there ? f[i] - near : 0.f;
      sums.x += there ? f[i] : 0.f;
      sums.y += d * d;
    }
  }
  const float count = fmaxf(float(mine), 1.f), of_mine = sums.x / count, off = of_mine - near;
  const bool finite = sums.y <= 3.4e38f;  // else it is left as it is
  const Pair of_thread = {of_mine, finite ? fmaxf(sums.y - count * off * off, 0.f) : sums.y};

  const int lane = threadIdx.x % 32;
  bool warps = true;  // first the block's warps are joined, then the blocks
  auto join = [&](Pair p) {
    const float of_block = elements_of_block<THREADS * EACH>(N, lane);
    const float count = warps ? (lane < THREADS / 32 ? elements_of_warp<THREADS, Slice::COUNT>(slice.elements, lane) : 0.f)
                              : (lane < slice.blocks ? of_block : 0.f);
    warps = false;
    return warp_joined<TWICE>(p, count);
  };
  const Pair all = slice.exchange(warp_joined<TWICE>(of_thread, float(mine)), Pair{0.f, 0.f}, join, shared[0]);
  const float middle = all.x, scale = 1.f / sqrtf(all.y / float(N) + eps);
  if (SAVED && slice.rank == 0 && threadIdx.x == 0) mean[slice.row] = middle, rstd[slice.row] = scale;
  y += slice.row * y_row + slice.first;
#pragma unroll
  for (int v = 0; v < Slice::VECTORS; v++) {
    if (slice.at(v) >= slice.elements) continue;
    const u32 c = u32(slice.first + slice.at(v)) / S - first;
    const float by = WEIGHTED ? scale * gain[c] : scale, plus = BIASED ? bias[c] : 0.f;
    float f[Slice::COUNT];
    unpack(words[v], f);
#pragma unroll
    for (int i = 0; i < Slice::COUNT; i++) f[i] = (f[i] - middle) * by + plus;
    store<T, Slice::COUNT>(y + slice.at(v), pack<T, Slice::COUNT>(f));
  }
}
