"""The update of SGD, in Triton: b ← μ b + (1 − τ) g,  p ← p − lr b,  with g ← g + λ p before.

The first step has b = g whatever τ is, as in PyTorch. Nesterov's variant goes along g + μ b instead of b.

Source: Sutskever et al. 2013 for Nesterov's momentum in this form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.optimizer.rule import Options, Rule

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


def variant(options: Options) -> int:
    """Nesterov's momentum is never dampened."""
    if not options["momentum"]:
        found = PLAIN
    elif options["nesterov"]:
        found = NESTEROV
    else:
        found = DAMPENED if counted(options) else MOMENTUM
    return int(found.value)


def counted(options: Options) -> bool:
    """Only a dampened buffer has to know its first step (``begun``: that is over)."""
    return bool(options["momentum"] and options["dampening"] and not options.get("begun"))


SGD = Rule(
    update=sgd_update,
    states=lambda options: ("momentum_buffer",) if options["momentum"] else (),
    numbers=lambda options: (options["weight_decay"], options["momentum"], 1 - options["dampening"]),
    variant=variant,
    counted=counted,
)
