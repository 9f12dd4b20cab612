"""Synthetic records for the tests of the report: shaped like real ones, made from fixed seeds."""

import random
from typing import Any

from weft.records import Measurement, ceiling
from weft.report.page import Contents

GPU = "Synthetic GPU 9000"
CPU = "Synthetic CPU, 2 cores"
VERSIONS = {"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0"}
DRIVER = {"driver": "580.65.06"}
WIDTHS = (256, 1024, 4096, 8192, 32768, 131072)
SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
OURS = ("triton", "cuda")


def on(device: str) -> dict[str, Any]:
    """The fields of a record that name its machine."""
    gpu = device == "cuda"
    return {"device": device, "gpu": GPU if gpu else CPU, "machine": DRIVER if gpu else {}}


def ceilings(device: str = "cuda") -> list[Measurement]:
    memory = 4.26e12 if device == "cuda" else 2.1e10
    mixes = {"read 1:0": 1.04, "write 0:1": 1.08, "copy 1:1": 1.0, "2:1": 1.01, "3:1": 1.02, "4:3": 1.005}
    on_gpu = {"bf16": 742e12, "fp16": 751e12, "tf32": 395e12, "fp32": 51e12}
    matrix = on_gpu if device == "cuda" else {"fp32": 1.3e11, "fp64": 6.2e10}
    about = on(device) | {"versions": VERSIONS, "commit": "0123456789ab", "time": "2026-11-20T10:00:00Z"}
    rates = [(name, "bandwidth", memory * k, "B/s") for name, k in mixes.items()]
    rates += [(f"{dtype} matrix", "matrix rate", value, "FLOP/s") for dtype, value in matrix.items()]
    return [ceiling(*rate, **about) for rate in rates]


def measurement(
    implementation: str, time_us: float, limit_us: float, peer: tuple[str, float] | None = None, **fields: Any
) -> Measurement:
    """A record whose derived numbers agree with each other."""
    ours = implementation in OURS
    ratio = peer[1] / time_us if peer and ours else None
    base = dict(
        operator="softmax", direction="forward", workload="M=1024,N=256", dtype="bf16", ours=ours, **on("cuda"),
        time_p20_us=time_us * 0.985, time_p80_us=time_us * 1.02, repetitions=100, host_us=14.0, limit_us=limit_us,
        limit_name="memory 1:1", share_of_ceiling=limit_us / time_us, error=0.42, versions=VERSIONS,
        commit="0123456789ab", run="r1", time="2026-11-20T10:05:00Z", best_peer=peer[0] if peer and ours else None,
        ratio_to_best_peer=ratio, ratio_p20=ratio and ratio * 0.985, ratio_p80=ratio and ratio * 1.012,
    )  # fmt: skip
    return Measurement(implementation=implementation, time_us=time_us, **(base | fields))


def point(limit_us: float, shares: dict[str, float], **fields: Any) -> list[Measurement]:
    """The implementations of one point, which reach these shares of the limit."""
    times = {name: limit_us / share for name, share in shares.items()}
    peer = min(((name, time) for name, time in times.items() if name not in OURS), key=lambda pair: pair[1])
    return [measurement(name, time, limit_us, peer, **fields) for name, time in times.items()]


def row_operator(operator: str, direction: str, passes: int) -> list[Measurement]:
    """A memory-bound operator of rows, such as softmax, at every width."""
    rng = random.Random(f"{operator} {direction}")
    elements = 2**28
    out = []
    for dtype in ("bf16", "fp32"):
        for n in WIDTHS:
            moved = passes * elements * SIZE[dtype]
            highest = {"torch": (0.3, 0.8), "torch.compile": (0.42, 0.99), "liger": (0.3, 0.97), "quack": (0.93, 0.99)}
            shares = {"triton": rng.uniform(0.94, 1.005) if n < 131072 else rng.uniform(0.8, 0.9)}
            shares |= {name: rng.uniform(*of) for name, of in highest.items()}
            if n == 131072:
                shares["cuda"] = 0.957
            work = {"bytes_moved": moved, "flops": 5.0 * elements, "workload": f"M={elements // n},N={n}"}
            limit_us = moved / 4.26e12 * 1e6
            out += point(limit_us, shares, operator=operator, direction=direction, dtype=dtype, **work)
    return out


def matmul(device: str = "cuda") -> list[Measurement]:
    rng = random.Random(device)
    if device == "cuda":
        rates, sizes = {"bf16": 742e12, "fp16": 751e12, "fp32": 51e12}, (1024, 4096, 8192)
        names = {"triton": 0.83, "torch": 0.97, "torch.compile": 0.96}
    else:
        rates, sizes, names = {"fp32": 1.3e11}, (256, 512, 1024, 2048, 4096), {"torch": 0.93, "numpy": 0.8}
    out = []
    for dtype, rate in rates.items():
        for n in sizes:
            shares = {name: share * rng.uniform(0.9, 1.0) for name, share in names.items()}
            work = {"flops": 2.0 * n**3, "bytes_moved": 3 * n * n * SIZE[dtype], "limit_name": f"{dtype} matrix"}
            about = {"operator": "matmul", "dtype": dtype, "workload": f"M={n},N={n},K={n},layout=NN"}
            out += point(2.0 * n**3 / rate * 1e6, shares, **about, **work, **on(device))
    return out


def vector_add() -> list[Measurement]:
    n, out = 2**28, []
    for dtype in ("bf16", "fp32"):
        moved = 3 * n * SIZE[dtype]
        work = {"workload": f"N={n}", "limit_name": "memory 2:1", "flops": float(n), "bytes_moved": moved}
        shares = {"triton": 0.991, "torch": 0.988, "torch.compile": 0.979}
        out += point(moved / 4.3e12 * 1e6, shares, operator="vector_add", dtype=dtype, **work)
    return out


