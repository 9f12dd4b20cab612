# rejected at: right
# The shape is swapped, the strides are not: the view reads other elements.


def contiguous_strides(shape):
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def offset(index, strides):
    return sum(i * s for i, s in zip(index, strides))


def transposed(shape, strides):
    return (*shape[:-2], shape[-1], shape[-2]), strides
