"""A model's matrices as linear layers: the seam that quantised weights implement."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import ops
from weft.inference.checkpoint import Source, finite, naming
from weft.operators.linear import few_rows

# T tokens, N outputs, K inputs


class Norm(NamedTuple):
    """An RMSNorm: its weight [K], and what is added to the mean square."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, rows: int = 0) -> Tensor:
        """rms_norm(x), in blocks of so many rows (see :func:`in_blocks`)."""
        return in_blocks(lambda t: ops.rms_norm(t, *self), x, rows)


class Linear(ABC):
    """``y = x · weightᵀ + bias`` of x [T, K]; safe to capture in a CUDA graph."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """What a call reads of the weight."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def fused(
        self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor | None:
        """The product of x or rms_norm(x), its gate, silu(gate) · up, and its sum with a residual in one launch; None where the
        layer declines."""
        return None

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) · up of a layer whose first half of outputs is the gate; in one launch where the layer has one."""
        y = self.fused(x, gated=True)
        return ops.swiglu(*self(x).chunk(2, -1)) if y is None else y


class Dense(Linear):
    """A weight [N, K] in the model's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias
        self.gpu = weight.is_cuda
        self.most = few_rows.most_rows(weight) if self.gpu else 0  # tokens that `fused` takes

    @property
    def bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.gpu and x.shape[0] <= 2:
            y: Tensor = ops.skinny_matmul(x, self.weight, self.bias)
            return y
        return F.linear(x, self.weight, self.bias)

    def fused(
        self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor | None:
        """Of few tokens on a GPU, else None."""
        if x.shape[0] > self.most:
            return None
        weight, eps = norm or (None, 0.0)
        activation = "swiglu" if gated else None
        y: Tensor = ops.norm_linear(x, self.weight, weight, self.bias, residual, eps=eps, activation=activation)
        return y


class InBlocks(Linear):
    """A linear layer, computed in blocks of a fixed number of tokens, so that a row's bits do not depend on how many others
    there are."""

    def __init__(self, layer: Linear, rows: int):
        self.layer, self.rows = layer, rows

    @property
    def bytes(self) -> int:
        return self.layer.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return in_blocks(self.layer, x, self.rows)


def in_blocks(f: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """``f(x)`` of a function of rows, called with exactly ``rows`` of them each time; with all at once where that is 0."""
    if not rows:
        return f(x)
    tokens = x.shape[0]
    x = F.pad(x, (0, 0) * (x.ndim - 1) + (0, -tokens % rows))
    return torch.cat([f(part) for part in x.split(rows)])[:tokens]


Quantise = Callable[[Tensor, "Tensor | None"], Linear]  # of a weight [N, K] in the checkpoint's dtype, and its bias


@dataclass
class Loader:
    """Makes a model's parameters from a source.

    Args:
        quantise: makes the linear layers; :class:`Dense` if None.
        rank, ranks: which share of the heads and hidden units to take (tensor parallelism).
        rows: of a block where results must not depend on the batch; 0 for any number.
    """

    source: Source
    device: torch.device
    dtype: torch.dtype
    quantise: Quantise | None = None
    rank: int = 0
    ranks: int = 1
    rows: int = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return finite(self.source.tensor(name, shape).to(self.device, self.dtype), name)

    def norm(self, name: str, columns: int, eps: float) -> Norm:
        return Norm(self.tensor(f"{name}.weight", (columns,)), eps)

    def share(self, t: Tensor, dim: int | None) -> Tensor:
        return t if self.ranks == 1 or dim is None else t.chunk(self.ranks, dim)[self.rank].contiguous()

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool = False, split: int | None = 0,
        head: bool = False,
    ) -> Linear:  # fmt: skip
        """One layer of several matrices [rows, columns], one below the other.

        Args:
            split: the dimension that ranks share: 0 (outputs), 1 (inputs; the results are to be summed), or None.
        """
        if (layer := self.source.linear(self, names, rows, columns, bias, split)) is not None:
            return self.fixed(layer)
        parts = [self.tensor(f"{name}.weight", (n, columns)) for name, n in zip(names, rows, strict=True)]
        weight = self.share(parts[0], split) if len(parts) == 1 else torch.cat([self.share(t, split) for t in parts])
        added = self.bias(names, rows, split) if bias else None
        with naming(f"{names[0]}.weight", self.ranks):
            return self.of(weight, added, head)

    def bias(self, names: Sequence[str], rows: Sequence[int], split: int | None) -> Tensor:
        """Of one layer of several matrices; where results are summed over the ranks, the first one's has it."""
        parts = [self.tensor(f"{name}.bias", (n,)) for name, n in zip(names, rows, strict=True)]
        if split == 1:
            parts = [t if self.rank == 0 else torch.zeros_like(t) for t in parts]
        return torch.cat([self.share(t, 0) for t in parts] if split == 0 else parts)

    def of(self, weight: Tensor, bias: Tensor | None = None, head: bool = False) -> Linear:
        """A layer of a whole weight; ``head`` says that its results are logits, which are rounded more carefully."""
        quantise: Any = getattr(self.quantise, "head", None) if head else self.quantise
        return self.fixed((quantise or Dense)(weight, bias))

    def fixed(self, layer: Linear) -> Linear:
        return InBlocks(layer, self.rows) if self.rows else layer
