# rejected at: right
# One block size.
def blocks(n, block):
    return (n + 255) // 256


def in_last_block(n, block):
    return n - (blocks(n, block) - 1) * block if n else 0
