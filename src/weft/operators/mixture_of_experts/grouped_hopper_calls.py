"""A grouped product on Hopper's main loop as PyTorch operators with their gradients; what it declines goes to Triton's.

So does a product of rows that are to be gathered, whose gradients are the main loop's all the same (README.md counts why).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import eager
from weft.operators.elementwise import swiglu
from weft.operators.elementwise.pointwise import KERNEL
from weft.operators.mixture_of_experts import grouped_calls
from weft.operators.mixture_of_experts.grouped_hopper import plans, terms_plans, why_not, why_not_terms
from weft.operators.mixture_of_experts.permute_tokens import gathered


def declined(x: Tensor, w: Tensor, source: Tensor | None, bias: Tensor | None, gate: bool) -> str:
    """Why Hopper's main loop does not take a product (an empty string when it does, or takes its gradients)."""
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, bias))
    if source is not None and not wanted:
        return "rows to gather, which TMA on Hopper cannot: Triton's kernel reads them where they lie"
    return why_not(_as_read(x, source), w, gate, bias)


def _as_read(x: Tensor, source: Tensor | None) -> Tensor:
    """Of the form of a gradient's operand: what is gathered is written out first, contiguous."""
    return x if source is None else torch.empty((source.shape[0], x.shape[1]), dtype=x.dtype, device="meta")


# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.custom_op("weft::grouped_matmul_hopper", mutates_args=())
def grouped_matmul_hopper_op(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    gate: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """y, and gate and up [R, 2N] where they are to be kept (else an empty tensor)."""
    if source is not None:
        made: tuple[Tensor, Tensor] = torch.ops.weft.grouped_matmul(x, w, offsets, source, position, bias, gate, keep)
        return made
    return _launched(x, w, offsets, bias, gate, keep)


@grouped_matmul_hopper_op.register_fake
def _(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    gate: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    r, n = (x if source is None else source).shape[0], w.shape[1]
    return x.new_empty((r, n // 2 if gate else n)), x.new_empty((r, n) if keep else (0,))


def _launched(
    x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, gate: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    r, n = x.shape[0], w.shape[1]
    y = torch.empty((r, n // 2 if gate else n), dtype=x.dtype, device=x.device)
    pre = torch.empty((r, n) if keep else (0,), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y, pre
    if keep:
        _product(x, w, offsets, bias, False, pre)
        halves = pre.chunk(2, -1)
        KERNEL.of(halves, swiglu.call.formula)(*halves, y)
    else:
        _product(x, w, offsets, bias, gate, y)
    return y, pre


def _product(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, gate: bool, out: Tensor) -> None:
    halves = w.chunk(2, 1) if gate else (w, w)
    plans.of((x, w), bias is not None, gate)(x, *halves, out, offsets, bias=bias)


@torch.library.custom_op("weft::grouped_outer_hopper", mutates_args=())
def grouped_outer_hopper_op(
    a: Tensor, b: Tensor, offsets: Tensor, a_source: Tensor | None, b_source: Tensor | None
) -> Tensor:
    """c [E, P, Q]: c[e] = a_eᵀ · b_e."""
    a, b = (t if s is None else gathered(t, s) for t, s in ((a, a_source), (b, b_source)))
    e = offsets.shape[0] - 1
    c = torch.empty((e, a.shape[1], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        order = torch.sort(offsets[1:] - offsets[:-1], descending=True).indices
        terms_plans.of((a, b), e)(a, b, b, c, offsets, order)
    return c


@grouped_outer_hopper_op.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor, a_source: Tensor | None, b_source: Tensor | None) -> Tensor:
    return a.new_empty((offsets.shape[0] - 1, a.shape[1], b.shape[1]))


# ---- gradients -------------------------------------------------------------------------------------------------------


def _any_product(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    gate: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    op = torch.ops.weft.grouped_matmul if declined(x, w, source, bias, gate) else grouped_matmul_hopper_op
    made: tuple[Tensor, Tensor] = op(x, w, offsets, source, position, bias, gate, keep)
    return made


def _any_outer(a: Tensor, b: Tensor, offsets: Tensor, a_source: Tensor | None, b_source: Tensor | None) -> Tensor:
    reason = why_not_terms(_as_read(a, a_source), _as_read(b, b_source), offsets.shape[0] - 1)
    made: Tensor = (torch.ops.weft.grouped_outer if reason else grouped_outer_hopper_op)(
        a, b, offsets, a_source, b_source
    )
    return made


def _backward(ctx: Any, dy: Tensor | None, dkept: Tensor | None) -> tuple[Tensor | None, ...]:
    return grouped_calls.gradients(ctx, dy, dkept, _any_product, _any_outer)


grouped_matmul_hopper_op.register_autograd(_backward, setup_context=grouped_calls.save)
grouped_outer_hopper_op.register_autograd(grouped_calls.outer_gradients, setup_context=grouped_calls.save_outer)

# ---- the implementation ----------------------------------------------------------------------------------------------


def grouped_matmul_hopper(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None = None,
    position: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    gate = activation is not None
    if reason := declined(x, w, source, bias, gate):
        raise Declined(reason)
    operands = (x, w) if bias is None else (x, w, bias)
    if eager(*operands):
        return _launched(x, w, offsets, bias, gate, False)[0]
    keep = gate and torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    y: Tensor = grouped_matmul_hopper_op(x, w, offsets, source, position, bias, gate, keep)[0]
    return y
