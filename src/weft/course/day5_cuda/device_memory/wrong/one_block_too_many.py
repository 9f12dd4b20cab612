# rejected at: fast
# n // 256 + 1 blocks: one too many when 256 divides n.
import numpy as np


def scale(cuda, host, factor):
    n = len(host)
    result = np.empty_like(host)
    pointer = cuda.malloc(host.nbytes)
    try:
        cuda.copy_to_device(pointer, host)
        cuda.launch("scale", n // 256 + 1, 256, pointer, n, factor)
        cuda.copy_to_host(result, pointer)
    finally:
        cuda.free(pointer)
    return result
