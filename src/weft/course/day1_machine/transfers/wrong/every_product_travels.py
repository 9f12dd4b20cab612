# rejected at: right
# Results can stay there.
def times(n, machine):
    flops = 2 * n**3
    matrix = 4 * n * n
    return flops / machine["cpu_flops"], 3 * matrix / machine["pcie"] + machine["launch_s"] + flops / machine[
        "gpu_flops"
    ]


def break_even(machine):
    low, high = 0, 1_000_000  # slower at low, faster at high
    if times(high, machine)[1] >= times(high, machine)[0]:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        cpu, gpu = times(middle, machine)
        low, high = (low, middle) if gpu < cpu else (middle, high)
    return high


def chained(n, products, machine):
    return products * times(n, machine)[1]
