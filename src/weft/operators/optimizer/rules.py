"""The update rules: what a step does to one element, in fp32 registers, and which states and numbers it needs.

Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019; AMSGrad: Reddi, Kale & Kumar 2018):

    m ← m + (1 − β₁)(g − m),   v ← β₂ v + (1 − β₂) g²,   p ← p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

with g ← g + λ p before (Adam) or p ← (1 − lr λ) p before (AdamW); AMSGrad has the largest v so far in place of v.

SGD (Sutskever et al. 2013): b ← μ b + (1 − τ) g,  p ← p − lr b,  with g ← g + λ p before. The first step has b = g whatever τ
is, as in PyTorch. Nesterov's variant goes along g + μ b instead of b.

Lion (Chen et al. 2023): p ← p (1 − lr λ) − lr sign(β₁ m + (1 − β₁) g),  m ← β₂ m + (1 − β₂) g.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

Options = Mapping[str, Any]  # of a parameter group


@dataclass(frozen=True)
class Rule:
    """An update rule: a Triton function, and what it needs, by the options of a parameter group.

    ``update`` is ``(p, g, states, step, lr, numbers, variant) -> p, states`` of fp32 registers: the weight, its gradient
    (negated to maximise), a tuple of states, the number of this step (1 at first; only where it is counted), the learning
    rate, a tuple of numbers, and a compile-time constant.
    """

    update: Any
    states: Callable[[Options], tuple[str, ...]]  # names, as in ``state_dict``; each has the weight's shape
    numbers: Callable[[Options], tuple[float, ...]]  # computed in float64 and rounded to fp32 once
    variant: Callable[[Options], Any] = lambda options: False  # the constant that the update is compiled for
    # states that are never negative (squares), which have unsigned 8-bit codes
    positive: Callable[[Options], tuple[str, ...]] = lambda options: ()
    counted: Callable[[Options], bool] = lambda options: False  # whether the update needs the number of the step


INVERSE_FACTORIALS = tl.constexpr(tuple(1 / math.factorial(n) for n in range(10, 0, -1)))


@triton.jit
def one_minus_power(step, log_high, log_low):
    """1 − βᵗ to fp32's rounding, from log β in two parts: the product with t is not rounded where 1 − βᵗ is small."""
    high = step * log_high
    x = high + (tl.fma(step, log_high, -high) + step * log_low)
    series = 1.0 / 39916800  # 1 / 11!, then Horner's scheme for (eˣ − 1) / x
    for i in tl.static_range(10):
        series = series * x + INVERSE_FACTORIALS[i]
    return tl.where(x > -1.0, -x * series, 1.0 - tl.exp(x))


@triton.jit
def adam_update(p, g, states, step, lr, numbers, AMSGRAD: tl.constexpr):
    fresh1, beta2, fresh2, eps, l2, decay, high1, low1, high2, low2 = numbers
    g += l2 * p
    p -= lr * decay * p
    m, v = states[0], states[1]
    m += fresh1 * (g - m)
    v = beta2 * v + fresh2 * g * g
    second = v
    if AMSGRAD:
        second = tl.maximum(states[2], v, tl.PropagateNan.ALL)
    size = lr / one_minus_power(step, high1, low1)
    p -= size * (m / (tl.sqrt(second) * (1 / tl.sqrt(one_minus_power(step, high2, low2))) + eps))
    if AMSGRAD:
        states = (m, v, second)
    else:
        states = (m, v)
    return p, states


def is_decoupled(options: Options) -> bool:
    """Whether the weight decay is AdamW's."""
    return bool(options.get("decoupled_weight_decay"))


def _logarithm(beta: float) -> tuple[float, float]:
    """log β as a sum of two fp32 numbers. Of β = 0 a number whose exponential is 0."""
    log = math.log(beta) if beta > 0 else -1e4
    high = float(torch.tensor(log, dtype=torch.float32, device="cpu"))
    return high, log - high


def _adam_numbers(options: Options) -> tuple[float, ...]:
    beta1, beta2 = (float(beta) for beta in options["betas"])
    decay = options["weight_decay"]
    l2, decay = (0.0, decay) if is_decoupled(options) else (decay, 0.0)
    return 1 - beta1, beta2, 1 - beta2, options["eps"], l2, decay, *_logarithm(beta1), *_logarithm(beta2)


def _adam_states(options: Options) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))


ADAM = Rule(
    adam_update, _adam_states, _adam_numbers, variant=lambda options: bool(options["amsgrad"]),
    positive=lambda options: _adam_states(options)[1:], counted=lambda options: True,
)  # fmt: skip


PLAIN, MOMENTUM, NESTEROV, DAMPENED = (tl.constexpr(i) for i in range(4))


@triton.jit
def sgd_update(p, g, states, step, lr, numbers, VARIANT: tl.constexpr):
    decay, momentum, fresh = numbers
    g += decay * p
    if VARIANT != PLAIN:
        b = momentum * states[0] + fresh * g
        if VARIANT == DAMPENED:
            b = tl.where(step == 1, g, b)
        if VARIANT == NESTEROV:
            g += momentum * b
        else:
            g = b
        states = (b,)
    return p - lr * g, states


def _sgd_variant(options: Options) -> int:
    """Nesterov's momentum is never dampened."""
    if not options["momentum"]:
        found = PLAIN
    elif options["nesterov"]:
        found = NESTEROV
    else:
        found = DAMPENED if _sgd_counted(options) else MOMENTUM
    return int(found.value)


def _sgd_counted(options: Options) -> bool:
    """Only a dampened buffer depends on the first step (``begun``: that is over)."""
    return bool(options["momentum"] and options["dampening"] and not options.get("begun"))


SGD = Rule(
    update=sgd_update,
    states=lambda options: ("momentum_buffer",) if options["momentum"] else (),
    numbers=lambda options: (options["weight_decay"], options["momentum"], 1 - options["dampening"]),
    variant=_sgd_variant,
    counted=_sgd_counted,
)


@triton.jit
def lion_update(p, g, states, step, lr, numbers, VARIANT: tl.constexpr):
    beta1, fresh1, beta2, fresh2, decay = numbers
    m = states[0]
    direction = beta1 * m + fresh1 * g
    p -= lr * decay * p
    p -= tl.where(direction > 0, lr, tl.where(direction < 0, -lr, 0.0))
    return p, (beta2 * m + fresh2 * g,)


LION = Rule(
    update=lion_update,
    states=lambda options: ("exp_avg",),
    numbers=lambda o: (o["betas"][0], 1 - o["betas"][0], o["betas"][1], 1 - o["betas"][1], o["weight_decay"]),
)
