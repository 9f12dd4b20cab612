// Dense rows of 3 to 7 elements of 16 bits: read and written 16 bytes at a time, reduced by one thread each.
//
// A row is no power of two of bytes, so neighbouring threads' rows are not coalesced 16-byte accesses. A warp therefore copies
// 256 rows, in memory order, into shared memory of its own, from where each thread takes 8 rows: N vectors of 16 bytes, and its 8
// results are one more. No thread waits for another warp.
#include "prelude.cuh"

constexpr int EACH = 8, ROWS = 32 * EACH;  // rows of a thread, of a warp

template <typename T, int COUNT> __device__ __forceinline__ void store_shared(T *p, const Words<T, COUNT> &w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(w.word[0]), "r"(w.word[1]),
               "r"(w.word[2]), "r"(w.word[3])
               : "memory");
}

// ---- formulas, named and meant as in kernels.py ------------------------------------------------------------------------

struct itself { static __device__ __forceinline__ float of(float x) { return x; } };
struct negative { static __device__ __forceinline__ float of(float x) { return -x; } };
struct magnitude { static __device__ __forceinline__ float of(float x) { return __uint_as_float(__float_as_uint(x) & 0x7fffffffu); } };
struct square { static __device__ __forceinline__ float of(float x) { return x * x; } };

struct plus {
  static __device__ __forceinline__ float neutral() { return 0.f; }
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct larger {
  static __device__ __forceinline__ float neutral() { return __uint_as_float(0xff800000u); }
  static __device__ __forceinline__ float of(float a, float b) {  // NaN wins
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
};

struct as_is { static __device__ __forceinline__ float of(float total, float) { return total; } };
struct over_n {
  static __device__ __forceinline__ float of(float total, float n) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(total), "f"(n));
    return r;
  }
};
struct root {
  static __device__ __forceinline__ float of(float total, float) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(total));
    return r;
  }
};
struct negated { static __device__ __forceinline__ float of(float total, float) { return -total; } };

// ---- reduction ---------------------------------------------------------------------------------------------------------

// out[m] = FINISH(JOIN over n of MAP(x[m, n]), n's number). x: [M, N], dense, on 16 bytes; out: [M], on 16 bytes.
template <typename T, int N, typename MAP, typename JOIN, typename FINISH, int THREADS>
__global__ void __launch_bounds__(THREADS) reduce_short_rows(const T *x, T *out, i64 M, float divisor) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = (i64(blockIdx.x) * (THREADS / 32) + warp) * ROWS, left = M - first;
  if (left <= 0) return;
  T *const own = reinterpret_cast<T *>(memory) + warp * ROWS * N;
  x += first * N, out += first;

  if (left >= ROWS) {
    Words<T, 8> held[N];
#pragma unroll
    for (int i = 0; i < N; i++) held[i] = load<T, 8>(x + (i * 32 + lane) * 8);
#pragma unroll
    for (int i = 0; i < N; i++) store_shared<T, 8>(own + (i * 32 + lane) * 8, held[i]);
  } else {
    for (int i = lane; i < int(left) * N; i += 32) own[i] = x[i];
  }
  __syncwarp();

  float f[EACH * N], results[EACH];
  unpack(load_shared<T, EACH * N>(own + lane * EACH * N), f);  // 8 lanes N vectors apart: 8 groups of 4 banks, 4 where N is 6
#pragma unroll
  for (int r = 0; r < EACH; r++) {
    float total = JOIN::neutral();
#pragma unroll
    for (int n = 0; n < N; n++) total = JOIN::of(total, MAP::of(f[r * N + n]));
    results[r] = FINISH::of(total, divisor);
  }
  const Words<T, EACH> packed = pack<T, EACH>(results);
  if (left >= ROWS) {
    store<T, EACH>(out + lane * EACH, packed);
  } else {
#pragma unroll
    for (int r = 0; r < EACH; r++)
      if (lane * EACH + r < left) out[lane * EACH + r].bits = (unsigned short)(packed.word[r / 2] >> (r % 2 * 16));
  }
}
