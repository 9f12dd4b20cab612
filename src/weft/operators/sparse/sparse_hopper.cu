// Products of a 2:4 semi-structured matrix with a dense one on Hopper (sm_90a): as matmul_hopper, persistent, warp-specialised and fed
// by TMA, computed by the sparse wgmma, which takes 32 columns of A in the time of 16.
//
// A block is a warpgroup of which one thread fetches, and WARPGROUPS that multiply, 64 rows of the tile each. A stage is 64 terms of B.
// The kept elements of 128 columns of A fill lines of 128 bytes, so these come with every second stage, to a ring of their own without
// barriers: their place has been read when the stage's place is empty, since there are more than half as many of them.
//
// Metadata go from memory into registers, four int16 (64 columns) of one row a thread, two pieces of 128 columns ahead: the even lanes of a
// quarter have row g of the warp's 16, the odd ones row g + 8; lanes 0 and 1 the piece's first half, 2 and 3 its second. Neighbours
// exchange halves of words, and then each lane has what wgmma wants of it with the selector of its half.
#include "hopper_epilogue.cuh"
#include "hopper_pipeline.cuh"
#include "hopper_tiles.cuh"
#include "sparse_wgmma.cuh"

constexpr int PIECE = 128, DEPTH = 64;  // columns of A in a line; terms of a stage

// Of a word (two int16, 32 columns) of this lane's row and one of its neighbour's: this lane's 16 columns of both, the upper row's below.
__device__ __forceinline__ u32 places_of(u32 own, int lane) {
  const u32 other = __shfl_xor_sync(0xffffffffu, own, 1);
  return __byte_perm(own, other, lane % 2 ? 0x3276 : 0x5410);
}

