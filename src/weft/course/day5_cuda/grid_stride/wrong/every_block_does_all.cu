// rejected at: right
// All blocks go over all elements.
__global__ void saxpy(int n, float a, const float* x, float* y) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = a * x[i] + y[i];
}
