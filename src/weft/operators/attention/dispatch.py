"""What a call of attention is, checked; which kernel takes it, when and why; and the launches."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.operators.attention import gradient_kernels, hopper_backward, hopper_forward, kernels
from weft.operators.attention.score import Score
from weft.operators.attention.statistics import gradient_of_sinks
from weft.operators.call import FLOATS_AND_64
from weft.operators.checks import (
    check_device,
    check_flag,
    check_same,
    check_shape,
    check_tensor,
    check_value,
    is_int,
    is_number,
)
from weft.operators.configs import Config, Configurations, bucket, constants_of, grid_of
from weft.operators.cuda import pointer_aligned, shared_limit
from weft.operators.dispatch import EMPTY, ON_CPU, Call, Dispatch, Route
from weft.operators.dropout.philox import GROUP
from weft.operators.dropout.seeds import scale_of, threshold_of
from weft.operators.launch import INTERPRETING, DescriptorPlan, Plan, target_sm

NAME = "attention"
USUAL = 4096  # queries of a packed sequence, where its tiles may not depend on the others
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
# B batch (or N sequences), H heads of q, G heads of k and v, Sq queries, Sk keys, D and Dv head dims

# ---- a call ----------------------------------------------------------------------------------------------------------

OPTIONAL = ("mask", "bias", "sinks", "alibi", "cu_seqlens_q", "cu_seqlens_k", "seed")  # tensors that a call may have


class Options(NamedTuple):
    """What a plan depends on besides its tensors; ``names`` are those of OPTIONAL that there are."""

    names: tuple[str, ...]
    left: int | None
    right: int | None
    scale: float | None
    softcap: float | None
    score: Score | None
    threshold: int  # of dropout, in steps of 2**-16
    deterministic: bool  # whether backward gives the same bits every time
    batch_invariant: bool = False  # whether a sequence's bits are the same whatever else is in the batch

    @property
    def needs_natural_units(self) -> bool:
        added = "bias" in self.names or "alibi" in self.names or self.score is not None or self.softcap is not None
        return added or (self.scale is not None and self.scale <= 0)


def options(
    names: tuple[str, ...], causal: bool, window: Any, scale: Any, softcap: Any, score: Any, dropout: Any,
    deterministic: Any = False, batch_invariant: Any = False,
) -> Options:  # fmt: skip
    """The options of a call, checked."""
    check_flag(NAME, "causal", causal)
    bounds: tuple[Any, ...] = (None, None)
    if window is not None:
        fits = isinstance(window, (tuple, list)) and len(window) == 2
        fits = fits and all(n is None or (is_int(n) and 0 <= n < 2**31) for n in window)
        check_value(NAME, "window", window, fits, "(left, right), each a number of keys of at least 0, or None for all")
        bounds = tuple(window)
    if scale is not None:
        check_value(
            NAME, "scale", scale, is_number(scale) and abs(scale) <= LARGEST, "a finite number, or None for D**-0.5"
        )
        scale = float(scale) if abs(scale) >= SMALLEST else 0.0
    if softcap is not None:
        fits = is_number(softcap) and 0 < softcap <= LARGEST
        check_value(NAME, "softcap", softcap, fits, "a positive number, or None for no cap")
        softcap = float(softcap)
    check_value(NAME, "score", score, score is None or isinstance(score, Score), "a Score, or None", TypeError)
    check_value(NAME, "dropout", dropout, is_number(dropout) and 0 <= dropout <= 1, "a probability, 0 … 1")
    check_flag(NAME, "deterministic", deterministic)
    check_flag(NAME, "batch_invariant", batch_invariant)
    threshold = threshold_of(dropout)
    if batch_invariant and threshold:
        raise ValueError(
            f"{NAME}: argument 'dropout' is {dropout} beside batch_invariant=True; expected 0: what dropout hides of a "
            "sequence depends on its place in the batch"
        )
    deterministic = deterministic or batch_invariant or torch.are_deterministic_algorithms_enabled()
    right = 0 if causal else bounds[1]
    return Options(names, bounds[0], right, scale, softcap, score, threshold, deterministic, batch_invariant)


class AttentionCall(Call):
    """``(q, k, v, *tensors, options)``, the tensors in the order of ``options.names``."""

    operator = NAME
    numbers: tuple[torch.dtype, ...] = FLOATS_AND_64  # what q, k and v may be of

    def __init__(self, *arguments: Any):
        *tensors, options = arguments
        self.q, self.k, self.v = self.x, *_ = tensors[:3]
        self.options: Options = options
        self.given = dict(zip(options.names, tensors[3:], strict=True))
        self.packed = "cu_seqlens_q" in self.given or "cu_seqlens_k" in self.given
        self.check()
        q, k, v = self.q, self.k, self.v
        if self.packed:  # [total, heads, D] as one batch
            q, k, v = map(heads_first, (q, k, v))
        self.heads, self.query_tokens, self.d = q.shape[1:]
        self.group = q.shape[1] // max(k.shape[1], 1)
        self.key_tokens, self.dv = v.shape[2:]
        self.batches = self.given["cu_seqlens_q"].shape[0] - 1 if self.packed else q.shape[0]
        self.views = {"q": q, "k": k, "v": v}

    def check(self) -> None:
        for name, t in (("q", self.q), ("k", self.k), ("v", self.v)):
            check_tensor(self.operator, name, t, self.numbers)
            if name != "q":
                check_same(self.operator, name, t, "q", self.q)
            expected = "[total, heads, D] (cu_seqlens are given)" if self.packed else "[B, heads, S, D]"
            check_shape(self.operator, name, t, t.ndim == (3 if self.packed else 4), expected)
        q, k, v = self.q, self.k, self.v
        head, row = (1, 0) if self.packed else (1, 2)
        fits = k.shape[-1] == q.shape[-1] > 0 and (self.packed or k.shape[0] == q.shape[0])
        check_shape(self.operator, "k", k, fits, f"the head dim (and batch) of 'q', {tuple(q.shape)}")
        fits = k.shape[head] > 0 and q.shape[head] % k.shape[head] == 0
        check_shape(self.operator, "k", k, fits, f"a number of heads that divides the {q.shape[head]} of 'q'")
        fits = (
            v.shape[head] == k.shape[head]
            and v.shape[row] == k.shape[row]
            and (self.packed or v.shape[0] == k.shape[0])
        )
        check_shape(
            self.operator, "v", v, fits and v.shape[-1] > 0, f"that of 'k', {tuple(k.shape)}, the head dim apart"
        )
        for name, t in self.given.items():
            if name != "seed":
                check_tensor(self.operator, name, t, self.dtypes[name])
                check_device(self.operator, name, t, "q", q)
        self.check_packed()
        for name in ("mask", "bias"):
            if name in self.given:
                t, shape = self.given[name], (*q.shape[:3], k.shape[2])
                fits = t.ndim <= 4 and all(
                    a in (1, b) for a, b in zip(reversed(t.shape), reversed(shape), strict=False)
                )
                check_shape(self.operator, name, t, fits, f"one that broadcasts to [B, H, Sq, Sk] = {shape}")
        if "sinks" in self.given:
            t = self.given["sinks"]
            check_shape(
                self.operator,
                "sinks",
                t,
                t.shape == (q.shape[head],),
                f"({q.shape[head]},), a logit for each head of 'q'",
            )
        if "alibi" in self.given:
            t, heads = self.given["alibi"], q.shape[head]
            batches = self.given["cu_seqlens_q"].shape[0] - 1 if self.packed else q.shape[0]
            fits = t.shape in ((heads,), (batches, heads))
            check_shape(
                self.operator, "alibi", t, fits, f"({heads},) or ({batches}, {heads}), a slope for each head of 'q'"
            )

    @property
    def dtypes(self) -> dict[str, tuple[torch.dtype, ...]]:
        floats = tuple(dict.fromkeys((self.q.dtype, torch.float32)))
        return {"mask": (torch.bool,), "bias": floats, "sinks": floats, "alibi": floats,
                "cu_seqlens_q": (torch.int32,), "cu_seqlens_k": (torch.int32,)}  # fmt: skip

    def check_packed(self) -> None:
        if not self.packed:
            return
        for name, other in (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q")):
            if other not in self.given:
                raise ValueError(
                    f"{self.operator}: argument '{other}' is None beside '{name}'; expected both, or neither"
                )
        for name, other in (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q")):
            t = self.given[name]
            fits = t.ndim == 1 and t.shape[0] >= 2 and t.shape == self.given[other].shape and t.stride(0) == 1
            check_shape(self.operator, name, t, fits, "(N + 1,) for N sequences, both alike, contiguous")
        for name in ("mask", "bias"):
            if name in self.given:
                raise ValueError(
                    f"{self.operator}: argument '{name}' of shape {tuple(self.given[name].shape)} beside cu_seqlens; expected "
                    "None for packed sequences: causal, window, alibi or score say what a query sees"
                )

    @property
    def empty(self) -> bool:
        return 0 in (self.batches, self.heads, self.query_tokens, self.key_tokens)

    @property
    def no_kernel(self) -> str:
        """Why no kernel computes this at all."""
        if not 16 <= self.d <= 256 or not 16 <= self.dv <= 256:
            return f"head dims {self.d} and {self.dv}; the kernels take 16 to 256"
        return ""

    @property
    def usual_queries(self) -> int:
        """Of a head of a batch, or of packed sequences' mean: with ``batch_invariant`` a number that is no other sequence's."""
        if self.packed and self.options.batch_invariant:
            return USUAL
        return self.query_tokens // (self.batches if self.packed else 1)

    @property
    def format(self) -> str:
        """Of codes, how they become numbers."""
        return ""

    @property
    def one_operator(self) -> bool:
        """Whether ``torch.ops.weft.attention`` has all that the call asks for."""
        return self.options.score is None and not self.options.threshold

    @property
    def sdpa(self) -> bool:
        """Whether PyTorch's attention means the same."""
        o = self.options
        plain = not o.names and o.left is None and o.softcap is None and not o.batch_invariant
        return plain and (o.right is None or (o.right == 0 and self.query_tokens == self.key_tokens))

    @property
    def slopes_need_gradients(self) -> bool:
        return torch.is_grad_enabled() and "alibi" in self.given and self.given["alibi"].requires_grad


