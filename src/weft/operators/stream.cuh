// What kernels share that multiply up to 8 rows of x by a weight which streams through shared memory: early start, copies of 16 bytes
// past the registers, and products of warps.
#pragma once
#include "prelude.cuh"

// Lets the kernel behind begin, and waits for the end of the one before, if this one was launched for an early start (launch.py).
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct alignas(16) Sixteen { u32 word[4]; };

__device__ __forceinline__ void multiply(bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

__device__ __forceinline__ void multiply(fp16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

// x times a norm's weight is rounded before its root is known, which is of the sums: it may be larger than fp16's range otherwise.
__device__ __forceinline__ float norm_unit(bf16) { return 1.f; }
__device__ __forceinline__ float norm_unit(fp16) { return 0.0625f; }

template <typename T> __device__ __forceinline__ void put(T *shared, const Words<T, 8> &w) {
  *reinterpret_cast<Sixteen *>(shared) = {{w.word[0], w.word[1], w.word[2], w.word[3]}};
}

// Copies 16 bytes, or zeros where there is nothing `there`.
__device__ __forceinline__ void copy_sixteen(u32 to, const void *from, bool there = true) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most COUNT of this thread's groups are in flight.
template <int COUNT> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}
