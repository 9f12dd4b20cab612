"""
[en
A product of two n × n matrices in fp32 lies in host memory, and the result is wanted there. On the CPU it takes its FLOPs (2·n³) at the
CPU's rate. On the GPU it takes the way there (two matrices over PCIe), a launch, the product, and the way back (one matrix), one after
another.

`machine` has "cpu_flops", "gpu_flops" (FLOP/s), "pcie" (bytes/s), "launch_s" (s).
en]
[zh
两个 n × n 的 fp32 矩阵在主机内存中，结果也要放回那里。在 CPU 上，所需时间是 FLOP 数（2·n³）除以 CPU 的速率。在 GPU 上依次是：
送过去（两个矩阵经由 PCIe）、一次启动、乘法、送回来（一个矩阵）。

`machine` 里有 "cpu_flops"、"gpu_flops"（FLOP/s）、"pcie"（字节/秒）、"launch_s"（秒）。
zh]
"""

# I AM NOT DONE


def times(n, machine):
    # TODO(en): seconds on the CPU, and seconds on the GPU with both ways: a pair.
    # TODO(zh): CPU 上的秒数，以及 GPU 上含往返的秒数：返回一对。
    # [solution
    flops = 2 * n**3
    matrix = 4 * n * n
    return flops / machine["cpu_flops"], 3 * matrix / machine["pcie"] + machine["launch_s"] + flops / machine[
        "gpu_flops"
    ]
    # solution]
    # [skeleton
    #: flops = 2 * n**3
    #: return flops / machine["cpu_flops"], flops / machine["gpu_flops"]
    # skeleton]


def break_even(machine):
    # TODO(en): the smallest n from which on the GPU is faster, both ways included; None when it never is up to n = 1,000,000.
    # TODO(zh): 从多大的 n 起，含往返的 GPU 更快，返回最小的 n；到 n = 1,000,000 都不更快时返回 None。
    # [solution
    low, high = 0, 1_000_000  # slower at low, faster at high
    if times(high, machine)[1] >= times(high, machine)[0]:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        cpu, gpu = times(middle, machine)
        low, high = (low, middle) if gpu < cpu else (middle, high)
    return high
    # solution]
    # [skeleton
    #: return None
    # skeleton]


def chained(n, products, machine):
    # TODO(en): the GPU's seconds for `products` products in a row, A·B, then its result times B, and so on: what must move, and what can
    #   stay there?
    # TODO(zh): GPU 连续做 `products` 次乘法所需的秒数：A·B，再用结果乘 B，依此类推。哪些必须搬动，哪些可以留在那边？
    # [solution
    one = machine["launch_s"] + 2 * n**3 / machine["gpu_flops"]
    return 3 * 4 * n * n / machine["pcie"] + products * one
    # solution]
    # [skeleton
    #: return products * times(n, machine)[1]
    # skeleton]
