"""An optimizer of one's own: Signum (Bernstein et al. 2018, arXiv 1802.04434), the sign of the momentum, in one launch for all
parameters.

    optimizer = Signum(model.parameters(), lr=1e-3, max_norm=1.0)
"""

import triton
import triton.language as tl

from weft.optim import OneLaunch, Rule


@triton.jit
def signum_update(p, g, states, step, lr, numbers, VARIANT: tl.constexpr):
    momentum, decay = numbers
    b = momentum * states[0] + (1 - momentum) * g
    p -= lr * decay * p
    return p - tl.where(b > 0, lr, tl.where(b < 0, -lr, 0.0)), (b,)


def signum_plain(params, grads, states, group):
    for p, g, state in zip(params, grads, states, strict=True):
        b = state["momentum_buffer"].lerp_(-g if group["maximize"] else g, 1 - group["momentum"])
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * b.sign())


class Signum(OneLaunch):
    rule = Rule(
        update=signum_update,
        states=lambda options: ("momentum_buffer",),
        numbers=lambda options: (options["momentum"], options["weight_decay"]),
    )
    plain = staticmethod(signum_plain)

    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.0, **options):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, **options)
