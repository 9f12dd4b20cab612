"""A grouped product as PyTorch operators with their gradients, its reference, and what it asks of its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.operators.call import check_same, eager, on_gpu, traced
from weft.operators.mixture_of_experts.arguments import check_indices, check_matrix, check_range
from weft.operators.mixture_of_experts.grouped_kernels import gated_gradient_plans, outer_plans, plans
from weft.operators.mixture_of_experts.permute_tokens import token_sums

ACTIVATIONS = ("swiglu",)

# ---- the reference ---------------------------------------------------------------------------------------------------


def reference(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None = None,
    position: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """A product for each group. Where a compiler looks on, group sizes are not known: every group's product of all rows,
    masked."""
    rows = x if source is None else x.index_select(0, source)
    y = _masked(rows, w, offsets, bias) if traced(x, w, offsets) else _looped(rows, w, offsets.tolist(), bias)
    return y if activation is None else gated(y)


def _looped(rows: Tensor, w: Tensor, bounds: list[int], bias: Tensor | None) -> Tensor:
    parts = [
        F.linear(rows[first:end], matrix, None if bias is None else bias[e])
        for e, (matrix, first, end) in enumerate(zip(w.unbind(0), bounds[:-1], bounds[1:], strict=True))
    ]
    return torch.cat([*parts, rows.new_zeros((rows.shape[0] - bounds[-1], w.shape[1]))])


def _masked(rows: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    at = torch.arange(rows.shape[0], device=rows.device)
    y = rows.new_zeros((rows.shape[0], w.shape[1]))
    for e in range(w.shape[0]):
        inside = (at >= offsets[e]) & (at < offsets[e + 1])
        y = torch.where(inside[:, None], F.linear(rows, w[e], None if bias is None else bias[e]), y)
    return y


def gated(y: Tensor) -> Tensor:
    """silu(gate) · up of [R, 2N], in fp32 or wider."""
    gate, up = y.to(torch.promote_types(y.dtype, torch.float32)).chunk(2, -1)
    return (F.silu(gate) * up).to(y.dtype)


# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::grouped_matmul", mutates_args=())
def grouped_matmul_op(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    gate: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """y, and gate and up [R, 2N] where they are to be kept (else an empty tensor, and a gradient computes them again)."""
    if on_gpu(x):
        return _launched(x, w, offsets, source, bias, gate, keep)
    pre = reference(x, w, offsets, source, position, bias)
    return gated(pre) if gate else pre, pre.clone() if keep else x.new_empty(0)


def _launched(
    x: Tensor, w: Tensor, offsets: Tensor, source: Tensor | None, bias: Tensor | None, gate: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    r = (x if source is None else source).shape[0]
    n = w.shape[1] // 2 if gate else w.shape[1]
    y = torch.empty((r, n), dtype=x.dtype, device=x.device)
    pre = torch.empty((r, 2 * n) if keep else (0,), dtype=x.dtype, device=x.device)
    if y.numel():
        operands = (x, w) if bias is None else (x, w, bias)
        plan = plans.of(operands, r, source is not None, gate, keep)
        plan(x, w, offsets, x if source is None else source, x if bias is None else bias, y, pre if keep else y)
    return y, pre


@torch.library.triton_op("weft::grouped_outer", mutates_args=())
def grouped_outer_op(a: Tensor, b: Tensor, offsets: Tensor, a_source: Tensor | None, b_source: Tensor | None) -> Tensor:
    """c [E, P, Q]: c[e] = a_eᵀ · b_e."""
    e = offsets.shape[0] - 1
    r = (a if a_source is None else a_source).shape[0]
    if not on_gpu(a):
        return _outer_reference(a, b, offsets, a_source, b_source)
    c = torch.empty((e, a.shape[1], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        sizes = offsets[1:] - offsets[:-1]
        order = torch.sort(sizes, descending=True).indices  # large groups first: none is left to run alone at the end
        plan = outer_plans.of((a, b), r, e, a_source is not None, b_source is not None)
        plan(a, b, offsets, order, a if a_source is None else a_source, a if b_source is None else b_source, c)
    return c


def _outer_reference(a: Tensor, b: Tensor, offsets: Tensor, a_source: Tensor | None, b_source: Tensor | None) -> Tensor:
    a = a if a_source is None else a.index_select(0, a_source)
    b = b if b_source is None else b.index_select(0, b_source)
    at = torch.arange(a.shape[0], device=a.device)
    masks = [(at >= offsets[e]) & (at < offsets[e + 1]) for e in range(offsets.shape[0] - 1)]
    return torch.stack([a.where(mask[:, None], 0).t() @ b.where(mask[:, None], 0) for mask in masks])


@torch.library.triton_op("weft::grouped_swiglu_backward", mutates_args=())
def grouped_swiglu_backward_op(dy: Tensor, pre: Tensor) -> Tensor:
    """dpre [R, 2N] of y = silu(gate) · up."""
    if not on_gpu(dy):
        return _gated_gradient(dy, pre)
    dpre = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
    if dpre.numel():
        gated_gradient_plans.of((dy,))(dy, pre, dpre)
    return dpre


def _gated_gradient(dy: Tensor, pre: Tensor) -> Tensor:
    wide = torch.promote_types(dy.dtype, torch.float32)
    (gate, up), dy = pre.to(wide).chunk(2, -1), dy.to(wide)
    s = gate.sigmoid()
    return torch.cat([dy * up * s * (1 + gate * (1 - s)), dy * gate * s], -1).to(pre.dtype)


# ---- gradients -------------------------------------------------------------------------------------------------------


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, offsets, source, position, bias, ctx.gate, keep = inputs
    ctx.save_for_backward(x, w, offsets, source, position, bias, output[1] if keep else None)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dkept: Tensor | None) -> tuple[Tensor | None, ...]:
    return gradients(ctx, dy, dkept, torch.ops.weft.grouped_matmul, torch.ops.weft.grouped_outer)


def gradients(
    ctx: Any, dy: Tensor | None, dkept: Tensor | None, product: Callable[..., Any], outer: Callable[..., Any]
) -> tuple[Tensor | None, ...]:
    """Those of y and of what was kept, by operators that take what those above take."""
    x, w, offsets, source, position, bias, pre = ctx.saved_tensors
    if dy is not None and ctx.gate:
        gradient = _gated_gradient if torch.is_grad_enabled() else torch.ops.weft.grouped_swiglu_backward
        gate_up = pre
        if pre is None:
            gate_up = product(x, w, offsets, source, position, bias, False, False)[0]
        dy = gradient(dy, gate_up)
    if dkept is not None and pre is not None:
        dy = dkept if dy is None else dy + dkept
    if dy is None:
        return (None,) * 8
    dx = dw = dbias = None
    if ctx.needs_input_grad[0]:
        dx = product(dy, w.transpose(1, 2), offsets, None, None, None, False, False)[0]
        if source is not None:
            dx = _of_tokens(dx, source, position, x.shape[0])
    if ctx.needs_input_grad[1]:
        if w.stride(1) == 1 and w.stride(2) != 1:  # stored [E, K, N]: so is its gradient
            dw = outer(x, dy, offsets, source, None).transpose(1, 2)
        else:
            dw = outer(dy, x, offsets, None, source)
    if bias is not None and ctx.needs_input_grad[5]:
        one = torch.ones((), dtype=dy.dtype, device=dy.device).expand(dy.shape[0], 1)
        dbias = outer(dy, one, offsets, None, None)[..., 0]
    return dx, dw, None, None, None, dbias, None, None


def _of_tokens(rows: Tensor, source: Tensor, position: Tensor | None, t: int) -> Tensor:
    if torch.is_grad_enabled() or traced(rows) or not on_gpu(rows):
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if position is not None:
            return wide.index_select(0, position.reshape(-1)).view(*position.shape, rows.shape[1]).sum(1).to(rows.dtype)
        return wide.new_zeros((t, rows.shape[1])).index_add(0, source, wide).to(rows.dtype)
    return token_sums(rows, source, position, t)


grouped_matmul_op.register_autograd(_backward, setup_context=save)


def save_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def outer_gradients(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets, a_source, b_source = ctx.saved_tensors
    da = db = None
    if ctx.needs_input_grad[0]:
        da = torch.ops.weft.grouped_matmul(b, dc, offsets, b_source, None, None, False, False)[0]
        da = da if a_source is None else _of_tokens(da, a_source, None, a.shape[0])
    if ctx.needs_input_grad[1]:
        db = torch.ops.weft.grouped_matmul(a, dc.transpose(1, 2), offsets, a_source, None, None, False, False)[0]
        db = db if b_source is None else _of_tokens(db, b_source, None, b.shape[0])
    return da, db, None, None, None


grouped_outer_op.register_autograd(outer_gradients, setup_context=save_outer)


def grouped_matmul_triton(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None = None,
    position: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    gate = activation is not None
    operands = (x, w) if bias is None else (x, w, bias)
    if eager(*operands):
        return _launched(x, w, offsets, source, bias, gate, False)[0]
    keep = gate and torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    y: Tensor = torch.ops.weft.grouped_matmul(x, w, offsets, source, position, bias, gate, keep)[0]
    return y


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    check_offsets: bool,
) -> None:
    name = "grouped_matmul"
    check_matrix(name, "x", x)
    check_same(name, "w", w, "x", x)
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"{name}: argument 'activation' is {activation!r}; expected {', '.join(ACTIVATIONS)} or None")
    if w.ndim != 3 or w.shape[2] != x.shape[1] or not w.shape[0] or (activation and w.shape[1] % 2):
        columns = "2N" if activation else "N"
        raise ValueError(
            f"{name}: 'w' has shape {tuple(w.shape)} and 'x' {tuple(x.shape)}; expected w [E, {columns}, {x.shape[1]}] with at "
            "least one group"
        )
    e, rows = w.shape[0], x.shape[0]
    check_indices(name, "offsets", offsets, 1, f"({e + 1},)", "x", x)
    if offsets.shape[0] != e + 1:
        raise ValueError(
            f"{name}: argument 'offsets' has {offsets.shape[0]} elements; expected {e + 1}, one more than 'w' has matrices"
        )
    if source is not None:
        check_indices(name, "source", source, 1, "[rows]", "x", x)
        rows = source.shape[0]
    if rows >= 2**31:
        raise ValueError(f"{name}: {rows} rows; expected under 2**31 (offsets are int32)")
    if position is not None:
        check_indices(name, "position", position, 2, "[tokens, k]", "x", x)
        if source is None or position.shape[0] != x.shape[0] or position.numel() != rows:
            raise ValueError(
                f"{name}: argument 'position' has shape {tuple(position.shape)}; expected a 'source' with it, and "
                f"{x.shape[0]} rows and {rows} elements"
            )
    if bias is not None:
        check_same(name, "bias", bias, "x", x)
        if bias.shape != w.shape[:2]:
            raise ValueError(
                f"{name}: argument 'bias' has shape {tuple(bias.shape)}; expected {tuple(w.shape[:2])}, 'w' without its last"
            )
    if check_offsets and traced(offsets):
        raise ValueError(f"{name}: check_offsets=True needs values, which tracing does not know; expected False there")
    if not traced(offsets) and (check_offsets or offsets.device.type == "cpu"):
        _check_values(offsets, source, rows, x.shape[0])


def _check_values(offsets: Tensor, source: Tensor | None, rows: int, tokens: int) -> None:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in itertools.pairwise(bounds)):
        wrong = next((i for i, (a, b) in enumerate(itertools.pairwise(bounds)) if a > b), None)
        where = "" if wrong is None else f" (decreasing after offset {wrong})"
        raise ValueError(
            f"grouped_matmul: argument 'offsets' runs from {bounds[0]} to {bounds[-1]}{where}; expected from 0, not "
            f"decreasing, to at most {rows}, the number of rows"
        )
    if source is not None:
        check_range("grouped_matmul", "source", source, tokens)
