"""The launch of ``hopper_forward.cu``: attention's forward by wgmma, fed by TMA (sm_90 and no other)."""

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, flags
from weft.operators.hopper.gemm import SIXTEEN_BITS, flags_of
from weft.operators.hopper.tensor_maps import Heads, PackedHeads, map_why_not
from weft.operators.launch import multiprocessors

SOURCE = Path(__file__).parent / "hopper_forward.cu"
SHARED = 232448  # bytes of a block's shared memory
L2_SHARE = 2**25  # bytes of keys and values that blocks which run at the same time should share in L2
LOG2E = 1 / math.log(2.0)
WIDTHS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))  # columns of q and v that there are kernels for


class Sizes(ctypes.Structure):
    """``Sizes`` of hopper_forward.cu."""

    ints = (
        "queries",
        "keys",
        "heads",
        "group",
        "rows",
        "section",
        "all",
        "left",
        "right",
        "sinks",
        "columns",
        "sequences",
    )
    _fields_ = (
        *((name, ctypes.c_int) for name in ints),
        *((name, ctypes.c_longlong) for name in ("o_batch", "o_head", "o_row", "mask_batch", "mask_head", "mask_key")),
        *((name, ctypes.c_float) for name in ("unit", "cap", "in_cap")),
    )


def widths(d: int, dv: int) -> tuple[int, int] | None:
    """Columns of the kernel that takes head dims d and dv: what is lacking comes as zeros. None where there is no kernel."""
    fitting = [w for w in WIDTHS if d <= w[0] and dv <= w[1]]
    return min(fitting, default=None)


def shared_bytes(config: Config, d: int, dv: int) -> int:
    """Slots of queries, keys and values, and what says that they are full or empty."""
    rows = 64 * config["GROUPS"]
    return 2 * (config["Q_STAGES"] * rows * d + config["STAGES"] * config["KEYS"] * (d + dv)) + 256


def heuristic(sm: int, dtype: torch.dtype, d: int, dv: int, masked: bool, queries: int) -> Config:
    """``masked``: a causal mask or a window, at whose edge long tiles are computed in vain. ``queries``: the power of two
    that is not less. Measured on an H200."""
    if d <= 64:
        tile = {"GROUPS": 2 if masked and queries <= 1024 else 3, "KEYS": 128, "STAGES": 3, "Q_STAGES": 2}
    elif d <= 128:
        long = queries > 8192
        tile = {"GROUPS": 2, "KEYS": 176 if long else 128, "STAGES": 2, "Q_STAGES": 1 if long else 2}
    else:
        tile = {"GROUPS": 2, "KEYS": 128 if dv <= 128 else 96 if dv <= 192 else 80, "STAGES": 2, "Q_STAGES": 1}
    return {**tile, "TURNS": int(dv <= 128)}


def candidates(sm: int, dtype: torch.dtype, d: int, dv: int, masked: bool, queries: int) -> Any:
    slots = {"STAGES": (2, 3), "Q_STAGES": (1, 2), "TURNS": (0, 1)}
    for c in grid_of({"GROUPS": (2, 3), "KEYS": (80, 96, 112, 128, 160, 176), **slots}):
        # numbers that a thread holds: scores, probabilities, sums
        held = c["KEYS"] * 3 // 4 + dv // 2
        if held <= (208 if c["GROUPS"] == 2 else 136) and shared_bytes(c, d, dv) <= SHARED:
            yield c


configuration = Configurations(__file__, "hopper_forward", heuristic, candidates)


def unsupported_options(c: Any) -> str:
    """Why no kernel of Hopper's takes them ("" where forward and backward do)."""
    o = c.options
    taken = [name for name in ("bias", "alibi") if name in c.given] + ["score"] * (o.score is not None)
    if taken or o.threshold:
        words = ", ".join(taken + ["dropout"] * (o.threshold > 0))
        return f"{words}; it takes causal, window, scale, softcap, masks of keys, sinks and cu_seqlens"
    if "mask" in c.given and c.query_tokens > 1 and strides_of_mask(c)[2]:
        return f"a mask of shape {tuple(c.given['mask'].shape)}; it takes masks of keys, [B, 1, 1, Sk] or [B, H, 1, Sk]"
    if o.softcap is not None and not 2**-20 <= o.softcap <= 2**20:
        return f"a softcap of {o.softcap}; it takes 2**-20 to 2**20"
    if o.softcap is None and o.scale is not None and o.scale <= 0:
        return f"a scale of {o.scale}, which is not positive"
    return ""


