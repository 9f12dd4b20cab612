"""What a decoding call is, checked; into how many parts its keys are divided; the table and the launches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.operators.attention import decode_kernels as kernels
from weft.operators.attention.dispatch import by_vectors, result_like, spans_too_much
from weft.operators.attention.dispatch import options as attention_options
from weft.operators.call import FLOATS_AND_64
from weft.operators.checks import check_device, check_flag, check_same, check_shape, check_tensor, check_value
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import shared_limit
from weft.operators.dispatch import EMPTY, ON_CPU, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING, Plan, multiprocessors, target_sm

# B batch, H heads of q, G heads of the cache, Sq queries, S keys that a cache has room for, D and Dv head dims, P pages

CODES = (torch.float8_e4m3fn, torch.int8)  # what a cache may hold besides numbers of q's dtype
OPTIONAL = ("lengths", "page_table", "sinks", "alibi", "k_scale", "v_scale", "plan")  # tensors that a call may have
CHUNK = 512  # keys of a part where its bits must not depend on the batch
NO_LATENT = (
    "at most 256: for latent attention (MLA, 576 and 512) multiply the latent cache up to keys and values of each head "
    "(D 192, Dv 128), or take a kernel for it (FlashMLA)"
)


class Options(NamedTuple):
    """What a launch depends on besides its tensors; ``names`` are those of OPTIONAL that there are, ``slots`` a plan's."""

    operator: str
    names: tuple[str, ...]
    left: int | None
    right: int | None
    scale: float | None
    softcap: float | None
    invariant: bool = False
    lse: bool = False
    slots: int = 0
    planned: tuple[int, ...] = ()


