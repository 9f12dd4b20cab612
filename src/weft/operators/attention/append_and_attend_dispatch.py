"""What a fused step of decoding is, checked; its table and its launch."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.operators.attention import append_and_attend_kernels as kernels
from weft.operators.attention.append_dispatch import AppendCall
from weft.operators.attention.append_dispatch import Options as AppendOptions
from weft.operators.attention.decode_dispatch import (
    CODES,
    DecodeCall,
    Layout,
    checked_options,
    code_format,
    in_pairs,
    unsupported,
)
from weft.operators.attention.dispatch import result_like
from weft.operators.checks import check_device, check_eps, check_flag, check_shape, check_tensor, check_vector
from weft.operators.configs import bucket
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.hopper.gemm import flags_of
from weft.operators.launch import INTERPRETING, Plan, target_sm
from weft.operators.quantization.formats import format_of
from weft.operators.rotary.dispatch import narrowed

# B batch, T new tokens of a sequence, H heads of q, G heads of k and v, P pages

NAME = "append_and_attend"
OPTIONAL = ("cos", "sin", "q_norm", "k_norm", "k_scale", "v_scale", "counters")
ENOUGH = 4096  # counters: with more sequences and heads than this keys are not divided
AT_ONCE = 8192  # elements of the parts that a program merges at a time, in registers
LEAST = 2  # tiles of a part


class Options(NamedTuple):
    names: tuple[str, ...]  # those of OPTIONAL that there are
    interleaved: bool
    eps: float
    left: int | None
    scale: float | None


class NewTokens(AppendCall):
    operator, caches = NAME, ("k_pages", "v_pages")


class StepCall(Call):
    """``(q, k, v, k_pages, v_pages, page_table, lengths, *tensors, options)``, the tensors in the order of
    ``options.names``."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, *rest: Any):
        table, lengths, *tensors, self.options = rest
        self.q, self.x = q, q
        self.given = given = dict(zip(self.options.names, tensors, strict=True))
        for name, other in (("q_norm", "k_norm"), ("k_norm", "q_norm")):
            if name in given and other not in given:
                raise ValueError(f"{NAME}: argument '{other}' is None beside '{name}'; expected both, or neither")
        scales = {n: given[n] for n in ("k_scale", "v_scale") if n in given}
        named = {"lengths": lengths, "page_table": table, **scales}
        options = checked_options(NAME, tuple(named), True, (self.options.left, None), self.options.scale, None, False,
                                  False, None)  # fmt: skip
        self.attend = DecodeCall(q, k_pages, v_pages, *named.values(), options)
        angles = {n: given[n] for n in ("cos", "sin") if n in given}
        named = {"page_table": table, **({"q": q} if angles else {}), **angles, **scales}
        self.new = NewTokens(k, v, k_pages, v_pages, lengths, *named.values(),
                             AppendOptions(tuple(named), self.options.interleaved))  # fmt: skip
        self.angles = {n: t for n, t in self.new.given.items() if n in angles}
        fits = q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2]
        check_shape(NAME, "q", q, fits, f"[B, H, T, D] with B and T of 'k', {tuple(k.shape)}")
        for name in ("q_norm", "k_norm"):
            if name in given:
                check_vector(NAME, name, given[name], q.shape[3], "a weight for each column of a head", "q", q)
        if (t := given.get("counters")) is not None:
            check_tensor(NAME, "counters", t, (torch.int32,), sharded=False)
            check_device(NAME, "counters", t, "q", q)
            least = min(self.units, ENOUGH)
            check_shape(
                NAME, "counters", t, t.ndim == 1 and t.is_contiguous() and t.shape[0] >= least, f"({least},) or more"
            )
        if torch.is_grad_enabled() and q.requires_grad:
            raise ValueError(
                f"{NAME}: argument 'q' requires a gradient, which there is none of; expected q.detach(), or a call under "
                "torch.no_grad()"
            )

    @property
    def units(self) -> int:
        """Sequences times heads of the cache times tiles of rows."""
        a = self.attend
        return a.batches * a.groups * triton.cdiv(a.rows, min(bucket(a.rows, 16), 64))

    @property
    def empty(self) -> bool:
        return self.attend.empty or self.new.empty

    @property
    def separate(self) -> bool:
        return self.attend.narrow or self.attend.queries > 1


