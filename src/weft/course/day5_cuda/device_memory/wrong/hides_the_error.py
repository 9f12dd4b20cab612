# rejected at: right
# A failed launch returns something as if it had worked.
import numpy as np


def scale(cuda, host, factor):
    n = len(host)
    result = np.empty_like(host)
    pointer = cuda.malloc(host.nbytes)
    try:
        cuda.copy_to_device(pointer, host)
        cuda.launch("scale", (n + 255) // 256, 256, pointer, n, factor)
        cuda.copy_to_host(result, pointer)
    except Exception:
        pass
    finally:
        cuda.free(pointer)
    return result
