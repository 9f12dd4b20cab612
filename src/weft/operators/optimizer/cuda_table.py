"""The table of pointers with the launch of a kernel in CUDA C++ in place of Triton's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan
from weft.operators.optimizer.rule import Rule
from weft.operators.optimizer.table import Entry, Table


class CudaTable(Table):
    """Whose launches scale, clip, skip and zero nothing.

    Raises:
        Declined: parameters that the kernel does not take.
    """

    constants: tuple[Tensor, ...] = ()  # what the kernel reads behind ``arrivals``

    def __init__(self, rule: Rule, entries: Sequence[Entry]):
        if reason := self.why_not(entries):
            raise Declined(reason)
        super().__init__(rule, entries)

    @staticmethod
    @abstractmethod
    def why_not(entries: Sequence[Entry]) -> str:
        """Why the kernel does not take these parameters (an empty string where it does)."""

    @abstractmethod
    def kernel(self, chunks: int) -> CudaPlan:
        """The launch for so many chunks."""

    def _plan(self, chunks: int, scaled: bool, clipped: bool, guarded: bool, zeroed: bool) -> Callable[..., None]:
        if scaled or clipped or guarded or zeroed:
            raise Declined("a step that scales, clips, skips or zeroes gradients")
        if chunks not in self.plans:
            self.plans[chunks] = self.kernel(chunks)
        plan = self.plans[chunks]
        return lambda grads, table, places, numbers, arrivals, *unused: plan(
            grads, table, places, numbers, arrivals, *self.constants
        )
