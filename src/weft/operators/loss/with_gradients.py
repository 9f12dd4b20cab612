"""A loss and its gradients from one call: by autograd, compiled, and wrong on purpose."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators import peers


def with_gradients(leaves: tuple[str, ...], function: Callable[..., Tensor], **arguments: Any) -> tuple[Any, ...]:
    """The loss, and the gradients of the losses' sum by those arguments (None for one that is None), by autograd."""
    with torch.enable_grad():
        given = {name: arguments[name].detach().requires_grad_() for name in leaves if arguments[name] is not None}
        loss = function(**{**arguments, **given})
        found = torch.autograd.grad(loss, list(given.values()), torch.ones_like(loss))
    of = dict(zip(given, found, strict=True))
    return loss.detach(), *(of.get(name) for name in leaves)


def traceable_with_gradients(
    leaves: tuple[str, ...], function: Callable[..., Tensor], **arguments: Any
) -> tuple[Any, ...]:
    """The same by ``torch.func``, which a compiler can follow."""

    def both(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = function(**{**arguments, **given})
        return loss.sum(), loss

    given = {name: arguments[name] for name in leaves if arguments[name] is not None}
    found, loss = torch.func.grad(both, has_aux=True)(given)
    return loss, *(found.get(name) for name in leaves)


class CompiledBoth(peers.Compiled):
    """Compiled forward and its compiled backward, both within the call."""

    def __init__(self, leaves: tuple[str, ...], function: Callable[..., Tensor]):
        super().__init__(function)
        self.leaves = leaves

    def __call__(self, **arguments: Any) -> Any:
        return with_gradients(self.leaves, super().__call__, **arguments)


def register_peers(
    operator: Operator, leaves: tuple[str, ...], *, composed: Callable[..., Tensor], **others: Callable[..., Tensor]
) -> None:
    """Other implementations of the loss, with its gradients by autograd."""
    operator.implementation("torch")(functools.partial(with_gradients, leaves, composed))
    operator.implementation("torch.compile", devices=("cuda",))(CompiledBoth(leaves, composed))
    for name, requires in (("liger", "liger-kernel"), ("quack", "quack-kernels")):
        both = functools.partial(with_gradients, leaves, others[name])
        operator.implementation(name, requires=requires, devices=("cuda",))(both)


def wrong_in_parts(
    right: Callable[..., tuple[Any, ...]], wrong: dict[str, Callable[..., tuple[Any, ...]]], gradients: str
) -> list[Mutant]:
    """Mutants of a loss with its gradients: with the wrong loss alone, and with wrong gradients alone."""

    def of(
        loss: Callable[..., tuple[Any, ...]], others: Callable[..., tuple[Any, ...]]
    ) -> Callable[..., tuple[Any, ...]]:
        return lambda **arguments: (loss(**arguments)[0], *others(**arguments)[1:])

    return [
        *(Mutant(f"{name} in the loss", of(function, right)) for name, function in wrong.items()),
        *(Mutant(f"{name} in the {gradients}", of(right, function)) for name, function in wrong.items()),
    ]
