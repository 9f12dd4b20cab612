// Runs the ladder's kernels on a CPU: every thread is a fiber, and the instructions that C++ has no word for are emulated after
// the PTX ISA. What is asynchronous (copies, TMA, wgmma) happens at a random time between the earliest and the latest allowed, and
// fibers take turns at random, so a missing wait shows as a wrong result and a missing arrival as a deadlock. Accesses to
// shared memory are counted against its 32 banks. Not emulated: caches, memory ordering between threads, rounding inside a
// tensor core.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
using std::max;
using std::min;

[[noreturn]] inline void fail(const char *what) {
  std::printf("failed: %s\n", what);
  std::exit(1);
}

// ---- the machine -----------------------------------------------------------------------------------------------------------

constexpr u32 FIRST = 1024;  // a block's shared memory begins behind a KiB of the system's
struct Index { u32 x; };

struct Access { bool store; int width; u64 address; };

struct Barrier { u32 arrivals = 0, pending = 0, phase = 0; i64 bytes = 0; };

struct Meeting { u32 here = 0, generation = 0; };  // of threads that do something together: the last to come does it

struct Block;
struct Cluster {
  std::vector<Block *> blocks;
  Meeting meeting;
};
struct Warp {  // its wgmma: PTX promises nothing about the other three quarters of a product
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> committed;
};

constexpr int STACK = 1 << 16;  // bytes

struct Thread {
  ucontext_t context;  // to begin with; then `jump`, since changing contexts costs two system calls
  jmp_buf jump;
  bool begun = false;
  std::unique_ptr<char[]> stack;
  Block *block = nullptr;
  Index index{};
  bool done = false;
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> committed;  // copies; TMA's stores
  std::vector<std::function<void()>> unfenced;               // stores that TMA does not see yet
  std::vector<std::function<void()>> unreleased;             // stores to memory that other blocks do not see yet
  std::map<u64, u64> last_read;                              // by waits for what other ranks send
  u32 cluster_generation = 0;                                // that it has arrived at
  std::vector<Access> accesses;
  void *argument[4];
};

struct Block {
  Index index{};
  u32 rank = 0;
  Cluster *cluster = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<unsigned char> shared;
  std::map<u32, Barrier> barriers;
  std::map<u32, u32> elected;       // lane of each warp
  std::map<int, Meeting> meetings;  // 0: all; 1 …: named; 1000 + w: warp w
  std::map<int, std::vector<std::function<void()>>> arriving, met;  // unreleased stores of threads that come to a meeting; that have met
  std::vector<Warp> warps;
  size_t alive = 0;  // threads that have not left
};

inline struct Machine {
  std::vector<std::unique_ptr<Block>> blocks;  // that run at the same time
  std::deque<Cluster> clusters;
  std::vector<std::function<void()>> engine;   // TMA's loads under way
  jmp_buf scheduler;
  Thread *now = nullptr;
  std::mt19937 random;
  u32 block_threads = 0, shared_bytes = 0;  // of a launch
  u64 progress = 0;
  bool count_banks = false;
  bool late_stores = false;  // whether inline PTX's stores of 16 bytes, too, are seen by other blocks after a release only
  bool stays = false;  // whether a block must not leave before what it sends has come
  std::map<std::string, std::pair<u64, u64>> banks;  // kind of access: passes taken, fewest possible
} machine;

inline bool chance(int one_in) { return machine.random() % one_in == 0; }
#define threadIdx (machine.now->index)
#define blockIdx (machine.now->block->index)
inline Index gridDim;

inline void yield() {
  if (!_setjmp(machine.now->jump)) _longjmp(machine.scheduler, 1);
}
inline void resume(Thread *thread) {
  machine.now = thread;
  if (_setjmp(machine.scheduler)) return;
  if (thread->begun) _longjmp(thread->jump, 1);
  thread->begun = true;
  setcontext(&thread->context);
}

// Whether all have come now.
inline bool come(Meeting &meeting, u32 threads, const std::function<void()> &act = [] {}) {
  if (++meeting.here != threads) return false;
  act();
  meeting.here = 0, meeting.generation++, machine.progress++;
  return true;
}
inline void meet(Meeting &meeting, u32 threads, const std::function<void()> &act = [] {}) {
  const u32 generation = meeting.generation;
  if (!come(meeting, threads, act))
    while (meeting.generation == generation) yield();
}

