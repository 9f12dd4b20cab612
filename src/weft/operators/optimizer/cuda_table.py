"""The table of pointers with a kernel in CUDA C++ in place of Triton's, for the weights that it takes."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan
from weft.operators.optimizer import kernels
from weft.operators.optimizer.entry import Entry
from weft.operators.optimizer.rule import Rule
from weft.operators.optimizer.table import Table

NOT_ASKED = torch.empty(0, device="cpu")  # whose address is null


class CudaTable(Table):
    """Of which the weights of one form, that of most elements, are updated by a kernel in CUDA C++.

    Triton's kernel takes the others in a launch of its own, and all of them in a step that zeroes gradients.
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
    def kernel(self, chunks: int, asked: bool = False) -> CudaPlan:
        """The launch for so many chunks; ``asked``: of the kernel that scales, clips and skips."""

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
        given = [t for t in (scale, found) if t is not None]
        asked = bool(given) or max_norm is not None or guarded
        if zeroed or any(t.dtype != torch.float32 for t in given):
            super()._launch(active, scale, found, max_norm, guarded, measured, zeroed)
            return
        maps = []
        for mine in (self.taken, ~self.taken):
            rows = mine if active is None else mine & active
            maps.append(self.chunk_map(None if rows.all() else rows, self.block) if rows.any() else None)
        ours, others = maps
        if ours is None and others is None:
            return
        grads, numbers = self._upload()
        if (max_norm is not None or guarded) and not measured:
            found = self._measure(grads, active, scale, found, max_norm, guarded)
        clipped = max_norm is not None
        if ours is not None:
            factors = () if not asked else self._asked(scale, found, clipped, counting=others is None)
            plan = self._kernel(len(ours), asked)
            plan(grads, self.table, ours, numbers, self.arrivals, *self.constants, *factors)
        if others is not None:
            self._update(grads, numbers, others, scale, found, clipped)

    def _asked(
        self, scale: Tensor | None, found: Tensor | None, clipped: bool, counting: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``struct Asked`` of table.cuh. A skipped step is counted by one launch alone: Triton's, where there is one."""
        clip = self.control[kernels.FACTOR.value :] if clipped else NOT_ASKED
        skipped = self.control[kernels.SKIPPED.value :] if counting else NOT_ASKED
        return clip, NOT_ASKED if scale is None else scale, NOT_ASKED if found is None else found, skipped

    def _kernel(self, chunks: int, asked: bool) -> CudaPlan:
        key = "cuda", chunks, asked
        if key not in self.plans:
            self.plans[key] = self.kernel(chunks, asked)
        plan: CudaPlan = self.plans[key]
        return plan
