# rejected at: right
# The input is not copied: the kernel scales whatever was in the memory.
import numpy as np


def scale(cuda, host, factor):
    n = len(host)
    result = np.empty_like(host)
    pointer = cuda.malloc(host.nbytes)
    try:
        cuda.launch("scale", (n + 255) // 256, 256, pointer, n, factor)
        cuda.copy_to_host(result, pointer)
    finally:
        cuda.free(pointer)
    return result
