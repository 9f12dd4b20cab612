"""What the two decoding functions share: a call as the table takes it, its checks, the launch."""

from typing import Any

import torch
from torch import Tensor

from weft.operators.attention.decode_dispatch import (
    DECODE,
    OPTIONAL,
    DecodeCall,
    DecodePlan,
    Options,
    checked_options,
    plan_of,
)
from weft.operators.attention.decode_reference import decode, paged_decode
from weft.operators.attention.dispatch import result_like
from weft.operators.autograd import reference_gradients
from weft.operators.call import Choice, cast_for_products, eager, guarded, traced
from weft.operators.checks import check_flag, check_values

Parts = tuple[tuple[Tensor, ...], Options]
TRITON = DECODE.kernel("triton")


def parts_of(
    operator: str, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, page_table: Tensor | None = None,
    causal: bool = True, window: Any = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, alibi: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    return_lse: bool = False, batch_invariant: bool = False, plan: DecodePlan | None = None,
) -> Parts:  # fmt: skip
    """Tensors and options of a call."""
    first = plan.first if isinstance(plan, DecodePlan) else None
    every = zip(OPTIONAL, (lengths, page_table, sinks, alibi, k_scale, v_scale, first), strict=True)
    given = {name: t for name, t in every if t is not None}
    if isinstance(sinks, Tensor):
        given["sinks"] = sinks.contiguous()  # a number for each head, which kernels read one behind the other
    options = checked_options(operator, tuple(given), causal, window, scale, softcap, batch_invariant, return_lse, plan)
    return (q, k, v, *given.values()), options


@guarded
def choose(operator: str, q: Tensor, k: Tensor, v: Tensor, *, checked: bool = False, **named: Any) -> Choice:
    tensors, options = parts_of(operator, q, k, v, **named)
    chosen = DECODE.choose(*tensors, options)
    check_flag(operator, "checked", checked)
    if checked:
        check_contents(operator, k, dict(zip(options.names, tensors[3:], strict=True)))
    return chosen


def check_contents(operator: str, k: Tensor, given: dict[str, Tensor]) -> None:
    """Raises ValueError for lengths beyond the cache, and pages that are none within a length; waits for the device."""
    table, lengths = given.get("page_table"), given.get("lengths")
    capacity = k.shape[2] if table is None else table.shape[1] * k.shape[1]
    if lengths is not None:
        check_values(
            operator, "lengths", lengths, lambda t: (t < 0) | (t > capacity),
            flag="checked", expected=f"0 … {capacity}, what there is room for",
        )  # fmt: skip
    if table is not None and lengths is not None:
        pages, start = k.shape[0], torch.arange(table.shape[1], device=table.device) * k.shape[1]
        check_values(
            operator, "page_table", table, lambda t: ((t < 0) | (t >= pages)) & (start < lengths[:, None]),
            flag="checked", expected=f"0 … {pages - 1} within the lengths",
        )  # fmt: skip


