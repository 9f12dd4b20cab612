# rejected at: right
# The smallest n, not the smallest power of two.
def times(n, machine):
    flops = 2 * n**3
    matrix = 4 * n * n
    return flops / machine["cpu_flops"], 3 * matrix / machine["pcie"] + machine["launch_s"] + flops / machine[
        "gpu_flops"
    ]


def break_even(machine):
    n = 1
    while n < 1_000_000:
        cpu, gpu = times(n, machine)
        if gpu < cpu:
            return n
        n *= 2
    return None


def chained(n, products, machine):
    one = machine["launch_s"] + 2 * n**3 / machine["gpu_flops"]
    return 3 * 4 * n * n / machine["pcie"] + products * one
