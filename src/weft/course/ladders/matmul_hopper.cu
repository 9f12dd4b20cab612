// The ladder of the matrix product, rungs 9 to 12, for sm_90a: TMA fetches, wgmma multiplies, mbarriers tell when.
// C[M, N] = A[M, K] · B[K, N], all row-major and contiguous, bf16, accumulated in fp32. Rows begin on 16 bytes.
//
// A stage in shared memory holds BM × 64 of A and 64 × BN of B, in boxes whose rows are 128 bytes. TMA lays a box down swizzled
// (16-byte chunk c of row r lies at c ^ r % 8) and wgmma reads it so; a box begins on 1024 bytes. What lies outside a matrix
// comes as zeros and is not stored, so there is no code for edges.
#include "prelude.cuh"

struct alignas(64) TensorMap { u64 words[16]; };  // written by cuTensorMapEncodeTiled

constexpr int BM = 128, BK = 64;  // of a block's tile
constexpr u32 BOX = 64 * 128;     // bytes of 64 rows

// ---- instructions: what C++ has no word for -------------------------------------------------------------------------------

__device__ __forceinline__ u32 dynamic_shared() {  // on 1024 bytes
  extern __shared__ unsigned char memory[];
  return (shared_address(memory) + 1023) / 1024 * 1024;
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA and to other blocks of the cluster; a barrier for the threads must follow.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, counting on `bytes` that TMA will bring.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier in the same place of block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
               "r"(rank)
               : "memory");
}

// Waits while the barrier is in a phase of this parity. A new barrier is in phase 0, and counts as past phase 1.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// All threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The 128 threads of a warpgroup.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
}

// One box, whose first element is column x of row y, from memory to shared memory; its bytes are told to the barrier.
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap &map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                   shared),
               "l"(&map), "r"(barrier), "r"(x), "r"(y)
               : "memory");
}

// The same into the same place of every block of the cluster whose bit is set, telling the barrier of each.
__device__ __forceinline__ void tma_load_multicast(u32 shared, const TensorMap &map, int x, int y, u32 barrier, int blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
               "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"((unsigned short)blocks)
               : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap &map, int x, int y, u32 shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\ncp.async.bulk.commit_group;" ::"l"(
                   &map),
               "r"(shared), "r"(x), "r"(y)
               : "memory");
}

// Waits until at most PENDING of this thread's stores still read shared memory.
template <int PENDING> __device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Orders ordinary accesses to shared memory before those of TMA.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 × 8 matrices of 16-bit elements, whose rows begin where lanes 0-7, 8-15, 16-23 and 24-31 say.
__device__ __forceinline__ void store_matrices(u32 row, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

template <int REGISTERS> __device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// d[64, N] = a[64, 16] · b[16, N] (+ d where `add`), by one warpgroup; a and b are descriptors of shared memory. The last two
// numbers: a is stored with its K together ("K-major"), b with its N together ("N-major"), as row-major A and B are.
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D64(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24), D8(i + 32), D8(i + 40), D8(i + 48), D8(i + 56)

__device__ __forceinline__ void wgmma(float (&d)[64], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 1;\n}"
      : D64(0)
      : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma(float (&d)[128], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, 0, 1;\n}"
      : D64(0), D64(64)
      : "l"(a), "l"(b), "r"(add));
}

// ---- what the rungs share --------------------------------------------------------------------------------------------------

// A matrix in shared memory with the 128-byte swizzle, as wgmma finds it. Eight rows of 128 bytes are one swizzle atom.
// `stride`: bytes from eight rows to the next eight; `leading`: bytes from 64 columns to the next 64 where the rows run along
// K (N-major), without meaning where they run along M (K-major). In a cluster an address has the block's rank above its 18 bits, which
// must not reach `leading`. Source: PTX ISA, "Matrix Descriptor Format" of wgmma.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}

// d += a[64, 64] · b[64, N]. Sixteen terms further on, a lies 32 bytes along its rows, b 16 rows down.
template <int REGISTERS> __device__ __forceinline__ void multiply(float (&d)[REGISTERS], u32 a, u32 b, bool first) {
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < BK / 16; k++)
    wgmma(d, descriptor(a + k * 32, 0, 1024), descriptor(b + k * 16 * 128, BOX, 1024), !first || k);
  wgmma_commit();
}

