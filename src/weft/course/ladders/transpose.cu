// The ladder of transpose: each kernel one idea further than the last. x: [M, N], y: [N, M], both contiguous.
//
// All move the same bytes. What changes is in which pieces, on which side, and what shared memory makes of them.
#include "prelude.cuh"

template <typename T> constexpr int K = 16 / sizeof(T);  // elements of 16 bytes

// ---- 1. naive: one thread an element. Reads are coalesced; the writes of a warp are M apart, 32 sectors for 32 elements. -

template <typename T> __global__ void ladder_naive(const T *x, T *y, i64 M, i64 N) {
  const i64 n = i64(blockIdx.x) * 32 + threadIdx.x % 32, m = i64(blockIdx.y) * 8 + threadIdx.x / 32;
  if (m < M && n < N) y[n * M + m] = x[m * N + n];
}

// ---- 2. shared memory: a tile of 32 x 32 turns round there, so both sides are coalesced. Reading a column of the tile, all
// ----    32 lanes want the same bank (16-bit elements: two banks' worth of words, 16 lanes each). ------------------------
// ---- 3. padded: rows of the tile are one word longer, so a column lies in 32 different banks. ----------------------------

template <typename T, int PADDING> __global__ void ladder_tile(const T *x, T *y, i64 M, i64 N) {
  __shared__ T tile[32][32 + PADDING];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 m = i64(blockIdx.y) * 32, n = i64(blockIdx.x) * 32;
#pragma unroll
  for (int i = warp; i < 32; i += 8)
    if (m + i < M && n + lane < N) tile[i][lane] = x[(m + i) * N + n + lane];
  __syncthreads();
#pragma unroll
  for (int i = warp; i < 32; i += 8)
    if (n + i < N && m + lane < M) y[(n + i) * M + m + lane] = tile[lane][i];
}

// ---- 4. vectors: 16 bytes an access on all four sides. A thread loads K x K elements, transposes them in registers and puts
// ----    rows of y into shared memory. Eight lanes write vectors a whole number of lines apart: the same four banks. ------
// ---- 5. swizzled: vector v of row c lies at v ^ (c / K % 8); eight lanes then meet all 32 banks, writing and reading. -----
// ---- 6. evict last: a hint that L2 should give up written lines before read ones. ----------------------------------------
// ---- 7. grouped: blocks that run at the same time cover a square of x, so runs in memory are longer on the writing side. -

template <typename T, int SIDE, bool SWIZZLED, bool EVICT_LAST>
__global__ void ladder_vectors(const T *x, T *y, i64 M, i64 N, int group) {
  constexpr int ACROSS = SIDE / K<T>, THREADS = ACROSS * ACROSS;
  __shared__ alignas(16) T shared[SIDE * SIDE];
  auto at = [&](int row, int v) { return shared + (row * ACROSS + (SWIZZLED ? v ^ (row / K<T> % 8) : v)) * K<T>; };

  const u32 tiles_m = u32((M + SIDE - 1) / SIDE), tiles_n = u32((N + SIDE - 1) / SIDE);
  const u32 band = blockIdx.x / (group * tiles_n), inside = blockIdx.x % (group * tiles_n);
  const u32 height = min(tiles_m - band * group, u32(group));
  const i64 m = i64(band * group + inside % height) * SIDE, n = i64(inside / height) * SIDE;

  const int row = threadIdx.x / ACROSS, col = threadIdx.x % ACROSS;  // of this thread's block of K x K
  Words<T, K<T>> in[K<T>], out;
  if (m + row * K<T> < M && n + col * K<T> < N) {
#pragma unroll
    for (int i = 0; i < K<T>; i++) {
      const T *p = x + (m + row * K<T> + i) * N + n + col * K<T>;
      in[i] = EVICT_LAST ? load_stream<T, K<T>>(p) : load<T, K<T>>(p);
    }
  }
#pragma unroll
  for (int c = 0; c < K<T>; c++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (sizeof(T) == 4)
        out.word[i] = in[i].word[c];
      else  // the halves of a word come from two rows
        out.word[i] = __byte_perm(in[2 * i].word[c / 2], in[2 * i + 1].word[c / 2], c % 2 ? 0x7632 : 0x5410);
    }
    *reinterpret_cast<uint4 *>(at(col * K<T> + c, row)) = {out.word[0], out.word[1], out.word[2], out.word[3]};
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < K<T>; i++) {
    const int p = i * THREADS + threadIdx.x, c = p / ACROSS, v = p % ACROSS;
    if (n + c < N && m + v * K<T> < M) store<T, K<T>>(y + (n + c) * M + m + v * K<T>, load_shared<T, K<T>>(at(c, v)));
  }
}
