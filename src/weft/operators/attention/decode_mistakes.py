"""Decoding wrong on purpose: what the verifier must notice."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant
from weft.operators import mutants
from weft.operators.attention import decode_reference

Function = Callable[..., Any]


def but(right: Function, **changes: Callable[[Any], Any]) -> Function:
    """The right function of changed arguments; what is None stays so."""
    return mutants.changed(right, **{n: (lambda a, f=f: None if a is None else f(a)) for n, f in changes.items()})


def _in_base_two(right: Function) -> Function:
    def mutant(**arguments: Any) -> Any:
        out = right(**arguments)
        return (out[0], out[1] / math.log(2.0)) if isinstance(out, tuple) else out

    return mutant


def _other_heads(k: str, v: str, dim: int, right: Function) -> Function:
    def mutant(**arguments: Any) -> Any:
        heads, groups = arguments["q"].shape[1], arguments[k].shape[dim]
        of = torch.arange(heads, device=arguments["q"].device) % groups
        return right(**{**arguments, **{n: _taken(arguments[n], of, dim) for n in (k, v)}, **_for_heads(arguments, of)})

    return mutant


def _for_heads(arguments: dict[str, Any], of: Tensor) -> dict[str, Any]:
    """Scales, one for each of those heads."""
    scales = {n: arguments[n] for n in ("k_scale", "v_scale") if arguments[n] is not None}
    return {n: t[of] if t.ndim else t for n, t in scales.items()}


def _taken(x: Tensor, of: Tensor, dim: int) -> Tensor:
    bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    return bits.index_select(dim, of).view(x.dtype)


def _mean_where_nothing_is_seen(right: Function) -> Function:
    def mutant(**arguments: Any) -> Any:
        o, lse = right(**{**arguments, "return_lse": True})
        o = torch.where((lse == -torch.inf)[..., None], 0.5, o)
        return (o, lse) if arguments["return_lse"] else o

    return mutant


def _unwindowed(right: Function) -> Function:
    def mutant(**arguments: Any) -> Any:
        window = arguments["window"]
        return right(**{**arguments, "window": window and tuple(None if n is None else n + 1 for n in window)})

    return mutant


def mistakes(right: Function, k: str, v: str, dim: int) -> list[Mutant]:
    """Of both functions; ``dim`` is where k and v have their heads."""
    return [
        *mutants.usual(right),
        Mutant("scale left out", lambda **a: right(**{**a, "scale": 1.0})),
        Mutant("one key too few", but(right, lengths=lambda n: (n - 1).clamp(min=0))),
        Mutant("not causal", lambda **a: right(**{**a, "causal": False})),
        Mutant("window one wider", _unwindowed(right)),
        Mutant("soft cap left out", lambda **a: right(**{**a, "softcap": None})),
        Mutant("sinks left out", lambda **a: right(**{**a, "sinks": None})),
        Mutant("slope of another head", but(right, alibi=lambda a: a.roll(1, -1))),
        Mutant("head of another group", _other_heads(k, v, dim, right)),
        Mutant("lse in base 2", _in_base_two(right)),
        Mutant("mean where nothing is seen", _mean_where_nothing_is_seen(right)),
        Mutant("scale of k left out", but(right, k_scale=torch.ones_like)),
        Mutant("scale of v left out", but(right, v_scale=torch.ones_like)),
        Mutant("another head's scale", but(right, v_scale=lambda t: t.roll(1, -1) if t.ndim else t)),
    ]


def _aligned_at_the_end(**arguments: Any) -> Any:
    """Causal and alibi by the room of the cache, not by the length of the sequence."""
    lengths, k = arguments["lengths"], arguments["k"]
    if lengths is None or not arguments["causal"]:
        return decode_reference.decode(**arguments)
    there = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
    return decode_reference.decode(**{**arguments, "lengths": None}, there=there)


def _parts_not_weighted(**arguments: Any) -> Any:
    """The mean of what two halves of the keys give, each normalised by itself."""
    k = arguments["k"]
    first = (torch.arange(k.shape[2], device=k.device) < k.shape[2] // 2).expand(k.shape[0], -1)
    halves = (decode_reference.decode(**arguments, there=there) for there in (first, ~first))
    pairs = zip(*(h if isinstance(h, tuple) else (h,) for h in halves), strict=True)
    out = tuple((one + other) / 2 for one, other in pairs)
    return out if len(out) > 1 else out[0]


def _whole_cache(**arguments: Any) -> Any:
    clean = {n: _finite(arguments[n]) for n in "kv"}
    return decode_reference.decode(**{**arguments, **clean, "lengths": None})


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0) if x.dtype.itemsize > 1 else x


def _pages_in_order(**arguments: Any) -> Any:
    table = arguments["page_table"]
    order = torch.arange(table.numel(), device=table.device, dtype=table.dtype).view(table.shape)
    return decode_reference.paged_decode(**{**arguments, "page_table": order})


MISTAKES = [
    *mistakes(decode_reference.decode, "k", "v", 1),
    Mutant("parts not weighted", _parts_not_weighted),
    Mutant("lengths ignored", _whole_cache),
    Mutant("aligned at the cache's end", _aligned_at_the_end),
]
PAGED_MISTAKES = [
    *mistakes(decode_reference.paged_decode, "k_pages", "v_pages", 2),
    Mutant("pages in order", _pages_in_order),
    Mutant("hole read as page 0", but(decode_reference.paged_decode, page_table=lambda t: t.clamp(min=0))),
    Mutant("page beyond the last read", lambda **a: decode_reference.paged_decode(
        **{**a, "page_table": a["page_table"].clamp(max=a["k_pages"].shape[0] - 1)})),
    Mutant("rows of a table swapped", but(decode_reference.paged_decode, page_table=lambda t: t.roll(1, 0))),
]  # fmt: skip
