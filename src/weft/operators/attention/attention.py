"""``attention(q, k, v, …)``: softmax(scale q kᵀ) v with masks, biases and score functions; the scores are never stored.

Forward reads q, k, v and writes the output; two products of each visible pair of query and key are its work. Backward makes the
probabilities again: five products. The matrix units are the limit.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants, peers
from weft.operators.attention.dispatch import (
    BACKWARD, FORWARD, NAME, OPTIONAL, Options, log_sum_exp, options, result_like,
)  # fmt: skip
from weft.operators.attention.reference import reference
from weft.operators.attention.score import Score
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, cast_for_products, guarded, traced
from weft.operators.checks import check_flag
from weft.operators.dropout.seeds import STEPS, Seed, check_seed, draw, threshold_of
from weft.operators.launch import Plans
from weft.operators.random_inputs import random_tensor

# B batch (or N packed sequences), H heads of q, G heads of k and v, S queries, T keys, D head dim of q and k, Dv of v

# ---- calls around the kernels ----------------------------------------------------------------------------------------

Parts = tuple[tuple[Tensor, ...], Options, int, int]  # tensors, options, seed (0 where a tensor holds it), offset


def parts_of(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Any = None, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None, mask: Tensor | None = None,
    bias: Tensor | None = None, score: Score | None = None, dropout: float = 0.0, seed: Seed = None, offset: int = 0,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, return_lse: bool = False,
) -> Parts:  # fmt: skip
    """A call as the tables take it."""
    tensor_seed = seed if isinstance(seed, Tensor) else None
    every = dict(zip(OPTIONAL, (mask, bias, sinks, alibi, cu_seqlens_q, cu_seqlens_k, tensor_seed), strict=True))
    given = {name: t for name, t in every.items() if t is not None}
    made = options(tuple(given), causal, window, scale, softcap, score, dropout)
    if not made.threshold:
        given.pop("seed", None)
        made, seed, offset = options(tuple(given), causal, window, scale, softcap, score, dropout), 0, 0
    number = seed if isinstance(seed, int) else 0
    tensors = (q, k, v, *given.values())
    if score is not None and score.gradient is None and torch.is_grad_enabled():
        if any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
            raise ValueError(
                f"{NAME}: argument 'score' is a Score without a gradient, and an argument needs one; expected "
                "Score(kernel, plain, gradient), or a call under torch.no_grad()"
            )
    return tensors, made, number, offset


class Attention(KernelFunction):
    """``(plans, options, seed, offset, return_lse, q, k, v, *tensors)``, the tensors as ``options.names`` says."""

    @staticmethod
    def forward(
        ctx: Any, plans: tuple[Plans, Plans], options: Options, seed: int, offset: int, return_lse: bool, *tensors: Tensor
    ) -> Any:
        q, k, v, *rest = tensors
        given = dict(zip(options.names, rest, strict=True))
        o = result_like(q, v.shape[-1])
        rows = (q.shape[1], q.shape[0]) if q.ndim == 3 else q.shape[:3]
        peak, log_sum = (torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(2))
        mask = given["mask"].view(torch.uint8) if "mask" in given else q
        optional = (given.get(n, q) for n in ("bias", "sinks", "alibi", "cu_seqlens_q", "cu_seqlens_k", "seed"))
        plans[0].of(tensors, options)(q, k, v, o, peak, log_sum, mask, *optional, seed, offset)
        ctx.save_for_backward(*tensors, o, peak, log_sum)
        ctx.call = plans[1], options, seed, offset, return_lse
        return (o, log_sum_exp(peak, log_sum, not options.needs_natural_units)) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *tensors, o, peak, log_sum = ctx.saved_tensors
        plans, options, seed, offset, return_lse = ctx.call
        wanted = ctx.needs_input_grad[5:]
        if torch.is_grad_enabled():
            plain = functools.partial(by_reference, options, seed, offset, return_lse)
            gradients = (do, dlse) if dlse is not None else (do,)
            return (*(None,) * 5, *reference_gradients(plain, tensors, wanted, gradients))
        q, k, v, *rest = tensors
        names = ("q", "k", "v", *options.names)
        asked = frozenset(name for name, w in zip(names, wanted, strict=True) if w)
        launch = plans.of((q, k, v, o, do, *rest), options)
        given = dict(zip(options.names, rest, strict=True))
        found = launch(q, k, v, o, peak, log_sum, do, dlse, given, seed, offset, asked)
        return (*(None,) * 5, *(found.get(name) for name in names))


def by_reference(options: Options, seed: int, offset: int, return_lse: bool, *tensors: Tensor) -> Any:
    """The reference of a call that was taken apart."""
    q, k, v, *rest = tensors
    named = {"seed": seed, **dict(zip(options.names, rest, strict=True))}
    settings = {"window": (options.left, options.right), "scale": options.scale, "softcap": options.softcap}
    settings |= {"score": options.score, "dropout": options.threshold / STEPS, "offset": offset, "return_lse": return_lse}
    return reference(q, k, v, **settings, **named)


PUBLIC = FORWARD, BACKWARD
BY_KERNEL = FORWARD.kernel("triton"), BACKWARD.kernel("triton")


def launched(parts: Parts, return_lse: bool, plans: tuple[Plans, Plans]) -> Any:
    tensors, options, seed, offset = parts
    if "bias" in options.names:  # four dimensions, which its gradient has too
        at = 3 + options.names.index("bias")
        bias = tensors[at]
        tensors = (*tensors[:at], bias[(None,) * (4 - bias.ndim)], *tensors[at + 1 :])
    return differentiable(Attention, plans, options, seed, offset, return_lse, *tensors)


def with_seed(q: Tensor, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a seed drawn where dropout needs one."""
    if named.get("seed") is None and threshold_of(named.get("dropout", 0.0)) and not traced(q):
        named["seed"], named["offset"] = draw(q.device)
    return named


