"""Synthetic records for the tests of the report: shaped like real ones, and made up from a fixed seed."""

import random
from typing import Any

from weft.records import Measurement
from weft.report.page import Contents

GPU = "Synthetic GPU 9000"
CPU = "Synthetic CPU, 2 cores"
VERSIONS = {"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0"}
WIDTHS = (256, 1024, 4096, 8192, 32768, 131072)
SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def ceilings(device: str = "cuda") -> list[Measurement]:
    gpu = device == "cuda"
    memory = 4.26e12 if gpu else 2.1e10
    mixes = {"read 1:0": 1.04, "write 0:1": 1.08, "copy 1:1": 1.0, "2:1": 1.01, "3:1": 1.02, "4:3": 1.005}
    matrix = (
        {"bf16": 742e12, "fp16": 751e12, "tf32": 395e12, "fp32": 51e12} if gpu else {"fp32": 1.3e11, "fp64": 6.2e10}
    )
    values = [(name, "bandwidth", memory * k, "B/s") for name, k in mixes.items()]
    values += [(f"{dtype} matrix", "matrix rate", value, "FLOP/s") for dtype, value in matrix.items()]
    return [
        Measurement(
            "ceiling",
            name,
            "forward",
            "",
            "",
            1.0,
            metric=metric,
            unit=unit,
            device=device,
            gpu=GPU if gpu else CPU,
            details={"value": value, "unit": unit},
            versions=VERSIONS,
            commit="0123456789ab",
            time="2026-11-20T10:00:00Z",
            machine={"driver": "580.65.06"} if gpu else {},
        )
        for name, metric, value, unit in values
    ]


def measurement(
    implementation: str, time_us: float, limit_us: float, peer: tuple[str, float] | None = None, **fields: Any
) -> Measurement:
    """A record whose derived numbers agree with each other."""
    ours = implementation in ("triton", "cuda")
    beside = peer is not None and ours
    base = dict(
        operator="softmax",
        direction="forward",
        workload="M=1024,N=256",
        dtype="bf16",
        ours=ours,
        gpu=GPU,
        device="cuda",
        time_p20_us=time_us * 0.985,
        time_p80_us=time_us * 1.02,
        repetitions=100,
        host_us=14.0,
        limit_us=limit_us,
        limit_name="memory 1:1",
        share_of_ceiling=limit_us / time_us,
        error=0.42,
        versions=VERSIONS,
        machine={"driver": "580.65.06"},
        commit="0123456789ab",
        run="r1",
        time="2026-11-20T10:05:00Z",
        best_peer=peer[0] if peer and ours else None,
        ratio_to_best_peer=peer[1] / time_us if peer and ours else None,
        ratio_p20=peer[1] / time_us * 0.985 if peer and beside else None,
        ratio_p80=peer[1] / time_us * 1.012 if peer and beside else None,
    )
    return Measurement(implementation=implementation, time_us=time_us, **(base | fields))


def row_operator(
    operator: str, direction: str, passes: int, dtypes: tuple[str, ...] = ("bf16", "fp32")
) -> list[Measurement]:
    """Softmax and its like: memory-bound, at every width, several implementations."""
    rng = random.Random(f"{operator} {direction}")
    out = []
    for dtype in dtypes:
        for n in WIDTHS:
            elements = 2**28
            bytes_moved = passes * elements * SIZE[dtype]
            limit = bytes_moved / 4.26e12 * 1e6
            shares = {
                "triton": rng.uniform(0.94, 1.005) if n < 131072 else rng.uniform(0.8, 0.9),
                "torch": rng.uniform(0.3, 0.8),
                "torch.compile": rng.uniform(0.42, 0.99),
                "liger": rng.uniform(0.3, 0.97),
                "quack": rng.uniform(0.93, 0.99),
            }
            if n == 131072:
                shares["cuda"] = 0.957
            times = {name: limit / share for name, share in shares.items()}
            peer = min(((k, v) for k, v in times.items() if k not in ("triton", "cuda")), key=lambda pair: pair[1])
            out += [
                measurement(
                    name,
                    time,
                    limit,
                    peer,
                    operator=operator,
                    direction=direction,
                    workload=f"M={elements // n},N={n}",
                    dtype=dtype,
                    bytes_moved=bytes_moved,
                    flops=5.0 * elements,
                )
                for name, time in times.items()
            ]
    return out


