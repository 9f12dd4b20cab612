"""The table of pointers with a kernel in CUDA C++ in place of Triton's, for the weights that it takes."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan
from weft.operators.optimizer.rule import Rule
from weft.operators.optimizer.table import Entry, Table


class CudaTable(Table):
    """Of which the weights of one form, that of most elements, are updated by a kernel in CUDA C++.

    Triton's kernel takes the others in a launch of its own, and all of them in a step that scales, clips, skips or zeroes.
    """

    constants: tuple[Tensor, ...] = ()  # what the kernel reads behind ``arrivals``

    def __init__(self, rule: Rule, entries: Sequence[Entry], groups: int = 1, control: Tensor | None = None):
        super().__init__(rule, entries, groups, control)
        self.taken = self.taken_of(entries)
        self.like = next(
            e for e, mine in zip(entries, self.taken, strict=True) if mine
        )  # what the kernel is compiled for

    @classmethod
    def of_all(cls, rule: Rule, entries: Sequence[Entry]) -> CudaTable:
        """The table where the kernel takes all weights.

        Raises:
            Declined: where it does not.
        """
        reasons = [cls.why_not(e) for e in entries]
        if any(reasons):
            raise Declined(next(filter(None, reasons)))
        if len({cls.form(e) for e in entries}) > 1:
            raise Declined("weights of several dtypes; the kernel is compiled for one")
        return cls(rule, entries)

    @classmethod
    def taken_of(cls, entries: Sequence[Entry]) -> np.ndarray:
        """Which weights the kernel updates: bool, one for each."""
        forms = [None if cls.why_not(e) else cls.form(e) for e in entries]
        sizes: Counter[Hashable] = Counter()
        for form, e in zip(forms, entries, strict=True):
            if form is not None:
                sizes[form] += e.param.numel()
        most = max(sizes, key=lambda form: sizes[form], default=None)
        return np.array([form is not None and form == most for form in forms])

    @staticmethod
    @abstractmethod
    def why_not(entry: Entry) -> str:
        """Why the kernel does not take this weight (an empty string where it does)."""

    @staticmethod
    @abstractmethod
    def form(entry: Entry) -> Hashable:
        """What the kernel is compiled for, of a weight that it takes."""

    @abstractmethod
    def kernel(self, chunks: int) -> CudaPlan:
        """The launch for so many chunks."""

    def _launch(
        self,
        active: np.ndarray | None,
        scale: Tensor | None,
        found: Tensor | None,
        max_norm: float | None,
        guarded: bool,
        measured: bool,
        zeroed: bool,
    ) -> None:
        if not (scale is None and found is None and max_norm is None) or guarded or zeroed:
            super()._launch(active, scale, found, max_norm, guarded, measured, zeroed)
            return
        launches = []
        for mine, plan_of in ((self.taken, self._kernel), (~self.taken, self._plain)):
            rows = mine if active is None else mine & active
            if rows.any():
                launches.append((plan_of, self.chunk_map(None if rows.all() else rows, self.block)))
        grads, numbers = self._upload()
        for plan_of, chunks in launches:
            plan_of(len(chunks))(grads, self.table, chunks, numbers, self.arrivals)

    def _kernel(self, chunks: int) -> Callable[..., None]:
        if chunks not in self.plans:
            self.plans[chunks] = self.kernel(chunks)
        plan = self.plans[chunks]
        return lambda *tensors: plan(*tensors, *self.constants)

    def _plain(self, chunks: int) -> Callable[..., None]:
        plan = self._plan(chunks, False, False, False, False)
        return lambda *tensors: plan(*tensors, self.control, self.control, self.control, self.codebook)
