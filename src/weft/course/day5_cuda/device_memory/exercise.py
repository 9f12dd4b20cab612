"""
[en
A GPU has memory of its own: allocate it, copy to it, launch, copy back, free it. All by hand, once.

``cuda`` stands for CUDA's run-time, with the calls that a C++ program makes (the names of the real ones in parentheses):

    pointer = cuda.malloc(bytes)                     (cudaMalloc)      uninitialised device memory
    cuda.copy_to_device(pointer, array)              (cudaMemcpy)      from a NumPy array
    cuda.copy_to_host(array, pointer)                (cudaMemcpy)      into a NumPy array; waits for the kernels before it
    cuda.launch("scale", grid, block, pointer, n, factor)  (<<<grid, block>>>)  grid blocks of block threads; returns at once
    cuda.free(pointer)                               (cudaFree)

The kernel "scale" multiplies element i by factor in thread i = blockIdx.x * blockDim.x + threadIdx.x, if i < n.
en]
[zh
GPU 有自己的内存：分配、拷入、启动、拷回、释放。全部手工做一次。

``cuda`` 代表 CUDA 运行时，提供 C++ 程序会用到的调用（括号里是真正的名字）：

    pointer = cuda.malloc(bytes)                     (cudaMalloc)      未初始化的设备内存
    cuda.copy_to_device(pointer, array)              (cudaMemcpy)      来自 NumPy 数组
    cuda.copy_to_host(array, pointer)                (cudaMemcpy)      写入 NumPy 数组；会等待之前的核函数
    cuda.launch("scale", grid, block, pointer, n, factor)  (<<<grid, block>>>)  grid 个线程块，各 block 个线程；立即返回
    cuda.free(pointer)                               (cudaFree)

核函数 "scale" 在线程 i = blockIdx.x * blockDim.x + threadIdx.x 中把第 i 个元素乘以 factor，条件是 i < n。
zh]
"""

import numpy as np


# TODO(en): Return a new array, host * factor, computed on the device. Use blocks of 256 threads, and as many as cover all n
#   elements, no more. Leave ``host`` as it is. Free what you allocate, also when a call raises an error (try, finally).
# TODO(zh): 返回新数组 host * factor，在设备上计算。线程块用 256 个线程，块数恰好覆盖全部 n 个元素，不多不少。
#   不要改动 ``host``。分配的内存要释放，某个调用抛出异常时也要释放（try、finally）。
def scale(cuda, host: np.ndarray, factor: float) -> np.ndarray:
    """host: [n], float32."""
    # [skeleton
    #: cuda.launch("scale", 1, 256, host, len(host), factor)  # a host array is no device memory
    #: return host
    # skeleton]
    # [solution
    n = len(host)
    result = np.empty_like(host)
    pointer = cuda.malloc(host.nbytes)
    try:
        cuda.copy_to_device(pointer, host)
        cuda.launch("scale", (n + 255) // 256, 256, pointer, n, factor)
        cuda.copy_to_host(result, pointer)
    finally:
        cuda.free(pointer)
    return result
    # solution]


# I AM NOT DONE
