"""
[en
Streams: copy the next piece in while this one is computed and the one before is copied out.

``cuda`` is the run-time of device_memory, with streams. All calls but malloc and free return at once; what they ask for is done later, in order
within a stream, and in any order between streams:

    stream = cuda.stream()                                       (cudaStreamCreate)
    cuda.copy_to_device(pointer, array, stream)                  (cudaMemcpyAsync)
    cuda.launch("scale", grid, 256, pointer, n, factor, stream)  (<<<grid, 256, 0, stream>>>)
    cuda.copy_to_host(array, pointer, stream)                    (cudaMemcpyAsync)
    cuda.synchronize()                                           (cudaDeviceSynchronize)   waits for all of it
en]
[zh
流：这一块在计算时，拷入下一块，同时拷出上一块。

``cuda`` 是 device_memory 里的运行时，加上了流。除 malloc 和 free 外，所有调用立即返回；它们要求的事稍后才做，
同一个流内按顺序，不同的流之间顺序任意：

    stream = cuda.stream()                                       (cudaStreamCreate)
    cuda.copy_to_device(pointer, array, stream)                  (cudaMemcpyAsync)
    cuda.launch("scale", grid, 256, pointer, n, factor, stream)  (<<<grid, 256, 0, stream>>>)
    cuda.copy_to_host(array, pointer, stream)                    (cudaMemcpyAsync)
    cuda.synchronize()                                           (cudaDeviceSynchronize)   等待全部完成
zh]
"""

import numpy as np


# TODO(en): Return host * factor, computed in pieces of ``piece`` elements (the last may be smaller). Use two streams, and device memory
#   for two pieces, no more: two buffers, taken in turn. A buffer must not be filled again before its last result has been copied out;
#   the order within a stream can see to that. Wait before you free and return.
# TODO(zh): 返回 host * factor，按 ``piece`` 个元素一块计算（最后一块可能更小）。用两个流，设备内存只用两块的大小：两个缓冲区轮流用。
#   一个缓冲区在上一个结果拷出之前不得再次写入；流内的顺序就能保证这一点。释放和返回之前要等待。
def pipeline(cuda, host: np.ndarray, piece: int, factor: float) -> np.ndarray:
    """host: [n], float32."""
    # [skeleton
    #: result = np.empty_like(host)
    #: stream, pointer = cuda.stream(), cuda.malloc(4 * piece)
    #: for first in range(0, len(host), piece):
    #:     part = host[first : first + piece]
    #:     cuda.copy_to_device(pointer, part, stream)
    #:     cuda.launch("scale", (len(part) + 255) // 256, 256, pointer, len(part), factor, stream)
    #:     cuda.copy_to_host(result[first : first + piece], pointer, stream)
    #: cuda.synchronize()
    #: cuda.free(pointer)
    #: return result
    # skeleton]
    # [solution
    result = np.empty_like(host)
    streams = [cuda.stream(), cuda.stream()]
    pointers = [cuda.malloc(4 * piece), cuda.malloc(4 * piece)]
    for turn, first in enumerate(range(0, len(host), piece)):
        stream, pointer = streams[turn % 2], pointers[turn % 2]
        part = host[first : first + piece]
        cuda.copy_to_device(pointer, part, stream)
        cuda.launch("scale", (len(part) + 255) // 256, 256, pointer, len(part), factor, stream)
        cuda.copy_to_host(result[first : first + piece], pointer, stream)
    cuda.synchronize()
    for pointer in pointers:
        cuda.free(pointer)
    return result
    # solution]


# I AM NOT DONE
