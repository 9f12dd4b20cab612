def check(learner, t):
    sizes = [0, 1, 2, 31, 32, 33, 1024, 2**60 + 1, 2**60]
    sizes += [int(n) for n in t.rng.integers(1, 10**6, 6)]
    for n in sizes:
        for block in (1, 32, 256, int(t.rng.integers(2, 2000))):
            expected = -(-n // block)
            t.equal(learner.blocks(n, block), expected, f"blocks({n}, {block})")
            last = n - (expected - 1) * block if n else 0
            t.equal(learner.in_last_block(n, block), last, f"in_last_block({n}, {block})")
