// What weft's CUDA C++ kernels share: 16-bit floats, 16-byte accesses, reductions over warp, block and cluster.
// It stands alone (no CUDA headers), so that NVRTC needs nothing beside it.
#pragma once

typedef unsigned int u32;
typedef long long i64;

struct fp16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

// ---- COUNT elements as 32-bit words: moved 16 bytes at a time, converted to and from float in registers --------------

template <typename T, int COUNT> struct Words {
  static constexpr int N = (COUNT * sizeof(T) + 3) / 4;
  u32 word[N];
};

__device__ __forceinline__ float half_to_float(unsigned short h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

template <int COUNT> __device__ __forceinline__ void unpack(const Words<float, COUNT> &w, float (&f)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = __uint_as_float(w.word[i]);
}

template <int COUNT> __device__ __forceinline__ void unpack(const Words<bf16, COUNT> &w, float (&f)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = __uint_as_float(i % 2 ? w.word[i / 2] & 0xffff0000u : w.word[i / 2] << 16);
}

template <int COUNT> __device__ __forceinline__ void unpack(const Words<fp16, COUNT> &w, float (&f)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = half_to_float((unsigned short)(w.word[i / 2] >> (i % 2 * 16)));
}

__device__ __forceinline__ u32 pack_pair(bf16, float low, float high) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}

__device__ __forceinline__ u32 pack_pair(fp16, float low, float high) {
  u32 w;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}

template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> pack(const float (&f)[COUNT]) {
  Words<T, COUNT> w;
#pragma unroll
  for (int i = 0; i < Words<T, COUNT>::N; i++) {
    if constexpr (sizeof(T) == 4)
      w.word[i] = __float_as_uint(f[i]);
    else
      w.word[i] = pack_pair(T{}, f[2 * i], 2 * i + 1 < COUNT ? f[2 * i + 1] : 0.f);
  }
  return w;
}

// Reads that will not be read again: they do not displace what will be.
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> load_streaming(const T *p) {
  Words<T, COUNT> w;
  if constexpr (COUNT * sizeof(T) >= 16) {
#pragma unroll
    for (int i = 0; i < w.N; i += 4)
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.word[i]), "=r"(w.word[i + 1]), "=r"(w.word[i + 2]), "=r"(w.word[i + 3])
                   : "l"(reinterpret_cast<const u32 *>(p) + i));
  } else {
    static_assert(COUNT == 1, "16 bytes, or one element");
    if constexpr (sizeof(T) == 4)
      w.word[0] = *reinterpret_cast<const u32 *>(p);
    else
      w.word[0] = *reinterpret_cast<const unsigned short *>(p);
  }
  return w;
}

// Reads that other blocks repeat, such as a weight's row.
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> load_shared_by_all(const T *p) {
  Words<T, COUNT> w;
  if constexpr (COUNT * sizeof(T) >= 16) {
#pragma unroll
    for (int i = 0; i < w.N; i += 4)
      asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(w.word[i]), "=r"(w.word[i + 1]), "=r"(w.word[i + 2]), "=r"(w.word[i + 3])
          : "l"(reinterpret_cast<const u32 *>(p) + i));
  } else {
    w = load_streaming<T, COUNT>(p);
  }
  return w;
}

template <typename T, int COUNT> __device__ __forceinline__ void store(T *p, const Words<T, COUNT> &w) {
  if constexpr (COUNT * sizeof(T) >= 16) {
#pragma unroll
    for (int i = 0; i < w.N; i += 4)
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<u32 *>(p) + i), "r"(w.word[i]),
                   "r"(w.word[i + 1]), "r"(w.word[i + 2]), "r"(w.word[i + 3])
                   : "memory");
  } else if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<u32 *>(p) = w.word[0];
  } else {
    *reinterpret_cast<unsigned short *>(p) = (unsigned short)w.word[0];
  }
}

// ---- warp ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// ---- cluster: blocks that can write into each other's shared memory (sm_90 and later) --------------------------------

__device__ __forceinline__ u32 cluster_blocks() {
  u32 n;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));
  return n;
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(r));
  return r;
}

// Every thread of every block of the cluster arrives; writes before it are seen after it.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores a float at the same shared-memory place in block `rank` of the cluster.
__device__ __forceinline__ void store_remote(float *own, u32 rank, float value) {
  u32 local = u32(__cvta_generic_to_shared(own)), remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}
