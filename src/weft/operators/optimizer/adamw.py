"""``adamw(params, grads, exp_avgs, exp_avg_sqs, steps, …)``: Adam with decoupled weight decay: the same kernels."""

from collections.abc import Sequence

from torch import Tensor

from weft.definition import Operator
from weft.operators.optimizer import adam

adamw = Operator(name="adamw", **adam.definition(decoupled=True))
step = adam.register(adamw, decoupled=True)


@adamw.function
def adamw_function(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], max_exp_avg_sqs: Sequence[Tensor] | None = None, lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2, maximize: bool = False,
) -> None:  # fmt: skip
    """One step of AdamW in place, one launch for all tensors; :class:`weft.optim.AdamW` is the optimizer.

    Args:
        weight_decay: decoupled: the weight loses ``lr * weight_decay`` of itself. All others: see ``weft.ops.adam``.

    Returns:
        None: weights, moments and steps are changed in place.

    Raises:
        TypeError, ValueError: as ``weft.ops.adam``.

    Source: Loshchilov & Hutter 2019.
    """
    step(params, grads, exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs, lr, betas, eps, weight_decay, maximize)
