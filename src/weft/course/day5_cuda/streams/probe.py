"""A run-time that does later what is asked now: streams in a random order, and a clock for each engine."""

import numpy as np


class Runtime:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.memory, self.next, self.allocated, self.most = {}, 0x7F0000000000, 0, 0
        self.queues, self.wrong = [], []
        self.engines = {"in": 0.0, "kernel": 0.0, "out": 0.0}
        self.streams = []
        self.now = 0.0

    def malloc(self, size):
        pointer, self.next = self.next, self.next + int(size) + 4096
        self.memory[pointer] = np.full(int(size), 0xCD, np.uint8)
        self.allocated += int(size)
        self.most = max(self.most, self.allocated)
        return pointer

    def free(self, pointer):
        if pointer not in self.memory:
            raise ValueError(f"free: {pointer!r} is no allocated device pointer")
        if any(of == pointer for queue in self.queues for of, *_ in queue):
            self.wrong.append("free")
            self._drain()
        self.allocated -= len(self.memory.pop(pointer))

    def stream(self):
        self.queues.append([])
        self.streams.append(0.0)
        return len(self.queues) - 1

    def _ask(self, call, pointer, stream, engine, cost, action):
        if pointer not in self.memory:
            raise ValueError(f"{call}: {pointer!r} is no allocated device pointer")
        if type(stream) is not int or not 0 <= stream < len(self.queues):
            raise ValueError(f"{call}: {stream!r} is no stream; cuda.stream() makes one")
        self.queues[stream].append((pointer, engine, cost, action))

    def copy_to_device(self, pointer, array, stream):
        def action():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.memory[pointer][: len(data)] = data

        if array.nbytes > len(self.memory.get(pointer, b"")):
            raise ValueError(f"copy_to_device: {array.nbytes} bytes do not fit into the allocation")
        self._ask("copy_to_device", pointer, stream, "in", array.size, action)

    def copy_to_host(self, array, pointer, stream):
        def action():
            array.reshape(-1).view(np.uint8)[:] = self.memory[pointer][: array.nbytes]

        self._ask("copy_to_host", pointer, stream, "out", array.size, action)

    def launch(self, name, grid, block, pointer, n, factor, stream):
        def action():
            done = min(n, grid * block)
            self.memory[pointer].view(np.float32)[:done] *= np.float32(factor)

        if name != "scale" or grid < 1 or not 1 <= block <= 1024:
            raise ValueError(f"launch: invalid configuration: {name}<<<{grid}, {block}>>>")
        self._ask("launch", pointer, stream, "kernel", n, action)

    def synchronize(self):
        self._drain()

    def _drain(self):
        self._time()
        while any(self.queues):
            ready = [q for q in self.queues if q]
            ready[self.rng.integers(len(ready))].pop(0)[-1]()

    def _time(self):
        """The engines take what comes first; all that was asked before has ended at ``now``."""
        queues = [[(e, c) for _, e, c, _ in queue] for queue in self.queues]
        at = [self.now] * len(queues)
        engines = dict.fromkeys(self.engines, self.now)
        while any(queues):
            start, k = min((max(at[k], engines[q[0][0]]), k) for k, q in enumerate(queues) if q)
            engine, cost = queues[k].pop(0)
            at[k] = engines[engine] = start + cost
        self.now = max([self.now, *at])


def run(exercise, host, piece, factor, seed):
    """[result, bytes left allocated, most bytes allocated, the clock, what was freed too early, operations never waited for]."""
    cuda = Runtime(seed)
    result = np.array(exercise.pipeline(cuda, host, piece, factor))
    return [result, cuda.allocated, cuda.most, cuda.now, len(cuda.wrong), sum(map(len, cuda.queues))]
