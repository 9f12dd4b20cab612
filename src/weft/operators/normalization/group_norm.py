"""``group_norm(x, num_groups, weight, bias, eps)``: (x - mean) / sqrt(variance + eps) * weight + bias over groups of channels.

Forward compulsorily reads x and writes y; backward reads x and dy and writes dx (weight, bias and their gradients are a number
a channel each). Source: Wu & He 2018 (arXiv 1803.08494).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator
from weft.operators import peers
from weft.operators.call import (
    Choice,
    KernelFunction,
    check_device,
    check_tensor,
    differentiable,
    eager,
    guarded,
    on_gpu,
    reference_gradients,
    traced,
)
from weft.operators.launch import Plans, target_sm
from weft.operators.normalization import group_cluster, group_gradient
from weft.operators.normalization.group_definition import EPS, FIELDS, NAME, reference
from weft.operators.normalization.group_plans import backward_plans, forward_plans, taken_apart, view_of, why_not
from weft.operators.row_cluster import SHORTEST

# Elements of a group that a cluster takes on sm_90 and later, by itemsize: from 10240 it was measured to be faster (of fp32 up
# to 25088, and from 65536), at 2048 slower, of fp32 at 40960 too.
LONG = range(10240, 2**18 + 1)
BY_CLUSTER = {2: (LONG,), 4: (range(LONG.start, 2**15), range(2**16, LONG.stop))}
# The same of the gradient: what was measured; 16-bit floats at 262144 were not, fp32 is slower from 65536.
GRADIENT_BY_CLUSTER = {2: range(SHORTEST, 2**17 + 1), 4: range(SHORTEST, 2**16)}  # of an itemsize


# ---- the call ----------------------------------------------------------------------------------------------------------


def check(x: Any, num_groups: Any, weight: Any, bias: Any, eps: Any) -> None:
    """Raises TypeError or ValueError, naming the argument."""
    check_tensor(NAME, "x", x)
    if x.ndim < 2:
        raise ValueError(
            f"{NAME}: argument 'x' has shape {tuple(x.shape)}; expected [B, C, ...], at least two dimensions"
        )
    if isinstance(num_groups, bool) or not isinstance(num_groups, int):
        raise TypeError(f"{NAME}: argument 'num_groups' is {num_groups!r:.40}; expected an int")
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(
            f"{NAME}: argument 'num_groups' is {num_groups}; expected a positive divisor of {x.shape[1]}, the channels of 'x' "
            f"{tuple(x.shape)}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        check_tensor(NAME, name, value, tuple(dict.fromkeys((x.dtype, torch.float32))))
        check_device(NAME, name, value, "x", x)
        if tuple(value.shape) != (x.shape[1],):
            raise ValueError(
                f"{NAME}: argument '{name}' has shape {tuple(value.shape)}; expected ({x.shape[1]},), the channels of 'x' "
                f"{tuple(x.shape)}"
            )
    if weight is not None and bias is not None and bias.dtype != weight.dtype:
        raise TypeError(
            f"{NAME}: argument 'bias' has dtype {bias.dtype} and 'weight' has {weight.dtype}; expected the same dtype"
        )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= 3e38:
        raise ValueError(f"{NAME}: argument 'eps' is {eps!r}; expected a number of at least 0 that fp32 can hold")


def key(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors that are there: what a plan depends on."""
    return tuple(t for t in (x, weight, bias) if t is not None)


def dtype_of(x: Tensor) -> torch.dtype:
    """The result's: PyTorch computes this operator in fp32 under autocast. The kernels read x as it is and write that."""
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


