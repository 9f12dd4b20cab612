"""``skinny_matmul(x, w, bias=None)``: a linear layer's product for the few rows of x that decoding has.

2·M·N·K operations on N·K + M·(K + N) elements: M operations a byte in 16 bits, so reading w is the limit (README.md).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants, peers
from weft.operators.call import Choice, cast_for_products, eager, guarded, on_gpu
from weft.operators.hopper.gemm import SIXTEEN_BITS
from weft.operators.hopper.padded import copied
from weft.operators.launch import Plans
from weft.operators.linear.dispatch import FEW_ROWS, FEW_ROWS_WEIGHT
from weft.operators.linear.linear import linear_function
from weft.operators.matmul.reference import SUMS
from weft.operators.random_inputs import LAYOUTS, VALUES, of_vectors, random_tensor


@torch.library.triton_op("weft::skinny_matmul", mutates_args=())
def skinny_matmul_op(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return _launched(x, w, bias) if on_gpu(x) else F.linear(x, w, bias)


def _launched(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    if y.numel():
        ready = KERNEL.of((x, w)) if bias is None else KERNEL.of((x, w, bias))
        ready(x, w, w if bias is None else bias, y)
    return y


KERNEL: Plans = FEW_ROWS.kernel("triton")


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, w, _ = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, w = ctx.saved_tensors
    dx = torch.mm(dy, w) if ctx.needs_input_grad[0] else None
    dw = _of_weight(dy, x) if ctx.needs_input_grad[1] else None
    return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None


def _of_weight(dy: Tensor, x: Tensor) -> Tensor:
    plan = None if torch.is_grad_enabled() else FEW_ROWS_WEIGHT.of((dy, x))
    if plan is None:
        return torch.mm(dy.t(), x)
    dw = torch.empty(dy.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    plan(dy, x, dw)
    return dw


skinny_matmul_op.register_autograd(_backward, setup_context=_save)


def reference(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, w, bias)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [M, K] and w [N, K]; the option ``bias`` says whether there is one (there is), ``layout`` is that of all."""
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    x = random_tensor(g, (w["M"], w["K"]), w.dtype, device, layout=layout, values=values)
    weight = random_tensor(g, (w["N"], w["K"]), w.dtype, device, layout=layout)
    bias = random_tensor(g, (w["N"],), w.dtype, device, layout=of_vectors(layout)) if w.option("bias", True) else None
    return {"x": x, "w": weight, "bias": bias}


def cost(w: Workload, direction: str) -> Cost:
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    bias = n if w.option("bias", True) else 0
    flops = 2.0 * m * n * k + m * bias
    if direction == "forward":
        return Cost((m * k + n * k + bias) * size, m * n * size, {w.dtype: flops})
    return Cost((m * k + n * k + m * n) * size, (m * k + n * k + bias) * size, {w.dtype: 2 * flops})


def _with_bias(product: Any) -> Any:
    """A mistake of matmul's, with a bias."""

    def wrong(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = product(x, w.t())
        return y if bias is None else y + bias

    return wrong


DECODE = (1, 4, 8, 16, 32, 64)  # sequences that decode at once
# Llama 3 8B and 70B: queries, keys and values; output; gate and up; down
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (8192, 28672))


def plain(dtype: str, m: int, n: int, k: int) -> Workload:
    """As decoder layers are: without a bias."""
    return workload(dtype, M=m, N=n, K=k, bias=False)


