"""Attention under autograd: a call as the tables take it, and the function whose gradients are kernels."""

import functools
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.attention.dispatch import (
    BACKWARD,
    FORWARD,
    NAME,
    OPTIONAL,
    SLOPES,
    Options,
    options,
    result_like,
    spans_too_much,
)
from weft.operators.attention.reference import reference
from weft.operators.attention.score import Score
from weft.operators.attention.statistics import log_sum_exp
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import traced
from weft.operators.dropout.seeds import STEPS, Seed, draw, threshold_of
from weft.operators.launch import Plan, Plans

Parts = tuple[tuple[Tensor, ...], Options, int, int]  # tensors, options, seed (0 where a tensor holds it), offset


def parts_of(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Any = None, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None, mask: Tensor | None = None,
    bias: Tensor | None = None, score: Score | None = None, dropout: float = 0.0, seed: Seed = None, offset: int = 0,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, return_lse: bool = False,
    deterministic: bool = False, batch_invariant: bool = False,
) -> Parts:  # fmt: skip
    """A call as the tables take it."""
    tensor_seed = seed if isinstance(seed, Tensor) else None
    every = zip(OPTIONAL, (mask, bias, sinks, alibi, cu_seqlens_q, cu_seqlens_k, tensor_seed), strict=True)
    given = {name: t for name, t in every if t is not None}
    if isinstance(sinks, Tensor):
        given["sinks"] = sinks.contiguous()  # a number for each head, which kernels read one behind the other
    made = options(tuple(given), causal, window, scale, softcap, score, dropout, deterministic, batch_invariant)
    if not made.threshold and (given.pop("seed", None) is not None or seed is not None):  # of no use
        made, seed, offset = made._replace(names=tuple(given)), 0, 0
    number = seed if isinstance(seed, int) else 0
    tensors = (q, k, v, *given.values())
    wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    if wanted and score is not None and score.gradient is None:
        raise ValueError(
            f"{NAME}: argument 'score' is a Score without a gradient, and an argument needs one; expected "
            "Score(kernel, plain, gradient), or a call under torch.no_grad()"
        )
    return tensors, made, number, offset


class Attention(KernelFunction):
    """``(plan, plans of backward, options, seed, offset, return_lse, q, k, v, *tensors)``, the tensors as ``options.names``
    says."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, backward_plans: Plans, options: Options, seed: int, offset: int, return_lse: bool,
        *tensors: Tensor,
    ) -> Any:  # fmt: skip
        q, k, v, *rest = tensors
        given = dict(zip(options.names, rest, strict=True))
        o = result_like(q, v.shape[-1])
        rows = (q.shape[1], q.shape[0]) if q.ndim == 3 else q.shape[:3]
        peak, log_sum = torch.empty((2, *rows), dtype=torch.float32, device=q.device).unbind()
        mask = given["mask"].view(torch.uint8) if "mask" in given else q
        optional = (given.get(n, q) for n in ("bias", "sinks", "alibi", "cu_seqlens_q", "cu_seqlens_k", "seed"))
        plan(q, k, v, o, peak, log_sum, mask, *optional, q, q, q, seed, offset)
        ctx.save_for_backward(*tensors, o, peak, log_sum)
        ctx.call = backward_plans, options, seed, offset, return_lse
        return (o, log_sum_exp(peak, log_sum, not options.needs_natural_units)) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *tensors, o, peak, log_sum = ctx.saved_tensors
        plans, options, seed, offset, return_lse = ctx.call
        wanted = ctx.needs_input_grad[6:]
        if torch.is_grad_enabled():
            plain = functools.partial(by_reference, options, seed, offset, return_lse)
            gradients = (do, dlse) if dlse is not None else (do,)
            return (*(None,) * 6, *reference_gradients(plain, tensors, wanted, gradients))
        q, k, v, *rest = tensors
        if spans_too_much(do.stride(-3 if do.ndim == 3 else -2), do.stride(-1)):  # forward took no such q, k or v
            do = do.contiguous()
        names = ("q", "k", "v", *options.names)
        asked = frozenset(name for name, w in zip(names, wanted, strict=True) if w)
        launch = plans.of((q, k, v, o, do, *rest), options)
        given = dict(zip(options.names, rest, strict=True))
        found = launch(q, k, v, o, peak, log_sum, do, dlse, given, seed, offset, asked)
        return (*(None,) * 6, *(found.get(name) for name in names))


def by_reference(options: Options, seed: int, offset: int, return_lse: bool, *tensors: Tensor) -> Any:
    """The reference of a call that was taken apart."""
    q, k, v, *rest = tensors
    named: dict[str, Any] = {"seed": seed, **dict(zip(options.names, rest, strict=True))}
    named |= {"window": (options.left, options.right), "scale": options.scale, "softcap": options.softcap}
    named |= {"score": options.score, "dropout": options.threshold / STEPS, "offset": offset, "return_lse": return_lse}
    return reference(q, k, v, **named)


PUBLIC = FORWARD, BACKWARD
BY_TRITON = FORWARD.kernel("triton"), BACKWARD.kernel("triton")
BY_HOPPER = FORWARD.kernel("hopper"), BACKWARD.kernel("hopper")


def launched(parts: Parts, return_lse: bool, plans: tuple[Plans, Plans], plan: Plan | None = None) -> Any:
    """``plan``: of these parts, where it is known."""
    tensors, options, seed, offset = parts
    if "bias" in options.names:  # four dimensions, which its gradient has too
        at = 3 + options.names.index("bias")
        bias = tensors[at]
        tensors, plan = (*tensors[:at], bias[(None,) * (4 - bias.ndim)], *tensors[at + 1 :]), None
    plan = plan or plans[0].of(tensors, options)
    return differentiable(Attention, plan, plans[1], options, seed, offset, return_lse, *tensors)


def with_seed(q: Tensor, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a seed drawn where dropout needs one."""
    if named.get("seed") is None and threshold_of(named.get("dropout", 0.0)) and not traced(q):
        named["seed"], named["offset"] = draw(q.device)
    return named


def attention_triton(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    return _by(BY_TRITON, q, k, v, **named)


def attention_hopper(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    return _by(BY_HOPPER, q, k, v, **named)


def _by(plans: tuple[Plans, Plans], q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    alibi = named.get("alibi")
    if torch.is_grad_enabled() and alibi is not None and alibi.requires_grad:
        raise Declined(SLOPES)
    parts = parts_of(q, k, v, **with_seed(q, named))
    return launched(parts, named.get("return_lse", False), plans)
