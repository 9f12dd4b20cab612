"""What ``matmul`` and ``batched_matmul`` are verified and timed on: inputs, compulsory work, mistakes that both share.

B counts products; ``matmul`` has no B and no batch dimensions. The option broadcast says which operand has fewer matrices:
``a`` or ``b`` one for all, ``both`` a [2, 1, M, K] and b [B / 2, K, N]. The option memory may be ``heads``: [B / H, rows, H,
columns] as attention's tensors lie, with H = gcd(B, 16).
"""

import math
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Workload
from weft.operators import mutants
from weft.operators.matmul.dispatch import PRECISIONS
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

OPTIONS = {"layout": ("NN", "NT", "TN", "TT"), "memory": LAYOUTS, "values": VALUES, "precision": PRECISIONS}


def reference(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    return torch.matmul(a, b)


def batches(w: Workload) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The batch dimensions of a and b."""
    if "B" not in w.axes:
        return (), ()
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


def rounding(w: Workload) -> float:
    """Of both operands to tf32 (10 bits), whether or not cuBLAS takes such a kernel for a product that small."""
    return 2.0**-9 if w.dtype == "fp32" and w.option("precision") == "tf32" else 0.0


def cost(w: Workload, direction: str) -> Cost:
    """A broadcast operand is read, and its gradient written, once."""
    m, n, k, size, count = w["M"], w["N"], w["K"], w.bytes_per_element, w.axes.get("B", 1)
    of_a, of_b = (math.prod(batch) for batch in batches(w))
    read, made = of_a * m * k + of_b * k * n, count * m * n
    unit = "tf32" if w.dtype == "fp32" and w.option("precision") in ("tf32", "tf32x3") else w.dtype
    flops = 2.0 * count * m * n * k * {"tf32x3": 3}.get(w.option("precision"), 1)
    if direction == "forward":
        return Cost(read * size, made * size, {unit: flops})
    return Cost((read + made) * size, read * size, {unit: 2 * flops})


def _last_slice_left_out(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    k = max(a.shape[-1] - 1, 0) // 8 * 8
    return torch.matmul(a[..., :k], b[..., :k, :])


def _low_precision_sum(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    total = torch.zeros_like(torch.matmul(a, b), dtype=torch.bfloat16)
    for k in range(a.shape[-1]):
        total += (a[..., k, None].float() * b[..., k, None, :].float()).bfloat16()
    return total.to(a.dtype)


SUMS = [Mutant("last slice of K left out", _last_slice_left_out), Mutant("summed in bf16", _low_precision_sum)]
GRADIENTS = mutants.usual(mutants.gradient_of(reference, "a", "b"), "backward")
