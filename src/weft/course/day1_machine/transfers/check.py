import time
from pathlib import Path


def expected_times(n, m):
    return 2 * n**3 / m["cpu_flops"], 12 * n * n / m["pcie"] + m["launch_s"] + 2 * n**3 / m["gpu_flops"]


def expected_break_even(m):
    low, high = 0, 1_000_000
    if expected_times(high, m)[1] >= expected_times(high, m)[0]:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        cpu, gpu = expected_times(middle, m)
        low, high = (low, middle) if gpu < cpu else (middle, high)
    return high


def check(learner, t):
    machines = [{"cpu_flops": 1e12, "gpu_flops": 5e11, "pcie": 2.5e10, "launch_s": 1e-5}]  # the GPU never is faster
    for _ in range(6):
        cpu = float(t.rng.uniform(5e10, 2e12))
        faster = float(t.rng.uniform(1.5, 300))
        pcie, launch = float(t.rng.uniform(8e9, 6e10)), float(t.rng.uniform(5e-6, 5e-5))
        machines.append({"cpu_flops": cpu, "gpu_flops": cpu * faster, "pcie": pcie, "launch_s": launch})
    for m in machines:
        shown = "{" + ", ".join(f"{k}: {v:.3g}" for k, v in m.items()) + "}"
        for n in (1, 64, int(t.rng.integers(100, 9000))):
            t.close(learner.times(n, m), expected_times(n, m), f"times({n}, {shown})", atol=0)
        t.equal(learner.break_even(m), expected_break_even(m), f"break_even({shown})")
        n, products = int(t.rng.integers(64, 4096)), int(t.rng.integers(1, 50))
        one = m["launch_s"] + 2 * n**3 / m["gpu_flops"]
        t.close(
            learner.chained(n, products, m),
            12 * n * n / m["pcie"] + products * one,
            f"chained({n}, {products}, {shown})",
            atol=0,
        )
    measured(t)


def measured(t):
    """This machine's own product, timed; with a GPU also there, transfers included, and how far the results differ."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return
    import torch

    if not torch.cuda.is_available():
        return
    n = 4096
    a, b = torch.randn(n, n), torch.randn(n, n)
    took, results = {}, {}
    for name, call in (("CPU", lambda: a @ b), ("GPU", lambda: (a.cuda() @ b.cuda()).cpu())):
        call()
        start = time.perf_counter()
        results[name] = call()
        took[name] = (time.perf_counter() - start) * 1e3
    error = ((results["GPU"] - results["CPU"]).norm() / results["CPU"].norm()).item()
    t.note(
        f"measured here, n = {n}: CPU {took['CPU']:.1f} ms, GPU with both ways {took['GPU']:.1f} ms; results differ by {error:.1e}",
        f"本机实测，n = {n}：CPU {took['CPU']:.1f} ms，GPU 含往返 {took['GPU']:.1f} ms；结果相对差 {error:.1e}",
    )
