// rejected at: safe
// Threads beyond n read and write what is not theirs.
__global__ void saxpy(int n, float a, const float* x, float* y) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n + 32; i += gridDim.x * blockDim.x) y[i] = a * x[i] + y[i];
}
