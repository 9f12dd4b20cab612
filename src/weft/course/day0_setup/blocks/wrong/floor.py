# rejected at: right
# The remainder is never computed.
def blocks(n, block):
    return n // block


def in_last_block(n, block):
    return n - (blocks(n, block) - 1) * block if n else 0