def matmul(device: str = "cuda") -> list[Measurement]:
    rng = random.Random(device)
    out = []
    rates = {"bf16": 742e12, "fp16": 751e12, "fp32": 51e12} if device == "cuda" else {"fp32": 1.3e11}
    names = {"cuda": {"triton": 0.83, "torch": 0.97, "torch.compile": 0.96}, "cpu": {"torch": 0.93, "numpy": 0.8}}[
        device
    ]
    for dtype, rate in rates.items():
        for size in (256, 512, 1024, 2048, 4096) if device == "cpu" else (1024, 4096, 8192):
            flops, bytes_moved = 2.0 * size**3, 3 * size * size * SIZE[dtype]
            limit = flops / rate * 1e6
            times = {name: limit / (share * rng.uniform(0.9, 1.0)) for name, share in names.items()}
            peer = min(((k, v) for k, v in times.items() if k != "triton"), key=lambda pair: pair[1])
            out += [
                measurement(
                    name,
                    time,
                    limit,
                    peer,
                    operator="matmul",
                    workload=f"M={size},N={size},K={size},layout=NN",
                    dtype=dtype,
                    flops=flops,
                    bytes_moved=bytes_moved,
                    device=device,
                    limit_name=f"{dtype} matrix",
                    gpu=GPU if device == "cuda" else CPU,
                    machine={"driver": "580.65.06"} if device == "cuda" else {},
                )
                for name, time in times.items()
            ]
    return out


def vector_add() -> list[Measurement]:
    out = []
    for dtype in ("bf16", "fp32"):
        n, moved = 2**28, 3 * 2**28 * SIZE[dtype]
        limit = moved / 4.3e12 * 1e6
        for name, share in (("triton", 0.991), ("torch", 0.988), ("torch.compile", 0.979)):
            out.append(
                measurement(
                    name,
                    limit / share,
                    limit,
                    ("torch", limit / 0.988),
                    operator="vector_add",
                    workload=f"N={n}",
                    dtype=dtype,
                    limit_name="memory 2:1",
                    flops=float(n),
                    bytes_moved=moved,
                )
            )
    return out


def verification(gpu: bool = True, failures: bool = True) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    rng = random.Random(3)
    cases = [("vector_add", "forward"), ("matmul", "forward")]
    cases += [(o, d) for o in ("softmax", "rms_norm") for d in ("forward", "backward")]
    for operator, direction in cases:
        for implementation in ("triton", "cuda") if operator == "softmax" else ("triton",):
            for dtype in ("fp32", "fp16", "bf16"):
                for i in range(9):
                    status, error, reason = "pass", rng.uniform(0.05, 0.8), ""
                    if not gpu and (dtype == "bf16" or implementation == "cuda"):
                        status, error = "unverifiable", None
                        reason = (
                            "bf16 cannot be trusted in the interpreter" if dtype == "bf16" else "CUDA C++ needs a GPU"
                        )
                    elif operator == "softmax" and i == 8:
                        status, error, reason = "declined", None, "takes float tensors with a contiguous last dimension"
                    elif failures and (operator, direction, dtype, i) == ("rms_norm", "backward", "bf16", 7):
                        status, error, reason = (
                            "fail",
                            3.7,
                            "dw differs in 12 of 4096 elements, first at [37]: 0.125 ≠ 0.1309",
                        )
                    results.append(
                        dict(
                            operator=operator,
                            implementation=implementation,
                            direction=direction,
                            workload=f"M={i + 1},N={97 * i + 3}",
                            dtype=dtype,
                            status=status,
                            error=error,
                            reason=reason,
                            reproduce=f"weft verify {operator} --workload M={i + 1},N={97 * i + 3} --dtype {dtype}",
                        )
                    )
    statuses = [r["status"] for r in results]
    return {
        "checked": statuses.count("pass") + statuses.count("fail"),
        "failed": statuses.count("fail"),
        "unverifiable": statuses.count("unverifiable"),
        "mutants": 24,
        "mutants_not_reached": 7,
        "mutants_survived": 0,
        "results": results,
    }


