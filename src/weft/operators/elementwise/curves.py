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
    """Φ(x), and exp(-x²/2), which gradients need too.

    For 16-bit results: Φ(-|x|) = exp(-x²/2) · P(t), t = 1 / (1 + 0.38 |x|), with P of degree 5 fitted to a relative error of
    3.5e-5 on 0 … 13.5 (Lawson's iteration on 6000 points). An accurate erf takes about twice the instructions, and loses
    the left tail to cancellation besides.
    """
    bell = exp(-0.5 * x * x, PRECISE)
    if PRECISE:
        phi = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    else:
        t = 1.0 / (1.0 + 0.38 * tl.abs(x))
        p = 0.188876093 - 0.089928175 * t
        p = 0.151225146 + t * (0.157829386 + t * (0.09198002 + t * p))
        tail = bell * p * t
        phi = tl.where(x > 0, 1.0 - tail, tail)
    return phi, bell


@triton.jit
def gelu_slope(x, phi, bell):
    """d/dx of x Φ(x)."""
    return phi + x * 0.3989422804014327 * bell  # 1 / sqrt(2 pi)


@triton.jit
def tanh_cdf(x, PRECISE: tl.constexpr):
    """The tanh form of Φ: Φ' = (1 + tanh u) / 2, which is the logistic function at 2u, u = sqrt(2/pi) (x + 0.044715 x³); and
    Φ' (1 - Φ'), without the cancellation in 1 - Φ'."""
    u = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
    a = exp(-tl.abs(u), PRECISE)
    r = 1.0 / (1.0 + a)
    return r * tl.where(u > 0, 1.0, a), a * r * r


@triton.jit
def tanh_gelu_slope(x, phi, rest):
    """d/dx of x Φ'(x), given tanh_cdf(x)."""
    return phi + x * rest * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
