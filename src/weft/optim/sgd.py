"""``SGD``, in place of ``torch.optim``'s."""

import math
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import sgd as functional

from weft.operators.optimizer.rules import SGD as RULE
from weft.operators.optimizer.rules import Options
from weft.optim.optimizer import OneLaunch
from weft.optim.options import check_range

SHARED = ("foreach", "fused", "weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")  # with PyTorch's


def plain(params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """By PyTorch's function, parameters that the kernels do not take."""
    momentum = bool(group["momentum"])
    begun = [not s or float(s.get("step", 1)) > 0 for s in states]
    buffers = [s["momentum_buffer"] if momentum and seen else None for s, seen in zip(states, begun, strict=True)]
    functional.sgd(params, grads, buffers, **{name: group[name] for name in SHARED})
    for state, buffer in zip(states, buffers, strict=True):
        if momentum:
            state["momentum_buffer"] = buffer
        if "step" in state:
            state["step"] += 1


class SGD(OneLaunch):
    """SGD with momentum, with the arguments, results and ``state_dict`` of ``torch.optim.SGD``.

    Args:
        params: tensors or groups, see :class:`OneLaunch`; so are the options.
        lr: learning rate; a float32 tensor on the device is read by the kernel, so a captured graph uses its current value.
        momentum: decay of the buffer; 0: there is none.
        dampening: the buffer takes 1 − that of the gradient, from the second step on. The state then has ``step`` too.
        weight_decay: that times the weight is added to the gradient.
        nesterov: go along the gradient and momentum times the new buffer.

    Raises:
        ValueError: options out of range.
    """

    rule = RULE
    plain = staticmethod(plain)
    may_lack = ("momentum_buffer", "step")  # torch.optim's has no steps, and no buffer before a momentum

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "nesterov": nesterov}, **options)

    def check(self, options: Options) -> None:
        super().check(options)
        check_range("momentum value", options["momentum"])
        dampening = options["dampening"]
        if isinstance(dampening, bool) or not isinstance(dampening, Real) or not math.isfinite(dampening):
            raise ValueError(f"Invalid dampening value: {dampening!r:.40}; expected a finite number")
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
