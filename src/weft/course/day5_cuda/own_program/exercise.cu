// [en
// A program of your own. With a toolkit and a GPU:   nvcc -o scale 02_own_program.cu && echo "3 2.5  1 2 3" | ./scale
// Without them the check compiles it with your C++ compiler (g++) and a run-time whose device memory lies behind closed pages: the host that
// touches it crashes, as it would on a GPU. Kernels run when something waits for them.
// en]
// [zh
// 自己的程序。有工具包和 GPU 时：   nvcc -o scale 02_own_program.cu && echo "3 2.5  1 2 3" | ./scale
// 没有时，检查会用你的 C++ 编译器（g++）和一个运行时来编译，它的设备内存在关闭的页后面：主机一碰就崩溃，与在 GPU 上一样。核函数在有人等待时才运行。
// zh]
#include <cstdio>
#include <vector>

__global__ void scale(float* x, int n, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}

int main() {
    int n;
    float factor;
    if (std::scanf("%d %f", &n, &factor) != 2) return 2;
    std::vector<float> host(n);  // n >= 1
    for (float& value : host)
        if (std::scanf("%f", &value) != 1) return 2;

    // TODO(en): Allocate n floats on the device (cudaMalloc), copy host there (cudaMemcpy), launch scale with blocks of 256 threads, no more than
    //   cover n, copy back, free (cudaFree). If a call or the launch (cudaGetLastError) fails, print cudaGetErrorString to stderr and return 1,
    //   without printing numbers. The lesson has all of it.
    // TODO(zh): 在设备上分配 n 个 float（cudaMalloc），把 host 拷过去（cudaMemcpy），以每块 256 个线程、刚好覆盖 n 的线程块数启动 scale，拷回来，释放
    //   （cudaFree）。任何调用或启动（cudaGetLastError）失败时，把 cudaGetErrorString 打印到 stderr 并返回 1，不打印数字。课文里都有。
    // [skeleton
    //: scale<<<1, 256>>>(host.data(), n, factor);
    // skeleton]
    // [solution
    float* device;
    cudaError_t error = cudaMalloc(&device, n * sizeof(float));
    if (error == cudaSuccess) {
        error = cudaMemcpy(device, host.data(), n * sizeof(float), cudaMemcpyHostToDevice);
        if (error == cudaSuccess) {
            scale<<<(n + 255) / 256, 256>>>(device, n, factor);
            error = cudaGetLastError();
        }
        if (error == cudaSuccess) error = cudaMemcpy(host.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost);
        cudaFree(device);
    }
    if (error != cudaSuccess) {
        std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
        return 1;
    }
    // solution]

    for (float value : host) std::printf("%g\n", value);
}

// I AM NOT DONE
