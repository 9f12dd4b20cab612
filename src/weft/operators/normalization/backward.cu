#include "backward.cuh"

// x, dy, more: [M, N], rows 16-byte aligned, N a multiple of 16 bytes; w: [N]; mean, rstd: [M] (CENTERED: LayerNorm; else
// rstd is computed here from eps); more: added to dx (the gradient that reaches x past the norm, with MORE); dx: [M, N];
// dw, db: [clusters, N] partial sums. Grid: clusters * blocks of a cluster. Dynamic shared memory: the ring, then w.
template <typename T, typename W, int THREADS, int EACH, int ROWS, int STAGES, int PER_SM, bool CENTERED, bool WEIGHTED, bool MORE>
__global__ void __launch_bounds__(THREADS, PER_SM)
    norm_backward(const T *x, const T *dy, const T *more, const W *w, const float *mean, const float *rstd, T *dx, float *dw,
                  float *db, i64 M, i64 N, i64 x_row, i64 dy_row, i64 more_row, i64 dx_row, float eps) {
  gradient_of_rows<T, W, THREADS, EACH, ROWS, STAGES, CENTERED, WEIGHTED, MORE>(x, dy, more, w, mean, rstd, dx, dw, db, M, N, x_row, dy_row,
                                                                                more_row, dx_row, eps);
}
