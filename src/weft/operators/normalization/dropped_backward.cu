// The gradient of dropout + residual + RMSNorm in one pass: that of the norm (backward.cuh), which is the residual's, and the same
// past the mask, which is x's. The mask is made again from the seed, where the elements are in registers.
#include "backward.cuh"
#include "philox.cuh"

// Writes a gradient past the mask of dropout. An element has 16 random bits, by its row-major number: half element % 2 (the lower
// first) of word element % 8 / 2 of group element / 8; it is dropped where they are below a threshold of 1 ... 65536.
template <typename T> struct Dropped {
  T *dx;
  Keys keys;
  u64 offset;
  u32 last;  // (threshold << 16) - 1: bits are compared in the upper half of a word, whatever is in the lower one
  float scale;

  // `element` is a multiple of COUNT. Of 4 elements (fp32) two threads make the same group and take half of it each.
  template <int COUNT> __device__ __forceinline__ void write(const float (&gradient)[COUNT], i64 element) const {
    static_assert(COUNT == 8 || COUNT == 4, "");
    u32 word[4];
    philox(u64(element) / 8, keys, offset, word);
    if (COUNT == 4 && element % 8) word[0] = word[2], word[1] = word[3];
    float masked[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const u32 bits = i % 2 ? word[i / 2] : word[i / 2] << 16;
      masked[i] = (bits <= last ? 0.f : gradient[i]) * scale;
    }
    store<T, COUNT>(dx + element, pack<T, COUNT>(masked));
  }
};

// h, dr, dx: [M, N], contiguous; dy, dh: [M, N], rows 16-byte aligned, N a multiple of 8; w: [N]; dw: [clusters, N] partial sums.
// Grid, shared memory: as norm_backward's, of three tensors. The seed is read from memory with SEED_IN_MEMORY.
template <typename T, typename W, int THREADS, int EACH, int ROWS, int STAGES, int PER_SM, bool SEED_IN_MEMORY>
__global__ void __launch_bounds__(THREADS, PER_SM)
    dropped_norm_backward(const T *h, const T *dy, const T *dh, const W *w, T *dr, float *dw, T *dx, const u64 *seed_at, i64 M, i64 N,
                          i64 dy_row, i64 dh_row, float eps, u64 seed, u64 offset, u32 last, float scale) {
  Dropped<T> dropped = {dx, keys_of(SEED_IN_MEMORY ? *seed_at : seed), offset, last, scale};
  gradient_of_rows<T, W, THREADS, EACH, ROWS, STAGES, false, true, true>(h, dy, dh, w, nullptr, nullptr, dr, dw, nullptr, M, N, N, dy_row,
                                                                         dh_row, N, eps, dropped);
}
