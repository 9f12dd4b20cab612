"""Newton–Schulz iterations in three forms, which are equal but for rounding. One step, with X of M ≤ N:

*direct*, as PyTorch's Muon does it: A = X·Xᵀ, B = b·A + c·A·A, X ← a·X + B·X, three ordinary products.

*symmetric*: the same, A and B at half the operations.

*gram*: X only meets A once. All that happens to X is a polynomial of A from the left, so steps act on M × M matrices alone
(Zhang, Amsel, Chen and Dao 2026, "Gram Newton-Schulz", https://dao-lab.ai/blog/2026/gram-newton-schulz). With P = a·I + B,
Q ← P·Q and A ← P·A·P; these are polynomials of one matrix, so they commute, their products are symmetric, and each costs half.
At the end X ← Q·X. Q is stored without its multiple of the identity, s·I + Z, which would cost Z bits.

Rounding gives small eigenvalues of A wrong signs, and every step multiplies them by up to a²: in bf16 the gram form diverges.
Hence fp16, which has 3 bits more at the same rate (all values here are below 200; the norm is divided out before), and a new
start from X after every third step. docs/notes/orthogonalization.md has the errors.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from weft.operators.hopper import padded
from weft.operators.orthogonalization.coefficients import Step

FORMS = ("direct", "symmetric", "gram")
RESTART = 3  # steps of the gram form from one X


def flops(form: str, rows: int, columns: int, steps: int) -> int:
    """Operations of a form on one matrix, a multiply and an add for each term of each element that it computes."""
    m, n = min(rows, columns), max(rows, columns)
    if form == "direct":
        return steps * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    half = m * (m + 1)  # twice the distinct elements of a symmetric matrix
    if form == "symmetric":
        return steps * (half * n + half * m + 2 * m * m * n)
    runs = [min(RESTART, steps - first) for first in range(0, steps, RESTART)]
    return sum(half * n + (4 * run - 3) * half * m + 2 * m * m * n for run in runs)


class Products(NamedTuple):
    """The launches of one back end."""

    # (a, b, c, beta, of_a=0, of_b=0) writes beta·A·B + of_a·A + of_b·B, symmetric, into c
    symmetric: Callable[..., None]
    general: Callable[..., None]  # (a, b, c, beta, of_b) writes beta·A·B + of_b·B into c
    normalized: Callable[[Tensor, float, float, torch.dtype], Tensor]  # (x, margin, eps, dtype), as :func:`normalized`
    step: int = 1  # sizes that are no multiple of it are padded with zeros, which stay zeros


def normalized(x: Tensor, margin: float, eps: float, dtype: torch.dtype, traced: bool = True) -> Tensor:
    """x over ``margin`` times its Frobenius norm, which bounds its singular values by 1; taken in fp32 (fp64 for fp64) and cast
    last. A new contiguous tensor [..., M, N]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide).mul(margin).clamp_min(eps)
    if traced:  # a compiler makes one pass of it
        return (x / norm).to(dtype).contiguous()
    return torch.div(x, norm, out=torch.empty(x.shape, dtype=dtype, device=x.device))


def by_pytorch(x: Tensor, steps: tuple[Step, ...], margin: float, eps: float, dtype: torch.dtype) -> Tensor:
    """The direct form in PyTorch's products."""
    with torch.autocast(x.device.type, enabled=False):
        y = normalized(x, margin, eps, dtype)
        if y.ndim > 3:
            y = y.flatten(0, -3)
        if tall := y.shape[-2] > y.shape[-1]:
            y = y.mT
        plus = torch.addmm if y.ndim == 2 else torch.baddbmm
        for a, b, c in steps:
            g = y @ y.mT
            y = plus(y, plus(g, g, g, beta=b, alpha=c), y, beta=a)
        return (y.mT if tall else y).contiguous().view(x.shape)


