// rejected at: safe
// Whole tiles only: beyond the edge of other sizes.
__global__ void transpose(const float* x, float* y, int M, int N) {
    __shared__ float tile[32][33];
    int column = blockIdx.x * 32 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += 8) {
        int row = blockIdx.y * 32 + j;
        tile[j][threadIdx.x] = x[row * N + column];
    }
    __syncthreads();
    int to = blockIdx.y * 32 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += 8) {
        int row = blockIdx.x * 32 + j;
        if (row < N + 32 && to < M) y[row * M + to] = tile[threadIdx.x][j];
    }
}
