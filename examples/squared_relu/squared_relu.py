"""``squared_relu(x, scale)``: scale · max(x, 0)² (So et al. 2021, arXiv 2109.08668). One pass: bandwidth is the limit.

A whole operator with its gradient: docs/adding-an-operator.md says how to try it, and what each part is for."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.call import Choice, guarded, on_gpu
from weft.operators.checks import check_tensor
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import Plan, Plans
from weft.operators.random_inputs import random_tensor


@triton.jit
def forward(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    """y = scale · max(x, 0)², n elements side by side."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: more than 2**31 elements
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    x = tl.where(x < 0, 0.0, x)  # tl.maximum would lose NaN
    tl.store(y_ptr + i, (scale * (x * x)).to(y_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def backward(x_ptr, dy_ptr, dx_ptr, n, scale, BLOCK: tl.constexpr):
    """dx = 2 scale max(x, 0) dy."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    dy = tl.load(dy_ptr + i, mask=i < n).to(tl.float32)
    dx = tl.where(x < 0, 0.0, 2 * scale * x * dy)
    tl.store(dx_ptr + i, dx.to(dx_ptr.dtype.element_ty), mask=i < n)


# ---- which kernel, when, why -----------------------------------------------------------------------------------------


@dataclass
class Elements(Call):
    """A forward call, checked: what conditions and launches look at. Tensors first, as the tables are given them."""

    x: Tensor
    scale: float

    def __post_init__(self) -> None:
        check_tensor("squared_relu", "x", self.x)
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float)):
            raise TypeError(f"squared_relu: argument 'scale' is {self.scale!r:.40}; expected a number")


@dataclass
class Gradient(Call):
    x: Tensor
    dy: Tensor
    scale: float


def unsupported(c: Any) -> str:
    contiguous = c.x.is_contiguous() and (not isinstance(c, Gradient) or c.dy.is_contiguous())
    return "" if contiguous else "strided: a copy would be needed"


def launch(c: Any) -> Plan:
    n, kernel = c.x.numel(), backward if isinstance(c, Gradient) else forward
    return Plan(kernel, (triton.cdiv(n, 1024),), (n, float(c.scale)), {"BLOCK": 1024})


def cuda_launch(c: Elements) -> CudaPlan:
    n, each = c.x.numel(), 16 // c.x.element_size()
    scalars = (ctypes.c_longlong(n), ctypes.c_float(c.scale))
    source = Path(__file__).with_name("squared_relu.cu")
    return CudaPlan(source, f"squared_relu<{CTYPES[c.x.dtype]}>", (-(-n // (256 * each)), 1), 256, scalars)


def cuda_unsupported(c: Elements) -> str:
    if c.x.numel() % (16 // c.x.element_size()) or not pointer_aligned(c.x):
        return "not a whole number of 16-byte words, or not on 16 bytes"
    return unsupported(c)


CUDA = Route("cuda", lambda c: c.x.numel() >= 2**20, "16-byte accesses", cuda_launch, cuda_unsupported, sm=90)
TRITON = Route("triton", lambda c: True, "one pass over contiguous memory", launch, unsupported)
TORCH = Route("torch", lambda c: True, "strides that do not collapse into one row: a copy would be needed")
FORWARD = Dispatch(Elements, ON_CPU, TRACED, EMPTY, CUDA, TRITON, TORCH)
BACKWARD = Dispatch(Gradient, TRITON)


class SquaredReLU(KernelFunction):
    """Autograd around the kernels of ``plans`` and the table ``BACKWARD``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, plans: Plans) -> Tensor:
        y = torch.empty_like(x)
        if x.numel():
            plans.of((x,), scale)(x, y)
        ctx.save_for_backward(x)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            return 2 * ctx.scale * x.relu() * dy, None, None
        dx, dy = torch.empty_like(x), dy.contiguous()  # autograd may bring any strides
        if x.numel():
            BACKWARD.of((x, dy), ctx.scale)(x, dy, dx)
        return dx, None, None


# ---- definition ------------------------------------------------------------------------------------------------------


def reference(x: Tensor, scale: float = 1.0) -> Tensor:
    return scale * x.relu().square()


def gradient(dy: Tensor, x: Tensor, scale: float = 1.0) -> tuple[Tensor]:
    return (2 * scale * x.relu() * dy,)


def cost(w: Any, direction: str) -> Cost:
    size = w["N"] * w.bytes_per_element
    return Cost(reads=size if direction == "forward" else 2 * size, writes=size, vector_flops=3 * w["N"])


def inputs(w: Any, g: Any, device: str) -> dict[str, Any]:
    x = random_tensor(g, (w["N"],), w.dtype, device, layout=w.option("layout", "contiguous"))
    return {"x": x, "scale": w.option("scale", 1.0)}


squared_relu = Operator(
    name="squared_relu",
    axes={"N": "elements"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": ("contiguous", "strided", "unaligned"), "scale": (1.0, 0.3)},
    differentiable=("x",),
    tolerance=Tolerance(scale="element", ulps=2.0),
    workloads={
        "verify": [
            *(workload(N=n) for n in (0, 1, 1023, 1025)),
            *(workload(N=100, layout=at) for at in ("strided", "unaligned")),
            workload(N=1000, scale=0.3),
        ],
        "bench": [workload(N=2**28)],
        "quick": [workload(N=2**22)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("not squared", lambda x, scale: scale * x.relu()),
        *mutants.usual(gradient, "backward"),
        Mutant("factor left out", lambda dy, x, scale: (scale * x.relu() * dy,), "backward"),
    ],
)


def by(name: str) -> Callable[..., Tensor]:
    """The operator by the kernel of this name."""

    def run(x: Tensor, scale: float = 1.0) -> Tensor:
        if not on_gpu(x):
            return reference(x, scale)
        y: Tensor = differentiable(SquaredReLU, x, scale, FORWARD.kernel(name))
        return y

    return run


squared_relu.implementation("triton", arch=">=sm_80")(by("triton"))
# Without ``directions`` its backward, here Triton's, would be timed under its name.
squared_relu.implementation("cuda", arch=">=sm_90", directions=("forward",))(by("cuda"))
peers.register(squared_relu, reference)


@squared_relu.choice
@guarded
def choose(x: Tensor, scale: float = 1.0, *, direction: str = "forward") -> Choice:
    chosen = FORWARD.choose(x, scale)
    if direction == "forward" or chosen.implementation == "torch":  # then backward is PyTorch's, too
        return chosen
    return BACKWARD.choose(x, x, scale)


@squared_relu.function
def squared_relu_function(x: Tensor, scale: float = 1.0) -> Tensor:
    """``scale · max(x, 0)²``.

    Args:
        x: any shape; float32, float16 or bfloat16.
        scale: a number.

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once.

    Raises:
        TypeError: x is not a tensor of those dtypes, scale is no number.
    """
    chosen = choose(x, scale).implementation
    return reference(x, scale) if chosen == "torch" else by(chosen)(x, scale)