inline Cluster &cluster() { return *machine.now->block->cluster; }
inline Thread &lane_of_warp(int lane) {
  return *machine.now->block->threads[machine.now->index.x / 32 * 32 + lane];
}
inline void warp_meets(const std::function<void()> &act) {
  meet(machine.now->block->meetings[1000 + machine.now->index.x / 32], 32, act);
}
inline void __syncthreads() { meet(machine.now->block->meetings[0], machine.block_threads); }
inline void __syncwarp() { warp_meets([] {}); }

// ---- memory and its banks ---------------------------------------------------------------------------------------------------

constexpr u32 OFFSET = 0xffffff;  // of an address in shared memory; above it stands the block's rank in its cluster

inline unsigned char *at(Block &block, u32 address, u32 bytes) {
  address &= OFFSET;
  if (address < FIRST || address + bytes > FIRST + machine.shared_bytes) fail("an access outside shared memory");
  return block.shared.data() + address;
}


extern unsigned char __data_start[], _end[];
inline bool is_static(const void *p) { return p >= __data_start && p < _end; }

inline void touched(const void *p, int width, bool store) {
  if (!machine.count_banks || !machine.now) return;
  const auto *byte = static_cast<const unsigned char *>(p);
  const auto &shared = machine.now->block->shared;
  if (!is_static(p) && (byte < shared.data() || byte >= shared.data() + shared.size())) return;
  if (reinterpret_cast<u64>(p) % width) fail("a misaligned access to shared memory");
  machine.now->accesses.push_back({store, width, reinterpret_cast<u64>(p)});
}

// A warp's n-th access is its lanes' n-th accesses, if they run the same path. 32 lanes go together where a lane moves up to 4
// bytes, 8 lanes where it moves 16; a pass serves each bank one word.
inline void tally(const std::string &kind, const std::vector<u64> &addresses, int width) {
  const size_t together = width >= 16 ? 8 : width == 8 ? 16 : 32;
  for (size_t first = 0; first < addresses.size(); first += together) {
    std::map<u64, std::set<u64>> words;  // of each bank
    std::set<u64> all;
    for (size_t lane = first; lane < min(addresses.size(), first + together); lane++)
      for (int b = 0; b < width; b += 4) {
        const u64 word = (addresses[lane] + b) / 4;
        words[word % 32].insert(word), all.insert(word);
      }
    size_t passes = 0;
    for (auto &bank : words) passes = max(passes, bank.second.size());
    machine.banks[kind].first += passes;
    machine.banks[kind].second += (all.size() + 31) / 32;
  }
}

inline void tally_block(Block &block) {
  for (size_t w = 0; w < block.threads.size(); w += 32) {
    const size_t n = block.threads[w]->accesses.size();
    for (size_t i = 0; i < n; i++) {
      std::vector<u64> addresses;
      const Access &first = block.threads[w]->accesses[i];
      for (size_t lane = 0; lane < 32; lane++) {
        const auto &mine = block.threads[w + lane]->accesses;
        if (mine.size() != n || mine[i].width != first.width || mine[i].store != first.store) fail("lanes on different paths");
        addresses.push_back(mine[i].address);
      }
      tally(std::string(first.store ? "store " : "load ") + std::to_string(first.width), addresses, first.width);
    }
    for (size_t lane = 0; lane < 32; lane++) block.threads[w + lane]->accesses.clear();
  }
}

// ---- prelude.cuh, as far as the ladder uses it --------------------------------------------------------------------------------

inline float __uint_as_float(u32 x) { float f; std::memcpy(&f, &x, 4); return f; }
inline u32 __float_as_uint(float f) { u32 x; std::memcpy(&x, &f, 4); return x; }

struct bf16 {
  unsigned short bits;
  bf16() = default;
  explicit bf16(unsigned short b) : bits(b) {}
  bf16(const bf16 &other) : bits(other.bits) { touched(&other, 2, false); }
  bf16 &operator=(const bf16 &other) {
    touched(this, 2, true);
    bits = other.bits;
    return *this;
  }
};

