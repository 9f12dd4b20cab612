"""What ``batched_matmul`` is verified and timed on: inputs, compulsory work, workloads, mistakes.

B counts products. The option broadcast says which operand has fewer matrices: ``a`` or ``b`` one for all, ``both`` a
[2, 1, M, K] and b [B / 2, K, N]. The option memory may be ``heads``: [B / H, rows, H, columns] as attention's tensors lie, of
H = gcd(B, 16).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Workload, workload
from weft.operators import mutants
from weft.operators.matmul.kernels import PRECISIONS
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

BROADCAST = ("none", "a", "b", "both")
OPTIONS = {
    "layout": ("NN", "NT", "TN", "TT"),
    "memory": (*LAYOUTS, "heads"),
    "values": VALUES,
    "precision": PRECISIONS,
    "broadcast": BROADCAST,
}


def reference(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    return torch.matmul(a, b)


def batches(w: Workload) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The batch dimensions of a and b."""
    b, few = w["B"], min(w["B"], 2)
    either: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "none": ((b,), (b,)),
        "a": ((), (b,)),
        "b": ((b,), ()),
        "both": ((few, 1), (b // max(few, 1),)),
    }
    return either[w.option("broadcast", "none")]


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """a is [..., M, K] and b [..., K, N]; the option layout says which is stored transposed (NN, NT, TN, TT)."""
    layout, memory = w.option("layout", "NN"), w.option("memory", "contiguous")

    def operand(batch: tuple[int, ...], rows: int, columns: int, letter: str, values: str) -> Tensor:
        if letter == "T":
            rows, columns = columns, rows
        if memory == "heads" and batch:
            heads = math.gcd(batch[-1], 16)
            stored = random_tensor(g, (batch[-1] // heads, rows, heads, columns), w.dtype, device, values=values)
            made = stored.transpose(1, 2)
        else:
            kind = "contiguous" if memory == "heads" else memory
            made = random_tensor(g, (*batch, rows, columns), w.dtype, device, layout=kind, values=values)
        return made.mT if letter == "T" else made

    of_a, of_b = batches(w)
    return {
        "a": operand(of_a, w["M"], w["K"], layout[0], w.option("values", "normal")),
        "b": operand(of_b, w["K"], w["N"], layout[1], "normal"),
        "precision": w.option("precision"),
    }


def cost(w: Workload, direction: str) -> Cost:
    """A broadcast operand is read, and its gradient written, once."""
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    of_a, of_b = (math.prod(batch) for batch in batches(w))
    read, made = of_a * m * k + of_b * k * n, w["B"] * m * n
    unit = "tf32" if w.dtype == "fp32" and w.option("precision") in ("tf32", "tf32x3") else w.dtype
    products = {"tf32x3": 3}.get(w.option("precision"), 1)
    flops = 2.0 * w["B"] * m * n * k * products
    if direction == "forward":
        return Cost(read * size, made * size, {unit: flops})
    return Cost((read + made) * size, read * size, {unit: 2 * flops})


def terms(w: Workload) -> int:
    """Of the longest sum; that of a broadcast operand's gradient goes over the batch too."""
    summed = 1 if w.option("broadcast", "none") == "none" else w["B"]
    return max(w["M"], w["N"], w["K"]) * max(summed, 1)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def _last_slice_left_out(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    k = max(a.shape[-1] - 1, 0) // 8 * 8
    return torch.matmul(a[..., :k], b[..., :k, :])


def _low_precision_sum(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    total = torch.zeros_like(torch.matmul(a, b), dtype=torch.bfloat16)
    for k in range(a.shape[-1]):
        total += (a[..., k, None].float() * b[..., k, None, :].float()).bfloat16()
    return total.to(a.dtype)


def _batches_swapped(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    c = torch.matmul(a, b)
    return c.roll(1, 0) if c.ndim > 2 else c


def _first_matrix_for_all(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    return torch.matmul(a[:1].expand_as(a), b) if a.ndim > 2 else torch.matmul(a, b)


def _inner_batch_for_outer(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    """Batch dimensions stepped through in the wrong order."""
    c = torch.matmul(a, b)
    return c if c.ndim < 4 else c.transpose(0, 1).reshape(c.shape)


def _gradients(dc: Tensor, a: Tensor, b: Tensor, precision: Any = None) -> tuple[Tensor, ...]:
    return torch.matmul(dc, b.mT).sum_to_size(a.shape), torch.matmul(a.mT, dc).sum_to_size(b.shape)


def _last_product_alone(dc: Tensor, a: Tensor, b: Tensor, precision: Any = None) -> tuple[Tensor, ...]:
    """Of a broadcast operand one product's gradient, not the sum of all."""

    def one(gradient: Tensor, shape: torch.Size) -> Tensor:
        for _ in range(gradient.ndim - len(shape)):
            gradient = gradient[-1] if len(gradient) else gradient.sum(0)
        return gradient.sum_to_size(shape)

    return one(torch.matmul(dc, b.mT), a.shape), one(torch.matmul(a.mT, dc), b.shape)


MUTANTS = [
    *mutants.usual(reference),
    Mutant("batches swapped", _batches_swapped),
    Mutant("the first matrix of a for all", _first_matrix_for_all),
    Mutant("inner batch dimension taken for the outer", _inner_batch_for_outer),
    Mutant("last slice of K left out", _last_slice_left_out),
    Mutant("summed in bf16", _low_precision_sum),
    *mutants.usual(_gradients, "backward"),
    Mutant("a broadcast operand's gradient of one product", _last_product_alone, "backward"),
]

# ---- workloads -------------------------------------------------------------------------------------------------------

ATTENTION = [
    *(workload("bf16", B=b, M=s, N=s, K=128, layout="NT") for b, s in ((256, 1024), (128, 2048), (32, 4096))),
    workload("bf16", B=128, M=2048, N=128, K=2048),
    workload("bf16", B=128, M=2048, N=2048, K=128, layout="NT", memory="heads"),
]
EXPERTS = workload("bf16", B=8, M=1024, N=4096, K=4096)
SQUARES = [workload("bf16", B=16, M=n, N=n, K=n) for n in (1024, 2048)]
SMALL = [workload("bf16", B=4096, M=n, N=n, K=n) for n in (64, 128)]
SHARED = [workload("bf16", B=16, M=512, N=4096, K=4096, broadcast=which) for which in ("b", "a")]
WORKLOADS = {
    "verify": [
        *(workload(B=b, M=m, N=n, K=k) for b, m, n, k in ((1, 1, 1, 1), (3, 16, 16, 16), (2, 33, 65, 17), (5, 7, 1, 40))),
        *(workload(B=b, M=m, N=n, K=k) for b, m, n, k in ((0, 3, 5, 2), (2, 0, 5, 3), (2, 5, 3, 0))),
        *(workload(B=2, M=20, N=34, K=33, layout=layout) for layout in ("NT", "TN", "TT")),
        *(workload(B=4, M=12, N=20, K=24, broadcast=which) for which in ("a", "b", "both")),
        workload(B=4, M=20, N=12, K=40, broadcast="both", layout="TT", memory="sliced"),
        workload(B=3, M=20, N=12, K=16, broadcast="b", memory="sliced"),
        *(workload(B=2, M=20, N=24, K=16, memory=memory) for memory in ("unaligned", "strided", "expanded")),
        workload(B=6, M=9, N=5, K=8, memory="heads"),
        workload(B=2, M=33, N=24, K=16, values="nonfinite"),
        workload(B=2, M=16, N=16, K=520),
        *(workload("fp32", B=2, M=16, N=24, K=40, precision=p) for p in PRECISIONS),
    ],
    "full": [
        workload(B=5, M=129, N=255, K=257),
        workload(B=3, M=256, N=192, K=128),
        workload(B=48, M=136, N=72, K=200, memory="heads", layout="NT"),
        *(workload(B=6, M=264, N=136, K=72, broadcast=which) for which in ("a", "b", "both")),
    ],
    "huge": [
        workload("bf16", B=2**18 + 8, M=64, N=264, K=64),
        workload("fp16", B=70000, M=3, N=5, K=4, broadcast="both"),
        workload("bf16", B=2, M=2**16 + 8, N=2**15 + 8, K=64),
        workload("bf16", B=2, M=64, N=64, K=2**24 + 64),
    ],
    "bench": [
        *ATTENTION,
        EXPERTS,
        *SQUARES,
        *SMALL,
        *SHARED,
        workload("fp16", B=16, M=2048, N=2048, K=2048),
        workload("fp32", B=16, M=1024, N=1024, K=1024, precision="tf32"),
    ],
    "quick": [workload("bf16", B=16, M=1024, N=1024, K=1024)],
    "compile": [
        SQUARES[1],
        workload("bf16", B=128, M=2048, N=2048, K=128, layout="NT"),
        workload("fp16", B=8, M=500, N=500, K=500, layout="TN"),
        workload("bf16", B=4, M=64, N=64, K=2**14),
        workload("bf16", B=64, M=16, N=32, K=24, memory="heads"),
        workload("bf16", B=16, M=512, N=4096, K=4096, broadcast="a"),
        *(workload("fp32", B=16, M=1024, N=1024, K=1024, precision=p) for p in PRECISIONS),
    ],
    "cpu": [workload("fp32", B=16, M=n, N=n, K=n) for n in (64, 256, 512)],
    "tune": [*ATTENTION, EXPERTS, *SQUARES, *SMALL, *SHARED],
}  # fmt: skip
