"""``vector_add(x, y)``: the smallest operator, complete in this file: read it first. All others have the same parts.

It reads two tensors, writes one and does one addition an element: 1/12 FLOP per byte in fp32, so memory bandwidth is
its only limit and the ceiling is the machine's streaming rate at two reads for one write.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.call import eager, guarded, on_gpu
from weft.operators.checks import check_alike, check_tensor
from weft.operators.configs import Configurations, bucket, tiles
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.elementwise.add import forward as plus
from weft.operators.elementwise.dispatch import NO_ROWS, laid_out, map_plan
from weft.operators.launch import Plan
from weft.operators.layout import dense
from weft.operators.random_inputs import OF_VECTORS, vectors

# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def add_flat(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out[i] = x[i] + y[i] for i < n; all three are dense in the same order. One program adds BLOCK elements.

    The sum is taken in fp32 and rounded once, as PyTorch does.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK  # int64: tensors may hold more than 2**31 elements
    i = first + tl.arange(0, BLOCK)
    if first + BLOCK <= n:  # reads of 16 bytes: a mask would allow them only where vectors of this size divide n
        x = tl.load(x_ptr + i, eviction_policy="evict_last").to(tl.float32)
        y = tl.load(y_ptr + i, eviction_policy="evict_last").to(tl.float32)
        tl.store(out_ptr + i, (x + y).to(out_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + i, mask=i < n, eviction_policy="evict_last").to(tl.float32)
        y = tl.load(y_ptr + i, mask=i < n, eviction_policy="evict_last").to(tl.float32)
        tl.store(out_ptr + i, (x + y).to(out_ptr.dtype.element_ty), mask=i < n)


# ---- launches --------------------------------------------------------------------------------------------------------


@dataclass
class Sum(Call):
    """The arguments of a call, checked, and what the table's conditions and launches need to know of them."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        check_tensor("vector_add", "x", self.x)
        check_tensor("vector_add", "y", self.y)
        check_alike("vector_add", "y", self.y, "x", self.x)

    @property
    def flat(self) -> bool:
        """Whether x, y and the result are dense in the same order of dimensions."""
        return self.x.stride() == self.y.stride() and dense(self.x)


def not_flat(c: Sum) -> str:
    return "" if c.flat else "of several strides"


def no_rows(c: Sum) -> str:
    return NO_ROWS if laid_out(c.x, c.y, torch.empty_like(c.x, device="meta")) is None else ""


# at most 64 elements a thread: 128 spill registers
candidates = tiles({"BLOCK": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)}, 0, 64, of=("BLOCK",))
SMALL, LARGE = 2**20, 2**26  # elements between which configurations depend on the size
configuration = Configurations(__file__, "vector_add", {"BLOCK": 1024, "num_warps": 4}, candidates)


def flat_plan(c: Sum) -> Plan:
    n = c.x.numel()
    config = configuration(c.x.device, c.x.dtype, min(max(bucket(n), SMALL), LARGE))
    block = config["BLOCK"]
    return Plan(add_flat, (triton.cdiv(n, block),), (n,), {"BLOCK": block}, config["num_warps"])


def rows_plan(c: Sum) -> Plan:
    """For other strides the kernel that all element-wise operators share, with the formula of ``add``."""
    return map_plan(plus, (c.x, c.y), (torch.empty_like(c.x, device="meta"),))


# ---- which kernel a call takes: the first row that applies -----------------------------------------------------------

FORWARD = Dispatch(
    Sum, ON_CPU, TRACED, EMPTY,
    Route("triton", lambda c: True, "dense tensors in one order are one stretch of memory", flat_plan, not_flat),
    Route("triton", lambda c: True, "row-strided tensors", rows_plan, no_rows),
    Route("torch", lambda c: True, NO_ROWS),
)  # fmt: skip

# ---- implementations -------------------------------------------------------------------------------------------------


def reference(x: Tensor, y: Tensor) -> Tensor:
    return x + y


class Add(KernelFunction):
    """The kernel under autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if out.numel():
            FORWARD.kernel("triton").of((x, y))(x, y, out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        return dout, dout


def add_triton(x: Tensor, y: Tensor) -> Tensor:
    """Our kernel, whatever the table says (on CPU tensors the reference)."""
    return differentiable(Add, x, y) if on_gpu(x) else reference(x, y)


# ---- definition: what verifier, timer, roofline and docs need to know ------------------------------------------------


vector_add = Operator(
    name="vector_add",
    axes={"N": "elements"},
    inputs=lambda w, g, device: vectors("vector_add", ("x", "y"), w, g, device),
    reference=reference,
    cost=lambda w, direction: Cost(
        reads=2 * w["N"] * w.bytes_per_element, writes=w["N"] * w.bytes_per_element, vector_flops=w["N"]
    ),
    options=OF_VECTORS,
    tolerance=Tolerance(exact=True),
    workloads={
        "verify": [
            *(workload(N=n) for n in (1, 2, 1023, 1025, 4096, 0)),
            *(workload(N=1002, layout=layout) for layout in ("unaligned", "contiguous+unaligned", "strided")),
            *(
                workload(N=21 * 50, rows=21, layout=layout)
                for layout in ("sliced", "transposed", "sliced+transposed", "expanded+contiguous", "strided")
            ),
            *(workload(N=2000, values=values) for values in ("nonfinite", "large")),
        ],
        "bench": [workload(N=n) for n in (2**20, 2**24, 2**28)],
        "quick": [workload(N=2**22)],
        "cpu": [workload("fp32", N=2**25)],  # 128 MiB a tensor: larger than caches
        "compile": [workload(N=2**20), workload(N=42 * 50, rows=42, layout="sliced")],
        "tune": [workload(d, N=n) for n in (2**20, 2**22, 2**24, 2**26) for d in ("fp32", "bf16")],
        "huge": [workload("bf16", N=2**31 + 17)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("x twice", lambda x, y: x + x),
        Mutant("rounded twice", lambda x, y: (x.double() + y.double() * (1 + 2**-9)).to(x.dtype)),
    ],
)

vector_add.implementation("triton", arch=">=sm_80")(add_triton)
peers.register(vector_add, reference)

# ---- what users call -------------------------------------------------------------------------------------------------


choose = vector_add.choice(guarded(FORWARD.choose))


@vector_add.function
def vector_add_function(x: Tensor, y: Tensor) -> Tensor:
    """Element-wise sum of two tensors.

    Args:
        x: any shape; float32, float16 or bfloat16.
        y: the same shape, dtype and device.

    Returns:
        ``x + y``, rounded once from fp32; the same bits as PyTorch's.

    Raises:
        TypeError: not tensors, or dtypes that differ or are not floating-point.
        ValueError: shapes or devices that differ.
    """
    if eager(x, y) and (plan := FORWARD.of((x, y))) is not None:  # past PyTorch's dispatcher
        out = torch.empty_like(x)
        plan(x, y, out)
        return out
    return reference(x, y) if choose(x, y).implementation == "torch" else add_triton(x, y)
