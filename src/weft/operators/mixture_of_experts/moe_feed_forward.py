"""``moe_feed_forward(x, router, w_gate_up, w_down, k)``: a mixture-of-experts layer, each token through k of E
feed-forward networks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, cast_for_products, guarded
from weft.operators.checks import check_same, check_shape, check_tensor
from weft.operators.hopper.gemm import ON_HOPPER
from weft.operators.mixture_of_experts import combine_tokens as combining
from weft.operators.mixture_of_experts import grouped_matmul as grouping
from weft.operators.mixture_of_experts import route_top_k as routing
from weft.operators.mixture_of_experts.dispatch import GROUPED, GROUPED_WEIGHT_GRADIENT
from weft.operators.mixture_of_experts.reference import check_bias, check_choice, check_matrix
from weft.operators.random_inputs import random_tensor


def layer(route: Callable[..., Any], product: Callable[..., Tensor], combine: Callable[..., Tensor]) -> Any:
    """The layer of its three parts. Weights are computed in fp32 from logits in x's dtype."""

    def feed_forward(x: Tensor, router: Tensor, w_gate_up: Tensor, w_down: Tensor, k: int, **options: Any) -> Tensor:
        logits = F.linear(x, router)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        weights, _, offsets, source, position = route(logits, k, **options)
        hidden = product(x, w_gate_up, offsets, source=source, position=position, activation="swiglu")
        y = product(hidden, w_down, offsets)
        return combine(y, position, weights)

    return feed_forward


reference = layer(routing.reference, grouping.reference, combining.reference)
by_kernels = functools.partial(layer, routing.route_top_k_triton, combine=combining.combine_tokens_triton)
torch_layer = layer(routing.reference, grouping.cublas_loop, combining.torch_combine)
grouped_mm_layer = layer(routing.reference, grouping.torch_grouped_mm, combining.torch_combine)
through_public_functions = layer(
    routing.route_top_k_function, grouping.grouped_matmul_function, combining.combine_tokens_function
)


LEAVES = ("x", "router", "w_gate_up", "w_down")
DRAWN = 8  # tokens drawn for each that is kept


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Experts' loads follow a Zipf law, by a column of ones in x. Of ``DRAWN`` times as many tokens x has those whose k-th and
    next logit lie furthest apart: rounding must not choose other experts than float64 does."""
    (t, e, d, h), k = (w[a] for a in "TEDH"), w.option("k", 2)
    router = random_tensor(g, (e, d), w.dtype, device)
    w_gate_up = random_tensor(g, (e, 2 * h, d), w.dtype, device)
    w_down = random_tensor(g, (e, d, h), w.dtype, device)
    if device == "meta":
        x = random_tensor(g, (t, d), w.dtype, device)
    else:
        for weight in (router, w_gate_up, w_down):
            weight /= max(weight.shape[-1], 1) ** 0.5
        router[:, 0] = -torch.arange(1, e + 1, device=device).log()
        x = random_tensor(g, (DRAWN * t, d), w.dtype, device)
        x[:, 0] = 1
        if k < e:
            best = F.linear(x.float(), router.float()).topk(k + 1).values
            x = x[(best[:, k - 1] - best[:, k]).topk(t, sorted=False).indices]
        x = x[:t].contiguous()
    return {"x": x, "router": router, "w_gate_up": w_gate_up, "w_down": w_down, "k": k, **routing.weighing(w)}


def cost(w: Workload, direction: str) -> Cost:
    (t, e, d, h), k = (w[a] for a in "TEDH"), w.option("k", 2)
    size = w.bytes_per_element
    weights = (min(e, t * k) * 3 * h * d + e * d) * size
    flops = 6.0 * t * k * d * h + 2.0 * t * d * e
    if direction == "forward":
        return Cost(t * d * size + weights, t * d * size, {w.dtype: flops}, special_ops=t * (e + k * h))
    written = (t * d + e * 3 * h * d + e * d) * size
    return Cost(2 * t * d * size + weights, written, {w.dtype: 2 * flops}, special_ops=t * (e + k * h))


def backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """The root mean square of each gradient, without the zeros of experts that no token goes to."""
    options = {name: value for name, value in arguments.items() if name not in LEAVES}
    chosen = routing.reference(F.linear(arguments["x"], arguments["router"]), **options)
    dx, *of_experts = mutants.gradient_of(reference, *LEAVES)(gradients[0], **arguments)
    used = float((chosen.offsets.diff() > 0).double().mean())
    elements = (dx.numel(), *(dw.numel() * used for dw in of_experts))
    return [torch.linalg.vector_norm(t) / max(n, 1) ** 0.5 for t, n in zip((dx, *of_experts), elements, strict=True)]


def _router_without_gradient(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    """Weights as if they were constants."""
    detached = layer(
        lambda *a, **n: (f := routing.reference(*a, **n))._replace(weights=f.weights.detach()),
        grouping.reference,
        combining.reference,
    )
    dx, *dw = mutants.gradient_of(detached, "x", "w_gate_up", "w_down")(dy, **named)
    return dx, torch.zeros_like(named["router"]), *dw


def _like(t: int, k: int, d: int, h: int, e: int = 64) -> Workload:
    return workload("bf16", T=t, E=e, D=d, H=h, k=k)


def _workspace(w: Workload) -> int:
    """Each token's rows in every expert that it goes to: hidden ones, results, and a few indices and weights."""
    return w["T"] * w.option("k", 2) * ((w["D"] + w["H"]) * w.bytes_per_element + 64)


