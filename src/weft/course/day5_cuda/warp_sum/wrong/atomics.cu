// rejected at: fast
// An atomic for each lane.
__global__ void row_sums(const float* x, float* y, int M, int N) {
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    float sum = 0.f;
    for (int i = lane; i < N; i += 32) sum += x[row * N + i];
    atomicAdd(&y[row], sum);
}
