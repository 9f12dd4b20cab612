"""Plans of kernels that take numbers which differ from call to call, such as a seed."""

from __future__ import annotations

from typing import Any

import torch

from weft.operators.launch import INTERPRETING, PLAIN, Plan, _direct, compile_request


class NumberedPlan(Plan):
    """Call it with the tensors and then the numbers. The kernel annotates the numbers' types and lists them as
    ``do_not_specialize``, so that one compiled kernel takes them all."""

    def _first(self, *arguments: Any) -> None:
        tensors = tuple(a for a in arguments if isinstance(a, torch.Tensor))
        launched = not INTERPRETING and compile_request() is None and 0 not in self.grid
        if launched and all(t.__class__ in PLAIN and not t.is_meta for t in tensors):
            options = {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}
            compiled = self.kernel[self.grid](*arguments, *self.scalars, **options)
            self._launch = _direct(compiled, self.grid, (*self.scalars, *self.constants.values()))
        else:
            scalars = (*arguments[len(tensors) :], *self.scalars)
            Plan(self.kernel, self.grid, scalars, self.constants, self.num_warps, self.num_stages)(*tensors)
