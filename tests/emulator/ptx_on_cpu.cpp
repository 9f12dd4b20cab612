// The instructions of ptx_on_cpu.hpp, and its jobs: what no kernel needs to see is compiled once for all of them.
#include "ptx_on_cpu.hpp"

// ---- 16- and 8-bit floats -----------------------------------------------------------------------------------------------------

inline float fp16_value(u32 bits) {
  const u32 exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? std::ldexp(1024.f + mantissa, exponent - 25) : std::ldexp(float(mantissa), -24);
  return bits >> 15 & 1 ? -size : size;
}
inline u32 fp16_bits(float f) {  // to the nearest, ties to even
  const u32 sign = __float_as_uint(f) >> 16 & 0x8000, size = __float_as_uint(f) & 0x7fffffff;
  if (std::isnan(f)) return 0x7fff;
  if (std::fabs(f) >= 65520.f) return sign | 0x7c00;
  if (std::fabs(f) < std::ldexp(1.f, -14)) return sign | u32(std::nearbyint(std::ldexp(std::fabs(f), 24)));
  return sign | ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10);
}

inline float wgmma_f16(const unsigned char *p) { return fp16_value(p[0] | p[1] << 8); }
inline float wgmma_tf32(const unsigned char *p) { return __uint_as_float(pair_at(p) & 0xffffe000); }
inline float wgmma_e4m3(const unsigned char *p) {
  const int exponent = *p >> 3 & 15, mantissa = *p & 7;
  const float size = (*p & 127) == 127 ? NAN : exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return *p >> 7 ? -size : size;
}
inline u32 e4m3_bits(float f) {  // to the nearest, ties to even, within the largest
  const float size = std::fmin(std::fabs(f), 448.f);
  const u32 sign = __float_as_uint(f) >> 24 & 128, bits = __float_as_uint(size);
  if (std::isnan(f)) return 0x7f;
  if (size < std::ldexp(1.f, -6)) return sign | u32(std::nearbyint(std::ldexp(size, 9)));
  return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
}
inline float flushed(float x) { return std::fabs(x) < std::ldexp(1.f, -126) ? std::copysign(0.f, x) : x; }
inline float sum_rounded_up(float a, float b) {
  const float sum = float(double(a) + b);
  return a > double(sum) - b ? std::nextafter(sum, INFINITY) : sum;
}
inline int wgmma_s8(const unsigned char *p) { return static_cast<signed char>(*p); }

// ---- instructions -------------------------------------------------------------------------------------------------------------

inline Block &own() { return *machine.now->block; }

struct Box { u64 address, size, sizes[4], steps[3], box[4], unused, first, end; };  // what the test writes in place of cuTensorMapEncodeTiled; its tensor's memory

inline void check_inside(const Box &map, u64 address, u64 bytes, const char *what) {
  if (address < map.first || address + bytes > map.end) fail(what);
}

inline void move(Block &block, u32 shared, const Box &map, int x, int y, int z, int w, bool load) {
  if (!load && (x < 0 || y < 0 || z < 0 || w < 0)) fail("a store at negative coordinates: an illegal instruction on an H200");
  const u32 pitch = map.box[0] * map.size, lines = pitch / 16 - 1;  // a row's 16 bytes change places with the number of its line, modulo so many and one
  if (shared % 1024 || (pitch != 128 && pitch != 64)) fail("a swizzled box begins on 1024 bytes and has rows of 128, or of 64");
  check_inside(map, map.address, 1, "a tensor map begins outside of its tensor");  // may be a fault, whatever the box is
  for (u32 row = 0; row < map.box[1]; row++)
    for (u32 column = 0; column < map.box[0]; column++) {
      const u32 plain = shared + row * pitch + column * map.size;
      unsigned char *here = at(block, plain ^ (plain >> 7 & lines) << 4, map.size);
      const i64 c = i64(x) + column, r = i64(y) + row;
      const bool inside = c >= 0 && r >= 0 && z >= 0 && w >= 0 && c < i64(map.sizes[0]) && r < i64(map.sizes[1]) && z < i64(map.sizes[2]) && w < i64(map.sizes[3]);
      auto *there = reinterpret_cast<unsigned char *>(map.address + c * map.size + r * map.steps[0] + z * map.steps[1] + w * map.steps[2]);
      if (inside) check_inside(map, reinterpret_cast<u64>(there), map.size, "TMA reaches outside of the tensor");
      if (load)
        inside ? std::memcpy(here, there, map.size) : std::memset(here, 0, map.size);
      else if (inside)
        std::memcpy(there, here, map.size);
    }
}

inline void fetch_box(Call &c, u32 mask, bool of_four = false) {
  const Box map = *reinterpret_cast<const Box *>(c.get(1));
  const u32 to = c.get(0), barrier = c.get(of_four ? 6 : 5);
  const int x = c.as(2), y = c.as(3), z = c.as(4), w = of_four ? c.as(5) : 0;
  if (mask >> cluster().blocks.size()) fail("multicast to a block outside the cluster");
  for (size_t rank = 0; rank < cluster().blocks.size(); rank++)
    if (mask >> rank & 1) {
      Block *block = cluster().blocks[rank];
      machine.engine.push_back([=] {
        if (!block->alive) fail("TMA writes to a block that has left");
        move(*block, to, map, x, y, z, w, true);
        Barrier &b = barrier_of(*block, barrier);
        b.bytes -= map.box[0] * map.box[1] * map.box[2] * map.size;
        settle(b);
      });
    }
}

