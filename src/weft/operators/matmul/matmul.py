"""``matmul(a, b)``: the product of two matrices in bf16, fp16 or fp32 (IEEE, tf32 or 3×tf32), any layout, any size.

2·M·N·K operations on M·K + K·N + M·N elements: at 4096³ in bf16 that is 1365 FLOP per byte, far right of every machine's
ridge, so the rate of the matrix units is the limit (README.md).
"""

import itertools

import torch
from torch import Tensor

from weft.definition import Declined, Mutant, Operator, Tolerance, workload, workloads
from weft.operators import mutants, peers
from weft.operators.call import Choice, cast_for_products, guarded
from weft.operators.hopper.gemm import ON_HOPPER
from weft.operators.matmul import dispatch
from weft.operators.matmul.reference import GRADIENTS, OPTIONS, SUMS, cost, inputs, reference, rounding

# (N, K) of a layer's products: queries, keys and values; attention's output; gate and up; down. 8 B, then 70 B.
LLAMA = (
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    *((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
)
SQUARES = tuple(workload(dtype, M=n, N=n, K=n) for n in (4096, 8192) for dtype in ("bf16", "fp16"))
CPU_SQUARES = tuple(workload("fp32", M=n, N=n, K=n) for n in (256, 512, 1024, 2048, 4096))
LAYERS = (
    *(workload("bf16", M=n, N=n, K=n, layout="NT") for n in (2048, 4096, 8192, 16384)),
    *(workload("bf16", M=m, N=n, K=k, layout="NT") for m in (512, 4096, 16384) for n, k in LLAMA),
)
# of the widest layers of each, and of half of them: a gate alone
TRAINING = tuple(
    both
    for m in (4096, 16384)
    for n, k in ((14336, 4096), (28672, 4096), (28672, 8192), (57344, 8192))
    for both in (workload("bf16", M=m, N=k, K=n), workload("bf16", M=n, N=k, K=m, layout="TN"))
)

matmul = Operator(
    name="matmul",
    axes={"M": "rows of a", "N": "columns of b", "K": "columns of a, rows of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options=OPTIONS,
    differentiable=("a", "b"),
    tolerance=Tolerance(scale="tensor", eps=rounding, terms=lambda w: max(w.axes.values())),
    # of odd sizes
    workspace=lambda w: 2 * sum((x + 8) * (y + 8) for x, y in itertools.combinations(w.axes.values(), 2)),
    workloads={
        "verify": [
            *workloads("MNK", (1, 1, 1), (16, 16, 16), (33, 65, 17), (64, 128, 64), (7, 1, 130), (33, 20, 1000)),
            *workloads("MNK", (0, 5, 3), (5, 3, 0)),
            *(workload(M=40, N=48, K=33, layout=layout) for layout in ("NT", "TN", "TT")),
            *(workload(M=40, N=48, K=32, memory=memory) for memory in ("unaligned", "sliced", "strided", "expanded")),
            workload(M=32, N=48, K=16, values="nonfinite"),
            *(workload("fp32", M=32, N=48, K=64, precision=p) for p in dispatch.PRECISIONS),
        ],
        "full": [
            *workloads("MNK", (256, 256, 256), (129, 255, 257)),
            workload("bf16", M=1001, N=1003, K=520, layout="NT"),
        ],
        "huge": [
            *workloads("MNK", (2**16 + 8, 2**15 + 8, 64), (2**21 + 8, 64, 1040), (64, 64, 2**25 + 64), dtype="bf16"),
        ],
        "bench": [
            *SQUARES,
            *(workload("bf16", M=4096, N=4096, K=4096, layout=layout) for layout in ("NT", "TN")),
            *(workload("fp32", M=4096, N=4096, K=4096, precision=p) for p in ("ieee", "tf32")),
        ],
        "quick": [workload("bf16", M=4096, N=4096, K=4096)],
        "ladder": [workload("bf16", M=8192, N=8192, K=8192)],
        "compile": [
            *workloads("MNK", (4096, 4096, 4096), (64, 64, 2**14), (2047, 2049, 2050), dtype="bf16"),
            workload("fp16", M=512, N=512, K=500, layout="NT"),
            *(workload("fp32", M=4096, N=4096, K=4096, precision=p) for p in dispatch.PRECISIONS),
        ],
        "cpu": CPU_SQUARES,
        "transfers": CPU_SQUARES,
        "tune": [
            *(workload("bf16", M=n, N=n, K=n, layout=at) for n in (4096, 8192) for at in ("NN", "TN")),
            *LAYERS,
            *TRAINING,
            *(workload("fp32", M=4096, N=4096, K=4096, precision=p) for p in ("ieee", "tf32")),
        ],
        "model": LAYERS,
    },
    mutants=[
        *mutants.usual(reference),
        *SUMS,
        Mutant("transposed", lambda a, b, precision=None: b.t() @ a.t() if a.shape[0] == b.shape[1] else a @ b.flip(0)),
        *GRADIENTS,
    ],
)

matmul_triton = matmul.implementation("triton", arch=">=sm_80")(dispatch.by_triton)


@matmul.implementation("cuda", **ON_HOPPER)
def matmul_hopper(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    if reason := dispatch.hopper_unsupported(dispatch.MatmulCall(a, b, precision)):
        raise Declined(reason)
    return dispatch.product(a, b)


matmul.implementation("padded", backend="triton", arch=">=sm_80", directions=("forward",), dtypes=("bf16", "fp16"))(
    dispatch.by_copies
)


def numpy(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    return torch.from_numpy(a.numpy() @ b.numpy())


peers.register(matmul, dispatch.cublas, reference)
matmul.implementation("quack", **dispatch.OF_QUACK)(dispatch.quack)
matmul.implementation("numpy", devices=("cpu",), directions=("forward",), dtypes=("fp32",))(numpy)


@matmul.choice
@guarded
def choose(a: Tensor, b: Tensor, precision: str | None = None, *, direction: str = "forward") -> Choice:
    return dispatch.choice_of(direction, *cast_for_products(a, b), precision)


@matmul.function
def matmul_function(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    """Product of two matrices, or of batches of them as ``batched_matmul``, or of vectors as ``torch.matmul``.

    Args:
        a: [M, K], or [..., M, K], or [K]; float32, float16 or bfloat16, any strides.
        b: [K, N], or [..., K, N], or [K], of a's dtype and device.
        precision: of fp32 products: ``ieee``, ``tf32`` or ``tf32x3``; None follows
            ``torch.get_float32_matmul_precision()``. Without meaning for 16-bit inputs. ``ieee`` and ``tf32`` set PyTorch's
            switch, which is the process's, for the time of the call, one call at a time.

    Returns:
        [M, N], or [..., M, N], without M or N of a vector, of a's dtype, accumulated in fp32. Under autocast both inputs are
            cast as ``torch.mm`` does.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: no dimensions, inner dimensions or devices that differ, an unknown precision.
    """
    return dispatch.public(a, b, precision, "matmul", choose)