@torch.library.custom_op("weft::decode_attention", mutates_args=())
def decode_op(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, page_table: Tensor | None, sinks: Tensor | None,
    alibi: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, plan: Tensor | None, operator: str, left: int | None,
    right: int | None, scale: float | None, softcap: float | None, invariant: bool, lse: bool, slots: int, planned: list[int],
    fp8: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What a compiler sees of both functions: output and log-sum-exp (empty without ``lse``). Caches of fp8 come as bytes."""
    k, v = _as_codes(k, v, fp8)
    every = zip(OPTIONAL, (lengths, page_table, sinks, alibi, k_scale, v_scale, plan), strict=True)
    given = {name: t for name, t in every if t is not None}
    options = Options(operator, tuple(given), left, right, scale, softcap, invariant, lse, slots, tuple(planned))
    ready = DECODE.of((q, k, v, *given.values()), options)
    if ready is None:
        found = _in_torch(q, k, v, given, options)
        out, rows = found if lse else (found, None)
        result = result_like(q, v.shape[-1]).copy_(out)
    else:
        found = ready(q, k, v, *given.values())
        result, rows = found if lse else (found, None)
    return result, q.new_empty(0, dtype=torch.float32) if rows is None else rows


def _as_codes(k: Tensor, v: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    return (k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)) if fp8 else (k, v)


def _in_torch(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Tensor], o: Options) -> Any:
    named = {name: t for name, t in given.items() if name != "plan"}
    function: Any = paged_decode if "page_table" in given else decode
    call = {"causal": False, "window": (o.left, o.right), "scale": o.scale, "softcap": o.softcap, "return_lse": o.lse}
    return function(q, k, v, **named, **call)


@decode_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3] if rest[-4] else (0,)
    return result_like(q, v.shape[-1]), q.new_empty(rows, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.rest = inputs[10:]


def _backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    """By PyTorch's operators."""
    operator, left, right, scale, softcap, invariant, lse, slots, planned, fp8 = ctx.rest
    saved = ctx.saved_tensors
    options = Options(operator, (), left, right, scale, softcap, invariant, lse, slots, tuple(planned))

    def again(*tensors: Tensor | None) -> Any:
        q, k, v, *given = tensors
        assert q is not None and k is not None and v is not None  # arguments of every call
        return _in_torch(
            q, *_as_codes(k, v, fp8), {n: t for n, t in zip(OPTIONAL, given, strict=True) if t is not None}, options
        )

    with torch.enable_grad():
        found = reference_gradients(again, saved, ctx.needs_input_grad[:10], (do, dlse) if lse else (do,))
    return (*found, *(None,) * 10)


decode_op.register_autograd(_backward, setup_context=_save)


def by_operator(tensors: tuple[Tensor, ...], o: Options) -> Any:
    (q, k, v), given = tensors[:3], dict(zip(o.names, tensors[3:], strict=True))
    fp8 = k.dtype == torch.float8_e4m3fn
    cache = (k.view(torch.uint8), v.view(torch.uint8)) if fp8 else (k, v)
    optional = (given.get(name) for name in OPTIONAL)
    numbers = (o.left, o.right, o.scale, o.softcap, o.invariant, o.lse, o.slots, list(o.planned), fp8)
    out, lse = decode_op(q, *cache, *optional, o.operator, *numbers)
    return (out, lse) if o.lse else out


def called(operator: str, reference: Any, q: Tensor, k: Tensor, v: Tensor, checked: bool, named: dict[str, Any]) -> Any:
    """The public function: the table's kernel, or ``reference(q, k, v, **named)``."""
    q, k, v = cast_for_products(q, k, v)
    tensors, options = parts_of(operator, q, k, v, **named)
    ready = checked is False and all(isinstance(t, Tensor) for t in tensors) and eager(*tensors, autocast=True)
    if ready and (plan := DECODE.of(tensors, options)) is not None:
        return plan(*tensors)
    if choose(operator, q, k, v, checked=checked, **named).implementation == "torch":
        return reference(q, k, v, **named)
    return by_operator(tensors, options) if traced(*tensors) else DECODE.of(tensors, options)(*tensors)


def decode_plan(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **named: Any) -> DecodePlan:
    """The plan of ``decode_attention(q, k, v, lengths=lengths, **named)``, or with a ``page_table`` of
    ``paged_decode_attention``: of the tensors only shapes, dtypes and the lengths matter, so one layer's stand for all.

    Args:
        named: of the call's arguments: ``page_table``, ``causal``, ``window``.

    Raises:
        TypeError, ValueError: as the call does.
    """
    operator = "decode_attention" if named.get("page_table") is None else "paged_decode_attention"
    q, k, v = cast_for_products(q, k, v)
    tensors, options = parts_of(operator, q, k, v, lengths=lengths, **named)
    plan = plan_of(DecodeCall(*tensors, options))
    plan.update(lengths)
    return plan
