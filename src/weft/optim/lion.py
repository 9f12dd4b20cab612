"""``Lion``, over the rule and the reference of the operator."""

from typing import Any

from torch import Tensor

from weft.operators.optimizer.lion import reference
from weft.operators.optimizer.rules import LION, Options
from weft.optim.optimizer import OneLaunch
from weft.optim.options import check_betas


def plain(params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """In PyTorch, parameters that the kernels do not take."""
    options = {name: group[name] for name in ("lr", "betas", "weight_decay", "maximize")}
    reference(params, grads, [s["exp_avg"] for s in states], **options)


class Lion(OneLaunch):
    """Lion (Chen et al. 2023): every weight moves by the learning rate, along the sign of an averaged gradient.

    Args:
        params: tensors or groups, see :class:`OneLaunch`.
        lr: learning rate, a third to a tenth of AdamW's; a float32 tensor on the device is read by the kernel.
        betas: decay of the moment in the direction, and in the new moment.
        weight_decay: lr times that is taken from the weight.
        options: those of :class:`OneLaunch`.

    Raises:
        ValueError: options out of range.
    """

    rule = LION
    plain = staticmethod(plain)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)

    def check(self, options: Options) -> None:
        super().check(options)
        check_betas(options["betas"])
