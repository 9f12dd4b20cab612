"""``permute_tokens(x, source)``: the rows that experts work on, side by side."""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, eager, guarded, traced
from weft.operators.mixture_of_experts.dispatch import PERMUTE, PERMUTE_GRADIENT, gathered, token_sums
from weft.operators.mixture_of_experts.reference import TOKEN_AXES, check_range, random_places, token_workloads
from weft.operators.random_inputs import LAYOUTS, drawn


def reference(x: Tensor, source: Tensor, position: Tensor | None = None) -> Tensor:
    """Its gradient is summed in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.index_select(0, source).to(x.dtype)


def torch_permute(x: Tensor, source: Tensor, position: Tensor | None = None) -> Tensor:
    return x.index_select(0, source)


class Permute(KernelFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, position: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, source, position)
        return gathered(x, source)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, source, position = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *reference_gradients(lambda t: reference(t, source), (x,), (True,), (dy,)), None, None
        return token_sums(dy, source, position, x.shape[0]), None, None


def permute_tokens_triton(x: Tensor, source: Tensor, position: Tensor | None = None) -> Tensor:
    return differentiable(Permute, x, source, position)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [T, D], each token K times; ``position=False`` leaves the inverse out."""
    x = drawn(w, g, device, w["T"], w["D"])
    source, position = random_places(g, w["T"], w["K"], device)
    return {"x": x, "source": source, "position": position if w.option("position", True) else None}


def cost(w: Workload, direction: str) -> Cost:
    t, k, d, size = w["T"], w["K"], w["D"], w.bytes_per_element
    rows, tokens, indices = t * k * d * size, t * d * size, t * k * 4
    if direction == "forward":
        return Cost(tokens + indices, rows, vector_flops=t * k)
    return Cost(rows + indices, tokens, vector_flops=t * k * d)


def _gradient(dy: Tensor, x: Tensor, source: Tensor, position: Tensor | None = None) -> tuple[Tensor]:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return (total.index_add_(0, source, dy.float()).to(x.dtype),)


def _terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """How large the terms are: sums of random signs cancel."""
    x, source = arguments["x"], arguments["source"]
    return [torch.zeros_like(x).index_add_(0, source, gradients[0].square()).sqrt()]


def _last_once(dy: Tensor, x: Tensor, source: Tensor, position: Tensor | None = None) -> tuple[Tensor]:
    """A token's rows overwrite each other instead of being added."""
    out = torch.zeros_like(x)
    out[source.long()] = dy
    return (out,)


permute_tokens = Operator(
    name="permute_tokens",
    axes=TOKEN_AXES,
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": LAYOUTS, "position": (False, True)},
    differentiable=("x",),
    tolerance={"forward": Tolerance(exact=True), "backward": Tolerance(scale=_terms, terms=lambda w: 32)},
    workloads={
        **token_workloads(workload(T=20, K=4, D=33, position=False)),
        "compile": [workload(T=4096, K=4, D=2048, position=p) for p in (True, False)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("the next token", lambda x, source, position=None: reference(x, (source + 1) % max(x.shape[0], 1))),
        *mutants.usual(_gradient, "backward"),
        Mutant("rows overwrite each other", _last_once, "backward"),
    ],
)

permute_tokens.implementation("triton", arch=">=sm_80")(permute_tokens_triton)
peers.register(permute_tokens, torch_permute)


@permute_tokens.choice
@guarded
def choose(
    x: Tensor, source: Tensor, position: Tensor | None = None, *, check_source: bool = False, direction: str = "forward"
) -> Choice:
    more = () if position is None else (position,)
    choice = PERMUTE.choose(x, source, *more)
    if (check_source or source.device.type == "cpu") and not traced(source):
        check_range("permute_tokens", "source", source, x.shape[0])
    if direction == "backward" and choice.implementation != "torch":
        return PERMUTE_GRADIENT.choose(x, source, x, *more)
    return choice


@permute_tokens.function
def permute_tokens_function(
    x: Tensor, source: Tensor, position: Tensor | None = None, *, check_source: bool = False
) -> Tensor:
    """The rows of x in the order of their experts.

    Args:
        x: [T, D]; float32, float16 or bfloat16, any strides.
        source: [R] int32: the token at each place, as ``route_top_k`` gives them.
        position: [T, k] int32 with T·k = R: the places of each token, for the gradient; without it ``source`` is sorted
            there.
        check_source: raise ValueError for a token out of range: waits for the device (on a CPU this is always
            checked). Without it such a row is NaN.

    Returns:
        [R, D] of x's dtype.

    Raises:
        TypeError: tensors of other dtypes.
        ValueError: shapes or devices that do not fit, a token out of range (with ``check_source``).

    The gradient sums a token's rows in fp32 in a fixed order.
    """
    tensors = (x, source) if position is None else (x, source, position)
    ready = not check_source and eager(*tensors, gradient=True, autocast=True) and PERMUTE.of(tensors)
    ours = ready or choose(x, source, position, check_source=check_source).implementation != "torch"
    return (permute_tokens_triton if ours else reference)(x, source, position)
