// Dense rows of 3, 5, 6 or 7 elements: their extremum with a byte a row that says which elements equal it, and the gradient of that
// from these bytes.
//
// A row is no power of two of bytes, so neighbouring threads' rows are not coalesced 16-byte accesses. As in short_rows.cu, a warp
// moves its rows 16 bytes a lane between memory and shared memory of its own, and there a thread has as many rows as 16 bytes hold
// elements: N vectors. No thread waits for another warp.
#include "prelude.cuh"

template <typename T> constexpr int EACH = 16 / sizeof(T);  // rows of a thread
template <int COUNT> struct Bytes { typedef u32 type; };    // COUNT bytes in one register, or two
template <> struct Bytes<8> { typedef u64 type; };

template <typename T, int COUNT> __device__ __forceinline__ void store_shared(T *p, const Words<T, COUNT> &w) {
#pragma unroll
  for (int i = 0; i < w.N; i += 4)
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(reinterpret_cast<u32 *>(p) + i)),
                 "r"(w.word[i]), "r"(w.word[i + 1]), "r"(w.word[i + 2]), "r"(w.word[i + 3])
                 : "memory");
}

template <typename T> __device__ __forceinline__ T rounded(float f) {
  T x;
  if constexpr (sizeof(T) == 4)
    x = f;
  else
    x.bits = (unsigned short)pack_pair(T{}, f, 0.f);
  return x;
}

__device__ __forceinline__ float larger(float a, float b) {  // NaN wins
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Rounded to T it is exact. A quotient of 16-bit floats by up to 7 lies 2**-15 of itself or more from where its rounding changes, so two
// units of fp32's last place are no matter there, and there is no branch.
template <typename T> __device__ __forceinline__ float quotient(float a, float b) {
  if constexpr (sizeof(T) == 2) return __fdividef(a, b);
  float r;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// out[m] = the largest of x[m, :], or the smallest; bit n of bits[m]: whether x[m, n] equals it. x [M, N], out [M] and bits [M] are
// dense, on 16 bytes.
template <typename T, int N, bool SMALLEST, int THREADS>
__global__ void __launch_bounds__(THREADS) mask_short_rows(const T *x, T *out, unsigned char *bits, i64 M) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int E = EACH<T>, ROWS = 32 * E;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = (i64(blockIdx.x) * (THREADS / 32) + warp) * ROWS, left = M - first;
  if (left <= 0) return;
  T *const own = reinterpret_cast<T *>(memory) + warp * ROWS * N;
  x += first * N, out += first, bits += first;

  if (left >= ROWS) {
    Words<T, E> held[N];
#pragma unroll
    for (int i = 0; i < N; i++) held[i] = load<T, E>(x + (i * 32 + lane) * E);
#pragma unroll
    for (int i = 0; i < N; i++) store_shared<T, E>(own + (i * 32 + lane) * E, held[i]);
  } else {
    for (int i = lane; i < int(left) * N; i += 32) own[i] = x[i];
  }
  __syncwarp();

  float f[E * N], results[E];
  unpack(load_shared<T, E * N>(own + lane * E * N), f);  // 8 lanes N vectors apart: 8 groups of 4 banks, 4 where N is 6
  typename Bytes<E>::type packed = 0;
#pragma unroll
  for (int r = 0; r < E; r++) {
    if constexpr (SMALLEST) {
#pragma unroll
      for (int n = 0; n < N; n++) f[r * N + n] = -f[r * N + n];
    }
    float best = f[r * N];
#pragma unroll
    for (int n = 1; n < N; n++) best = larger(best, f[r * N + n]);
    u32 equal = 0;
#pragma unroll
    for (int n = 0; n < N; n++) equal |= f[r * N + n] == best ? 1u << n : 0u;
    packed |= typename Bytes<E>::type(equal) << 8 * r;
    results[r] = SMALLEST ? -best : best;
  }
  if (left >= ROWS) {
    store<T, E>(out + lane * E, pack<T, E>(results));
    *reinterpret_cast<typename Bytes<E>::type *>(bits + lane * E) = packed;
  } else {
#pragma unroll
    for (int r = 0; r < E; r++)
      if (lane * E + r < left) {
        out[lane * E + r] = rounded<T>(results[r]);
        bits[lane * E + r] = (unsigned char)(packed >> 8 * r);
      }
  }
}

// dx[m, n] = dy[m] over the number of set bits of bits[m] where bit n is one of them; elsewhere 0 dy, or NaN where none is. dy [M],
// bits [M] and dx [M, N] are dense, on 16 bytes.
template <typename T, int N, int THREADS>
__global__ void __launch_bounds__(THREADS) gradient_of_mask(const T *dy, const unsigned char *bits, T *dx, i64 M) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int E = EACH<T>, ROWS = 32 * E;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = (i64(blockIdx.x) * (THREADS / 32) + warp) * ROWS, left = M - first;
  if (left <= 0) return;
  T *const own = reinterpret_cast<T *>(memory) + warp * ROWS * N;
  dy += first, bits += first, dx += first * N;

  float g[E], f[E * N];
  typename Bytes<E>::type packed = 0;
  if (left >= ROWS) {
    unpack(load<T, E>(dy + lane * E), g);
    packed = *reinterpret_cast<const typename Bytes<E>::type *>(bits + lane * E);
  } else {
#pragma unroll
    for (int r = 0; r < E; r++) {
      const bool there = lane * E + r < left;
      g[r] = there ? to_float(dy[lane * E + r]) : 0.f;
      packed |= typename Bytes<E>::type(there ? bits[lane * E + r] : 0) << 8 * r;
    }
  }
#pragma unroll
  for (int r = 0; r < E; r++) {
    const u32 equal = u32(packed >> 8 * r) & 0xff;
    const int ties = __popc(equal);
    const float share = quotient<T>(g[r], float(ties)), nothing = ties ? g[r] * 0.f : __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int n = 0; n < N; n++) f[r * N + n] = equal >> n & 1 ? share : nothing;
  }
  store_shared<T, E * N>(own + lane * E * N, pack<T, E * N>(f));  // banks as in mask_short_rows
  __syncwarp();

  if (left >= ROWS) {
#pragma unroll
    for (int i = 0; i < N; i++) store<T, E>(dx + (i * 32 + lane) * E, load_shared<T, E>(own + (i * 32 + lane) * E));
  } else {
    for (int i = lane; i < int(left) * N; i += 32) dx[i] = own[i];
  }
}