template <int COUNT> void store_matrices(Call &c) {
  u32 words[COUNT];
  for (int i = 0; i < COUNT; i++) words[i] = c.as<u32>(1 + i);
  machine.now->argument[0] = words, machine.now->argument[1] = reinterpret_cast<void *>(c.get(0));
  warp_meets([] {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < COUNT; i++) {
        const u32 row = reinterpret_cast<u64>(lane_of_warp(i * 8 + lane / 4).argument[1]);
        if (row % 16) fail("a row of stmatrix begins on 16 bytes");
        unsigned char *to = at(own(), row, 16) + lane % 4 * 4;
        const u32 word = static_cast<u32 *>(lane_of_warp(lane).argument[0])[i];
        const auto write = [=] { std::memcpy(to, &word, 4); };
        if (chance(2))
          write();
        else
          lane_of_warp(lane).unfenced.push_back(write);
      }
  });
}

// The same with rows and columns exchanged: element (i, j) of a matrix goes to row j.
inline void store_two_turned(Call &c) {
  u32 words[2] = {c.as<u32>(1), c.as<u32>(2)};
  machine.now->argument[0] = words, machine.now->argument[1] = reinterpret_cast<void *>(c.get(0));
  warp_meets([] {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        const u32 row = reinterpret_cast<u64>(lane_of_warp(i / 2 * 8 + lane % 4 * 2 + i % 2).argument[1]);
        if (row % 16) fail("a row of stmatrix begins on 16 bytes");
        unsigned char *to = at(own(), row, 16) + lane / 4 * 2;
        const unsigned short element = static_cast<u32 *>(lane_of_warp(lane).argument[0])[i / 2] >> i % 2 * 16;
        const auto write = [=] { std::memcpy(to, &element, 2); };
        if (chance(2))
          write();
        else
          lane_of_warp(lane).unfenced.push_back(write);
      }
  });
}

inline void turn_matrix(Call &c) {
  u32 own_word = c.as<u32>(1), made;
  machine.now->argument[0] = &own_word, machine.now->argument[1] = &made;
  warp_meets([] {
    for (int lane = 0; lane < 32; lane++) {
      const auto element = [](int row, int column) {
        return static_cast<const u32 *>(lane_of_warp(row * 4 + column / 2).argument[0])[0] >> column % 2 * 16 & 0xffff;
      };
      *static_cast<u32 *>(lane_of_warp(lane).argument[1]) =
          element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
    }
  });
  c.set(0, made);
}

// d[64, N] = a[64, 16] b[N, 16]ᵀ (+ d where `add`) with a in registers, as mma.m16n8k16 has it; argument[0] as for wgmma.
inline void wgmma_of_registers(float (*value)(const unsigned char *), int n, u32 (&mine)[4], u64 b, bool b_k_major, bool add) {
  machine.now->argument[1] = mine;
  warp_meets([=] {
    Block *block = &own();
    std::vector<float *> sums;
    std::vector<std::array<float, 16>> left(16);
    for (int lane = 0; lane < 32; lane++) {
      sums.push_back(static_cast<float *>(lane_of_warp(lane).argument[0]));
      const auto *words = static_cast<const unsigned char *>(lane_of_warp(lane).argument[1]);
      for (int i = 0; i < 8; i++) left[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i / 4 * 8 + i % 2] = value(words + 2 * i);
    }
    const auto act = [=] {
      for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < n / 2; i++) {
          const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
          float sum = 0;
          for (int k = 0; k < 16; k++) sum += left[lane / 4 + i / 2 % 2 * 8][k] * value(element(*block, b, b_k_major, column, k, 2));
          sums[lane][i] = add ? sums[lane][i] + sum : sum;
        }
    };
    if (warp().open.empty() && warp().committed.empty() && chance(2))
      act();
    else
      warp().open.push_back(act);
  });
}

inline void load_four_matrices(Call &c) {
  u32 words[4];
  machine.now->argument[0] = words, machine.now->argument[1] = reinterpret_cast<void *>(c.get(4));
  warp_meets([] {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        const u32 row = reinterpret_cast<u64>(lane_of_warp(i * 8 + lane / 4).argument[1]);
        if (row % 16) fail("a row of ldmatrix begins on 16 bytes");
        static_cast<u32 *>(lane_of_warp(lane).argument[0])[i] = pair_at(at(own(), row, 16) + lane % 4 * 4);
      }
  });
  for (int i = 0; i < 4; i++) c.set(i, words[i]);
}