def launch(
    plans: Plans, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, kept: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd); mean and rstd, fp32 [B * num_groups], only if ``kept``."""
    y = torch.empty_like(x, dtype=dtype_of(x))
    mean, rstd = x, x
    if kept:
        mean, rstd = torch.empty((2, x.shape[0] * num_groups), dtype=torch.float32, device=x.device).unbind(0)
    if y.numel():
        options = (num_groups, eps, weight is not None, bias is not None, kept, y.dtype)
        plan = plans.of(key(x, weight, bias), *options)
        plan(x, x if weight is None else weight, x if bias is None else bias, y, mean, rstd)
    return y, mean, rstd


def _autograd(forwards: Plans, backwards: Plans) -> type[torch.autograd.Function]:
    class Function(KernelFunction):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
        ) -> Tensor:
            y, mean, rstd = launch(forwards, x, num_groups, weight, bias, eps, any(ctx.needs_input_grad))
            ctx.num_groups, ctx.eps = num_groups, eps
            ctx.save_for_backward(x, weight, bias, mean, rstd)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, bias, mean, rstd = ctx.saved_tensors
            groups, wanted = ctx.num_groups, ctx.needs_input_grad
            if torch.is_grad_enabled():  # a gradient of the gradient is wanted
                call = (x, groups, weight, bias, ctx.eps)
                return reference_gradients(lambda x, *rest: reference(x.to(dy.dtype), *rest), call, wanted, (dy,))
            summed = wanted[2] or wanted[3]
            dx = torch.empty_like(x)
            like = weight if weight is not None else bias if bias is not None else x
            dweights = torch.empty((2, x.shape[1]), dtype=like.dtype, device=x.device)
            if not dx.numel():
                dweights.zero_()
            else:
                if view_of(dy) is None:  # autograd may bring one of any strides
                    dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
                plan = backwards.of((x, dy, like), groups, weight is not None, summed)
                plan(x, dy, x if weight is None else weight, mean, rstd, dx, dweights)
            return dx, None, dweights[0] if wanted[2] else None, dweights[1] if wanted[3] else None, None

    return Function


triton_function = _autograd(forward_plans, backward_plans)


def choose(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Choice:
    check(x, num_groups, weight, bias, eps)
    if not on_gpu(x):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if traced(*key(x, weight, bias)):
        return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
    if not x.numel():
        return Choice("torch", "an empty tensor: nothing to launch")
    if reason := why_not(x, num_groups):
        return Choice("torch", reason)
    n = x[0].numel() // num_groups
    if by_cluster(x, num_groups, weight, bias):
        return Choice(
            "cuda", f"{n} elements a group: a cluster of blocks holds them, which are read once", group_cluster.plans
        )
    return Choice("triton", f"{n} elements a group, one stride each for batch, channels and space", forward_plans)


def by_cluster(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the cluster kernel was measured to be the faster one, and takes these."""
    n = x[0].numel() // num_groups
    measured = target_sm(x.device) >= 90 and any(n in lengths for lengths in BY_CLUSTER[x.itemsize])
    return measured and not group_cluster.why_not(x, weight, bias, num_groups, dtype_of(x))


def gradient_by_cluster(x: Tensor, dy: Tensor, weight: Tensor | None, num_groups: int) -> bool:
    """The same of the gradient's."""
    measured = x[0].numel() // num_groups in GRADIENT_BY_CLUSTER[x.itemsize] and target_sm(x.device) >= 90
    return measured and not group_gradient.why_not(x, dy, weight, num_groups)


def _public_plan(*call: Any) -> Any:
    """None where PyTorch is called."""
    chosen = choose(*_arguments(*call))
    return None if chosen.plans is None else _plan(chosen.plans, *call)


def _fastest_plan(*call: Any) -> Any:
    x, num_groups, weight, bias, _ = _arguments(*call)
    return _plan(group_cluster.plans if by_cluster(x, num_groups, weight, bias) else forward_plans, *call)


def _fastest_gradient(*call: Any) -> Any:
    x, dy, like, num_groups, weighted, summed = call
    clusters = gradient_by_cluster(x, dy, like if weighted else None, num_groups)
    return (group_gradient.plans if clusters else backward_plans).of((x, dy, like), num_groups, weighted, summed)


def _arguments(*call: Any) -> tuple[Any, ...]:
    """A plan's arguments as the operator's."""
    x, weight, bias, num_groups, eps, _ = taken_apart(*call)
    return x, num_groups, weight, bias, eps


def _plan(plans: Plans, *call: Any) -> Any:
    tensors = tuple(a for a in call if isinstance(a, Tensor))
    return plans.of(tensors, *call[len(tensors) :])


