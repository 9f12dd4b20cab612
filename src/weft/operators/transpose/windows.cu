// Transposes of matrices whose rows begin anywhere: memory is read by words of 4 bytes and written by whole sectors.
//
// A block writes R elements of each of C rows of y, in a window that begins on a sector of that row. Windows of different rows
// begin up to a sector apart, so the block reads as many rows of x more than R; what it reads twice comes out of L2, whereas a
// sector that two blocks wrote in part might go to memory twice.
#include "prelude.cuh"

template <typename T> constexpr int K = 16 / sizeof(T);       // elements of 16 bytes
template <typename T> constexpr int SECTOR = 32 / sizeof(T);  // elements of a sector, the least that memory writes

template <typename T> struct Element { typedef unsigned short Bits; };
template <> struct Element<float> { typedef u32 Bits; };

// One word, cached like the vectors of prelude.cuh's load_stream.
__device__ __forceinline__ u32 load_word(u64 p, u64 policy) {
  u32 word;
  asm volatile("ld.global.L1::evict_last.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(word) : "l"(p), "l"(policy));
  return word;
}

__device__ __forceinline__ u32 load_half(u64 p) { return *reinterpret_cast<const unsigned short *>(p); }

// COUNT of the rows that this warp fetches, from its `first` on, one every WARPS rows; all of them before any is stored. `row` is
// the address of the next, and `to` its address in shared memory, rounded down to 4 bytes.
template <int COUNT, int WARPS, int ROWS, int EACH, typename Fetch>
__device__ __forceinline__ void fetch_rows(int first, int warp, int lane, u64 &row, i64 row_step, unsigned char *memory, u32 &to,
                                           u32 to_step, Fetch fetch) {
  u32 held[COUNT][EACH];
#pragma unroll
  for (int i = 0; i < COUNT; i++, row += row_step) {
    const int r = (first + i) * WARPS + warp;
    if ((first + i + 1) * WARPS <= ROWS || r < ROWS)
#pragma unroll
      for (int e = 0; e < EACH; e++) held[i][e] = fetch((row & ~u64(3)) + lane * 4 + e * 128, r, e * 32 + lane);
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++, to += to_step)
    if ((first + i + 1) * WARPS <= ROWS || (first + i) * WARPS + warp < ROWS)
#pragma unroll
      for (int e = 0; e < EACH; e++) *reinterpret_cast<u32 *>(memory + (to & ~3u) + lane * 4 + e * 128) = held[i][e];
}

// Puts 16 bytes of every COLUMNSth row of y, whose addresses are `step` apart, from columns of the tile: vector v of a window that
// begins on a sector.
template <typename T, int C, int COLUMNS, int PITCH, typename Put>
__device__ __forceinline__ void put_columns(u64 y_row, i64 step, const unsigned char *from, int v, int c_first, Put put) {
#pragma unroll
  for (int c = 0; c < C; c += COLUMNS, y_row += step, from += COLUMNS * sizeof(T)) {
    const int before = int(u32(y_row) % 32);  // bytes by which the window begins earlier
    put((y_row - before) + v * 16, reinterpret_cast<const typename Element<T>::Bits *>(from - before * PITCH),
        before / int(sizeof(T)), c_first + c);
  }
}

// x: matrices whose columns are adjacent; y: contiguous. The tile lies in shared memory by rows of x, PITCH elements apart.
//
// 16 bits: PITCH is odd where x_row is, so an element is the lower half of a word in shared memory if it is in memory, and words
// are moved as they are. Reading, 8 lanes are 16 bytes of y apart, and 4 of them STEP columns: dispatch.py says how PITCH
// and STEP send the 32 to different banks.
template <typename T, int R, int C, int PITCH, int STEP, int THREADS>
__global__ void __launch_bounds__(THREADS, 1280 / THREADS)
    transpose_windows(const T *x_all, T *y_all, i64 M, i64 N, i64 B1, i64 x_b0, i64 x_b1, i64 x_row, u32 tiles_n, u32 group,
                      u32 bands) {
  constexpr int SIZE = sizeof(T), PAIR = 4 / SIZE, ROWS = R + SECTOR<T> - 1, WARPS = THREADS / 32;
  constexpr int EACH = C * SIZE / 128;                           // words of a row that a lane fetches
  constexpr int TRIPS = (ROWS + WARPS - 1) / WARPS;              // rows that a warp fetches
  constexpr int BATCH = TRIPS * EACH <= 18 ? TRIPS : 18 / EACH;  // of them before it uses any
  constexpr int ACROSS = R / (8 * K<T>), DOWN = WARPS / ACROSS;  // warps side by side along rows of y; on other rows
  static_assert(C * SIZE % 128 == 0 && R % (8 * K<T>) == 0 && WARPS % (ACROSS * STEP) == 0 && C % (4 * DOWN) == 0);
  static_assert(PITCH >= C + 2 * (PAIR - 1), "words of neighbouring rows may not meet");
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // bands of `group` tile rows, walked down and then right: kernels.py says why
  const u32 strip = blockIdx.x / group, tile_n = strip % tiles_n;
  u32 band = strip / tiles_n;
  if (band >= bands) {  // of another matrix than the first
    const u32 b = band / bands;
    band -= b * bands;
    x_all += i64(b / u32(B1)) * x_b0 + i64(b % u32(B1)) * x_b1, y_all += i64(b) * M * N;
  }
  const i64 m_all = i64(band * group + blockIdx.x - strip * group) * R, n_all = i64(tile_n) * C;
  const i64 m_first = m_all - (SECTOR<T> - 1);  // row 0 of the tile; windows that begin on a sector by themselves begin at m_all
  if (m_first >= M) return;                     // bands are of equal height, tiles may end sooner
  const bool inside = m_first >= 0 && m_all + R <= M && n_all >= PAIR - 1 && n_all + C + PAIR - 1 <= N;

  // ---- rows of x into shared memory. Addresses may lie outside of the tensor; what is read lies in it. ----
  const u64 origin = u64(x_all) + (m_first * x_row + n_all) * SIZE;
  const int odd = origin / SIZE % PAIR;
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));

  // Word w of row r, which begins in the middle of its first word or with it. `p` is the word's address.
  auto guarded = [&](u64 p, int r, int w) {
    const i64 m = m_first + r, n = n_all + w * PAIR - (origin / SIZE + r * x_row) % PAIR;
    u32 word = 0;
    if (m >= 0 && m < M) {
      if (n >= 0 && n + PAIR <= N)
        word = load_word(p, policy);
      else if (PAIR == 2 && n >= 0 && n < N)
        word = load_half(p);
      else if (PAIR == 2 && n == -1)
        word = load_half(p + 2) << 16;
    }
    return word;
  };
  // Rows that begin in the middle of a word end in the middle of one: a word more, of which each thread fetches one row's.
  constexpr int LASTS = PAIR == 2 ? (ROWS + THREADS - 1) / THREADS : 0;
  auto ends_in_a_word = [&](int r) { return r < ROWS && (odd + r * PITCH) % 2; };
  u32 last[LASTS + 1];
