"""``batched_matmul(a, b)``: products of many pairs of matrices, batch dimensions broadcast, in bf16, fp16 or fp32.

2·B·M·N·K operations; an operand that is broadcast is read once. A batch that lies as the rows of one matrix, with one b for
all, is one product of two matrices (README.md).
"""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants, peers
from weft.operators.call import Choice, cast_for_products, guarded
from weft.operators.matmul import dispatch
from weft.operators.matmul.dispatch import OF_QUACK, PRECISIONS, by_copies, by_triton, cublas, quack
from weft.operators.matmul.reference import GRADIENTS, OPTIONS, SUMS, cost, inputs, reference, rounding
from weft.operators.random_inputs import LAYOUTS


def terms(w: Workload) -> int:
    """Of the longest sum; that of a broadcast operand's gradient goes over the batch too."""
    summed = 1 if w.option("broadcast", "none") == "none" else w["B"]
    return max(w["M"], w["N"], w["K"]) * max(summed, 1)


def _batches_swapped(**named: Any) -> Tensor:
    c = reference(**named)
    return c.roll(1, 0) if c.ndim > 2 else c


def _first_matrix(a: Tensor) -> Tensor:
    return a[:1].expand_as(a) if a.ndim > 2 else a


def _inner_batch_for_outer(**named: Any) -> Tensor:
    """Batch dimensions stepped through in the wrong order."""
    c = reference(**named)
    return c if c.ndim < 4 else c.transpose(0, 1).reshape(c.shape)


def _last_product_alone(dc: Tensor, a: Tensor, b: Tensor, precision: Any = None) -> tuple[Tensor, ...]:
    """Of a broadcast operand one product's gradient, not the sum of all."""

    def one(gradient: Tensor, shape: torch.Size) -> Tensor:
        for _ in range(gradient.ndim - len(shape)):
            gradient = gradient[-1] if len(gradient) else gradient.sum(0)
        return gradient.sum_to_size(shape)

    return one(torch.matmul(dc, b.mT), a.shape), one(torch.matmul(a.mT, dc), b.shape)


ATTENTION = [
    *(workload("bf16", B=b, M=s, N=s, K=128, layout="NT") for b, s in ((256, 1024), (128, 2048), (32, 4096))),
    workload("bf16", B=128, M=2048, N=128, K=2048),
    workload("bf16", B=128, M=2048, N=2048, K=128, layout="NT", memory="heads"),
]
EXPERTS = workload("bf16", B=8, M=1024, N=4096, K=4096)
SQUARES = [workload("bf16", B=16, M=n, N=n, K=n) for n in (1024, 2048)]
SMALL = [workload("bf16", B=4096, M=n, N=n, K=n) for n in (64, 128)]
SHARED = [workload("bf16", B=16, M=512, N=4096, K=4096, broadcast=which) for which in ("b", "a")]
TIMED = [*ATTENTION, EXPERTS, *SQUARES, *SMALL, *SHARED]

batched_matmul = Operator(
    name="batched_matmul",
    axes={"B": "products", "M": "rows of a", "N": "columns of b", "K": "columns of a, rows of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={**OPTIONS, "memory": (*LAYOUTS, "heads"), "broadcast": ("none", "a", "b", "both")},
    differentiable=("a", "b"),
    tolerance={
        "forward": Tolerance(scale="tensor", eps=rounding, terms=lambda w: max(w["M"], w["N"], w["K"])),
        "backward": Tolerance(scale="tensor", eps=rounding, terms=terms),
    },
    workloads={
        "verify": [
            *workloads("BMNK", (1, 1, 1, 1), (3, 16, 16, 16), (2, 33, 65, 17), (5, 7, 1, 40), (2, 16, 16, 520)),
            *workloads("BMNK", (0, 3, 5, 2), (2, 0, 5, 3), (2, 5, 3, 0)),
            *(workload(B=2, M=20, N=34, K=33, layout=layout) for layout in ("NT", "TN", "TT")),
            *(workload(B=4, M=12, N=20, K=24, broadcast=which) for which in ("a", "b", "both")),
            workload(B=4, M=20, N=12, K=40, broadcast="both", layout="TT", memory="sliced"),
            workload(B=3, M=20, N=12, K=16, broadcast="b", memory="sliced"),
            *(workload(B=2, M=20, N=24, K=16, memory=memory) for memory in ("unaligned", "strided", "expanded")),
            workload(B=6, M=9, N=5, K=8, memory="heads"),
            workload(B=2, M=33, N=24, K=16, values="nonfinite"),
            *(workload("fp32", B=2, M=16, N=24, K=40, precision=p) for p in PRECISIONS),
        ],
        "full": [
            *workloads("BMNK", (5, 129, 255, 257), (3, 256, 192, 128)),
            workload(B=48, M=136, N=72, K=200, memory="heads", layout="NT"),
            *(workload(B=6, M=264, N=136, K=72, broadcast=which) for which in ("a", "b", "both")),
        ],
        "huge": [
            *workloads(
                "BMNK", (2**18 + 8, 64, 264, 64), (2, 2**16 + 8, 2**15 + 8, 64), (2, 64, 64, 2**24 + 64), dtype="bf16"
            ),
            workload("fp16", B=70000, M=3, N=5, K=4, broadcast="both"),
        ],
        "bench": [
            *TIMED,
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
        "tune": TIMED,
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("batches swapped", _batches_swapped),
        Mutant("the first matrix of a for all", mutants.changed(reference, a=_first_matrix)),
        Mutant("inner batch dimension taken for the outer", _inner_batch_for_outer),
        *SUMS,
        *GRADIENTS,
        Mutant("a broadcast operand's gradient of one product", _last_product_alone, "backward"),
    ],
)

batched_matmul.implementation("triton", arch=">=sm_80")(by_triton)
batched_matmul.implementation(
    "padded", backend="triton", arch=">=sm_80", directions=("forward",), dtypes=("bf16", "fp16")
)(by_copies)
peers.register(batched_matmul, cublas, reference)
batched_matmul.implementation("quack", **OF_QUACK)(quack)


@batched_matmul.choice
@guarded
def choose(a: Tensor, b: Tensor, precision: str | None = None, *, direction: str = "forward") -> Choice:
    return dispatch.choice_of(direction, *cast_for_products(a, b), precision, "batched_matmul")


@batched_matmul.function
def batched_matmul_function(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    """Products of the matrices in the last two dimensions; the dimensions before them broadcast, as ``torch.matmul``'s do.

    Args:
        a: [..., M, K]; float32, float16 or bfloat16, any strides (of an expanded dimension, 0).
        b: [..., K, N], of a's dtype and device.
        precision: as of ``weft.ops.matmul``.

    Returns:
        [..., M, N] of a's dtype, accumulated in fp32. Under autocast both inputs are cast as ``torch.matmul`` does.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: fewer than two dimensions; inner dimensions or devices that differ; batch dimensions that do not
            broadcast; an unknown precision.
        Declined: of ``tf32x3``, more than three batch dimensions whose strides do not let them be merged.
    """
    return dispatch.public(a, b, precision, "batched_matmul", choose)
