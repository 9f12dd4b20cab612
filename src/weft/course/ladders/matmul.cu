// The ladder of the matrix product, rungs 1 to 8; rungs 9 to 12, which need Hopper, are in matmul_hopper.cu.
// C[M, N] = A[M, K] · B[K, N], all row-major and contiguous, bf16, accumulated in fp32.
//
// What changes from rung to rung is how often an element is fetched, from where, and with how many instructions. Blocks are
// numbered along rows of tiles of C.
#include "prelude.cuh"

__device__ __forceinline__ bf16 to_bf16(float f) { return bf16{(unsigned short)pack_pair(bf16{}, f, 0.f)}; }

struct Tile {
  i64 m, n;  // of its first element
  template <int BM, int BN> static __device__ __forceinline__ Tile of(i64 N) {
    const i64 across = (N + BN - 1) / BN;
    return {blockIdx.x / across * BM, blockIdx.x % across * BN};
  }
};

// ---- instructions: what C++ has no word for -------------------------------------------------------------------------------

// 16 bytes from memory to shared memory, past the registers; zeros where they are not `inside`.
__device__ __forceinline__ void copy_async(bf16 *shared, const bf16 *global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void store_shared(bf16 *p, const Words<bf16, 8> &w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(w.word[0]), "r"(w.word[1]),
               "r"(w.word[2]), "r"(w.word[3])
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's committed groups are under way.
template <int PENDING> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 × 8 matrices of 16-bit elements, whose rows begin where lanes 0-7, 8-15, 16-23 and 24-31 say.
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(u32 (&r)[4], const bf16 *row) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

// d[16, 8] += a[16, 16] · b[16, 8], by one warp.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- 1. naive: one thread an element; the threads of a warp take 32 rows, so each load of A takes 32 sectors. --------------
// ---- 2. coalesced: they take 32 columns: A is one address for all, B and C are 64 bytes side by side. ----------------------

template <int BM, int BN, bool COALESCED>
__global__ void __launch_bounds__(BM *BN) ladder_element(const bf16 *a, const bf16 *b, bf16 *c, i64 M, i64 N, i64 K) {
  const Tile tile = Tile::of<BM, BN>(N);
  const i64 m = tile.m + (COALESCED ? threadIdx.x / BN : threadIdx.x % BM);
  const i64 n = tile.n + (COALESCED ? threadIdx.x % BN : threadIdx.x / BM);
  if (m >= M || n >= N) return;
  float sum = 0.f;
  for (i64 k = 0; k < K; k++) sum += to_float(a[m * K + k]) * to_float(b[k * N + n]);
  c[m * N + n] = to_bf16(sum);
}

// ---- 3. shared memory: a block fetches SIDE × SIDE tiles, so each element is fetched SIDE times less often. ----------------

template <int SIDE>
__global__ void __launch_bounds__(SIDE *SIDE) ladder_shared(const bf16 *a, const bf16 *b, bf16 *c, i64 M, i64 N, i64 K) {
  __shared__ bf16 as[SIDE][SIDE], bs[SIDE][SIDE];
  const Tile tile = Tile::of<SIDE, SIDE>(N);
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  const i64 m = tile.m + y, n = tile.n + x;
  float sum = 0.f;
  for (i64 k = 0; k < K; k += SIDE) {
    as[y][x] = m < M && k + x < K ? a[m * K + k + x] : bf16{0};
    bs[y][x] = k + y < K && n < N ? b[(k + y) * N + n] : bf16{0};
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SIDE; i++) sum += to_float(as[y][i]) * to_float(bs[i][x]);
    __syncthreads();  // before the next tiles are written
  }
  if (m < M && n < N) c[m * N + n] = to_bf16(sum);
}

// ---- 4. register column: a thread computes TM × 1 elements, so one value of B serves TM multiply-adds. ----------------------
// ---- 5. register tile: TM × TN elements: TM + TN values serve TM · TN multiply-adds. ----------------------------------------

template <int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__(BM *BN / TM / TN) ladder_registers(const bf16 *a, const bf16 *b, bf16 *c, i64 M, i64 N, i64 K) {
  constexpr int THREADS = BM * BN / TM / TN;
  __shared__ bf16 as[BM][BK], bs[BK][BN];
  const Tile tile = Tile::of<BM, BN>(N);
  const int x = threadIdx.x % (BN / TN) * TN, y = threadIdx.x / (BN / TN) * TM;
  float sum[TM][TN] = {};
  for (i64 k = 0; k < K; k += BK) {
#pragma unroll
    for (int first = 0; first < BM * BK; first += THREADS) {
      const int i = first + threadIdx.x;
      const i64 m = tile.m + i / BK, at = k + i % BK;
      as[i / BK][i % BK] = m < M && at < K ? a[m * K + at] : bf16{0};
    }
#pragma unroll
    for (int first = 0; first < BK * BN; first += THREADS) {
      const int i = first + threadIdx.x;
      const i64 at = k + i / BN, n = tile.n + i % BN;
      bs[i / BN][i % BN] = at < K && n < N ? b[at * N + n] : bf16{0};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BK; i++) {
      float left[TM], right[TN];
#pragma unroll
      for (int t = 0; t < TM; t++) left[t] = to_float(as[y + t][i]);
#pragma unroll
      for (int t = 0; t < TN; t++) right[t] = to_float(bs[i][x + t]);
#pragma unroll
      for (int t = 0; t < TM * TN; t++) sum[t / TN][t % TN] += left[t / TN] * right[t % TN];
    }
    __syncthreads();
  }
#pragma unroll
  for (int t = 0; t < TM * TN; t++) {
    const i64 m = tile.m + y + t / TN, n = tile.n + x + t % TN;
    if (m < M && n < N) c[m * N + n] = to_bf16(sum[t / TN][t % TN]);
  }
}

// ---- 6. vectorised: 16 bytes an access on all sides. A thread's rows lie ROWS apart, so eight threads that read together read
//         one address of A and 128 neighbouring bytes of B: no bank is asked for two words. ------------------------------------
// ---- 7. asynchronous: two buffers; the next tiles come through cp.async while these are multiplied. --------------------------

template <int BM, int BN, int BK, int BUFFERS>
__global__ void __launch_bounds__(BM *BN / 64) ladder_vectors(const bf16 *a, const bf16 *b, bf16 *c, int M, int N, int K) {
  constexpr int T = 8, ROWS = BM / T, COLUMNS = BN / T, THREADS = ROWS * COLUMNS;
  __shared__ __align__(16) bf16 as[BUFFERS][BM][BK];
  __shared__ __align__(16) bf16 bs[BUFFERS][BK][BN];
  const Tile tile = Tile::of<BM, BN>(N);
  const int x = threadIdx.x % COLUMNS * T, y = threadIdx.x / COLUMNS;

  const auto copy = [](bf16 *shared, const bf16 *global, bool inside) {
    if constexpr (BUFFERS == 2)
      copy_async(shared, global, inside);
    else
      store_shared(shared, inside ? load<bf16, 8>(global) : Words<bf16, 8>{});
  };
  const auto fetch = [&](int buffer, int k) {
#pragma unroll
    for (int first = 0; first < BM * BK; first += THREADS * 8) {
      const int i = first + threadIdx.x * 8;
      const i64 m = tile.m + i / BK, at = k + i % BK;
      const bool inside = m < M && at < K;
      copy(&as[buffer][i / BK][i % BK], inside ? a + m * K + at : a, inside);
    }
#pragma unroll
    for (int first = 0; first < BK * BN; first += THREADS * 8) {
      const int i = first + threadIdx.x * 8;
      const i64 at = k + i / BN, n = tile.n + i % BN;
      const bool inside = at < K && n < N;
      copy(&bs[buffer][i / BN][i % BN], inside ? b + at * N + n : b, inside);
    }
  };

  float sum[T][T] = {};
  if constexpr (BUFFERS == 2) {
    fetch(0, 0);
    commit_copies();
  }
  for (int k = 0; k < K; k += BK) {
    const int now = k / BK % BUFFERS;
    if constexpr (BUFFERS == 2) {
      if (k + BK < K) fetch(1 - now, k + BK);
      commit_copies();
      wait_copies<1>();
    } else {
      fetch(0, k);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BK; i += 8) {
      float left[T][8], right[8];
      Words<bf16, 8> words[T];
#pragma unroll
      for (int t = 0; t < T; t++) words[t] = load_shared<bf16, 8>(&as[now][y + t * ROWS][i]);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        unpack(load_shared<bf16, 8>(&bs[now][i + j][x]), right);
#pragma unroll
        for (int t = 0; t < T; t++) {
          unpack(words[t], left[t]);
#pragma unroll
          for (int u = 0; u < T; u++) sum[t][u] += left[t][j] * right[u];
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int t = 0; t < T; t++) {
    const i64 m = tile.m + y + t * ROWS;
    if (m < M && tile.n + x < N) store(c + m * N + tile.n + x, pack<bf16, 8>(sum[t]));
  }
}

// ---- 8. tensor cores: a warp multiplies 16 × 16 by 16 × 8 in one instruction. Rows of 128 bytes and more are not padded but
//         swizzled: the 16-byte chunks of row r change places by exclusive or with r % 8, so that the eight rows of an 8 × 8
//         matrix lie in 32 banks both as written and as read. STAGES tiles are under way or in use. ---------------------------

// The place of 8 elements in a tile of WIDTH columns.
template <int WIDTH> __device__ __forceinline__ int swizzled(int row, int column) {
  return row * WIDTH + ((column / 8) ^ (row % 8)) * 8;
}

// A tile of ROWS × COLUMNS, of which `rows` and `columns` lie inside the matrix. A thread's rows are DOWN apart, a multiple of 8,
// so all of them swizzle alike.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void fetch_swizzled(bf16 *shared, const bf16 *global, int stride, int rows, int columns) {
  constexpr int ACROSS = COLUMNS / 8, DOWN = THREADS / ACROSS;
  static_assert(DOWN % 8 == 0, "rows of one thread must swizzle alike");
  const int row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * 8;
#pragma unroll
  for (int i = 0; i < ROWS / DOWN; i++) {
    const bool inside = row + i * DOWN < rows && column < columns;
    copy_async(shared + swizzled<COLUMNS>(row, column) + i * DOWN * COLUMNS,
               inside ? global + i64(row + i * DOWN) * stride + column : global, inside);
  }
}

template <int BM, int BN, int BK, int STAGES>
__global__ void __launch_bounds__(BM *BN / 128) ladder_mma(const bf16 *a, const bf16 *b, bf16 *c, int M, int N, int K) {
  constexpr int WARP = 64, THREADS = BM * BN / 128;  // a warp computes 64 × 64
  extern __shared__ __align__(128) bf16 shared[];
  bf16 *const as = shared, *const bs = shared + STAGES * BM * BK;
  const Tile tile = Tile::of<BM, BN>(N);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int y = warp / (BN / WARP) * WARP, x = warp % (BN / WARP) * WARP;
  a += tile.m * K, b += tile.n;
  const auto fetch = [&](int step) {
    const int stage = step % STAGES, k = step * BK;
    fetch_swizzled<BM, BK, THREADS>(as + stage * BM * BK, a + k, K, M - tile.m, K - k);
    fetch_swizzled<BK, BN, THREADS>(bs + stage * BK * BN, b + i64(k) * N, N, K - k, N - tile.n);
  };

  float sum[WARP / 16][WARP / 8][4] = {};
  const int steps = (K + BK - 1) / BK;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < steps) fetch(s);
    commit_copies();
  }
  for (int step = 0; step < steps; step++) {
    wait_copies<STAGES - 2>();
    __syncthreads();  // this stage has come for all; all are done with the one that is fetched next
    if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
    commit_copies();
    const bf16 *at = as + step % STAGES * BM * BK, *bt = bs + step % STAGES * BK * BN;
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      u32 left[WARP / 16][4], right[WARP / 16][4];
#pragma unroll
      for (int i = 0; i < WARP / 16; i++) {
        load_matrices<false>(left[i], at + swizzled<BK>(y + i * 16 + lane % 16, k + lane / 16 * 8));
        load_matrices<true>(right[i], bt + swizzled<BN>(k + lane % 16, x + i * 16 + lane / 16 * 8));
      }
#pragma unroll
      for (int i = 0; i < WARP / 16; i++)
#pragma unroll
        for (int j = 0; j < WARP / 8; j++) mma(sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < WARP / 16; i++)
#pragma unroll
    for (int j = 0; j < WARP / 8; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const i64 m = tile.m + y + i * 16 + half * 8 + lane / 4, n = tile.n + x + j * 8 + lane % 4 * 2;
        if (m < M && n < N)
          *reinterpret_cast<u32 *>(c + m * N + n) = pack_pair(bf16{}, sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
      }
}
