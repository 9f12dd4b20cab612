// Runs kernels on rows.cuh on a CPU: a thread is a thread of the machine, a warp's shuffles and a block's or cluster's barriers
// are barriers, stores to other blocks are counted, and what is copied past the registers arrives when it is waited for. It takes
// the place of prelude.cuh. Not emulated: caches, memory ordering.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct fp16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct float4 { float x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

// ---- the machine ---------------------------------------------------------------------------------------------------------

using Meeting = std::unique_ptr<std::barrier<>>;
inline Meeting meeting_of(int threads) { return std::make_unique<std::barrier<>>(threads); }

struct Cluster;
struct Block {
  alignas(16) unsigned char shared[8192], dynamic[131072];
  Meeting meeting;
  std::vector<Meeting> warps;
  std::vector<u32> shuffled;
  Cluster *cluster;
  u32 rank;
  std::atomic<i64> bytes = 0;  // that are still to come from other blocks
  std::atomic<bool> ready = false;
};
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  Meeting meeting;
};
struct Index { u32 x; };
inline thread_local Block *block;
inline thread_local Index threadIdx, blockIdx;
inline thread_local std::unique_ptr<std::barrier<>::arrival_token> arrived;
inline thread_local std::vector<std::function<void()>> copies;
inline Index gridDim;

inline void launch(u32 grid, u32 threads, u32 blocks, const std::function<void()> &body) {
  gridDim.x = grid;
  for (u32 c = 0; c < grid / blocks; c++) {
    Cluster cluster{{}, meeting_of(threads * blocks)};
    for (u32 rank = 0; rank < blocks; rank++) {
      cluster.blocks.push_back(std::make_unique<Block>());
      Block &b = *cluster.blocks.back();
      std::memset(b.shared, 0xff, sizeof b.shared), std::memset(b.dynamic, 0xff, sizeof b.dynamic);  // NaN
      b.meeting = meeting_of(threads), b.shuffled.resize(threads), b.cluster = &cluster, b.rank = rank;
      for (u32 warp = 0; warp < threads / 32; warp++) b.warps.push_back(meeting_of(32));
    }
    std::vector<std::thread> running;
    for (u32 i = 0; i < threads * blocks; i++)
      running.emplace_back([&, i] {
        block = cluster.blocks[i / threads].get(), threadIdx.x = i % threads, blockIdx.x = c * blocks + i / threads;
        body();
        if (!copies.empty()) std::abort();  // a copy that nobody waited for
      });
    for (auto &thread : running) thread.join();
  }
}

inline void __syncthreads() { block->meeting->arrive_and_wait(); }

inline float __uint_as_float(u32 x) { float f; std::memcpy(&f, &x, 4); return f; }
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline u32 __float_as_uint(float f) { u32 x; std::memcpy(&x, &f, 4); return x; }
inline float __fdividef(float a, float b) { return a / b; }

inline float shuffle_xor(float x, int step) {
  std::barrier<> &warp = *block->warps[threadIdx.x / 32];
  block->shuffled[threadIdx.x] = __float_as_uint(x);
  warp.arrive_and_wait();
  const u32 other = block->shuffled[threadIdx.x ^ step];
  warp.arrive_and_wait();
  return __uint_as_float(other);
}

// ---- prelude.cuh ---------------------------------------------------------------------------------------------------------

template <typename T, int COUNT> struct Words {
  static constexpr int N = (COUNT * sizeof(T) + 3) / 4;
  u32 word[N];
};

inline float value_of(bf16, u32 bits) { return __uint_as_float(bits << 16); }
inline float value_of(fp16, u32 bits) { return _cvtsh_ss(bits); }
inline u32 bits_of(fp16, float f) { return (unsigned short)_cvtss_sh(f, 0); }
inline u32 bits_of(bf16, float f) {
  const u32 x = __float_as_uint(f);
  return f != f ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

template <typename T, int COUNT> inline void unpack(const Words<T, COUNT> &w, float (&f)[COUNT]) {
  for (int i = 0; i < COUNT; i++)
    if constexpr (sizeof(T) == 4) f[i] = __uint_as_float(w.word[i]);
    else f[i] = value_of(T{}, w.word[i / 2] >> i % 2 * 16 & 0xffff);
}
template <typename T> inline u32 pack_pair(T, float low, float high) { return bits_of(T{}, low) | bits_of(T{}, high) << 16; }
template <typename T, int COUNT> inline Words<T, COUNT> pack(const float (&f)[COUNT]) {
  Words<T, COUNT> w;
  for (int i = 0; i < w.N; i++)
    if constexpr (sizeof(T) == 4) w.word[i] = __float_as_uint(f[i]);
    else w.word[i] = pack_pair(T{}, f[2 * i], f[2 * i + 1]);
  return w;
}

inline void aligned(const void *p) { if (u64(p) % 16) std::abort(); }
template <typename T, int COUNT> inline Words<T, COUNT> load(const T *p) {
  Words<T, COUNT> w;
  aligned(p), std::memcpy(&w, p, sizeof w);
  return w;
}
template <typename T, int COUNT> inline Words<T, COUNT> load_stream(const T *p) { return load<T, COUNT>(p); }
template <typename T, int COUNT> inline Words<T, COUNT> load_shared(const T *p) { return load<T, COUNT>(p); }
template <typename T, int COUNT> inline void store(T *p, const Words<T, COUNT> &w) { aligned(p), std::memcpy(p, &w, sizeof w); }

inline float warp_sum(float x) {
  for (int step = 16; step; step /= 2) x += shuffle_xor(x, step);
  return x;
}
inline float warp_max(float x) {
  for (int step = 16; step; step /= 2) x = fmaxf(x, shuffle_xor(x, step));
  return x;
}
inline u32 word_max(float, u32 a, u32 b) { return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b))); }
template <typename T> inline u32 word_max(T, u32 a, u32 b) {
  const auto half = [&](int s) { return bits_of(T{}, fmaxf(value_of(T{}, a >> s & 0xffff), value_of(T{}, b >> s & 0xffff))); };
  return half(0) | half(16) << 16;
}
inline u32 minus_infinity_word(float) { return 0xff800000u; }
inline u32 minus_infinity_word(bf16) { return 0xff80ff80u; }
inline u32 minus_infinity_word(fp16) { return 0xfc00fc00u; }

inline u32 cluster_blocks() { return block->cluster->blocks.size(); }
inline u32 cluster_rank() { return block->rank; }
inline void cluster_arrive() { arrived = std::make_unique<std::barrier<>::arrival_token>(block->cluster->meeting->arrive()); }
inline void cluster_wait() { block->cluster->meeting->wait(std::move(*arrived)); }
inline void barrier_init(u64 *) { block->ready = true; }
inline void barrier_expect(u64 *, u32 bytes) { block->bytes += bytes; }
inline void barrier_wait(u64 *) {
  while (block->bytes > 0) std::this_thread::yield();
}
template <typename V> inline void store_remote(V *own, u32 rank, V value, u64 *) {
  Block &other = *block->cluster->blocks[rank];
  if (!other.ready) std::abort();  // its barrier is not there yet
  std::memcpy(other.shared + (reinterpret_cast<unsigned char *>(own) - block->shared), &value, sizeof value);
  other.bytes -= sizeof value;
}
inline void copy_stream(void *to, const void *from) {
  aligned(to), aligned(from);
  copies.push_back([=] { std::memcpy(to, from, 16); });
}
inline void copies_wait() {
  for (auto &copy : copies) copy();
  copies.clear();
}
