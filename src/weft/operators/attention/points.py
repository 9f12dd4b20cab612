"""Where attention is verified and timed: arguments of a workload, its compulsory work, the size of its gradients' terms."""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Workload
from weft.operators.attention.dispatch import heads_first
from weft.operators.attention.reference import reference
from weft.operators.attention.score import Score
from weft.operators.random_inputs import random_tensor

# B batch (or N packed sequences), H heads of q, G heads of k and v, S queries, T keys, D head dim of q and k, Dv of v


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
OPTIONS = {  # of every attention
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
    "lse": (False, True),
    "times": range(1, 2**10),
}
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
    """q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv]; with ``packed`` B sequences of :func:`lengths`, with tokens of none: one
    behind them, ``ahead`` before them. Numbers that are no integers are given in per cent (``scale``, ``softcap``,
    ``dropout``); ``times`` multiplies q."""
    (b, h, s, t, d), groups = (w[a] for a in "BHSTD"), w.option("kv_heads", w["H"])
    layout, packed, ahead = w.option("layout", "contiguous"), w.option("packed", False), w.option("ahead", 0)
    queries, keys = lengths(w)

    def drawn(heads: int, tokens: int, lengths: list[int], width: int) -> Tensor:
        if packed:
            return random_tensor(g, (ahead + sum(lengths) + 1, heads, width), w.dtype, device, layout=layout)
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
            ends = [ahead + sum(of[:n]) for n in range(b + 1)]
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
    """q, k, v and the output (and their gradients), masks and biases as small as they are; two products of each visible pair,
    five in backward."""
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


def gradient_terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """The root of the summed squares of what each gradient adds up: a probability times its gradient and times the row's delta,
    which cancel where one key has all the weight."""
    q, k, v = (heads_first(arguments[n]) for n in "qkv")
    do, (b, h, s, _), (g, t) = heads_first(gradients[0]), q.shape, k.shape[1:3]
    each = torch.eye(t, dtype=q.dtype, device=q.device).expand(b, g, t, t)
    each = each[0].transpose(0, 1) if arguments["q"].ndim == 3 else each
    plain = {**arguments, "dropout": 0.0, "return_lse": False}
    p, o = heads_first(reference(**{**plain, "v": each})), heads_first(reference(**plain))
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
