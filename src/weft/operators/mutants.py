"""Mutants that every operator's verifier must reject, made from the right function."""

from collections.abc import Callable
from typing import Any

import torch

from weft.definition import Mutant


def usual(right: Callable[..., Any], direction: str = "forward") -> list[Mutant]:
    """Zeros, stale output, a skipped tail, an off-by-one shift: mutants of an operator with one tensor of output (for
    ``backward``: of a function that returns the tuple of gradients)."""

    def each(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        def mutant(*args: Any, **kwargs: Any) -> Any:
            out = right(*args, **kwargs)
            return wrong(out) if isinstance(out, torch.Tensor) else tuple(wrong(o) for o in out)

        return mutant

    return [
        Mutant("zeros", each(torch.zeros_like), direction),
        Mutant("stale output", _stale(right), direction),
        Mutant("skipped tail", each(_skip_tail), direction),
        Mutant("off by one", each(lambda out: out.flatten().roll(1).view(out.shape)), direction),
    ]


def changed(right: Callable[..., Any], **changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The right function of changed arguments: ``changed(reference, weights=lambda w: w.roll(1, 1))``."""

    def mutant(*gradients: Any, **arguments: Any) -> Any:
        return right(*gradients, **{**arguments, **{name: change(arguments[name]) for name, change in changes.items()}})

    return mutant


def gradient_of(reference: Callable[..., Any], *wanted: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``(gradients of the results, **arguments) -> gradients`` of the wanted arguments that are not None, by autograd of the
    reference."""

    def gradient(*gradients: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, ...]:
        leaves = {n: arguments[n].detach().requires_grad_() for n in wanted if arguments[n] is not None}
        with torch.enable_grad():
            return torch.autograd.grad(reference(**{**arguments, **leaves}), list(leaves.values()), gradients)

    return gradient


def _skip_tail(out: torch.Tensor) -> torch.Tensor:
    """The last partial block is never written: it holds whatever the memory held."""
    flat = out.flatten().clone()
    flat[flat.numel() - max(1, flat.numel() % 16) :] = 0.5
    return flat.view(out.shape)


def _stale(right: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the previous result where it has the right shape: a cache keyed by shape."""
    results: dict[Any, Any] = {}

    def mutant(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        first = out if isinstance(out, torch.Tensor) else out[0]
        return results.setdefault((first.shape, first.dtype), out)

    return mutant
