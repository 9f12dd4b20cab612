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
from weft.operators.call import Choice, cast_for_products, eager, guarded
from weft.operators.checks import check_flag, check_values
from weft.operators.launch import Plans

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
        wrong = lambda t: (t < 0) | (t > capacity)  # noqa: E731
        check_values(
            operator, "lengths", lengths, wrong, flag="checked", expected=f"0 … {capacity}, what there is room for"
        )
    if table is not None and lengths is not None:
        pages, start = k.shape[0], torch.arange(table.shape[1], device=table.device) * k.shape[1]
        wrong = lambda t: ((t < 0) | (t >= pages)) & (start < lengths[:, None])  # noqa: E731
        check_values(
            operator, "page_table", table, wrong, flag="checked", expected=f"0 … {pages - 1} within the lengths"
        )


def launched(plans: Plans, operator: str, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    tensors, options = parts_of(operator, q, k, v, **named)
    return plans.of(tensors, options)(*tensors)


def called(operator: str, reference: Any, q: Tensor, k: Tensor, v: Tensor, checked: bool, named: dict[str, Any]) -> Any:
    """The public function: the table's kernel, or ``reference(q, k, v, **named)``."""
    q, k, v = cast_for_products(q, k, v)
    tensors, options = parts_of(operator, q, k, v, **named)
    ready = checked is False and all(isinstance(t, Tensor) for t in tensors) and eager(*tensors, autocast=True)
    if ready and (plan := DECODE.of(tensors, options)) is not None:
        return plan(*tensors)
    if choose(operator, q, k, v, checked=checked, **named).implementation == "torch":
        return reference(q, k, v, **named)
    return launched(DECODE, operator, q, k, v, **named)


def decode_plan(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **named: Any) -> DecodePlan:
    """The plan of ``decode_attention(q, k, v, lengths=lengths, **named)``, or with a ``page_table`` of
    ``paged_decode_attention``: of the tensors only shapes, dtypes and the lengths matter, so one layer's stand for all.

    Args:
        named: of the call's arguments: ``page_table``, ``causal``, ``window``.

    Raises:
        TypeError, ValueError: as the call does.
    """
    operator = "decode_attention" if named.get("page_table") is None else "paged_decode_attention"
    tensors, options = parts_of(operator, q, k, v, lengths=lengths, **named)
    plan = plan_of(DecodeCall(*tensors, options))
    plan.update(lengths)
    return plan
