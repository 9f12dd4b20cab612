"""The update of Adam and AdamW, in Triton and in PyTorch.

    m ← m + (1 − β₁)(g − m),   v ← β₂ v + (1 − β₂) g²,   p ← p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

with g ← g + λ p before (Adam) or p ← (1 − lr λ) p before (AdamW); AMSGrad has the largest v so far in place of v.

Sources: Kingma & Ba 2015; Loshchilov & Hutter 2019; Reddi, Kale & Kumar 2018.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from weft.operators.optimizer.rule import Options, Rule

FACTORIALS = tl.constexpr(tuple(1 / math.factorial(n) for n in range(10, 0, -1)))  # inverse


@triton.jit
def one_minus_power(step, log_high, log_low):
    """1 − βᵗ to fp32's rounding, out of log β in two parts: the product with t is not rounded where 1 − βᵗ is small."""
    high = step * log_high
    x = high + (tl.fma(step, log_high, -high) + step * log_low)
    series = 1.0 / 39916800  # 1 / 11!, then Horner's scheme for (eˣ − 1) / x
    for i in tl.static_range(10):
        series = series * x + FACTORIALS[i]
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


def logarithm(beta: float) -> tuple[float, float]:
    """log β as a sum of two fp32 numbers. Of β = 0 a number whose exponential is 0."""
    log = math.log(beta) if beta > 0 else -1e4
    high = float(torch.tensor(log, dtype=torch.float32))
    return high, log - high


def numbers(options: Options, decoupled: bool) -> tuple[float, ...]:
    beta1, beta2 = (float(beta) for beta in options["betas"])
    decay = options["weight_decay"]
    l2, decay = (0.0, decay) if decoupled else (decay, 0.0)
    return 1 - beta1, beta2, 1 - beta2, options["eps"], l2, decay, *logarithm(beta1), *logarithm(beta2)


def kept(options: Options) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))


def is_decoupled(options: Options) -> bool:
    return bool(options.get("decoupled_weight_decay"))


ADAM = Rule(
    update=adam_update,
    states=kept,
    numbers=lambda options: numbers(options, is_decoupled(options)),
    variant=lambda options: bool(options["amsgrad"]),
    positive=lambda options: kept(options)[1:],
    counted=lambda options: True,
)
