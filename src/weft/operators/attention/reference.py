"""Standard attention: all scores at once, in PyTorch. What the kernels are verified against, and what runs on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.operators.attention.score import Score
from weft.operators.call import beside
from weft.operators.dropout.philox import GROUP, at_least
from weft.operators.dropout.seeds import Seed, scale_of, threshold_of

# B batch, H heads of q, G heads of k and v, Sq queries, Sk keys, D and Dv head dims; packed: N sequences, Tq and Tk tokens


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Any = None, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None, mask: Tensor | None = None,
    bias: Tensor | None = None, score: Score | None = None, dropout: float = 0.0, seed: Seed = None, offset: int = 0,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, return_lse: bool = False,
    deterministic: bool = False, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    packed = cu_seqlens_q is not None
    if packed:  # one batch of all tokens; a query sees the keys of its own sequence
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, groups, d = q.shape[1], k.shape[1], q.shape[3]
    s = _by_group(q.to(wide), groups) @ k.to(wide)[:, :, None].transpose(-1, -2)
    s = s.flatten(1, 2) * (d**-0.5 if scale is None else scale)  # [B, H, Sq, Sk]
    at = _Positions(q, k, cu_seqlens_q, cu_seqlens_k)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if alibi is not None:
        slopes = alibi.to(wide)
        slopes = slopes[at.sequence].t()[..., None] if packed and slopes.ndim == 2 else slopes[..., None, None]
        s = s - slopes * (at.i + at.shift - at.j).abs()
    if bias is not None:
        s = s + bias.to(wide)
    if score is not None:
        s = score.plain(s, at.b, torch.arange(heads, device=q.device)[:, None, None], at.i, at.j)
    for seen in (at.seen(causal, window), mask):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    p, lse = _softmax(s, None if sinks is None else sinks.to(wide)[:, None, None])
    if threshold_of(dropout):
        p = _dropped(p, threshold_of(dropout), seed, offset, at)
    o = (_by_group(p, groups) @ v.to(wide)[:, :, None]).flatten(1, 2).to(q.dtype)
    if packed:
        o, lse = o[0].transpose(0, 1), lse[0]
    return (o, lse) if return_lse else o


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, H, ...] -> [B, G, H / G, ...]."""
    return x.unflatten(1, (groups, x.shape[1] // groups))


class _Positions:
    """Of queries (i, [Sq, 1]) and keys (j, [1, Sk]) in their sequences, made where they are asked for; the last query sees the
    last key, so query i is at ``i + shift`` among the keys."""

    def __init__(self, q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None):
        self.q, self.rows, self.columns, self.cu_q, self.cu_k = q, q.shape[2], k.shape[2], cu_q, cu_k
        self.same: Tensor | None = None
        if cu_q is None or cu_k is None:
            self.b = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
            return
        self.row, self.column = torch.arange(self.rows, device=q.device), torch.arange(self.columns, device=q.device)
        of_row, of_column = (torch.searchsorted(cu[1:].contiguous(), n, right=True)
                             for cu, n in ((cu_q, self.row), (cu_k, self.column)))  # fmt: skip
        last = cu_q.shape[0] - 2
        self.same = (of_row[:, None] == of_column) & (of_row[:, None] <= last)
        self.same &= (self.row >= cu_q[0])[:, None] & (self.column >= cu_k[0])
        self.sequence = of_row.clamp(max=last)  # tokens ahead of the first sequence and behind the last one see nothing
        self.b = self.sequence[:, None]
        self.of_column = of_column.clamp(max=last)

    @property
    def i(self) -> Tensor:
        if self.cu_q is None:
            return beside(self.q, torch.arange(self.rows, device=self.q.device)[:, None])
        return (self.row - self.cu_q[self.sequence])[:, None]

    @property
    def j(self) -> Tensor:
        if self.cu_k is None:
            return beside(self.q, torch.arange(self.columns, device=self.q.device))
        return (self.column - self.cu_k[self.of_column]).clamp(min=0)

    @property
    def shift(self) -> Any:
        if self.cu_q is None or self.cu_k is None:
            return self.columns - self.rows
        return (self.cu_k.diff() - self.cu_q.diff())[self.sequence][:, None]

    def seen(self, causal: bool, window: Any) -> Tensor | None:
        """The keys that a query sees by their positions; None where it sees all."""
        left, right = window or (None, None)
        right = 0 if causal else right
        seen = self.same
        for bound, distance in (
            (left, lambda: self.i + self.shift - self.j),
            (right, lambda: self.j - self.i - self.shift),
        ):
            if bound is not None:
                near = distance() <= bound
                seen = near if seen is None else seen & near
        return seen


def _softmax(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities and their log-sum-exp; 0 and -inf where nothing is seen."""
    peak = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.detach())
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    e = torch.exp(s - peak)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - peak)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    return e / total, torch.where(nothing, -torch.inf, peak + total.log()).squeeze(-1)


def _dropped(p: Tensor, threshold: int, seed: Seed, offset: int, at: _Positions) -> Tensor:
    if seed is None:  # while a compiler traces: PyTorch's random numbers
        return torch.where(F.dropout(torch.ones_like(p), threshold / 2**16) != 0, p * scale_of(threshold), 0.0)
    width = -(-p.shape[-1] // GROUP) * GROUP  # rows begin with a group
    keep = at_least((*p.shape[:-1], width), seed, offset, threshold, p.device)
    column = at.j.expand(p.shape) if at.same is not None else None
    keep = keep[..., : p.shape[-1]] if column is None else keep.gather(-1, column)
    return torch.where(beside(p, keep), p * scale_of(threshold), 0.0)
