"""What the operators of a mixture of experts share: references in plain PyTorch, checks of arguments, random routes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Workload, torch_dtype, workload
from weft.operators.call import FLOATS_AND_64, traced
from weft.operators.checks import check_device, check_shape, check_tensor, check_values, check_vector

LOADS = ("zipf", "even", "one", "empty")
SCORINGS = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """What ``route_top_k`` returns. T tokens, E experts, k of them for each token."""

    weights: Tensor  # [T, k]
    experts: Tensor  # [T, k] int32
    offsets: Tensor  # [E + 1] int32: expert e has the places offsets[e] … offsets[e + 1] - 1
    source: Tensor  # [T·k] int32: the token at each place
    position: Tensor  # [T, k] int32: the place of each (token, slot) pair


def route(
    logits: Tensor, k: int, *, normalise: bool = True, scoring: str = "softmax", bias: Tensor | None = None
) -> Routing:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    value = wide if bias is None else scores + bias.to(wide.dtype)
    experts = torch.sort(value.detach(), dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(weights.to(logits.dtype), experts.int(), *ordered(experts, logits.shape[1]))


def ordered(experts: Tensor, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(offsets, source, position)`` of experts [T, k], by a stable sort."""
    by_expert, order = torch.sort(experts.reshape(-1), stable=True)
    offsets = torch.searchsorted(by_expert, torch.arange(e + 1, device=experts.device, dtype=experts.dtype))
    places = torch.arange(order.numel(), device=experts.device, dtype=torch.int32)
    position = torch.empty_like(places).scatter(0, order, places).view(experts.shape)
    return offsets.int(), (order // max(experts.shape[1], 1)).int(), position


def around(
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor], gate: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """``grouped_matmul`` by a product ``(rows, w, offsets, bias)``, with a gather before and a gate after it."""

    def grouped(x, w, offsets, source=None, position=None, bias=None, activation=None) -> Tensor:
        y = product(x if source is None else x.index_select(0, source), w, offsets, bias)
        return y if activation is None else gate(y)

    return grouped


def of_each_group(rows: Tensor, w: Tensor, bounds: list[int], bias: Tensor | None) -> Tensor:
    parts = [
        F.linear(rows[first:end], matrix, None if bias is None else bias[e])
        for e, (matrix, first, end) in enumerate(zip(w.unbind(0), bounds[:-1], bounds[1:], strict=True))
    ]
    if bounds[-1] < rows.shape[0]:
        parts.append(parts[0].new_zeros((rows.shape[0] - bounds[-1], w.shape[1])))
    return torch.cat(parts)


def _product(rows: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """A product for each group. While a compiler traces, group sizes are not known: every group's product of all rows,
    masked."""
    if not traced(rows, w, offsets):
        return of_each_group(rows, w, offsets.tolist(), bias)
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


grouped_product = around(_product, gated)


def gated_gradient(dy: Tensor, pre: Tensor) -> Tensor:
    """The gradient [R, 2N] of gate and up."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    (gate, up), dy = pre.to(wide).chunk(2, -1), dy.to(wide)
    s = gate.sigmoid()
    return torch.cat([dy * up * s * (1 + gate * (1 - s)), dy * gate * s], -1).to(pre.dtype)


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor, a_source: Tensor | None, b_source: Tensor | None) -> Tensor:
    """c [E, P, Q]: c[e] = a_eᵀ · b_e of groups of rows."""
    a = a if a_source is None else a.index_select(0, a_source)
    b = b if b_source is None else b.index_select(0, b_source)
    at = torch.arange(a.shape[0], device=a.device)
    masks = [(at >= offsets[e]) & (at < offsets[e + 1]) for e in range(offsets.shape[0] - 1)]
    return torch.stack([a.where(mask[:, None], 0).t() @ b.where(mask[:, None], 0) for mask in masks])


TOKEN_AXES = {"T": "tokens", "K": "experts of each token", "D": "columns"}  # of permute_tokens and combine_tokens


def token_workloads(own: Workload) -> dict[str, list[Workload]]:
    """Those of ``permute_tokens`` and ``combine_tokens``, with one to verify that is the operator's own."""
    sizes, empty = ((1, 1, 1), (7, 2, 5), (9, 3, 100), (20, 4, 16)), ((0, 2, 5), (5, 2, 0))
    return {
        "verify": [
            *(workload(T=t, K=k, D=d) for t, k, d in (*sizes, *empty)),
            own,
            *(workload(T=6, K=2, D=24, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
        ],
        "full": [workload(T=300, K=8, D=5000), workload(T=2**14, K=2, D=1024)],
        "huge": [workload("bf16", T=2**17 + 8, K=2, D=2**13 + 8)],
        "bench": [workload("bf16", T=t, K=k, D=d) for t, k, d in ((4096, 2, 4096), (16384, 8, 2048), (8192, 8, 4096))],
        "quick": [workload(T=4096, K=4, D=2048)],
        "host": [workload(T=64, K=2, D=128)],
    }


def check_indices(
    operator: str, name: str, indices: Any, ndim: int, expected: str, other: str, reference: Tensor
) -> None:
    """Raises unless ``indices`` is an int32 tensor of ``ndim`` dimensions on the device of ``reference``."""
    check_tensor(operator, name, indices, (torch.int32,))
    check_device(operator, name, indices, other, reference)
    check_shape(operator, name, indices, indices.ndim == ndim, expected)


def check_matrix(operator: str, name: str, value: Any, *, sharded: bool = True) -> None:
    check_tensor(operator, name, value, sharded=sharded)
    check_shape(operator, name, value, value.ndim == 2, "a matrix")


def check_range(operator: str, name: str, indices: Tensor, size: int) -> None:
    """Raises ValueError for an index that is not 0 … size - 1: on a GPU this waits for the device."""
    expected = f"0 … {size - 1}"
    check_values(operator, name, indices, lambda t: (t < 0) | (t >= size), flag=f"check_{name}", expected=expected)


def check_choice(name: str, t: int, e: int, k: int, normalise: bool = True, scoring: str = "softmax") -> None:
    """Of what is chosen for t tokens out of e experts."""
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"{name}: argument 'k' is {k!r}; expected an int")
    if not 1 <= k <= e:
        raise ValueError(f"{name}: argument 'k' is {k}; expected 1 … {e}, the number of experts")
    if t * k >= 2**31:
        raise ValueError(f"{name}: {t} tokens × {k} experts are {t * k} places; expected under 2**31 (they are int32)")
    if not isinstance(normalise, bool):
        raise TypeError(f"{name}: argument 'normalise' is {normalise!r}; expected a bool")
    if scoring not in SCORINGS:
        raise ValueError(f"{name}: argument 'scoring' is {scoring!r}; expected {' or '.join(SCORINGS)}")


def check_bias(name: str, bias: Tensor | None, argument: str, other: Tensor, e: int) -> None:
    if bias is not None:
        check_vector(name, "bias", bias, e, "one for each expert", argument, other, FLOATS_AND_64)


def random_places(g: Any, t: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    """``(source [T·k], position [T, k])``: pairs of (token, slot) in random order, and where each went."""
    if device == "meta":
        source, position = (torch.zeros(s, dtype=torch.int32, device=device) for s in ((t * k,), (t, k)))
        return source, position
    order = torch.randperm(t * k, generator=g, device=g.device)
    position = torch.empty_like(order)
    position[order] = torch.arange(t * k, device=g.device)
    return (order // max(k, 1)).to(device, torch.int32), position.view(t, k).to(device, torch.int32)


def random_offsets(g: Any, rows: int, groups: int, loads: str, device: str) -> Tensor:
    """Offsets [groups + 1] of rows in groups: ``zipf`` (the n-th largest has a share of 1 / n, in random order), ``even``,
    ``one`` (all rows in one), ``empty`` (every second one has none)."""
    if device == "meta":
        return torch.zeros(groups + 1, dtype=torch.int32, device=device)
    at = g.device
    rank = torch.randperm(groups, generator=g, device=at)
    share = torch.ones(groups, device=at) if loads == "even" else 1 / (1 + rank).float()
    if loads == "one":
        share = (rank == 0).float()
    if loads == "empty":
        share = share * (torch.arange(groups, device=at) % 2)
        share[-1] += 1
    drawn = torch.multinomial(share, rows, replacement=True, generator=g) if rows else rank[:0]
    offsets = torch.zeros(groups + 1, dtype=torch_dtype("int64"), device=at)
    offsets[1:] = torch.bincount(drawn, minlength=groups).cumsum(0)
    return offsets.to(device, torch.int32)
