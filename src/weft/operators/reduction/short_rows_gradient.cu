// The gradient of norms of dense rows of 3, 5, 6 or 7 elements: x is read and dx written 16 bytes at a time.
//
// A row is no power of two of bytes, so neighbouring threads' rows are not coalesced 16-byte accesses. As in short_rows.cu, a warp
// moves its rows 16 bytes a lane between memory and shared memory of its own, and there a thread has as many rows as 16 bytes
// hold elements: N vectors, which it replaces by their gradient. No thread waits for another warp.
#include "prelude.cuh"

template <typename T> constexpr int EACH = 16 / sizeof(T);  // rows of a thread

template <typename T, int COUNT> __device__ __forceinline__ void store_shared(T *p, const Words<T, COUNT> &w) {
#pragma unroll
  for (int i = 0; i < w.N; i += 4)
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(reinterpret_cast<u32 *>(p) + i)),
                 "r"(w.word[i]), "r"(w.word[i + 1]), "r"(w.word[i + 2]), "r"(w.word[i + 3])
                 : "memory");
}

// ---- formulas, named and meant as in kernels.py: what depends on a row alone, and an element's gradient from it ---------

struct direction {
  template <typename T> static __device__ __forceinline__ float of_row(float y) {
    float r;
    if constexpr (sizeof(T) == 4)
      asm("rcp.rn.f32 %0, %1;" : "=f"(r) : "f"(y));
    else
      asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(y));  // off by one unit of fp32 at most, and no branch
    return y == 0.f ? 0.f : r;
  }
  static __device__ __forceinline__ float of(float x, float row, float dy) { return x * row * dy; }
};
struct signed_by {
  template <typename> static __device__ __forceinline__ float of_row(float) { return 0.f; }
  static __device__ __forceinline__ float of(float x, float, float dy) {
    return ((x > 0.f ? 1.f : 0.f) - (x < 0.f ? 1.f : 0.f)) * dy;
  }
};

// dx[m, n] = F(x[m, n], y[m], dy[m]). x and dx [M, N], y and dy [M] are dense, on 16 bytes.
template <typename T, int N, typename F, int THREADS>
__global__ void __launch_bounds__(THREADS) gradient_of_short_rows(const T *x, const T *y, const T *dy, T *dx, i64 M) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int E = EACH<T>, ROWS = 32 * E;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = (i64(blockIdx.x) * (THREADS / 32) + warp) * ROWS, left = M - first;
  if (left <= 0) return;
  T *const own = reinterpret_cast<T *>(memory) + warp * ROWS * N, *const mine = own + lane * E * N;
  x += first * N, dx += first * N, y += first, dy += first;

  float row[E], g[E], f[E * N];
  if (left >= ROWS) {
    Words<T, E> held[N];
#pragma unroll
    for (int i = 0; i < N; i++) held[i] = load<T, E>(x + (i * 32 + lane) * E);
    const Words<T, E> of_rows = load<T, E>(y + lane * E), gradients = load<T, E>(dy + lane * E);
#pragma unroll
    for (int i = 0; i < N; i++) store_shared<T, E>(own + (i * 32 + lane) * E, held[i]);
    unpack(of_rows, row);
    unpack(gradients, g);
  } else {
    for (int i = lane; i < int(left) * N; i += 32) own[i] = x[i];
#pragma unroll
    for (int r = 0; r < E; r++) {
      const bool there = lane * E + r < left;
      row[r] = there ? to_float(y[lane * E + r]) : 0.f;
      g[r] = there ? to_float(dy[lane * E + r]) : 0.f;
    }
  }
  __syncwarp();

  unpack(load_shared<T, E * N>(mine), f);  // 8 lanes N vectors apart: 8 groups of 4 banks, 4 where N is 6
#pragma unroll
  for (int r = 0; r < E; r++) {
    const float one = F::template of_row<T>(row[r]);
#pragma unroll
    for (int n = 0; n < N; n++) f[r * N + n] = F::of(f[r * N + n], one, g[r]);
  }
  store_shared<T, E * N>(mine, pack<T, E * N>(f));  // where only this thread has read
  __syncwarp();

  if (left >= ROWS) {
#pragma unroll
    for (int i = 0; i < N; i++) store<T, E>(dx + (i * 32 + lane) * E, load_shared<T, E>(own + (i * 32 + lane) * E));
  } else {
    for (int i = lane; i < int(left) * N; i += 32) dx[i] = own[i];
  }
}
