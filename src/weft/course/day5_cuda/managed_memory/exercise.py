"""
[en
Managed memory: one pointer for both sides. Its pages, 64 KiB here, lie in the host's memory or in the device's, and move to the side that touches
them. A touch of a page on the other side is a *fault*: everything waits while the page comes over PCIe.

    x = cuda.malloc_managed(n)                n floats, on the host at first        (cudaMallocManaged)
    x[a:b], x[i], x[a:b] = values             the host reads (a copy) or writes: touches those pages, no others
    cuda.launch("cool", x, change)            x[i] cools a little; change[0] becomes the largest difference; returns at once
    cuda.prefetch(x, "device")                moves all pages of x ahead of a touch, without faults; or "host"  (cudaMemPrefetchAsync)
    cuda.synchronize()                        waits for the kernels; the host may not touch x or change before  (cudaDeviceSynchronize)
    cuda.free(x)                              (cudaFree)
en]
[zh
托管内存（managed memory）：两边共用一个指针。它的页（这里每页 64 KiB）要么在主机内存里，要么在设备内存里，谁碰就移到谁那边。碰到在另一边的页就是一次
*缺页*（fault）：在这一页经 PCIe 搬过来之前，一切都要等待。

    x = cuda.malloc_managed(n)                n 个 float，起初在主机上              (cudaMallocManaged)
    x[a:b], x[i], x[a:b] = values             主机读（得到副本）或写：只碰这些页
    cuda.launch("cool", x, change)            x[i] 冷却一点；change[0] 成为最大的变化；立即返回
    cuda.prefetch(x, "device")                在被碰到之前搬走 x 的所有页，没有缺页；也可以是 "host"  (cudaMemPrefetchAsync)
    cuda.synchronize()                        等待核函数；在此之前主机不得碰 x 和 change  (cudaDeviceSynchronize)
    cuda.free(x)                              (cudaFree)
zh]
"""

import numpy as np


# TODO(en): Launch "cool" until the largest change is below ``tolerance``; return (the cooled array, how often it was launched). The loop
#   below is right, and drags all of x over PCIe twice a step, page fault by page fault. Let only the page of ``change`` go to and fro, move x once
#   each way, and have no faults but those of ``change``. Leave ``host`` as it is, and free what you allocate.
# TODO(zh): 反复启动 "cool"，直到最大变化小于 ``tolerance``；返回（冷却后的数组，启动次数）。下面的循环结果正确，却每一步都让整个 x 在 PCIe 上往返一次，
#   而且每一页都要缺页。只让 ``change`` 那一页来回，x 来去各搬一次，除 ``change`` 之外没有缺页。不要改动 ``host``，分配的都要释放。
def cool(cuda, host: np.ndarray, tolerance: float) -> tuple[np.ndarray, int]:
    """host: [n], float32."""
    n = len(host)
    x, change = cuda.malloc_managed(n), cuda.malloc_managed(1)
    x[0:n] = host
    # [solution
    cuda.prefetch(x, "device")
    launches = 0
    while True:
        cuda.launch("cool", x, change)
        cuda.synchronize()
        launches += 1
        if change[0] < tolerance:
            break
    cuda.prefetch(x, "host")
    result = x[0:n]
    # solution]
    # [skeleton
    #: launches = 0
    #: while True:
    #:     before = x[0:n]
    #:     cuda.launch("cool", x, change)
    #:     cuda.synchronize()
    #:     launches += 1
    #:     if np.abs(x[0:n] - before).max() < tolerance:
    #:         break
    #: result = x[0:n]
    # skeleton]
    cuda.free(x)
    cuda.free(change)
    return result, launches


# I AM NOT DONE
