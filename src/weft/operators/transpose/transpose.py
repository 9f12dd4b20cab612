"""``transpose(x)``: the last two axes exchanged and the result laid out in memory, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.call import Choice, eager, guarded, on_gpu
from weft.operators.launch import Plans
from weft.operators.random_inputs import LAYOUTS, VALUES, drawn
from weft.operators.transpose.dispatch import BACKWARD, FORWARD, TransposeCall, matrices_of


def reference(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
    return x.transpose(dim0, dim1).clone(memory_format=torch.contiguous_format)


def result_like(x: Tensor) -> Tensor:
    """The memory that x.mT is written to: contiguous."""
    return torch.empty((*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype, device=x.device)


class Transpose(KernelFunction):
    """y = x.mT by these plans. The gradient is a transpose by the same plans, itself differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plans: Plans) -> Tensor:
        ctx.plans = plans
        if not on_gpu(x) or not x.numel() or (plan := plans.of((x,))) is None:
            return reference(x)
        y = result_like(x)
        plan(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """dy comes with any strides out of autograd; the table has a kernel for those that the forward's does not take."""
        found = matrices_of(dy)
        return differentiable(Transpose, dy, ctx.plans if found and found.col == 1 else BACKWARD), None


def _by_kernel(name: str) -> Any:
    plans = FORWARD.kernel(name)

    def implementation(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
        if not TransposeCall(x, dim0, dim1).last:
            raise Declined("other axes than the last two")
        return differentiable(Transpose, x, plans)

    return implementation


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [M, N]; [batch, M, N] with that option; [batch, heads, M, N], seen in [batch, M, heads, N], with both."""
    batch, heads = w.option("batch", 0), w.option("heads", 0)
    if heads:
        return {"x": drawn(w, g, device, batch or 1, w["M"], heads, w["N"]).transpose(1, 2)}
    return {"x": drawn(w, g, device, *((batch,) if batch else ()), w["M"], w["N"])}


def cost(w: Workload, direction: str) -> Cost:
    size = w["M"] * w["N"] * w.option("batch", 1) * w.option("heads", 1) * w.bytes_per_element
    return Cost(reads=size, writes=size)


def _tiles_left_as_they_are(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
    """Tiles of 16 x 16 are moved to the right address, but not transposed themselves."""
    y = reference(x)
    m, n = x.shape[-2] // 16 * 16, x.shape[-1] // 16 * 16
    tiles = x[..., :m, :n].unflatten(-2, (-1, 16)).unflatten(-1, (-1, 16)).movedim(-2, -4)
    y[..., :n, :m] = tiles.movedim(-2, -3).flatten(-4, -3).flatten(-2, -1)
    return y


def _first_matrix(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
    y = reference(x)
    return y[:1].expand_as(y).clone() if x.ndim > 2 else y


def _reshaped(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
    return x.reshape(*x.shape[:-2], x.shape[-1], x.shape[-2]).clone()


def _halves_swapped(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
    """Two neighbouring rows exchanged in every second column: a wrong byte permutation."""
    y = reference(x)
    n = y.shape[-1] // 2 * 2
    y[..., 1::2, :n] = y[..., 1::2, :n].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return y


transpose = Operator(
    name="transpose",
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": LAYOUTS, "values": VALUES, "batch": range(1, 2**31), "heads": range(1, 2**31)},
    differentiable=("x",),
    tolerance=Tolerance(exact=True),
    workloads={
        "verify": [
            *workloads("MN", (1, 1), (3, 5), (16, 24), (37, 100), (1, 130), (130, 1), (129, 65)),
            *workloads("MN", (128, 192), (72, 200), (300, 2), (5, 1000), (0, 7), (7, 0)),
            *(workload(M=33, N=48, layout=at) for at in ("unaligned", "sliced", "strided", "transposed", "expanded")),
            workload(M=72, N=88, layout="sliced"),
            workload(M=40, N=50, values="nonfinite"),
            *(workload(M=m, N=n, batch=b) for b, m, n in ((3, 5, 7), (70, 8, 8), (3, 40, 56), (2, 1, 9), (5, 1030, 1))),
            *(workload(M=33, N=40, batch=3, layout=at) for at in ("sliced", "strided", "transposed", "expanded")),
            workload(M=7, N=9, batch=5, layout="expanded"),
            *(workload(M=m, N=n, batch=b, heads=h) for m, n, b, h in ((40, 24, 2, 3), (6, 4, 3, 2))),
        ],
        "full": [workload(M=m, N=n) for m, n in ((4096, 4104), (4095, 4097), (100000, 3), (3, 100000), (256, 65536))],
        "huge": [
            *workloads("MN", (2**16, 2**15 + 8), (2**21 + 1, 1025), (2**31 + 17, 1), dtype="bf16"),
            workload("bf16", M=4, N=8, batch=2**26 + 1),
        ],
        "bench": [
            *workloads("MN", (16384, 16384), (4096, 65536), (65536, 4096), (2**20, 256), (16383, 16385)),
            workload(M=1024, N=1024, batch=256),
            workload(M=4096, N=128, batch=16, heads=32),
        ],
        "quick": [workload(M=2048, N=2048)],
        "ladder": [workload(M=16384, N=16384)],
        "cpu": [workload("fp32", M=4096, N=4096)],
        "compile": [
            *workloads("MN", (1024, 2048), (100, 1000)),
            *(workload(M=m, N=m, batch=b) for m, b in ((64, 16), (8, 1000))),
        ],
        "tune": [
            workload(d, M=n - odd, N=n + odd) for n in (1024, 4096, 16384) for d in ("fp32", "bf16") for odd in (0, 1)
        ],
        "model": [workload("bf16", M=8192, N=2048), workload("bf16", M=2048, N=128, batch=4, heads=32)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("reshaped instead", _reshaped),
        Mutant("tiles not turned", _tiles_left_as_they_are),
        Mutant("halves swapped", _halves_swapped),
        Mutant("one matrix for all", _first_matrix),
        *mutants.usual(lambda dy, x: (reference(dy),), "backward"),
        Mutant("reshaped instead", lambda dy, x: (_reshaped(dy),), "backward"),
    ],
)

transpose.implementation("triton", arch=">=sm_80")(_by_kernel("triton"))
transpose.implementation("cuda", arch=">=sm_80")(_by_kernel("cuda"))
peers.register(transpose, reference)


@transpose.choice
@guarded
def choose(x: Tensor, dim0: int = -2, dim1: int = -1, direction: str = "forward") -> Choice:
    forward = FORWARD.choose(x, dim0, dim1)
    if direction == "forward" or not TransposeCall(x, dim0, dim1).last:
        return forward
    return BACKWARD.choose(result_like(x))


@transpose.function
def transpose_function(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
    """Two axes exchanged, and the result laid out in memory.

    Args:
        x: [..., M, N] of any strides; float32, float16 or bfloat16.
        dim0, dim1: the axes to exchange, in either order. The kernels take the last two; others are copied by PyTorch.

    Returns:
        [..., N, M] of the last two, contiguous, never a view of x (``x.mT`` is that). Under autocast the dtype stays.

    Raises:
        TypeError: x is not a tensor of those dtypes, or an axis not an int.
        ValueError: x has fewer than two axes, or not those of dim0 and dim1.
    """
    if eager(x, gradient=True, autocast=True) and (plan := FORWARD.of((x,), dim0, dim1)) is not None:
        if torch.is_grad_enabled() and x.requires_grad:
            return Transpose.apply(x, FORWARD)
        y = result_like(x)
        plan(x, y)
        return y
    if choose(x, dim0, dim1).implementation == "torch":
        return reference(x, dim0, dim1)
    return differentiable(Transpose, x, FORWARD)
