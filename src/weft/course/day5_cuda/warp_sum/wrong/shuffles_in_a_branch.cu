// rejected at: right
// Lanes that have no elements do not come to the shuffle that names them.
__global__ void row_sums(const float* x, float* y, int M, int N) {
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    float sum = 0.f;
    for (int i = lane; i < N; i += 32) sum += x[row * N + i];
    if (lane < N) for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (lane == 0) y[row] = sum;
}