skinny_matmul = Operator(
    name="skinny_matmul",
    axes={"M": "rows of x", "N": "rows of w", "K": "columns of both"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"bias": (False, True), "layout": LAYOUTS, "values": VALUES},
    differentiable=("x", "w", "bias"),
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w.axes.values())),
    workloads={
        "verify": [
            *workloads(
                "MNK", (1, 1, 1), (1, 40, 256), (3, 33, 17), (4, 5, 500), (2, 7, 130), (8, 64, 128), (17, 33, 70)
            ),
            *workloads("MNK", (64, 20, 136), (70, 9, 33), (33, 130, 200), (0, 5, 3), (5, 0, 3), (5, 3, 0)),
            *(workload(M=m, N=20, K=k, bias=False) for m, k in ((1, 136), (5, 300), (9, 64), (3, 0))),
            *(workload(M=3, N=20, K=72, layout=at) for at in LAYOUTS[1:]),
            *(workload(M=20, N=20, K=72, layout=at) for at in ("sliced", "strided")),
            *(workload(M=m, N=20, K=64, values="nonfinite") for m in (4, 16)),
        ],
        "full": [workload(M=m, N=1000, K=k) for k in (4100, 4104) for m in (1, 7, 16, 33, 64)],
        "huge": [
            *(plain("bf16", m, 2**17 + 8, 2**14 + 8) for m in (1, 16)),
            *(plain("bf16", m, 40, 2**26 + 64) for m in (1, 16)),
        ],
        "bench": [plain("bf16", m, 8192, 8192) for m in DECODE],
        "quick": [plain("bf16", 1, 8192, 8192)],
        "compile": [
            *(plain(d, m, 8192, 8192) for d in ("bf16", "fp32") for m in DECODE),
            *(workload("fp16", M=m, N=500, K=1000) for m in (2, 20)),
        ],
        "tune": [
            *(plain("bf16", m, n, n) for m in (1, 2, *DECODE[1:]) for n in (4096, 8192)),
            *(plain("bf16", m, n, k) for m in (1, 16) for n, k in LAYERS),
            *(plain("fp32", m, 8192, 8192) for m in (1, 16)),
        ],
        "model": [plain("bf16", m, n, k) for m in (1, 16, 64) for n, k in LAYERS],
    },
    mutants=[
        *mutants.usual(reference),
        *(Mutant(mutant.name, _with_bias(mutant.function)) for mutant in SUMS),
        Mutant("every part adds the bias", mutants.changed(reference, bias=lambda b: None if b is None else 2 * b)),
        *mutants.usual(mutants.gradient_of(reference, "x", "w", "bias"), "backward"),
    ],
)


@skinny_matmul.implementation("triton", arch=">=sm_80")
def skinny_matmul_triton(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    operands = (x, w) if bias is None else (x, w, bias)
    return _launched(x, w, bias) if eager(*operands) else skinny_matmul_op(x, w, bias)


peers.register(skinny_matmul, reference)


@skinny_matmul.choice
@guarded
def choose(x: Tensor, w: Tensor, bias: Tensor | None = None, *, direction: str = "forward") -> Choice:
    x, w, bias = cast_for_products(x, w, bias)
    choice = FEW_ROWS.choose(x, w, bias)
    if direction == "forward" or choice.implementation == "torch":
        return choice
    return FEW_ROWS_WEIGHT.choose(x.new_empty(len(x), len(w)), x)


@skinny_matmul.function
def skinny_matmul_function(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer's product for few rows: x · wᵀ + bias.

    Args:
        x: [M, K]; float32, float16 or bfloat16, any strides. Made for M up to 64; more go to PyTorch, or to
            ``linear`` where sizes are no multiples of 8.
        w: [N, K], of x's dtype and device, as ``torch.nn.Linear`` keeps its weight; rows that are contiguous along K.
        bias: [N], of x's dtype and device, or None.

    Returns:
        [M, N] of x's dtype, accumulated in fp32; fp32 products of up to 64 rows are IEEE, whatever PyTorch's switch for tf32
        says (more rows are PyTorch's product, which follows it). Under autocast the tensors are cast as
        ``torch.nn.functional.linear`` does.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: not matrices, numbers of columns or devices that differ, a bias of another length.
    """
    operands = (x, w) if bias is None else (x, w, bias)
    if eager(*operands) and (plan := FEW_ROWS.of(operands)) is not None:
        y = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
        plan(x, w, w if bias is None else bias, y)
        return y
    x, w, bias = cast_for_products(x, w, bias)
    if choose(x, w, bias).implementation == "torch":
        if x.dtype in SIXTEEN_BITS and eager(*operands, gradient=True, autocast=True) and copied(x, w.t()):
            return linear_function(x, w, bias)  # sizes that cuBLAS is slow at, forward and backward
        return F.linear(x, w, bias)
    return skinny_matmul_op(x, w, bias)