class DecodeCall(Call):
    """``(q, k, v, *tensors, options)``, the tensors in the order of ``options.names``; k and v a cache, or pages."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any):
        *tensors, options = rest
        self.q, self.k, self.v, self.x = q, k, v, q
        self.options: Options = options
        self.given = dict(zip(options.names, tensors, strict=True))
        self.paged = "page_table" in self.given
        self.check()
        if self.paged:  # [P, page, G, D] → [P, G, page, D]
            self.page = self.k.shape[1]
            self.k, self.v = self.k.transpose(1, 2), self.v.transpose(1, 2)
            self.capacity = self.given["page_table"].shape[1] * self.page
        else:
            self.page, self.capacity = 0, self.k.shape[2]
        self.batches, self.heads, self.queries, self.d = q.shape
        self.groups, self.dv = self.k.shape[1], self.v.shape[-1]
        self.group = self.heads // max(self.groups, 1)
        self.rows = self.queries * self.group

    # ---- checks

    def check(self) -> None:
        name, q, k, v = self.options.operator, self.q, self.k, self.v
        k_name, v_name = ("k_pages", "v_pages") if self.paged else ("k", "v")
        check_tensor(name, "q", q, sharded=False)
        for of, t in ((k_name, k), (v_name, v)):
            check_tensor(name, of, t, (*FLOATS_AND_64, *CODES), sharded=False)
            if t.dtype not in CODES:
                check_same(name, of, t, "q", q)
            check_device(name, of, t, "q", q)
        check_shape(name, "q", q, q.ndim == 4, "[B, H, Sq, D]")
        at = 2 if self.paged else 1
        form = "[P, page, G, D]" if self.paged else "[B, G, S, D]"
        check_shape(name, k_name, k, k.ndim == 4 and k.shape[3] == q.shape[3] > 0, f"{form} with the head dim of 'q'")
        check_shape(name, v_name, v, v.ndim == 4 and v.shape[:3] == k.shape[:3] and v.shape[3] > 0,
                    f"that of '{k_name}', {tuple(k.shape)}, the head dim apart")  # fmt: skip
        if not self.paged:
            check_shape(name, k_name, k, k.shape[0] == q.shape[0], f"{form} with the batch of 'q', {q.shape[0]}")
        fits = k.shape[at] > 0 and q.shape[1] % k.shape[at] == 0
        check_shape(name, k_name, k, fits, f"a number of heads that divides the {q.shape[1]} of 'q'")
        if v.dtype != k.dtype:
            check_same(name, v_name, v, k_name, k)
        for of, t in ((k_name, k), (v_name, v)):
            check_shape(name, of, t, t.shape[3] <= 256, f"a head dim of {NO_LATENT}")
        self.check_given()

    def check_given(self) -> None:
        name, q, b = self.options.operator, self.q, self.q.shape[0]
        groups = self.k.shape[2 if self.paged else 1]
        floats = tuple(dict.fromkeys((q.dtype, torch.float32)))
        for of, t in self.given.items():
            integers, exact = of in ("lengths", "page_table", "plan"), of in ("k_scale", "v_scale")
            dtypes = (torch.int32,) if integers else (torch.float32,) if exact else floats
            check_tensor(name, of, t, dtypes, sharded=False)
            check_device(name, of, t, "q", q)
        if (t := self.given.get("lengths")) is not None:
            check_shape(
                name, "lengths", t, t.shape == (b,) and t.is_contiguous(), f"({b},), a number of keys for each batch"
            )
        if (t := self.given.get("page_table")) is not None:
            check_shape(name, "page_table", t, t.ndim == 2 and t.shape[0] == b, f"({b}, pages of a sequence)")
            check_shape(name, "k_pages", self.k, self.k.shape[1] > 0, "pages of at least one token")
        if (t := self.given.get("sinks")) is not None:
            check_shape(name, "sinks", t, t.shape == (q.shape[1],), f"({q.shape[1]},), a logit for each head of 'q'")
        if (t := self.given.get("alibi")) is not None:
            fits = t.shape in ((q.shape[1],), (b, q.shape[1]))
            check_shape(name, "alibi", t, fits, f"({q.shape[1]},) or ({b}, {q.shape[1]}), a slope for each head of 'q'")
        for of, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
            if (t := self.given.get(of)) is None:
                continue
            check_shape(name, of, t, t.shape in ((), (groups,)), f"() or ({groups},), one for each head of the cache")
            if other not in self.given:
                raise ValueError(f"{name}: argument '{other}' is None beside '{of}'; expected both, or neither")
        if "plan" in self.given and self.options.invariant:
            raise ValueError(
                f"{name}: argument 'plan' beside batch_invariant=True; expected None: a plan divides keys by what else is in "
                "the batch"
            )

    # ---- what the table asks

    @property
    def empty(self) -> bool:
        return 0 in (self.batches, self.heads, self.queries, self.capacity)

    @property
    def narrow(self) -> bool:
        return min(self.d, self.dv) < 16

    @property
    def wants_gradient(self) -> bool:
        tensors = (self.q, self.k, self.v, *self.given.values())
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def unsupported(c: DecodeCall) -> str:
    if c.narrow:
        return f"head dims {c.d} and {c.dv}; the kernels take 16 to 256"
    if c.wants_gradient:
        return "a gradient is wanted; the kernels have none"
    if spans_too_much(c.q.stride(3)):
        return f"q has strides {c.q.stride()}: a tile spans 2**31 elements"
    for name, t in (("k", c.k), ("v", c.v)):
        if spans_too_much(max(1, triton.cdiv(c.page, 256)) * t.stride(2), t.stride(3)):
            return f"{name} has strides {t.stride()}: a tile spans 2**31 elements"
    return ""


def checked_options(
    operator: str, names: tuple[str, ...], causal: Any, window: Any, scale: Any, softcap: Any, invariant: Any, lse: Any,
    plan: Any,
) -> Options:  # fmt: skip
    try:
        o = attention_options((), causal, window, scale, softcap, None, 0.0)
    except (TypeError, ValueError) as error:  # said of ``attention``, whose options these are
        raise type(error)(str(error).replace("attention: ", f"{operator}: ", 1)) from None
    check_flag(operator, "batch_invariant", invariant)
    check_flag(operator, "return_lse", lse)
    check_value(
        operator, "plan", plan, plan is None or isinstance(plan, DecodePlan), "a DecodePlan, or None", TypeError
    )
    slots, planned = (0, ()) if plan is None else (plan.slots, plan.made_for)
    return Options(operator, names, o.left, o.right, o.scale, o.softcap, invariant, lse, slots, planned)


# ---- parts -----------------------------------------------------------------------------------------------------------


def heuristic(sm: int, dtype: torch.dtype, d: int, rows: int, scattered: bool, vectors: bool) -> Config:
    """``dtype`` of the cache, rows of a tile, whether a large tile is of several pages, whether rows are read by vectors: an
    element at a time, large tiles spill. ``programs`` are those that share a multiprocessor. Measured on an H200: few large
    tiles in flight reach the bandwidth of the memory, many small ones do not; but keys with addresses of their own want
    registers and instructions."""
    if INTERPRETING:
        return {"N": 32, "num_warps": 4, "num_stages": 1, "programs": 2}
    if dtype == torch.float32:
        return {"N": 32 if d <= 64 else 16, "num_warps": 4, "num_stages": 2, "programs": 2}
    if not vectors and rows <= 16 and d <= 128:
        return {"N": 32, "num_warps": 2, "num_stages": 2, "programs": 6}
    if not vectors:
        return {"N": 32 if d <= 64 else 16, "num_warps": 4, "num_stages": 2, "programs": 4}
    much, codes = shared_limit(sm) > 2**17, dtype.itemsize == 1
    scattered = scattered and not codes
    if not much or rows > 32 or scattered:
        n = 64 if d <= 128 else 32
    elif rows > 16 and not codes:  # warps are laid along 64 rows: 32 are computed twice, which wants two programs
        n = 128 if d <= 64 else 64
    else:
        n = 64 if d > 128 else 128 if d > 64 or codes else 256
    stages = 3
    each = 2 * (stages - 1) * n * d * dtype.itemsize  # tiles of k and of v that are in flight
    return {
        "N": n,
        "num_warps": 4,
        "num_stages": stages,
        "programs": max(1, min(2, shared_limit(sm) // (each + 2**13))),
    }


def candidates(sm: int, dtype: torch.dtype, d: int, rows: int, scattered: bool, vectors: bool) -> Any:
    for c in grid_of({"N": (32, 64, 128, 256), "num_warps": (4, 8), "num_stages": (2, 3, 4), "programs": (1, 2, 3)}):
        if 2 * (c["num_stages"] - 1) * c["N"] * d * dtype.itemsize * c["programs"] <= shared_limit(sm):
            yield c


configuration = Configurations(__file__, "decode", heuristic, candidates)


@dataclass(frozen=True)
class Layout:
    """Tiles of a call and the programs that a device has room for at once."""

    config: Config
    M: int  # rows of a tile
    kept: int  # rows of a tile that exist, rounded up to a power of two
    tiles: int  # of rows
    room: int  # programs

    @classmethod
    def of(cls, c: DecodeCall) -> "Layout":
        m = min(bucket(c.rows, 16), 64)
        scattered = c.paged and c.page % 128 != 0
        width = max(bucket(c.d), bucket(c.dv))
        config = configuration(c.q.device, c.k.dtype, width, m, scattered, by_vectors(c.k, c.v, size=4))
        room = multiprocessors(c.q.device) * config["programs"]
        return cls(config, m, min(bucket(c.rows), m), triton.cdiv(c.rows, m), room)

    def splits(self, units: int, key_tiles: int) -> int:
        """The fewest equal parts of each sequence with which programs, ``units`` for each part, fill the device as evenly as
        any number up to twice its room does, within 5 %."""
        most = max(1, min(key_tiles, 4 * self.room // units))
        filled = {n: n * units / (triton.cdiv(n * units, self.room) * self.room) for n in range(1, most + 1)}
        best = max(filled.values())
        return next(n for n, share in filled.items() if share >= 0.95 * best)


@dataclass(frozen=True)
class DecodePlan:
    """How the keys of a batch of sequences are divided among programs: one tile count for the parts of all sequences, the least
    with which all parts run at once. Made once for a batch, on the device, and good for every layer of a model.

    Results do not depend on it, speed does: sequences may grow after it was made. :meth:`update` makes it again in place, for a
    captured graph too.
    """

    first: Tensor  # int32 [B + 2]: the slot of each sequence's first part, how many there are in all, tiles of a part
    slots: int
    made_for: tuple[int, ...]
    divide: Callable[..., None]

    def update(self, lengths: Tensor) -> None:
        """Divides these lengths, int32 [B]. Nothing waits for the device."""
        self.divide(lengths, self.first)


def plan_of(c: DecodeCall) -> DecodePlan:
    layout = Layout.of(c)
    slots = max(layout.room // (c.groups * layout.tiles), 2 * c.batches)  # of uneven sequences some have several parts
    first = torch.zeros(c.batches + 2, dtype=torch.int32, device=c.q.device)
    left, right = _bounds(c)
    scalars = (c.batches, c.queries, c.capacity, slots, left, right)
    flags = {"LEFT": c.options.left is not None, "RIGHT": c.options.right is not None}
    constants = {"N": layout.config["N"], **flags, "BLOCK": bucket(c.batches)}
    divide: Any = Plan(kernels.divide, (1,), scalars, constants) if c.on_gpu else lambda lengths, first: None
    return DecodePlan(first, slots, made_for(c, layout), divide)


def made_for(c: DecodeCall, layout: Layout) -> tuple[int, ...]:
    """What a call must have in common with that of its plan: batch, heads, rows, and keys of a tile."""
    return c.batches, c.groups, c.rows, layout.config["N"]


def _bounds(c: DecodeCall) -> tuple[int, int]:
    """Of the window; no key is further away than this, and kernels add bounds to positions in 32 bits."""
    return min(c.options.left or 0, c.capacity), min(c.options.right or 0, c.queries)


# ---- launches --------------------------------------------------------------------------------------------------------


class Decode:
    """The launches of a call. It has plans alone: a cache keeps it, and would keep a call's tensors in memory."""

    def __init__(self, c: DecodeCall):
        o, given, layout = c.options, c.given, Layout.of(c)
        config, self.pairs = layout.config, in_pairs(c)
        self.fp8 = c.k.dtype == torch.float8_e4m3fn
        key_tiles = triton.cdiv(c.capacity, config["N"])
        each = max(1, CHUNK // config["N"]) if o.invariant else 1
        if "plan" in given:
            if o.planned != made_for(c, layout):
                raise ValueError(
                    f"{o.operator}: argument 'plan' was made for (batch, heads of the cache, rows, tile) {o.planned} and the "
                    f"call has {made_for(c, layout)}; expected a plan made of such a call"
                )
            split, slots, splits = "plan", o.slots, 1
        elif o.invariant:
            splits = triton.cdiv(key_tiles, each)
            split, slots = "chunks", splits * c.batches
        else:
            splits = layout.splits(c.batches * c.groups * layout.tiles, key_tiles)
            split, slots = "evenly" if splits > 1 else "whole", splits * c.batches
        programs = slots * c.groups * layout.tiles
        widths = {"DV": c.dv, "DV_COLS": bucket(c.dv)}
        self.parts = 0 if split == "whole" else programs * layout.kept * (widths["DV_COLS"] + 2)
        self.lse, self.names, self.dv = o.lse, o.names, c.dv
        sizes = (c.batches, c.groups, c.group, c.queries, c.capacity)
        divided = (splits, each, layout.tiles, *_bounds(c))
        result = result_like(c.q, c.dv, "meta").stride()
        table = given["page_table"].stride() if c.paged else (0, 0)
        slopes = given.get("alibi")
        alibi = (0, 0) if slopes is None else (0, slopes.stride(0)) if slopes.ndim == 1 else slopes.stride()
        of_scales = tuple(given[n].stride(0) if n in given and given[n].ndim else 0 for n in ("k_scale", "v_scale"))
        shared = {
            **widths, "M": layout.M, "N": config["N"], "KEPT": layout.kept, "SPLIT": split, "LENGTHS": "lengths" in given,
            "SINKS": "sinks" in given, "LEFT": o.left is not None, "RIGHT": o.right is not None, "SCALED": "k_scale" in given,
            "HALF": (self.pairs or self.fp8) and c.q.dtype != torch.float32, "LSE": o.lse,
        }  # fmt: skip
        scale = c.d**-0.5 if o.scale is None else o.scale
        numbers = (*sizes, c.k.shape[0] if c.paged else 0, *divided, scale, o.softcap or 1.0)
        cache = [n // 2 if self.pairs and n > 1 else n for t in (c.k, c.v) for n in t.stride()]
        strides = (*c.q.stride(), *cache, *result, *table, *alibi, *of_scales)
        constants = {
            "D": c.d, "D_COLS": bucket(c.d), **shared, "PAGE": c.page, "ALIKE": c.k.stride() == c.v.stride(),
            "FORMAT": code_format(c), "SOFTCAP": o.softcap is not None, "ALIBI": slopes is not None,
            "ACCURATE": c.q.dtype == torch.float32, "PAIRS": self.pairs,
        }  # fmt: skip
        warps, stages = config["num_warps"], config["num_stages"]
        self.attend = Plan(kernels.attend_part, (programs,), (*numbers, *strides), constants, warps, stages)
        self.combine = None
        if self.parts:
            most = slots if split == "plan" else splits
            at_once = 32 if o.invariant else min(bucket(most), 64)  # sums are in another order with another number
            constants = {**shared, "PARTS": at_once}
            grid = (c.batches * c.groups * layout.tiles * layout.kept,)
            self.combine = Plan(kernels.combine, grid, (*sizes, *divided, *result, of_scales[1]), constants, 4, 1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        given = dict(zip(self.names, tensors, strict=True))
        o = result_like(q, self.dv)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if self.lse else q
        parts = torch.empty(self.parts, dtype=torch.float32, device=q.device) if self.parts else q
        if self.pairs or self.fp8:
            as_integers = torch.int16 if self.pairs else torch.uint8
            k, v = k.view(as_integers), v.view(as_integers)
        lengths, table, sinks, alibi, k_scale, v_scale, plan = (given.get(n, q) for n in OPTIONAL)
        self.attend(q, k, v, o, lse, parts, lengths, table, sinks, alibi, k_scale, v_scale, plan)
        if self.combine is not None:
            self.combine(o, lse, parts, lengths, sinks, v_scale, plan)
        return (o, lse) if self.lse else o


def in_pairs(c: DecodeCall) -> bool:
    """Whether the codes of neighbouring columns can be read as one int16."""
    return c.k.dtype in CODES and c.q.dtype != torch.float32 and all(
        t.shape[3] > 16 and t.shape[3] % 2 == 0 and t.stride(3) == 1 and not any(n % 2 for n in t.stride()[:3])
        and t.storage_offset() % 2 == 0
        for t in (c.k, c.v)
    )  # fmt: skip


def code_format(c: DecodeCall) -> str:
    """How codes of a cache become numbers."""
    if c.k.dtype != torch.float8_e4m3fn:
        return "" if not in_pairs(c) else "int8_by_bits" if INTERPRETING else "int8"
    return "fp8_by_bits" if INTERPRETING or target_sm(c.q.device) < 89 else "fp8"


TRITON = "parts of the keys side by side, heads that share keys as rows of one tile, parts merged in a fixed order"

DECODE = Dispatch(
    DecodeCall,
    ON_CPU,
    EMPTY,
    Route("torch", lambda c: c.wants_gradient, "a gradient is wanted, for which there is no kernel of ours"),
    Route("torch", lambda c: c.narrow, "head dims below 16, for which there is no kernel"),
    Route("torch", lambda c: unsupported(c) != "", "strides so long that a tile spans 2**31 elements"),
    Route("triton", lambda c: True, TRITON, Decode, unsupported),
)
