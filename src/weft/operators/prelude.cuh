// What weft's CUDA C++ kernels share: 16-bit floats, 16-byte accesses, reductions over warp, block, cluster.
// It includes nothing (no CUDA headers), so that NVRTC needs nothing beside it.
#pragma once

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct fp16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

// ---- COUNT elements as 32-bit words: moved 16 bytes at a time, converted to and from float in registers --------------

__device__ __forceinline__ u32 shared_address(const void *p) { return u32(__cvta_generic_to_shared(p)); }

template <typename T, int COUNT> struct Words {
  static constexpr int N = (COUNT * sizeof(T) + 3) / 4;
  u32 word[N];
};

__device__ __forceinline__ float half_to_float(unsigned short h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) { return half_to_float(x.bits); }

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

// 16 bytes at a time.
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> load(const T *p) {
  Words<T, COUNT> w;
#pragma unroll
  for (int i = 0; i < w.N; i += 4)
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.word[i]), "=r"(w.word[i + 1]), "=r"(w.word[i + 2]), "=r"(w.word[i + 3])
                 : "l"(reinterpret_cast<const u32 *>(p) + i));
  return w;
}

// The same for what streams through once. With L2::evict_last on the reads, L2 gives up written lines first; the H200 then
// moves 2 % more bytes a second at one read for one write (L1::no_allocate and L2::evict_first cost 2 to 5 %).
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> load_stream(const T *p) {
  Words<T, COUNT> w;
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll
  for (int i = 0; i < w.N; i += 4)
    asm volatile("ld.global.L1::evict_last.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(w.word[i]), "=r"(w.word[i + 1]), "=r"(w.word[i + 2]), "=r"(w.word[i + 3])
                 : "l"(reinterpret_cast<const u32 *>(p) + i), "l"(policy));
  return w;
}

// Copies 16 bytes into shared memory past the registers, or zeros where there is nothing `there`; marked as load_stream's.
__device__ __forceinline__ void copy_stream(void *shared, const void *global, bool there = true) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
               "l"(global), "r"(there ? 16 : 0), "l"(policy)
               : "memory");
}

// Waits for all that this thread copies past the registers.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> load_shared(const T *p) {
  Words<T, COUNT> w;
#pragma unroll
  for (int i = 0; i < w.N; i += 4)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.word[i]), "=r"(w.word[i + 1]), "=r"(w.word[i + 2]), "=r"(w.word[i + 3])
                 : "r"(shared_address(reinterpret_cast<const u32 *>(p) + i)));
  return w;
}

template <typename T, int COUNT> __device__ __forceinline__ void store(T *p, const Words<T, COUNT> &w) {
#pragma unroll
  for (int i = 0; i < w.N; i += 4)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<u32 *>(p) + i), "r"(w.word[i]),
                 "r"(w.word[i + 1]), "r"(w.word[i + 2]), "r"(w.word[i + 3])
                 : "memory");
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

// Maximum of words that hold one float or a pair of 16-bit floats; NaN counts for nothing, as in fmaxf.
__device__ __forceinline__ u32 word_max(float, u32 a, u32 b) {
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}

__device__ __forceinline__ u32 word_max(bf16, u32 a, u32 b) {
  u32 r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

__device__ __forceinline__ u32 word_max(fp16, u32 a, u32 b) {
  u32 r;
  asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

__device__ __forceinline__ u32 minus_infinity_word(float) { return 0xff800000u; }
__device__ __forceinline__ u32 minus_infinity_word(bf16) { return 0xff80ff80u; }
__device__ __forceinline__ u32 minus_infinity_word(fp16) { return 0xfc00fc00u; }

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

// The two halves of a cluster-wide barrier. Relaxed: a releasing one waits for all earlier accesses of the whole GPU.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- mbarriers: a block waits until so many bytes have come from other blocks ------------------------------------------

// Initialised for one arrival, and made visible to the cluster.
__device__ __forceinline__ void barrier_init(u64 *barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, counting on `bytes` more to come.
__device__ __forceinline__ void barrier_expect(u64 *barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Waits until the barrier's first phase is over.
__device__ __forceinline__ void barrier_wait(u64 *barrier) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier))
                 : "memory");
  } while (!done);
}

// Waits until a barrier's phase is over: its first, third … with parity 0, its second, fourth … with parity 1.
__device__ __forceinline__ void phase_wait(u64 *barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}

// One thread copies `bytes` (a multiple of 16; both ends on 16 bytes) into shared memory, past the registers, and tells the
// barrier when they are there. The barrier was initialised by the same thread.
__device__ __forceinline__ void copy_bulk(void *shared, const void *global, u32 bytes, u64 *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// copy_bulk with the hint of load_stream.
__device__ __forceinline__ void copy_bulk_stream(void *shared, const void *global, u32 bytes, u64 *barrier) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}

__device__ __forceinline__ u32 remote_address(const void *own, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(own)), "r"(rank));
  return remote;
}

// Stores at the same shared-memory address of block `rank`, and signals that block's barrier when it has arrived.
__device__ __forceinline__ void store_remote(float *own, u32 rank, float value, u64 *barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   remote_address(own, rank)),
               "f"(value), "r"(remote_address(barrier, rank))
               : "memory");
}

__device__ __forceinline__ void store_remote(float2 *own, u32 rank, float2 value, u64 *barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   remote_address(own, rank)),
               "f"(value.x), "f"(value.y), "r"(remote_address(barrier, rank))
               : "memory");
}

__device__ __forceinline__ void store_remote(float4 *own, u32 rank, float4 value, u64 *barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   remote_address(own, rank)),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(remote_address(barrier, rank))
               : "memory");
}