def verification(gpu: bool = True, failures: bool = True) -> dict[str, Any]:
    """Of ``weft verify --json``: on a GPU one failure, without one what cannot be verified."""
    rng = random.Random(3)
    cases = [("vector_add", "forward", "triton"), ("matmul", "forward", "triton")]
    for direction in ("forward", "backward"):
        cases += [("softmax", direction, "triton"), ("softmax", direction, "cuda"), ("rms_norm", direction, "triton")]

    def outcome(operator: str, direction: str, implementation: str, dtype: str, i: int) -> tuple[str, Any, str]:
        if not gpu and dtype == "bf16":
            return "unverifiable", None, "bf16 cannot be trusted in the interpreter"
        if not gpu and implementation == "cuda":
            return "unverifiable", None, "CUDA C++ needs a GPU"
        if operator == "softmax" and i == 8:
            return "declined", None, "takes float tensors with a contiguous last dimension"
        if failures and (operator, direction, dtype, i) == ("rms_norm", "backward", "bf16", 7):
            return "fail", 3.7, "dw differs in 12 of 4096 elements, first at [37]: 0.125 ≠ 0.1309"
        return "pass", rng.uniform(0.05, 0.8), ""

    results: list[dict[str, Any]] = []
    for operator, direction, implementation in cases:
        for dtype in ("fp32", "fp16", "bf16"):
            for i in range(9):
                status, error, reason = outcome(operator, direction, implementation, dtype, i)
                workload = f"M={i + 1},N={97 * i + 3}"
                about = {"operator": operator, "direction": direction, "implementation": implementation, "dtype": dtype}
                again = f"weft verify {operator} --workload {workload} --dtype {dtype}"
                found = {"workload": workload, "status": status, "error": error, "reason": reason, "reproduce": again}
                results.append(about | found)
    count = [r["status"] for r in results].count
    counts = {"checked": count("pass") + count("fail"), "failed": count("fail"), "unverifiable": count("unverifiable")}
    return {**counts, "mutants": 24, "mutants_not_reached": 7, "mutants_survived": 0, "results": results}


def training(device: str = "cpu") -> dict[str, Any]:
    epochs = range(15)
    about = {"job": "digits CNN", "device": device, "hardware": CPU if device == "cpu" else GPU, "seed": 0}
    return {
        **about, **{"parameters": 151498, "train_images": 1438, "test_images": 359},
        "train_loss": [1.9 * 0.72**e + 0.02 for e in epochs], "test_loss": [1.2 * 0.7**e + 0.035 for e in epochs],
        "test_accuracy": [min(0.994, 0.86 + 0.03 * e) for e in epochs], "images_per_second": 31206.0,
    }  # fmt: skip


def compiled() -> list[dict[str, Any]]:
    """Of ``weft compile-check``: the last kernel asks for more shared memory than there is."""
    rng = random.Random(5)
    limits = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
    out: list[dict[str, Any]] = []
    for operator, name in (("softmax", "triton"), ("rms_norm", "triton"), ("matmul", "triton"), ("softmax", "cuda")):
        for arch, limit in limits.items():
            if name == "cuda" and arch in ("sm_80", "sm_86", "sm_89"):
                continue
            for kernel in ("forward", "backward"):
                shared = rng.choice((0, 1024, 65536, 98304)) if operator == "matmul" else 512
                about = {"operator": operator, "implementation": name, "kernel": kernel, "arch": arch, "ok": True}
                takes = {"registers": rng.randrange(24, 200), "shared_bytes": shared, "shared_limit": limit}
                out.append(about | takes | {"spills": 0})
    wrong = {"arch": "sm_86", "shared_bytes": 131072, "shared_limit": 101376, "ok": False}
    return [*out, out[-1] | {"operator": "matmul", "implementation": "triton"} | wrong]


FINDINGS = [
    ("driver", "NVIDIA driver", "pass", "580.65.06", ""),
    ("disk", "free space", "warn", "11 GiB free on /", "move the caches: export HF_HOME=/data/hf"),
    ("libraries", "JAX", "fail", "0.7 does not see the GPU", "pip install 'jax[cuda13]'"),
]


def findings() -> list[dict[str, Any]]:
    return [dict(zip(("group", "name", "status", "found", "fix"), finding, strict=True)) for finding in FINDINGS]


def gpu_contents(failures: bool = True) -> Contents:
    measured = vector_add() + matmul()
    for operator in ("softmax", "rms_norm"):
        measured += row_operator(operator, "forward", 2) + row_operator(operator, "backward", 3)
    machine = {"device": "cuda", "gpu": GPU, "memory_gib": 139.8, "sms": 132, "l2": "60 MiB", **DRIVER}
    machine |= {"clocks_mhz": {"sm": 1980, "memory": 3201}, "cpu": "Synthetic CPU, 16 cores"}
    return Contents(
        machine=machine | {"versions": VERSIONS, "os": "Linux 6.8"}, ceilings=ceilings(),
        verification=verification(failures=failures), measurements=measured, compiled=compiled(),
        training=training("cuda"), findings=findings(),
    )  # fmt: skip


def cpu_contents() -> Contents:
    return Contents(
        machine={"device": "cpu", "cpu": CPU, "memory_gib": 7.7, "versions": VERSIONS, "os": "Linux 6.8"},
        ceilings=ceilings("cpu"), verification=verification(gpu=False, failures=False), measurements=matmul("cpu"),
        compiled=compiled()[:-1], training=training(), findings=findings()[:1],
    )  # fmt: skip