inline u32 bf16_bits(float f) {
  const u32 x = __float_as_uint(f);
  return std::isnan(f) ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}
inline float bf16_value(unsigned short bits) { return __uint_as_float(u32(bits) << 16); }
inline float to_float(bf16 x) { return bf16_value(x.bits); }
inline u32 pack_pair(bf16, float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }

template <typename T, int COUNT> struct Words { u32 word[COUNT / 2]; };
template <int COUNT> inline void unpack(const Words<bf16, COUNT> &w, float (&f)[COUNT]) {
  for (int i = 0; i < COUNT; i++) f[i] = bf16_value(w.word[i / 2] >> (i % 2 * 16));
}
template <typename T, int COUNT> inline Words<T, COUNT> pack(const float (&f)[COUNT]) {
  Words<T, COUNT> w;
  for (int i = 0; i < COUNT / 2; i++) w.word[i] = pack_pair(bf16{}, f[2 * i], f[2 * i + 1]);
  return w;
}
template <typename T, int COUNT> inline Words<T, COUNT> load(const T *p) {
  Words<T, COUNT> w;
  if (reinterpret_cast<u64>(p) % 16) fail("a misaligned access to memory");
  std::memcpy(&w, p, sizeof w);
  return w;
}
template <typename T, int COUNT> inline Words<T, COUNT> load_shared(const T *p) {
  touched(p, 16, false);
  return load<T, COUNT>(p);
}
inline void store_shared(bf16 *p, const Words<bf16, 8> &w) {
  touched(p, 16, true);
  std::memcpy(static_cast<void *>(p), &w, 16);
}
template <typename T, int COUNT> inline void store(T *p, const Words<T, COUNT> &w) {
  if (reinterpret_cast<u64>(p) % 16) fail("a misaligned access to memory");
  std::memcpy(static_cast<void *>(p), &w, sizeof w);
}
inline u32 cluster_rank() { return machine.now->block->rank; }
inline void *dynamic_memory() { return machine.now->block->shared.data() + FIRST; }

// Static shared memory lies at the end, of launches that are given STATIC bytes more.
constexpr u32 STATIC = 8192;
template <typename A> constexpr u32 static_bytes = (sizeof(A) + 15) / 16 * 16;
template <typename A> inline A &static_memory(u32 taken) {
  if (taken + sizeof(A) > STATIC || STATIC > machine.shared_bytes) fail("more static shared memory than is emulated");
  return *reinterpret_cast<A *>(machine.now->block->shared.data() + FIRST + (machine.shared_bytes - STATIC) / 16 * 16 + taken);
}

// ---- cp.async, ldmatrix, mma.sync -----------------------------------------------------------------------------------------------

inline void commit(Thread &t) {
  t.committed.push_back(std::move(t.open));
  t.open.clear();
}
inline void finish(Thread &t, size_t pending) {
  while (t.committed.size() > pending) {
    for (auto &act : t.committed.front()) act();
    t.committed.pop_front();
  }
}

inline void copy_async(bf16 *shared, const bf16 *global, bool inside) {
  touched(shared, 16, true);
  const auto copy = [=] { inside ? std::memcpy(static_cast<void *>(shared), global, 16) : std::memset(static_cast<void *>(shared), 0, 16); };
  if (chance(2))
    copy();
  else
    machine.now->open.push_back(copy);
}
inline void commit_copies() { commit(*machine.now); }
template <int PENDING> inline void wait_copies() { finish(*machine.now, PENDING); }

inline u32 pair_at(const void *p) { u32 w; std::memcpy(&w, p, 4); return w; }

template <bool TRANSPOSED> inline void load_matrices(u32 (&r)[4], const bf16 *row) {
  touched(row, 16, false);
  machine.now->argument[0] = &r, machine.now->argument[1] = const_cast<bf16 *>(row);
  warp_meets([] {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        const auto of = [i](int r) { return static_cast<const unsigned short *>(lane_of_warp(i * 8 + r).argument[1]); };
        const int g = lane / 4, t = lane % 4 * 2;
        const u32 low = TRANSPOSED ? of(t)[g] : of(g)[t], high = TRANSPOSED ? of(t + 1)[g] : of(g)[t + 1];
        static_cast<u32 *>(lane_of_warp(lane).argument[0])[i] = low | high << 16;
      }
  });
}

inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  u32 b[2] = {b0, b1};
  machine.now->argument[0] = &d, machine.now->argument[1] = const_cast<u32 *>(&a[0]), machine.now->argument[2] = b;
  warp_meets([] {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane / 4, t = lane % 4 * 2;
      const u32 *a = static_cast<u32 *>(lane_of_warp(lane).argument[1]), *b = static_cast<u32 *>(lane_of_warp(lane).argument[2]);
      for (int h = 0; h < 2; h++) {
        for (int i = 0; i < 4; i++) left[g + i % 2 * 8][t + i / 2 * 8 + h] = bf16_value(a[i] >> 16 * h);
        for (int i = 0; i < 2; i++) right[t + i * 8 + h][g] = bf16_value(b[i] >> 16 * h);
      }
    }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++)
          static_cast<float *>(lane_of_warp(lane).argument[0])[i] += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
  });
}

// ---- mbarriers, TMA, wgmma --------------------------------------------------------------------------------------------------------

struct alignas(64) TensorMap { u64 words[16]; };  // here: address, columns, rows, bytes from row to row, columns and rows of a box

inline Barrier &barrier_of(Block &block, u32 barrier) {
  if (!block.alive) fail("the block has left");
  at(block, barrier, 8);
  barrier &= OFFSET;
  if (barrier % 8 || !block.barriers.count(barrier)) fail("no barrier there");
  return block.barriers[barrier];
}
inline void settle(Barrier &b) {
  if (b.pending == 0 && b.bytes == 0) b.phase++, b.pending = b.arrivals;
  machine.progress++;
}
inline void arrive(Block &block, u32 barrier) {
  Barrier &b = barrier_of(block, barrier);
  if (!b.pending) fail("more arrivals than a barrier expects");
  b.pending--;
  settle(b);
}

inline u32 dynamic_shared() { return machine.now->block->rank << 24 | (FIRST + 1023) / 1024 * 1024; }
inline void barrier_init(u32 barrier, u32 arrivals) {
  machine.now->block->barriers[barrier & OFFSET] = {arrivals, arrivals, 0, 0};
  barrier_of(*machine.now->block, barrier);
}
inline void fence_barrier_init() {}
inline void barrier_expect(u32 barrier, u32 bytes) {
  barrier_of(*machine.now->block, barrier).bytes += bytes;
  arrive(*machine.now->block, barrier);
}
inline void barrier_arrive(u32 barrier) { arrive(*machine.now->block, barrier); }
inline void barrier_arrive_at(u32 barrier, u32 rank) {
  arrive(*cluster().blocks[rank], barrier);
}
inline void barrier_wait(u32 barrier, u32 parity) {
  if (parity > 1) fail("a parity is 0 or 1");
  while ((barrier_of(*machine.now->block, barrier).phase & 1) == parity) yield();
}
inline void cluster_sync() { meet(cluster().meeting, machine.block_threads * cluster().blocks.size()); }
inline void warpgroup_sync(int warpgroup) { meet(machine.now->block->meetings[1 + warpgroup], 128); }

inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// One box between memory and shared memory; `load` or store.
inline void move_box(Block &block, u32 shared, const TensorMap &map, int x, int y, bool load) {
  auto *global = reinterpret_cast<unsigned char *>(map.words[0]);
  if (shared % 1024 || map.words[4] != 64) fail("a swizzled box begins on 1024 bytes and has rows of 128");
  for (u32 row = 0; row < map.words[5]; row++)
    for (u32 column = 0; column < 64; column++) {
      unsigned char *here = at(block, swizzled(shared + row * 128 + column * 2), 2);
      const i64 r = i64(y) + row, c = i64(x) + column;
      const bool inside = r >= 0 && c >= 0 && r < i64(map.words[2]) && c < i64(map.words[1]);
      unsigned char *there = global + r * map.words[3] + c * 2;
      if (load)
        inside ? std::memcpy(here, there, 2) : std::memset(here, 0, 2);
      else if (inside)
        std::memcpy(there, here, 2);
    }
}

