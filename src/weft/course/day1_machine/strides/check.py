import math


def check(learner, t):
    t.equal(learner.offset((1, 2), (1, 10)), 21, "offset((1, 2), (1, 10))")  # of a transposed matrix
    for rank in (1, 2, 3, 4):
        shape = tuple(int(n) for n in t.rng.integers(1, 9, rank))
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(rank))
        t.equal(learner.contiguous_strides(shape), strides, f"contiguous_strides({shape})")
        index = tuple(int(t.rng.integers(n)) for n in shape)
        odd = tuple(int(s) for s in t.rng.integers(0, 50, rank))  # strides of a view need no order
        t.equal(learner.offset(index, odd), sum(i * s for i, s in zip(index, odd)), f"offset({index}, {odd})")
        if rank > 1:
            swapped = ((*shape[:-2], shape[-1], shape[-2]), (*odd[:-2], odd[-1], odd[-2]))
            t.equal(learner.transposed(shape, odd), swapped, f"transposed({shape}, {odd})")
