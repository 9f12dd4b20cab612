"""Results, leaks, bytes copied and blocks, also when the launch fails."""

import numpy as np


def check(learner, t):
    for n in (1, 256, t.integers(257, 3000), 256 * t.integers(2, 9)):
        host = t.rng.standard_normal(n).astype(np.float32)
        factor = float(t.integers(2, 9))
        result, after, left, down, up, launches, blocks, _ = t.probe("run", host.copy(), factor, False)
        what = f"scale(cuda, {n} floats, {factor:g})"
        t.equal(result, host * np.float32(factor), what)
        t.unchanged(after, host, "host")
        t.require(
            left == 0, f"{what}: {left} allocations were not freed", f"{what}：有 {left} 次分配没有释放", stage="safe"
        )
        t.require(
            launches == 1, f"{what}: {launches} launches; 1 is expected", f"{what}：启动了 {launches} 次；应为 1 次"
        )
        t.at_most(
            blocks, -(-n // 256), f"blocks of 256 threads for {n} elements", f"处理 {n} 个元素的线程块数（256 个线程）"
        )
        t.at_most(down + up, 2 * host.nbytes, "bytes copied between host and device", "主机与设备之间拷贝的字节数")
        t.notes.clear()
    _, _, left, _, _, _, _, error = t.probe("run", host, 2.0, True)
    t.require(error, "scale hid the error of a failed launch", "scale 掩盖了启动失败的错误")
    t.require(
        left == 0,
        "a launch failed, and the memory was not freed: put free into `finally`",
        "启动失败时内存没有释放：请把 free 放进 `finally`",
        stage="safe",
    )
