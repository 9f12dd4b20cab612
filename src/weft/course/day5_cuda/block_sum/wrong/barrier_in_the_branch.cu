// rejected at: safe
// The barrier is inside the branch: threads without work never reach it.
__global__ void block_sum(const float* x, float* y) {
    __shared__ float part[256];
    int t = threadIdx.x;
    part[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int stride = 128; stride > 0; stride /= 2) {
        if (t < stride) {
            part[t] += part[t + stride];
            __syncthreads();
        }
    }
    if (t == 0) y[blockIdx.x] = part[0];
}
