// Sums of so many terms that fp32 would lose some of them.
#pragma once

// Adds a term to a long sum; with LONG what rounding loses is kept and added with the next term (Kahan 1965); an infinite
// sum stays one.
template <bool LONG> __device__ __forceinline__ void add(float &sum, float &lost, float term) {
  if constexpr (LONG) {
    const float mended = term - lost, next = sum + mended;
    lost = (next - sum) - mended;
    lost = lost == lost ? lost : 0.f;
    sum = next;
  } else {
    sum += term;
  }
}