class Step:
    """The launch of a call. It has a plan alone: a cache keeps it."""

    def __init__(self, c: StepCall):
        a, o, layout = c.attend, c.options, Layout.of(c.attend)
        config, self.pairs, self.codes = layout.config, in_pairs(a), a.k.dtype in CODES
        self.fp8, self.names, self.dv, self.units = a.k.dtype == torch.float8_e4m3fn, o.names, a.dv, c.units
        splits = layout.splits(c.units, triton.cdiv(a.capacity, config["N"])) if c.units <= ENOUGH else 1
        programs, columns = splits * a.batches * a.groups * layout.tiles, bucket(a.dv)
        self.parts = programs * layout.kept * (columns + 2) if splits > 1 else 0
        cache = [n // 2 if self.pairs and n > 1 else n for t in (a.k, a.v) for n in t.stride()]
        angles = tuple(n for t in ("cos", "sin") for n in (c.angles[t].stride() if c.angles else (0, 0)))
        scales = tuple(c.given[n].stride(0) if n in c.given and c.given[n].ndim else 0 for n in ("k_scale", "v_scale"))
        rows = (n for t in (a.q, c.new.k, c.new.v) for n in (t.stride(0), t.stride(1), t.stride(3)))
        o_b, o_h, _, o_d = result_like(a.q, a.dv, "meta").stride()
        strides = (*rows, *cache, o_b, o_h, o_d, *a.given["page_table"].stride(), *angles, *scales)
        sizes = (a.batches, a.groups, a.group, a.capacity, a.k.shape[0], splits, LEAST, layout.tiles)
        scale = a.d**-0.5 if o.scale is None else o.scale
        numbers = (*sizes, min(o.left or 0, a.capacity), scale, o.eps)
        constants = {
            "D": a.d, "DV": a.dv, "D_COLS": bucket(a.d), "DV_COLS": columns, "M": layout.M, "N": config["N"],
            "KEPT": layout.kept, "SPLIT": "evenly" if splits > 1 else "whole",
            "PARTS": min(max(AT_ONCE // (layout.kept * columns), 1), bucket(splits), 16), "PAGE": a.page,
            "ALIKE": a.k.stride() == a.v.stride(), "R": 2 * c.angles["cos"].shape[1] if c.angles else 0,
            "INTERLEAVED": o.interleaved, "NORM": "q_norm" in c.given, "FORMAT": code_format(a),
            "CODES": format_of(a.k.dtype) if self.codes else "",
            "HARDWARE": self.codes and not INTERPRETING and target_sm(a.q.device) >= 89, "LEFT": o.left is not None,
            "SCALED": "k_scale" in c.given, "HALF": (self.pairs or self.fp8) and a.q.dtype != torch.float32,
            "ACCURATE": a.q.dtype == torch.float32, "PAIRS": self.pairs,
        }  # fmt: skip
        warps, stages = config["num_warps"], config["num_stages"]
        self.plan = Plan(kernels.append_and_attend, (programs,), (*numbers, *strides), constants, warps, stages)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, *tensors: Tensor) -> Tensor:
        table, lengths, *optional = tensors
        given = dict(zip(self.names, optional, strict=True))
        o = result_like(q, self.dv)
        parts, counters = q, given.get("counters", q)
        if self.parts:
            parts = torch.empty(self.parts, dtype=torch.float32, device=q.device)
            if "counters" not in given:
                counters = flags_of(q.device, self.units) if q.is_cuda else lengths.new_zeros(self.units)
        cache: tuple[Tensor, ...] = (k_pages, v_pages)
        if self.pairs or self.fp8:
            cache = tuple(t.view(torch.int16 if self.pairs else torch.uint8) for t in cache)
        one = torch.ones((), dtype=torch.float32, device=q.device) if self.codes and "k_scale" not in given else q
        cos, sin = (narrowed(given[n], q.shape[3]) if n in given else q for n in ("cos", "sin"))
        norms, scales = (
            (given.get(n, q) for n in ("q_norm", "k_norm")),
            (given.get(n, one) for n in ("k_scale", "v_scale")),
        )
        self.plan(q, k, v, *cache, o, parts, counters, table, lengths, cos, sin, *norms, *scales)
        torch.autograd.graph.increment_version((k_pages, v_pages))
        return o


STEP = Dispatch(
    StepCall,
    ON_CPU,
    TRACED,
    EMPTY,
    Route("separate", lambda c: c.separate or unsupported(c.attend) != "",
          "several new tokens, head dims below 16 or strides that span too much: an append, then attention"),
    Route("triton", lambda c: True, "a new token is rotated, written and attended to in one launch, which merges its parts",
          Step, lambda c: unsupported(c.attend) or ("several new tokens; it takes one" if c.attend.queries > 1 else "")),
)  # fmt: skip


def parts_of(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, *,
    cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, eps: float = 1e-6, window: Any = None, scale: float | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, counters: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Options]:  # fmt: skip
    """Tensors and options of a call."""
    every = zip(OPTIONAL, (cos, sin, q_norm, k_norm, k_scale, v_scale, counters), strict=True)
    given = {name: t for name, t in every if t is not None}
    for name in ("q_norm", "k_norm"):
        if isinstance(given.get(name), Tensor):
            given[name] = given[name].contiguous()  # weights that kernels read one behind the other
    check_flag(NAME, "interleaved", interleaved)
    check_eps(NAME, eps)
    left = checked_options(NAME, (), True, window, scale, None, False, False, None).left
    return (q, k, v, k_pages, v_pages, page_table, lengths, *given.values()), Options(
        tuple(given), interleaved, eps, left, scale
    )
