# rejected at: parse
# Asks the library.
import numpy as np


def contiguous_strides(shape):
    return tuple(s // 8 for s in np.empty(shape).strides)


def offset(index, strides):
    return sum(i * s for i, s in zip(index, strides))


def transposed(shape, strides):
    return (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
