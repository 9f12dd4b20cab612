// Scans along rows of adjacent elements, 16 bytes an access: rows that a block holds in registers, and longer ones in tiles.
//
// A warp holds VECTORS runs of 16 bytes a lane, side by side as they lie in memory, so nothing is exchanged through shared
// memory: a lane adds up its vector, lanes scan these sums by shuffles, and each lane goes through its vector again.
// Everything is joined in one order, so the same bits come out every time.
#include "logarithm.cuh"

// ---- barriers ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u64 *barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// ---- rows in registers -------------------------------------------------------------------------------------------------

// x, y: [M, N], rows 16-byte aligned, N a multiple of 16 bytes. WARPS warps of a block share a row, each holding VECTORS * LANES
// vectors of it, of ROWS rows at once (times 32 / LANES side by side); a block has THREADS / (32 * WARPS) such teams. Or a
// cluster of BLOCKS blocks, each of one team, shares a row; then a block tells its total to those after it.
//
// Rows that begin anywhere are held as the vectors that y's row has parts of; what these have beside the row is not written. x is
// read by the same vectors where its rows begin ALIKE, else by elements.
template <typename T, typename Op, bool REVERSE, bool EXCLUSIVE, int LANES, int VECTORS, int ROWS, int WARPS, int THREADS, int BLOCKS,
          int BEGIN = ON_VECTORS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    scan_rows(const T *x, T *y, i64 M, i64 N, i64 x_row, i64 y_row) {
  using Held = Strip<T, Op, LANES, VECTORS>;
  using Total = typename Op::Total;
  constexpr int COUNT = Held::COUNT, TEAMS = THREADS / (32 * WARPS), SIDE = 32 / LANES;
  static_assert(BLOCKS == 1 || (TEAMS == 1 && ROWS == 1 && SIDE == 1), "a cluster has one row");
  __shared__ u64 arrived[1];  // the totals of the blocks before this one have arrived
  __shared__ alignas(16) Total of_blocks[16];
  __shared__ Total of_warps[TEAMS][ROWS][WARPS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, team = threadIdx.x / (32 * WARPS);
  const u32 rank = BLOCKS > 1 ? cluster_rank() : 0;
  const i64 first = (i64(blockIdx.x / BLOCKS) * TEAMS + team) * (ROWS * SIDE) + lane / LANES;
  const int whole = int(N / COUNT);
  // Of row r: elements of its first vector that come before it; the vectors that it has parts of.
  auto skipped = [&](int r) { return BEGIN ? int(reinterpret_cast<u64>(y + (first + r * SIDE) * y_row) / sizeof(T) % COUNT) : 0; };
  auto vectors = [&](int r) { return BEGIN ? int((skipped(r) + N + COUNT - 1) / COUNT) : whole; };
  auto at = [&](int v) { return int(((rank * WARPS + warp) * VECTORS + v) * LANES + lane % LANES); };  // in the scan's order
  auto offset = [&](int r, int v) { return i64(REVERSE ? vectors(r) - 1 - at(v) : at(v)) * COUNT - skipped(r); };

  if constexpr (BLOCKS > 1) {
    if (threadIdx.x == 0) {
      barrier_init(arrived, 1);
      barrier_expect(arrived, rank * sizeof(Total));
    }
    cluster_arrive();  // cluster_wait is below, before the totals are sent: the loads run in between
  }
  Held held[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {  // all loads before any use
      const i64 row = first + r * SIDE;
      held[r].w[v] = vector_of<T, COUNT>(Op::NEUTRAL);
      if (row < M && at(v) < vectors(r)) {
        if constexpr (BEGIN == ANYWHERE)
          held[r].w[v] = load_elements<T, COUNT>(x + row * x_row, offset(r, v), N, Op::NEUTRAL);
        else
          held[r].w[v] = load_stream<T, COUNT>(x + row * x_row + offset(r, v));
      }
    }
  if constexpr (BEGIN == ALIKE) {  // what lies behind a row in the order of the scan takes part in nothing that is written
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (at(0) == 0) held[r].w[0] = of_row<T, COUNT>(held[r].w[0], offset(r, 0), N, Op::NEUTRAL);
  }
  Total carry[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    held[r].scan(lane, u32(N >> 63));
    carry[r] = Op::none();
    if (WARPS > 1 && lane == 0) of_warps[team][r][warp] = held[r].total;
  }
  if constexpr (WARPS > 1) {
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; r++) carry[r] = join_lanes<Op>(lane < warp ? of_warps[team][r][lane] : Op::none());
  }
  if constexpr (BLOCKS > 1) {
    const Total total = WARPS > 1 ? join_lanes<Op>(lane < WARPS ? of_warps[0][0][lane] : Op::none()) : held[0].total;
    cluster_wait();  // all blocks' barriers are there
    if (threadIdx.x > rank && threadIdx.x < BLOCKS) store_remote(&of_blocks[rank], threadIdx.x, total, arrived);
    phase_wait(arrived, 0);
    carry[0] = Op::join(join_lanes<Op>(lane < rank ? of_blocks[lane] : Op::none()), carry[0]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if constexpr (Op::OF_SUMS) {
      const int lacking = !BEGIN || at(0) ? 0 : REVERSE ? int(vectors(r) * COUNT - skipped(r) - N) : skipped(r);
      if (held[r].template begins_low<REVERSE>(lane, lacking)) {
        const i64 row = first + r * SIDE;
        if constexpr (BEGIN)
          scan_apart_anywhere<T, REVERSE, EXCLUSIVE, LANES, VECTORS>(x + row * x_row, y + row * y_row, offset(r, 0), row < M ? N : 0, lane,
                                                                     Op::value(carry[r]));
        else
          scan_apart<T, REVERSE, EXCLUSIVE, LANES, VECTORS>(x + row * x_row + offset(r, 0), y + row * y_row + offset(r, 0),
                                                            row < M ? vectors(r) - at(0) : 0, lane, Op::value(carry[r]));
        continue;
      }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const i64 row = first + r * SIDE;
      if (row < M && at(v) < vectors(r)) {
        const Words<T, COUNT> made = held[r].template result<REVERSE, EXCLUSIVE>(v, carry[r]);
        if constexpr (BEGIN)
          store_elements<T, COUNT>(y + row * y_row, offset(r, v), N, made);
        else
          store<T, COUNT>(y + row * y_row + offset(r, v), made);
      }
    }
  }
}

// ---- look-back ---------------------------------------------------------------------------------------------------------
//
// `state` (zeroed) has a word for the total of each tile of each row. A word holds a value and a flag, so one access brings both
// and no fence is needed. Every block reads all totals, each once, and joins them in groups of 32 as trees, the groups in their
// order: a total takes one trip through L2 to reach every block, and the bits do not depend on timing.

constexpr int HEAD = 16;  // words before the first row's: [0] counts the tiles that were taken, alone in its line
constexpr int WIDE = 6;   // groups that are asked for at once: about as many as lie between two tiles of a block
constexpr u64 THERE = 1ull << 32;

__device__ __forceinline__ void publish(u64 *word, float value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(THERE | __float_as_uint(value)) : "memory");
}

__device__ __forceinline__ u64 look(const u64 *word) {
  u64 found;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(word) : "memory");
  return found;
}

