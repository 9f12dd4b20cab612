"""What an append to a cache is, checked; its table and its launch."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.operators.attention import append_kernels
from weft.operators.attention.decode_dispatch import CODES
from weft.operators.attention.dispatch import result_like
from weft.operators.checks import check_device, check_places, check_same, check_shape, check_tensor
from weft.operators.configs import bucket
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING, Plan, target_sm
from weft.operators.quantization.formats import format_of
from weft.operators.rotary.dispatch import narrowed

# B batch, T new tokens of a sequence, H heads of q, G heads of k and v, S tokens that a cache has room for, P pages

NAME = "append_to_cache"
OPTIONAL = ("page_table", "q", "cos", "sin", "k_scale", "v_scale")
PAIRS = (("cos", "sin"), ("sin", "cos"), ("k_scale", "v_scale"), ("v_scale", "k_scale"))


class Options(NamedTuple):
    names: tuple[str, ...]  # those of OPTIONAL that there are
    interleaved: bool


class AppendCall(Call):
    """``(k, v, k_cache, v_cache, lengths, *tensors, options)``, the tensors in the order of ``options.names``."""

    operator, caches = NAME, ("k_cache", "v_cache")  # in errors

    def __init__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *rest: Any):
        *tensors, self.options = rest
        self.k, self.v, self.k_cache, self.v_cache, self.lengths, self.x = k, v, k_cache, v_cache, lengths, k
        self.given: dict[str, Tensor] = dict(zip(self.options.names, tensors, strict=True))
        self.paged = "page_table" in self.given
        self.check()
        self.page = k_cache.shape[1] if self.paged else 0
        self.capacity = self.given["page_table"].shape[1] * self.page if self.paged else k_cache.shape[2]
        if self.paged:  # [P, page, G, D] → [P, G, page, D]
            self.k_cache, self.v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        self.check_given()

    def check(self) -> None:
        k, v, k_cache, v_cache = self.k, self.v, self.k_cache, self.v_cache
        check_tensor(self.operator, "k", k, sharded=False)
        check_tensor(self.operator, "v", v, sharded=False)
        check_same(self.operator, "v", v, "k", k)
        check_shape(self.operator, "k", k, k.ndim == 4, "[B, G, T, D]")
        check_shape(
            self.operator,
            "v",
            v,
            v.ndim == 4 and v.shape[:3] == k.shape[:3],
            f"that of 'k', {tuple(k.shape)}, the head dim apart",
        )
        for name, cache, new in zip(self.caches, (k_cache, v_cache), (k, v), strict=True):
            check_tensor(self.operator, name, cache, (k.dtype, *CODES), sharded=False)
            check_device(self.operator, name, cache, "k", k)
            form = "[P, page, G, D] (there is a page_table)" if self.paged else "[B, G, S, D]"
            fits = (
                cache.ndim == 4
                and cache.shape[3] == new.shape[3]
                and cache.shape[2 if self.paged else 1] == new.shape[1]
            )
            fits = fits and (self.paged or cache.shape[0] == new.shape[0])
            check_shape(self.operator, name, cache, fits, f"{form} with the sizes of '{name[0]}', {tuple(new.shape)}")
            check_places(self.operator, name, cache, "it is written in place")
        k_name, v_name = self.caches
        check_same(self.operator, v_name, v_cache, k_name, k_cache)
        check_shape(self.operator, v_name, v_cache, v_cache.shape[:3] == k_cache.shape[:3],
                    f"that of '{k_name}', {tuple(k_cache.shape)}, the head dim apart")  # fmt: skip
        b, table = k.shape[0], self.given.get("page_table")
        for name, t in (("lengths", self.lengths), ("page_table", table)):
            if t is not None:
                check_tensor(self.operator, name, t, (torch.int32,), sharded=False)
                check_device(self.operator, name, t, "k", k)
        lengths = self.lengths
        check_shape(self.operator, "lengths", lengths, lengths.shape == (b,) and lengths.is_contiguous(), f"({b},)")
        if table is not None:
            check_shape(
                self.operator,
                "page_table",
                table,
                table.ndim == 2 and table.shape[0] == b,
                f"({b}, pages of a sequence)",
            )
        for name, other in PAIRS:
            if name in self.given and other not in self.given:
                raise ValueError(
                    f"{self.operator}: argument '{other}' is None beside '{name}'; expected both, or neither"
                )

    def check_given(self) -> None:
        k, given = self.k, self.given
        b, groups, tokens, d = k.shape
        if (q := given.get("q")) is not None:
            check_tensor(self.operator, "q", q, sharded=False)
            check_same(self.operator, "q", q, "k", k)
            fits = q.ndim == 4 and (q.shape[0], q.shape[2], q.shape[3]) == (b, tokens, d)
            check_shape(self.operator, "q", q, fits, f"[B, H, T, D] with B, T and D of 'k', {tuple(k.shape)}")
            if "cos" not in given:
                raise ValueError(
                    f"{self.operator}: argument 'cos' is None beside 'q'; expected tables to rotate it by, or no 'q'"
                )
        for name in ("cos", "sin"):
            if (t := given.get(name)) is not None:
                check_tensor(self.operator, name, t, tuple(dict.fromkeys((k.dtype, torch.float32))), sharded=False)
                check_device(self.operator, name, t, "k", k)
                fits = t.ndim == 2 and t.shape == given["cos"].shape and t.shape[0] >= self.capacity
                fits = fits and (
                    0 < 2 * t.shape[1] <= d
                    or (t.shape[1] <= d and t.shape[1] % 2 == 0 and not self.options.interleaved)
                )
                check_shape(self.operator, name, t, fits,
                            f"[positions, R/2], both alike, with at least {self.capacity} positions and R <= {d}")  # fmt: skip
                given[name] = narrowed(t, d)
        for name in ("k_scale", "v_scale"):
            if (t := given.get(name)) is not None:
                check_tensor(self.operator, name, t, (torch.float32,), sharded=False)
                check_device(self.operator, name, t, "k", k)
                check_shape(
                    self.operator,
                    name,
                    t,
                    t.shape in ((), (groups,)),
                    f"() or ({groups},), one for each head of the cache",
                )
                if self.k_cache.dtype not in CODES:
                    raise ValueError(
                        f"{self.operator}: argument '{name}' beside a cache of {k.dtype}; expected None: it holds no codes"
                    )
        of_cache = zip(self.caches, (self.k_cache, self.v_cache), strict=True)
        for name, t in (("k", k), ("v", self.v), ("q", given.get("q")), *of_cache):
            if t is not None and t.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{self.operator}: argument '{name}' requires a gradient, which a cache does not keep; expected "
                    f"'{name}'.detach(), or a call under torch.no_grad()"
                )

    @property
    def empty(self) -> bool:
        return self.k.numel() == 0 or self.capacity == 0 or self.k_cache.numel() == 0


class Append:
    """The launch of a call. It has a plan alone: a cache keeps it."""

    def __init__(self, c: AppendCall):
        given, (b, groups, tokens, d), dv = c.given, c.k.shape, c.v.shape[3]
        codes = c.k_cache.dtype in CODES
        self.names, self.codes, self.scaled = c.options.names, codes, "k_scale" in given
        q = given.get("q")
        rows = min(bucket(max(groups, q.shape[1] if q is not None else 1)), 8)
        q_blocks, blocks = triton.cdiv(q.shape[1], rows) if q is not None else 0, triton.cdiv(groups, rows)
        sizes = (tokens, q.shape[1] if q is not None else 0, groups, c.capacity, c.k_cache.shape[0], q_blocks, blocks)
        of_q = (0,) * 8 if q is None else (*q.stride(), *result_like(q, d, "meta").stride())
        table = given["page_table"].stride() if c.paged else (0, 0)
        angles = tuple(n for name in ("cos", "sin") for n in (given[name].stride() if name in given else (0, 0)))
        scales = tuple(given[n].stride(0) if n in given and given[n].ndim else 0 for n in ("k_scale", "v_scale"))
        strides = (
            *c.k.stride(),
            *c.v.stride(),
            *c.k_cache.stride(),
            *c.v_cache.stride(),
            *of_q,
            *table,
            *angles,
            *scales,
        )
        constants = {
            "D": d, "DV": dv, "D_COLS": bucket(d), "DV_COLS": bucket(dv), "ROWS": rows,
            "R": 2 * given["cos"].shape[1] if "cos" in given else 0, "INTERLEAVED": c.options.interleaved, "PAGE": c.page,
            "FORMAT": format_of(c.k_cache.dtype) if codes else "",
            "HARDWARE": codes and not INTERPRETING and target_sm(c.k.device) >= 89,
        }  # fmt: skip
        self.plan = Plan(append_kernels.append, (b * tokens, q_blocks + 2 * blocks), (*sizes, *strides), constants, 4)

    def __call__(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *tensors: Tensor
    ) -> Tensor | None:
        given = dict(zip(self.names, tensors, strict=True))
        q = given.get("q")
        out = None if q is None else result_like(q, q.shape[3])
        bits = (t.view(torch.uint8) if self.codes else t for t in (k_cache, v_cache))
        one = torch.ones((), dtype=torch.float32, device=k.device) if self.codes and not self.scaled else k
        rest = (given.get(n, one if "scale" in n else k) for n in ("page_table", "cos", "sin", "k_scale", "v_scale"))
        self.plan(k, v, *bits, k if q is None else q, k if out is None else out, lengths, *rest)
        torch.autograd.graph.increment_version((k_cache, v_cache))
        return out


APPEND = Dispatch(
    AppendCall,
    ON_CPU,
    TRACED,
    EMPTY,
    Route(
        "triton",
        lambda c: True,
        "tokens are rotated, quantised and written in one launch, whatever the strides",
        Append,
    ),
)
