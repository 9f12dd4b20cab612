// rejected at: fast
// A contiguous piece for each thread, as on a CPU: a warp's loads are scattered.
__global__ void saxpy(int n, float a, const float* x, float* y) {
    int threads = gridDim.x * blockDim.x, each = (n + threads - 1) / threads;
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * each;
    for (int i = first; i < first + each && i < n; i++) y[i] = a * x[i] + y[i];
}