def spans_too_much(*strides: int) -> bool:
    """Whether offsets in a tile, by the strides of its rows and columns, may need more than 32 bits."""
    return any(256 * stride >= 2**31 for stride in strides)


def unsupported(c: AttentionCall) -> str:
    if c.no_kernel:
        return c.no_kernel
    for name, t in (*c.views.items(), *((n, c.given[n]) for n in ("mask", "bias") if n in c.given)):
        if spans_too_much(*t.stride()[-2:]):
            return f"{name} has strides {t.stride()}: a tile spans 2**31 elements"
    return ""


# ---- tiles -----------------------------------------------------------------------------------------------------------


def forward_heuristic(sm: int, dtype: torch.dtype, d: int, loads: str) -> Config:
    """``loads``: each score needs one of a mask (``mask``), or of a bias, or random numbers (``more``), which take registers.
    Measured on an H200, where two blocks of 64 queries share a multiprocessor."""
    if INTERPRETING:
        return {"M": 32, "N": 32, "num_warps": 4, "num_stages": 1}
    much = shared_limit(sm) > 2**17
    if dtype == torch.float32:  # operands come as two numbers of tf32 each, which take registers
        if sm >= 90 and much and d <= 128:
            return {"M": 128, "N": 64 if d <= 64 else 32, "num_warps": 8, "num_stages": 2}
        return {"M": 64 if d <= 64 else 32, "N": 32 if d <= 64 else 16, "num_warps": 8, "num_stages": 2}
    if sm >= 90 and much and d <= (64 if loads else 128):
        return {"M": 64, "N": 64, "num_warps": 4, "num_stages": 3}
    if sm >= 90 and much and d <= 128 and loads == "mask":
        return {"M": 128, "N": 128, "num_warps": 8, "num_stages": 2}
    if sm >= 90 and much and d > 128:
        return {"M": 128, "N": 64, "num_warps": 8, "num_stages": 2}
    if d <= 64:
        return {"M": 128, "N": 64, "num_warps": 8 if loads else 4, "num_stages": 3}
    if d <= 128:
        return {"M": 128, "N": 64, "num_warps": 8, "num_stages": 3 if much else 2}
    return {"M": 64, "N": 64 if much else 32, "num_warps": 8, "num_stages": 2}


