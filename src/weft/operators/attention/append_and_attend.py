"""``append_and_attend(q, k, v, k_pages, v_pages, page_table, lengths, …)``: a step of decoding, from a paged cache.

``append_to_cache`` and ``paged_decode_attention`` at once: reads the cached keys and values once, and the new tokens, which it
also writes. In one launch for one new token; reading the cache is the limit.
"""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.attention.append_and_attend_dispatch import NAME, STEP, parts_of
from weft.operators.attention.append_to_cache import append_to_cache_function
from weft.operators.attention.append_to_cache import cost as cost_of_append
from weft.operators.attention.append_to_cache import reference as append
from weft.operators.attention.decode_points import AXES, CACHES, TIMED, lengths_of, paged_inputs, result_terms
from weft.operators.attention.decode_points import cost as cost_of_decoding
from weft.operators.attention.decode_reference import paged_decode
from weft.operators.attention.paged_decode_attention import paged_decode_attention_function
from weft.operators.call import Choice, eager, guarded
from weft.operators.mutants import changed
from weft.operators.normalization.reference import normalised
from weft.operators.normalization.rms_norm import rms_norm_function
from weft.operators.random_inputs import random_tensor

# B batch, H heads of q, G heads of k and v, T new tokens of a sequence (of workloads S; T is the cache's room), D head dim