template <typename Sum> inline Play product_of(int n, int size, Sum (*value)(const unsigned char *)) {
  if (n != 8 && n != 16 && n != 32 && n != 64 && n != 80 && n != 96 && n != 112 && n != 128 && n != 160 && n != 176 && n != 192 && n != 256)
    fail("wgmma of another width");
  return [=](Call &c) {
    Sum *const d = static_cast<Sum *>(c.operand(0).where);
    for (int i = 0; i < n / 2; i++)
      if (c.operand(i).where != d + i) fail("registers of a sum in another order");
    machine.now->argument[0] = d;
    if (c.now->words.size() == size_t(n / 2 + 9)) {  // a in registers; signs of a and b; whether b lies with K apart
      if (size != 2 || c.as(n / 2 + 6) != 1 || c.as(n / 2 + 7) != 1) fail("wgmma of registers with other flags");
      u32 mine[4];
      for (int i = 0; i < 4; i++) mine[i] = c.as<u32>(n / 2 + i);
      if constexpr (std::is_same_v<Sum, float>) wgmma_of_registers(value, n, mine, c.get(n / 2 + 4), !c.get(n / 2 + 8), c.get(n / 2 + 5));
      return;
    }
    const u64 a = c.get(n / 2), b = c.get(n / 2 + 1), keep = c.get(n / 2 + 2);
    const size_t flags = c.now->words.size() - (n / 2 + 3);  // signs of a and b; whether they lie with K apart
    if (flags != (std::is_same_v<Sum, int> ? 0 : size == 2 ? 4 : 2)) fail("wgmma with other flags");
    for (size_t i = 0; i < min(flags, size_t(2)); i++)
      if (c.as(n / 2 + 3 + i) != 1) fail("a sign");
    const bool a_apart = flags == 4 && c.get(n / 2 + 5), b_apart = flags == 4 && c.get(n / 2 + 6);
    wgmma(value, size, n, a, b, !a_apart, !b_apart, keep);
  };
}

// d[64, N] = a[64, 32] b[N, 32]ᵀ (+ d where `add`), of a two elements of every four in memory: lanes 2 selector and 2 selector + 1 of every
// four say where those of 16 columns each lie, of row lane / 4 in the lower and lane / 4 + 8 in the upper half of their word.
inline void sparse_wgmma(float (*value)(const unsigned char *), int n, u64 a, u64 b, u32 places, int selector, bool b_k_major, bool add) {
  machine.now->argument[1] = &places;
  warp_meets([=] {
    Block *block = &own();
    const int first = machine.now->index.x / 32 * 32 % 128 / 2;
    std::vector<float *> sums;
    std::vector<u32> words;
    for (int lane = 0; lane < 32; lane++) {
      sums.push_back(static_cast<float *>(lane_of_warp(lane).argument[0]));
      words.push_back(*static_cast<u32 *>(lane_of_warp(lane).argument[1]));
    }
    const auto act = [=] {
      static float left[16][32], right[32][256], product[16][256];
      for (int c = 0; c < n; c++)
        for (int k = 0; k < 32; k++) right[k][c] = value(element(*block, b, b_k_major, c, k, 2));
      for (int m = 0; m < 16; m++) {
        std::fill_n(left[m], 32, 0.f), std::fill_n(product[m], n, 0.f);
        for (int group = 0; group < 8; group++) {
          const u32 code = words[m % 8 * 4 + 2 * selector + group / 4] >> (m / 8 * 16 + group % 4 * 4) & 15;
          if ((code & 3) >= code >> 2) fail("places of a group that do not rise");
          for (int i = 0; i < 2; i++) left[m][4 * group + (code >> 2 * i & 3)] = value(element(*block, a, true, first + m, 2 * group + i, 2));
        }
        for (int k = 0; k < 32; k++)
          for (int c = 0; c < n; c++) product[m][c] += left[m][k] * right[k][c];
      }
      for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < n / 2; i++) {
          const float more = product[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
          sums[lane][i] = add ? sums[lane][i] + more : more;
        }
    };
    if (warp().open.empty() && warp().committed.empty() && chance(2))
      act();
    else
      warp().open.push_back(act);
  });
}

inline Play sparse_product_of(int n, float (*value)(const unsigned char *)) {
  if (n != 64 && n != 128 && n != 192 && n != 256) fail("wgmma of another width");
  return [=](Call &c) {
    float *const d = static_cast<float *>(c.operand(0).where);
    for (int i = 0; i < n / 2; i++)
      if (c.operand(i).where != d + i) fail("registers of a sum in another order");
    const int selector = c.as(n / 2 + 3);
    if (c.now->words.size() != size_t(n / 2 + 9) || selector < 0 || selector > 1) fail("a sparse wgmma with other operands");
    if (c.as(n / 2 + 5) != 1 || c.as(n / 2 + 6) != 1 || c.get(n / 2 + 7)) fail("a sparse wgmma with other flags");
    machine.now->argument[0] = d;
    sparse_wgmma(value, n, c.get(n / 2), c.get(n / 2 + 1), c.as<u32>(n / 2 + 2), selector, !c.get(n / 2 + 8), c.get(n / 2 + 4));
  };
}

inline void load_words(Call &c, const unsigned char *from) {
  if (reinterpret_cast<u64>(from) % 16) fail("a misaligned access");
  for (int i = 0; i < 4; i++) c.set(i, pair_at(from + 4 * i));
}

// `count` words between registers and memory, counted from the operand that is the first of them.
inline void load_aligned(Call &c, int count, const unsigned char *from) {
  if (reinterpret_cast<u64>(from) % (4 * count)) fail("a misaligned access");
  for (int i = 0; i < count; i++) c.set(i, pair_at(from + 4 * i));
}
inline void store_aligned(Call &c, int count) {
  if (c.get(0) % (4 * count)) fail("a misaligned access");
  for (int i = 0; i < count; i++) reinterpret_cast<u32 *>(c.get(0))[i] = c.as<u32>(1 + i);
}