def gradient(dy: Tensor, x: Tensor, steps: tuple[Step, ...], margin: float, eps: float, dtype: torch.dtype) -> Tensor:
    """x's gradient: the chain rule through the direct form, whose steps are computed again."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide).mul(margin)
    unit = x / norm.clamp_min(eps)
    tall = x.shape[-2] > x.shape[-1]
    y, dy = (t.mT if tall else t for t in (unit.to(dtype), dy.to(dtype)))
    before = []
    for a, b, c in steps:
        g = y @ y.mT
        before.append((y, g))
        y = a * y + (b * g + c * (g @ g)) @ y
    for (a, b, c), (y, g) in zip(reversed(steps), reversed(before), strict=True):
        dp = dy @ y.mT
        dg = b * dp + c * (dp @ g + g @ dp)
        dy = a * dy + (b * g + c * (g @ g)) @ dy + (dg + dg.mT) @ y
    du = (dy.mT if tall else dy).to(wide)
    # of x / norm: what lies along x changes nothing, unless the norm was replaced by eps
    along = torch.where(norm > eps, (du * unit).sum((-2, -1), keepdim=True) * unit * margin**2, 0.0)
    return ((du - along) / norm.clamp_min(eps)).to(x.dtype)


def launched(
    x: Tensor, steps: tuple[Step, ...], margin: float, eps: float, form: str, dtype: torch.dtype, products: Products,
    traced: bool = False,
) -> Tensor:  # fmt: skip
    """The symmetric or the gram form in launches of ours: x [..., M, N] of any strides → contiguous, of ``dtype``."""
    inside = torch.float16 if form == "gram" and dtype == torch.bfloat16 else dtype
    y = (normalized if traced else products.normalized)(x, margin, eps, inside)
    if not y.numel():
        return y.to(dtype)
    m, n = x.shape[-2:]
    y = y.view(x.shape[:-2].numel(), m, n)
    whole = tuple(padded.up_to(size, products.step) for size in (m, n))
    if whole != (m, n):
        y = padded.copied_to(y, *whole)
    if tall := y.shape[-2] > y.shape[-1]:
        y = y.mT  # a view: strides say it
    y = (_symmetric if form == "symmetric" else _gram)(y, steps, dtype, products)
    y = y.mT if tall else y
    return (y if whole == (m, n) else padded.copied_to(y, m, n)).view(x.shape)


def _symmetric(x: Tensor, steps: tuple[Step, ...], dtype: torch.dtype, products: Products) -> Tensor:
    """x [B, M, N] is overwritten."""
    g, p = (x.new_empty(len(x), x.shape[1], x.shape[1]) for _ in range(2))
    spare = torch.empty_like(x)
    for a, b, c in steps:
        products.symmetric(x, x.mT, g, 1.0)
        products.symmetric(g, g, p, c, of_a=b)
        products.general(p, x, spare, 1.0, of_b=a)
        x, spare = spare, x
    return x


def _gram(x: Tensor, steps: tuple[Step, ...], dtype: torch.dtype, products: Products) -> Tensor:
    g, p, z, h, spare = (x.new_empty(len(x), x.shape[1], x.shape[1]) for _ in range(5))
    for first in range(0, len(steps), RESTART):
        run = steps[first : first + RESTART]
        products.symmetric(x, x.mT, g, 1.0)
        s = 1.0
        for i, (a, b, c) in enumerate(run):
            products.symmetric(g, g, p, c, of_a=b)
            if i == 0:
                s, z, p = a, p, z  # Q = P
            else:
                products.symmetric(p, z, spare, 1.0, of_a=s, of_b=a)  # (a·I + P)·(s·I + Z) = a·s·I + (P·Z + s·P + a·Z)
                s, z, spare = a * s, spare, z
            if i < len(run) - 1:
                b_now = z if i == 0 else p
                products.symmetric(b_now, g, h, 1.0, of_b=a)
                products.symmetric(b_now, h, g, 1.0, of_b=a)
        last = first + len(run) == len(steps)
        y = torch.empty_like(x, dtype=dtype if last else x.dtype)
        products.general(z, x, y, 1.0, of_b=s)
        x = y
    return x
