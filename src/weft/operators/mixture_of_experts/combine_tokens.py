"""``combine_tokens(y, position, weights)``: the weighted sum of each token's rows, where its experts left them."""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, eager, guarded, traced
from weft.operators.mixture_of_experts.dispatch import COMBINE, COMBINE_GRADIENT
from weft.operators.mixture_of_experts.reference import TOKEN_AXES, check_range, random_places, token_workloads
from weft.operators.random_inputs import drawn, random_tensor


def reference(y: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    return (gathered(y, position).to(wide) * weights.to(wide)[..., None]).sum(1).to(y.dtype)


def gathered(y: Tensor, position: Tensor) -> Tensor:
    """[T, k, D]: a position out of range is an error on a CPU, and undefined on a GPU."""
    return y.index_select(0, position.reshape(-1)).view(*position.shape, y.shape[1])


def torch_combine(y: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    """As a batched product, which writes no weighted rows."""
    return torch.bmm(weights.to(y.dtype)[:, None], gathered(y, position))[:, 0].to(y.dtype)


class Combine(KernelFunction):
    @staticmethod
    def forward(ctx: Any, y: Tensor, position: Tensor, weights: Tensor) -> Tensor:
        out = y.new_empty((position.shape[0], y.shape[1]))
        if out.numel():
            COMBINE.kernel("triton").of((y, position, weights))(y, position, weights, out)
        ctx.save_for_backward(y, position, weights)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, position, weights = ctx.saved_tensors
        rows, _, dots = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return reference_gradients(reference, (y, position, weights), (rows, False, dots), (dout,))
        dy = torch.empty(y.shape, dtype=y.dtype, device=y.device) if rows else None
        dweights = torch.empty(weights.shape, dtype=weights.dtype, device=y.device) if dots else None
        if not dout.numel():
            return dy, None, None if dweights is None else dweights.zero_()
        plan = COMBINE_GRADIENT.of((y, position, weights, dout), rows, dots)
        plan(y, position, weights, dout, dout if dy is None else dy, dout if dweights is None else dweights)
        return dy, None, dweights


def combine_tokens_triton(y: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    return differentiable(Combine, y, position, weights)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """y [T·K, D]; weights [T, K] in fp32, or in y's dtype with ``weights=same``."""
    t, k = w["T"], w["K"]
    y = drawn(w, g, device, t * k, w["D"])
    weights = random_tensor(g, (t, k), w.dtype if w.option("weights") == "same" else "fp32", device)
    return {"y": y, "position": random_places(g, t, k, device)[1], "weights": weights}


def cost(w: Workload, direction: str) -> Cost:
    t, k, d, size = w["T"], w["K"], w["D"], w.bytes_per_element
    pairs = t * k * (4 + (size if w.option("weights") == "same" else 4))
    if direction == "forward":
        return Cost(t * k * d * size + pairs, t * d * size, vector_flops=2 * t * k * d)
    return Cost((t * k + t) * d * size + pairs, t * k * d * size + pairs - 4 * t * k, vector_flops=3 * t * k * d)


def _gradients(dout: Tensor, y: Tensor, position: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    dy = torch.zeros_like(y, memory_format=torch.contiguous_format)
    rows = dout.float()[:, None] * weights.float()[..., None]
    dy[position.reshape(-1).long()] = rows.reshape(y.shape).to(y.dtype)
    return dy, (dout.float()[:, None] * gathered(y, position).float()).sum(-1).to(weights.dtype)


def forward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """How large the terms are: sums of random signs cancel."""
    y, position, weights = arguments.values()
    return [reference(y.square(), position, weights.square()).sqrt()]


def backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    y, position, weights = arguments.values()
    dy, dots = _gradients(gradients[0].square(), y.square(), position, weights.square())
    return [dy.sqrt(), dots.sqrt()]


def _unweighted_rows(dout: Tensor, y: Tensor, position: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return _gradients(dout, y, position, torch.ones_like(weights))[0], _gradients(dout, y, position, weights)[1]


combine_tokens = Operator(
    name="combine_tokens",
    axes=TOKEN_AXES,
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": ("contiguous", "unaligned", "sliced", "strided", "transposed"), "weights": ("fp32", "same")},
    differentiable=("y", "weights"),
    tolerance={
        "forward": Tolerance(scale=forward_scale, terms=lambda w: w["K"]),
        "backward": Tolerance(scale=backward_scale, terms=lambda w: 32),
    },
    workloads={
        **token_workloads(workload(T=9, K=5, D=33, weights="same")),
        "compile": [workload(T=4096, K=k, D=d) for k, d in ((2, 100), (8, 2048), (8, 5120))],
        "tune": [workload(t, T=2**14, K=8, D=d) for t in ("fp32", "bf16") for d in (1024, 2048, 4096, 8192)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("the last slot left out", lambda y, position, weights: reference(y, position[:, :-1], weights[:, :-1])),
        Mutant("weights of another slot", mutants.changed(reference, weights=lambda weights: weights.roll(1, 1))),
        *mutants.usual(_gradients, "backward"),
        Mutant("rows without their weight", _unweighted_rows, "backward"),
    ],
)

combine_tokens.implementation("triton", arch=">=sm_80")(combine_tokens_triton)
peers.register(combine_tokens, torch_combine, reference)


@combine_tokens.choice
@guarded
def choose(
    y: Tensor, position: Tensor, weights: Tensor, *, check_positions: bool = False, direction: str = "forward"
) -> Choice:
    choice = COMBINE.choose(y, position, weights)
    if (check_positions or position.device.type == "cpu") and not traced(position):
        check_range("combine_tokens", "position", position, y.shape[0])
    if direction == "backward" and choice.implementation != "torch":
        return COMBINE_GRADIENT.choose(y, position, weights, y, True, True)
    return choice


@combine_tokens.function
def combine_tokens_function(y: Tensor, position: Tensor, weights: Tensor, *, check_positions: bool = False) -> Tensor:
    """Each token's rows, weighted and added.

    Args:
        y: [T·k, D]: a row for each pair of token and slot; float32, float16 or bfloat16, any strides.
        position: [T, k] int32: the row of each pair, each row once, as ``route_top_k`` gives them.
        weights: [T, k]; float32 or y's dtype.
        check_positions: raise ValueError for a position out of range: waits for the device (on a CPU this is always checked).
            Without it such a token is NaN.

    Returns:
        [T, D] of y's dtype, summed in fp32 in the order of the slots.

    Raises:
        TypeError: tensors of other dtypes.
        ValueError: shapes or devices that do not fit, a position out of range (with ``check_positions``).

    Gradients of y and the weights, in one pass: dy[position] = weight · dout, dweight = y[position] · dout. Rows of y that
    no pair names have an undefined gradient, rows named twice that of one of the pairs.
    """
    tensors = (y, position, weights)
    ready = not check_positions and eager(*tensors, gradient=True, autocast=True) and COMBINE.of(tensors)
    ours = ready or choose(*tensors, check_positions=check_positions).implementation != "torch"
    return (combine_tokens_triton if ours else reference)(*tensors)