// What comes before the tiles of a row, for a warp that asks in their order.
template <typename Op> struct Before {
  u32 group = 0;                                               // the first that is not joined yet
  float of_groups = Op::NEUTRAL, of_stretches = Op::NEUTRAL;   // of up to 32 groups, and of 32 groups each before these

  // What lies before tile `index`; totals: the row's words.
  __device__ __forceinline__ float of(const u64 *totals, u32 index, u32 lane) {
    const u32 own = index / 32, part = index % 32;
    for (;;) {
      const u32 groups = min(own - group, u32(WIDE));
      const bool last = own - group < WIDE;  // then its own group's part is asked for with the whole groups
      u64 found[WIDE];
#pragma unroll
      for (int i = 0; i < WIDE; i++) found[i] = i < groups || (last && i == groups && lane < part) ? 0 : THERE | __float_as_uint(Op::NEUTRAL);
      for (bool all = false; !all;) {
#pragma unroll
        for (int i = 0; i < WIDE; i++)
          if (!(found[i] & THERE)) found[i] = look(totals + (group + i) * 32 + lane);
        all = true;
#pragma unroll
        for (int i = 0; i < WIDE; i++) all = all && found[i] & THERE;
      }
      __syncwarp();
      float joined[WIDE];
#pragma unroll
      for (int i = 0; i < WIDE; i++) joined[i] = __uint_as_float(u32(found[i]));
      if constexpr (Op::OF_SUMS) {
#pragma unroll
        for (int i = 0; i < WIDE; i++) joined[i] = Op::of_lanes(joined[i]);
      } else {
#pragma unroll
        for (int step = 16; step; step /= 2)
#pragma unroll
          for (int i = 0; i < WIDE; i++) joined[i] = Op::join(joined[i], __shfl_xor_sync(ALL, joined[i], step));
      }
      float of_part = Op::NEUTRAL;
#pragma unroll
      for (int i = 0; i < WIDE; i++) {
        if (i < groups) {
          of_groups = Op::join(of_groups, joined[i]);
          if (++group % 32 == 0) {
            of_stretches = Op::join(of_stretches, of_groups);
            of_groups = Op::NEUTRAL;
          }
        } else if (i == groups) {
          of_part = joined[i];
        }
      }
      if (last) return Op::join(Op::join(of_stretches, of_groups), of_part);
    }
  }
};

