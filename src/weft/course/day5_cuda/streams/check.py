"""The result in several orders of the streams; device memory; the engines' clock."""

import numpy as np


def check(learner, t):
    for n, piece in ((t.integers(900, 1100), 128), (640, 128), (t.integers(50, 100), 128)):
        for _ in range(4):
            host = t.rng.standard_normal(n).astype(np.float32)
            result, left, most, clock, early, pending = t.probe("run", host, piece, 3.0, t.integers(0, 1 << 30))
            what = f"pipeline(cuda, {n} floats, piece={piece}, 3)"
            t.require(
                not pending,
                f"{what} returned while {pending} copies and launches were still to be done: wait with cuda.synchronize()",
                f"{what} 返回时还有 {pending} 次拷贝和启动没有完成：请用 cuda.synchronize() 等待",
            )
            t.equal(result, host * np.float32(3.0), what)
            t.require(not early, "memory was freed that a stream still used", "释放了流仍在使用的内存", stage="safe")
            t.require(left == 0, f"{left} bytes were not freed", f"有 {left} 字节没有释放", stage="safe")
    n, piece = 16 * 128, 128
    *_, most, clock, _, _ = t.probe("run", np.ones(n, np.float32), piece, 3.0, t.seed)
    t.at_most(
        most, 2 * 4 * piece, "bytes of device memory for pieces of 128 floats", "每块 128 个 float 时的设备内存字节数"
    )
    # a stage takes a unit for each element: 3 n in turn; two pieces at once, 1.5 n, and the ends
    t.at_most(
        clock,
        1.6 * n,
        f"units of time for {n} elements that need one in each of three stages",
        f"{n} 个元素（三个阶段各一个单位）的用时",
    )
