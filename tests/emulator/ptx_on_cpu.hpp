// Runs a kernel on a CPU with its inline PTX as it stands: every `asm` statement is read when it is first met, and its instructions
// are emulated after the PTX ISA on the machine of gpu_on_cpu.hpp. So operands in a wrong order or a descriptor that means another
// layout show as wrong results. Also delayed, within what is allowed: arrivals through a cluster, ordinary stores to
// shared memory until a fence shows them to TMA (stmatrix only; other stores are C++), and stores of four numbers to memory until a release.
#pragma once
#include "gpu_on_cpu.hpp"

#include <array>

#define __noinline__
struct float2 { float x, y; };

// Four numbers stored at once go to memory that other blocks read: they see them when a thread that knows of them has released.
using Stores = std::vector<std::function<void()>>;
inline void append(Stores &to, Stores &from) {
  to.insert(to.end(), from.begin(), from.end());
  from.clear();
}
inline void show(Stores &stores) {
  for (auto &store : stores) store();
  stores.clear();
}
template <typename T> struct alignas(16) Four {
  T x, y, z, w;
  Four &operator=(const Four &other) {
    const auto write = [this, x = other.x, y = other.y, z = other.z, w = other.w] { this->x = x, this->y = y, this->z = z, this->w = w; };
    const auto within = [this](const auto *memory, i64 bytes) {
      return u64(reinterpret_cast<const char *>(this) - reinterpret_cast<const char *>(memory)) < u64(bytes);
    };
    const auto &shared = machine.now->block->shared;
    if (within(machine.now->stack.get(), STACK) || within(shared.data(), shared.size()) || chance(2))
      write();  // what is a thread's or a block's own is there at once
    else
      machine.now->unreleased.push_back(write);
    return *this;
  }
};
using float4 = Four<float>;
using int4 = Four<int>;
using uint4 = Four<u32>;
inline float __expf(float x) { return std::exp(x); }
inline float __fmul_rn(float a, float b) { return a * b; }

inline u64 __cvta_generic_to_shared(const void *p) {
  const auto offset = static_cast<const unsigned char *>(p) - machine.now->block->shared.data();
  if (offset < FIRST || offset > FIRST + machine.shared_bytes) fail("not an address in shared memory");
  return offset;
}

template <typename T> inline T shuffled(T x, const std::function<int(int)> &from) {
  T other;
  machine.now->argument[0] = &x, machine.now->argument[1] = &other;
  warp_meets([&from] {
    for (int lane = 0; lane < 32; lane++)
      *static_cast<T *>(lane_of_warp(lane).argument[1]) = *static_cast<T *>(lane_of_warp(from(lane)).argument[0]);
  });
  return other;
}
template <typename T> inline T __shfl_xor_sync(u32, T x, int step) {
  return shuffled(x, [step](int lane) { return lane ^ step; });
}
template <typename T> inline T __shfl_sync(u32, T x, int from) {
  return shuffled(x, [from](int) { return from; });
}

inline u32 __reduce_max_sync(u32, u32 x) {
  for (int step = 1; step < 32; step *= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
inline u32 __reduce_or_sync(u32, u32 x) {
  for (int step = 1; step < 32; step *= 2) x |= __shfl_xor_sync(~0u, x, step);
  return x;
}
inline u32 __reduce_add_sync(u32, u32 x) {
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <typename T> inline T __shfl_sync(u32, T x, int from, int width) {
  return shuffled(x, [from, width](int lane) { return lane / width * width + from % width; });
}
template <typename T> inline T __shfl_up_sync(u32, T x, int step, int width = 32) {
  return shuffled(x, [step, width](int lane) { return lane % width >= step ? lane - step : lane; });
}
template <typename T> inline T __shfl_down_sync(u32, T x, int step, int width = 32) {
  return shuffled(x, [step, width](int lane) { return lane % width + step < width ? lane + step : lane; });
}
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= u32((u64(y) << 32 | x) >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
inline int __any_sync(u32, int x) {
  for (int step = 1; step < 32; step *= 2) x |= __shfl_xor_sync(~0u, x, step);
  return x;
}
inline void __trap() { fail("a trap"); }
inline u32 atomicAdd(u32 *p, u32 x) {
  const u32 was = *p;
  *p += x;
  return was;
}
inline void atomicMax(u32 *p, u32 x) { *p = max(*p, x); }

// ---- an asm statement ---------------------------------------------------------------------------------------------------------

struct Operand {
  char kind;      // the constraint's letter
  void *where;    // of an output
  u64 value = 0;  // of an input
};
template <typename T> inline char checked(char kind) {
  if (sizeof(T) != (kind == 'h' ? 2 : kind == 'l' ? 8 : 4) || std::is_same_v<T, float> != (kind == 'f')) fail("a constraint of another type");
  return kind;
}
template <typename T> inline Operand ptx_out(const char *constraint, T &x) { return {checked<T>(constraint[1]), &x}; }
template <typename T> inline Operand ptx_in(const char *constraint, T x) {
  Operand made{checked<T>(*constraint), nullptr};
  std::memcpy(&made.value, &x, sizeof x);
  return made;
}

struct Call;
using Play = std::function<void(Call &)>;

struct Statement {
  std::string label, guard;  // a line with a label has nothing else
  Play emulate;
  std::vector<std::string> words;
};

struct Call {
  const Operand *operands;
  std::map<std::string, u64> registers;
  const Statement *now = nullptr;
  std::string jump;

  const std::string &word(int i) const { return now->words.at(i); }
  const Operand &operand(int i) const {
    if (word(i)[0] != '%') fail(("not an operand: " + word(i)).c_str());
    return operands[std::atoi(word(i).c_str() + 1)];
  }
  u64 get(int i) const {
    const std::string &w = word(i);
    if (w[0] == '%') return operand(i).value;
    if (w[0] == '-' || std::isdigit(w[0])) return std::atoi(w.c_str());
    if (!registers.count(w)) fail(("no register " + w).c_str());
    return registers.at(w);
  }
  template <typename T = int> T as(int i) const {
    const u64 bits = get(i);
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  template <typename T> void set(int i, T value) {
    if (word(i)[0] == '%')
      std::memcpy(operand(i).where, &value, sizeof value);
    else
      registers[word(i)] = value;
  }
};

// The statements of one asm; what is in brackets and braces is counted on in the instruction's order of operands.
struct Program {
  std::vector<Statement> statements;

  explicit Program(const std::string &text);
  void run(std::initializer_list<Operand> operands) const;
};

// ---- a job: one launch, read from the standard input; C, amax and flags are written to the standard output ------------------------------------------

struct Any {
  void *p;
  template <typename T> operator T *() const { return static_cast<T *>(p); }
};

struct Job {
  static constexpr int BUFFERS = 11, MORE = 2, MAPS = 6;
  i64 kernel, grid, threads, cluster, shared_bytes, seed, bytes[BUFFERS], maps[MAPS][17], shape[12], scales[2];
  double factors[3];
  void *buffers[BUFFERS + MORE] = {};  // A, B, up, residual, C, as the maps; scales of A and B, bias, amax, workspace, flags; and if there is more: offsets and order of groups
  i64 more[MORE] = {};                 // bytes of those
  Any buffer(int i) const { return {buffers[i]}; }

  template <typename Map> const Map &map(int i) const { return *reinterpret_cast<const Map *>(maps[i]); }

  void read();
  void run(const std::function<void()> &body);
};
