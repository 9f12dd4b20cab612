"""Addresses of many parameters' gradients asked in Python: where C does not ask (``addresses.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from torch import Tensor

from weft.optim.addresses import ODD, THERE

ADDRESS, CONTIGUOUS, DTYPE = Tensor.data_ptr, Tensor.is_contiguous, attrgetter("dtype")
# Parameters that are asked at once: they and their gradients stay in the cache, no garbage collection starts, and no list takes
# more than 512 bytes, which Python has at hand. Beyond 1 KiB malloc first tidies up what the last gradients have left (0.1 ms).
BATCH = 64


class Batches:
    """As :class:`weft.optim.addresses.Addresses`, of tensors of any class.

    Args:
        params: parameters.
        weights: their addresses.
        found: int64 [len(params)], where the gradients' addresses are written.
        plain: whether the weights are contiguous, and all that has to be asked for is a contiguous gradient with memory, of its
            weight's dtype. Else all rows are odd.
    """

    def __init__(self, params: Sequence[Tensor], weights: Sequence[int], found: np.ndarray, plain: bool):
        self.plain = plain
        self.kinds = np.full(len(params), THERE, np.uint8)
        dtypes = list(map(DTYPE, params))
        slices = [slice(start, start + BATCH) for start in range(0, len(params), BATCH)]
        self.batches = [(params[s], list(weights[s]), dtypes[s], found[s], self.kinds[s]) for s in slices]

    def read(self) -> bool:
        """Writes addresses and kinds, of a batch with an odd row ODD for all of it. Returns whether all rows are there.

        One pass: a pass for each question takes every parameter into the cache anew."""
        self.kinds.fill(THERE)
        every = True
        for params, weights, dtypes, found, kinds in self.batches:
            if self.plain and list(map(ADDRESS, params)) == weights:
                grads = [p.grad for p in params]
                try:
                    found[:] = those = list(map(ADDRESS, grads))  # type: ignore[arg-type]
                    if all(those) and all(map(CONTIGUOUS, grads)) and list(map(DTYPE, grads)) == dtypes:  # type: ignore[arg-type]
                        continue
                except (TypeError, RuntimeError):  # one is None, or has no memory (sparse)
                    pass
            kinds.fill(ODD)
            every = False
        return every