// A release: of this thread's stores, and of those of the threads that it has met.
inline void show_what_is_known() {
  show(machine.now->unreleased);
  for (auto &meeting : machine.now->block->met) show(meeting.second);
}

// A thread that waits for a word has got further when it finds another value there.
inline void noticed(u64 address) {
  const u64 is = *reinterpret_cast<u32 *>(address) | u64(reinterpret_cast<u32 *>(address)[1]) << 32;
  u64 &was = machine.now->last_read[address];
  if (was != is) was = is, machine.progress++;
}

inline void three_way(Call &c) {
  const u32 a = c.as<u32>(1), b = c.as<u32>(2), third = c.as<u32>(3), table = c.as<u32>(4);
  u32 r = 0;
  for (int bit = 0; bit < 32; bit++) r |= (table >> ((a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (third >> bit & 1)) & 1) << bit;
  c.set(0, r);
}

template <typename Value, typename Bits> inline void multiply_add(Call &c, Value value, Bits bits) {
  u32 r = 0;
  for (int h = 0; h < 32; h += 16) {
    const auto of = [&](int i) { return double(value(c.as<u32>(i) >> h)); };
    r |= u32(bits(float(of(1) * of(2) + of(3)))) << h;
  }
  c.set(0, r);
}

// d = a b + c of a warp, m16n8k16: operands are d, a (4 words), b (2), c.
inline void product_of_a_warp(Call &c, float (*value)(const unsigned char *)) {
  struct Part { u32 a[4], b[2]; float sums[4]; } mine;
  for (int i = 0; i < 4; i++) mine.a[i] = c.as<u32>(4 + i), mine.sums[i] = c.as<float>(10 + i);
  for (int i = 0; i < 2; i++) mine.b[i] = c.as<u32>(8 + i);
  machine.now->argument[0] = &mine;
  warp_meets([value] {
    float left[16][16], right[16][8];
    const auto half = [value](u32 word, int h) { return value(reinterpret_cast<const unsigned char *>(&word) + 2 * h); };
    for (int lane = 0; lane < 32; lane++) {
      const Part &part = *static_cast<Part *>(lane_of_warp(lane).argument[0]);
      const int g = lane / 4, t = lane % 4 * 2;
      for (int h = 0; h < 2; h++) {
        for (int i = 0; i < 4; i++) left[g + i % 2 * 8][t + i / 2 * 8 + h] = half(part.a[i], h);
        for (int i = 0; i < 2; i++) right[t + i * 8 + h][g] = half(part.b[i], h);
      }
    }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        float &sum = static_cast<Part *>(lane_of_warp(lane).argument[0])->sums[i];
        for (int k = 0; k < 16; k++) sum += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
      }
  });
  for (int i = 0; i < 4; i++) c.set(i, mine.sums[i]);
}

inline void copy_sixteen(Call &c) {  // the fourth operand counts the bytes that are read; the others are zeros
  unsigned char *const to = at(own(), c.get(0), 16);
  const auto *from = reinterpret_cast<const unsigned char *>(c.get(1));
  const u32 bytes = c.get(3);
  if (c.get(2) != 16 || bytes > 16 || c.get(0) % 16 || c.get(1) % 16) fail("a copy of another size or misaligned");
  const auto copy = [=] { std::memset(to, 0, 16), std::memcpy(to, from, bytes); };
  if (chance(2))
    copy();
  else
    machine.now->open.push_back(copy);
}

inline void copy_many(Call &c) {  // in two halves, in any order
  Block *block = &own();
  const u32 to = c.get(0), bytes = c.get(2), barrier = c.get(3);
  const auto *from = reinterpret_cast<const unsigned char *>(c.get(1));
  if (!bytes || bytes % 16 || to % 16 || c.get(1) % 16) fail("a bulk copy of another size or misaligned");
  for (u32 part : {0u, 1u}) {
    const u32 first = part ? bytes / 32 * 16 : 0, count = part ? bytes - first : bytes / 32 * 16;
    if (count)
      machine.engine.push_back([=] {
        if (!block->alive) fail("a copy to a block that has left");
        std::memcpy(at(*block, to + first, count), from + first, count);
        Barrier &b = barrier_of(*block, barrier);
        b.bytes -= count;
        settle(b);
      });
  }
}

inline void put_box(Call &c, u32 from, int w) {
  const Box map = *reinterpret_cast<const Box *>(c.get(0));
  Block *block = &own();
  const int x = c.as(1), y = c.as(2), z = c.as(3);
  machine.now->open.push_back([=] { move(*block, from, map, x, y, z, w, false); });
}

// An access through the cluster's window wants all of its blocks to be there.
inline void reach_cluster() {
  if (cluster().blocks.size() > 1 && !cluster().meeting.generation) fail("an access to a cluster whose blocks may not have begun");
}

// NaN counts for nothing.
template <typename Value, typename Bits> inline void largest_of_pairs(Call &c, Value value, Bits bits) {
  const u32 a = c.as<u32>(1), b = c.as<u32>(2);
  c.set(0, bits(std::fmax(value(a >> 16), value(b >> 16))) << 16 | bits(std::fmax(value(a), value(b))));
}

