// rejected at: right
// Counts on 256 threads a block.
__global__ void saxpy(int n, float a, const float* x, float* y) {
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) y[i] = a * x[i] + y[i];
}
