// rejected at: fast
// Through shared memory, but written by columns all the same.
__global__ void transpose(const float* x, float* y, int M, int N) {
    __shared__ float tile[32][33];
    int column = blockIdx.x * 32 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += 8) {
        int row = blockIdx.y * 32 + j;
        if (row < M && column < N) tile[j][threadIdx.x] = x[row * N + column];
    }
    __syncthreads();
    for (int j = threadIdx.y; j < 32; j += 8) {
        int row = blockIdx.y * 32 + j;
        if (row < M && column < N) y[column * M + row] = tile[j][threadIdx.x];
    }
}