// From registers to C: a thread has two neighbouring columns of rows r and r + 8, of every eight columns.
template <int REGISTERS> __device__ __forceinline__ void store_tile(const float (&d)[REGISTERS], bf16 *c, int m, int n, int M, int N) {
  m += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, n += threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < REGISTERS; i += 2) {
    const int row = m + i / 2 % 2 * 8, column = n + i / 4 * 8;
    if (row < M && column < N) *reinterpret_cast<u32 *>(c + i64(row) * N + column) = pack_pair(bf16{}, d[i], d[i + 1]);
  }
}

// ---- 9. TMA and wgmma: one thread asks for whole tiles; two warpgroups multiply 64 × 128 each, straight from shared memory. --

template <int STAGES>
__global__ void __launch_bounds__(256, 1)
    ladder_wgmma(const bf16 *, const bf16 *, bf16 *c, const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                 const __grid_constant__ TensorMap map_c, int M, int N, int K) {
  constexpr int BN = 128;
  constexpr u32 A_BYTES = BM * BK * 2, STAGE = A_BYTES + BK * BN * 2;
  const u32 tiles = dynamic_shared(), full = tiles + STAGES * STAGE;
  const int warpgroup = threadIdx.x / 128, steps = (K + BK - 1) / BK, across = (N + BN - 1) / BN;
  const int m = blockIdx.x / across * BM, n = blockIdx.x % across * BN;

  const auto fetch = [&](int step) {
    const u32 at = tiles + step % STAGES * STAGE, barrier = full + step % STAGES * 8;
    barrier_expect(barrier, STAGE);
    tma_load(at, map_a, step * BK, m, barrier);
    for (int box = 0; box < BN / 64; box++) tma_load(at + A_BYTES + box * BOX, map_b, n + box * 64, step * BK, barrier);
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + s * 8, 1);
    fence_barrier_init();
    for (int s = 0; s < STAGES && s < steps; s++) fetch(s);
  }
  __syncthreads();

  float d[BN / 2];
  for (int step = 0; step < steps; step++) {
    const u32 at = tiles + step % STAGES * STAGE;
    barrier_wait(full + step % STAGES * 8, step / STAGES & 1);
    multiply(d, at + warpgroup * BOX, at + A_BYTES, step == 0);
    wgmma_wait<0>();
    __syncthreads();  // both warpgroups are done with this stage
    if (threadIdx.x == 0 && step + STAGES < steps) fetch(step + STAGES);
  }
  store_tile(d, c, m + warpgroup * 64, n, M, N);
}

// ---- 10. warp specialisation: one warpgroup only fetches, with few registers; two multiply 64 × 256 each and never wait for one
//          another: a barrier for each stage says that it is full, another that it is empty. ----------------------------------
// ---- 11. persistent: as many blocks as multiprocessors; C leaves through TMA while the next tile is multiplied; tiles run in
//          groups of rows, so that those that run together share slices of A and B in L2. --------------------------------------
// ---- 12. multicast: two blocks of a cluster work below one another; each fetches half of the slice of B for both. -------------

constexpr int CONSUMERS = 2, GROUP = 8;

