// Philox4x32-10: 128 random bits as a function of a counter and a key, so that whoever knows both has the same words, in any order
// and on any grid. The key is a seed, the counter's upper half an offset, its lower half the number of a group of elements.
//
// Source: Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once
#include "prelude.cuh"

struct Keys { u32 word[10][2]; };  // of each round

// Held in registers; otherwise they are added up again for every group, two additions a round.
__device__ __forceinline__ Keys keys_of(u64 seed) {
  Keys keys = {u32(seed), u32(seed >> 32)};
#pragma unroll
  for (int round = 1; round < 10; round++) {  // steps from the golden ratio and the square root of 3
    keys.word[round][0] = keys.word[round - 1][0] + 0x9E3779B9u;
    keys.word[round][1] = keys.word[round - 1][1] + 0xBB67AE85u;
  }
#pragma unroll
  for (int round = 0; round < 10; round++) asm volatile("" : "+r"(keys.word[round][0]), "+r"(keys.word[round][1]));
  return keys;
}

__device__ __forceinline__ void philox(u64 group, const Keys &keys, u64 offset, u32 (&c)[4]) {
  c[0] = u32(group), c[1] = u32(group >> 32), c[2] = u32(offset), c[3] = u32(offset >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 first = u64(c[0]) * 0xD2511F53u, second = u64(c[2]) * 0xCD9E8D57u;
    c[0] = u32(second >> 32) ^ c[1] ^ keys.word[round][0], c[1] = u32(second);
    c[2] = u32(first >> 32) ^ c[3] ^ keys.word[round][1], c[3] = u32(first);
  }
}
