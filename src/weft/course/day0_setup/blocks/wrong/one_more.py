# rejected at: right
# A multiple of the block gets an empty block.
def blocks(n, block):
    return n // block + 1


def in_last_block(n, block):
    return n - (blocks(n, block) - 1) * block if n else 0
