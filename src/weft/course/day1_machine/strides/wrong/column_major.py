# rejected at: right
# Column-major: the first dimension lies side by side.
def contiguous_strides(shape):
    strides = []
    step = 1
    for size in shape:
        strides.append(step)
        step *= size
    return tuple(strides)


def offset(index, strides):
    return sum(i * s for i, s in zip(index, strides))


def transposed(shape, strides):
    return (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
