"""The array and the number of launches; leaks; pages moved and faults."""

import numpy as np

PAGE = 16384


def cooled(x, tolerance):
    launches = 0
    while True:
        old = x
        x = old - ((old - np.roll(old, 1)) * np.float32(0.25) + old * np.float32(0.125))
        launches += 1
        if np.abs(x - old).max() < tolerance:
            return x, launches


def check(learner, t):
    for n, tolerance in ((t.integers(3, 6) * PAGE + t.integers(1, 99), 0.1), (t.integers(10, 1000), 0.01)):
        t.notes.clear()
        host = t.rng.standard_normal(n).astype(np.float32)
        expected, steps = cooled(host, tolerance)
        result, said, after, left, launches, moved, faults = t.probe("run", host.copy(), tolerance)
        what = f"cool(cuda, {n} floats, {tolerance})"
        t.equal(result, expected, f"{what}[0]")
        t.equal(said, steps, f"{what}[1]")
        t.unchanged(after, host, "host")
        t.require(
            launches == steps,
            f"{what}: {launches} launches, not {steps}",
            f"{what}：启动 {launches} 次，应为 {steps} 次",
        )
        t.require(
            left == 0, f"{what}: {left} allocations were not freed", f"{what}：有 {left} 次分配没有释放", stage="safe"
        )
        pages = -(-n // PAGE)
        t.at_most(moved, 2 * pages + 2 * steps, f"pages moved in {steps} steps", f"{steps} 步里移动的页数")
        t.at_most(faults, 2 * steps, f"page faults in {steps} steps", f"{steps} 步里的缺页次数")
