"""A change of the scores that the caller writes: a Triton function beside its plain PyTorch form."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """What ``attention`` applies to each score, after scale, soft cap, ALiBi and bias and before any mask.

    Args:
        kernel: a ``triton.jit`` function ``(s, b, h, i, j) -> s``: a tile of scores (fp32), the batch or the sequence and the
            head of q (scalars), and the positions of query and key in it, int32 tensors that broadcast to s.
        plain: the same in PyTorch, of tensors that broadcast to [B, H, Sq, Sk]; runs on a CPU and under a compiler.
        gradient: a ``triton.jit`` function of the same arguments, with the s that ``kernel`` gets: the derivative of the result
            by s. Without one, a call that needs gradients is refused.
    """

    kernel: Any
    plain: Callable[..., Any]
    gradient: Any = None
