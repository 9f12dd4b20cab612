// rejected at: fast
// A tree in shared memory instead of shuffles.
__global__ void row_sums(const float* x, float* y, int M, int N) {
    __shared__ float part[128];
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.f;
    for (int i = lane; row < M && i < N; i += 32) sum += x[row * N + i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int stride = 16; stride > 0; stride /= 2) {
        if (lane < stride) part[threadIdx.x] += part[threadIdx.x + stride];
        __syncthreads();
    }
    if (lane == 0 && row < M) y[row] = part[threadIdx.x];
}
