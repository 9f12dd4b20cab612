"""``group_norm(x, num_groups, weight, bias, eps)``: (x - mean) / sqrt(variance + eps) * weight + bias over groups of channels.

Forward compulsorily reads x and writes y; backward reads x and dy and writes dx (weight, bias and their gradients are a number
a channel each). Source: Wu & He 2018 (arXiv 1803.08494).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, eager, guarded, on_gpu
from weft.operators.contiguous import contiguous
from weft.operators.launch import Plans
from weft.operators.normalization.group_norm.dispatch import BACKWARD, FORWARD, NAME, in_slivers, view_of, views_of
from weft.operators.random_inputs import LAYOUTS, VALUES, drawn, random_tensor

EPS = 1e-5


def reference(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """PyTorch's, but for what that does not do: weight and bias of another dtype than x's, and gradients of a bias without a
    weight, or of no elements (which are 0)."""
    if not x.numel():
        return (x * _of_channels(x, weight) + _of_channels(x, bias)).to(x.dtype)
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    if all(t is None or t.dtype == x.dtype for t in (weight, bias)) or torch.is_autocast_enabled(x.device.type):
        return torch.group_norm(x, num_groups, weight, bias, eps)
    w, b = (None if t is None else t.float() for t in (weight, bias))
    return torch.group_norm(x.float(), num_groups, w, b, eps).to(x.dtype)


def _of_channels(x: Tensor, t: Tensor | None) -> Any:
    """A weight as it multiplies x; 1 for none."""
    return 1.0 if t is None else t.view(-1, *(1,) * (x.ndim - 2))


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [B, C, S], with height=H [B, C, H, S / H], with S=1 and flat=True [B, C]; weight and bias are [C]."""
    b, c, s, height = w["B"], w["C"], w["S"], w.option("height", 0)
    if height and s % height:
        raise ValueError(f"workload '{w}' of '{NAME}': height is {height}; expected a divisor of S")
    if c % w["G"]:
        raise ValueError(f"workload '{w}' of '{NAME}': C is {c}; expected a multiple of G")
    shape = (b, c) if w.option("flat", False) and s == 1 else (b, c, height, s // height) if height else (b, c, s)
    x = drawn(w, g, device, *shape)
    if w.option("offset", 0):
        x += w.option("offset", 0)

    def channels(given: bool) -> Tensor | None:
        made = random_tensor(g, (c,), w.dtype, device, layout=w.option("weight_layout", "contiguous"))
        return made if given else None

    weight, bias = channels(w.option("weight", True)), channels(w.option("bias", True))
    return {"x": x, "num_groups": w["G"], "weight": weight, "bias": bias, "eps": EPS}


def cost(w: Workload, direction: str) -> Cost:
    n, size = w["B"] * w["C"] * w["S"], w["B"] * w["C"] * w["S"] * w.bytes_per_element
    weight, bias = (w["C"] * w.bytes_per_element * w.option(name, True) for name in ("weight", "bias"))
    roots = 2 * w["B"] * w["G"]
    if direction == "forward":
        return Cost(size + weight + bias, size, vector_flops=6 * n, special_ops=roots)
    return Cost(2 * size + weight, size + weight + bias, vector_flops=12 * n, special_ops=roots)


def _terms(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """x - mean and 1 / deviation, how large the terms of the former are (they may cancel; a mean of n random terms errs by
    about as much as one of their root mean square / sqrt(n)), and the mean over a group."""
    x, groups = arguments["x"], arguments["num_groups"]

    def mean(t: Tensor) -> Tensor:
        grouped = t.reshape(t.shape[0], groups, t.shape[1] // groups, *t.shape[2:])
        return grouped.mean(tuple(range(2, grouped.ndim)), keepdim=True).expand(grouped.shape).reshape(t.shape)

    h = x - mean(x)
    terms = mean(x.square()) / max(x[0].numel() // groups, 1) if x.numel() else x
    size = x.abs() + mean(x).abs().maximum(terms.sqrt())
    return h, torch.rsqrt(mean(h.square()) + arguments["eps"]), size, mean


def _forward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    _, rstd, size, _ = _terms(arguments)
    bias = arguments["bias"]
    y = size * rstd * abs(_of_channels(size, arguments["weight"]))
    return [y if bias is None else y + abs(_of_channels(size, bias))]


def _backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """Of dx, and of the weight's and the bias's gradient: sums with random signs."""
    h, rstd, size, mean = _terms(arguments)
    (dy,) = gradients
    g = dy * _of_channels(dy, arguments["weight"])
    shifted = mean(g * h * rstd).abs() + (h * rstd * mean(g)).abs()  # what an error of xhat is multiplied by
    found = [rstd * (mean(g.square()).sqrt() + size * rstd * shifted)]
    space = (0, *range(2, dy.ndim))
    if arguments["weight"] is not None:
        found.append((dy * size * rstd).square().sum(space).sqrt())
    if arguments["bias"] is not None:
        found.append(dy.square().sum(space).sqrt())
    return found


_gradient = mutants.gradient_of(reference, "x", "weight", "bias")


def _weights_of(channels: Tensor, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments, each channel with the weight and bias of another one."""
    return {**named, **{a: named[a][channels] for a in ("weight", "bias") if named[a] is not None}}


def _first_groups_weights(**named: Any) -> Tensor:
    """Every group takes the first group's weights."""
    channels = torch.arange(named["x"].shape[1], device=named["x"].device)
    return reference(**_weights_of(channels % (len(channels) // named["num_groups"]), named))


def _interleaved(**named: Any) -> Tensor:
    """Channel c in group c % num_groups."""
    x, groups = named["x"], named["num_groups"]
    order = torch.arange(x.shape[1], device=x.device).view(-1, groups).t().flatten()
    return reference(**{**_weights_of(order, named), "x": x[:, order]})[:, order.argsort()]


def _unbiased(**named: Any) -> Tensor:
    """The variance divided by one less than the number of elements."""
    x, bias = named["x"], named["bias"]
    n = x[0].numel() // named["num_groups"] if x.numel() else 2
    y = reference(**{**named, "bias": None}) * ((n - 1) / max(n, 1)) ** 0.5
    return y if bias is None else y + _of_channels(x, bias)


def _no_projection(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    """The gradient as if the statistics were constants."""
    _, *rest = _gradient(dy, **named)
    _, rstd, _, _ = _terms({**named, "x": named["x"].float()})
    return (dy * _of_channels(dy, named["weight"]) * rstd).to(dy.dtype), *rest


def _last_batch_left_out(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    """Of the gradients of weight and bias."""
    dx, *rest = _gradient(dy, **named)
    if not rest or len(dy) < 2:
        return (dx, *rest)
    return (dx, *_gradient(dy[:-1], **{**named, "x": named["x"][:-1]})[1:])


def _by_channel(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    """dx with the means of each channel instead of the group."""
    dx = _gradient(dy, **{**named, "num_groups": named["x"].shape[1]})[0]
    return dx, *_gradient(dy, **named)[1:]


points = functools.partial(workloads, "BCGS")
TUNED = (64, 256, *(2**e for e in range(10, 21)))  # elements of a group
CHANNELS_OF_TUNED = (1, 4, 4, 8, 16, 32, 64, 32, 16, 32, 16, 8, 4)

group_norm = Operator(
    name=NAME,
    axes={"B": "batch", "C": "channels", "G": "groups", "S": "space"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    differentiable=("x", "weight", "bias"),
    options={
        "layout": LAYOUTS,
        "values": VALUES,
        "weight": (True, False),
        "bias": (True, False),
        "weight_layout": LAYOUTS,
        "offset": range(1, 2**20),
        "height": range(1, 2**31),
        "flat": (True, False),
    },
    tolerance={
        "forward": Tolerance(scale=_forward_scale, ulps=2.0),
        "backward": Tolerance(scale=_backward_scale, terms=lambda w: 32),
    },
    workloads={
        "verify": [
            *points((1, 1, 1, 1), (2, 6, 3, 5), (3, 8, 2, 16), (5, 4, 4, 100), (3, 4, 1, 49), (40, 12, 3, 2)),
            *points((0, 4, 2, 7), (3, 4, 2, 0)),
            *points((7, 12, 3, 1), flat=True),
            *(point for layout in LAYOUTS[1:] for point in points((3, 6, 2, 20), layout=layout)),
            *points((2, 6, 3, 35), height=5),
            *points((2, 6, 3, 40), weight=False),
            *points((2, 6, 3, 40), bias=False),
            *points((2, 6, 3, 40), weight=False, bias=False),
            *points((2, 6, 3, 40), weight_layout="strided"),
            *points((3, 8, 2, 75), offset=100),
            *points((3, 8, 2, 16), values="tiny"),
            *points((9, 16, 8, 10), values="nonfinite"),
            # in parts
            *points((1, 6, 2, 300), (2, 70, 1, 15)),
            *points((2, 3, 1, 300), layout="transposed"),
            *points((2, 3, 1, 301), layout="sliced"),
            *points((1, 2, 2, 600), values="nonfinite"),
            *points((1, 2, 1, 1500), offset=100),
            *points((1, 4, 2, 20480)),
        ],
        "full": [
            *points((2, 320, 32, 4096), (3, 640, 32, 1024), (3, 1280, 32, 64), (70, 64, 8, 49), (2, 128, 32, 2**16)),
            *points((1, 3, 1, 2**20 + 7), (2, 1024, 1, 1000), (5000, 64, 4, 1)),
            *points((2, 320, 32, 4096), layout="transposed"),
            *points((2, 320, 32, 4096), offset=100),
            *points((4, 320, 32, 1024), (2, 960, 32, 4096), values="nonfinite"),
        ],
        "huge": points((2**10 + 1, 512, 32, 2**12), (1, 2, 1, 2**30 + 9), (2**21 + 3, 33 * 2**5, 32, 1), dtype="bf16"),
        "bench": [
            # feature maps of a latent diffusion model's U-Net, its decoder, ResNet-50, and many short groups
            *points((64, 320, 32, 64**2), (128, 640, 32, 32**2), (256, 1280, 32, 16**2), (64, 960, 32, 64**2)),
            *points((32, 512, 32, 128**2), (4, 256, 32, 512**2), (8, 128, 32, 512**2)),
            *points((256, 256, 32, 56**2), (4096, 256, 32, 16**2), (64, 64, 64, 256**2)),
        ],
        "small": points((2, 320, 32, 64**2), (2, 1280, 32, 8**2), (1, 128, 32, 512**2)),
        "quick": points((8, 320, 32, 4096), (8, 128, 32, 2**14)),
        "host": points((2, 64, 32, 256)),
        "compile": [
            *points((64, 320, 32, 4096), (64, 512, 32, 64), (64, 128, 32, 49), (64, 128, 32, 2**18), (64, 2048, 32, 1)),
            *points((64, 320, 32, 4096), layout="transposed"),
        ],
        "tune": [
            workload(d, B=2**27 // (32 * n), C=32 * c, G=32, S=n // c)
            for d in ("fp32", "bf16")
            for n, c in zip(TUNED, CHANNELS_OF_TUNED, strict=True)
        ],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("one group", lambda **named: reference(**{**named, "num_groups": 1})),
        Mutant("a group a channel", lambda **named: reference(**{**named, "num_groups": named["x"].shape[1]})),
        Mutant("channels interleaved", _interleaved),
        Mutant("weights of the first group", _first_groups_weights),
        Mutant("bias left out", lambda **named: reference(**{**named, "bias": None})),
        Mutant("variance of n - 1", _unbiased),
        *mutants.usual(_gradient, "backward"),
        Mutant("projection left out", _no_projection, "backward"),
        Mutant("means of a channel", _by_channel, "backward"),
        Mutant("last batch entry left out of dw", _last_batch_left_out, "backward"),
    ],
)

# ---- the call ----------------------------------------------------------------------------------------------------------

Kernels = tuple[Plans, Plans]  # that make the plans of forward and of backward


def dtype_of(x: Tensor) -> torch.dtype:
    """The result's: PyTorch computes this operator in fp32 under autocast. The kernels read x as it is and write that."""
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


def present(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    """The tensors that are there: what a plan depends on."""
    return (x, *(t for t in (weight, bias) if t is not None))


def one_in_slivers(x: Tensor, dy: Tensor, groups: int) -> bool:
    """Whether channels are adjacent in one of them alone, and those of a group fill no sector."""
    if not in_slivers(x, groups):
        return False
    v, of_dy = views_of(x, dy)
    return {(v.c, v.s) == (1, v.C), (of_dy.c, of_dy.s) == (1, v.C)} == {True, False} and 1 in (v.s, of_dy.s)


def by_channels(t: Tensor) -> Tensor:
    """t, or a contiguous copy if its channels are adjacent."""
    return t if t.stride(1) != 1 else contiguous(t.flatten(2)).view(t.shape)


class GroupNorm(KernelFunction):
    """Group normalisation under autograd, by kernels that ``kernels`` makes the plans of."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, num_groups: int, *affine: Any) -> Tensor:
        weight, bias, eps = affine
        y = torch.empty_like(x, dtype=dtype_of(x))
        saved, mean, rstd = any(ctx.needs_input_grad), x, x
        if saved:
            mean, rstd = torch.empty((2, x.shape[0] * num_groups), dtype=torch.float32, device=x.device).unbind(0)
        if y.numel():
            options = (num_groups, eps, weight is not None, bias is not None, saved, y.dtype)
            plan = kernels[0].of(present(x, weight, bias), *options)
            if plan is None:
                raise Declined(choose(x, num_groups, weight, bias, eps).reason)
            plan(x, x if weight is None else weight, x if bias is None else bias, y, mean, rstd)
        ctx.kernels, ctx.num_groups, ctx.eps = kernels, num_groups, eps
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        groups, wanted = ctx.num_groups, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            call = (x, groups, weight, bias, ctx.eps)
            return None, *reference_gradients(lambda x, *rest: reference(x.to(dy.dtype), *rest), call, wanted, (dy,))
        summed = wanted[2] or wanted[3]
        dx = torch.empty_like(x)
        like = weight if weight is not None else bias if bias is not None else x
        dweights = torch.empty((2, x.shape[1]), dtype=like.dtype, device=x.device)
        if not dx.numel():
            dweights.zero_()
        else:
            if view_of(dy) is None:  # autograd may bring one of any strides
                dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
            elif one_in_slivers(x, dy, groups):
                x, dy = by_channels(x), by_channels(dy)
                dx = torch.empty_like(x)
            plan = ctx.kernels[1].of((x, dy, like), groups, weight is not None, summed)
            plan(x, dy, x if weight is None else weight, mean, rstd, dx, dweights)
        return None, dx, None, dweights[0] if wanted[2] else None, dweights[1] if wanted[3] else None, None


# of a name: forward alone, forward before a gradient, backward
NAMED = {
    "triton": (FORWARD.kernel("triton"), FORWARD.kernel("triton"), BACKWARD.kernel("triton")),
    "cuda": (FORWARD.kernel("cuda"), FORWARD, BACKWARD.kernel("cuda")),
}


def by_kernel(
    kernel: str, x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    if not on_gpu(x):
        return reference(x, num_groups, weight, bias, eps)
    alone, before_backward, backward = NAMED[kernel]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in present(x, weight, bias))
    kernels = (before_backward if wanted else alone, backward)
    return differentiable(GroupNorm, kernels, x, num_groups, weight, bias, eps)


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


group_norm.implementation("triton", arch=">=sm_80")(functools.partial(by_kernel, "triton"))
group_norm.implementation("cuda", arch=">=sm_90")(functools.partial(by_kernel, "cuda"))
peers.register(group_norm, torch_group_norm)
group_norm.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)


@group_norm.choice
@guarded
def choose(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS,
    direction: str = "forward",
) -> Choice:  # fmt: skip
    options = (num_groups, eps, weight is not None, bias is not None, False)
    dtype = dtype_of(x) if isinstance(x, Tensor) else None
    forward = FORWARD.choose(*present(x, weight, bias), *options, dtype)
    if direction == "forward" or forward.implementation == "torch":
        return forward
    like = weight if weight is not None else bias if bias is not None else x
    return BACKWARD.choose(x, torch.empty_like(x, dtype=dtype), like, num_groups, weight is not None, True)


@group_norm.function
def group_norm_function(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
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
        ``torch.nn.functional.group_norm``. It has x's strides where x is dense (channels_last too).

    Raises:
        TypeError: not tensors of those dtypes, a num_groups that is no int.
        ValueError: fewer than two dimensions, a num_groups that does not divide C, a weight or bias of another length or
            device, a negative eps.

    Backward saves x, the weight and two numbers a group; the gradients of weight and bias are summed in fp32 in a fixed
    order, so they are deterministic. Source: Wu & He 2018 (arXiv 1803.08494).
    """
    tensors = present(x, weight, bias)
    if all(isinstance(t, Tensor) for t in tensors) and eager(*tensors, gradient=True, autocast=True):
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        options = (num_groups, eps, weight is not None, bias is not None, wanted, dtype_of(x))
        if (ready := FORWARD.of(tensors, *options)) is not None:
            if wanted:
                return GroupNorm.apply((FORWARD, BACKWARD), x, num_groups, weight, bias, eps)
            y = torch.empty_like(x, dtype=options[-1])
            ready(x, x if weight is None else weight, x if bias is None else bias, y, x, x)
            return y
    if choose(x, num_groups, weight, bias, eps).implementation == "torch":
        return reference(x, num_groups, weight, bias, eps)
    return differentiable(GroupNorm, (FORWARD, BACKWARD), x, num_groups, weight, bias, eps)
