"""Division of 32-bit integers by a number that the launch knows, as a multiplication and a shift."""

import triton
import triton.language as tl


def quotient(divisor: int) -> int:
    """Factor and, from bit 32 on, shift: x // divisor of x < 2**31 is (2 x · factor >> 32) >> shift (``divided``, and in CUDA
    C++ ``Quotient``). The factor is less than 1 too large, so x · factor / 2**(31 + shift) exceeds x / divisor by less than
    1 / 2**shift, at most 1 / divisor."""
    shift = (divisor - 1).bit_length()
    return -(-(2 ** (31 + shift)) // divisor) | shift << 32


@triton.jit
def divided(x, factor, shift):
    """x // divisor, int32, of x < 2**31 and the two numbers of :func:`quotient`: unsigned, since the upper half of the product
    may pass 2**31 before it is shifted."""
    return (tl.umulhi((x * 2).to(tl.uint32), factor.to(tl.uint32)) >> shift).to(tl.int32)
