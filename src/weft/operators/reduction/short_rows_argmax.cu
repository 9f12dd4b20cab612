// The indices of the largest elements of dense rows of 2 to 8: x is read and indices are written 16 bytes at a time.
//
// Neighbouring lanes' vectors lie side by side. Rows that no vector holds whole go through shared memory of the warp's own, as in
// short_rows.cu, from where a thread takes as many rows as 16 bytes hold elements. 64-bit indices go through it too, a byte each, so that the
// two that a lane stores at once are next to its neighbours'. No thread waits for another warp.
#include "prelude.cuh"

template <typename T> constexpr int EACH = 16 / sizeof(T);  // rows of a thread

template <typename T, int COUNT> __device__ __forceinline__ void store_shared(T *p, const Words<T, COUNT> &w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(w.word[0]), "r"(w.word[1]),
               "r"(w.word[2]), "r"(w.word[3])
               : "memory");
}

// The first of the largest of N elements; NaN is above all else.
template <int N> __device__ __forceinline__ int first_largest(const float *f) {
  float best = f[0];
  int place = 0;
#pragma unroll
  for (int n = 1; n < N; n++) {
    const bool above = !(f[n] <= best) && best == best;
    place = above ? n : place, best = above ? f[n] : best;
  }
  return place;
}

// place[m] = first_largest of x[m, :]. x [M, N] and place [M] are dense, on 16 bytes.
template <typename T, int N, int THREADS> __global__ void __launch_bounds__(THREADS) argmax_short_rows(const T *x, i64 *place, i64 M) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int E = EACH<T>, ROWS = 32 * E;
  constexpr bool WHOLE = E % N == 0;  // vectors hold whole rows
  constexpr int OF_VECTOR = WHOLE ? E / N : 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = (i64(blockIdx.x) * (THREADS / 32) + warp) * ROWS, left = M - first;
  if (left <= 0) return;
  T *const own = reinterpret_cast<T *>(memory) + warp * ROWS * N;
  x += first * N, place += first;

  // WHOLE: vector i of a lane is the warp's (32 i + lane)-th; else a lane's follow each other
  Words<T, E> held[N];
  if (left >= ROWS) {
#pragma unroll
    for (int i = 0; i < N; i++) held[i] = load_stream<T, E>(x + (i * 32 + lane) * E);
    if constexpr (!WHOLE) {
#pragma unroll
      for (int i = 0; i < N; i++) store_shared<T, E>(own + (i * 32 + lane) * E, held[i]);
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < int(left) * N; i += 32) own[i] = x[i];
  }
  __syncwarp();
  if (!WHOLE || left < ROWS) {
#pragma unroll
    for (int i = 0; i < N; i++) held[i] = load_shared<T, E>(own + (WHOLE ? i * 32 + lane : lane * N + i) * E);
  }
  float f[N * E];
#pragma unroll
  for (int i = 0; i < N; i++) {
    float of_vector[E];
    unpack(held[i], of_vector);
#pragma unroll
    for (int e = 0; e < E; e++) f[i * E + e] = of_vector[e];
  }
  __syncwarp();  // indices lie where elements were

  unsigned char *const found = reinterpret_cast<unsigned char *>(own);
#pragma unroll
  for (int r = 0; r < E; r++) {
    const int row = WHOLE ? (r / OF_VECTOR * 32 + lane) * OF_VECTOR + r % OF_VECTOR : lane * E + r;
    found[row] = (unsigned char)first_largest<N>(f + r * N);
  }
  __syncwarp();

  if (left >= ROWS) {
#pragma unroll
    for (int i = 0; i < E / 2; i++) {
      const int row = (i * 32 + lane) * 2;
      const u32 two = *reinterpret_cast<const unsigned short *>(found + row);
      store<float, 4>(reinterpret_cast<float *>(place + row), Words<float, 4>{{two & 0xff, 0, two >> 8, 0}});
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < int(left); i += 32) place[i] = found[i];
  }
}