# rows of its own, rows of the other, warps, stages, for head dims up to 64 and 128
TILES = {
    ("N", False): (64, 32, 4, 3),
    ("N", True): (128, 32, 8, 3),
    ("M", False): (64, 32, 4, 3),
    ("M", True): (64, 64, 4, 2),
}


def gradient_heuristic(own: str, other: str) -> Any:
    """Of a kernel whose programs own tiles of queries ("M") or keys ("N") and walk the other. More than 4 warps want 128 rows:
    of fewer all warps would make the same products on matrix units. Measured on an H200."""

    def config(sm: int, dtype: torch.dtype, d: int, loads: str) -> Config:
        if INTERPRETING:
            mine, theirs, warps, stages = 32, 32, 4, 1
        elif dtype == torch.float32:
            mine, theirs, warps, stages = (32 if d <= 64 else 16), (32 if d <= 128 else 16), 8, 1
        elif sm >= 90 and shared_limit(sm) > 2**17 and d <= 128:
            mine, theirs, warps, stages = TILES[own, d > 64]
        elif d <= 128:
            mine, theirs, warps, stages = 128, (64 if d <= 64 else 32), 8, (1 if loads and d > 64 else 2)
        else:
            mine, theirs, warps, stages = 32, 32, 4, 1
        return {own: mine, other: theirs, "num_warps": warps, "num_stages": stages}

    return config


