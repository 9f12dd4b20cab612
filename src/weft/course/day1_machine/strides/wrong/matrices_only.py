# rejected at: right
# A matrix only.
def contiguous_strides(shape):
    return (shape[-1], 1)


def offset(index, strides):
    return sum(i * s for i, s in zip(index, strides))


def transposed(shape, strides):
    return (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
