// Transposes with 16-byte accesses on all sides: global and shared, reading and writing.
//
// A thread takes blocks of K x K elements, K of them being 16 bytes (4 x 4 of 32 bits, 8 x 8 of 16): K loads of 16 bytes from
// K rows, a transpose in registers, K vectors of 16 bytes that lie along rows of the result.
#include "prelude.cuh"

template <typename T> constexpr int K = 16 / sizeof(T);

template <typename T, int COUNT> __device__ __forceinline__ void store_shared(T *p, const Words<T, COUNT> &w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(w.word[0]), "r"(w.word[1]),
               "r"(w.word[2]), "r"(w.word[3])
               : "memory");
}

// ---- a block of K x K in registers -------------------------------------------------------------------------------------

// 32 bits: only names change, no instruction. 16 bits: each word takes its halves from two rows, one byte permutation a word.
template <typename T> __device__ __forceinline__ void transpose_block(const Words<T, K<T>> (&in)[K<T>], Words<T, K<T>> (&out)[K<T>]) {
#pragma unroll
  for (int c = 0; c < K<T>; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (sizeof(T) == 4)
        out[c].word[i] = in[i].word[c];
      else
        out[c].word[i] = __byte_perm(in[2 * i].word[c / 2], in[2 * i + 1].word[c / 2], c % 2 ? 0x7632 : 0x5410);
    }
}

// ---- where a block of threads works ------------------------------------------------------------------------------------

struct Shape {
  i64 M, N, B1, x_b0, x_b1, x_row;
  int group, diagonal;
};

// The tile (R rows and C columns of x) of this block of threads: x and y are moved to it; what is left of the matrix from there.
template <typename T, int R, int C> struct Tile {
  const T *x;
  T *y;
  i64 rows, cols;

  __device__ __forceinline__ Tile(const T *x_all, T *y_all, const Shape &s) {
    const u32 tiles_m = u32((s.M + R - 1) / R), tiles_n = u32((s.N + C - 1) / C);
    const u32 b = blockIdx.x / (tiles_m * tiles_n), program = blockIdx.x % (tiles_m * tiles_n);
    // bands of `group` tile rows, walked down and then right: kernels.py says why
    const u32 wide = s.group * tiles_n, band = program / wide, inside = program % wide;
    const u32 height = min(tiles_m - band * s.group, u32(s.group));
    const u32 m = band * s.group + inside % height;
    u32 n = inside / height;
    if (s.diagonal) n = (n + m) % tiles_n;
    rows = s.M - i64(m) * R, cols = s.N - i64(n) * C;
    x = x_all + i64(b / u32(s.B1)) * s.x_b0 + i64(b % u32(s.B1)) * s.x_b1 + i64(m) * R * s.x_row + i64(n) * C;
    y = y_all + i64(b) * s.M * s.N + i64(n) * C * s.M + i64(m) * R;
  }
};

// ---- through shared memory ---------------------------------------------------------------------------------------------

// x: matrices whose rows begin on 16 bytes; y: contiguous; M and N multiples of K. EACH blocks a thread.
//
// The tile lies in shared memory as rows of y, R / K vectors each; vector v of row c lies at v ^ (c / K % 8). Shared memory
// serves 8 lanes of 16 bytes at a time from 8 groups of 4 banks. Writing, 8 lanes have one v and rows K apart; reading, one
// row and 8 neighbouring v: either way the exclusive or sends them to 8 different groups.
template <typename T, int R, int C, int EACH>
__global__ void __launch_bounds__(R / K<T> * (C / K<T>) / EACH)
    transpose_shared(const T *x_all, T *y_all, i64 M, i64 N, i64 B1, i64 x_b0, i64 x_b1, i64 x_row, int group, int diagonal) {
  constexpr int ACROSS = C / K<T>, DOWN = R / K<T>, THREADS = DOWN * ACROSS / EACH;
  static_assert(ACROSS % 8 == 0 && DOWN % 8 == 0 && DOWN * ACROSS % EACH == 0, "whole lines of 128 bytes on both sides");
  __shared__ alignas(16) T shared[R * C];
  const Tile<T, R, C> tile(x_all, y_all, {M, N, B1, x_b0, x_b1, x_row, group, diagonal});

  Words<T, K<T>> in[EACH][K<T>], out[K<T>];
#pragma unroll
  for (int e = 0; e < EACH; e++) {  // all loads before any use
    const int q = e * THREADS + threadIdx.x, row = q / ACROSS * K<T>, col = q % ACROSS * K<T>;
    if (row < tile.rows && col < tile.cols) {
#pragma unroll
      for (int i = 0; i < K<T>; i++) in[e][i] = load_stream<T, K<T>>(tile.x + (row + i) * x_row + col);
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int q = e * THREADS + threadIdx.x, down = q / ACROSS, across = q % ACROSS;
    transpose_block<T>(in[e], out);
#pragma unroll
    for (int c = 0; c < K<T>; c++)
      store_shared<T, K<T>>(shared + ((across * K<T> + c) * DOWN + (down ^ (across % 8))) * K<T>, out[c]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < K<T> * EACH; i++) {
    const int p = i * THREADS + threadIdx.x, c = p / DOWN, v = p % DOWN;
    if (c < tile.cols && v * K<T> < tile.rows)
      store<T, K<T>>(tile.y + c * M + v * K<T>, load_shared<T, K<T>>(shared + (c * DOWN + (v ^ (c / K<T> % 8))) * K<T>));
  }
}

// ---- in registers alone ------------------------------------------------------------------------------------------------

// A warp is 8 lanes high and 4 wide: it reads 64 bytes of each row and writes 128 of each row of y. Warps
// of a block are side by side, so the other half of a line is read at about the same time. No barrier.
template <typename T, int R, int C, int EACH>
__global__ void __launch_bounds__(R / K<T> * (C / K<T>))
    transpose_registers(const T *x_all, T *y_all, i64 M, i64 N, i64 B1, i64 x_b0, i64 x_b1, i64 x_row, int group, int diagonal) {
  static_assert(R == 8 * K<T> && C % (4 * K<T>) == 0 && EACH == 1, "warps of 8 x 4 blocks, side by side");
  const Tile<T, R, C> tile(x_all, y_all, {M, N, B1, x_b0, x_b1, x_row, group, diagonal});
  const int row = threadIdx.x % 8 * K<T>, col = threadIdx.x / 8 * K<T>;
  if (row >= tile.rows || col >= tile.cols) return;
  Words<T, K<T>> in[K<T>], out[K<T>];
#pragma unroll
  for (int i = 0; i < K<T>; i++) in[i] = load_stream<T, K<T>>(tile.x + (row + i) * x_row + col);
  transpose_block<T>(in, out);
#pragma unroll
  for (int c = 0; c < K<T>; c++) store<T, K<T>>(tile.y + (col + c) * M + row, out[c]);
}
