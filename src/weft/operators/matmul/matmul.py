"""``matmul(a, b)``: the product of two matrices in bf16, fp16 or fp32 (IEEE, tf32 or 3×tf32), any layout, any size.

2·M·N·K operations on M·K + K·N + M·N elements: at 4096³ in bf16 that is 1365 FLOP per byte, far right of every machine's
ridge, so the rate of the matrix units is the limit (theory and measurements: README.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import (
    Choice,
    KernelFunction,
    cast_for_products,
    check_same,
    check_tensor,
    eager,
    guarded,
    on_gpu,
    traced,
)
from weft.operators.hopper import gemm
from weft.operators.launch import Plans, target_sm
from weft.operators.matmul.kernels import PRECISIONS, plans
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::matmul", mutates_args=())
def matmul_op(a: Tensor, b: Tensor, precision: str) -> Tensor:
    if not on_gpu(a):
        return torch.mm(a, b)
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        plans.of((a, b), precision)(a, b, c)
    return c


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    a, b, ctx.precision = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    da = torch.ops.weft.matmul(dc, b.t(), ctx.precision) if ctx.needs_input_grad[0] else None
    db = torch.ops.weft.matmul(a.t(), dc, ctx.precision) if ctx.needs_input_grad[1] else None
    return da, db, None


matmul_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("weft::matmul_hopper", mutates_args=())
def hopper_op(a: Tensor, b: Tensor) -> Tensor:
    return _on_hopper(a, b)


@hopper_op.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _on_hopper(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        gemm.plans.of((a, b))(a, b, c)
    return c


def _hopper_gradients(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The same kernel where TMA takes the layout: a gradient of odd sizes, or an expanded one, goes to cuBLAS."""
    a, b = ctx.saved_tensors

    def product(left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right) if gemm.why_not(left, right, left.dtype) else hopper_op(left, right)

    return (
        product(dc, b.t()) if ctx.needs_input_grad[0] else None,
        product(a.t(), dc) if ctx.needs_input_grad[1] else None,
    )


