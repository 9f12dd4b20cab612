"""``append_to_cache(k, v, k_cache, v_cache, lengths, …)``: new tokens' keys and values into a cache, rotated and quantised.

Reads the new tokens once and writes them once: a launch is the limit.
"""

from typing import Any

import torch
from torch import Tensor

from weft.definition import BYTES, Cost, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import peers
from weft.operators.attention.append_dispatch import APPEND, NAME, OPTIONAL, Options
from weft.operators.attention.decode_dispatch import CODES
from weft.operators.attention.decode_points import CACHES, lengths_of
from weft.operators.call import Choice, eager, guarded
from weft.operators.checks import check_flag
from weft.operators.mutants import changed
from weft.operators.quantization.formats import format_of, rounded
from weft.operators.random_inputs import random_tensor
from weft.operators.rotary.dispatch import narrowed
from weft.operators.rotary.rotary_embedding import reference as rotate

# B batch, G heads of k and v, H heads of q, S new tokens of a sequence, T tokens that the cache has room for, D head dim


def reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None = None, *,
    q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
    tokens, page = k.shape[2], k_cache.shape[1]
    capacity = k_cache.shape[2] if page_table is None else page_table.shape[1] * page
    position = lengths.long()[:, None] - tokens + torch.arange(tokens, device=k.device)  # [B, S]
    there = (position >= 0) & (position < capacity)
    new, values = k.to(dtype).transpose(1, 2), v.to(dtype).transpose(1, 2)  # [B, S, G, D]
    turned = q
    if cos is not None and sin is not None and capacity:
        at = position.clamp(0, capacity - 1)
        cos, sin = (narrowed(t, k.shape[3])[at] for t in (cos, sin))
        wide = new if q is None else q.to(dtype).transpose(1, 2)
        wide, new = rotate(wide, new, cos, sin, interleaved)
        turned = None if q is None else wide.transpose(1, 2).to(q.dtype)
    outer, row = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(position), position
    if page_table is not None and capacity:
        outer = page_table.long().gather(1, (position // page).clamp(0, page_table.shape[1] - 1))
        there = there & (outer >= 0) & (outer < k_cache.shape[0])
        row = position % page
    with torch.no_grad():
        for cache, x, scale in ((k_cache, new, k_scale), (v_cache, values, v_scale)):
            place = cache if page_table is not None else cache.transpose(1, 2)  # tokens, then heads
            _bits(place)[outer[there], row[there]] = _bits(_stored(x, cache.dtype, scale)[there])
    return turned


def _stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """[B, S, G, D] as a cache of this dtype holds it."""
    if scale is not None:
        x = x / scale.to(x.dtype).reshape(-1, 1)
    return rounded(x, format_of(dtype)) if dtype in CODES else x.to(dtype)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """k, v [B, G, S, D] (``layout`` transposed: of [B, S, G, D]) and a cache that is full of other numbers; ``heads`` of q,
    ``rotary`` columns (at most D), ``page`` and ``holes`` of pages, ``cache`` and ``scales`` of codes."""
    (b, groups, s, t, d), page = (w[a] for a in "BGSTD"), w.option("page", 0)
    dv = w.option("dv", d)

    def new(heads: int, width: int) -> Tensor:
        if w.option("layout") == "transposed":
            return random_tensor(g, (b, s, heads, width), w.dtype, device).transpose(1, 2)
        return random_tensor(g, (b, heads, s, width), w.dtype, device, layout=w.option("layout", "contiguous"))

    call: dict[str, Any] = {"k": new(groups, d), "v": new(groups, dv)}
    each = -(-t // page) if page else 0
    dtype = CACHES[w.option("cache")] if w.option("cache") else torch_dtype(w.dtype)
    for name, width in (("k_cache", d), ("v_cache", dv)):
        shape = (b * each + 2, page, groups, width) if page else (b, t, groups, width)
        x = random_tensor(g, shape, "fp32" if w.option("cache") else w.dtype, device)
        x = (x * 30).clamp(-127, 127).round().to(dtype) if w.option("cache") else x
        call[name] = x if page else x.transpose(1, 2)
    call["lengths"] = torch.tensor(lengths_of(w), dtype=torch.int32, device=device)
    call["page_table"] = torch.empty((b, each), dtype=torch.int32, device=device) if page else None
    if page and device != "meta":
        order = torch.randperm(b * each + 2, generator=g, device=g.device if g is not None else device)[: b * each]
        call["page_table"].copy_(order.view(b, each))
        if w.option("holes"):
            call["page_table"][::2, -1], call["page_table"][1::2, -1] = -1, b * each + 2
    call["q"] = new(w.option("heads"), d) if w.option("heads") else None
    for name in ("cos", "sin"):
        columns = min(w.option("rotary", 0), d) // 2
        call[name] = (
            random_tensor(g, (max(t, each * page) + 1, columns), "fp32", device).clamp(-1, 1) if columns else None
        )
    call["interleaved"] = w.option("interleaved", False)
    for name in ("k_scale", "v_scale"):
        sizes = (groups,) if w.option("scales") == "heads" else (1,)
        scale = random_tensor(g, sizes, "fp32", device).abs() / 40 + 0.01 if w.option("scales") else None
        call[name] = scale if scale is None or w.option("scales") == "heads" else scale[0].clone()
    return call


def cost(w: Workload, direction: str) -> Cost:
    """New tokens that have a place, read and written; q; angles of a token, read once."""
    groups, s, d, heads, rotated = w["G"], w["S"], w["D"], w.option("heads", 0), min(w.option("rotary", 0), w["D"])
    page, size = w.option("page", 0), w.bytes_per_element
    room = (-(-w["T"] // page) - 1) * page if page and w.option("holes") else w["T"]
    tokens = sum(max(min(n, room) - max(n - s, 0), 0) for n in lengths_of(w))
    columns = d + w.option("dv", d)
    of_cache = BYTES[w.option("cache")] if w.option("cache") else size
    queries = w["B"] * s * heads * d
    reads = tokens * (groups * columns * size + 4 * rotated) + queries * size + 4 * w["B"]
    work = 3 * (tokens * groups + w["B"] * s * heads) * max(rotated, 1)
    return Cost(reads, tokens * groups * columns * of_cache + queries * size, vector_flops=work)


def _shifted(by: int) -> Any:
    return changed(reference, lengths=lambda n: n + by)


def _first_token_alone(**a: Any) -> Any:
    first = {n: a[n][:, :, :1] for n in ("k", "v")}
    out = reference(**{**a, **first, "lengths": a["lengths"] - a["k"].shape[2] + 1, "q": None})
    return (
        out
        if a["q"] is None
        else reference(**{**a, **{n: torch.empty_like(a[n]).copy_(a[n]) for n in ("k_cache", "v_cache")}})
    )


def _without(*names: str) -> Any:
    def mutant(**a: Any) -> Any:
        out = reference(**{**a, **dict.fromkeys(names)})
        return a["q"].clone() if out is None and a["q"] is not None else out

    return mutant


def _pairs_changed(**a: Any) -> Any:
    return reference(**{**a, "interleaved": not a["interleaved"] and a["cos"] is not None})


append_to_cache = Operator(
    name=NAME,
    axes={"B": "batches", "G": "heads of the cache", "S": "new tokens", "T": "tokens a cache has room for", "D": "head dim"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "layout": ("contiguous", "transposed", "sliced", "strided", "unaligned", "expanded"),
        "dv": range(1, 2**16),
        "heads": range(1, 2**16),
        "rotary": range(2, 2**16),
        "interleaved": (False, True),
        "lengths": ("uneven", "half"),
        "page": range(1, 2**16),
        "holes": (False, True),
        "cache": tuple(CACHES),
        "scales": ("one", "heads"),
    },
    mutates=("k_cache", "v_cache"),
    tolerance=Tolerance(neighbours=0.01),  # of codes where a rotated number lies between two
    workloads={
        "verify": [
            workload(B=1, G=1, S=1, T=1, D=16),
            workload(B=3, G=2, S=1, T=9, D=16, lengths="half", rotary=16, heads=4),
            workload(B=5, G=2, S=3, T=11, D=24, dv=40, lengths="uneven", rotary=20, interleaved=True, heads=6,
                     layout="transposed"),
            workload(B=5, G=3, S=2, T=20, D=16, lengths="uneven", page=4, holes=True),
            workload(B=2, G=2, S=4, T=20, D=32, lengths="half", page=1, rotary=32, heads=4),
            workload(B=3, G=10, S=2, T=40, D=16, lengths="half", page=16, cache="fp8", scales="heads", rotary=8),
            workload(B=5, G=2, S=2, T=30, D=16, lengths="uneven", cache="int8", scales="heads"),
            workload(B=2, G=2, S=2, T=30, D=16, cache="int8", scales="one", rotary=16, interleaved=True),
            workload(B=2, G=2, S=2, T=30, D=16, cache="fp8"),
            workload(B=2, G=2, S=5, T=8, D=16, layout="strided"),
            *(workload(B=2, G=2, S=2, T=8, D=16, layout=at) for at in ("sliced", "unaligned", "expanded")),
            workload(B=2, G=2, S=0, T=8, D=16),
        ],
        "full": [
            *(workload(B=65, G=8, S=4, T=300, D=128, lengths="uneven", page=p, rotary=128, heads=32) for p in (1, 16)),
            *(workload(B=65, G=8, S=4, T=300, D=128, lengths="uneven", page=16, rotary=128, cache=c, scales="heads")
              for c in ("fp8", "int8")),
        ],
        "bench": [
            workload("bf16", B=b, G=8, S=1, T=4096, D=128, lengths="half", page=16, rotary=128, heads=32, **more)
            for b in (1, 64) for more in ({}, {"cache": "fp8", "scales": "one"})
        ],
        "quick": [workload("bf16", B=64, G=8, S=1, T=4096, D=128, lengths="half", page=16, rotary=128, heads=32)],
        "compile": [
            *(workload("bf16", B=4, G=8, S=2, T=400, D=128, page=16, rotary=128, heads=32, cache=c, scales="heads")
              for c in ("fp8", "int8")),
            *(workload(dtype, B=4, G=8, S=2, T=400, D=128, rotary=64, interleaved=True) for dtype in ("bf16", "fp16", "fp32")),
            workload("bf16", B=4, G=8, S=2, T=400, D=192, dv=128, rotary=64, heads=32),
        ],
    },
    mutants=[
        Mutant("nothing is written", lambda **a: None if a["q"] is None else torch.zeros_like(a["q"])),
        Mutant("one token late", _shifted(1)),
        Mutant("one token early", _shifted(-1)),
        Mutant("one token of several", _first_token_alone),
        Mutant("k and v exchanged", lambda **a: reference(**{**a, "k": a["v"], "v": a["k"]}) if a["k"].shape == a["v"].shape
               else reference(**a)),
        Mutant("not rotated", _without("cos", "sin", "q")),
        Mutant("pairs of the other kind", _pairs_changed),
        Mutant("angles of position 0", changed(reference, cos=lambda t: t if t is None else t[:1].expand_as(t),
                                               sin=lambda t: t if t is None else t[:1].expand_as(t))),
        Mutant("scale left out", _without("k_scale", "v_scale")),
        Mutant("pages in order", changed(reference, page_table=lambda t: None if t is None else torch.arange(
            t.numel(), dtype=t.dtype, device=t.device).view(t.shape))),
        Mutant("hole written to page 0", changed(reference, page_table=lambda t: None if t is None else t.clamp(min=0))),
    ],
)  # fmt: skip


def parts_of(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None = None, *,
    q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Options]:  # fmt: skip
    given = {n: t for n, t in zip(OPTIONAL, (page_table, q, cos, sin, k_scale, v_scale), strict=True) if t is not None}
    check_flag(NAME, "interleaved", interleaved)
    return (k, v, k_cache, v_cache, lengths, *given.values()), Options(tuple(given), interleaved)


TRITON = APPEND.kernel("triton")


@append_to_cache.implementation("triton", arch=">=sm_80")
def append_to_cache_triton(*call: Any, **named: Any) -> Tensor | None:
    tensors, options = parts_of(*call, **named)
    if tensors[0].numel() == 0 or tensors[2].numel() == 0:
        return reference(*call, **named)
    out: Tensor | None = TRITON.of(tensors, options)(*_with_tables(tensors, options))
    return out


def _with_tables(tensors: tuple[Tensor, ...], options: Options) -> tuple[Tensor, ...]:
    """The tensors as the launch takes them: tables of one column for each pair."""
    d, given = tensors[0].shape[3], zip(options.names, tensors[5:], strict=True)
    return (*tensors[:5], *(narrowed(t, d) if name in ("cos", "sin") else t for name, t in given))


peers.register(append_to_cache, reference)


@append_to_cache.choice
@guarded
def choose(*call: Any, **named: Any) -> Choice:
    tensors, options = parts_of(*call, **named)
    return APPEND.choose(*tensors, options)


@append_to_cache.function
def append_to_cache_function(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None = None, *,
    q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Writes the keys and values of new tokens into a cache, in place and in one launch.

    New token t of T of sequence b has position lengths[b] - T + t: the lengths already count the new tokens, so that
    ``decode_attention`` takes the same ones. A token without a place (a negative position, one beyond the cache, a page that is
    none) is not written.

    Args:
        k, v: [B, G, T, D] and [B, G, T, Dv]; float32, float16 or bfloat16, any strides.
        k_cache, v_cache: [B, G, S, D] and [B, G, S, Dv], of any strides; with a ``page_table`` pages [P, page, G, D] and
            [P, page, G, Dv]. Of k's dtype, or int8 or float8_e4m3fn: codes of the numbers over their scale, rounded to nearest
            even, saturated.
        lengths: int32 [B], tokens of each sequence with the new ones. Read on the device.
        page_table: int32 [B, N], as in ``paged_decode_attention``.
        q: [B, H, T, D], queries to be rotated in the same launch.
        cos, sin: [positions, R/2], angles of every position that the cache has room for: k (and q) are rotated as
            ``rotary_embedding`` does, and take its wider tables too.
        interleaved: pairs are neighbours instead of halves.
        k_scale, v_scale: float32 [] or [G], of codes; 1 if None.

    Returns:
        The rotated q, or None without a ``q``. Arithmetic is fp32; numbers are rounded once.

    Raises:
        TypeError: tensors of other dtypes, an ``interleaved`` that is no bool.
        ValueError: shapes or devices that do not fit, caches whose elements share memory, a tensor that wants a gradient.
    """
    named: dict[str, Any] = {
        "q": q, "cos": cos, "sin": sin, "interleaved": interleaved, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    call = (k, v, k_cache, v_cache, lengths, page_table)
    tensors, options = parts_of(*call, **named)
    ready = all(isinstance(t, Tensor) for t in tensors) and eager(*tensors, autocast=True)
    if ready and (plan := APPEND.of(tensors, options)) is not None:
        out: Tensor | None = plan(*_with_tables(tensors, options))
        return out
    if choose(*call, **named).implementation == "torch":
        return reference(*call, **named)
    return append_to_cache_triton(*call, **named)