inline void tma_load_multicast(u32 shared, const TensorMap &map, int x, int y, u32 barrier, int blocks) {
  for (size_t rank = 0; rank < cluster().blocks.size(); rank++)
    if (blocks >> rank & 1) {
      Block *block = cluster().blocks[rank];
      machine.engine.push_back([=, &map] {
        move_box(*block, shared, map, x, y, true);
        Barrier &b = barrier_of(*block, barrier);
        b.bytes -= map.words[4] * map.words[5] * 2;
        settle(b);
      });
    }
}
inline void tma_load(u32 shared, const TensorMap &map, int x, int y, u32 barrier) {
  tma_load_multicast(shared, map, x, y, barrier, 1 << machine.now->block->rank);
}
inline void tma_store(const TensorMap &map, int x, int y, u32 shared) {
  Block *block = machine.now->block;
  const auto copy = [=, &map] { move_box(*block, shared, map, x, y, false); };
  if (chance(2))
    copy();
  else
    machine.now->open.push_back(copy);
  commit(*machine.now);
}
template <int PENDING> inline void wait_stores() { finish(*machine.now, PENDING); }
inline void fence_async() {}

inline void store_matrices(u32 row, u32 r0, u32 r1, u32 r2, u32 r3) {
  u32 r[4] = {r0, r1, r2, r3};
  touched(at(*machine.now->block, row, 16), 16, true);
  machine.now->argument[0] = r, machine.now->argument[1] = at(*machine.now->block, row, 16);
  warp_meets([] {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++)
        std::memcpy(static_cast<u32 *>(lane_of_warp(i * 8 + lane / 4).argument[1]) + lane % 4, static_cast<u32 *>(lane_of_warp(lane).argument[0]) + i, 4);
  });
}

template <int REGISTERS> inline void more_registers() {}
template <int REGISTERS> inline void fewer_registers() {}

inline Warp &warp() { return machine.now->block->warps[machine.now->index.x / 32]; }
inline void wgmma_begin() {}
inline void wgmma_commit() {
  warp_meets([] {
    warp().committed.push_back(std::move(warp().open));
    warp().open.clear();
  });
}
inline void wgmma_wait(size_t pending) {
  warp_meets([pending] {
    auto &committed = warp().committed;
    while (committed.size() > pending) {
      for (auto &act : committed.front()) act();
      committed.pop_front();
    }
  });
}
template <int PENDING> inline void wgmma_wait() { wgmma_wait(PENDING); }

// Element (along, k) of an operand: the canonical layouts with the 128-byte swizzle, ((8,n),2):((8,SBO),1) for K-major and
// ((8,n),(8,k)):((1,LBO),(8,SBO)) for MN-major, in units of 16 bytes.
inline const unsigned char *element(Block &block, u64 descriptor, bool k_major, int along, int k, int size) {
  if (descriptor >> 62 != 1) fail("not the 128-byte swizzle");
  if (!k_major && size != 2) fail("only 16-bit elements may lie with K apart");
  const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const u32 address = k_major ? start + along % 8 * 128 + along / 8 * stride + k * size
                              : start + along % 64 * 2 + along / 64 * leading + k % 8 * 128 + k / 8 * stride;
  return at(block, swizzled(address), size);
}

