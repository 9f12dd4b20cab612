"""The update of Lion, in Triton: p ← p (1 − lr λ) − lr sign(β₁ m + (1 − β₁) g),  m ← β₂ m + (1 − β₂) g.

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms".
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.optimizer.rule import Rule


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