template <int COUNT> inline void store_floats_at(Call &c) {
  reach_cluster();
  Block *const from = &own();
  Block *block = machine.blocks.at((c.get(0) >> 24) - 1).get();
  const u32 to = c.get(0) & 0xffffff, barrier = c.get(1 + COUNT) & 0xffffff;
  std::array<float, COUNT> sent;
  for (int i = 0; i < COUNT; i++) sent[i] = c.as<float>(1 + i);
  if (c.get(0) >> 24 != c.get(1 + COUNT) >> 24) fail("a store and its barrier in two blocks");
  machine.engine.push_back([=] {
    if (!block->alive) fail("a store to a block that has left");
    if (machine.stays && !from->alive) fail("a store from a block that has left");
    std::memcpy(at(*block, to, 4 * COUNT), sent.data(), 4 * COUNT);
    Barrier &b = barrier_of(*block, barrier);
    b.bytes -= 4 * COUNT;
    settle(b);
  });
}

inline Play emulate_of(const std::string &name) {
  int n, k;
  char types[32];
  if (std::sscanf(name.c_str(), "wgmma.mma_async.sync.aligned.m64n%dk%d.%31s", &n, &k, types) == 3) {
    const std::string is = types + std::string(" ") + std::to_string(k);
    if (is == "f32.bf16.bf16 16") return product_of<float>(n, 2, value_of_bf16);
    if (is == "f32.f16.f16 16") return product_of<float>(n, 2, wgmma_f16);
    if (is == "f32.tf32.tf32 8") return product_of<float>(n, 4, wgmma_tf32);
    if (is == "f32.e4m3.e4m3 32") return product_of<float>(n, 1, wgmma_e4m3);
    if (is == "s32.s8.s8 32") return product_of<int>(n, 1, wgmma_s8);
  }
  if (std::sscanf(name.c_str(), "wgmma.mma_async.sp.sync.aligned.m64n%dk32.%31s", &n, types) == 2) {
    if (types == std::string("f32.bf16.bf16")) return sparse_product_of(n, value_of_bf16);
    if (types == std::string("f32.f16.f16")) return sparse_product_of(n, wgmma_f16);
  }
  static const std::map<std::string, Play> emulates = {
      {".reg", [](Call &) {}},
      {"bra", [](Call &c) { c.jump = c.word(0); }},
      {"setp.ne.b32", [](Call &c) { c.set(0, u64(c.as<u32>(1) != c.as<u32>(2))); }},
      {"selp.u32", [](Call &c) { c.set(0, c.get(3) ? c.as<u32>(1) : c.as<u32>(2)); }},
      {"elect.sync",  // one lane, whichever
       [](Call &c) {
         if (c.word(0) != "_|p") fail("elect.sync to another register than p");
         u32 &lane = own().elected[machine.now->index.x / 32];
         warp_meets([&lane] { lane = machine.random() % 32; });
         c.registers["p"] = machine.now->index.x % 32 == lane;
       }},
      {"mbarrier.init.shared.b64", [](Call &c) { barrier_init(u32(c.get(0)), u32(c.get(1))); }},
      {"mbarrier.try_wait.parity.shared.b64",
       [](Call &c) {
         if (c.get(2) > 1) fail("a parity is 0 or 1");
         const bool over = (barrier_of(own(), c.get(1)).phase & 1) != c.get(2);
         if (!over) yield();
         c.set(0, u64(over));
       }},
      {"mbarrier.arrive.expect_tx.shared.b64", [](Call &c) { barrier_expect(u32(c.get(1)), u32(c.get(2))); }},
      {"mbarrier.arrive.shared.b64", [](Call &c) { arrive(own(), c.get(1)); }},
      {"mbarrier.arrive.shared::cluster.b64",
       [](Call &c) {
         Block *block = cluster().blocks.at((c.get(1) >> 24) - 1);
         const u32 barrier = c.get(1) & 0xffffff;
         reach_cluster();
         if (cluster().blocks.size() == 1)
           arrive(*block, barrier);
         else
           machine.engine.push_back([=] { arrive(*block, barrier); });
       }},
      {"mapa.shared::cluster.u32",
       [](Call &c) {
         if (c.get(2) >= cluster().blocks.size()) fail("no such block in the cluster");
         c.set(0, u32((c.get(2) + 1) << 24 | c.get(1)));
       }},
      {"mov.u32",
       [](Call &c) {
         if (c.word(1) != "%%cluster_ctaid.x" && c.word(1) != "%%cluster_nctaid.x") fail("mov of something else");
         c.set(0, c.word(1) == "%%cluster_ctaid.x" ? own().rank : u32(cluster().blocks.size()));
       }},
      {"barrier.cluster.arrive.relaxed.aligned",
       [](Call &) {
         Meeting &meeting = cluster().meeting;
         machine.now->cluster_generation = meeting.generation;
         if (++meeting.here == machine.block_threads * cluster().blocks.size()) meeting.here = 0, meeting.generation++, machine.progress++;
       }},
      {"barrier.cluster.wait.acquire.aligned",
       [](Call &) {
         while (cluster().meeting.generation == machine.now->cluster_generation) yield();
       }},
      {"bar.sync",
       [](Call &c) {
         const int id = c.as(0);
         Block *block = &own();
         append(block->arriving[id], machine.now->unreleased);
         meet(block->meetings[id], c.get(1), [=] { append(block->met[id], block->arriving[id]); });
       }},
      {"bar.arrive", [](Call &c) { come(own().meetings[c.as(0)], c.get(1)); }},
      {"st.release.gpu.global.u32",  // also of what other threads stored before they met this one
       [](Call &c) {
         show_what_is_known();
         *reinterpret_cast<u32 *>(c.get(0)) = c.get(1), machine.progress++;
       }},
      {"st.relaxed.gpu.global.u32", [](Call &c) { *reinterpret_cast<u32 *>(c.get(0)) = c.get(1), machine.progress++; }},
      {"ld.acquire.gpu.global.u32",
       [](Call &c) {
         const u32 is = *reinterpret_cast<u32 *>(c.get(1));
         if (!is) yield();
         c.set(0, is);
       }},
      // between ranks, each of which is some of the blocks
      {"fence.acq_rel.sys", [](Call &) { show_what_is_known(); }},
      {"st.release.sys.global.u32",
       [](Call &c) {
         show_what_is_known();
         *reinterpret_cast<u32 *>(c.get(0)) = c.get(1), machine.progress++;
       }},
      {"ld.acquire.sys.global.u32",
       [](Call &c) {
         yield();
         noticed(c.get(1) / 8 * 8);
         c.set(0, *reinterpret_cast<u32 *>(c.get(1)));
       }},
      {"ld.relaxed.gpu.global.u32", [](Call &c) { c.set(0, *reinterpret_cast<u32 *>(c.get(1))); }},
      {"atom.acq_rel.gpu.global.add.u32",
       [](Call &c) {
         show_what_is_known();
         u32 &to = *reinterpret_cast<u32 *>(c.get(1));
         c.set(0, to), to += c.as<u32>(2), machine.progress++;
       }},
      {"st.volatile.global.v4.u32",  // others see each half at once, sooner or later
       [](Call &c) {
         if (c.get(0) % 16) fail("a misaligned access");
         for (int i = 0; i < 4; i += 2) {
           const u64 to = c.get(0) + 4 * i, value = c.as<u32>(1 + i) | u64(c.as<u32>(2 + i)) << 32;
           machine.engine.push_back([=] { *reinterpret_cast<u64 *>(to) = value, machine.progress++; });
         }
       }},
      {"ld.volatile.global.v4.u32",
       [](Call &c) {
         yield();
         noticed(c.get(4)), noticed(c.get(4) + 8);
         load_words(c, reinterpret_cast<const unsigned char *>(c.get(4)));
       }},
      {"st.relaxed.gpu.global.u64",  // others see it sooner or later
       [](Call &c) {
         const u64 to = c.get(0), value = c.get(1);
         machine.engine.push_back([=] { *reinterpret_cast<u64 *>(to) = value, machine.progress++; });
       }},
      {"ld.relaxed.gpu.global.u64",
       [](Call &c) {
         const u64 is = *reinterpret_cast<u64 *>(c.get(1));
         if (!is) yield();
         c.set(0, is);
       }},
      {"prefetch.tensormap", [](Call &) {}},
      {"fence.mbarrier_init.release.cluster", [](Call &) {}},
      {"fence.proxy.async.shared::cta",
       [](Call &) {
         for (auto &write : machine.now->unfenced) write();
         machine.now->unfenced.clear();
       }},
      {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", copy_many},
      {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint", copy_many},
      {"cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes", [](Call &c) { fetch_box(c, 1 << own().rank); }},
      {"cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes", [](Call &c) { fetch_box(c, 1 << own().rank, true); }},
      {"cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster", [](Call &c) { fetch_box(c, c.get(6)); }},
      {"cp.async.bulk.tensor.3d.global.shared::cta.bulk_group", [](Call &c) { put_box(c, c.get(4), 0); }},
      {"cp.async.bulk.tensor.4d.global.shared::cta.bulk_group", [](Call &c) { put_box(c, c.get(5), c.as(4)); }},
      {"cp.async.bulk.commit_group",
       [](Call &) {
         Thread &t = *machine.now;
         if (chance(2)) {
           finish(t, 0);  // in the order of the groups, or two stores to one place would change places
           for (auto &act : t.open) act();
           t.open.clear();
         }
         commit(t);
       }},
      {"cp.async.bulk.wait_group.read", [](Call &c) { finish(*machine.now, c.get(0)); }},
      {"cp.async.bulk.wait_group", [](Call &c) { finish(*machine.now, c.get(0)); }},
      {"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
       [](Call &c) {
         if (c.get(0) % 16 || c.get(1) % 16 || c.get(2) % 16) fail("a misaligned access");
         Block *block = &own();
         const u64 to = c.get(0);
         const u32 from = c.get(1), count = c.get(2) / 4;
         machine.now->open.push_back([=] {
           const auto *more = reinterpret_cast<const float *>(at(*block, from, 4 * count));
           for (u32 i = 0; i < count; i++) reinterpret_cast<float *>(to)[i] += more[i];
         });
       }},
      {"red.relaxed.gpu.global.add.v4.f32",
       [](Call &c) {
         if (c.get(0) % 16) fail("a misaligned access");
         for (int i = 0; i < 4; i++) reinterpret_cast<float *>(c.get(0))[i] += c.as<float>(1 + i);
       }},
      {"wgmma.fence.sync.aligned", [](Call &) { __syncwarp(); }},
      {"wgmma.commit_group.sync.aligned", [](Call &) { wgmma_commit(); }},
      {"wgmma.wait_group.sync.aligned", [](Call &c) { wgmma_wait(size_t(c.get(0))); }},
      {"setmaxnreg.inc.sync.aligned.u32", [](Call &) { __syncwarp(); }},
      {"setmaxnreg.dec.sync.aligned.u32", [](Call &) { __syncwarp(); }},
      {"stmatrix.sync.aligned.m8n8.x2.shared.b16", store_matrices<2>},
      {"stmatrix.sync.aligned.m8n8.x4.shared.b16", store_matrices<4>},
      {"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16", store_two_turned},
      {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", load_four_matrices},
      {"movmatrix.sync.aligned.m8n8.trans.b16", turn_matrix},
      {"cvt.rn.bf16x2.f32", [](Call &c) { c.set(0, bf16_bits(c.as<float>(1)) << 16 | bf16_bits(c.as<float>(2))); }},
      {"cvt.rn.f16x2.f32", [](Call &c) { c.set(0, fp16_bits(c.as<float>(1)) << 16 | fp16_bits(c.as<float>(2))); }},
      {"cvt.f32.f16", [](Call &c) { c.set(0, fp16_value(c.get(1))); }},
      {"ld.global.v4.u32", [](Call &c) { load_words(c, reinterpret_cast<const unsigned char *>(c.get(4))); }},
      {"ld.global.L1::evict_last.L2::cache_hint.v4.u32", [](Call &c) { load_words(c, reinterpret_cast<const unsigned char *>(c.get(4))); }},
      {"createpolicy.fractional.L2::evict_last.b64", [](Call &c) { c.set(0, u64(0)); }},
      {"ld.global.L1::evict_last.L2::cache_hint.u32", [](Call &c) { c.set(0, pair_at(reinterpret_cast<const unsigned char *>(c.get(1)))); }},
      {"st.shared.v4.u32",
       [](Call &c) {
         if (c.get(0) % 16) fail("a misaligned access");
         for (int i = 0; i < 4; i++) reinterpret_cast<u32 *>(at(own(), c.get(0), 16))[i] = c.as<u32>(1 + i);
       }},
      {"max.NaN.f32",
       [](Call &c) {
         const float a = c.as<float>(1), b = c.as<float>(2);
         c.set(0, std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b));
       }},
      {"div.rn.f32", [](Call &c) { c.set(0, c.as<float>(1) / c.as<float>(2)); }},
      {"min.NaN.xorsign.abs.f32", [](Call &c) {
         const float x = c.as<float>(1), y = c.as<float>(2), least = std::fmin(std::fabs(x), std::fabs(y));
         c.set(0, std::isnan(x) || std::isnan(y) ? NAN : std::signbit(x) != std::signbit(y) ? -least : least);
       }},
      {"ex2.approx.ftz.f32", [](Call &c) { c.set(0, std::exp2(c.as<float>(1))); }},
      {"rcp.approx.f32", [](Call &c) { c.set(0, 1.f / c.as<float>(1)); }},
      {"rcp.rn.f32", [](Call &c) { c.set(0, 1.f / c.as<float>(1)); }},
      {"sqrt.rn.f32", [](Call &c) { c.set(0, std::sqrt(c.as<float>(1))); }},
      {"rcp.approx.ftz.f32", [](Call &c) { c.set(0, flushed(1.f / flushed(c.as<float>(1)))); }},
      {"sqrt.approx.ftz.f32", [](Call &c) { c.set(0, std::sqrt(flushed(c.as<float>(1)))); }},
      {"rsqrt.approx.ftz.f32", [](Call &c) { c.set(0, 1.f / std::sqrt(flushed(c.as<float>(1)))); }},
      {"add.rp.f32", [](Call &c) { c.set(0, sum_rounded_up(c.as<float>(1), c.as<float>(2))); }},
      {"cvt.rn.satfinite.e4m3x2.f32",
       [](Call &c) { c.set(0, static_cast<unsigned short>(e4m3_bits(c.as<float>(1)) << 8 | e4m3_bits(c.as<float>(2)))); }},
      {"cvt.rn.f16x2.e4m3x2",
       [](Call &c) {
         const unsigned char bytes[] = {static_cast<unsigned char>(c.get(1)), static_cast<unsigned char>(c.get(1) >> 8)};
         c.set(0, fp16_bits(wgmma_e4m3(bytes + 1)) << 16 | fp16_bits(wgmma_e4m3(bytes)));
       }},
      {"ld.shared.f32", [](Call &c) { load_aligned(c, 1, at(own(), c.get(1), 4)); }},
      {"ld.shared.v2.f32", [](Call &c) { load_aligned(c, 2, at(own(), c.get(2), 8)); }},
      {"ld.global.u32", [](Call &c) { load_aligned(c, 1, reinterpret_cast<const unsigned char *>(c.get(1))); }},
      {"ld.global.v2.u32", [](Call &c) { load_aligned(c, 2, reinterpret_cast<const unsigned char *>(c.get(2))); }},
      {"ld.global.L1::evict_last.L2::cache_hint.v2.u32", [](Call &c) { load_aligned(c, 2, reinterpret_cast<const unsigned char *>(c.get(2))); }},
      {"st.global.u32", [](Call &c) { store_aligned(c, 1); }},
      {"st.global.v2.u32", [](Call &c) { store_aligned(c, 2); }},
      {"st.global.v4.u32",
       [](Call &c) {
         if (c.get(0) % 16) fail("a misaligned access");
         const std::array<u32, 4> words{c.as<u32>(1), c.as<u32>(2), c.as<u32>(3), c.as<u32>(4)};
         const auto write = [to = c.get(0), words] { std::memcpy(reinterpret_cast<void *>(to), words.data(), 16); };
         if (machine.late_stores && chance(2))
           machine.now->unreleased.push_back(write);
         else
           write();
       }},
      {"ld.shared.v4.u32", [](Call &c) { load_words(c, at(own(), c.get(4), 16)); }},
      {"lop3.b32", three_way},
      {"fma.rn.bf16x2", [](Call &c) { multiply_add(c, [](u32 x) { return bf16_value(x); }, bf16_bits); }},
      {"fma.rn.f16x2", [](Call &c) { multiply_add(c, [](u32 x) { return fp16_value(x & 0xffff); }, fp16_bits); }},
      {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", [](Call &c) { product_of_a_warp(c, value_of_bf16); }},
      {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", [](Call &c) { product_of_a_warp(c, wgmma_f16); }},
      {"cp.async.cg.shared.global", copy_sixteen},
      {"cp.async.cg.shared.global.L2::cache_hint", copy_sixteen},
      {"cp.async.cg.shared.global.L2::256B", copy_sixteen},
      {"cp.async.wait_all", [](Call &) { commit(*machine.now), finish(*machine.now, 0); }},
      {"cp.async.commit_group", [](Call &) { commit(*machine.now); }},
      {"cp.async.wait_group", [](Call &c) { finish(*machine.now, c.get(0)); }},
      {"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32", store_floats_at<4>},
      {"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32", store_floats_at<2>},
      {"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32", store_floats_at<1>},
      {"lg2.approx.ftz.f32", [](Call &c) { c.set(0, std::log2(c.as<float>(1))); }},
      {"max.bf16x2", [](Call &c) { largest_of_pairs(c, [](u32 x) { return bf16_value(x); }, bf16_bits); }},
      {"max.f16x2", [](Call &c) { largest_of_pairs(c, [](u32 x) { return fp16_value(x & 0xffff); }, fp16_bits); }},
  };
  if (!emulates.count(name)) fail(("an instruction that is not emulated: " + name).c_str());
  return emulates.at(name);
}

// ---- asm statements and jobs --------------------------------------------------------------------------------------------------

Program::Program(const std::string &text) {
  size_t i = 0;
  const auto blank = [&] {
    while (i < text.size() && (std::isspace(text[i]) || text[i] == '{' || text[i] == '}')) i++;
  };
  for (blank(); i < text.size(); blank()) {
    Statement made;
    size_t end = text.find_first_of(" \n\t;:", i);
    if (text[end] == ':' && text[end + 1] == '\n') {
      made.label = text.substr(i, end - i), i = end + 1;
      statements.push_back(made);
      continue;
    }
    if (text[i] == '@') {
      made.guard = text.substr(i + 1, end - i - 1);
      i = text.find_first_not_of(' ', end);
    }
    const size_t stop = text.find(';', i);
    if (stop == std::string::npos) fail("a statement without its semicolon");
    end = min(stop, text.find_first_of(" \n", i));
    made.emulate = emulate_of(text.substr(i, end - i));
    for (size_t at = end; (at = text.find_first_not_of(" ,[]{}\n\t", at)) < stop;) {
      const size_t next = min(stop, text.find_first_of(" ,[]{}\n\t;", at));
      made.words.push_back(text.substr(at, next - at)), at = next;
    }
    i = stop + 1;
    statements.push_back(made);
  }
}

void Program::run(std::initializer_list<Operand> operands) const {
  Call call{operands.begin()};
  for (size_t i = 0; i < statements.size(); i++) {
    const Statement &s = statements[i];
    if (!s.emulate || (!s.guard.empty() && !call.registers.at(s.guard))) continue;
    call.now = &s;
    s.emulate(call);
    if (call.jump.empty()) continue;
    for (i = 0; statements.at(i).label != call.jump;) i++;
    call.jump.clear();
  }
}

void Job::read() {
  const auto take = [](void *to, size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) fail("the job ends too early");
  };
  take(this, reinterpret_cast<char *>(buffers) - reinterpret_cast<char *>(this));
  for (int i = 0; i < BUFFERS; i++) take(buffers[i] = guarded((bytes[i] + 1) / 2), bytes[i]);
  if (std::fread(more, 1, sizeof more, stdin) == sizeof more)
    for (int i = 0; i < MORE; i++) take(buffers[BUFFERS + i] = guarded((more[i] + 1) / 2), more[i]);
  for (auto &map : maps) {
    map[14] = reinterpret_cast<i64>(buffers[map[16]]), map[15] = map[14] + bytes[map[16]];
    map[0] += map[14];  // was counted from the buffer's beginning
  }
}

void Job::run(const std::function<void()> &body) {
  machine.random.seed(seed);
  launch(grid, threads, cluster, shared_bytes, body, bytes[10] ? grid / cluster : 1);  // who wait for each other run together
  for (int i : {4, 8, 10}) std::fwrite(buffers[i], 1, bytes[i], stdout);
}