// C = A B: A [M, K] by its values [M, K / 2] and metadata [M, K / 16], four int16 a word; B [K, N]. K is a multiple of 128. Maps have
// boxes of A: 64 values by the tile's rows; B: the rows of its [N, K] view that a block fetches by 64 terms (with B_ACROSS 64 columns by
// 64 terms, or by 32 if two blocks share 192 or 64 columns); C: 64 columns by 64 rows. CLUSTER blocks that lie on one another take the same
// columns of B, of which each fetches a part for all. HELD: slabs of 64 columns of C that a warpgroup stages at a time.
template <typename T, int WARPGROUPS, int COLUMNS, int STAGES, int CLUSTER, int HELD, bool B_ACROSS>
__global__ void __launch_bounds__(128 + 128 * WARPGROUPS, 1)
    sparse_hopper(const u64 *metadata, const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                  const __grid_constant__ TensorMap c_map, Shape shape) {
  constexpr int HEIGHT = 64 * WARPGROUPS, A_BYTES = HEIGHT * LINE, B_BYTES = COLUMNS * LINE;
  constexpr int LINES = (STAGES + 2) / 2;  // places of A: 2 LINES > STAGES
  constexpr int PART = COLUMNS / CLUSTER, BOX = B_ACROSS ? 64 : PART, SLABS = COLUMNS / 64;
  // Boxes of 64 columns cannot be divided evenly if they are three, or one: then a block fetches a part of each box's terms.
  constexpr bool BY_DEPTH = B_ACROSS && PART % BOX != 0;
  static_assert(PART % 8 == 0 && COLUMNS % CLUSTER == 0 && SLABS % HELD == 0, "the tile is too narrow");
  extern __shared__ __align__(1024) unsigned char dynamic[];  // all there is: the swizzle asks for 1024 bytes' alignment
  unsigned char *const ring = dynamic, *const lines = ring + STAGES * B_BYTES, *const out = lines + LINES * A_BYTES;
  u64 *full = reinterpret_cast<u64 *>(out + WARPGROUPS * HELD * ATOM), *empty = full + STAGES;

  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0), rank = CLUSTER > 1 ? int(cluster_rank()) : 0;
  const Tiles tiles{(shape.m + HEIGHT * CLUSTER - 1) / (HEIGHT * CLUSTER), (shape.n + COLUMNS - 1) / COLUMNS, 1, shape.group};
  const int pieces = shape.k / PIECE, count = tiles.count(), first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], 4 * WARPGROUPS * CLUSTER);  // the warps of every block that reads what this one fetches
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }

  if (warpgroup == 0) {
    // ---- the producer: one thread ----
    if constexpr (WARPGROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if constexpr (WARPGROUPS == 3) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (__shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) == 0 && elected()) {
      int place = 0, line = 0;
      u32 parity = 1;  // a fresh place counts as emptied
      for (int tile = first; tile < count; tile += step) {
        int row, column, matrix;
        tiles.at(tile, row, column, matrix);
        row = (row * CLUSTER + rank) * HEIGHT, column *= COLUMNS;
        for (int depth = 0; depth < 2 * pieces; depth++) {
          const bool begins = depth % 2 == 0;
          barrier_wait(&empty[place], parity);
          barrier_expect(&full[place], B_BYTES + (begins ? A_BYTES : 0));
          if (begins) {
            fetch(lines + line * A_BYTES, a_map, depth * (DEPTH / 2), row, 0, &full[place]);
            if (++line == LINES) line = 0;
          }
          unsigned char *const b = ring + place * B_BYTES;
#pragma unroll
          for (int i = 0; i < (BY_DEPTH ? COLUMNS : PART); i += BOX) {
            const int c = BY_DEPTH ? i : rank * PART + i, deeper = BY_DEPTH ? rank * (DEPTH / CLUSTER) : 0;
            const int k = depth * DEPTH + deeper, x = B_ACROSS ? column + c : k, y = B_ACROSS ? k : column + c;
            if constexpr (CLUSTER > 1)
              fetch_for((1 << CLUSTER) - 1, b + (c + deeper) * LINE, b_map, x, y, 0, &full[place]);
            else
              fetch(b + c * LINE, b_map, x, y, 0, &full[place]);
          }
          if (++place == STAGES) place = 0, parity ^= 1;
        }
      }
      // No block leaves while another may still write into it, or arrive at it.
      for (int s = 0; CLUSTER > 1 && s < STAGES; s++) {
        barrier_wait(&empty[place], parity);
        if (++place == STAGES) place = 0, parity ^= 1;
      }
    }
  } else {
    // ---- the consumers: 64 rows each ----
    if constexpr (WARPGROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if constexpr (WARPGROUPS == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    const int mine = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    unsigned char *const staged = out + mine * HELD * ATOM;
    // Bytes from one step of wgmma's 32 terms to the next: within a swizzled line, or four groups of 8 rows further.
    constexpr u64 A_STEP = 32 >> 4, B_STEP = (B_ACROSS ? 4 * 8 * LINE : 64) >> 4;
    auto release = [&](int place) {
      if (lane < CLUSTER) barrier_arrive(&empty[place], lane);
    };
    float sums[COLUMNS / 2];
    int place = 0, before = 0, line = 0, row = 0, column = 0;
    u32 parity = 0;
    const u64 *at = metadata;  // of a piece
    u64 even = 0, odd = 0;     // words of the next pieces, of each kind one
    auto begin = [&](int tile) {
      int matrix;
      tiles.at(tile, row, column, matrix);
      row = (row * CLUSTER + rank) * HEIGHT + mine * 64, column *= COLUMNS;
      // past the last row values are zeros, wherever they are put
      at = metadata + i64(min(row + 16 * warp + lane / 4 + lane % 2 * 8, shape.m - 1)) * (shape.k / DEPTH) + lane % 4 / 2;
      even = *at;
      if (pieces > 1) odd = at[PIECE / DEPTH];
    };
    auto wait = [&] { barrier_wait(&full[place], parity); };
    // Behind the products of a stage: those of the stage before are done.
    auto done = [&](bool not_first) {
      wgmma_commit();
      wgmma_wait<1>();
      hold(sums);
      if (not_first) release(before);
      before = place;
      if (++place == STAGES) place = 0, parity ^= 1;
    };
    auto multiply = [&](int piece, u64 &words) {
      const u32 places[2] = {places_of(u32(words), lane), places_of(u32(words >> 32), lane)};
      if (piece + 2 < pieces) words = at[(piece + 2) * (PIECE / DEPTH)];
      const u64 a = descriptor(shared_address(lines + line * A_BYTES) + mine * ATOM, 0);
      if (++line == LINES) line = 0;
      {
        wait();
        const u64 b = descriptor(shared_address(ring + place * B_BYTES), B_ACROSS ? ATOM : 0);
        hold(sums);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; s++)
          SparseUnit<T>::template multiply<COLUMNS, 0, B_ACROSS>(sums, a + s * A_STEP, b + s * B_STEP, places[s], piece + s != 0);
        done(piece != 0);
      }
      {
        wait();
        const u64 b = descriptor(shared_address(ring + place * B_BYTES), B_ACROSS ? ATOM : 0);
        hold(sums);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; s++)
          SparseUnit<T>::template multiply<COLUMNS, 1, B_ACROSS>(sums, a + (2 + s) * A_STEP, b + s * B_STEP, places[s], 1);
        done(true);
      }
    };
    if (first < count) begin(first);
    for (int tile = first; tile < count; tile += step) {
      for (int piece = 0; piece < pieces; piece += 2) {
        multiply(piece, even);  // two kinds, since products of one piece still read its places when the next one's are made
        if (piece + 1 < pieces) multiply(piece + 1, odd);
      }
      wgmma_wait<0>();
      hold(sums);
      release(before);
      const int of_row = row, of_column = column;
      if (tile + step < count) begin(tile + step);  // on its way while this one is stored

      // ---- C: rows 16 warp + lane / 4 (+ 8), columns 8 j + 2 (lane % 4) (+ 1) are this thread's ----
#pragma unroll
      for (int held = 0; held < SLABS; held += HELD) {
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // what was put before has left its place
        group_barrier(1 + mine);
#pragma unroll
        for (int slab = 0; slab < HELD; slab++) {
#pragma unroll
          for (int j = 0; j < 8; j++) {  // 8 rows of 16 bytes a matrix, which change places with the row's number, as in TMA's swizzle
            const float *v = sums + 4 * ((held + slab) * 8 + j);
            const int r = 16 * warp + lane % 16;
            store_matrices(staged + slab * ATOM + r * LINE + ((j ^ r % 8) * 16), pack_pair(T{}, v[0], v[1]), pack_pair(T{}, v[2], v[3]));
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        group_barrier(1 + mine);
        if (thread == 0) {
#pragma unroll
          for (int slab = 0; slab < HELD; slab++) put(c_map, staged + slab * ATOM, of_column + (held + slab) * 64, of_row, 0);
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
      }
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
