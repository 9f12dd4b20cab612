"""Which norm: what the plans of all of them take, and how tensors that a norm does not have are stood in for."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Kind(NamedTuple):
    """``h = x + residual`` if ``added``; ``y = (h - mean) / deviation`` if ``centered`` (LayerNorm), else ``h / root mean
    square`` (RMSNorm); times a weight, plus a bias."""

    centered: bool
    weighted: bool
    biased: bool
    added: bool


class Given(NamedTuple):
    """The tensors of a call; one that is not there is x, which kernels never read in its place."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Given:
        return cls(x, *(x if t is None else t for t in (residual, weight, bias)))

    def key(self, kind: Kind) -> tuple[Tensor, ...]:
        """Those that are there: what a plan depends on."""
        there = (True, kind.added, kind.weighted, kind.biased)
        return tuple(t for t, given in zip(self, there, strict=True) if given)

    @classmethod
    def of_call(cls, call: tuple[Any, ...]) -> tuple[Given, float, Kind, bool]:
        """Takes apart ``(*key, eps, kind, kept)``."""
        *tensors, eps, kind, kept = call
        there = iter(tensors)
        x = next(there)
        residual, weight, bias = (next(there) if f else None for f in (kind.added, kind.weighted, kind.biased))
        return cls.of(x, residual, weight, bias), eps, kind, kept
