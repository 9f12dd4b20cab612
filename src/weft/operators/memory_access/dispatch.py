"""Which kernel an access pattern takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.operators.call import check_tensor, traced
from weft.operators.dispatch import ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way of going through memory, the option of a call that says which one it is.

    Args:
        name: the operator's.
        reference: the same in PyTorch.
        triton, cuda: ``(*tensors, *options) -> plan``, called with the tensors and the result.
        option: name of an int that a call takes beside x [N], its allowed values and its default.
        tensors: ``(x, option) -> the tensors that a kernel is given`` and the options of its plan.
        result: ``(*tensors, *options) -> an empty tensor`` for the result.
        check: raises TypeError or ValueError for wrong arguments; x of one dimension and the option unless given.
        declines: ``(*tensors) -> why`` the kernels do not take them besides strides (an empty string when they do).
    """

    name: str
    reference: Callable[..., Tensor]
    triton: Callable[..., Any]
    cuda: Callable[..., Any] | None = None
    option: tuple[str, Sequence[int], int] | None = None
    tensors: Callable[..., tuple[tuple[Tensor, ...], tuple[Any, ...]]] = lambda x, *options: ((x,), options)
    result: Callable[..., Tensor] = lambda x, *options: torch.empty_like(x)
    check: Callable[..., None] | None = None
    declines: Callable[..., str] = lambda *tensors: ""

    def lowered(self, *args: Any, **named: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The arguments of a call, checked, as tensors and options of a plan."""
        if self.check is not None:
            self.check(*args, **named)
        else:
            args = self._checked(*args, **named)
            named = {}
        return self.tensors(*args, **named)

    def _checked(self, x: Any, *value: Any, **named: Any) -> tuple[Any, ...]:
        check_tensor(self.name, "x", x)
        if x.ndim != 1:
            raise ValueError(f"{self.name}: argument 'x' has shape {tuple(x.shape)}; expected one dimension")
        if self.option is None:
            return (x,)
        name, allowed, default = self.option
        number = (*value, *named.values(), default)[0]
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{self.name}: argument '{name}' is {number!r}; expected an int")
        if number not in allowed:
            span = f"{allowed[0]} … {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
            raise ValueError(f"{self.name}: argument '{name}' is {number}; expected {span}")
        return x, number


class Access(Call):
    """``(*tensors, pattern, *options)``"""

    def __init__(self, *arguments: Any):
        at = next(i for i, a in enumerate(arguments) if isinstance(a, Pattern))
        self.tensors, self.pattern, self.options = arguments[:at], arguments[at], arguments[at + 1 :]
        self.x = self.tensors[0]

    @property
    def traced(self) -> bool:
        return traced(*self.tensors)

    @property
    def empty(self) -> bool:
        return not self.pattern.result(*self.tensors, *self.options).numel()

    @property
    def wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def scattered(c: Access) -> str:
    return "" if all(t.is_contiguous() for t in c.tensors) else STRIDED


def declined(c: Access) -> str:
    return scattered(c) or c.pattern.declines(*c.tensors)


def no_cuda(c: Access) -> str:
    return "Triton's kernel has this pattern too" if c.pattern.cuda is None else declined(c)


STRIDED = "strides: the pattern is measured on contiguous tensors"

FORWARD = Dispatch(
    Access,
    ON_CPU,
    TRACED,
    Route("torch", lambda c: c.wants_gradient, "a gradient is wanted: these kernels measure a forward pass"),
    Route("torch", lambda c: c.empty, "an empty result: nothing to launch"),
    Route("torch", lambda c: bool(scattered(c)), STRIDED),
    Route("torch", lambda c: bool(declined(c)), "blocks of other sizes than powers of two up to 2048 elements"),
    Route(
        "cuda",
        lambda c: not INTERPRETING and c.options[0] < 32,  # a stride of 32 has all lanes wait for one bank
        "data in shared memory, which Triton would read from L1",
        lambda c: c.pattern.cuda(*c.tensors, *c.options),
        no_cuda,
    ),
    Route(
        "triton",
        lambda c: True,
        "contiguous tensors: the pattern is the kernel's own",
        lambda c: c.pattern.triton(*c.tensors, *c.options),
        declined,
    ),
)
