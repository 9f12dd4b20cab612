def check(learner, t):
    block = 32
    for n in (1, block, t.integers(6, 12) * block + t.integers(1, block)):
        for _ in range(2):
            x = t.randn(n) + 1
            expected = x.double().sum().float()[None]
            t.close(learner.total(x, block), expected, f"total(x, block={block}), x [{n}]", 1e-5, 1e-4)
    programs = t.count("programs")
    t.any_order(lambda: learner.total(x, block), "total(x)", 1e-5, 1e-4)
    t.require(
        programs == -(-n // block),
        f"{programs} program(s) for {n} elements in blocks of {block}: let each program sum one block, so that all of them work at once",
        f"{n} 个元素、每块 {block} 个，却只有 {programs} 个实例：让每个实例求一块的和，这样它们能同时工作",
        stage="fast",
    )
    t.at_most(t.count("atomics"), programs, "atomic additions", "原子加法次数")


def fast(learner, t):
    n = 1 << 26
    args = [t.randn(n), 4096]
    what = f"total(x, block=4096), x [{n:,}]"
    t.timed(learner.total, args, lambda x, _: x.double().sum().float()[None], what, at_least=0.5, atol=2.0, n=n)
