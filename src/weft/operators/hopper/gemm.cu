// The main loop of matrix products on Hopper (sm_90a): persistent, warp-specialised, fed by TMA, computed by wgmma.
//
// A block is three warpgroups. One thread of the first fetches tiles of A and B through a ring of STAGES slots in shared
// memory, well ahead; the other two multiply, 64 rows of the tile each, and keep their sums in registers. mbarriers say which
// slots are full and which are empty, so there is no block-wide barrier. Blocks are persistent and take tile after tile; while
// one tile is stored (through shared memory, by TMA), slots are filled for the next one. CLUSTER blocks above one another in C
// take the same columns of B, or with ABREAST, beside one another, the same rows of A: each fetches a part and sends it to all.
//
// A stage holds 128 bytes along K: rows of 128 bytes in the 128-byte swizzle that TMA writes and wgmma reads. An operand
// whose K is not the contiguous axis (16-bit floats only) lies as blocks of 64 rows of K by 64 elements.
#include "hopper_epilogue.cuh"
#include "hopper_groups.cuh"
#include "hopper_pipeline.cuh"
#include "hopper_producer.cuh"
#include "hopper_tiles.cuh"
#include "hopper_wgmma.cuh"

// C[z] = act(alpha scale A[z] B[z] + bias) + beta R[z], A: [M, K], B: [K, N], R, C: [M, N]. GATED: act(gate) up + beta R with
// gate = alpha scale A B + bias and up the same of the matrix of up_map; scales and bias of up follow those of B. AMAX: the largest
// |c| before it is rounded goes to *amax (which must have been set to 0); NaN counts as largest.
// The tensor cores add up fp8 products to about 14 bits; TWO_LEVELS has them add up a stage alone, half of 256 columns (a third of 192) at a time
// since registers hold no more, and adds the stages in fp32. Scales of blocks need that.
//
// STREAM: tiles that do not fill a wave are divided among all blocks by stages of K (`Walk`). A part of another block's tile goes to
// `workspace`: COLUMNS x 64 sums for each warpgroup of each block; `flags`, one for each as well, say that it is there. They are 0
// before a launch and after it. Parts are added in the order of K, so results do not depend on who was first.
//
// SYMMETRIC: A B and R are symmetric (M = N), and so is C, to the bit: what is on and below the diagonal is computed and also stored where it
// is mirrored, 64 x 64 at a time, of which a slab and its image are held. SECOND: gamma S is added as beta R is; up_map is that of S.
// R and S have elements of type Added, as wide as those of C.
//
// GROUPED: a product for each of shape.matrices groups of rows or of terms, whose ends are read from `offsets`; groups of terms run in the
// given `order` (hopper_groups.cuh). BIASED: a bias for each group.
//
// CODES: elements of C are of 8 bits, of a scale, *a_scale: act(...) / scale, rounded and saturated. There is no R; the bias has elements of
// type Added.
//
// LOOSE: rows of C, of 16-bit floats, begin anywhere, so TMA cannot store them; `order` is where C begins, and warps store it.
//
// Maps have boxes of A: 128 rows (64 x 64 with A_ACROSS, 64 rows with ABREAST); B, up: the rows of their [N, K] view that a block fetches at a time (with
// B_ACROSS 64 columns by 64 of K, or by 32 if two blocks share 192 columns); R, C: 64 rows of 128 bytes, or
// of 64 where a tile's row is no whole number of these (160 columns of 16 bits).
template <typename T, typename O, int COLUMNS, int STAGES, int CLUSTER, bool A_ACROSS, bool B_ACROSS, int SCALES, bool TWO_LEVELS, bool BIASED,
          int ACTIVATION, bool RESIDUAL = false, bool GATED = false, bool AMAX = false, bool STREAM = false,
          bool SYMMETRIC = false, bool SECOND = false, typename Added = O, int GROUPED = WHOLE, bool ABREAST = false, bool LOOSE = false>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_hopper(const float *a_scale, const float *b_scale, const O *bias, float *amax, float *workspace, u32 *flags,
                  const int *offsets, const i64 *order,
                  const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap up_map,
                  const __grid_constant__ TensorMap r_map, const __grid_constant__ TensorMap c_map, Shape shape, Factors factors) {
  using Sum = typename Unit<T>::Sum;
  constexpr int DEPTH = LINE / int(sizeof(T));  // elements of K in a stage
  constexpr int A_BYTES = ROWS * LINE, STAGE = A_BYTES + COLUMNS * LINE;
  constexpr int WIDTH = GATED ? COLUMNS / 2 : COLUMNS;  // of C in a tile; the other half of B's columns are those of up
  constexpr int PITCH = WIDTH * int(sizeof(O)) % LINE ? LINE / 2 : LINE;  // bytes of a slab's row
  constexpr int SLAB = PITCH / int(sizeof(O)), SLABS = WIDTH / SLAB, HELD = SYMMETRIC || SLABS % 2 ? 1 : 2;  // of C, in columns; at a time
  static_assert(!INTEGERS<O> || (INTEGERS<Sum> && !SCALES && !TWO_LEVELS && !BIASED && !ACTIVATION && !RESIDUAL && !GATED && !AMAX),
                "sums in int32 leave as they are");
  constexpr int STAGED = SYMMETRIC ? 2 : HELD, ADDED = SECOND ? 2 : HELD;  // places for C; what a residual fills of them
  static_assert(!SYMMETRIC || (sizeof(O) == 2 && !SCALES && !TWO_LEVELS && !BIASED && !ACTIVATION && !GATED && !AMAX),
                "the mirror image is of 16-bit floats, and of nothing that rows and columns do not share");
  static_assert(PITCH == LINE || (!SYMMETRIC && GROUPED == WHOLE), "a mirrored or cut slab has rows of 128 bytes");
  constexpr bool CODES = sizeof(O) == 1;
  static_assert((!SECOND || (SYMMETRIC && RESIDUAL)) && (CODES || sizeof(Added) == sizeof(O)), "a second residual is of symmetric products");
  static_assert(!CODES || (!SCALES && !RESIDUAL && !SYMMETRIC && GROUPED == WHOLE), "a scale that is given is all there is");
  constexpr int PARTS = TWO_LEVELS && COLUMNS > 128 ? COLUMNS == 192 ? 3 : 2 : 1;  // no part has two scales of blocks
  static_assert(SCALES != SCALED_BY_BLOCK || (TWO_LEVELS && sizeof(T) == 1 && !GATED), "a stage of 8-bit operands is a block of scales");
  static_assert(WIDTH % SLAB == 0, "the tile is too narrow");
  static_assert(!TWO_LEVELS || !(A_ACROSS || B_ACROSS), "only what lies along K");
  constexpr int STACKED = ABREAST ? 1 : CLUSTER, BESIDE = ABREAST ? CLUSTER : 1;  // blocks on one another, beside one another
  static_assert(GROUPED == WHOLE || (sizeof(T) == 2 && sizeof(O) == 2 && !SCALES && !RESIDUAL && !AMAX && !STREAM && !SYMMETRIC),
                "groups are of 16-bit floats, and of whole tiles");
  static_assert(GROUPED != TERMS_IN_GROUPS || (A_ACROSS && B_ACROSS && !BIASED && !GATED), "terms are rows of A and B");
  static_assert(!LOOSE || (sizeof(O) == 2 && !RESIDUAL && !SYMMETRIC && GROUPED != TERMS_IN_GROUPS), "TMA takes no residual of such rows");
  extern __shared__ __align__(1024) unsigned char dynamic[];  // all there is: the swizzle asks for 1024 bytes' alignment
  unsigned char *ring = dynamic, *out = ring + STAGES * STAGE;
  u64 *full = reinterpret_cast<u64 *>(out + 2 * STAGED * ATOM), *empty = full + STAGES, *residual = empty + STAGES;

  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0), rank = CLUSTER > 1 ? int(cluster_rank()) : 0;
  const int rank_down = ABREAST ? 0 : rank, rank_beside = ABREAST ? rank : 0;
  Schedule<GROUPED, SYMMETRIC, ROWS * STACKED, WIDTH * BESIDE> tiles(shape, offsets, order, gridDim.x / CLUSTER);
  const int depths = (shape.k + DEPTH - 1) / DEPTH, first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  Walk<STREAM> walk(first, step, tiles.count(), depths, shape);

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], CONSUMERS / 32 * CLUSTER);  // the warps of every block that reads what this one fetches
    }
    for (int c = 0; c < 2; c++) barrier_init(&residual[c], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }

  if (warpgroup == 0) {
    // ---- the producer: one thread ----
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (__shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) == 0 && elected()) {
      produce<COLUMNS, WIDTH, DEPTH, STAGES, CLUSTER, A_ACROSS, B_ACROSS, GATED, GROUPED, ABREAST>(walk, tiles, shape, rank, ring, full, empty,
                                                                                                            a_map, b_map, up_map);
    }
  } else {
    // ---- the consumers: 64 rows each ----
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int mine = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    unsigned char *staged = out + mine * STAGED * ATOM;
    // Bytes from one step of wgmma's K to the next: within a swizzled line, or two groups of 8 rows further.
    constexpr u64 A_STEP = (A_ACROSS ? 2 * 8 * LINE : 32) >> 4, B_STEP = (B_ACROSS ? 2 * 8 * LINE : 32) >> 4;
    // By every warp: waiting for a product says nothing about the rows of other warps.
    auto release = [&](int place) {
      if (lane < CLUSTER) barrier_arrive(&empty[place], lane);
    };
    // The residual of the next slabs comes to where C is going to be staged, as soon as what was put before has left.
    auto fetch_residual = [&](int row, int column, int matrix) {
      if (SYMMETRIC && column > row) return;  // nothing of it is stored
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      barrier_expect(&residual[mine], ADDED * 64 * PITCH);
      for (int slab = 0; slab < HELD; slab++) fetch(staged + slab * ATOM, r_map, column + slab * SLAB, row, matrix, &residual[mine]);
      if constexpr (SECOND) fetch(staged + ATOM, up_map, column, row, matrix, &residual[mine]);
    };
    int place = 0, before = 0;
    u32 parity = 0, residual_parity = 0, largest = 0;
    while (walk.next()) {
      int row, column, matrix;
      tiles.at(walk.tile, row, column, matrix);
      if constexpr (GROUPED != WHOLE) row = agreed(row), column = agreed(column), matrix = agreed(matrix), tiles.agree();
      row = (row * STACKED + rank_down) * ROWS + mine * 64, column = (column * BESIDE + rank_beside) * WIDTH;
      if constexpr (GROUPED == ROWS_IN_GROUPS) {
        row += tiles.begin;
        if (row >= tiles.end) {  // the group has ended before: nothing to multiply, and all to be let go
          for (int depth = walk.from; depth < walk.to; depth++) {
            barrier_wait(&full[place], parity);
            release(place);
            if (++place == STAGES) place = 0, parity ^= 1;
          }
          continue;
        }
      }
      if constexpr (GROUPED == TERMS_IN_GROUPS) walk.to = (tiles.end - tiles.begin + DEPTH - 1) / DEPTH;
      if (RESIDUAL && thread == 0 && walk.from == 0) fetch_residual(row, column, matrix);
      Sum sums[COLUMNS / PARTS / 2];
      float totals[TWO_LEVELS ? COLUMNS / 2 : 1];
      const float *a_next[2], *b_next[PARTS];  // the next stage's scales
      float a_by[2], b_by[PARTS];
      if constexpr (TWO_LEVELS) {
#pragma unroll
        for (int c = 0; c < COLUMNS / 2; c++) totals[c] = 0.f;
      }
      if (SCALES == SCALED_BY_BLOCK && depths) {
#pragma unroll
        for (int h = 0; h < 2; h++) a_by[h] = *(a_next[h] = a_scale + i64(min(row + 16 * warp + lane / 4 + 8 * h, shape.m - 1)) * depths + walk.from);
#pragma unroll
        for (int p = 0; p < PARTS; p++) b_by[p] = *(b_next[p] = b_scale + i64(min((column + p * (COLUMNS / PARTS)) / 128, (shape.n - 1) / 128)) * depths + walk.from);
      }
      for (int depth = walk.from; depth < walk.to; depth++) {
        barrier_wait(&full[place], parity);
        const u32 a_at = shared_address(ring + place * STAGE) + mine * ATOM, b_at = shared_address(ring + place * STAGE) + A_BYTES;
        const u64 a = descriptor(a_at, 0), b = descriptor(b_at, B_ACROSS ? ATOM : 0);
        if constexpr (TWO_LEVELS) {
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            hold(sums);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++)
              Unit<T>::template multiply<COLUMNS / PARTS, false, false>(sums, a + s * A_STEP, b + p * (COLUMNS / PARTS * LINE >> 4) + s * B_STEP, s != 0);
            wgmma_commit();
            wgmma_wait<0>();  // the other warpgroup's products go on
            hold(sums);
            if (p + 1 == PARTS) release(place);
            const float by[2] = {SCALES == SCALED_BY_BLOCK ? a_by[0] * b_by[p] : 1.f, SCALES == SCALED_BY_BLOCK ? a_by[1] * b_by[p] : 1.f};
#pragma unroll
            for (int c = 0; c < COLUMNS / PARTS / 2; c++) {
              float &total = totals[p * COLUMNS / PARTS / 2 + c];
              total = SCALES == SCALED_BY_BLOCK ? float(sums[c]) * by[c % 4 / 2] + total : float(sums[c]) + total;
            }
          }
          if (SCALES == SCALED_BY_BLOCK && depth + 1 < walk.to) {  // there before the next stage's sums are
#pragma unroll
            for (int h = 0; h < 2; h++) a_by[h] = *++a_next[h];
#pragma unroll
            for (int p = 0; p < PARTS; p++) b_by[p] = *++b_next[p];
          }
        } else {
          hold(sums);
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < 4; s++)
            Unit<T>::template multiply<COLUMNS, A_ACROSS, B_ACROSS>(sums, a + s * A_STEP, b + s * B_STEP, depth - walk.from + s != 0);
          wgmma_commit();
          wgmma_wait<1>();  // the products of the place before are done
          hold(sums);
          if (depth != walk.from) release(before);
          before = place;
        }
        if (++place == STAGES) place = 0, parity ^= 1;
      }
      if constexpr (!TWO_LEVELS) {
        wgmma_wait<0>();
        hold(sums);
        if (walk.to) release(before);
        if (!walk.to) {
#pragma unroll
          for (int e = 0; e < COLUMNS / 2; e++) sums[e] = 0;
        }
      }

      if constexpr (STREAM) {
        auto &part = either<TWO_LEVELS>(totals, sums);
        auto *const parts = reinterpret_cast<decltype(&part[0])>(workspace);
        const auto slot = [&](int block) { return parts + i64(2 * block + mine) * (64 * COLUMNS); };
        if (walk.from) {
          give(slot(blockIdx.x), part, flags + 2 * blockIdx.x + mine, thread, 1 + mine);
          continue;
        }
        for (int share = walk.share + 1; walk.to < depths && walk.begin_of(share) < (walk.tile + 1) * depths; share++) {
          const int block = blockIdx.x - (share - walk.share) * CLUSTER;
          take(part, slot(block), flags + 2 * block + mine, thread, 1 + mine);
        }
      }

      // ---- C: rows 16 warp + lane / 4 (+ 8), columns 8 j + 2 (lane % 4) (+ 1) are this thread's ----
      const float inverse = CODES ? 1.f / *a_scale : 1.f;
      float by_row[2] = {1.f, 1.f};
      if constexpr (SCALES == SCALED) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = row + 16 * warp + lane / 4 + 8 * h;
          by_row[h] = factors.a_scales == 1 ? a_scale[0] : r < shape.m ? a_scale[r] : 0.f;
        }
      }
      // Of the product with B (half 0) or up (half 1): two columns from c on, whose sums are the `of`th four.
      auto scaled = [&](int half, int of, int c, float (&v)[4]) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = 4 * (of + half * WIDTH / 8) + e;
          if constexpr (TWO_LEVELS)
            v[e] = totals[i];
          else
            v[e] = INTEGERS<O> ? __uint_as_float(u32(sums[i])) : float(sums[i]);
        }
        if constexpr (SCALES == SCALED) {
          const float *scale = b_scale + half * (factors.b_scales == 1 ? 1 : shape.n);
          const float2 by = factors.b_scales == 1 ? float2{scale[0], scale[0]} : two_of(scale, c, shape.n);
#pragma unroll
          for (int e = 0; e < 4; e++) v[e] *= by_row[e / 2] * (e % 2 ? by.y : by.x);
        }
