// rejected at: fast
// Neighbouring threads, but strided addresses: bank conflicts.
__global__ void block_sum(const float* x, float* y) {
    __shared__ float part[256];
    int t = threadIdx.x;
    part[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int stride = 1; stride < 256; stride *= 2) {
        int i = 2 * stride * t;
        if (i < 256) part[i] += part[i + stride];
        __syncthreads();
    }
    if (t == 0) y[blockIdx.x] = part[0];
}
