"""Counts the matrix products of the learner's convolution."""

from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "convolution"}


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def products(exercise, x, weight, bias):
    """The names of the products that convolve ran."""
    with Counter() as counter:
        exercise.convolve(x, weight, bias)
    return [name for name in counter.names if name in PRODUCTS]