// d[64, N] = a[64, 32 bytes] b[N, 32 bytes]ᵀ (+ d where `add`): the 16 rows of the warp that runs. Threads have left in argument[0]
// where their part of d lies.
template <typename Sum> inline void wgmma(Sum (*value)(const unsigned char *), int size, int N, u64 a, u64 b, bool a_k_major, bool b_k_major, bool add) {
  const int K = 32 / size;
  warp_meets([=] {
    Block *block = machine.now->block;
    const int first = machine.now->index.x / 32 * 32;
    std::vector<Sum *> sums;
    for (int lane = 0; lane < 32; lane++) sums.push_back(static_cast<Sum *>(lane_of_warp(lane).argument[0]));
    const auto act = [=] {
      static Sum right[32][256], product[16][256];
      for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++) right[k][n] = value(element(*block, b, b_k_major, n, k, size));
      for (int m = 0; m < 16; m++) {
        std::fill_n(product[m], N, Sum(0));
        for (int k = 0; k < K; k++) {
          const Sum left = value(element(*block, a, a_k_major, first % 128 / 2 + m, k, size));
          for (int n = 0; n < N; n++) product[m][n] += left * right[k][n];
        }
      }
      for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < N / 2; i++) {
          const Sum more = product[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
          sums[lane][i] = add ? sums[lane][i] + more : more;
        }
    };
    if (warp().open.empty() && warp().committed.empty() && chance(2))
      act();  // in their order, or the sums would change
    else
      warp().open.push_back(act);
  });
}

inline float value_of_bf16(const unsigned char *p) { return bf16_value(p[0] | p[1] << 8); }
template <int REGISTERS> inline void wgmma(float (&d)[REGISTERS], u64 a, u64 b, int add) {
  machine.now->argument[0] = &d;
  wgmma(value_of_bf16, 2, REGISTERS * 2, a, b, true, false, add);
}

// ---- a launch ---------------------------------------------------------------------------------------------------------------------

inline std::function<void()> kernel_body;
inline void run_thread() {
  kernel_body();
  finish(*machine.now, 0);
  machine.now->done = true, machine.now->block->alive--, machine.progress++;
  yield();
}

// `at_once`: clusters that run at the same time.
inline void launch(u32 grid, u32 block_threads, u32 cluster, u32 shared_bytes, const std::function<void()> &body, u32 at_once = 1) {
  kernel_body = body, machine.block_threads = block_threads, machine.shared_bytes = shared_bytes, gridDim.x = grid;
  std::vector<std::function<void()>> until_the_end;  // stores that no thread has released
  for (u32 first = 0; first < grid; first += cluster * at_once) {
    machine.blocks.clear(), machine.engine.clear(), machine.clusters.clear();
    for (u32 i = 0; i < min(cluster * at_once, grid - first); i++) {
      auto block = std::make_unique<Block>();
      if (i % cluster == 0) machine.clusters.emplace_back();
      block->cluster = &machine.clusters.back(), block->cluster->blocks.push_back(block.get());
      block->index.x = first + i, block->rank = i % cluster, block->warps.resize(block_threads / 32), block->alive = block_threads;
      block->shared.assign(FIRST + shared_bytes, 0xff);  // NaN
      for (u32 t = 0; t < block_threads; t++) {
        auto thread = std::make_unique<Thread>();
        thread->stack.reset(new char[STACK]);
        thread->block = block.get(), thread->index.x = t;
        getcontext(&thread->context);
        thread->context.uc_stack.ss_sp = thread->stack.get(), thread->context.uc_stack.ss_size = STACK;
        thread->context.uc_link = nullptr;
        makecontext(&thread->context, run_thread, 0);
        block->threads.push_back(std::move(thread));
      }
      machine.blocks.push_back(std::move(block));
    }
    std::vector<Thread *> alive;
    // What the scheduler passes over for a while, at most until nothing else can go on: a warp, or a block that begins late.
    Block *asleep = chance(2) ? machine.blocks.back().get() : nullptr;
    u32 asleep_warp = ~0u;
    for (auto &block : machine.blocks)
      for (auto &thread : block->threads) alive.push_back(thread.get());
    while (!alive.empty()) {
      const u64 before = machine.progress;
      std::shuffle(alive.begin(), alive.end(), machine.random);
      if (chance(16)) asleep = alive[0]->block, asleep_warp = alive[0]->index.x / 32;
      if (chance(256)) asleep = nullptr;
      for (Thread *thread : alive)
        if (thread->block != asleep || (asleep_warp != ~0u && thread->index.x / 32 != asleep_warp)) resume(thread);
      machine.now = nullptr;
      alive.erase(std::remove_if(alive.begin(), alive.end(), [](Thread *t) { return t->done; }), alive.end());
      const bool idle = machine.progress == before;
      for (size_t i = 0; i < machine.engine.size();)
        if (idle || chance(3)) {  // in any order
          std::swap(machine.engine[i], machine.engine.back());
          const auto act = std::move(machine.engine.back());
          machine.engine.pop_back();
          act();
          if (idle) break;
        } else {
          i++;
        }
      if (machine.progress == before && !asleep) fail("deadlock: every thread waits");
      if (machine.progress == before) asleep = nullptr;
    }
    if (!machine.engine.empty()) fail("a load is under way that nobody waited for");
    const auto leave = [&](std::vector<std::function<void()>> &stores) { until_the_end.insert(until_the_end.end(), stores.begin(), stores.end()); };
    for (auto &block : machine.blocks) {
      for (auto &[id, stores] : block->met) leave(stores);
      for (auto &thread : block->threads) leave(thread->unreleased);
    }
    if (machine.count_banks)
      for (auto &block : machine.blocks) tally_block(*block);
  }
  for (auto &store : until_the_end) store();
}

