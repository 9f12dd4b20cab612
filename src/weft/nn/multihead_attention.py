"""``MultiheadAttention`` in place of ``torch.nn.MultiheadAttention``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import ops

# N batch, H heads, L queries, S keys, E width, D = E / H
NAME = "MultiheadAttention"


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with ``weft.ops.attention``: same constructor, arguments, results and ``state_dict``.

    As there, true in a boolean mask *hides* a key. Differences:

    * A query that sees no key gets zeros before the output projection, where PyTorch's result may be NaN.
    * ``is_causal=True`` needs no ``attn_mask``: query i then sees keys 0 … i. Beside an ``attn_mask`` it is a hint, by which
      the mask is not read where as many queries as keys, and nothing else, make the two the same.
    * Scores are stored only where weights are asked for: pass ``need_weights=False`` (PyTorch's default is True).

    Raises:
        TypeError: nested tensors; masks that are neither boolean nor floating-point.
        ValueError: shapes that do not fit.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = True,
        attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """
        Args:
            query: [L, N, E], or [N, L, E] with ``batch_first``, or [L, E].
            key, value: [S, N, kdim] and [S, N, vdim], or as for ``query``.
            key_padding_mask: [N, S] or [S]; boolean, true is hidden, or floating-point, added to the scores.
            need_weights: also return the weights after softmax and dropout.
            attn_mask: [L, S] or [N H, L, S], boolean or floating-point as above.
            average_attn_weights: return the mean of the weights over heads.
            is_causal: see the class.

        Returns:
            A tensor of query's shape, and weights [N, L, S] (not averaged: [N, H, L, S]; unbatched: no N) or None.
        """
        self._check(query, key, value, key_padding_mask, attn_mask)
        batched = query.ndim == 3
        if batched and not self.batch_first:
            query, key, value = self._transposed(query, key, value)
        q, k, v = self._projected(query, key, value)  # [N, L, E], unbatched [L, E]
        if not batched:
            q, k, v = (t[None] for t in (q, k, v))
        mask, bias, causal = self._masks(q, k, attn_mask, key_padding_mask, is_causal)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat((t, last.to(t.dtype).expand(t.shape[0], 1, -1)), 1)
                    for t, last in ((k, self.bias_k), (v, self.bias_v)))  # fmt: skip
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # [N, H, L, D]
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            o, weights = self._by_weights(q, k, v, mask, bias, causal, dropout)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            sinks = q.new_zeros(self.num_heads) if self.add_zero_attn else None  # the logit of a key of zeros
            window = (None, causal) if causal else None
            o = ops.attention(
                q, k, v, causal=causal == 0, window=window, mask=mask, bias=bias, sinks=sinks, dropout=dropout
            )
        o = F.linear(o.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return o[0], weights
        return (o if self.batch_first else o.transpose(0, 1)), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any, attn_mask: Any) -> None:
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.is_nested:
                raise TypeError(
                    f"{NAME}: argument '{name}' is a nested tensor; expected a dense one with key_padding_mask, or packed "
                    "sequences and weft.ops.attention(…, cu_seqlens_q=, cu_seqlens_k=)"
                )
        widths = (self.embed_dim, self.kdim, self.vdim)
        for (name, t), width in zip((("query", query), ("key", key), ("value", value)), widths, strict=True):
            if t.ndim not in (2, 3) or t.ndim != query.ndim or t.shape[-1] != width:
                order = "[N, length, {0}]" if self.batch_first else "[length, N, {0}]"
                expected = f"{order} or [length, {{0}}], for all three alike".format(width)
                raise ValueError(f"{NAME}: argument '{name}' has shape {tuple(t.shape)}; expected {expected}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"{NAME}: argument 'value' has shape {tuple(value.shape)} and 'key' {tuple(key.shape)}; expected as many tokens"
            )
        batch, length = (0, 1) if self.batch_first else (1, 0)
        if query.ndim == 3 and query.shape[batch] != key.shape[batch]:
            raise ValueError(
                f"{NAME}: argument 'key' has shape {tuple(key.shape)} and 'query' {tuple(query.shape)}; expected one batch size"
            )
        n, queries, keys = (query.shape[batch], query.shape[length], key.shape[length]) if query.ndim == 3 else (
            1, query.shape[0], key.shape[0])  # fmt: skip
        of_keys = ((n, keys),) if query.ndim == 3 else ((keys,),)
        of_pairs = ((queries, keys), (n * self.num_heads, queries, keys))
        for name, t, shapes in (("key_padding_mask", key_padding_mask, of_keys), ("attn_mask", attn_mask, of_pairs)):
            if t is None:
                continue
            if t.dtype != torch.bool and not t.is_floating_point():
                raise TypeError(f"{NAME}: argument '{name}' has dtype {t.dtype}; expected bool or a floating-point one")
            if tuple(t.shape) not in shapes:
                expected = " or ".join(map(str, shapes))
                raise ValueError(f"{NAME}: argument '{name}' has shape {tuple(t.shape)}; expected {expected}")

    @staticmethod
    def _transposed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Batch and length exchanged; one tensor stays one, so that it is projected once."""
        k = key.transpose(0, 1)
        return k if query is key else query.transpose(0, 1), k, k if value is key else value.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        bias = self.in_proj_bias
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if query is key and key is value:
            return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        e = self.embed_dim
        if key is value:
            q = F.linear(query, self.in_proj_weight[:e], None if bias is None else bias[:e])
            return q, *F.linear(key, self.in_proj_weight[e:], None if bias is None else bias[e:]).chunk(2, -1)
        weights, biases = self.in_proj_weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _masks(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, Tensor | None, int | None]:
        """A mask of what is seen, a bias, and how many keys behind its position a query sees (None: all), for the keys with
        those of ``bias_k`` behind them."""
        n, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        more = 0 if self.bias_k is None else 1
        causal = None
        if is_causal and (attn_mask is None or (queries == keys and not more)):
            attn_mask = None
            if more or self.add_zero_attn or queries < keys:
                attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
            else:
                causal = queries - keys
        found: dict[bool, Tensor] = {}
        if attn_mask is not None:
            t = attn_mask if attn_mask.ndim == 2 else attn_mask.view(n, self.num_heads, queries, keys)
            found[t.dtype == torch.bool] = F.pad(t, (0, more)) if more else t
        if key_padding_mask is not None:
            t = key_padding_mask.view(n, 1, 1, keys)
            t, boolean = (F.pad(t, (0, more)) if more else t), t.dtype == torch.bool
            if boolean in found:
                t = found[boolean] | t if boolean else found[boolean] + t
            found[boolean] = t
        mask, bias = found.get(True), found.get(False)
        if bias is not None and bias.dtype not in (q.dtype, torch.float32):
            bias = bias.to(q.dtype)
        return None if mask is None else ~mask, bias, causal

    def _by_weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        causal: int | None,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        """Output and weights [N, H, L, S] by standard attention; with ``add_zero_attn`` the last key is that of zeros."""
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if bias is not None:
            s = s + bias
        if mask is not None:
            s = s.masked_fill(~mask, -torch.inf)
        if causal is not None:
            hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
            s = s.masked_fill(hidden, -torch.inf)
        if self.add_zero_attn:
            s = F.pad(s, (0, 1))
        seen = s.amax(-1, keepdim=True) > -torch.inf if s.shape[-1] else s.new_zeros((), dtype=torch.bool)
        p = torch.where(seen, torch.softmax(torch.where(seen, s, 0.0), -1), 0.0)
        if dropout:
            p = F.dropout(p, dropout)
        return p[..., : v.shape[-2]].to(v.dtype) @ v, p
