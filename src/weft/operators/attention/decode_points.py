"""Where decoding is verified and timed: arguments of a workload, and its compulsory work."""

import functools
from typing import Any

import torch
from torch import Tensor

from weft.definition import BYTES, Cost, Workload
from weft.operators.attention.decode_function import decode_plan
from weft.operators.attention.decode_reference import decode, dequantized, gathered, known, positions
from weft.operators.attention.points import OPTIONS as EVERY
from weft.operators.random_inputs import random_tensor

# B batch, H heads of q, G heads of the cache, S queries, T keys that the cache has room for, D and Dv head dims

TIMED = 4096  # keys of caches that are timed: peers multiply what lies behind a length by a probability of 0
CACHES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
AXES = {
    "B": "batches",
    "H": "heads of q",
    "S": "queries of a sequence",
    "T": "keys that the cache has room for",
    "D": "head dim",
}
OPTIONS = {
    **EVERY,
    "lengths": ("uneven", "half"),
    "cache": tuple(CACHES),
    "scales": ("one", "heads"),
    "invariant": (False, True),
    "plan": (False, True),
}
PAGED_OPTIONS = {**OPTIONS, "page": range(1, 2**16), "holes": (False, True)}


def lengths_of(w: Workload) -> list[int]:
    """Valid keys of each sequence: all; a half; or all, none, one, and odd numbers of them."""
    b, t = w["B"], w["T"]
    if w.option("lengths") == "uneven":
        return [(t, 0, min(t, 1), max(t - 3, 0), t // 3)[n % 5] for n in range(b)]
    return [t // 2 if w.option("lengths") == "half" else t] * b


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv]; behind a length is NaN, but in caches that are timed. Numbers that are
    no integers are given in per cent (``scale``, ``softcap``); ``times`` multiplies q."""
    (b, t), groups = (w[a] for a in "BT"), w.option("kv_heads", w["H"])
    call: dict[str, Any] = {"q": _queries(w, g, device)}
    for name, width in (("k", w["D"]), ("v", w.option("dv", w["D"]))):
        if w.option("layout") == "transposed":  # [B, T, G, D] in memory
            x = _drawn(w, g, device, (b, t, groups, width)).transpose(1, 2)
        else:
            x = _drawn(w, g, device, (b, groups, t, width), w.option("layout", "contiguous"))
        if w.option("lengths") == "uneven" and t < TIMED and device != "meta" and not w.option("cache"):
            for n, length in enumerate(lengths_of(w)):
                x[n, :, length:] = torch.nan
        call[name] = x
    lengths = torch.tensor(lengths_of(w), dtype=torch.int32, device=device) if w.option("lengths") else None
    call |= {"lengths": lengths, **_more(w, g, device)}
    if w.option("plan"):
        call["plan"] = decode_plan(**{n: call[n] for n in ("q", "k", "v", "lengths", "causal", "window")})
    return call


def paged_inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """q as above; pages of ``page`` tokens in random order, some of no sequence. With ``holes`` every third page of a sequence
    is none, -1 or beyond the last."""
    page, groups = w.option("page", 16), w.option("kv_heads", w["H"])
    each = -(-w["T"] // page)
    count = w["B"] * each + 3
    call: dict[str, Any] = {"q": _queries(w, g, device)}
    for name, width in (("k_pages", w["D"]), ("v_pages", w.option("dv", w["D"]))):
        if w.option("layout") == "transposed":  # [P, G, page, D] in memory
            call[name] = _drawn(w, g, device, (count, groups, page, width)).transpose(1, 2)
        else:
            call[name] = _drawn(w, g, device, (count, page, groups, width), w.option("layout", "contiguous"))
    call["page_table"] = torch.empty((w["B"], each), dtype=torch.int32, device=device)
    if device != "meta":
        order = torch.randperm(count, generator=g, device=g.device if g is not None else device)[: w["B"] * each]
        call["page_table"].copy_(order.view(w["B"], each))
        if w.option("holes"):
            call["page_table"][:, 2::6], call["page_table"][:, 5::6] = -1, count
    call["lengths"] = torch.tensor(lengths_of(w), dtype=torch.int32, device=device)
    call |= _more(w, g, device)
    if w.option("plan"):
        named = {n: call[n] for n in ("page_table", "causal", "window")}
        call["plan"] = decode_plan(call["q"], call["k_pages"], call["v_pages"], call["lengths"], **named)
    return call


def _queries(w: Workload, g: Any, device: str) -> Tensor:
    b, h, s, d = (w[a] for a in "BHSD")
    if w.option("layout") == "transposed":
        q = random_tensor(g, (b, s, h, d), w.dtype, device).transpose(1, 2)
    else:
        q = random_tensor(g, (b, h, s, d), w.dtype, device, layout=w.option("layout", "contiguous"))
    return q.mul_(w.option("times")) if w.option("times") else q


def _drawn(w: Workload, g: Any, device: str, shape: tuple[int, ...], layout: str = "contiguous") -> Tensor:
    """Of a cache: numbers, or random codes (of fp8 any but NaN, of which int8's bits are none)."""
    if not w.option("cache"):
        return random_tensor(g, shape, w.dtype, device, layout=layout)
    x = random_tensor(g, shape, "fp32", device)
    return (x * 30).clamp(-127, 127).round().to(CACHES[w.option("cache")])


def _more(w: Workload, g: Any, device: str) -> dict[str, Any]:
    b, h, groups = w["B"], w["H"], w.option("kv_heads", w["H"])
    left, right = w.option("left", -1), w.option("right", -1)
    call: dict[str, Any] = {"causal": w.option("causal", True), "window": None}
    if max(left, right) >= 0:
        call["window"] = tuple(None if n < 0 else n for n in (left, right))
    for name in ("scale", "softcap"):
        call[name] = w.option(name) / 100 if w.option(name) is not None else None
    call["sinks"] = random_tensor(g, (h,), w.dtype, device) if w.option("sinks") else None
    call["alibi"] = None
    if w.option("alibi"):
        slopes = random_tensor(g, (h,) if w.option("alibi") == "heads" else (b, h), "fp32", device)
        call["alibi"] = slopes.abs() / 8
    for name in ("k_scale", "v_scale"):
        call[name] = None
        if w.option("cache"):
            shape = (groups,) if w.option("scales") == "heads" else (1,)
            scale = random_tensor(g, shape, "fp32", device).abs() / 40 + 0.01
            call[name] = scale if w.option("scales") == "heads" else scale[0].clone()
    return {**call, "return_lse": w.option("lse", False), "batch_invariant": w.option("invariant", False), "plan": None}


@functools.lru_cache(256)
def seen_of(queries: int, keys: int, lengths: tuple[int, ...], causal: bool, left: int, right: int, page: int,
            ) -> tuple[int, int]:  # fmt: skip
    """Keys that any query of its sequence sees, summed over the batch, and pairs of a query and a key that it sees; of pages
    every third is a hole where ``page`` is not 0."""
    totals = [0, 0]
    for length in set(lengths):
        window = tuple(None if n < 0 else n for n in (left, right))
        one = torch.empty(1, 1, queries, 1, device="cpu")
        cache = torch.empty(1, 1, 1, 1, device="cpu").expand(1, 1, keys, 1)
        there = torch.arange(keys)[None] // page % 3 != 2 if page else None
        seen, _ = positions(one, cache, torch.tensor([length], dtype=torch.int32), causal, window, there)
        totals[0] += int(seen.any(2).sum()) * lengths.count(length)
        totals[1] += int(seen.sum()) * lengths.count(length)
    return totals[0], totals[1]


def cost(w: Workload, direction: str) -> Cost:
    """q, the keys and values that any query sees, the output; two products of each visible pair."""
    b, h, s, d, groups, dv = w["B"], w["H"], w["S"], w["D"], w.option("kv_heads", w["H"]), w.option("dv", w["D"])
    page = w.option("page", 16) if w.option("holes") else 0
    bounds = w.option("left", -1), w.option("right", -1)
    keys, pairs = seen_of(s, w["T"], tuple(lengths_of(w)), w.option("causal", True), *bounds, page)
    size = w.bytes_per_element
    of_cache = BYTES[w.option("cache")] if w.option("cache") else size
    lse = 4 * b * h * s if w.option("lse") else 0
    reads = b * h * s * d * size + keys * groups * (d + dv) * of_cache
    return Cost(reads, b * h * s * dv * size + lse, {w.dtype: 2.0 * h * pairs * (d + dv)}, special_ops=h * pairs)


def result_terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """A row's root mean square of the output, and of a log-sum-exp the size of what it adds up: it errs as its scores do, and a
    score, a sum of D products, by its products' size. Of one key it is that key's score, which may be next to nothing."""
    a = {**arguments, "return_lse": True}
    if "page_table" in a:
        table, k, v = (a.pop(name) for name in ("page_table", "k_pages", "v_pages"))
        there = known(table, k.shape[0]).repeat_interleave(k.shape[1], 1)
        a |= {"there": there, "k": gathered(k, table), "v": gathered(v, table)}
    of_rows = [t.nan_to_num(neginf=0.0).square().mean(-1, keepdim=True).sqrt().expand_as(t) for t in decode(**a)]
    if not arguments["return_lse"]:
        return of_rows[:1]
    squares = dequantized(a["k"], a["k_scale"], torch.float64).square()
    of_keys = decode(**a | {"v": squares, "v_scale": None})[0]  # of each column, by the probabilities
    scale = abs(a["q"].shape[-1] ** -0.5 if a["scale"] is None else a["scale"])
    return [of_rows[0], of_rows[1].maximum(scale * (a["q"].square() * of_keys).sum(-1).sqrt())]