def composed(norm: Any, append: Any, attend: Any) -> Any:
    """The step as what it consists of."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, *,
        cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False, q_norm: Tensor | None = None,
        k_norm: Tensor | None = None, eps: float = 1e-6, window: Any = None, scale: float | None = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None, counters: Tensor | None = None, **of_mutants: Any,
    ) -> Tensor:  # fmt: skip
        if q_norm is not None:
            q, k = norm(q, q_norm, eps), norm(k, k_norm, eps)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        turned = append(k, v, k_pages, v_pages, lengths, page_table, q=None if cos is None else q, cos=cos, sin=sin,
                        interleaved=interleaved, **scales)  # fmt: skip
        named: dict[str, Any] = {"causal": True, "window": window, "scale": scale, **scales, **of_mutants}
        o: Tensor = attend(q if turned is None else turned, k_pages, v_pages, page_table, lengths, **named)
        return o

    return step


reference = composed(lambda x, w, eps: normalised(x, w, None, eps, False), append, paged_decode)
separate = composed(rms_norm_function, append_to_cache_function, paged_decode_attention_function)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """q [B, H, S, D], k and v [B, G, S, D] and pages of ``paged_decode_attention``; in caches that are not timed the new
    tokens' slots and those behind them hold NaN."""
    (b, s, d), page = (w[a] for a in "BSD"), w.option("page", 16)
    drawn = paged_inputs(w, g, device)
    names = ("q", "k_pages", "v_pages", "page_table", "lengths", "window", "scale", "k_scale", "v_scale")
    call: dict[str, Any] = {n: drawn[n] for n in names}
    groups, capacity = call["k_pages"].shape[2], call["page_table"].shape[1] * page
    for name, width in (("k", d), ("v", w.option("dv", d))):
        if w.option("layout") == "transposed":
            call[name] = random_tensor(g, (b, s, groups, width), w.dtype, device).transpose(1, 2)
        else:
            call[name] = random_tensor(
                g, (b, groups, s, width), w.dtype, device, layout=w.option("layout", "contiguous")
            )
    for name in ("cos", "sin"):
        columns = min(w.option("rotary", 0), d) // 2
        call[name] = random_tensor(g, (capacity + 1, columns), "fp32", device).clamp(-1, 1) if columns else None
    call |= {"interleaved": w.option("interleaved", False), "eps": 1e-5}
    for name in ("q_norm", "k_norm"):
        call[name] = random_tensor(g, (d,), w.dtype, device) + 1 if w.option("norm") else None
    if w["T"] < TIMED and device != "meta" and not w.option("cache"):
        pages = call["k_pages"].shape[0]
        for n, length in enumerate(lengths_of(w)):
            for at in range(max(length - s, 0), capacity):
                if 0 <= (p := int(call["page_table"][n, at // page])) < pages:
                    call["k_pages"][p, at % page] = call["v_pages"][p, at % page] = torch.nan
    call["counters"] = torch.zeros(b * groups * (-(-s * w["H"] // groups // 64) + 1), dtype=torch.int32, device=device)
    return call


def cost(w: Workload, direction: str) -> Cost:
    """The cost of attention, whose new tokens are read from k and v and not from the cache, and are written."""
    groups = w.option("kv_heads", w["H"])
    options = {n: o for n, o in w.options.items() if n in ("page", "holes", "dv", "cache", "rotary", "lengths")}
    tokens = Workload({"B": w["B"], "G": groups, "S": w["S"], "T": w["T"], "D": w["D"]}, w.dtype, options)
    attention, appended = cost_of_decoding(w, direction), cost_of_append(tokens, direction)
    return Cost(attention.reads + appended.reads - appended.writes, attention.writes + appended.writes, attention.matrix_flops,
                appended.vector_flops, attention.special_ops)  # fmt: skip


def magnitudes(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """Of the output as for ``paged_decode_attention``, of the cache a row's root mean square."""
    a = {**arguments, "k_pages": arguments["k_pages"].clone(), "v_pages": arguments["v_pages"].clone()}
    turned: dict[str, Tensor] = {}

    def attend(q: Tensor, *rest: Any, **named: Any) -> Tensor:
        turned["q"] = q
        return q

    composed(lambda x, w, eps: normalised(x, w, None, eps, False), append, attend)(**a)
    names = ("k_pages", "v_pages", "page_table", "lengths", "window", "scale", "k_scale", "v_scale")
    decoding = {n: a[n] for n in names} | {"q": turned["q"], "causal": True, "return_lse": False}
    of_rows = (a[n].double().nan_to_num(0.0) for n in ("k_pages", "v_pages"))
    return [*result_terms(decoding, gradients),
            *(t.square().mean(-1, keepdim=True).sqrt().expand_as(t) for t in of_rows)]  # fmt: skip


def _new_left_out(**a: Any) -> Any:
    """The right cache, and attention without the page of the newest token."""
    pages = {n: a[n].clone() for n in ("k_pages", "v_pages")}
    reference(**a)
    table, page = a["page_table"].clone(), pages["k_pages"].shape[1]
    last = (a["lengths"].long()[:, None] - 1) // page
    at = torch.arange(table.shape[1], device=table.device)
    return reference(**{**a, **pages, "page_table": torch.where(at == last, -1, table)})


LLAMA = {"H": 32, "S": 1, "D": 128, "kv_heads": 8, "page": 16, "rotary": 128}  # Llama-3 8B

append_and_attend = Operator(
    name=NAME,
    axes={**AXES, "S": "new tokens of a sequence"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "layout": ("contiguous", "transposed", "sliced", "strided", "unaligned"),
        "dv": range(1, 257),
        "kv_heads": range(1, 2**16),
        "lengths": ("uneven", "half"),
        "page": range(1, 2**16),
        "holes": (False, True),
        "left": range(2**31),
        "scale": range(-(2**31), 2**31),
        "rotary": range(2, 257),
        "interleaved": (False, True),
        "norm": (False, True),
        "cache": tuple(CACHES),
        "scales": ("one", "heads"),
    },
    mutates=("k_pages", "v_pages"),
    tolerance=Tolerance(ulps=2.0, terms=lambda w: w["D"] + w["T"], scale=magnitudes, neighbours=0.01),
    workloads={
        "verify": [
            workload(B=1, H=1, S=1, T=1, D=16, page=1),
            workload(B=3, H=4, S=1, T=70, D=16, kv_heads=2, page=16, rotary=16, lengths="half"),
            workload(B=6, H=7, S=1, T=100, D=24, kv_heads=1, page=7, lengths="uneven", rotary=20, interleaved=True, dv=40),
            workload(B=5, H=6, S=3, T=130, D=32, kv_heads=2, page=16, lengths="uneven", rotary=32, norm=True,
                     layout="transposed"),
            workload(B=6, H=4, S=1, T=200, D=16, kv_heads=2, page=8, holes=True, lengths="uneven", rotary=16),
            workload(B=2, H=14, S=1, T=300, D=32, kv_heads=2, page=256, lengths="half", rotary=8, norm=True),
            workload(B=6, H=4, S=1, T=130, D=16, kv_heads=2, page=32, left=40, rotary=16, lengths="uneven"),
            workload(B=5, H=4, S=1, T=66, D=32, kv_heads=2, page=16, cache="fp8", scales="heads", lengths="uneven", rotary=32),
            workload(B=3, H=4, S=1, T=66, D=32, kv_heads=2, page=16, cache="int8", scales="heads", lengths="half", rotary=16,
                     interleaved=True, norm=True),
            workload(B=2, H=4, S=2, T=66, D=16, kv_heads=2, page=5, cache="int8", scales="one", rotary=16),
            workload(B=2, H=4, S=1, T=66, D=24, kv_heads=4, page=5, cache="fp8"),
            workload(B=2, H=80, S=1, T=66, D=16, kv_heads=1, page=4, rotary=16),
            *(workload(B=2, H=2, S=1, T=40, D=16, page=4, layout=at, scale=30) for at in ("sliced", "strided", "unaligned")),
            workload(B=2, H=2, S=1, T=0, D=16, page=4),
            workload(B=1, H=2, S=1, T=9, D=8, page=2, rotary=8),
        ],
        "full": [
            *(workload(B=6, H=8, S=1, T=1000, D=128, kv_heads=2, page=p, lengths="uneven", rotary=128, holes=True, norm=True)
              for p in (1, 3, 16, 128)),
            *(workload(B=6, H=8, S=1, T=1000, D=128, kv_heads=2, page=16, lengths="uneven", rotary=128, cache=c, scales="heads")
              for c in ("fp8", "int8")),
        ],
        "bench": [
            *(workload("bf16", **LLAMA, B=b, T=t) for b, t in ((1, 2048), (8, 2048), (64, 2048), (1, 32768))),
            workload("bf16", B=1, H=32, S=1, T=2048, D=64, kv_heads=8, page=16, rotary=64),
            workload("bf16", **LLAMA, B=8, T=2048, cache="fp8", scales="one"),
        ],
        "quick": [workload("bf16", **LLAMA, B=8, T=2048)],
        "compile": [
            workload("bf16", **LLAMA, B=4, T=8192, lengths="half"),
            *(workload("bf16", **LLAMA, B=4, T=8192, cache=c, scales="one") for c in ("fp8", "int8")),
            workload("fp16", B=4, H=28, S=1, T=8192, D=128, kv_heads=4, page=16, rotary=128, norm=True, left=1000),
            workload("fp32", B=4, H=8, S=1, T=8192, D=80, kv_heads=2, page=16, rotary=80, interleaved=True),
        ],
        "model": [workload("bf16", **LLAMA, B=64, T=4096)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("nothing is written", lambda **a: reference(**{**a, **{n: a[n].clone() for n in ("k_pages", "v_pages")}})),
        Mutant("new token not seen", _new_left_out),
        Mutant("new tokens see later ones", lambda **a: reference(**{**a, "causal": False})),
        Mutant("one token late", changed(reference, lengths=lambda n: n + 1)),
        Mutant("one token early", changed(reference, lengths=lambda n: n - 1)),
        Mutant("k and v exchanged", lambda **a: reference(**{**a, "k": a["v"], "v": a["k"]}) if a["k"].shape == a["v"].shape
               else reference(**a)),
        Mutant("k not rotated", lambda **a: reference(**{**a, "cos": None, "sin": None})),
        Mutant("angles of position 0", changed(reference, cos=lambda t: t if t is None else t[:1].expand_as(t),
                                               sin=lambda t: t if t is None else t[:1].expand_as(t))),
        Mutant("pairs of the other kind", lambda **a: reference(
            **{**a, "interleaved": not a["interleaved"] and a["cos"] is not None})),
        Mutant("norm left out", lambda **a: reference(**{**a, "q_norm": None, "k_norm": None})),
        Mutant("weights of q and k exchanged", lambda **a: reference(**{**a, "q_norm": a["k_norm"], "k_norm": a["q_norm"]})),
        Mutant("eps left out", lambda **a: reference(**{**a, "eps": 1.0})),
        Mutant("scale left out", lambda **a: reference(**{**a, "scale": 1.0})),
        Mutant("heads of q shifted", changed(reference, q=lambda q: q.roll(1, 1))),
        Mutant("window one wider", lambda **a: reference(
            **{**a, "window": a["window"] and (a["window"][0] + 1, None)})),
        Mutant("scale of codes left out", lambda **a: reference(**{**a, "k_scale": None, "v_scale": None})),
        Mutant("pages in order", changed(reference, page_table=lambda t: torch.arange(
            t.numel(), dtype=t.dtype, device=t.device).view(t.shape))),
        Mutant("hole written to page 0", changed(reference, page_table=lambda t: t.clamp(min=0))),
    ],
)  # fmt: skip


TRITON = STEP.kernel("triton")


@append_and_attend.implementation("triton", arch=">=sm_80")
def append_and_attend_triton(*call: Any, **named: Any) -> Tensor:
    tensors, options = parts_of(*call, **named)
    if 0 in (tensors[0].numel(), tensors[3].numel(), tensors[5].numel()):
        out: Tensor = reference(*call, **named)
        return out
    out = TRITON.of(tensors, options)(*tensors)
    return out


peers.register(append_and_attend, reference)
append_and_attend.implementation("separate")(separate)


@append_and_attend.choice
@guarded
def choose(*call: Any, **named: Any) -> Choice:
    tensors, options = parts_of(*call, **named)
    return STEP.choose(*tensors, options)


@append_and_attend.function
def append_and_attend_function(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, *,
    cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, eps: float = 1e-6, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, counters: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes the keys and values of new tokens into a paged cache and attends to it: ``append_to_cache`` and then
    ``paged_decode_attention``, whose arguments these are, in one launch where each sequence has one new token.

    New token t of T of sequence b has position lengths[b] - T + t. Its query sees the cached keys before it, the new ones up to
    its own, and of these the ``window``. A token without a place (a negative position, one beyond the cache, a page that is
    none) is neither written nor seen, and a query that sees nothing gets zeros.

    Args:
        q: [B, H, T, D]; float32, float16 or bfloat16, any strides. One launch for T = 1, else an append and attention.
        k, v: [B, G, T, D] and [B, G, T, Dv]; G divides H.
        k_pages, v_pages: [P, page, G, D] and [P, page, G, Dv], of q's dtype, int8 or float8_e4m3fn. Written in place.
        page_table: int32 [B, N], the page of each stretch of a sequence. No two sequences may have the slot of a new token.
        lengths: int32 [B], tokens of each sequence with the new ones. Read on the device.
        cos, sin: [positions, R/2], angles by which q and k are rotated, as ``append_to_cache`` takes them; None: not at all.
        interleaved: pairs are neighbours instead of halves.
        q_norm, k_norm: [D], weights of a root-mean-square norm of each head of q and of k ahead of the rotation, with ``eps``.
        window, scale: as in ``weft.ops.attention``, causal.
        k_scale, v_scale: float32 [] or [G], of codes.
        counters: int32 [C], zeros, which the call leaves zeros; C of B · G · ⌈T · H / G / 64⌉ or more, 4096 for any call. Calls
            that cannot overlap, as those of one stream, may share them. Without any, a call that is captured in a CUDA graph
            fills its own, by one more launch.

    Returns:
        [B, H, T, Dv] of q's dtype, in the order that q lies in. The same bits every time; sums are in fp32.

    Raises:
        TypeError: tensors of other dtypes, options of other types.
        ValueError: shapes or devices that do not fit, caches whose elements share memory, a tensor that wants a gradient.

    Source: Dao et al. 2023 (Flash-Decoding), Kwon et al. 2023 (arXiv 2309.06180).
    """
    named: dict[str, Any] = {
        "cos": cos, "sin": sin, "interleaved": interleaved, "q_norm": q_norm, "k_norm": k_norm, "eps": eps, "window": window,
        "scale": scale, "k_scale": k_scale, "v_scale": v_scale, "counters": counters,
    }  # fmt: skip
    call = (q, k, v, k_pages, v_pages, page_table, lengths)
    tensors, options = parts_of(*call, **named)
    ready = all(isinstance(t, Tensor) for t in tensors) and eager(*tensors, autocast=True)
    out: Tensor
    if ready and (plan := STEP.of(tensors, options)) is not None:
        out = plan(*tensors)
    elif choose(*call, **named).implementation == "triton":
        out = append_and_attend_triton(*call, **named)
    else:
        out = separate(*call, **named)
    return out
