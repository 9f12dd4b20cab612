"""The curves that activations are made of, as Triton formulas: exp, the logistic function, the normal distribution's Φ.

PRECISE is for fp32 results, which keep every bit; 16-bit results leave half of the instructions for the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(t, PRECISE: tl.constexpr):
    """exp(t). ``tl.exp`` takes ``ex2`` of t · log2(e), whose rounding alone costs |t|/2 ulp; PRECISE adds what it lost."""
    if PRECISE:
        high = t * 1.4426950408889634
        lost = tl.fma(t, 1.4426950216293335, -high) + t * 1.9259629911266174e-8  # log2(e) as a sum of two floats
        power = tl.exp2(high)
        return tl.where(tl.abs(t) < 150.0, power + power * (lost * 0.6931471805599453), power)
    else:
        return tl.exp(t)


@triton.jit
def logistic(x, PRECISE: tl.constexpr):
    return 1.0 / (1.0 + exp(-x, PRECISE))


@triton.jit
def normal_cdf(x, PRECISE: tl.constexpr):
    """Φ(x), the normal distribution's.

    For 16-bit results: the logistic function of an odd polynomial, whose coefficients (in powers of two) are fitted to
    log2(Φ(x) / Φ(-x)) on -6 … 6 by Lawson's iteration; Φ is off by at most 1.6e-4 of itself there, in both tails, which is
    less than half a unit in the last place of float16. Further out it falls exponentially.
    """
    if PRECISE:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    else:
        s = tl.minimum(x * x, 36.0)
        q = 3.394939028e-09 - 2.230787179e-11 * s
        q = 6.702333398e-06 + s * (-2.10922951e-07 + s * q)
        q = -4.43768993e-04 + s * (-1.005590223e-04 + s * q)
        q = 2.3015770884 + s * (0.105716228466 + s * q)
        return 1.0 / (1.0 + tl.exp2(-x * q))


@triton.jit
def gelu_slope(x, phi, PRECISE: tl.constexpr):
    """d/dx of x Φ(x), given Φ(x)."""
    if PRECISE:
        bell = exp(-0.5 * x * x, True)
    else:
        bell = tl.exp2(-0.7213475204444817 * x * x)  # log2(e) / 2
    return phi + 0.3989422804014327 * x * bell  # 1 / sqrt(2 pi)


@triton.jit
def tanh_argument(x):
    """2u, of which the logistic function is (1 + tanh u) / 2, the tanh form Φ' of Φ; u = sqrt(2/pi) (x + 0.044715 x³)."""
    return x * (1.5957691216057308 + 0.07135481282730322 * (x * x))


@triton.jit
def tanh_cdf(x, PRECISE: tl.constexpr):
    """Φ'(x), and Φ' (1 - Φ'), for fp32 results without the cancellation in 1 - Φ'."""
    if PRECISE:
        u = tanh_argument(x)
        a = exp(-tl.abs(u), True)
        r = 1.0 / (1.0 + a)
        return r * tl.where(u > 0, 1.0, a), a * r * r
    else:
        phi = 1.0 / (1.0 + tl.exp(-tanh_argument(x)))
        return phi, phi - phi * phi


@triton.jit
def tanh_gelu_slope(x, phi, rest):
    """d/dx of x Φ'(x), given tanh_cdf(x)."""
    return phi + x * rest * (1.5957691216057308 + 0.21406443848190965 * (x * x))
