"""The launches of ``hopper_backward.cu``: gradients of attention by wgmma, fed by TMA (sm_90 and no other)."""

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.operators.attention.hopper_forward import strides_of_mask, unsupported_options
from weft.operators.cuda import CTYPES, CudaPlan, flags
from weft.operators.hopper.gemm import flags_of
from weft.operators.hopper.tensor_maps import Heads, PackedHeads, map_why_not
from weft.operators.launch import multiprocessors

# B batch, H heads of q, G heads of k and v, Sq queries, Sk keys, D the head dim of all

SOURCE = Path(__file__).parent / "hopper_backward.cu"
KEYS, SLOTS, THREADS = 128, 2, 384
IN_L2 = 32 * 2**20  # bytes that the blocks at work should read and add to
LONGEST = 2**28  # positions and bounds are added in 32 bits
LOG2E = 1 / math.log(2.0)


class Sizes(ctypes.Structure):
    """``Sizes`` of hopper_backward.cu."""

    names = (
        "queries",
        "keys",
        "heads",
        "group",
        "batches",
        "left",
        "right",
        "query_tiles",
        "key_tiles",
        "section",
        "sequences",
    )
    _fields_ = tuple((name, ctypes.c_int) for name in names)


class Cap(ctypes.Structure):
    """``Cap`` of hopper_backward.cu."""

    _fields_ = tuple((name, ctypes.c_float) for name in ("cap", "in_cap", "out_of_cap"))


class Strides(ctypes.Structure):
    """``Strides`` of hopper_backward.cu."""

    _fields_ = tuple((name, ctypes.c_longlong) for name in ("batch", "head", "row"))


def queries_of(d: int) -> int:
    """Rows of a tile of queries."""
    return 8192 // d


def drawn(d: int) -> bool:
    """Whether blocks draw tiles of keys from a counter (``DRAWN`` of hopper_backward.cu)."""
    return d == 64


def shared_bytes(d: int) -> int:
    m = queries_of(d)
    tiles = (4 if drawn(d) else 2) * KEYS * d + 2 * SLOTS * m * d + 3 * KEYS * m  # k and v, the rings of q and do, ds
    staged = 0 if drawn(d) else 4 * m * d
    return 2 * tiles + staged + SLOTS * 2 * m * 4 + 8 * (4 * SLOTS + 10) + 2 * 44  # statistics, barriers, tiles of keys


def heads_first(t: Tensor) -> Tensor:
    """[B, heads, S, D]; of packed sequences, [total, heads, D], one batch."""
    return t.transpose(0, 1)[None] if t.ndim == 3 else t


def unsupported(c: Any) -> str:
    """Why the kernels do not take a ``GradientCall`` ("" when they do)."""
    if c.sm != 90:
        return f"sm_{c.sm}; wgmma and its descriptors are of sm_90"
    if c.q.dtype not in (torch.float16, torch.bfloat16):
        return f"{c.q.dtype}; it takes 16-bit floats"
    if c.d != c.dv or c.d not in (64, 128):
        return f"head dims {c.d} and {c.dv}; it takes 64 and 128, v's as q's"
    if reason := unsupported_options(c):
        return reason
    if c.empty or max(c.query_tokens, c.key_tokens) > LONGEST:
        return f"{c.query_tokens} queries and {c.key_tokens} keys; it takes 1 to {LONGEST}"
    for name, t in (*c.views.items(), ("o", heads_first(c.o)), ("do", heads_first(c.do))):
        if reason := map_why_not(name, t, t.element_size(), False):
            return reason
    return ""


def gradient_of_sinks(sinks: Tensor, statistics: Tensor) -> Tensor:
    """By the statistics that ``prepare`` makes: rows behind the last have a base of -inf, which is no share."""
    base, delta = statistics.unbind(3)
    share = torch.exp2(sinks.float()[:, None, None] * LOG2E + base)
    return -(share * delta).sum((0, 2, 3)).to(sinks.dtype)