def unsupported(c: Any) -> str:
    """Why the kernel does not take an AttentionCall ("" when it does)."""
    if c.empty:
        return (
            f"{c.query_tokens} queries and {c.key_tokens} keys of {c.batches} x {c.heads} heads; TMA wants some of each"
        )
    if c.sm != 90:
        return f"needs sm_90, this is sm_{c.sm}"
    if c.q.dtype not in SIXTEEN_BITS:
        return f"{c.q.dtype}; it takes float16 and bfloat16"
    if reason := unsupported_options(c):
        return reason
    if widths(c.d, c.dv) is None or c.d % 8 or c.dv % 8:
        return f"head dims {c.d} and {c.dv}; it takes multiples of 8 up to 256"
    if c.heads * c.query_tokens * (1 if c.packed else c.batches) >= 2**31:
        return "2**31 rows or more"
    reasons = (map_why_not(name, t, t.element_size(), False) for name, t in c.views.items())
    return next((reason for reason in reasons if reason), "")


def strides_of_mask(c: Any) -> tuple[int, ...]:
    """In [B, H, Sq, Sk]; zeros where there is none."""
    return c.given["mask"].expand(*c.q.shape[:3], c.key_tokens).stride() if "mask" in c.given else (0, 0, 0, 0)


class HopperForward:
    """Called as the Triton kernel's plan is: with q, k, v, o, peak, log_sum, and of what may be given the mask, the sinks and
    the bounds of packed sequences."""

    def __init__(self, c: Any, o: Tensor):
        left, right = c.options.left, c.options.right
        # then the others' tokens do not say whether a bound hides anything
        whole = c.packed and c.options.batch_invariant
        left_bound = left is not None and (whole or left < c.key_tokens - 1)
        right_bound = right is not None and (whole or right < c.query_tokens - 1)
        found = widths(c.d, c.dv)
        assert found is not None  # ``unsupported`` looked
        d, dv = found
        shape = left_bound or right_bound, bucket(c.usual_queries)
        if c.options.softcap is not None:  # larger tiles' scores would spill
            shape = True, 1024
        config = configuration(c.q.device, c.q.dtype, d, dv, *shape)
        rows = 64 * config["GROUPS"]
        # of packed sequences as many as any lengths could need
        tiles = c.query_tokens // rows + c.batches + 2 if c.packed else -(-c.query_tokens // rows)
        every = c.heads * (1 if c.packed else c.batches)
        section = 1
        if right_bound:
            held = c.key_tokens * (c.d + c.dv) * c.q.element_size()
            section = min(every, max(1, L2_SHARE // held) * c.group)
        sinks = c.given.get("sinks")
        kind = 0 if sinks is None else 1 if sinks.dtype == c.q.dtype else 2
        scale = c.d**-0.5 if c.options.scale is None else c.options.scale
        softcap, mask = c.options.softcap, strides_of_mask(c)
        self.sizes = Sizes(
            c.query_tokens, c.key_tokens, c.heads, c.group, tiles, section, every, min(left, c.key_tokens) if left_bound else 0,
            min(right, c.query_tokens) if right_bound else 0, kind, c.dv, c.batches if c.packed else 0,
            *((0, o.stride(1), o.stride(0)) if c.packed else o.stride()[:3]), mask[0], mask[1], mask[3], scale * LOG2E,
            (softcap or 0.0) * LOG2E, 2 * LOG2E * scale / (softcap or 1.0),
        )  # fmt: skip
        of_keys = PackedHeads if c.packed else Heads
        q, k, v = c.views.values()
        self.maps = Heads(q, rows), of_keys(k, config["KEYS"]), of_keys(v, config["KEYS"])
        numbers = (d, dv, *(config[name] for name in ("GROUPS", "KEYS", "STAGES", "Q_STAGES")))
        ends = flags(config["TURNS"], left_bound, right_bound, c.packed, softcap is not None, "mask" in c.given)
        kernel = f"attention_hopper<{CTYPES[c.q.dtype]}, {', '.join(map(str, numbers))}, {ends}>"
        grid = min(tiles * every, multiprocessors(c.q.device))
        threads, shared = 128 * (config["GROUPS"] + 1), shared_bytes(config, d, dv)
        self.launch = CudaPlan(SOURCE, kernel, (grid, 1), threads, shared_bytes=shared)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, peak: Tensor, log_sum: Tensor, mask: Tensor, bias: Tensor,
        sinks: Tensor, alibi: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any,
    ) -> None:  # fmt: skip
        launch, counter = self.launch, o
        if q.is_cuda:
            launch, counter = launch.at(self.scalars, q, k, v), flags_of(q.device, 1)
        launch(o, peak, log_sum, sinks, counter, cu_q, cu_k, mask)

    def scalars(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        of_q, of_k, of_v = self.maps
        return of_q(q), of_k(k), of_v(v), self.sizes
