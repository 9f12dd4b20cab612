"""``route_top_k(logits, k)``: each token's k best experts with their weights, and the order that puts an expert's tokens
side by side."""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, eager, guarded
from weft.operators.mixture_of_experts.dispatch import ROUTE, ROUTE_GRADIENT
from weft.operators.mixture_of_experts.reference import SCORINGS, Routing, ordered
from weft.operators.mixture_of_experts.reference import route as reference
from weft.operators.random_inputs import LAYOUTS, random_tensor


class Route(KernelFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, normalise: bool, scoring: str, bias: Any) -> tuple[Tensor, ...]:
        (t, e), device = logits.shape, logits.device
        weights = torch.empty((t, k), dtype=logits.dtype, device=device)
        experts, position = (torch.empty((t, k), dtype=torch.int32, device=device) for _ in range(2))
        offsets = torch.empty((e + 1,), dtype=torch.int32, device=device)
        source = torch.empty((t * k,), dtype=torch.int32, device=device)
        tensors = (logits,) if bias is None else (logits, bias)
        plan = ROUTE.kernel("triton").of(tensors, k, normalise, scoring)
        plan(logits, bias, weights, experts, offsets, source, position)
        ctx.set_materialize_grads(False)  # of integers: each of the four would be a launch that fills it with zeros
        ctx.save_for_backward(logits, experts, bias)
        ctx.normalise, ctx.scoring = normalise, scoring
        return weights, experts, offsets, source, position

    @staticmethod
    def backward(ctx: Any, dweights: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        if dweights is None:  # what read the weights has no gradient of them
            return (None,) * 5
        logits, experts, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            k = experts.shape[1]

            def weights(x: Tensor) -> Tensor:
                return reference(x, k, normalise=ctx.normalise, scoring=ctx.scoring, bias=bias).weights

            return *reference_gradients(weights, (logits,), (True,), (dweights,)), None, None, None, None
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        plan = ROUTE_GRADIENT.of((logits, dweights), ctx.normalise, ctx.scoring)
        plan(logits, experts, dweights, dlogits)
        return dlogits, None, None, None, None


def route_top_k_triton(
    logits: Tensor, k: int, *, normalise: bool = True, scoring: str = "softmax", bias: Tensor | None = None
) -> Routing:
    if not logits.shape[0]:
        return reference(logits, k, normalise=normalise, scoring=scoring, bias=bias)
    return Routing(*differentiable(Route, logits, k, normalise, scoring, bias))


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Logits [T, E] whose expert e is the less likely the larger e is (a Zipf law); with ``values=ties`` of few values; with
    ``loads=one`` all tokens' first expert is the last one."""
    t, e = w["T"], w["E"]
    values = w.option("values", "normal")
    nonfinite = "nonfinite" if values == "nonfinite" else "normal"
    logits = random_tensor(g, (t, e), w.dtype, device, layout=w.option("layout", "contiguous"), values=nonfinite)
    if device != "meta" and w.option("layout") != "expanded":
        logits -= torch.arange(1, e + 1, device=device).log().to(logits.dtype)
        if values == "ties":
            logits.round_()
        if w.option("loads") == "one":
            logits[:, -1:] += 30
    bias = random_tensor(g, (e,), "fp32", device) * 0.3 if w.option("bias", False) else None
    return {"logits": logits, "k": w["K"], **weighing(w), "bias": bias}


def weighing(w: Workload) -> dict[str, Any]:
    return {"normalise": w.option("normalise", True), "scoring": w.option("scoring", "softmax")}


def cost(w: Workload, direction: str) -> Cost:
    t, e, k, size = w["T"], w["E"], w["K"], w.bytes_per_element
    if direction == "backward":
        return Cost(t * e * size + t * k * (size + 4), t * e * size, vector_flops=4 * t * e, special_ops=t * e)
    read, written = t * e * size + 4 * e * w.option("bias", False), t * k * (size + 12) + (e + 1) * 4
    return Cost(read, written, vector_flops=(3 + k) * t * e, special_ops=t * e)


def _terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """A token's gradients are differences: how large what is subtracted is."""
    return [(reference(**arguments).weights * gradients[0]).square().sum(-1, keepdim=True).sqrt()]


def _gradient(dy: Tensor, *others: Any, logits: Tensor, **named: Any) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(reference(leaf, **named).weights, leaf, dy)


def _last_of_equals(logits: Tensor, **named: Any) -> Routing:
    e, bias = logits.shape[1], named["bias"]
    found = reference(logits.flip(1), **{**named, "bias": None if bias is None else bias.flip(0)})
    experts = e - 1 - found.experts
    return Routing(found.weights, experts, *ordered(experts, e))


def _later_tokens_first(logits: Tensor, **named: Any) -> Routing:
    """An expert's tokens in falling order: a sort that is not stable."""
    found = reference(logits.flip(0), **named)
    weights, experts, position = (t.flip(0) for t in (found.weights, found.experts, found.position))
    return Routing(weights, experts, found.offsets, logits.shape[0] - 1 - found.source, position)


def _biased_weights(logits: Tensor, **named: Any) -> Routing:
    found, bias = reference(logits, **named), named["bias"]
    added = 0.0 if bias is None else bias[found.experts.long()].to(logits.dtype)
    return found._replace(weights=found.weights + added)


def _without_the_mean(dy: Tensor, *others: Any, logits: Tensor, **named: Any) -> tuple[Tensor, ...]:
    """Weights as if dividing by their sum, or by that of all exponentials, were constant."""
    found = reference(logits, **named)
    return (torch.zeros_like(logits).scatter(1, found.experts.long(), dy * found.weights),)


SIZES = tuple(
    workload(d, T=t, E=e, K=k)
    for t, e, k in ((4096, 64, 8), (16384, 64, 6), (16384, 128, 8), (8192, 256, 8))
    for d in ("fp32", "bf16")
)

route_top_k = Operator(
    name="route_top_k",
    axes={"T": "tokens", "E": "experts", "K": "experts of each token"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "scoring": SCORINGS,
        "normalise": (False, True),
        "bias": (False, True),
        "loads": ("zipf", "one"),
        "values": ("normal", "ties", "nonfinite"),
        "layout": LAYOUTS,
    },
    differentiable=("logits",),
    tolerance={"forward": Tolerance(ulps=4.0), "backward": Tolerance(scale=_terms, ulps=4.0)},
    workloads={
        "verify": [
            *(workload(T=t, E=e, K=k) for t, e, k in ((1, 1, 1), (7, 5, 2), (64, 5, 5), (150, 20, 3), (9, 24, 17))),
            workload(T=40, E=8, K=3, scoring="softmax", normalise=False),
            workload(T=40, E=8, K=3, scoring="softmax", bias=True),
            workload(T=40, E=8, K=3, scoring="sigmoid", normalise=False, bias=True),
            workload(T=40, E=8, K=3, scoring="sigmoid"),
            workload(T=0, E=5, K=2),
            workload(T=50, E=9, K=4, values="ties"),
            *(workload(T=40, E=7, K=2, values="nonfinite", scoring=s) for s in SCORINGS),
            workload(T=40, E=7, K=1, loads="one"),
            *(workload(T=9, E=8, K=2, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
        ],
        "full": [*(w.at(d) for w in SIZES[::2] for d in ("fp32", "fp16", "bf16")), workload(T=2**17, E=16, K=2)],
        "bench": SIZES,
        "quick": [workload(T=4096, E=64, K=8)],
        "host": [workload(T=64, E=64, K=8)],
        "compile": [
            *(workload(T=4096, E=e, K=8, scoring=s, bias=s == "sigmoid") for e, s in ((64, "softmax"), (256, "sigmoid"))),
            workload(T=4096, E=64, K=17),
        ],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("the last of equal experts", _last_of_equals),
        Mutant("later tokens first", _later_tokens_first),
        Mutant("bias in the weights", _biased_weights),
        Mutant("always normalised", mutants.changed(reference, normalise=lambda normalise: True)),
        *mutants.usual(_gradient, "backward"),
        Mutant("normalisation without a gradient", _without_the_mean, "backward"),
    ],
)  # fmt: skip

route_top_k.implementation("triton", arch=">=sm_80")(route_top_k_triton)
peers.register(route_top_k, reference)


@route_top_k.choice
@guarded
def choose(
    logits: Tensor, k: int, normalise: bool = True, scoring: str = "softmax", bias: Any = None, direction: str = "forward"
) -> Choice:  # fmt: skip
    tensors = (logits,) if bias is None else (logits, bias)
    choice = ROUTE.choose(*tensors, k, normalise, scoring)
    if direction == "backward" and choice.implementation != "torch":
        return ROUTE_GRADIENT.choose(logits, logits[:, :k], normalise, scoring)
    return choice


@route_top_k.function
def route_top_k_function(
    logits: Tensor, k: int, *, normalise: bool = True, scoring: str = "softmax", bias: Tensor | None = None
) -> Routing:
    """The k best experts of each token, and the order in which an expert's tokens lie side by side.

    Args:
        logits: [T, E]; float32, float16 or bfloat16, any strides.
        k: experts of each token, 1 … E.
        normalise: divide a token's weights by their sum.
        scoring: what makes a logit a weight: ``softmax`` over all experts, or ``sigmoid``.
        bias: [E], added to the weights for the choice of experts alone (Wang et al., "Auxiliary-loss-free load balancing",
            2024, arXiv 2408.15664), or None. It has no gradient.

    Returns:
        ``weights`` [T, k] of the logits' dtype, computed in fp32, the best expert first; ``experts`` [T, k] int32;
        ``offsets`` [E + 1] int32: expert e's pairs of (token, slot) lie at offsets[e] … offsets[e + 1] - 1, in the order
        of the tokens; ``source`` [T·k] int32: the token of each; ``position`` [T, k] int32: where each pair lies.
        Nothing waits for the device.

    Raises:
        TypeError: tensors of other dtypes, a k that is no int.
        ValueError: logits that are no matrix, a k out of range, T·k of 2³¹ or more, an unknown scoring, a bias of another
            shape or device.

    Of equal experts the one with the lowest number comes first. NaN counts as the largest logit, as in ``torch.topk``: such a
    token still has k different experts, and NaN among its weights (all of them where softmax or ``normalise`` mixes them).
    """
    tensors = (logits,) if bias is None else (logits, bias)
    ready = eager(*tensors, gradient=True, autocast=True) and ROUTE.of(tensors, k, normalise, scoring)
    ours = ready or choose(logits, k, normalise, scoring, bias).implementation != "torch"
    return (route_top_k_triton if ours else reference)(logits, k, normalise=normalise, scoring=scoring, bias=bias)