// ---- a check ----------------------------------------------------------------------------------------------------------------------

// Memory that ends where a page that may not be touched begins.
inline bf16 *guarded(size_t elements) {
  const size_t page = getpagesize(), bytes = (elements * 2 + page - 1) / page * page;
  auto *p = static_cast<unsigned char *>(mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(p + bytes, page, PROT_NONE);
  return reinterpret_cast<bf16 *>(p + (bytes - elements * 2) / 16 * 16);
}
inline TensorMap map_of(bf16 *p, int rows, int columns, int box_rows) {
  return {{reinterpret_cast<u64>(p), u64(columns), u64(rows), u64(columns) * 2, 64, u64(box_rows)}};
}
// Runs one kernel on random numbers and compares C with a sum in double: "right", or what is wrong. Then what each kind of
// access to shared memory took: passes, and the fewest possible. Words: M, N, K; grid, threads, blocks of a cluster, bytes of
// shared memory; seed; whether to count banks.
template <typename Kernel> int check(const Kernel &kernel, char **words) {
  int x[9];
  for (int i = 0; i < 9; i++) x[i] = std::atoi(words[i]);
  const int M = x[0], N = x[1], K = x[2];
  machine.random.seed(x[7]);
  machine.count_banks = x[8];
  bf16 *a = guarded(size_t(M) * K), *b = guarded(size_t(K) * N), *c = guarded(size_t(M) * N);
  std::normal_distribution<float> normal;
  std::vector<float> left(size_t(M) * K), right(size_t(K) * N);
  for (size_t i = 0; i < left.size(); i++) a[i].bits = bf16_bits(normal(machine.random)), left[i] = bf16_value(a[i].bits);
  for (size_t i = 0; i < right.size(); i++) b[i].bits = bf16_bits(normal(machine.random)), right[i] = bf16_value(b[i].bits);
  for (size_t i = 0; i < size_t(M) * N; i++) c[i].bits = 0x7fff;  // NaN
  const TensorMap map_a = map_of(a, M, K, 128), map_b = map_of(b, K, N, 64), map_c = map_of(c, M, N, 64);
  launch(x[3], x[4], x[5], x[6], [&] {
    if constexpr (std::is_invocable_v<Kernel, bf16 *, bf16 *, bf16 *, int, int, int>)
      kernel(a, b, c, M, N, K);
    else
      kernel(a, b, c, map_a, map_b, map_c, M, N, K);
  });
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      double want = 0;
      for (int k = 0; k < K; k++) want += double(left[size_t(m) * K + k]) * right[size_t(k) * N + n];
      const double got = bf16_value(c[size_t(m) * N + n].bits);
      const double error = std::fabs(got - want) / max(std::fabs(want), std::sqrt(double(K)));
      if (!(error < 0.006)) {  // half a unit in bf16's last place is 0.004
        std::printf("wrong: C[%d, %d] is %g, not %g\n", m, n, got, want);
        return 1;
      }
    }
  std::printf("right\n");
  for (auto &kind : machine.banks) std::printf("%s %llu %llu\n", kind.first.c_str(), kind.second.first, kind.second.second);
  return 0;
}
