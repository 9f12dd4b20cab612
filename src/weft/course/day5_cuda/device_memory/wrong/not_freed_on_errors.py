# rejected at: safe
# Freed only when all goes well.
import numpy as np


def scale(cuda, host, factor):
    n = len(host)
    result = np.empty_like(host)
    pointer = cuda.malloc(host.nbytes)
    cuda.copy_to_device(pointer, host)
    cuda.launch("scale", (n + 255) // 256, 256, pointer, n, factor)
    cuda.copy_to_host(result, pointer)
    cuda.free(pointer)
    return result