hopper_op.register_autograd(_hopper_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

# ---- implementations -------------------------------------------------------------------------------------------------


def reference(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    return torch.mm(a, b)


def matmul_triton(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    precision = precision or default_precision()
    if eager(a, b):
        c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
        if c.numel():
            plans.of((a, b), precision)(a, b, c)
        return c
    return torch.ops.weft.matmul(a, b, precision)


def matmul_hopper(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    if reason := gemm.why_not(a, b, a.dtype):
        raise Declined(reason)
    return _on_hopper(a, b) if eager(a, b) else hopper_op(a, b)


def default_precision() -> str:
    """What ``torch.set_float32_matmul_precision`` says: ``ieee`` for "highest", else ``tf32``."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def cublas(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    if a.dtype != torch.float32 or precision in (None, default_precision()):
        return torch.mm(a, b)
    if precision == "tf32x3":
        raise Declined("PyTorch has no 3×tf32 product")
    return AtPrecision.apply(a, b, precision)


class AtPrecision(KernelFunction):
    """``torch.matmul`` of matrices or batches, with PyTorch's precision switch set for it and the products of its gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, precision: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return _mm(a, b, precision)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        da, db = _mm(dc, b.mT, ctx.precision), _mm(a.mT, dc, ctx.precision)
        return da.sum_to_size(a.shape), db.sum_to_size(b.shape), None


def _mm(a: Tensor, b: Tensor, precision: str) -> Tensor:
    if precision == "tf32" and not a.is_cuda:  # a CPU has no such mode: round the operands as the GPU does
        a, b = (
            ((t.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32) for t in (a.contiguous(), b.contiguous())
        )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
    try:
        return torch.matmul(a, b)
    finally:
        torch.set_float32_matmul_precision(before)


def quack(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    from quack.gemm_interface import gemm

    if a.dtype == torch.float32:
        raise Declined("QuACK's GEMM takes 16-bit operands")
    return gemm(a, b, tuned=False)


def numpy(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    return torch.from_numpy(a.numpy() @ b.numpy())


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """a is [M, K] and b [K, N]; the option layout says which is stored transposed (NN, NT, TN, TT)."""
    layout, values = w.option("layout", "NN"), w.option("values", "normal")
    memory = w.option("memory", "contiguous")

    def operand(rows: int, columns: int, letter: str, values: str) -> Tensor:
        if letter == "T":
            return random_tensor(g, (columns, rows), w.dtype, device, layout=memory, values=values).t()
        return random_tensor(g, (rows, columns), w.dtype, device, layout=memory, values=values)

    return {
        "a": operand(w["M"], w["K"], layout[0], values),
        "b": operand(w["K"], w["N"], layout[1], "normal"),
        "precision": w.option("precision"),
    }


def cost(w: Workload, direction: str) -> Cost:
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    unit = "tf32" if w.dtype == "fp32" and w.option("precision") in ("tf32", "tf32x3") else w.dtype
    products = {"tf32x3": 3}.get(w.option("precision"), 1)
    if direction == "forward":
        return Cost((m * k + k * n) * size, m * n * size, {unit: 2.0 * m * n * k * products})
    reads = (m * k + k * n + m * n) * size
    return Cost(reads, (m * k + k * n) * size, {unit: 4.0 * m * n * k * products})


def _last_slice_left_out(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    k = max(a.shape[1] - 1, 0) // 8 * 8
    return torch.mm(a[:, :k], b[:k])


def _low_precision_sum(a: Tensor, b: Tensor, precision: Any = None) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    for k in range(a.shape[1]):
        total += (a[:, k, None].float() * b[None, k].float()).bfloat16()
    return total.to(a.dtype)


def _gradients(dc: Tensor, a: Tensor, b: Tensor, precision: Any = None) -> tuple[Tensor, ...]:
    return torch.mm(dc, b.t()), torch.mm(a.t(), dc)


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
GRADIENTS = tuple(
    product
    for m in (4096, 16384)
    for n, k in ((14336, 4096), (28672, 4096), (28672, 8192), (57344, 8192))
    for product in (workload("bf16", M=m, N=k, K=n), workload("bf16", M=n, N=k, K=m, layout="TN"))
)

matmul = Operator(
    name="matmul",
    axes={"M": "rows of a", "N": "columns of b", "K": "columns of a, rows of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options={"layout": ("NN", "NT", "TN", "TT"), "memory": LAYOUTS, "values": VALUES, "precision": PRECISIONS},
    differentiable=("a", "b"),
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w.axes.values())),
    workloads={
        "verify": [
            *(
                workload(M=m, N=n, K=k)
                for m, n, k in ((1, 1, 1), (16, 16, 16), (33, 65, 17), (64, 128, 64), (7, 1, 130), (33, 20, 1000))
            ),
            *(workload(M=0, N=5, K=3), workload(M=5, N=3, K=0)),
            *(workload(M=40, N=48, K=33, layout=layout) for layout in ("NT", "TN", "TT")),
            *(workload(M=40, N=48, K=32, memory=memory) for memory in ("unaligned", "sliced", "strided", "expanded")),
            workload(M=32, N=48, K=16, values="nonfinite"),
            workload("fp32", M=32, N=48, K=64, precision="ieee"),
            workload("fp32", M=32, N=48, K=64, precision="tf32"),
            workload("fp32", M=32, N=48, K=64, precision="tf32x3"),
        ],
        "full": [workload(M=256, N=256, K=256), workload(M=129, N=255, K=257)],
        "huge": [
            workload("bf16", M=2**16 + 8, N=2**15 + 8, K=64),
            workload("bf16", M=2**21 + 8, N=64, K=1040),
            workload("bf16", M=64, N=64, K=2**25 + 64),
        ],
        "bench": [
            *SQUARES,
            *(workload("bf16", M=4096, N=4096, K=4096, layout=layout) for layout in ("NT", "TN")),
            *(workload("fp32", M=4096, N=4096, K=4096, precision=p) for p in ("ieee", "tf32")),
        ],
        "quick": [workload("bf16", M=4096, N=4096, K=4096)],
        "ladder": [workload("bf16", M=8192, N=8192, K=8192)],
        "compile": [
            workload("bf16", M=4096, N=4096, K=4096),
            workload("fp16", M=512, N=512, K=500, layout="NT"),
            workload("bf16", M=64, N=64, K=2**14),
            *(workload("fp32", M=4096, N=4096, K=4096, precision=p) for p in ("ieee", "tf32", "tf32x3")),
        ],
        "cpu": CPU_SQUARES,
        "transfers": CPU_SQUARES,
        "tune": [
            *(workload("bf16", M=n, N=n, K=n, layout=at) for n in (4096, 8192) for at in ("NN", "TN")),
            *LAYERS,
            *GRADIENTS,
            *(workload("fp32", M=4096, N=4096, K=4096, precision=p) for p in ("ieee", "tf32")),
        ],
        "model": LAYERS,
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("last slice of K left out", _last_slice_left_out),
        Mutant("summed in bf16", _low_precision_sum),
        Mutant(
            "operands transposed",
            lambda a, b, precision=None: (b.t() @ a.t()) if a.shape[0] == b.shape[1] else a @ b.flip(0),
        ),
        *mutants.usual(_gradients, "backward"),
    ],
)

matmul.implementation("triton", arch=">=sm_80")(matmul_triton)
matmul.implementation("cuda", arch="==sm_90", dtypes=("bf16", "fp16"), devices=("cuda",))(matmul_hopper)
matmul.implementation("torch")(cublas)
matmul.implementation("torch.compile", devices=("cuda",))(peers.Compiled(reference))
matmul.implementation("quack", requires="quack-kernels", devices=("cuda",), dtypes=("bf16", "fp16"))(quack)
matmul.implementation("numpy", devices=("cpu",), directions=("forward",), dtypes=("fp32",))(numpy)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(a: Tensor, b: Tensor, precision: str | None) -> None:
    check_tensor("matmul", "a", a)
    check_tensor("matmul", "b", b)
    check_same("matmul", "b", b, "a", a)
    for name, t in (("a", a), ("b", b)):
        if t.ndim != 2:
            raise ValueError(
                f"matmul: argument '{name}' has shape {tuple(t.shape)}; expected a matrix (two dimensions) or, as "
                "batched_matmul takes them, a batch of matrices"
            )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"matmul: 'a' has shape {tuple(a.shape)} and 'b' {tuple(b.shape)}; expected b with {a.shape[1]} rows, "
            "as many as 'a' has columns"
        )
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"matmul: argument 'precision' is {precision!r}; expected {', '.join(PRECISIONS)} or None")


def of_batches(a: Any, b: Any) -> Any:
    """The module that takes more than two dimensions, where a or b has them. It is imported late: it needs this one."""
    if getattr(a, "ndim", 0) <= 2 and getattr(b, "ndim", 0) <= 2:
        return None
    from weft.operators.matmul import batched_matmul

    return batched_matmul


@matmul.choice
@guarded
def choose(a: Tensor, b: Tensor, precision: str | None = None) -> Choice:
    if batched := of_batches(a, b):
        choice: Choice = batched.checked(a, b, precision, "matmul")[2]
        return choice
    a, b = cast_for_products(a, b)
    check(a, b, precision)
    if not on_gpu(a):
        return Choice("torch", "the tensors are on the CPU, where weft runs PyTorch's product in full precision")
    if a.shape[0] * b.shape[1] == 0:
        return Choice("torch", "empty: nothing to launch")
    if precision == "tf32x3" and a.dtype == torch.float32:
        return Choice("triton", "PyTorch has no 3×tf32 product", plans)
    if a.dtype != torch.float32 and target_sm(a.device) == 90:
        if traced(a, b):
            return Choice("torch", "traced: PyTorch's own product, which a compiler sees")
        if reason := gemm.why_not(a, b, a.dtype):
            return Choice("torch", reason)
        return Choice(
            "cuda", "TMA, wgmma and warps that only fetch: level with cuBLAS in the mean (README)", gemm.plans
        )
    return Choice("torch", "cuBLAS is the faster one at the shapes measured (README of the operator)")


def _public_plan(a: Tensor, b: Tensor, precision: str | None) -> Any:
    choice = choose(a, b, precision)
    return (
        None
        if choice.plans is None
        else choice.plan_for(a, b, *([precision] if choice.implementation == "triton" else []))
    )


public_plans = Plans(_public_plan)


@matmul.function
def matmul_function(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    """Product of two matrices, or of batches of them as ``batched_matmul``.

    Args:
        a: [M, K], or [..., M, K]; float32, float16 or bfloat16, any strides.
        b: [K, N], or [..., K, N], of a's dtype and device.
        precision: of fp32 products: ``ieee``, ``tf32`` or ``tf32x3``; None follows
            ``torch.get_float32_matmul_precision()``. Without meaning for 16-bit inputs.

    Returns:
        [M, N], or [..., M, N], of a's dtype, accumulated in fp32. Under autocast both inputs are cast as ``torch.mm`` does.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: fewer than two dimensions, inner dimensions or devices that differ, an unknown precision.
    """
    if batched := of_batches(a, b):
        out: Tensor = batched.product(a, b, precision, "matmul")
        return out
    if eager(a, b) and (plan := public_plans.of((a, b), precision)) is not None:
        c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
        plan(a, b, c)
        return c
    a, b = cast_for_products(a, b)
    chosen = choose(a, b, precision).implementation
    if chosen == "torch":
        return cublas(a, b, precision) if a.is_cuda and precision != "tf32x3" else reference(a, b)
    if chosen == "cuda":
        return hopper_op(a, b)
    return torch.ops.weft.matmul(a, b, precision or default_precision())
