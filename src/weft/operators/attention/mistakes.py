"""Attention wrong on purpose: what the verifier must notice."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant
from weft.operators import mutants
from weft.operators.attention.dispatch import heads_first
from weft.operators.attention.reference import reference
from weft.operators.attention.score import Score


def but(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The reference of changed arguments; what is None stays so."""
    return mutants.changed(reference, **{n: (lambda a, f=f: None if a is None else f(a)) for n, f in changes.items()})


def _positions(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q, k = (heads_first(arguments[n]) for n in "qk")
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


def _ends(cu: Tensor) -> Tensor:
    return cu[[0, -1]]


def _from_0(cu: Tensor) -> Tensor:
    return torch.cat((cu[:1] * 0, cu[1:]))


MISTAKES = [
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
    Mutant(
        "lse without the maximum", _wrong_lse(lambda lse: lse - lse.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0))
    ),
    Mutant("dropout not scaled", lambda **a: reference(**{**a, "v": a["v"] * (1 - a["dropout"])})),
    Mutant("seed ignored", but(seed=lambda seed: 0)),
    Mutant("offset ignored", but(offset=lambda offset: 0)),
    Mutant("slopes negated", but(alibi=torch.neg)),
    Mutant("slope of another head", but(alibi=lambda a: a.roll(1, -1))),
    Mutant("bias left out", lambda **a: reference(**{**a, "bias": None})),
    Mutant("mask left out", lambda **a: reference(**{**a, "mask": None})),
    Mutant("mask inverted", but(mask=torch.logical_not)),
    Mutant("score left out", lambda **a: reference(**{**a, "score": None})),
    Mutant("sequences see each other", but(cu_seqlens_q=_ends, cu_seqlens_k=_ends, alibi=lambda a: a[-1])),
    Mutant("tokens ahead are of the first sequence", but(cu_seqlens_q=_from_0, cu_seqlens_k=_from_0)),
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
]