public_plans = Plans(_public_plan)
fastest_function = _autograd(Plans(_fastest_plan), Plans(_fastest_gradient))
cuda_function = _autograd(group_cluster.plans, backward_plans)
gradient_function = _autograd(forward_plans, group_gradient.plans)


def group_norm_triton(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    if not on_gpu(x):
        return reference(x, num_groups, weight, bias, eps)
    y: Tensor = differentiable(triton_function, x, num_groups, weight, bias, eps)
    return y


def group_norm_cuda(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    if not x.numel():
        raise Declined("an empty tensor")
    y: Tensor = differentiable(cuda_function, x, num_groups, weight, bias, eps)
    return y


def group_norm_cuda_gradient(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    if not x.numel():
        raise Declined("an empty tensor")
    y: Tensor = differentiable(gradient_function, x, num_groups, weight, bias, eps)
    return y


def torch_group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    if weight is None and bias is not None:
        raise Declined("PyTorch has no gradient of a bias without a weight")
    return torch.group_norm(x, num_groups, weight, bias, eps)


def liger(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    if weight is None or bias is None:
        raise Declined("Liger's GroupNorm has a weight and a bias")
    space = x.flatten(2) if x.ndim > 2 else x[..., None]
    y: Tensor = LigerGroupNormFunction.apply(space, weight, bias, x.shape[1], num_groups, eps)
    return y.view(x.shape)


# ---- what users call -------------------------------------------------------------------------------------------------

group_norm = Operator(**FIELDS)

group_norm.choice(guarded(choose))
group_norm.implementation("triton", arch=">=sm_80")(group_norm_triton)
group_norm.implementation("cuda", arch=">=sm_90", devices=("cuda",), directions=("forward",))(group_norm_cuda)
group_norm.implementation("cuda-gradient", backend="cuda", arch=">=sm_90", devices=("cuda",), directions=("backward",))(
    group_norm_cuda_gradient
)
group_norm.implementation("torch")(torch_group_norm)
group_norm.implementation("torch.compile", devices=("cuda",))(peers.Compiled(torch_group_norm))
group_norm.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)


@group_norm.function
def group_norm_function(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Group normalisation: ``(x - mean) / sqrt(variance + eps) * weight + bias``, statistics over a group of channels.

    Args:
        x: [B, C, ...], any spatial dimensions or none; float32, float16 or bfloat16.
        num_groups: a divisor of C; a group is C / num_groups channels of one batch entry. C gives instance normalisation.
        weight: [C], of x's dtype or float32; None for none.
        bias: [C], of the same; None for none.
        eps: added to the variance (of n terms, not n - 1).

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once. Under autocast it is float32, as that of
        ``torch.nn.functional.group_norm``. It lies in memory as x does where x is dense (channels_last stays).

    Raises:
        TypeError: not tensors of those dtypes, a num_groups that is no int.
        ValueError: fewer than two dimensions, a num_groups that does not divide C, a weight or bias of another length or
            device, a negative eps.

    Backward saves x, the weight and two numbers a group; the gradients of weight and bias are summed in fp32 in a fixed
    order, so they are deterministic. Source: Wu & He 2018 (arXiv 1803.08494).
    """
    tensors = (x, *(t for t in (weight, bias) if t is not None))
    if all(isinstance(t, Tensor) for t in tensors) and eager(*tensors, gradient=True, autocast=True):
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        options = (num_groups, eps, weight is not None, bias is not None, wanted, dtype_of(x))
        if (ready := public_plans.of(tensors, *options)) is not None:
            if wanted:
                y: Tensor = fastest_function.apply(x, num_groups, weight, bias, eps)
                return y
            y = torch.empty_like(x, dtype=options[-1])
            ready(x, x if weight is None else weight, x if bias is None else bias, y, x, x)
            return y
    if choose(x, num_groups, weight, bias, eps).implementation == "torch":
        return reference(x, num_groups, weight, bias, eps)
    y = differentiable(fastest_function, x, num_groups, weight, bias, eps)
    return y
