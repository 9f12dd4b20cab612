# rejected at: right
# Assumes contiguous strides instead of those that it is given.


def contiguous_strides(shape):
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def offset(index, strides):
    at = 0
    for i, s in zip(index, sorted(strides, reverse=True)):
        at += i * s
    return at


def transposed(shape, strides):
    return (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