def candidates(sm: int, dtype: torch.dtype, d: int, loads: str) -> Any:
    for c in grid_of({"M": (32, 64, 128), "N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}):
        in_flight = (c["num_stages"] * 2 * c["N"] + c["M"]) * d * dtype.itemsize
        if in_flight <= shared_limit(sm) and 1024 <= c["M"] * c["N"] // c["num_warps"] <= 2048:
            yield c


configuration = Configurations(__file__, "forward", forward_heuristic, candidates)
keys_configuration = Configurations(__file__, "key_gradients", gradient_heuristic("N", "M"), candidates)
queries_configuration = Configurations(__file__, "query_gradients", gradient_heuristic("M", "N"), candidates)

# ---- launches --------------------------------------------------------------------------------------------------------


def _packed(t: Tensor) -> tuple[int, ...]:
    """Of [total, heads, D]: from batch to batch (none), head to head, token to token, column to column."""
    return (0, t.stride(1), t.stride(0), t.stride(2)) if t.ndim == 3 else t.stride()


def heads_first(t: Tensor) -> Tensor:
    """[1, heads, total, D] of packed [total, heads, D]; others are [B, heads, S, D]."""
    return t.transpose(0, 1)[None] if t.ndim == 3 else t


def result_like(q: Tensor, width: int, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of q's shape but the last dimension, in the order that q lies in: [B, S, H, D] in memory stays so."""
    device, dtype = device or q.device, dtype or q.dtype
    if q.ndim == 4 and q.shape[1] > 1 and q.stride(1) < q.stride(2):
        b, h, s, _ = q.shape
        return torch.empty((b, s, h, width), dtype=dtype, device=device).transpose(1, 2)
    return torch.empty((*q.shape[:-1], width), dtype=dtype, device=device)


class _Launch:
    """What the launches of a call share: its grid's sizes, scalars and constants."""

    def __init__(self, c: Any):
        o, given = c.options, c.given
        self.c = c
        expanded = {n: given[n].expand(*c.q.shape[:3], c.key_tokens) for n in ("mask", "bias") if n in given}
        self.more: tuple[int, ...] = tuple(
            stride for n in ("mask", "bias") for stride in (expanded[n].stride() if n in expanded else (0, 0, 0, 0))
        )
        slopes = given.get("alibi")
        self.more += (0, 0) if slopes is None else (0, slopes.stride(0)) if slopes.ndim == 1 else slopes.stride()
        scale = c.d**-0.5 if o.scale is None else o.scale
        # no key is further away than this; kernels add bounds to positions in 32 bits
        left, right = min(o.left or 0, c.key_tokens), min(o.right or 0, c.query_tokens)
        self.bounds = (left, right, triton.cdiv(c.key_tokens, GROUP), (o.threshold * 2**16 - 1) % 2**32)
        self.factors = (scale, o.softcap or 1.0, scale_of(o.threshold))
        self.flags = {
            "PLAIN": not o.needs_natural_units, "SOFTCAP": o.softcap is not None, "SINKS": "sinks" in given,
            "ALIBI": "alibi" in given, "BIAS": "bias" in given,
            "MASK": 0 if "mask" not in given else 1 if expanded["mask"].stride(2) else 2,  # 2: of keys alone
            "SCORE": o.score.kernel if o.score else None, "SCORE_GRADIENT": o.score.gradient if o.score else None,
            "DROPOUT": o.threshold > 0, "LEFT": o.left is not None, "RIGHT": o.right is not None, "PACKED": c.packed,
            "SEED_IN_MEMORY": "seed" in given, "ACCURATE": c.q.dtype == torch.float32,
        }  # fmt: skip
        self.dims = {"D": c.d, "DV": c.dv, "D_COLS": bucket(c.d), "DV_COLS": bucket(c.dv)}

    def config(self, configurations: Configurations) -> Config:
        more = self.flags["BIAS"] or self.flags["DROPOUT"]
        loads = "more" if more else "mask" if self.flags["MASK"] == 1 else ""
        return configurations(self.c.q.device, self.c.q.dtype, max(bucket(self.c.d), bucket(self.c.dv)), loads)

    def slots(self, tokens: int, size: int) -> int:
        """Tiles of a head; of packed sequences as many as any lengths could need."""
        return tokens // size + self.c.batches + 2 if self.c.packed else triton.cdiv(tokens, size)

    def plan(self, kernel: Any, config: Config, slots: int, heads: int, strides: tuple[int, ...], **more: Any) -> Plan:
        c = self.c
        sizes = (slots, c.heads, c.group, c.batches, c.query_tokens, c.key_tokens)
        grid = (slots * heads * (1 if c.packed else c.batches),)
        constants = {**self.dims, **constants_of(config), **self.flags, **more}
        scalars = (*sizes, *self.bounds, *self.factors, *strides, *self.more)
        made = DescriptorPlan if more.get("TMA") else Plan
        return made(kernel, grid, scalars, constants, config["num_warps"], config["num_stages"])


def by_vectors(*tensors: Tensor, size: int = 16) -> bool:
    """Whether all rows, of elements that lie side by side, begin on ``size`` bytes, and the tensors on 16, which the compiler
    asks for."""
    beside = all(t.stride(-1) == 1 and not any(n * t.element_size() % size for n in t.stride()[:-1]) for t in tensors)
    return beside and pointer_aligned(*tensors)


def fits_descriptors(*tensors: Tensor) -> bool:
    """Whether TMA, where the architecture has it, can fetch tiles of these [..., tokens, D], of 16 or 8 bits an element."""
    if not INTERPRETING and target_sm(tensors[0].device) < 90:
        return False
    return all(t.element_size() <= 2 and t.stride(-2) > 0 for t in tensors) and by_vectors(*tensors)


def forward_launch(c: AttentionCall) -> Plan:
    """Called with q, k, v, o, peak, log_sum, mask, bias, sinks, alibi, cu_q, cu_k, seed tensor, the scales of q, k and v (q for
    what there is not), seed, offset."""
    made = _Launch(c)
    config = made.config(configuration)
    o = result_like(c.q, c.dv, "meta")
    if c.format:
        made.dims |= {
            "D_COLS": bucket(c.d, 32),
            "DV_COLS": bucket(c.dv, 32),
        }  # products of 8 bits have 32 terms at least
    for name, heads in (("q_scale", c.heads), ("k_scale", c.heads // c.group), ("v_scale", c.heads // c.group)):
        made.more += c.given[name].expand(c.batches, heads).stride() if name in c.given else (0, 0)
    strides = tuple(stride for t in (c.q, c.k, c.v, o) for stride in _packed(t))
    slots = made.slots(c.query_tokens, config["M"])
    tma = fits_descriptors(*map(heads_first, (c.k, c.v)))
    return made.plan(kernels.forward, config, slots, c.heads, strides, TMA=tma, FORMAT=c.format)


def hopper_launch(c: AttentionCall) -> hopper_forward.HopperForward:
    return hopper_forward.HopperForward(c, result_like(c.q, c.dv, "meta"))


class GradientCall(AttentionCall):
    """``(q, k, v, o, do, *tensors, options)``: the gradient of ``AttentionCall(q, k, v, *tensors, options)``."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, *rest: Any):
        super().__init__(q, k, v, *rest)
        self.o, self.do = o, do


class Gradients:
    """Calls the kernels of the gradients that are wanted, and the sums that they need. It has plans alone: a cache keeps it,
    and would keep a call's tensors in memory."""

    def __init__(self, c: GradientCall):
        made = _Launch(c)
        self.plain: bool = made.flags["PLAIN"]
        self.deltas, self.keys, self.queries = _deltas(made), _keys(made), _queries(made)
        self.bias = _bias(made) if "bias" in c.given else None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, peak: Tensor, log_sum: Tensor, do: Tensor, dlse: Tensor | None,
        given: dict[str, Tensor], seed: int, offset: int, wanted: frozenset[str],
    ) -> dict[str, Tensor]:  # fmt: skip
        """The gradients of the ``wanted`` arguments by name; peak and log_sum as forward made them."""
        found = {}
        cu = given.get("cu_seqlens_q", q), given.get("cu_seqlens_k", q)
        base, delta = torch.empty_like(peak), torch.empty_like(peak)
        self.deltas(o, do, peak, log_sum, base, delta, cu[0])
        if dlse is not None:
            delta -= dlse
        mask = given["mask"].view(torch.uint8) if "mask" in given else q
        masks = mask, given.get("bias", q), given.get("alibi", q)
        random = given.get("seed", q), seed, offset
        rows = base, log_sum, delta
        if wanted & {"k", "v"}:
            found["k"], found["v"] = torch.empty_like(k), torch.empty_like(v)
            self.keys(q, k, v, do, found["k"], found["v"], *rows, *masks, *cu, *random)
        if "q" in wanted:
            found["q"] = torch.empty_like(q)
            self.queries(q, k, v, do, found["q"], *rows, *masks, *cu, *random)
        if self.bias is not None and "bias" in wanted:
            found["bias"] = torch.empty_like(given["bias"])
            self.bias(q, k, v, do, found["bias"], *rows, *masks, *random)
        if "sinks" in wanted:
            found["sinks"] = gradient_of_sinks(given["sinks"], peak, log_sum, delta, self.plain)
        return found


def _deltas(made: _Launch) -> Plan:
    c, rows = made.c, 64
    slots = made.slots(c.query_tokens, rows)
    scalars = (slots, c.heads, c.batches, c.query_tokens, *_packed(c.o), *_packed(c.do))
    constants = {"DV": c.dv, "DV_COLS": bucket(c.dv), "M": rows, "PLAIN": made.flags["PLAIN"], "PACKED": c.packed}
    return Plan(gradient_kernels.deltas, (slots * c.heads * (1 if c.packed else c.batches),), scalars, constants)


def _keys(made: _Launch) -> Plan:
    c = made.c
    config = made.config(keys_configuration)
    tensors = (c.q, c.k, c.v, c.do, _like(c.k), _like(c.v))
    strides = tuple(stride for t in tensors for stride in _packed(t))
    slots = made.slots(c.key_tokens, config["N"])
    return made.plan(gradient_kernels.key_gradients, config, slots, c.heads // c.group, strides)


def _queries(made: _Launch) -> Plan:
    c = made.c
    config = made.config(queries_configuration)
    strides = tuple(stride for t in (c.q, c.k, c.v, c.do, _like(c.q)) for stride in _packed(t))
    slots = made.slots(c.query_tokens, config["M"])
    # with 64 columns descriptors save no instruction
    tma = max(c.d, c.dv) > 64 and fits_descriptors(*map(heads_first, (c.k, c.v)))
    return made.plan(gradient_kernels.query_gradients, config, slots, c.heads, strides, TMA=tma)


def _bias(made: _Launch) -> Plan:
    c, bias = made.c, made.c.given["bias"]
    config = made.config(queries_configuration)
    batches, heads, rows, columns = bias.shape
    one_row, one_column = rows == 1, columns == 1
    down = 1 if one_row else triton.cdiv(c.query_tokens, config["M"])
    across = 1 if one_column else triton.cdiv(c.key_tokens, config["N"])
    sizes = (c.batches, c.heads, c.group, c.query_tokens, c.key_tokens, *made.bounds, batches, heads)
    strides = tuple(stride for t in (c.q, c.k, c.v, c.do, _like(bias)) for stride in t.stride())
    left_out = ("PLAIN", "SINKS", "BIAS", "PACKED")
    flags = {name: value for name, value in made.flags.items() if name not in left_out}
    constants = {**made.dims, **constants_of(config), **flags, "ONE_ROW": one_row, "ONE_COLUMN": one_column}
    grid = (batches * heads * down * across,)
    scalars = (*sizes, *made.factors, *strides, *made.more)
    return Plan(gradient_kernels.bias_gradient, grid, scalars, constants, config["num_warps"], config["num_stages"])


def _like(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="meta")


# ---- the tables ------------------------------------------------------------------------------------------------------

SLOPES = "ALiBi's slopes need a gradient, for which there is no kernel of ours"
HOPPER = "wgmma fed by TMA; exponentials of one warpgroup run beside products of the other"
TRITON = "tiles of scores stay on chip (online softmax); every mask, bias and stride is read in place"

FORWARD = Dispatch(
    AttentionCall,
    ON_CPU,
    Route(
        "torch",
        lambda c: c.traced and not c.one_operator,
        "traced, with dropout or a score function: PyTorch's operators",
    ),
    Route("torch", lambda c: c.traced and c.sdpa and c.sm < 90, "traced, before Hopper: PyTorch's attention"),
    EMPTY,
    Route(
        "torch",
        lambda c: c.slopes_need_gradients,
        SLOPES,
    ),
    Route("torch", lambda c: c.no_kernel != "", "head dims below 16 or above 256, for which there is no kernel"),
    Route("torch", lambda c: unsupported(c) != "", "strides so long that a tile spans 2**31 elements"),
    Route(
        "triton",
        lambda c: c.traced,
        "traced: one operator for the compiler, whose kernel is chosen when it runs",
        forward_launch,
        unsupported,
    ),
    Route(
        "hopper",
        lambda c: c.usual_queries > 64 or (c.batches * c.heads <= 128 and not c.options.batch_invariant),
        HOPPER,
        hopper_launch,
        hopper_forward.unsupported,
        sm=90,
    ),
    Route("triton", lambda c: True, TRITON, forward_launch, unsupported),
)

ADDED = "five products by wgmma, fed by TMA; all tiles of keys add to dq, in any order"

BACKWARD = Dispatch(
    GradientCall,
    Route("hopper", lambda c: not c.options.deterministic, ADDED, hopper_backward.HopperGradients, hopper_backward.unsupported,
          sm=90),
    Route("triton", lambda c: True, "probabilities are made again, by keys, by queries and for a bias: no atomics",
          Gradients, unsupported),
)  # fmt: skip
