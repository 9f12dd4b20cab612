// The pipeline of stages on Hopper (sm_90a): TMA copies boxes of tensors, mbarriers say which slots are full or empty.
#pragma once
#include "prelude.cuh"

struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int ROWS = 128;      // of a tile: two consumer warpgroups of 64
constexpr int LINE = 128;      // bytes of a row in a stage
constexpr int THREADS = 384, CONSUMERS = 256;
constexpr int ATOM = 64 * LINE;  // bytes of a 64 x 64 block of 16-bit floats, and of what wgmma's 64 rows take of a stage

// ---- barriers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u64 *barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Waits until a phase is over: the first, third … with parity 0, the others with 1.
__device__ __forceinline__ void barrier_wait(u64 *barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(
                   shared_address(barrier)),
               "r"(parity)
               : "memory");
}

// Arrives at the same barrier of block `rank` of the cluster. Not releasing at the cluster's scope: that is MEMBAR.ALL.GPU, once a stage,
// for ordinary stores, for which no thread waits; wgmma has read its operands when its wait is over.
__device__ __forceinline__ void barrier_arrive(u64 *barrier, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, rank)) : "memory");
}

// One thread of a whole warp; unlike a comparison it tells the compiler that there is but one.
__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
  return is;
}

// Of the own block, and not through the cluster's window: that is a message, which may be in flight before the other blocks have begun and
// after this one has left.
__device__ __forceinline__ void barrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Of one warpgroup: 128 threads.
__device__ __forceinline__ void group_barrier(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// ---- TMA -----------------------------------------------------------------------------------------------------------

// Has the map itself fetched, before the first box is asked for.
__device__ __forceinline__ void prefetch(const TensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Fetches a box at (x, y) of matrix z; what lies outside of the tensor comes as zeros, and counts as bytes.
__device__ __forceinline__ void fetch(void *to, const TensorMap &map, int x, int y, int z, u64 *barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
               : "memory");
}

// The same at (x, y, z) of matrix w of a tensor of four dimensions.
__device__ __forceinline__ void fetch(void *to, const TensorMap &map, int x, int y, int z, int w, u64 *barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
               : "memory");
}

// The first of these for all blocks of the cluster in `mask`, to the same place of each.
__device__ __forceinline__ void fetch_for(unsigned short mask, void *to, const TensorMap &map, int x, int y, int z, u64 *barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
               "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(mask)
               : "memory");
}

__device__ __forceinline__ void put(const TensorMap &map, const void *from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
