"""A run-time whose device memory is apart from the host's, and that keeps account."""

import numpy as np


class Runtime:
    def __init__(self, fails):
        self.fails, self.memory, self.next = fails, {}, 0x7F0000000000
        self.to_device = self.to_host = self.launches = self.blocks = 0
        self.wrong = ""

    def malloc(self, size):
        pointer, self.next = self.next, self.next + -(-int(size) // 256) * 256 + 4096
        self.memory[pointer] = np.full(int(size), 0xCD, np.uint8)
        return pointer

    def _of(self, pointer, call):
        if isinstance(pointer, np.ndarray):
            raise TypeError(f"{call}: this is an array of the host, where a device pointer is expected")
        if pointer not in self.memory:
            raise ValueError(f"{call}: {pointer!r} is no allocated device pointer")
        return self.memory[pointer]

    def copy_to_device(self, pointer, array):
        device = self._of(pointer, "copy_to_device")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(data) > len(device):
            raise ValueError(f"copy_to_device: {len(data)} bytes into an allocation of {len(device)}")
        device[: len(data)] = data
        self.to_device += len(data)

    def copy_to_host(self, array, pointer):
        device = self._of(pointer, "copy_to_host")
        if not isinstance(array, np.ndarray):
            raise TypeError("copy_to_host(array, pointer): the array comes first")
        if array.nbytes > len(device):
            raise ValueError(f"copy_to_host: {array.nbytes} bytes from an allocation of {len(device)}")
        array.reshape(-1).view(np.uint8)[:] = device[: array.nbytes]
        self.to_host += array.nbytes

    def launch(self, name, grid, block, pointer, n, factor):
        if self.fails:
            raise RuntimeError("cudaErrorLaunchFailure")
        if name != "scale" or block > 1024 or block < 1 or grid < 1:
            raise ValueError(f"launch: invalid configuration: {name}<<<{grid}, {block}>>>")
        values = self._of(pointer, "launch").view(np.float32)
        done = min(n, grid * block)
        if done > len(values):
            raise ValueError(f"illegal memory access: element {done - 1} of an allocation of {len(values)} floats")
        values[:done] *= np.float32(factor)
        self.launches, self.blocks = self.launches + 1, self.blocks + grid

    def free(self, pointer):
        self._of(pointer, "free")
        del self.memory[pointer]


def run(exercise, host, factor, fails):
    """[result, host afterwards, allocations left, bytes to the device, bytes back, launches, blocks, the error]."""
    cuda, result, error = Runtime(fails), None, ""
    try:
        result = exercise.scale(cuda, host, factor)
    except Exception as raised:
        if not fails:
            raise
        error = str(raised)
    return [result, host, len(cuda.memory), cuda.to_device, cuda.to_host, cuda.launches, cuda.blocks, error]