#pragma unroll
        for (int e = 0; RESIDUAL && e < 4; e++) v[e] *= factors.alpha;
        if constexpr (BIASED) {
          const bool past = GROUPED != WHOLE && matrix == shape.matrices;  // of all groups: rows without a bias
          using Bias = typename Chosen<CODES, Added, O>::Type;
          const Bias *const all = reinterpret_cast<const Bias *>(bias);
          const Bias *const biases = GROUPED == WHOLE ? all : all + i64(matrix) * ((GATED ? 2 : 1) * shape.n);
          const float2 plus = two_of(biases + half * shape.n, c, past ? 0 : shape.n);
#pragma unroll
          for (int e = 0; e < 4; e++) v[e] += e % 2 ? plus.y : plus.x;
        }
      };
#pragma unroll
      for (int held = 0; held < SLABS; held += HELD) {
        if (SYMMETRIC && column + held * SLAB > row) continue;  // above the diagonal; with `break` the compiler loses sight of uniform descriptors
        const bool diagonal = SYMMETRIC && column + held * SLAB == row;
        if constexpr (RESIDUAL) {
          barrier_wait(&residual[mine], residual_parity);
          residual_parity ^= 1;
        } else {
          asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // what was put before has left its place
          group_barrier(1 + mine);
        }
#pragma unroll
        for (int slab = 0; slab < HELD; slab++) {
          unsigned char *place_of_c = staged + slab * ATOM;
          // The 16 bytes of a row change places with the number of the line that the row is in, as in TMA's swizzle.
          auto vector_of_c = [&](int r, int sixteen) { return place_of_c + r * PITCH + ((sixteen ^ r * PITCH / LINE % (PITCH / 16)) * 16); };
          auto mine_of_c = [&](int j, int h) {
            const int r = 16 * warp + lane / 4 + 8 * h, sixteen = sizeof(O) == 2 ? j : 2 * j + lane % 4 / 2;
            return vector_of_c(r, sixteen) + (sizeof(O) == 2 ? lane % 4 * 4 : lane % 2 * 8);
          };
          float values[SLAB / 8][4];
#pragma unroll
          for (int j = 0; j < SLAB / 8; j++) {  // before the first store: no scale is waited for alone
            const int of = (held + slab) * SLAB / 8 + j, c = column + 8 * of + 2 * (lane % 4);
            float(&v)[4] = values[j];
            scaled(0, of, c, v);
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = activated<ACTIVATION, O>(v[e]);
            if constexpr (GATED) {
              float up[4];
              scaled(1, of, c, up);
#pragma unroll
              for (int e = 0; e < 4; e++) v[e] *= up[e];
            }
            if constexpr (RESIDUAL) {
#pragma unroll
              for (int h = 0; h < 2; h++) {
                float r[2];
                unpack(*reinterpret_cast<const Words<Added, 2> *>(mine_of_c(j, h)), r);
                v[2 * h] += factors.beta * r[0], v[2 * h + 1] += factors.beta * r[1];
                if constexpr (SECOND) {
                  unpack(*reinterpret_cast<const Words<Added, 2> *>(mine_of_c(j, h) + ATOM), r);
                  v[2 * h] += factors.gamma * r[0], v[2 * h + 1] += factors.gamma * r[1];
                }
              }
            }
#pragma unroll
            for (int e = 0; AMAX && e < 4; e++)
              if (row + 16 * warp + lane / 4 + e / 2 * 8 < shape.m && c + e % 2 < shape.n) largest = max(largest, __float_as_uint(fabsf(v[e])));
          }
          if constexpr (SECOND) group_barrier(1 + mine);  // other warps' images go to where S was; on the diagonal to an upper half of R, unused
#pragma unroll
          for (int j = 0; j < SLAB / 8; j++) {
            const float(&v)[4] = values[j];
            if constexpr (SYMMETRIC) {
              store_with_image(place_of_c, pack_pair(O{}, v[0], v[1]), pack_pair(O{}, v[2], v[3]), j, warp, lane, diagonal);
            } else if constexpr (CODES) {
#pragma unroll
              for (int h = 0; h < 2; h++) {
                const int r = 16 * warp + lane / 4 + 8 * h;
                *reinterpret_cast<unsigned short *>(vector_of_c(r, j / 2) + j % 2 * 8 + lane % 4 * 2) = codes_of(v[2 * h] * inverse, v[2 * h + 1] * inverse);
              }
            } else if constexpr (sizeof(O) == 2) {  // 8 rows of 16 bytes a matrix
              const int r = 16 * warp + lane % 16;
              store_matrices(vector_of_c(r, j), pack_pair(O{}, v[0], v[1]), pack_pair(O{}, v[2], v[3]));
            } else {
#pragma unroll
              for (int h = 0; h < 2; h++) *reinterpret_cast<float2 *>(mine_of_c(j, h)) = {v[2 * h], v[2 * h + 1]};
            }
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        group_barrier(1 + mine);
        if constexpr (LOOSE) {
          constexpr int CHUNKS = PITCH / 16, TOGETHER = 32 / CHUNKS;  // of a row; rows of a warp at a time
#pragma unroll
          for (int i = 0; i < HELD * 16; i += TOGETHER) {
            const int r = 16 * warp + i % 16 + lane / CHUNKS, x = column + (held + i / 16) * SLAB;
            const i64 at = row + r + (GROUPED == WHOLE ? i64(matrix) * shape.m : 0);
            const bool there = row + r < (GROUPED == WHOLE ? shape.m : tiles.end);
            unsigned short *const c = reinterpret_cast<unsigned short *>(const_cast<i64 *>(order));
            store_loose<PITCH>(c + at * shape.n + x, there ? min(shape.n - x, SLAB) : 0, lane % CHUNKS, staged + i / 16 * ATOM, r);
          }
          continue;
        }
        if (thread == 0) {
#pragma unroll
          for (int slab = 0; slab < HELD; slab++) {
            const int x = column + (held + slab) * SLAB;
            if constexpr (GROUPED == ROWS_IN_GROUPS)
              put_rows(c_map, staged + slab * ATOM, x, row, min(64, tiles.end - row));
            else
              put(c_map, staged + slab * ATOM, x, row, matrix);
          }
          if (SYMMETRIC && !diagonal) put(c_map, staged + ATOM, row, column + held * SLAB, matrix);
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
          if (RESIDUAL && held + HELD < SLABS) fetch_residual(row, column + (held + HELD) * SLAB, matrix);
        }
      }
    }
    if constexpr (AMAX) {
      largest = __reduce_max_sync(0xffffffffu, largest);  // as integers, floats that are not negative have the same order
      if (lane == 0) atomicMax(reinterpret_cast<u32 *>(amax), largest);
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