def training(device: str = "cpu") -> dict[str, Any]:
    epochs = range(15)
    return dict(
        job="digits CNN",
        device="cpu" if device == "cpu" else "cuda",
        hardware=CPU if device == "cpu" else GPU,
        seed=0,
        epochs=15,
        batch_size=64,
        learning_rate=0.005,
        parameters=151498,
        train_images=1438,
        test_images=359,
        train_loss=[1.9 * 0.72**e + 0.02 for e in epochs],
        test_loss=[1.2 * 0.7**e + 0.035 for e in epochs],
        test_accuracy=[min(0.994, 0.86 + 0.03 * e) for e in epochs],
        seconds=[0.05] * 15,
        images_per_second=31206.0,
        versions=VERSIONS,
        commit="0123456789ab",
        time="2026-11-20T10:10:00Z",
    )


def compiled() -> list[dict[str, Any]]:
    rng = random.Random(5)
    limits = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
    out = []
    for operator, implementation in (
        ("softmax", "triton"),
        ("rms_norm", "triton"),
        ("matmul", "triton"),
        ("softmax", "cuda"),
    ):
        for arch, limit in limits.items():
            if implementation == "cuda" and arch in ("sm_80", "sm_86", "sm_89"):
                continue
            for kernel in ("forward", "backward"):
                shared = rng.choice((0, 1024, 65536, 98304)) if operator == "matmul" else 512
                registers = rng.randrange(24, 200)
                out.append(
                    dict(
                        operator=operator,
                        implementation=implementation,
                        kernel=kernel,
                        arch=arch,
                        registers=registers,
                        shared_bytes=shared,
                        shared_limit=limit,
                        spills=0,
                        ok=True,
                    )
                )
    out.append(
        out[-1]
        | dict(
            operator="matmul", implementation="triton", arch="sm_86", shared_bytes=131072, shared_limit=101376, ok=False
        )
    )
    return out


def findings() -> list[dict[str, Any]]:
    return [
        dict(group="driver", name="NVIDIA driver", status="pass", found="580.65.06", fix=""),
        dict(
            group="disk",
            name="free space",
            status="warn",
            found="11 GiB free on /",
            fix="move the caches: export HF_HOME=/data/hf",
        ),
        dict(
            group="libraries",
            name="JAX",
            status="fail",
            found="0.7 does not see the GPU",
            fix="pip install 'jax[cuda13]'",
        ),
    ]


def gpu_contents(failures: bool = True) -> Contents:
    measured = vector_add() + matmul()
    for operator in ("softmax", "rms_norm"):
        measured += row_operator(operator, "forward", 2) + row_operator(operator, "backward", 3)
    return Contents(
        machine={
            "device": "cuda",
            "gpu": GPU,
            "memory_gib": 139.8,
            "sms": 132,
            "l2": "60 MiB",
            "driver": "580.65.06",
            "clocks_mhz": {"sm": 1980, "memory": 3201},
            "cpu": "Synthetic CPU, 16 cores",
            "versions": VERSIONS,
            "os": "Linux 6.8",
        },
        ceilings=ceilings(),
        verification=verification(failures=failures),
        measurements=measured,
        compiled=compiled(),
        training=training("cuda"),
        findings=findings(),
    )


def cpu_contents() -> Contents:
    return Contents(
        machine={"device": "cpu", "cpu": CPU, "memory_gib": 7.7, "versions": VERSIONS, "os": "Linux 6.8"},
        ceilings=ceilings("cpu"),
        verification=verification(gpu=False, failures=False),
        measurements=matmul("cpu"),
        compiled=compiled()[:-1],
        training=training(),
        findings=findings()[:1],
    )
