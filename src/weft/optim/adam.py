"""``Adam`` and ``AdamW``, in place of ``torch.optim``'s."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import adam as functional

from weft.operators.optimizer.rules import ADAM, Options
from weft.optim.optimizer import OneLaunch
from weft.optim.options import check_betas, check_range

SHARED = ("lr", "weight_decay", "eps", "amsgrad", "maximize")  # options that PyTorch's function takes as they are
FLAGS = ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


def plain(params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]) -> None:
    """By PyTorch's function, parameters that the kernels do not take."""
    functional.adam(
        params,
        grads,
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else [],
        [s["step"] for s in states],
        has_complex=any(map(torch.is_complex, params)),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        **{name: group[name] for name in (*SHARED, *FLAGS)},
    )


class Adam(OneLaunch):
    """Adam (Kingma & Ba 2015), with the arguments, results and ``state_dict`` of ``torch.optim.Adam``.

    Args:
        params: tensors or groups, see :class:`OneLaunch`; so are the options.
        lr: learning rate; a float32 tensor on the device is read by the kernel, so a captured graph uses its current value.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: that times the weight is added to the gradient.
        decoupled_weight_decay: lr times weight_decay is taken from the weight instead, as AdamW does.
        amsgrad: divide by the largest second moment so far (Reddi, Kale & Kumar 2018).

    Raises:
        ValueError: options out of range.
    """

    rule = ADAM
    plain = staticmethod(plain)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        defaults |= {"decoupled_weight_decay": decoupled_weight_decay, **self.own_defaults()}
        super().__init__(params, defaults, **options)

    def own_defaults(self) -> dict[str, Any]:
        """Options of groups that a subclass adds."""
        return {}

    def check(self, options: Options) -> None:
        super().check(options)
        check_range("epsilon value", options["eps"])
        check_betas(options["betas"])


class DecoupledDecay(Adam):
    """Adam with AdamW's weight decay, always."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{**options, "decoupled_weight_decay": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True  # whatever was loaded


class AdamW(DecoupledDecay):
    """AdamW (Loshchilov & Hutter 2019), with the arguments, results and ``state_dict`` of ``torch.optim.AdamW``.

    Args:
        weight_decay: lr times that is taken from the weight. All others: see :class:`Adam`.
    """
