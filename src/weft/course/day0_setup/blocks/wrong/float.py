# rejected at: right
# Floats have 53 bits: wrong for large n.
import math


def blocks(n, block):
    return math.ceil(n / block)


def in_last_block(n, block):
    return n - (blocks(n, block) - 1) * block if n else 0