def attention_triton(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    parts = parts_of(q, k, v, **with_seed(q, named))
    return launched(parts, named.get("return_lse", False), BY_KERNEL)


# ---- peers -----------------------------------------------------------------------------------------------------------


def _given(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments that ask for something."""
    return {n: a for n, a in named.items() if isinstance(a, Tensor) or (a is not None and a is not False and a != 0.0)}


def in_torch(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """PyTorch's ``scaled_dot_product_attention``; the plain form for what it has no argument for."""
    n = _given(named)
    beyond = {"softcap", "sinks", "score", "cu_seqlens_q", "return_lse"} & set(n)
    if beyond or (n.get("dropout") and "seed" in n) or (n.get("bias") is not None and n["bias"].dtype != q.dtype):
        return reference(q, k, v, **named)
    top = dict(dropout_p=n.get("dropout", 0.0), scale=n.get("scale"), enable_gqa=q.shape[1] != k.shape[1])
    if n.get("causal") and q.shape[2] == k.shape[2] and not {"window", "alibi", "mask", "bias"} & set(n):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **top)
    return F.scaled_dot_product_attention(q, k, v, _one_mask(q, k, **n), **top)


def _one_mask(
    q: Tensor, k: Tensor, causal: bool = False, window: Any = None, alibi: Tensor | None = None, mask: Tensor | None = None,
    bias: Tensor | None = None, **rest: Any,
) -> Tensor | None:  # fmt: skip
    """All that hides or adds to scores in one tensor, as SDPA wants it; None for nothing."""
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)
    left, right = window or (None, None)
    right = 0 if causal else right
    seen = mask
    for bound, distance in ((left, i - j), (right, j - i)):
        if bound is not None:
            seen = distance <= bound if seen is None else seen & (distance <= bound)
    if alibi is not None:
        slopes = -(alibi[..., None, None] * (i - j).abs()).to(q.dtype)
        bias = slopes if bias is None else bias + slopes
    if bias is None:
        return seen
    return bias if seen is None else torch.where(seen, bias, -torch.inf)


