"""What an optimizer is to the engine: a rule in registers, the states it keeps and the numbers it wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Options = Mapping[str, Any]  # of a parameter group


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Args:
        update: a Triton function ``(p, g, states, step, lr, numbers, variant) -> p, states`` of fp32 registers: the weight, its
            gradient (its sign turned to maximise), a tuple of states, the number of this step (1 at first; only where it is
            counted), the learning rate, a tuple of numbers, and a compile-time constant.
        states: ``options -> names`` of the states, as they are called in ``state_dict``; each has the weight's shape.
        numbers: ``options -> numbers`` that the update gets, computed in float64 and rounded to fp32 once.
        variant: ``options -> constant`` that the update is compiled for.
        positive: ``options -> names`` of the states that are never negative: squares, whose codes of 8 bits are other ones.
        counted: ``options -> bool``: whether the update wants the number of the step.
    """

    update: Any
    states: Callable[[Options], tuple[str, ...]]
    numbers: Callable[[Options], tuple[float, ...]]
    variant: Callable[[Options], Any] = lambda options: False
    positive: Callable[[Options], tuple[str, ...]] = lambda options: ()
    counted: Callable[[Options], bool] = lambda options: False
