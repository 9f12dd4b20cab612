"""Kernels under autograd: functions whose gradients are kernels, and gradients by autograd of a reference."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.operators.call import materialised

is_batched = torch._C._functorch.is_legacy_batchedtensor  # of ``torch.autograd.grad(…, is_grads_batched=True)``


def _one_by_one(backward: Callable[..., Any], ctx: Any, gradients: Sequence[Any]) -> Any:
    """``backward`` of each gradient of a batch, whose memory kernels cannot read; the results as a batch again."""
    first = next(g for g in gradients if isinstance(g, torch.Tensor) and is_batched(g))
    # the level is asked of the tensor: the thread that a GPU's gradients are computed in does not know it
    level = next(n for n in range(1, 65) if not is_batched(torch._remove_batch_dim(first, n, 1, 0)))
    batches = [torch._remove_batch_dim(g, level, 1, 0) if isinstance(g, torch.Tensor) and is_batched(g) else None
               for g in gradients]  # fmt: skip
    size = next(len(b) for b in batches if b is not None)
    found = []
    for i in range(size):
        one = backward(ctx, *(g if b is None else b[i] for g, b in zip(gradients, batches, strict=True)))
        found.append(one if isinstance(one, tuple) else (one,))
    return tuple(
        None if of[0] is None else torch._add_batch_dim(torch.stack(of), 0, level) for of in zip(*found, strict=True)
    )


class _Untracked:
    """Autograd's context for a call without gradients: saves nothing."""

    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        torch.autograd.graph.increment_version(tensors)  # backward of a graph that saved them raises


class KernelFunction(torch.autograd.Function):
    """An autograd function whose kernels read raw memory: ``backward`` gets materialised gradients."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (backward := cls.__dict__.get("backward")) is not None:
            given = backward.__func__

            @functools.wraps(given)
            def of_memory(ctx: Any, *gradients: Any) -> Any:
                if any(isinstance(g, torch.Tensor) and is_batched(g) for g in gradients):
                    return _one_by_one(of_memory, ctx, gradients)
                return given(ctx, *materialised(*gradients))

            cls.backward = staticmethod(of_memory)  # type: ignore[method-assign]


def differentiable(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Runs an autograd function: through autograd if a gradient is wanted, else its forward alone (an unused node costs
    5 us)."""
    args = materialised(*args)
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return function.apply(*args)
    return function.forward(_Untracked(), *args)


def reference_gradients(
    reference: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[bool], gradients: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``inputs`` by autograd of the reference, themselves differentiable: what backward returns when a
    gradient of the gradient is wanted (grad mode is on in backward then)."""
    # views, so that no input is reached through another one's history: a saved result has the call itself in its own
    views = [a.view_as(a) if w else a for a, w in zip(inputs, wanted, strict=True)]
    leaves = [a for a, w in zip(views, wanted, strict=True) if w]
    out = reference(*views)
    found = iter(torch.autograd.grad(out, leaves, gradients, create_graph=True, allow_unused=True))
    return tuple(next(found) if w else None for w in wanted)
