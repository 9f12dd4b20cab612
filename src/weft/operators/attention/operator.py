"""What a compiler sees of ``attention``: ``torch.ops.weft.attention`` and ``attention_backward``, in which the tables choose
the kernels when they run."""

from typing import Any

import torch
from torch import Tensor

from weft.operators.attention.dispatch import BACKWARD, FORWARD, OPTIONAL, Options, result_like, spans_too_much
from weft.operators.attention.function import Parts
from weft.operators.attention.statistics import log_sum_exp

# B batch, H heads of q, G heads of k and v, Sq queries, Sk keys, D and Dv head dims; packed: [total, heads, D]
LEAVES = ("q", "k", "v", "bias", "sinks")  # that have gradients
TENSORS = OPTIONAL[:-1]  # that a call may have; without a seed


@torch.library.custom_op("weft::attention", mutates_args=())
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None, alibi: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, left: int | None, right: int | None, scale: float | None,
    softcap: float | None, deterministic: bool, batch_invariant: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, the log-sum-exp of each row [B, H, Sq], and the rows' peaks and sums [2, B, H, Sq] for backward."""
    given = _given(mask, bias, sinks, alibi, cu_seqlens_q, cu_seqlens_k)
    o = Options(tuple(given), left, right, scale, softcap, None, 0, deterministic, batch_invariant)
    out = result_like(q, v.shape[-1])
    statistics = torch.empty((2, *_rows(q)), dtype=torch.float32, device=q.device)
    plan = FORWARD.of((q, k, v, *given.values()), o)
    if plan is None:
        raise RuntimeError(
            f"attention: no kernel for q of strides {q.stride()}; expected those that the compiler traced"
        )
    peak, log_sum = statistics.unbind()
    seen = given["mask"].view(torch.uint8) if "mask" in given else q
    plan(q, k, v, out, peak, log_sum, seen, *(given.get(name, q) for name in TENSORS[1:]), q, q, q, q, 0, 0)
    return out, log_sum_exp(peak, log_sum, not o.needs_natural_units), statistics


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(q)
    lse, statistics = (q.new_empty(shape, dtype=torch.float32) for shape in (rows, (2, *rows)))
    return result_like(q, v.shape[-1]), lse, statistics


@torch.library.custom_op("weft::attention_backward", mutates_args=())
def backward_op(
    do: Tensor, dlse: Tensor, out: Tensor, statistics: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, alibi: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    left: int | None, right: int | None, scale: float | None, softcap: float | None, deterministic: bool,
    batch_invariant: bool, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients of LEAVES that are ``wanted``; empty ones for the others."""
    given = _given(mask, bias, sinks, alibi, cu_seqlens_q, cu_seqlens_k)
    o = Options(tuple(given), left, right, scale, softcap, None, 0, deterministic, batch_invariant)
    names = frozenset(name for name, w in zip(LEAVES, wanted, strict=True) if w)
    leaves = (q, k, v, bias, sinks)
    if spans_too_much(do.stride(-3 if do.ndim == 3 else -2), do.stride(-1)):
        do = do.contiguous()
    launch = BACKWARD.of((q, k, v, out, do, *given.values()), o)
    found = launch(q, k, v, out, *statistics.unbind(), do, dlse, given, 0, 0, names)
    return [
        q.new_empty(0) if t is None or name not in names else _laid_out(found[name], t)
        for name, t in zip(LEAVES, leaves, strict=True)
    ]


@backward_op.register_fake
def _(
    do: Tensor, dlse: Tensor, out: Tensor, statistics: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    leaves = zip((q, k, v, bias, sinks), rest[-1], strict=True)
    return [q.new_empty(0) if t is None or not w else torch.empty_like(t) for t, w in leaves]


def _laid_out(found: Tensor, t: Tensor) -> Tensor:
    """A gradient in the order in memory that the compiler was told."""
    like = torch.empty_like(t)
    return found if found.stride() == like.stride() and found.dtype == t.dtype else like.copy_(found)


def _given(*tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: t for name, t in zip(TENSORS, tensors, strict=True) if t is not None}


def _rows(q: Tensor) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if q.ndim == 3 else tuple(q.shape[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    out, _, statistics = output
    ctx.save_for_backward(*inputs[:9], out, statistics)
    ctx.mark_non_differentiable(statistics)
    ctx.options = inputs[9:]


def _backward(ctx: Any, do: Tensor, dlse: Tensor, _: Any) -> tuple[Any, ...]:
    *tensors, out, statistics = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[2], needs[4], needs[5]]
    made = backward_op(do, dlse, out, statistics, *tensors, *ctx.options, wanted)
    dq, dk, dv, dbias, dsinks = (g if w else None for g, w in zip(made, wanted, strict=True))
    return (dq, dk, dv, None, dbias, dsinks, *(None,) * 9)


attention_op.register_autograd(_backward, setup_context=_save)


def by_operator(parts: Parts, return_lse: bool) -> Any:
    (q, k, v, *rest), o, *_ = parts
    given = dict(zip(o.names, rest, strict=True))
    if "bias" in given:  # four dimensions, which its gradient has too
        given["bias"] = given["bias"][(None,) * (4 - given["bias"].ndim)]
    optional = (given.get(name) for name in TENSORS)
    numbers = o.left, o.right, o.scale, o.softcap, o.deterministic, o.batch_invariant
    out, lse, _ = attention_op(q, k, v, *optional, *numbers)
    return (out, lse) if return_lse else out
