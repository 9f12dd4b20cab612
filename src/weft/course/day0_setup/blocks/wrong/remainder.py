# rejected at: right
# The remainder of a multiple is 0, but its last block is full.
def blocks(n, block):
    return (n + block - 1) // block


def in_last_block(n, block):
    return n % block