class HopperGradients:
    """Calls the kernels: ``prepare``, ``gradients``, ``finish``. Sums of dq are in fp32, B·H·Sq·D of them beside the results;
    their order, and so the last bits of dq, differ from run to run."""

    def __init__(self, c: Any):
        o, d, m = c.options, c.d, queries_of(c.d)
        batches, extra = (1, c.batches + 2) if c.packed else (c.batches, 0)  # packed: tiles for any lengths
        query_tiles, key_tiles = (n // size + extra if c.packed else -(-n // size)
                                  for n, size in ((c.query_tokens, m), (c.key_tokens, KEYS)))  # fmt: skip
        reach = c.query_tokens + c.key_tokens  # no key is further away
        left, right = (reach if n is None else min(n, reach) for n in (o.left, o.right))
        of_head = c.group * max(c.usual_queries, 1) * d * (2 * 2 + 4)  # q, do, dq: what the blocks of a head of k walk
        sizes = Sizes(
            c.query_tokens, c.key_tokens, c.heads, c.group, batches, left, right, query_tiles, key_tiles,
            min(batches * c.heads // c.group, max(1, IN_L2 // of_head)), c.batches if c.packed else 0,
        )  # fmt: skip
        self.scale = d**-0.5 if o.scale is None else o.scale
        scale, log_scale = ctypes.c_float(self.scale), ctypes.c_float(self.scale * LOG2E)
        kind, rows = CTYPES[c.q.dtype], batches * c.heads * query_tiles
        self.statistics, self.sums = (batches, c.heads, query_tiles, 2, m), (rows, m * d)
        q, k, v = c.views.values()
        o_view, do = heads_first(c.o), heads_first(c.do)
        gradients = [heads_first(torch.empty_like(t, device="meta")) for t in (c.q, c.k, c.v)]
        of_rows = [(q, m), (k, KEYS), (v, KEYS), (do, m)]
        self.maps = [PackedHeads(t, n) if c.packed else Heads(t, 64) for t, n in of_rows]
        self.maps += [Heads(t, 64) for t in gradients[1:]]
        of_o, of_do, of_dq, of_dk, of_dv = (Strides(*t.stride()[:3]) for t in (o_view, do, *gradients))
        mask = strides_of_mask(c)
        softcap = o.softcap or 1.0
        cap = Cap(softcap * LOG2E, 2 * LOG2E * self.scale / softcap, 1 / (softcap * LOG2E))
        self.scalars = sizes, of_dk, of_dv, Strides(mask[0], mask[1], mask[3]), scale, log_scale, cap
        capped, packed = o.softcap is not None, flags(c.packed)
        unit = ctypes.c_float(LOG2E if capped else 1.0)  # with a soft cap peaks are natural
        self.prepare = [
            CudaPlan(
                SOURCE,
                f"prepare<{kind}, {d}, {packed}>",
                (rows, 1),
                256,
                (sizes, of_o, of_do, ctypes.c_int(given), unit),
            )
            for given in (0, 1)
        ]
        blocks = key_tiles * batches * (c.heads // c.group)
        if drawn(d):
            blocks = min(blocks, multiprocessors(q.device))
        kernel = f"gradients<{kind}, {d}, {SLOTS}, {flags(drawn(d), c.packed, capped, 'mask' in c.given)}>"
        self.main = CudaPlan(SOURCE, kernel, (blocks, 1), THREADS, (), 1, shared_bytes(d))
        self.finish = CudaPlan(SOURCE, f"finish<{kind}, {d}, {packed}>", (rows, 1), 256, (sizes, of_dq, scale))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, peak: Tensor, log_sum: Tensor, do: Tensor, dlse: Tensor | None,
        given: dict[str, Tensor], seed: int, offset: int, wanted: frozenset[str],
    ) -> dict[str, Tensor]:  # fmt: skip
        """As that of ``Gradients``."""
        statistics = torch.empty(self.statistics, dtype=torch.float32, device=q.device)
        sums = torch.empty(self.sums, dtype=torch.float32, device=q.device)
        of_lse = peak if dlse is None else dlse.contiguous()
        bounds = given.get("cu_seqlens_q", q), given.get("cu_seqlens_k", q)
        self.prepare[dlse is not None](o, do, peak, log_sum, of_lse, statistics, sums, bounds[0])
        found = {name: torch.empty_like(t) for name, t in (("q", q), ("k", k), ("v", v))}
        main, counter = self.main, sums
        if q.is_cuda:
            main = main.at(self.of_tensors, q, k, v, do, found["k"], found["v"])
            counter = flags_of(q.device, 1)
        mask = given["mask"].view(torch.uint8) if "mask" in given else q
        main(statistics, sums, counter, found["k"], found["v"], *bounds, mask)
        self.finish(sums, found["q"], bounds[0])
        if "sinks" in wanted:
            found["sinks"] = gradient_of_sinks(given["sinks"], statistics)
        return found

    def of_tensors(self, *tensors: Tensor) -> tuple[Any, ...]:
        return (*(of(t) for of, t in zip(self.maps, tensors, strict=True)), *self.scalars)
