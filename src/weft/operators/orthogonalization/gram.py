"""``gram(x)``: X·Xᵀ of one matrix or a batch, computing each of its distinct elements once."""

from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants
from weft.operators.call import guarded
from weft.operators.orthogonalization.calls import SymmetricProduct, implement, matrices, quack
from weft.operators.orthogonalization.dispatch import GRAM
from weft.operators.random_inputs import LAYOUTS, VALUES


def reference(x: Tensor) -> Tensor:
    return x @ x.mT


call = SymmetricProduct("gram", GRAM, reference, lambda dg, x: (dg + dg.mT) @ x)


def cost(w: Workload, direction: str) -> Cost:
    """Operations: a multiply and an add for each term of the M·(M + 1) / 2 distinct elements."""
    b, m, n, size = w["B"], w["M"], w["N"], w.bytes_per_element
    return Cost(b * m * n * size, b * m * m * size, {w.dtype: 1.0 * b * m * (m + 1) * n})


def _a_tile_not_mirrored(x: Tensor) -> Tensor:
    out = reference(x).clone()
    half = out.shape[-1] // 2
    out[..., :half, half:] = out[..., half:, :half].mT.flip(-1) if half * 2 == out.shape[-1] else 0.5
    return out


def _first_matrix_for_all(x: Tensor) -> Tensor:
    return reference(x) if x.ndim == 2 else reference(x[:1]).expand(len(x), -1, -1).clone()


SQUARES = tuple(workload("bf16", B=1, M=m, N=n) for m, n in ((2048, 2048), (2048, 8192), (4096, 4096), (8192, 8192)))
BENCH = (*SQUARES, workload("bf16", B=16, M=2048, N=2048))
# what Muon stacks of a language model of 1.24 G parameters, and its products of the smaller side
STACKS = workloads("BMN", (32, 512, 512), (32, 512, 2048), (32, 2048, 2048), (16, 2048, 8192), dtype="bf16")
TALL = workload("bf16", B=32, M=2048, N=8192, layout="transposed")

gram = Operator(
    name="gram",
    axes={"B": "matrices", "M": "rows", "N": "columns"},
    inputs=lambda w, g, device: {"x": matrices(w, g, device)},
    reference=reference,
    cost=cost,
    options={"layout": LAYOUTS, "values": VALUES},
    tolerance=Tolerance(scale="tensor", terms=lambda w: w["N"]),
    workloads={
        "verify": [
            *workloads("BMN", (1, 1, 1), (1, 1, 40), (1, 16, 16), (1, 33, 65), (1, 100, 17), (1, 70, 130)),
            *workloads("BMN", (3, 5, 7), (3, 40, 32), (1, 0, 5), (1, 5, 0), (0, 3, 4)),
            *(workload(B=1, M=40, N=32, layout=at) for at in LAYOUTS[1:]),
            *(workload(B=2, M=33, N=16, layout=at) for at in ("sliced", "transposed", "expanded")),
            workload(B=1, M=40, N=16, values="nonfinite"),
        ],
        "full": [workload(B=2, M=200, N=100), workload(B=1, M=256, N=256)],
        "huge": [workload("bf16", B=1, M=2**16 + 8, N=64), workload("bf16", B=1, M=64, N=2**25 + 64)],
        "bench": BENCH,
        "quick": [workload("bf16", B=1, M=4096, N=4096)],
        "host": [workload(B=1, M=64, N=64)],
        "compile": [
            workload("bf16", B=1, M=4096, N=4096),
            workload("bf16", B=1, M=4096, N=1024, layout="transposed"),
            workload("fp16", B=4, M=500, N=1000),
            workload("fp32", B=1, M=2048, N=2048),
        ],
        "tune": [*BENCH, *STACKS, TALL],
        "model": [workload("bf16", B=32, M=4096, N=n) for n in (4096, 14336)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("mirror not written", lambda x: reference(x).tril()),
        Mutant("a tile not turned round", _a_tile_not_mirrored),
        Mutant("last slice left out", lambda x: reference(x[..., : max(x.shape[-1] - 1, 0) // 8 * 8])),
        Mutant("the first matrix for all", _first_matrix_for_all),
        Mutant("of columns, not rows", lambda x: x.mT @ x if x.shape[-1] == x.shape[-2] else reference(x).flip(-1)),
    ],
)

implement(gram, call.kernel, lambda x: quack(x, x.mT), "triton", "cuda", "strips")
gram.choice(guarded(GRAM.choose))


@gram.function
def gram_function(x: Tensor) -> Tensor:
    """The Gram matrix X·Xᵀ.

    Args:
        x: [..., M, N]; float32, float16 or bfloat16, any strides. Fastest where rows or columns are contiguous.

    Returns:
        [..., M, M] of x's dtype, accumulated in fp32, symmetric to the bit (where leading dimensions have no common stride,
        PyTorch's product is called, which need not be). fp32 products follow ``torch.get_float32_matmul_precision()``.
        Under autocast x is cast as by ``torch.mm``.

    Raises:
        TypeError: not a tensor of those dtypes.
        ValueError: not a matrix or a batch of them.

    The gradient is (dG + dGᵀ)·X, by PyTorch's product.
    """
    return call(x)