@functools.cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(16)
def _blocks(left: int | None, right: int | None, queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    shift = keys - queries

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = j >= 0
        if left is not None:
            near = near & (i + shift - j <= left)
        return near & (j - i - shift <= right) if right is not None else near

    return create_block_mask(seen, None, None, queries, keys, device=str(device))


def flex(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """PyTorch's ``flex_attention``, compiled, its block mask made once."""
    if more := sorted(set(_given(named)) - {"causal", "window", "scale"}):
        raise Declined(f"not written for flex_attention here: {', '.join(more)}")
    left, right = named.get("window") or (None, None)
    right = 0 if named.get("causal") else right
    blocks = None if left is None and right is None else _blocks(left, right, q.shape[2], k.shape[2], q.device)
    return _flex()(q, k, v, block_mask=blocks, scale=named.get("scale"), enable_gqa=q.shape[1] != k.shape[1])


def fa3(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """FlashAttention-3, forward."""
    from flash_attn_interface import flash_attn_func

    n = _given(named)
    if set(n) - {"causal", "window", "scale", "softcap"} or q.dtype == torch.float32:
        raise Declined("FlashAttention-3 takes 16-bit floats, causal, window, scale and softcap")
    window = tuple(-1 if w is None else w for w in n.get("window", (None, None)))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = flash_attn_func(
        q, k, v, n.get("scale"), causal="causal" in n, window_size=window, softcap=n.get("softcap", 0.0)
    )
    return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)


# ---- definition ------------------------------------------------------------------------------------------------------


@triton.jit
def _near_kernel(s, b, h, i, j):
    return s * (1.0 + 0.5 * (h % 2)) / (1.0 + 0.125 * tl.abs(i - j))


@triton.jit
def _near_gradient(s, b, h, i, j):
    return (s * 0.0 + (1.0 + 0.5 * (h % 2))) / (1.0 + 0.125 * tl.abs(i - j))


def _near(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * (1.0 + 0.5 * (h % 2)) / (1.0 + 0.125 * (i - j).abs())


SCORES = {"near": Score(_near_kernel, _near, _near_gradient)}
VIEWS = ("contiguous", "transposed", "sliced", "strided", "unaligned", "expanded")
SHAPES = {  # of masks and biases
    "full": lambda b, h, s, t: (b, h, s, t),
    "heads": lambda b, h, s, t: (b, 1, s, t),
    "batches": lambda b, h, s, t: (1, h, s, t),
    "square": lambda b, h, s, t: (s, t),
    "keys": lambda b, h, s, t: (b, 1, 1, t),
    "queries": lambda b, h, s, t: (h, s, 1),
    "one": lambda b, h, s, t: (1,),
}
LOWEST = {"fp32": -1e30, "fp16": -6e4, "bf16": -1e30}


def lengths(w: Workload) -> tuple[list[int], list[int]]:
    """Queries and keys of the packed sequences: shorter ones, empty ones, and the longest of S and T."""
    return [w["S"] * n // max(w["B"] - 1, 1) for n in range(w["B"])], [w["T"] >> n for n in range(w["B"])]


UNSET: dict[str, Any] = {
    "window": None, "scale": None, "softcap": None, "sinks": None, "alibi": None, "mask": None, "bias": None, "score": None,
    "dropout": 0.0, "seed": None, "offset": 0, "cu_seqlens_q": None, "cu_seqlens_k": None,
}  # fmt: skip


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv]; with ``packed`` B sequences of :func:`lengths` and one token of none.
    Numbers that are no integers are given in per cent (``scale``, ``softcap``, ``dropout``); ``times`` multiplies q."""
    (b, h, s, t, d), groups = (w[a] for a in "BHSTD"), w.option("kv_heads", w["H"])
    layout, packed = w.option("layout", "contiguous"), w.option("packed", False)
    queries, keys = lengths(w)

    def drawn(heads: int, tokens: int, lengths: list[int], width: int) -> Tensor:
        if packed:
            return random_tensor(g, (sum(lengths) + 1, heads, width), w.dtype, device, layout=layout)
        if layout == "transposed":  # [B, S, H, D] in memory
            return random_tensor(g, (b, tokens, heads, width), w.dtype, device).transpose(1, 2)
        return random_tensor(g, (b, heads, tokens, width), w.dtype, device, layout=layout)

    q = drawn(h, s, queries, d)
    if w.option("times"):
        q = q.mul_(w.option("times"))
    k, v = drawn(groups, t, keys, d), drawn(groups, t, keys, w.option("dv", d))
    call: dict[str, Any] = {"q": q, "k": k, "v": v, **UNSET, "causal": w.option("causal", False)}
    left, right = w.option("left", -1), w.option("right", -1)
    if max(left, right) >= 0:
        call["window"] = tuple(None if n < 0 else n for n in (left, right))
    for name in ("scale", "softcap"):
        if w.option(name) is not None:
            call[name] = w.option(name) / 100
    call["sinks"] = random_tensor(g, (h,), w.dtype, device) if w.option("sinks") else None
    if w.option("alibi"):
        slopes = random_tensor(g, (h,) if w.option("alibi") == "heads" else (b, h), "fp32", device)
        call["alibi"] = slopes.abs() / 8
    if shape := w.option("mask"):
        mask = random_tensor(g, SHAPES[shape](b, h, s, t), "fp32", device) > -0.3
        if w.option("hidden"):  # every third query sees nothing, and the first keys are padding
            mask[..., ::3, :] = False
            mask[..., : t // 2] = False
        call["mask"] = mask
    if shape := w.option("bias"):
        dtype = "fp32" if w.option("hidden") else w.dtype
        bias = random_tensor(g, SHAPES[shape](b, h, s, t), dtype, device)
        if w.option("hidden"):  # rows of -1e30, and some -inf
            bias[..., ::3, :] = -1e30
            bias[..., ::5] = -torch.inf
        call["bias"] = bias
    if w.option("score"):
        call["score"] = SCORES[w.option("score")]
    if w.option("dropout"):
        seed = 0 if g is None else int(torch.randint(2**62, (), generator=g, device=g.device))
        in_memory = w.option("seed") == "tensor"
        call |= {"dropout": w.option("dropout") / 100, "offset": 7}
        call["seed"] = torch.full((1,), seed, dtype=torch.int64, device=device) if in_memory else seed
    if packed:
        for name, of in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
            ends = [0, *(sum(of[: n + 1]) for n in range(b))]
            call[name] = torch.tensor(ends, dtype=torch.int32, device=device)
    return {**call, "return_lse": w.option("lse", False)}


@functools.lru_cache(1024)
def pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Of a query and a key that it sees by position; negative bounds are none."""
    i = torch.arange(keys - queries, keys)
    first = (i - left).clamp(0, keys) if left >= 0 else torch.zeros_like(i)
    last = (i + right + 1).clamp(0, keys) if right >= 0 else torch.full_like(i, keys)
    return int((last - first).clamp(min=0).sum())


def cost(w: Workload, direction: str) -> Cost:
    """q, k, v and the output (and their gradients), masks and biases as small as they are; two products of each visible pair, five
    in backward."""
    b, h, d, groups, dv = w["B"], w["H"], w["D"], w.option("kv_heads", w["H"]), w.option("dv", w["D"])
    of_queries, of_keys = lengths(w) if w.option("packed") else ([w["S"]] * b, [w["T"]] * b)
    left, right = w.option("left", -1), 0 if w.option("causal") else w.option("right", -1)
    visible = h * sum(pairs(s, t, left, right) for s, t in zip(of_queries, of_keys, strict=True))
    size = w.bytes_per_element
    q, o = (sum(of_queries) * h * n * size for n in (d, dv))
    k, v = (sum(of_keys) * groups * n * size for n in (d, dv))
    places = {n: SHAPES[w.option(n)](b, h, w["S"], w["T"]) for n in ("mask", "bias") if w.option(n)}
    added = sum(math.prod(shape) * (1 if n == "mask" else size) for n, shape in places.items())
    flops = 2.0 * visible * (d + dv)
    if direction == "forward":
        lse = 4 * sum(of_queries) * h if w.option("lse") else 0
        return Cost(q + k + v + added, o + lse, {w.dtype: flops}, special_ops=visible)
    bias = math.prod(places["bias"]) * size if "bias" in places else 0
    return Cost(q + k + v + 2 * o + added, q + k + v + bias, {w.dtype: 2.5 * flops}, special_ops=visible)


def _heads_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1)[None] if t.ndim == 3 else t


def gradient_terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """The root of the summed squares of what each gradient adds up: a probability times its gradient and times the row's delta,
    which cancel where one key has all the weight."""
    q, k, v = (_heads_first(arguments[n]) for n in "qkv")
    do, (b, h, s, _), (g, t) = _heads_first(gradients[0]), q.shape, k.shape[1:3]
    each = torch.eye(t, dtype=q.dtype, device=q.device).expand(b, g, t, t)
    each = each[0].transpose(0, 1) if arguments["q"].ndim == 3 else each
    plain = {**arguments, "dropout": 0.0, "return_lse": False}
    p, o = _heads_first(reference(**{**plain, "v": each})), _heads_first(reference(**plain))
    up = 1 / max(1 - arguments["dropout"], 0.1)

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, (g, h // g))

    dp2 = up**2 * (grouped(do**2) @ (v**2)[:, :, None].transpose(-1, -2)).flatten(1, 2)
    delta2 = (do**2 * o**2).sum(-1, keepdim=True) * up**2
    if arguments["return_lse"]:
        delta2 = delta2 + gradients[1].view(b, h, s, 1) ** 2
    ds2 = p**2 * (dp2 + delta2)
    scale2 = (arguments["scale"] or q.shape[-1] ** -0.5) ** 2
    dq = scale2 * (grouped(ds2) @ (k**2)[:, :, None]).flatten(1, 2)
    dk = scale2 * (grouped(ds2).transpose(-1, -2) @ grouped(q**2)).sum(2)
    dv = up**2 * (grouped(p**2).transpose(-1, -2) @ grouped(do**2)).sum(2)
    found = [x[0].transpose(0, 1) if arguments["q"].ndim == 3 else x for x in (dq, dk, dv)]
    if arguments["bias"] is not None:
        found.append(ds2.sum_to_size(arguments["bias"].shape))
    if arguments["sinks"] is not None:
        found.append(((1 - p.sum(-1, keepdim=True)) ** 2 * delta2).sum((0, 2, 3)))
    return [x.sqrt() for x in found]


# ---- mistakes that the verifier must notice ---------------------------------------------------------------------------


def but(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The reference of changed arguments; what is None stays so."""
    return mutants.changed(reference, **{n: (lambda a, f=f: None if a is None else f(a)) for n, f in changes.items()})


def _positions(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q, k = (_heads_first(arguments[n]) for n in "qk")
    return torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=k.device)


def _hiding(seen: Callable[[Tensor, Tensor], Tensor], **changes: Any) -> Callable[..., Any]:
    """The reference, the keys j hidden from query i that are not seen(i, j)."""

    def mutant(**arguments: Any) -> Any:
        also = seen(*_positions(arguments))
        mask = also if arguments["mask"] is None else arguments["mask"] & also
        return reference(**{**arguments, **changes, "mask": mask})

    return mutant


def _top_left(**arguments: Any) -> Any:
    return _hiding(lambda i, j: j <= i, causal=False)(**arguments) if arguments["causal"] else reference(**arguments)


def _other_group(**arguments: Any) -> Any:
    k, v = arguments["k"], arguments["v"]
    heads = torch.arange(arguments["q"].shape[1], device=k.device) % k.shape[1]
    return reference(**{**arguments, "k": k[:, heads], "v": v[:, heads]})


def _cap_after_mask(**arguments: Any) -> Any:
    cap, mask = arguments["softcap"], arguments["mask"]
    if cap is None or mask is None:
        return reference(**arguments)
    hidden = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    late = Score(None, lambda s, *at: cap * torch.tanh(s / cap))
    return reference(**{**arguments, "softcap": None, "mask": None, "bias": hidden, "score": late})


def _wrong_lse(wrong: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def mutant(**arguments: Any) -> Any:
        out = reference(**arguments)
        return (out[0], wrong(out[1])) if isinstance(out, tuple) else out

    return mutant


def _with_lse(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse, and lse as it broadcasts to the output."""
    o, lse = reference(**{**arguments, "return_lse": True})
    return o, lse, (lse.t() if o.ndim == 3 else lse)[..., None]


def _mean_where_nothing_is_seen(**arguments: Any) -> Any:
    o, lse, beside = _with_lse(arguments)
    o = o + torch.where(beside == -torch.inf, arguments["v"].float().mean().to(o.dtype), 0.0)
    return (o, lse) if arguments["return_lse"] else o


def _without_delta(**arguments: Any) -> Any:
    """The output, whose normaliser is a constant for autograd."""
    o, lse, beside = _with_lse(arguments)
    o = o * torch.where(beside == -torch.inf, 1.0, (beside - beside.detach()).exp()).to(o.dtype)
    return (o, lse) if arguments["return_lse"] else o


def _lse_without_gradient(**arguments: Any) -> Any:
    out = reference(**arguments)
    return (out[0], out[1].detach() + 0.0 * out[0].sum()) if isinstance(out, tuple) else out


LEAVES = ("q", "k", "v", "bias", "sinks")
gradient = mutants.gradient_of(reference, *LEAVES)


def _wrong(name: str, wrong: Callable[[Tensor, dict[str, Any]], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The right gradients but that of one argument."""

    def mutant(*dy: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        names = [n for n in LEAVES if arguments[n] is not None]
        found = zip(names, gradient(*dy, **arguments), strict=True)
        return tuple(wrong(t, arguments) if n == name else t for n, t in found)

    return mutant


def _broadcast(bias: Tensor, arguments: dict[str, Any]) -> int:
    """How often each element of the bias is used."""
    return int(arguments["q"].shape[:3].numel()) * int(arguments["k"].shape[2]) // bias.numel()


def _of(reference: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    return mutants.gradient_of(reference, *LEAVES)


SMALL = {"B": 1, "H": 2, "S": 35, "T": 40, "D": 16}
GROUPED = {"B": 1, "H": 4, "S": 5, "T": 37, "D": 16, "kv_heads": 2}
TOKENS = 16384

attention = Operator(
    name="attention",
    axes={"B": "batches, or packed sequences", "H": "heads of q", "S": "queries", "T": "keys", "D": "head dim of q and k"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "layout": VIEWS,
        "kv_heads": range(1, 2**16),
        "dv": range(1, 2**16),
        "causal": (False, True),
        "left": range(-1, 2**31),
        "right": range(-1, 2**31),
        "scale": range(-(2**16), 2**16),
        "softcap": range(1, 2**16),
        "sinks": (False, True),
        "alibi": ("heads", "batches"),
        "mask": tuple(SHAPES),
        "bias": tuple(SHAPES),
        "hidden": (False, True),
        "score": tuple(SCORES),
        "dropout": range(101),
        "seed": ("number", "tensor"),
        "packed": (False, True),
        "lse": (False, True),
        "times": range(1, 2**10),
    },
    differentiable=LEAVES,
    # the terms that one program adds: products over a head dim, and keys (queries of a group); probabilities and their gradients
    # are rounded to q's dtype before they are multiplied, the result once more
    tolerance={
        "forward": Tolerance(ulps=2.0, terms=lambda w: w["D"] + w["T"]),
        "backward": Tolerance(
            ulps=2.0, eps=lambda w: torch.finfo(torch_dtype(w.dtype)).eps, scale=gradient_terms, terms=lambda w: 2 * w["D"] + w["T"] + w["S"] * w["H"] // w.option("kv_heads", w["H"])
        ),
    },
    workloads={
        "verify": [
            workload(B=1, H=1, S=1, T=1, D=16),
            workload(B=2, H=1, S=3, T=5, D=16),
            workload(B=2, H=2, S=4, T=8, D=16),
            workload(**SMALL, causal=True, lse=True),
            workload(**GROUPED, causal=True, layout="transposed", sinks=True),
            workload(B=1, H=1, S=70, T=66, D=24, dv=40, left=20, right=9, layout="strided"),
            workload(**GROUPED, mask="keys", softcap=150, alibi="heads", layout="sliced"),
            workload(**GROUPED, mask="heads", hidden=True, lse=True, sinks=True),
            workload(B=2, H=2, S=5, T=37, D=16, kv_heads=1, mask="full", hidden=True, lse=True, alibi="batches"),
            workload(B=2, H=2, S=3, T=35, D=16, bias="heads", times=3),
            workload(B=2, H=2, S=35, T=6, D=16, bias="keys", causal=True, layout="unaligned"),
            workload(B=2, H=2, S=6, T=7, D=16, bias="queries", sinks=True, dropout=30),
            workload(B=1, H=2, S=7, T=9, D=16, bias="square", hidden=True, lse=True),
            workload(**GROUPED, score="near", lse=True, left=12),
            workload(**SMALL, dropout=40, seed="tensor"),
            workload(B=3, H=2, S=9, T=40, D=16, kv_heads=1, packed=True, causal=True, lse=True, alibi="batches", dropout=20),
            workload(**GROUPED, scale=-20, layout="expanded", bias="one"),
            workload(B=2, H=2, S=4, T=0, D=16, sinks=True, lse=True),
            workload(B=2, H=2, S=0, T=3, D=16),
            workload(B=1, H=2, S=3, T=3, D=8),
        ],
        "full": [
            *(workload(B=1, H=4, S=s, T=t, D=d, kv_heads=2, causal=c, lse=True)
              for s, t, d in ((300, 333, 64), (129, 1025, 128), (513, 257, 96), (200, 200, 256)) for c in (False, True)),
            *(workload(B=2, H=6, S=257, T=301, D=64, kv_heads=2, bias=b, mask="full", dropout=10) for b in ("full", "batches", "keys")),
            workload(B=2, H=4, S=700, T=700, D=128, causal=True, left=128, sinks=True, softcap=3000, times=3),
            workload(B=5, H=4, S=300, T=300, D=64, kv_heads=1, packed=True, causal=True, lse=True, sinks=True),
            workload(B=1, H=4, S=257, T=301, D=192, dv=128, score="near", alibi="heads"),
        ],
        "huge": [workload("bf16", B=1, H=1, S=2**16, T=2**16, D=64, bias="full"), workload("bf16", B=1, H=2, S=2**17, T=2**17, D=64)],
        "bench": [
            *(workload("bf16", B=TOKENS // s, H=2048 // d, S=s, T=s, D=d, causal=c)
              for d in (64, 128) for s in (1024, 4096, 16384) for c in (False, True)),
            workload("bf16", B=4, H=32, S=4096, T=4096, D=128, kv_heads=8, causal=True),
            workload("bf16", B=4, H=64, S=4096, T=4096, D=64, kv_heads=8, causal=True, left=127, sinks=True),
            workload("bf16", B=4, H=16, S=4096, T=4096, D=192, dv=128, causal=True),
            workload("bf16", B=4, H=16, S=4097, T=4097, D=128, causal=True),
            workload("bf16", B=23, H=16, S=704, T=704, D=128, causal=True),
        ],
        "quick": [workload("bf16", B=1, H=16, S=2048, T=2048, D=128, causal=True)],
        "compile": [
            *(workload(B=1, H=4, S=512, T=512, D=d, causal=True) for d in (64, 128, 256)),
            *(workload("bf16", B=1, H=4, S=512, T=512, D=128, kv_heads=2, left=100, **more)
              for more in ({"bias": "heads", "mask": "keys", "alibi": "heads"}, {"softcap": 3000, "dropout": 10, "score": "near"})),
            workload("bf16", B=4, H=4, S=512, T=512, D=192, dv=128, packed=True, causal=True, sinks=True),
        ],
        "tune": [workload("bf16", B=TOKENS // 4096, H=2048 // d, S=4096, T=4096, D=d, causal=c) for d in (64, 128, 256) for c in (False, True)],
        "model": [
            workload("bf16", B=1, H=32, S=8192, T=8192, D=128, kv_heads=8, causal=True),
            workload("bf16", B=1, H=64, S=8192, T=8192, D=64, kv_heads=8, causal=True, left=127, sinks=True),
            workload("bf16", B=1, H=128, S=4096, T=4096, D=192, dv=128, causal=True),
        ],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("scale left out", lambda **a: reference(**{**a, "scale": 1.0})),
        Mutant("causal from the top left", _top_left),
        Mutant("window one wider", but(window=lambda w: tuple(None if n is None else n + 1 for n in w))),
        Mutant("sinks left out", lambda **a: reference(**{**a, "sinks": None})),
        Mutant("head of another group", _other_group),
        Mutant("soft cap left out", lambda **a: reference(**{**a, "softcap": None})),
        Mutant("soft cap after the mask", _cap_after_mask),
        Mutant("last keys left out", _hiding(lambda i, j: j < j.shape[0] // 32 * 32)),
        Mutant("lse in base 2", _wrong_lse(lambda lse: lse / math.log(2.0))),
        Mutant("lse without the maximum", _wrong_lse(lambda lse: lse - lse.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0))),
        Mutant("dropout not scaled", lambda **a: reference(**{**a, "v": a["v"] * (1 - a["dropout"])})),
        Mutant("seed ignored", but(seed=lambda seed: 0)),
        Mutant("offset ignored", but(offset=lambda offset: 0)),
        Mutant("slopes negated", but(alibi=torch.neg)),
        Mutant("slope of another head", but(alibi=lambda a: a.roll(1, -1))),
        Mutant("bias left out", lambda **a: reference(**{**a, "bias": None})),
        Mutant("mask left out", lambda **a: reference(**{**a, "mask": None})),
        Mutant("mask inverted", but(mask=torch.logical_not)),
        Mutant("score left out", lambda **a: reference(**{**a, "score": None})),
        Mutant("sequences see each other", but(cu_seqlens_q=lambda c: c[[0, -1]], cu_seqlens_k=lambda c: c[[0, -1]], alibi=lambda a: a[-1])),
        Mutant("mean where nothing is seen", _mean_where_nothing_is_seen),
        *mutants.usual(gradient, "backward"),
        Mutant("delta left out", _of(_without_delta), "backward"),
        Mutant("lse's gradient left out", _of(_lse_without_gradient), "backward"),
        Mutant("causal from the top left", _of(_top_left), "backward"),
        Mutant("another dropout mask", mutants.changed(gradient, offset=lambda offset: offset + 1), "backward"),
        Mutant("scale left out", _wrong("q", lambda t, a: t / (a["scale"] or a["q"].shape[-1] ** -0.5)), "backward"),
        Mutant("mean of a group's heads", _wrong("k", lambda t, a: t * (t.shape[1] / a["q"].shape[1])), "backward"),
        Mutant("v's dropout not scaled", _wrong("v", lambda t, a: t * (1 - a["dropout"])), "backward"),
        Mutant("bias's not summed", _wrong("bias", lambda t, a: t / _broadcast(t, a)), "backward"),
        Mutant("sink's sign", _wrong("sinks", lambda t, a: -t), "backward"),
    ],
)  # fmt: skip

attention.implementation("triton", arch=">=sm_80")(attention_triton)
peers.register(attention, in_torch)
attention.implementation("flex_attention", devices=("cuda",))(flex)
attention.implementation("fa3", requires="fa3-fwd", devices=("cuda",), directions=("forward",))(fa3)


@attention.choice
@guarded
def choose(q: Tensor, k: Tensor, v: Tensor, *, direction: str = "forward", **named: Any) -> Choice:
    q, k, v = cast_for_products(q, k, v)
    tensors, options, _, _ = parts_of(q, k, v, **named)
    chosen = FORWARD.choose(*tensors, options)
    if options.threshold:
        check_seed(NAME, q, named.get("seed"), named.get("offset", 0))
    check_flag(NAME, "return_lse", named.get("return_lse", False))
    if direction == "forward" or chosen.implementation == "torch":  # then backward is PyTorch's, too
        return chosen
    o = result_like(q, v.shape[-1])
    return BACKWARD.choose(q, k, v, o, o, *tensors[3:], options)


@attention.function
def attention_function(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None,
    mask: Tensor | None = None, bias: Tensor | None = None, score: Score | None = None, dropout: float = 0.0,
    seed: int | Tensor | None = None, offset: int = 0, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention: softmax(scale · q kᵀ, changed as the options say) v, the scores never stored.

    Query i of Sq stands at i + Sk - Sq among the Sk keys: the last query at the last key (*bottom-right*, as in FlashAttention; PyTorch's
    ``is_causal`` differs where Sq and Sk do). A score is scaled, capped, ``alibi`` and ``bias`` added, ``score`` applied; then keys are
    hidden that causal, window or mask hide. A query that sees nothing gets zeros, and gives zero gradients.

    Args:
        q: [B, H, Sq, D]; float32, float16 or bfloat16, D and Dv 16 … 256 for the kernels. Of any strides:
            ``x.transpose(1, 2)`` of [B, S, H, D] is read where it lies, and the result lies so, too.
        k, v: [B, G, Sk, D] and [B, G, Sk, Dv], of q's dtype; G divides H, and head h of q reads head h // (H / G).
        causal: keys behind a query's position are hidden.
        window: (left, right): so many keys before and behind a query's position are seen; None for all of a side.
        scale: of the products; D**-0.5 if None.
        softcap: c, for scores c · tanh(s / c) (Gemma 2).
        sinks: [H], a logit for each head of a key without a value: it takes its share of the softmax (gpt-oss).
        alibi: slopes [H] or [B, H]: a score loses slope · |distance of query and key| (Press et al. 2021).
        mask: boolean, broadcastable to [B, H, Sq, Sk]; true is seen. Key padding is [B, 1, 1, Sk].
        bias: of q's dtype or float32, broadcastable to [B, H, Sq, Sk]; added to the scores.
        score: a :class:`~weft.operators.attention.score.Score`, any function of a score and its position.
        dropout: probability of setting a softmax weight to 0; the others are divided by 1 - p. Rounded to a multiple of 2**-16.
        seed, offset: of dropout's mask, as ``weft.ops.dropout`` takes them: the weight at (b, h, i, j) has the mask of that
            index in [B, H, Sq, Sk rounded up to 8] (packed: [H, total, total of keys rounded up], j within its sequence).
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1] from 0 on, for N packed sequences of any lengths: q is [total, H, D] then, k
            [total of keys, G, D], v likewise; a query sees its own sequence. Nothing waits for the device. Tokens behind the last
            sequence get zeros.
        return_lse: also return the log-sum-exp of each row of scores (with the sink).

    Returns:
        [B, H, Sq, Dv] (packed: [total, H, Dv]) of q's dtype; with ``return_lse`` also the natural log-sum-exp in float32, [B, H, Sq]
        ([H, total]), -inf where nothing is seen. Gradients flow from both to q, k, v, bias and sinks, without atomics: the same bits
        every time. Products of float32 are exact to fp32 (no tf32); softmax is in fp32. Under autocast q, k and v are cast as
        PyTorch casts them for products.

    Raises:
        TypeError: tensors of other dtypes, options of other types.
        ValueError: shapes or devices that do not fit, options out of range, a mask or bias beside cu_seqlens, a ``score`` without a
            gradient where one is needed.

    Source: Dao et al. 2022 (arXiv 2205.14135), Milakov & Gimelshein 2018 (arXiv 1805.02867).
    """
    q, k, v = cast_for_products(q, k, v)
    named: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks, "alibi": alibi, "mask": mask,
        "bias": bias, "score": score, "dropout": dropout, "seed": seed, "offset": offset, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "return_lse": return_lse,
    }  # fmt: skip
    choice = choose(q, k, v, **named).implementation
    named = with_seed(q, named)
    if choice == "torch":
        return reference(q, k, v, **named)
    return launched(parts_of(q, k, v, **named), return_lse, PUBLIC)
