// Philox4x32-10: 128 random bits as a function of a counter and a key, so that whoever knows both has the same words, in any order
// and on any grid. The key is a seed, the counter's upper half an offset, its lower half the number of a group of elements.
//
// Source: Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once
#include "prelude.cuh"

__device__ __forceinline__ void philox(u64 group, u64 seed, u64 offset, u32 (&c)[4]) {
  c[0] = u32(group), c[1] = u32(group >> 32), c[2] = u32(offset), c[3] = u32(offset >> 32);
  u32 key0 = u32(seed), key1 = u32(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 first = u64(c[0]) * 0xD2511F53u, second = u64(c[2]) * 0xCD9E8D57u;
    c[0] = u32(second >> 32) ^ c[1] ^ key0, c[1] = u32(second);
    c[2] = u32(first >> 32) ^ c[3] ^ key1, c[3] = u32(first);
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;  // from the golden ratio and the square root of 3
  }
}
