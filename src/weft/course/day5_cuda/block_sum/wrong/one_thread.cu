// rejected at: fast
// One thread adds 256 elements while 255 wait.
__global__ void block_sum(const float* x, float* y) {
    __shared__ float part[256];
    int t = threadIdx.x;
    part[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    if (t == 0) {
        float sum = 0.f;
        for (int i = 0; i < 256; i++) sum += part[i];
        y[blockIdx.x] = sum;
    }
}