template <int RUNG>
__global__ void __launch_bounds__(384, 1)
    ladder_specialised(const bf16 *, const bf16 *, bf16 *c, const __grid_constant__ TensorMap map_a,
                       const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_c, int M, int N, int K) {
  constexpr int BN = 256, STAGES = 4, BLOCKS = RUNG >= 12 ? 2 : 1;  // of a cluster
  constexpr u32 A_BYTES = BM * BK * 2, STAGE = A_BYTES + BK * BN * 2;
  const u32 tiles = dynamic_shared(), results = tiles + STAGES * STAGE;  // results: two boxes for each consumer
  const u32 full = results + (RUNG >= 11 ? CONSUMERS * 2 * BOX : 0), empty = full + STAGES * 8;
  const int lane = threadIdx.x % 32, rank = BLOCKS > 1 ? int(cluster_rank()) : 0;
  const int steps = (K + BK - 1) / BK, down = (M + BM * BLOCKS - 1) / (BM * BLOCKS), across = (N + BN - 1) / BN;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, BLOCKS * CONSUMERS * 4);  // every warp that reads the stage, in every block it is sent to
    }
    fence_barrier_init();
  }
  if constexpr (BLOCKS > 1)
    cluster_sync();
  else
    __syncthreads();

  const auto place = [&](int tile, int &m, int &n) {
    if constexpr (RUNG >= 11) {
      const int first = tile / (GROUP * across) * GROUP, height = min(GROUP, down - first), inside = tile % (GROUP * across);
      m = first + inside % height, n = inside / height;
    } else {
      m = tile / across, n = tile % across;
    }
    m = (m * BLOCKS + rank) * BM, n *= BN;
  };

  int m, n;
  u32 step = 0;  // counted through all tiles: stage step % STAGES, used for the step / STAGES-th time
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0)
      for (int tile = blockIdx.x / BLOCKS; tile < down * across; tile += gridDim.x / BLOCKS) {
        place(tile, m, n);
        for (int k = 0; k < steps; k++, step++) {
          const u32 at = tiles + step % STAGES * STAGE, barrier = full + step % STAGES * 8;
          barrier_wait(empty + step % STAGES * 8, ~(step / STAGES) & 1);
          barrier_expect(barrier, STAGE);
          tma_load(at, map_a, k * BK, m, barrier);
          for (int box = rank * (4 / BLOCKS); box < (rank + 1) * (4 / BLOCKS); box++)
            if constexpr (BLOCKS > 1)
              tma_load_multicast(at + A_BYTES + box * BOX, map_b, n + box * 64, k * BK, barrier, 3);
            else
              tma_load(at + A_BYTES + box * BOX, map_b, n + box * 64, k * BK, barrier);
        }
      }
  } else {
    more_registers<232>();
    const int consumer = threadIdx.x / 128 - 1;
    const auto release = [&](u32 step) {  // one lane a warp, for each block that sends into this stage
      if (lane < BLOCKS) {
        if constexpr (BLOCKS > 1)
          barrier_arrive_at(empty + step % STAGES * 8, lane);
        else
          barrier_arrive(empty + step % STAGES * 8);
      }
    };
    for (int tile = blockIdx.x / BLOCKS; tile < down * across; tile += gridDim.x / BLOCKS) {
      place(tile, m, n);
      float d[BN / 2];
      for (int k = 0; k < steps; k++, step++) {
        const u32 at = tiles + step % STAGES * STAGE;
        barrier_wait(full + step % STAGES * 8, step / STAGES & 1);
        multiply(d, at + consumer * BOX, at + A_BYTES, k == 0);
        wgmma_wait<1>();  // the products of the step before
        if (k > 0) release(step - 1);
      }
      wgmma_wait<0>();
      release(step - 1);
      if constexpr (RUNG == 10) {
        store_tile(d, c, m + consumer * 64, n, M, N);
      } else {
        const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int box = 0; box < BN / 64; box++) {  // through two buffers in turn
          const u32 at = results + (consumer * 2 + box % 2) * BOX;
          if (threadIdx.x % 128 == 0) wait_stores<1>();
          warpgroup_sync(consumer);
#pragma unroll
          for (int i = 0; i < 4; i++) {  // 16 columns each
            const float *f = d + box * 32 + i * 8;
            store_matrices(at + row * 128 + ((i * 2 + lane / 16) ^ row % 8) * 16, pack_pair(bf16{}, f[0], f[1]),
                           pack_pair(bf16{}, f[2], f[3]), pack_pair(bf16{}, f[4], f[5]), pack_pair(bf16{}, f[6], f[7]));
          }
          fence_async();
          warpgroup_sync(consumer);
          if (threadIdx.x % 128 == 0) tma_store(map_c, n + box * 64, m + consumer * 64, at);
        }
      }
    }
    if (RUNG >= 11 && threadIdx.x % 128 == 0) wait_stores<0>();  // shared memory must outlive what reads it
  }
  if constexpr (BLOCKS > 1) {
    __syncwarp();
    cluster_sync();  // and what the other block sends
  }
}
