# rejected at: right
# The parts follow each other here.
def times(n, machine):
    flops = 2 * n**3
    way = 3 * 4 * n * n / machine["pcie"]
    return flops / machine["cpu_flops"], max(way, machine["launch_s"] + flops / machine["gpu_flops"])


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
    one = machine["launch_s"] + 2 * n**3 / machine["gpu_flops"]
    return 3 * 4 * n * n / machine["pcie"] + products * one
