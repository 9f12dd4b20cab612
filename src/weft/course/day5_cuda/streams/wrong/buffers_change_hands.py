# rejected at: right
# The buffer changes every second piece, the stream every piece: a buffer moves to the other stream.
import numpy as np


def pipeline(cuda, host, piece, factor):
    result = np.empty_like(host)
    streams = [cuda.stream(), cuda.stream()]
    pointers = [cuda.malloc(4 * piece), cuda.malloc(4 * piece)]
    for turn, first in enumerate(range(0, len(host), piece)):
        stream, pointer = streams[turn % 2], pointers[turn // 2 % 2]
        part = host[first : first + piece]
        cuda.copy_to_device(pointer, part, stream)
        cuda.launch("scale", (len(part) + 255) // 256, 256, pointer, len(part), factor, stream)
        cuda.copy_to_host(result[first : first + piece], pointer, stream)
    cuda.synchronize()
    for pointer in pointers:
        cuda.free(pointer)
    return result