# as Qwen3-30B-A3B, DeepSeek-V2-Lite, and wider ones; all with 64 experts
TIMED = (_like(4096, 8, 2048, 768), _like(16384, 8, 2048, 768), _like(8192, 6, 2048, 1408), _like(16384, 2, 4096, 2816))


def _backward_terms(w: Workload) -> int:
    return 4 * w["D"] + 2 * w["H"] + 2 * w["E"] + w["T"]


moe_feed_forward = Operator(
    name="moe_feed_forward",
    axes={"T": "tokens", "E": "experts", "D": "columns of x", "H": "hidden columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"k": range(1, 65), "scoring": routing.SCORINGS, "normalise": (False, True)},
    differentiable=LEAVES,
    # sums of sums. Forward: logits, gate and up over D, then over H, then over k. Backward, the longest of x and of the router:
    # these over D, the gradient of a hidden row or of a weight over D again, then over 2H or H, over E twice, over T
    tolerance={
        "forward": Tolerance(scale="tensor", ulps=4.0, terms=lambda w: 3 * w["D"] + w["H"] + w.option("k", 2)),
        "backward": Tolerance(scale=backward_scale, ulps=4.0, terms=_backward_terms),
    },
    workspace=_workspace,
    workloads={
        "verify": [
            workload(T=1, E=1, D=1, H=1, k=1),
            workload(T=12, E=4, D=24, H=16),
            workload(T=9, E=5, D=17, H=9, k=3, scoring="sigmoid", normalise=False),
            workload(T=0, E=3, D=8, H=8),
        ],
        "full": [workload(T=500, E=16, D=256, H=130, k=4), workload(T=700, E=64, D=128, H=64, k=8, scoring="sigmoid")],
        "bench": TIMED,
        "quick": [_like(64, 2, 2048, 768, 16)],
        "host": [workload(T=16, E=4, D=64, H=32)],
        "compile": [workload("bf16", T=4096, E=64, D=2048, H=768, k=8), workload(T=64, E=8, D=128, H=128, k=2)],
        "model": [_like(8192, 1, 5120, 8192, 16), _like(8192, 8, 7168, 2048, 256), _like(16384, 8, 2048, 768, 128)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("one expert less", mutants.changed(reference, k=lambda k: max(k - 1, 1))),
        Mutant("gate and up exchanged", mutants.changed(reference, w_gate_up=lambda w: w.roll(w.shape[1] // 2, 1))),
        Mutant("the next expert's second matrix", mutants.changed(reference, w_down=lambda w: w.roll(1, 0))),
        *mutants.usual(mutants.gradient_of(reference, *LEAVES), "backward"),
        Mutant("weights without a gradient", _router_without_gradient, "backward"),
    ],
)

moe_feed_forward.implementation("triton", arch=">=sm_80")(by_kernels(grouping.grouped_matmul_triton))
moe_feed_forward.implementation("cuda", **ON_HOPPER)(by_kernels(grouping.grouped))
moe_feed_forward.implementation("torch")(torch_layer)
moe_feed_forward.implementation("grouped_mm", devices=("cuda",), dtypes=("bf16",))(grouped_mm_layer)
moe_feed_forward.implementation("torch.compile", devices=("cuda",), dtypes=("bf16",))(peers.Compiled(grouped_mm_layer))


def check(
    x: Tensor, router: Tensor, w_gate_up: Tensor, w_down: Tensor, k: int, *, bias: Tensor | None = None, **choice: Any
) -> None:
    name = "moe_feed_forward"
    check_matrix(name, "x", x, sharded=False)
    check_matrix(name, "router", router)
    d, e = x.shape[1], router.shape[0]
    h = w_down.shape[-1] if isinstance(w_down, Tensor) and w_down.ndim == 3 else 0
    wanted = {"router": (e, d), "w_gate_up": (e, 2 * h, d), "w_down": (e, d, h)}
    for argument, value in (("router", router), ("w_gate_up", w_gate_up), ("w_down", w_down)):
        check_tensor(name, argument, value)
        check_same(name, argument, value, "x", x)
        sizes = f"'x' with {d} columns, {e} experts in 'router' and {h} hidden columns in 'w_down'"
        check_shape(name, argument, value, tuple(value.shape) == wanted[argument], f"{wanted[argument]} for {sizes}")
    if not e:
        raise ValueError(f"{name}: argument 'router' has no rows; expected one for each expert")
    check_choice(name, x.shape[0], e, k, **choice)
    check_bias(name, bias, "x", x, e)


@moe_feed_forward.choice
@guarded
def choose(
    x: Tensor, router: Tensor, w_gate_up: Tensor, w_down: Tensor, k: int, *, direction: str = "forward", **options: Any
) -> Choice:
    """The kernel of the second product, whose rows are not gathered; of backward that of w_gate_up's gradient."""
    x, router, w_gate_up, w_down = cast_for_products(x, router, w_gate_up, w_down)
    check(x, router, w_gate_up, w_down, k, **options)
    (e, _, h), r = w_down.shape, x.shape[0] * k

    def rows(columns: int) -> Tensor:
        return torch.empty((r, columns), dtype=x.dtype, device="meta")

    if direction == "backward":
        return GROUPED_WEIGHT_GRADIENT.choose(rows(2 * h), x, r, e, False, True)
    choice = GROUPED.choose(rows(h), w_down, r, False, False, False)
    if choice.implementation == "torch":
        return choice
    return dataclasses.replace(choice, reason=f"routing, two grouped products and the sum; the second: {choice.reason}")


@moe_feed_forward.function
def moe_feed_forward_function(
    x: Tensor, router: Tensor, w_gate_up: Tensor, w_down: Tensor, k: int, *, normalise: bool = True,
    scoring: str = "softmax", bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A mixture-of-experts feed-forward layer: Σ over a token's k experts of weight · w_down[e] · (silu(gate) · up).

    Args:
        x: [T, D]; float32, float16 or bfloat16.
        router: [E, D]: logits are x · routerᵀ, rounded to x's dtype; weights are computed from them in fp32.
        w_gate_up: [E, 2H, D]: in each matrix the H rows of the gate before those of up.
        w_down: [E, D, H].
        k: experts of each token, 1 … E.
        normalise, scoring, bias: as of ``route_top_k``; bias [E] has a part in choosing alone.

    Returns:
        [T, D] of x's dtype; under autocast x and the weights are cast as by ``torch.mm``. No token is dropped, whatever the
        loads; nothing waits for the device.

    Raises:
        TypeError: tensors of other dtypes, or dtypes that differ.
        ValueError: shapes or devices that do not fit, a k out of range.

    Source: Shazeer et al. 2017 (arXiv 1701.06538); without capacity, by grouped products: Gale et al., "MegaBlocks", 2022
    (arXiv 2211.15841). Gradients of x, router and both weights, deterministic. Forward holds T·k·(H + D) elements between,
    and where a gradient is wanted 2·T·k·H more.
    """
    options: dict[str, Any] = {"normalise": normalise, "scoring": scoring, "bias": bias}
    x, router, w_gate_up, w_down = cast_for_products(x, router, w_gate_up, w_down)
    check(x, router, w_gate_up, w_down, k, **options)
    return through_public_functions(x, router, w_gate_up, w_down, k, **options)
