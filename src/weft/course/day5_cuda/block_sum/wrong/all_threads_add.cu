// rejected at: safe
// Every thread adds, beyond the end of the array too.
__global__ void block_sum(const float* x, float* y) {
    __shared__ float part[256];
    int t = threadIdx.x;
    part[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int stride = 128; stride > 0; stride /= 2) {
        if (t < 256) part[t] += part[t + stride];
        __syncthreads();
    }
    if (t == 0) y[blockIdx.x] = part[0];
}
