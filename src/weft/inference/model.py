"""The decoder of Llama, Mistral, Qwen 2 and Qwen 3 (dense and mixture of experts), over a paged cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import ops
from weft.inference.checkpoint import Source
from weft.inference.config import Experts, ModelConfig
from weft.inference.cpu_decoding import CpuStep
from weft.inference.parallel import Ranks
from weft.inference.weights import Linear, Loader, Norm, Quantise, in_blocks
from weft.operators.launch import early_start

# T tokens, H heads of queries, G heads of keys and values, D head dim, B sequences that decode, Q queries of each of these,
# P pages, page tokens of a page, V vocabulary
COUNTERS = 4096  # that are enough for any batch
INVARIANT_ROWS = 64  # tokens of a block whose products do not depend on the batch


@dataclass
class Prompts:
    """Parts of prompts, one behind the other, and what belongs to none; N tokens and K keys in all."""

    cos: Tensor  # float32 [N, R / 2]
    sin: Tensor
    pages: Tensor  # int32 [N, 1], the page that each token is written to; -1 for none
    offsets: Tensor  # int32 [N], its slot in the page, plus 1
    cu_q: Tensor  # int32 [parts + 1], where queries begin
    cu_k: Tensor  # where keys do
    slots: Tensor | None  # int64 [K], where the keys lie in the cache; None if nothing is cached
    # attended one by one: tokens of each, and its slots if some are cached; None: together
    parts: list[tuple[slice, slice | None]] | None = None


@dataclass
class Batch:
    """What a step computes, on the device: first the tokens of sequences that decode, B · Q, then those of prompts."""

    tokens: Tensor  # int64 [T]
    lengths: Tensor  # int32 [B], tokens of each decoding sequence with the new ones
    tables: Tensor  # int32 [B, pages of a sequence]
    queries: int = 1
    prompts: Prompts | None = None
    rows: Tensor | None = None  # int64, tokens whose logits are wanted; None for all
    on_cpu: CpuStep | None = None  # what layers share on a CPU

    @property
    def decoding(self) -> int:
        return self.lengths.shape[0] * self.queries


@dataclass
class Pages:
    """The cache's memory: of each layer k and v [P, page, G, D], and int32 zeros in which a launch counts its parts."""

    k: list[Tensor]
    v: list[Tensor]
    counters: Tensor

    @classmethod
    def empty(
        cls, config: ModelConfig, count: int, size: int, dtype: torch.dtype, device: Any, ranks: int = 1
    ) -> "Pages":
        shape = (config.layers, count, size, config.kv_heads // ranks, config.head_dim)
        k, v = (list(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(2))
        return cls(k, v, torch.zeros(COUNTERS, dtype=torch.int32, device=device))

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, ranks: int = 1) -> int:
        return 2 * config.layers * config.kv_heads // ranks * config.head_dim * dtype.itemsize


class Stream:
    """The residual stream of a step, h [T, hidden]: layers read rms_norm(h) and add their results to it. Of few tokens norm and
    sum are parts of the layers' launches; else a sum waits for the next norm, and both are one launch.

    Args:
        rows: of a block where results must not depend on the batch; 0 for any number.
        exchange: the ranks that share the model; None for this process alone.
    """

    def __init__(self, h: Tensor, rows: int, exchange: Ranks | None, more: Tensor | None = None):
        self.h, self.rows, self.exchange = h, rows, exchange
        self.more = more  # what is still to be added to h; a rank's part of it

    def through(self, layer: Linear, norm: Norm, *, gate: bool = False) -> Tensor:
        """layer(rms_norm(h)), or its gate's."""
        y = layer.fused(self.h, norm, gated=gate) if self.more is None else None
        if y is None:
            x = self.normed(norm)
            y = layer.gated(x) if gate else layer(x)
        return y

    def normed(self, norm: Norm) -> Tensor:
        """rms_norm(h)."""
        if self.more is not None and not self.rows:
            add = ops.add_rms_norm if self.exchange is None else self.exchange.add_rms_norm
            y, self.h = add(self.more, self.h, *norm)
            self.more = None
            return y
        if self.more is not None:
            if self.exchange is not None:
                self.exchange.reduce(self.more)
            self.h, self.more = self.more + self.h, None
        return norm(self.h, self.rows)

    def add(self, layer: Linear, x: Tensor) -> None:
        """h + layer(x)."""
        h = layer.fused(x, residual=self.h) if self.exchange is None and self.more is None else None
        if h is None:
            self.more = layer(x)
        else:
            self.h = h

    def select(self, rows: Tensor) -> None:
        self.h, self.more = self.h[rows], None if self.more is None else self.more[rows]


class Attention:
    def __init__(self, config: ModelConfig, layer: int, load: Loader):
        heads, groups, d, ranks = config.heads, config.kv_heads, config.head_dim, load.ranks
        at = f"model.layers.{layer}.self_attn"
        self.heads, self.groups, self.d, self.eps = heads // ranks, groups // ranks, d, config.norm_eps
        self.layer, self.rows = layer, load.rows
        window = config.window(layer)
        self.window = None if window is None else (window - 1, None)
        self.qkv = load.linear([f"{at}.{n}_proj" for n in "qkv"], [heads * d, groups * d, groups * d], config.hidden_size,
                               bias=config.qkv_bias)  # fmt: skip
        self.out = load.linear([f"{at}.o_proj"], [config.hidden_size], heads * d, bias=config.output_bias, split=1)
        self.q_norm = load.norm(f"{at}.q_norm", d, config.norm_eps) if config.qk_norm else None
        self.k_norm = load.norm(f"{at}.k_norm", d, config.norm_eps) if config.qk_norm else None

    def __call__(self, stream: Stream, norm: Norm, batch: Batch, pages: Pages, angles: tuple[Tensor, Tensor]) -> None:
        """``angles`` of every position, for sequences that decode."""
        tokens = stream.h.shape[0]
        qkv = stream.through(self.qkv, norm).view(tokens, -1, self.d)
        q, k, v = qkv.split((self.heads, self.groups, self.groups), 1)
        n, parts = batch.decoding, []
        if n:
            parts.append(self._decode(q[:n], k[:n], v[:n], batch, pages, angles))
        if batch.prompts is not None:
            parts.append(self._prefill(q[n:], k[n:], v[n:], batch.prompts, pages))
        o = parts[0] if len(parts) == 1 else torch.cat(parts)
        stream.add(self.out, o.reshape(tokens, self.heads * self.d))

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q, self.rows), self.k_norm(k, self.rows)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, pages: Pages, angles: Any) -> Tensor:
        """[B · Q, heads, D] → the same. On a GPU one launch, but for bits that do not depend on the batch."""
        k_pages, v_pages, (cos, sin) = pages.k[self.layer], pages.v[self.layer], angles
        fused = q.is_cuda and not self.rows
        if not fused:
            q, k = self._normed(q, k)
        if not (q.is_cuda or self.rows) and k_pages.dtype == q.dtype:
            if batch.on_cpu is None:
                batch.on_cpu = CpuStep.of(batch.lengths, batch.tables, batch.queries, k_pages.shape[1], angles)
            return batch.on_cpu.attend(q, k, v, k_pages, v_pages, self.window)
        q, k, v = (t.view(-1, batch.queries, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        if fused:
            q_norm, k_norm = (None if n is None else n.weight for n in (self.q_norm, self.k_norm))
            o: Tensor = ops.append_and_attend(
                q, k, v, k_pages, v_pages, batch.tables, batch.lengths, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm,
                eps=self.eps, window=self.window, counters=pages.counters,
            )  # fmt: skip
            return o.transpose(1, 2).flatten(0, 1)
        turned: Any = ops.append_to_cache(k, v, k_pages, v_pages, batch.lengths, batch.tables, q=q, cos=cos, sin=sin)
        call: dict[str, Any] = {"window": self.window, "batch_invariant": bool(self.rows)}
        if self.rows and not q.is_cuda:  # PyTorch's sums over keys depend on how many the longest sequence has
            page = k_pages.shape[1]
            o = torch.cat([
                ops.paged_decode_attention(turned[i : i + 1], k_pages, v_pages, batch.tables[i : i + 1, : -(-length // page)],
                                           batch.lengths[i : i + 1], **call)
                for i, length in enumerate(batch.lengths.tolist())
            ])  # fmt: skip
        else:
            o = ops.paged_decode_attention(turned, k_pages, v_pages, batch.tables, batch.lengths, **call)
        return o.transpose(1, 2).flatten(0, 1)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, prompts: Prompts, pages: Pages) -> Tensor:
        """[N, heads, D] → the same."""
        at = self.layer
        q, k = self._normed(q, k)
        turned = ops.rotary_embedding(q[None], k[None], prompts.cos, prompts.sin)
        q, k = turned[0][0], turned[1][0]
        k_pages, v_pages = pages.k[at], pages.v[at]
        ops.append_to_cache(k[:, :, None], v[:, :, None], k_pages, v_pages, prompts.offsets, prompts.pages)

        def cached(pages: Tensor, slots: Tensor) -> Tensor:
            flat = pages.flatten(0, 1)
            if flat.dtype == q.dtype:
                return flat[slots]
            return flat.view(torch.uint8)[slots].view(flat.dtype).to(q.dtype)

        call: dict[str, Any] = {"causal": True, "window": self.window, "batch_invariant": bool(self.rows)}
        if prompts.parts is None:
            if prompts.slots is not None:
                k, v = cached(k_pages, prompts.slots), cached(v_pages, prompts.slots)
            o: Tensor = ops.attention(q, k, v, cu_seqlens_q=prompts.cu_q, cu_seqlens_k=prompts.cu_k, **call)
            return o
        parts = []
        for own, earlier in prompts.parts:
            keys, values = k[own], v[own]
            if earlier is not None and prompts.slots is not None:
                keys, values = (cached(t, prompts.slots[earlier]) for t in (k_pages, v_pages))
            of_one = (t.transpose(0, 1)[None] for t in (q[own], keys, values))
            parts.append(ops.attention(*of_one, **call)[0].transpose(0, 1))
        return torch.cat(parts)


class FeedForward:
    def __init__(self, at: str, hidden: int, width: int, load: Loader, bias: bool = False):
        self.gate_up = load.linear([f"{at}.gate_proj", f"{at}.up_proj"], [width, width], hidden, bias=bias)
        self.down = load.linear([f"{at}.down_proj"], [hidden], width, bias=bias, split=1)

    def __call__(self, stream: Stream, norm: Norm) -> None:
        stream.add(self.down, stream.through(self.gate_up, norm, gate=True))

    def alone(self, x: Tensor) -> Tensor:
        """x [T, hidden] → [T, hidden]."""
        return self.down(self.gate_up.gated(x))


class MixtureOfExperts:
    def __init__(self, e: Experts, hidden: int, at: str, load: Loader):
        self.k, self.normalise = e.per_token, e.normalise
        # tokens that are computed together where results must not depend on the batch: PyTorch's products on a CPU depend on
        # how many an expert gets
        self.rows = 1 if load.rows and load.device.type == "cpu" else load.rows
        self.router = load.tensor(f"{at}.gate.weight", (e.count, hidden))

        def stacked(name: str, *shape: int) -> Tensor:
            return torch.stack([load.tensor(f"{at}.experts.{i}.{name}_proj.weight", shape) for i in range(e.count)])

        width, packed = e.intermediate_size, f"{at}.experts.gate_up_proj"  # as Transformers 5 may save experts
        if packed in load.source:
            gate, up = load.tensor(packed, (e.count, 2 * width, hidden)).chunk(2, 1)
            down = load.tensor(f"{at}.experts.down_proj", (e.count, hidden, width))
        else:
            gate, up = stacked("gate", width, hidden), stacked("up", width, hidden)
            down = stacked("down", hidden, width)
        self.gate_up = torch.cat([load.share(gate, 1), load.share(up, 1)], 1)
        self.down = load.share(down, 2)
        self.shared: tuple[FeedForward, Tensor] | None = None  # an expert for all tokens, and what weights it
        if e.shared_size:
            feed_forward = FeedForward(f"{at}.shared_expert", hidden, e.shared_size, load)
            self.shared = feed_forward, load.tensor(f"{at}.shared_expert_gate.weight", (1, hidden))

    def __call__(self, stream: Stream, norm: Norm) -> None:
        x = stream.normed(norm)
        y = in_blocks(self._routed, x, self.rows)
        if self.shared is not None:
            feed_forward, gate = self.shared
            y = y + in_blocks(lambda t: torch.sigmoid(F.linear(t, gate)), x, self.rows) * feed_forward.alone(x)
        stream.more = y

    def _routed(self, x: Tensor) -> Tensor:
        y: Tensor = ops.moe_feed_forward(x, self.router, self.gate_up, self.down, self.k, normalise=self.normalise)
        return y


class Decoder:
    """The model. Tensors are on one device; with several ranks each has its share of the heads and hidden units.

    Args:
        source: where the tensors come from, named as in Hugging Face's checkpoints.
        quantise: makes a linear layer of a weight; None for the model's dtype.
        exchange: the ranks that share the model; None for this process alone.
        invariant: a token's bits do not depend on what else is in the batch.

    Raises:
        ValueError: tensors that are missing, of another shape, not finite or not of the model; heads that the ranks cannot
            share.
    """

    def __init__(
        self, config: ModelConfig, source: Source, device: torch.device, dtype: torch.dtype, *,
        quantise: Quantise | None = None, exchange: Ranks | None = None, invariant: bool = False,
    ):  # fmt: skip
        rank, ranks = (0, 1) if exchange is None else (exchange.rank, exchange.ranks)
        e = config.experts
        widths = (
            [config.intermediate_size] if e is None else [config.intermediate_size, e.intermediate_size, e.shared_size]
        )
        if any(n % ranks for n in (config.kv_heads, *widths)):
            shared = f"{config.kv_heads} key/value heads and {' and '.join(str(n) for n in widths if n)} hidden units"
            raise ValueError(f"tensor parallelism of {ranks}: expected a divisor of the model's {shared}")
        load = Loader(source, device, dtype, quantise, rank, ranks, INVARIANT_ROWS if invariant else 0)
        self.config, self.device, self.dtype, self.exchange, self.rows = config, device, dtype, exchange, load.rows
        hidden, eps = config.hidden_size, config.norm_eps
        self.embedding = load.tensor("model.embed_tokens.weight", (config.vocab_size, hidden))
        self.layers: list[tuple[Norm, Attention, Norm, FeedForward | MixtureOfExperts]] = []
        for i in range(config.layers):
            at = f"model.layers.{i}"
            attention = Attention(config, i, load)
            feed_forward: FeedForward | MixtureOfExperts
            if config.experts is not None and i in config.experts.layers:
                feed_forward = MixtureOfExperts(config.experts, hidden, f"{at}.mlp", load)
            else:
                feed_forward = FeedForward(f"{at}.mlp", hidden, config.intermediate_size, load, config.mlp_bias)
            before, after = (load.norm(f"{at}.{n}_layernorm", hidden, eps) for n in ("input", "post_attention"))
            self.layers.append((before, attention, after, feed_forward))
        self.norm = load.norm("model.norm", hidden, eps)
        if config.tied:
            self.head: Linear = load.of(self.embedding, head=True)
            source.skip("lm_head.weight")
        else:
            self.head = load.linear(["lm_head"], [config.vocab_size], hidden, split=None, head=True)
        source.finish()
        self.angles: tuple[Tensor, Tensor] = (torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))

    def prepare(self, positions: int) -> None:
        """Makes the angles of so many positions, where there are fewer: graphs read those that there are."""
        if positions > len(self.angles[0]):
            self.angles = self.config.rotary.angles(torch.arange(positions, device=self.device))

    def linears(self) -> Iterator[Linear]:
        """Of attention and dense feed-forward networks."""
        for _, attention, _, feed in self.layers:
            yield from (attention.qkv, attention.out)
            if isinstance(feed, FeedForward):
                yield from (feed.gate_up, feed.down)

    @property
    def bytes(self) -> int:
        """Bytes of weights that a step reads, whatever the batch (of experts: all)."""
        total = self.head.bytes + sum(layer.bytes for layer in self.linears())
        for before, _, after, feed in self.layers:
            total += before.weight.nbytes + after.weight.nbytes
            if isinstance(feed, MixtureOfExperts):
                total += feed.gate_up.nbytes + feed.down.nbytes
        return total

    def __call__(self, batch: Batch, pages: Pages) -> Tensor:
        """Logits [rows that are wanted, V], in the model's dtype. The batch's keys and values are in the cache then."""
        return self.logits(*self.hidden(batch, pages))

    @torch.inference_mode()
    def hidden(self, batch: Batch, pages: Pages) -> tuple[Tensor, ...]:
        """The rows that are wanted behind the last layer, [rows, hidden]; as two summands where the sum is not made yet."""
        with early_start():  # no step writes weights
            stream = Stream(F.embedding(batch.tokens, self.embedding), self.rows, self.exchange)
            for before, attention, after, feed_forward in self.layers:
                attention(stream, before, batch, pages, self.angles)
                feed_forward(stream, after)
            if batch.rows is not None:
                stream.select(batch.rows)
            return (stream.h,) if stream.more is None else (stream.h, stream.more)

    @torch.inference_mode()
    def logits(self, h: Tensor, more: Tensor | None = None) -> Tensor:
        """[rows, V] of what :meth:`hidden` returns, or of its first rows."""
        with early_start():
            return Stream(h, self.rows, self.exchange, more).through(self.head, self.norm)
