// What scans share: the lanes of a warp and their vectors.
#pragma once
#include "prelude.cuh"

constexpr u32 ALL = 0xffffffffu;

// Where rows begin: on 16 bytes, and so they end; those of x and y alike; anywhere.
constexpr int ON_VECTORS = 0, ALIKE = 1, ANYWHERE = 2;

// COUNT times one number.
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> vector_of(float value) {
  float f[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = value;
  return pack<T, COUNT>(f);
}

// Elements `first` to first + COUNT - 1 of a row of n; `other` for those that it does not have.
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> load_elements(const T *row, i64 first, i64 n, float other) {
  float f[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = first + i >= 0 && first + i < n ? to_float(row[first + i]) : other;
  return pack<T, COUNT>(f);
}

// The same of a vector that was loaded with what lies beside the row.
template <typename T, int COUNT> __device__ __forceinline__ Words<T, COUNT> of_row(const Words<T, COUNT> &w, i64 first, i64 n, float other) {
  float f[COUNT];
  unpack(w, f);
#pragma unroll
  for (int i = 0; i < COUNT; i++) f[i] = first + i >= 0 && first + i < n ? f[i] : other;
  return pack<T, COUNT>(f);
}

__device__ __forceinline__ void store_element(float *to, u32 word, int) { *to = __uint_as_float(word); }
template <typename T> __device__ __forceinline__ void store_element(T *to, u32 word, int high) { to->bits = (unsigned short)(high ? word >> 16 : word); }

// Those of a vector that a row of n has, from `first` on, which lies on 16 bytes.
template <typename T, int COUNT> __device__ __forceinline__ void store_elements(T *row, i64 first, i64 n, const Words<T, COUNT> &w) {
  constexpr int OF_WORD = 4 / sizeof(T);
  if (first >= 0 && first + COUNT <= n) {
    store<T, COUNT>(row + first, w);
    return;
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (first + i >= 0 && first + i < n) store_element(row + first + i, w.word[i / OF_WORD], i % OF_WORD);
}
