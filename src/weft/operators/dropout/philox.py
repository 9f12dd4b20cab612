"""Philox4x32-10, a counter-based random generator, in Triton and in PyTorch: the bits that decide what dropout drops.

Ten rounds turn a counter of four 32-bit words, under a key of two, into four random words. There is no state: the
same counter and key give the same words, in any order and on any grid. Here the key is the seed, the counter's upper half is
the caller's offset and its lower half numbers groups of eight elements, each of which takes 16 bits: element i has half
``i % 2`` (the lower first) of word ``i % 8 // 2`` of group ``i // 8``.

Source: Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 8  # elements of one Philox call
WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # from the golden ratio and the square root of 3
ROUNDS = 10

# ---- Triton ----------------------------------------------------------------------------------------------------------


@triton.jit
def multiply(word, factor: tl.constexpr):
    """The (upper, lower) words of a 32 × 32-bit product: one IMAD.WIDE."""
    product = word.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox(group, seed, offset):
    """The four random words, uint32, of each group (int64) under a 64-bit seed and offset."""
    c0, c1 = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    c2, c3 = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = multiply(c0, 0xD2511F53)
        high2, low2 = multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def random_bits(part, seed, offset, PER: tl.constexpr):
    """For each of the PER neighbours (4 or 8) of a part, by its number (uint64), a uint32 whose upper half is an element's 16
    random bits; what the lower half holds does not matter. The shape is part's with [2, 2] or [2, 2, 2] behind it.

    PER is how many neighbours a thread loads at once (16 bytes): words are made where they are used, and nothing passes through
    shared memory. Of 4, two threads make the same group and take half of it each.
    """
    if PER == 8:
        a, b, c, d = philox(part, seed, offset)
        words = tl.join(tl.join(a, c), tl.join(b, d))  # in row-major order a, b, c, d
    else:
        a, b, c, d = philox(part // 2, seed, offset)
        later = part % 2 == 1
        words = tl.join(tl.where(later, c, a), tl.where(later, d, b))
    return tl.join(words << 16, words)


@triton.jit
def dropped(x, part, seed, offset, last, PER: tl.constexpr):
    """x, the elements of these parts, with 0 for those whose 16 bits are below a threshold of 1 … 65536; ``last`` is
    ``(threshold << 16) - 1``."""
    bits = tl.reshape(random_bits(part, seed.to(tl.uint64), offset.to(tl.uint64), PER), x.shape)
    return tl.where(bits <= last.to(tl.uint32), 0.0, x)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def words(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: tuple[Tensor | int, Tensor | int]
) -> tuple[Tensor, ...]:
    """Philox of counters and keys: 32-bit values in int64 tensors (products wrap, which leaves their bits right)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high2, low2 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3  # type: ignore[return-value]


def _product(word: Tensor | int, factor: int) -> tuple[Tensor | int, Tensor | int]:
    product = word * factor
    return (product >> 32) & WORD, product & WORD


def halves(groups: int, seed: int | Tensor, offset: int, device: torch.device) -> list[Tensor]:
    """The 16 bits (int64) of the first element of each group, of the second, and so on."""
    group = torch.arange(groups, device=device)
    seed = seed.view(()) if isinstance(seed, Tensor) else seed
    found = words((group & WORD, group >> 32, offset & WORD, (offset >> 32) & WORD), (seed & WORD, (seed >> 32) & WORD))
    return [half for word in found for half in (word & 0xFFFF, word >> 16)]


def at_least(shape: tuple[int, ...], seed: int | Tensor, offset: int, threshold: int, device: torch.device) -> Tensor:
    """Whether each element's 16 bits, by its row-major index in a tensor of this shape, are at least ``threshold``. The seed is
    an int, or an int64 tensor of one element."""
    elements = math.prod(shape)
    kept = [half >= threshold for half in halves(-(-elements // GROUP), seed, offset, device)]
    return torch.stack(kept, -1).view(-1)[:elements].view(shape)