#pragma unroll
  for (int i = 0; i < LASTS; i++)
    if (const int r = i * THREADS + threadIdx.x; ends_in_a_word(r))
      last[i] = guarded(((origin + r * x_row * SIZE) & ~u64(3)) + C * SIZE, r, C / 2);

  u64 row = origin + warp * x_row * SIZE;
  u32 to = u32(warp * PITCH + odd) * SIZE;
  const i64 row_step = WARPS * x_row * SIZE;
  constexpr u32 TO_STEP = WARPS * PITCH * SIZE;
  if (inside) {
    auto plain = [&](u64 p, int, int) { return load_word(p, policy); };
#pragma unroll
    for (int first = 0; first < TRIPS; first += BATCH)
      fetch_rows<BATCH, WARPS, ROWS, EACH>(first, warp, lane, row, row_step, memory, to, TO_STEP, plain);
  } else {
#pragma unroll 1
    for (int first = 0; first < TRIPS; first += 4)
      fetch_rows<4, WARPS, ROWS, EACH>(first, warp, lane, row, row_step, memory, to, TO_STEP, guarded);
  }
#pragma unroll
  for (int i = 0; i < LASTS; i++)
    if (const int r = i * THREADS + threadIdx.x; ends_in_a_word(r))
      *reinterpret_cast<u32 *>(memory + (odd + r * PITCH) / 2 * 4 + C * SIZE) = last[i];
  __syncthreads();

  // ---- columns of it to rows of y: a warp writes 128 bytes of each of 4 at a time ----
  typedef typename Element<T>::Bits Bits;
  const int v = warp % ACROSS * 8 + lane % 8, four = warp / ACROSS;
  const int c_first = four / STEP * (4 * STEP) + four % STEP + lane / 8 * STEP;
  const u64 y_row = u64(y_all) + ((n_all + c_first) * M + m_all) * SIZE;
  const i64 y_step = 4 * DOWN * M * SIZE;
  const unsigned char *const from = memory + ((SECTOR<T> - 1 + v * K<T>) * PITCH + odd + c_first) * SIZE;
  auto whole = [&](u64 to, const Bits *column, int, int) {
    Words<T, K<T>> out;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (PAIR == 1)
        out.word[j] = column[j * PITCH];
      else
        out.word[j] = __byte_perm(column[2 * j * PITCH], column[(2 * j + 1) * PITCH], 0x5410);
    }
    store<T, K<T>>(reinterpret_cast<T *>(to), out);
  };
  auto guarded_whole = [&](u64 to, const Bits *column, int before, int c) {
    const i64 m = m_all - before + v * K<T>;
    if (n_all + c >= N) return;
    if (m >= 0 && m + K<T> <= M) return whole(to, column, before, c);
#pragma unroll 1
    for (int j = 0; j < K<T>; j++)  // the row's first or last sector, shared with the row before or behind it
      if (m + j >= 0 && m + j < M) reinterpret_cast<Bits *>(to)[j] = column[j * PITCH];
  };
  if (inside)
    put_columns<T, C, 4 * DOWN, PITCH>(y_row, y_step, from, v, c_first, whole);
  else
    put_columns<T, C, 4 * DOWN, PITCH>(y_row, y_step, from, v, c_first, guarded_whole);
}
