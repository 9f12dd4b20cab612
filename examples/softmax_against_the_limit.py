"""How near softmax comes to this machine's limit, beside PyTorch's: measure the limit, then the claim.

    python examples/softmax_against_the_limit.py

With a GPU: bf16, weft's kernel, cold. Without: fp32 on the CPU, where weft.ops.softmax runs PyTorch's.
"""

import torch

import weft
from weft import registry
from weft.hardware import ceilings, query
from weft.timing import Timer, paired_ratio


def main() -> None:
    device, text, dtype = ("cuda", "M=65536,N=4096", "bf16") if query.has_gpu() else ("cpu", "M=2048,N=4096", "fp32")
    operator = registry.get("softmax")
    workload = operator.parse(text, dtype)

    # The limit: the bytes that softmax cannot do without, at the bandwidth of a plain streaming kernel.
    cost = operator.cost(workload, "forward")
    limit_us, limit_name = ceilings.measure(device, quick=True).limit(cost)
    print(f"{query.name(device)}: softmax {workload} {dtype} moves {cost.bytes_moved / 2**20:.0f} MiB")
    print(f"limit     {limit_us:10.1f} us   {limit_name} at {cost.bytes_moved / limit_us / 1e3:.0f} GB/s")

    # The claim: two input sets in rotation, both implementations in turn within each repetition.
    g = torch.Generator(device).manual_seed(0)
    sets = [operator.inputs(workload, g, device)["x"] for _ in range(2)]
    calls = {
        "weft": [lambda x=x: weft.ops.softmax(x) for x in sets],
        "torch": [lambda x=x: torch.softmax(x, -1) for x in sets],
    }
    timer = Timer(device)
    times = timer.measure(calls)
    for name, t in times.items():
        spread = f"p20 {t.quantile(0.2):.1f}, p80 {t.quantile(0.8):.1f}, {len(t.times_us)} repetitions, {timer.cache}"
        print(f"{name:9} {t.median_us:10.1f} us   {limit_us / t.median_us:.1%} of the limit ({spread})")
    ratio, low, high = paired_ratio(times["torch"], times["weft"])
    print(f"torch's time over weft's: {ratio:.3f} ({low:.3f} to {high:.3f})")

    chosen = weft.ops.explain("softmax", sets[0])
    print(f"weft chose {chosen.implementation}: {chosen.reason}")


if __name__ == "__main__":
    main()
