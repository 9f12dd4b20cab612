"""What a first report measures: the operators that people know, at shapes of real models, the best-known first."""

import os
from typing import Any

from rich.console import Console

from weft import registry
from weft.bench import compare, transfers
from weft.bench.run import cpu_points, measure_points
from weft.hardware import ceilings
from weft.records import Measurement

# Of a Llama of 8 B parameters, unless the operator is none of its parts: products of 8,192 tokens, and of 65,536 what moves
# memory, more than a cache holds.
GPU = (
    ("rms_norm", "M=65536,N=4096", "forward"),
    ("matmul", "M=8192,N=14336,K=4096,layout=NT", "forward"),
    ("softmax", "M=65536,N=2048", "forward"),
    ("cross_entropy_with_gradient", "M=8192,V=128256", "forward"),
    ("adamw", "T=64,P=1048576", "forward"),
    ("linear", "M=8192,N=14336,K=4096,activation=swiglu,plus=none", "forward"),
    ("rms_norm", "M=65536,N=4096", "backward"),
    ("layer_norm", "M=65536,N=4096", "forward"),
    ("swiglu", "N=117440512", "forward"),
    ("rotary_embedding", "B=8,S=8192,H=32,D=128,kv_heads=8", "forward"),
    ("layer_norm", "M=65536,N=4096", "backward"),
    ("skinny_matmul", "M=1,N=4096,K=14336,bias=False", "forward"),
    ("softmax", "M=65536,N=2048", "backward"),
    ("gelu", "N=117440512", "forward"),
    ("embedding", "N=65536,V=128256,D=4096", "forward"),
    ("transpose", "M=65536,N=4096", "forward"),
    ("sum", "M=65536,N=4096", "forward"),
    ("cumsum", "M=65536,N=4096", "forward"),
    ("dropout", "N=268435456", "forward"),
    ("newton_schulz", "B=4,M=4096,N=4096", "forward"),
    ("grouped_matmul", "R=32768,N=2048,K=768,E=64,bias=False", "forward"),
    ("quantize", "M=65536,N=4096,format=fp8_e4m3,granularity=row", "forward"),
    ("spmv", "M=262144,N=262144,R=128", "forward"),
)
CPU = ("rms_norm", "softmax", "matmul", "transpose", "vector_add", "batched_matmul")
PEERS = ("torch", "torch.compile")
LIMIT_S = 75.0  # for the points of a GPU; what is not reached then is the end of the list
CPU_LIMIT_S = 40.0


def points(device: str) -> list[Any]:
    """(operator, workload, direction), the most telling first."""
    if device == "cuda":
        return [(op := registry.get(name), op.parse(w, "bf16"), direction) for name, w, direction in GPU]
    return list(cpu_points(registry.select(CPU), "quick", (), ()))


def measure(device: str, note: Console) -> list[Measurement]:
    """Ceilings, then the points, compiled in a process for each core. On a CPU the ceilings are measured again after the
    points and the higher ones count: other programs slow a measurement, they never speed it up."""
    limits = ceilings.measure(device, quick=True)
    bench = compare.Bench(device, limits, budget_s=0.2, quick=True)
    wanted = points(device)
    chosen = {
        op.name: [i for i in op.implementations.values() if (i.ours and i.rung is None) or i.name in (*PEERS, "numpy")]
        for op, _, _ in wanted
    }
    jobs, limit_s = ((os.cpu_count() or 2), LIMIT_S) if device == "cuda" else (1, CPU_LIMIT_S)
    measured = [m for rows in measure_points(bench, wanted, chosen, note, jobs=jobs, limit_s=limit_s) for m in rows]
    for op in {op.name: op for op, _, _ in wanted}.values():
        if "transfers" in op.workloads:
            measured += transfers.measure(bench, op, quick=True)
    if device == "cpu":
        limits = limits.higher(ceilings.measure(device, quick=True))
        costs = {(op.name, str(w), w.dtype, direction): op.cost(w, direction) for op, w, direction in wanted}
        for m in measured:
            cost = costs.get((m.operator, m.workload, m.dtype, m.direction))
            if cost and m.share_of_ceiling:
                limit_us, m.limit_name = limits.limit(cost)
                m.limit_us, m.share_of_ceiling = limit_us, limit_us / m.time_us
    return [*ceilings.as_records(limits, bench.context()), *measured]