// ---- rows in tiles -----------------------------------------------------------------------------------------------------

// Waits until so many threads of a block have arrived.
template <int THREADS> __device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// x, y: rows as above. Blocks are persistent, and each warp has one role for a tile, the k-th of its block:
//
//   producer     takes a tile from a counter and has it copied into slot k % SLOTS; at most LOADS copies are in flight
//   ADDERS       add it up together and publish the total
//   one          joins the totals of all tiles before it and publishes its carry
//   TEAMS        of WARPS warps, each for every TEAMS-th tile: take it into registers, free its slot, scan it, wait for the
//                carry, write
//
// So SLOTS + TEAMS tiles load or wait, each with an entry of its own (k % ENTRIES) for its state. An entry is free
// again when slot k % SLOTS is: the team that emptied that slot, of tile k - SLOTS, was done with tile k - SLOTS - TEAMS.
//
// A warp waits only for earlier tiles: tiles are taken from a counter, by a block in its order. So every wait ends, whatever the
// order in which blocks start and however few run.
template <typename T, typename Op, bool REVERSE, bool EXCLUSIVE, int TEAMS, int WARPS, int VECTORS, int SLOTS, int LOADS, int ADDERS,
          int PER_SM>
__global__ void __launch_bounds__((2 + ADDERS + TEAMS * WARPS) * 32, PER_SM)
    scan_ring(const T *x, u64 *state, T *y, i64 N, u32 tiles, u32 all_tiles, i64 x_row, i64 y_row) {
  using Held = Strip<T, Op, 32, VECTORS>;
  constexpr int COUNT = Held::COUNT, TILE = WARPS * VECTORS * 32;  // vectors
  constexpr u32 SKIP = TILE * COUNT;                               // elements of a slot
  constexpr u32 ENTRIES = SLOTS + TEAMS;
  static_assert(TEAMS <= SLOTS && LOADS <= SLOTS && WARPS % ADDERS == 0 && WARPS <= 32, "");
  __shared__ u64 full[SLOTS], empty[SLOTS];                         // copied in; added up and taken into registers
  __shared__ u64 added[ENTRIES], known[ENTRIES];                    // its total is published; its carry is there
  __shared__ u32 taken[ENTRIES];                                    // which tile
  __shared__ float carry[ENTRIES];
  __shared__ float of_strip[ENTRIES][WARPS];  // the strips' totals, then what the tile has before each strip
  extern __shared__ __align__(128) unsigned char dynamic[];
  T *const slots = reinterpret_cast<T *>(dynamic);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  struct Tile {
    i64 row, first;  // first: the vector of the row that lies at the slot's begin, before the row's if the last tile is short
    u32 index;       // in the row, in the order of the scan
    int vectors;
    __device__ Tile(u32 number, i64 N, u32 tiles) : row(number / tiles), index(number % tiles) {
      const i64 rest = N / COUNT - i64(index) * TILE;
      vectors = int(min(rest, i64(TILE)));
      first = REVERSE ? rest - TILE : i64(index) * TILE;
    }
  };
  // What a row's last tile lacks lies behind it in the order of the scan, so it may be anything: nothing that is written, and no
  // total that is published, takes part in it. (Where it is the largest of a strip of exponentials, the strip is joined apart.)
  auto offset = [](int at) { return (REVERSE ? TILE - 1 - at : at) * COUNT; };
  auto slot_vector = [&](u32 slot, int at) { return slots + slot * SKIP + offset(at); };
  auto tile_totals = [&](const Tile &tile) { return state + HEAD + tile.row * tiles; };

  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; s++) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], WARPS + ADDERS);
    }
    for (int e = 0; e < ENTRIES; e++) {
      barrier_init(&added[e], 1);
      barrier_init(&known[e], 1);
    }
  }
  __syncthreads();

  if (warp == 0) {  // ---- the producer. It tells every team that there are no more tiles ----
    if (lane) return;
    for (u32 k = 0, ends = 0; ends < TEAMS; k++) {
      const u32 slot = k % SLOTS, entry = k % ENTRIES;
      if (k >= SLOTS) phase_wait(&empty[slot], (k / SLOTS - 1) & 1);
      if (k >= LOADS) phase_wait(&full[(k - LOADS) % SLOTS], (k - LOADS) / SLOTS & 1);
      // Not earlier: all later tiles, of whatever block, wait for one that was taken and is not yet copied.
      const u32 number = ends ? all_tiles : atomicAdd(reinterpret_cast<u32 *>(state), 1u);
      if (number >= all_tiles) {
        taken[entry] = all_tiles + ends++;
        barrier_arrive(&full[slot]);
        continue;
      }
      const Tile tile(number, N, tiles);
      const u32 bytes = tile.vectors * 16;
      const int skipped = REVERSE ? TILE - tile.vectors : 0;
      taken[entry] = number;
      barrier_expect(&full[slot], bytes);
      copy_bulk_stream(slots + slot * SKIP + skipped * COUNT, x + tile.row * x_row + (tile.first + skipped) * COUNT, bytes,
                       &full[slot]);
    }
    return;
  }

  if (warp == 1) {  // ---- joins what comes before ----
    i64 row = -1;
    Before<Op> before;
    for (u32 k = 0;; k++) {
      const u32 entry = k % ENTRIES;
      phase_wait(&added[entry], k / ENTRIES & 1);
      const u32 number = taken[entry];
      if (number >= all_tiles) return;
      const Tile tile(number, N, tiles);
      if (tile.row != row) {
        row = tile.row;
        before = Before<Op>();
      }
      const float found = before.of(tile_totals(tile), tile.index, lane);
      if (lane == 0) {
        carry[entry] = found;
        barrier_arrive(&known[entry]);
      }
    }
  }

  if (warp < 2 + ADDERS) {  // ---- an adder, of every ADDERS-th strip ----
    const u32 adder = warp - 2;
    for (u32 k = 0;; k++) {
      const u32 slot = k % SLOTS, entry = k % ENTRIES;
      phase_wait(&full[slot], k / SLOTS & 1);
      const u32 number = taken[entry];
      if (number >= all_tiles) {
        if (adder == 0 && lane == 0) barrier_arrive(&added[entry]);
        if (number == all_tiles + TEAMS - 1) return;
        continue;
      }
      const Tile tile(number, N, tiles);
      float sum[WARPS / ADDERS];
#pragma unroll
      for (int s = 0; s < WARPS / ADDERS; s++) {
        if constexpr (Op::OF_SUMS) {
          Words<T, COUNT> w[VECTORS];
#pragma unroll
          for (int v = 0; v < VECTORS; v++) w[v] = load_shared<T, COUNT>(slot_vector(slot, ((s * ADDERS + adder) * VECTORS + v) * 32 + lane));
          sum[s] = strip_total<T, COUNT, VECTORS>(w);
          continue;
        }
        float of_vector[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
          of_vector[v] = vector_total<T, Op, COUNT>(load_shared<T, COUNT>(slot_vector(slot, ((s * ADDERS + adder) * VECTORS + v) * 32 + lane)));
        sum[s] = of_vector[0];
#pragma unroll
        for (int v = 1; v < VECTORS; v++) sum[s] = Op::join(sum[s], of_vector[v]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[slot]);
      if constexpr (!Op::OF_SUMS)
#pragma unroll
      for (int step = 16; step; step /= 2)
#pragma unroll
        for (int s = 0; s < WARPS / ADDERS; s++) sum[s] = Op::join(sum[s], __shfl_xor_sync(ALL, sum[s], step));
      if (lane == 0)
#pragma unroll
        for (int s = 0; s < WARPS / ADDERS; s++) of_strip[entry][s * ADDERS + adder] = sum[s];
      meet<ADDERS * 32>();
      if (adder) continue;
      float upto = lane < WARPS ? of_strip[entry][lane] : Op::NEUTRAL;
#pragma unroll
      for (int step = 1; step < WARPS; step *= 2) {
        const float other = __shfl_up_sync(ALL, upto, step);
        if (lane >= step) upto = Op::join(other, upto);
      }
      const float all = __shfl_sync(ALL, upto, WARPS - 1), previous = __shfl_up_sync(ALL, upto, 1);
      if (lane == 0 && tile.index + 1 < tiles) publish(tile_totals(tile) + tile.index, all);
      if (lane < WARPS) of_strip[entry][lane] = lane ? previous : Op::NEUTRAL;
      __syncwarp();
      if (lane == 0) barrier_arrive(&added[entry]);
    }
  }

  // ---- a warp of a team ----
  const u32 member = warp - 2 - ADDERS, strip = member % WARPS;
  for (u32 k = member / WARPS;; k += TEAMS) {
    const u32 slot = k % SLOTS, entry = k % ENTRIES;
    phase_wait(&full[slot], k / SLOTS & 1);
    const u32 number = taken[entry];
    if (number >= all_tiles) return;
    const Tile tile(number, N, tiles);
    auto at = [&](int v) { return int((strip * VECTORS + v) * 32 + lane); };
    Held held;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) held.w[v] = load_shared<T, COUNT>(slot_vector(slot, at(v)));
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[slot]);
    held.scan(lane, u32(N >> 63));
    phase_wait(&known[entry], k / ENTRIES & 1);
    const float before = Op::join(carry[entry], of_strip[entry][strip]);
    T *const to = y + tile.row * y_row + tile.first * COUNT;
    if constexpr (Op::OF_SUMS) {
      if (held.template begins_low<REVERSE>(lane)) {
        const T *const from = x + tile.row * x_row + tile.first * COUNT;
        scan_apart<T, REVERSE, EXCLUSIVE, 32, VECTORS>(from + offset(at(0)), to + offset(at(0)), tile.vectors - at(0), lane, before);
        continue;
      }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (at(v) < tile.vectors) store<T, COUNT>(to + offset(at(v)), held.template result<REVERSE, EXCLUSIVE>(v, Op::total(before)));
    }
  }
}
