"""``vector_add(x, y)``: the smallest operator, and the one that shows how all others are written.

It reads two tensors, writes one and does one addition an element: 1/12 FLOP per byte in fp32, so memory bandwidth is
its only limit and the ceiling is the machine's streaming rate at two reads for one write.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, check_same, check_tensor, dense, eager, guarded, on_gpu, rows_of, views
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import Plan, Plans
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def add_flat(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out[i] = x[i] + y[i] for i < n; all three are dense in the same order. One program adds BLOCK elements.

    The sum is taken in fp32 and rounded once, as PyTorch does.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK  # int64: tensors may hold more than 2**31 elements
    i = tl.arange(0, BLOCK)
    inside = i < n - first
    x = tl.load(x_ptr + first + i, mask=inside, eviction_policy="evict_last").to(tl.float32)
    y = tl.load(y_ptr + first + i, mask=inside, eviction_policy="evict_last").to(tl.float32)
    tl.store(out_ptr + first + i, (x + y).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rows(x_ptr, y_ptr, out_ptr, N, x_row, x_col, y_row, y_col, out_row, out_col, BLOCK: tl.constexpr):
    """The same over [M, N] views with any two strides each; one program adds BLOCK columns of one row."""
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = col < N
    x = tl.load(x_ptr + row * x_row + col * x_col, mask=inside, eviction_policy="evict_last").to(tl.float32)
    y = tl.load(y_ptr + row * y_row + col * y_col, mask=inside, eviction_policy="evict_last").to(tl.float32)
    tl.store(out_ptr + row * out_row + col * out_col, (x + y).to(out_ptr.dtype.element_ty), mask=inside)


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    return {"BLOCK": 1024, "num_warps": 4}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = grid_of({"BLOCK": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)})
    return [c for c in every if c["BLOCK"] // (32 * c["num_warps"]) <= 64]  # 128 a thread spill registers


SMALL, LARGE = 2**20, 2**26  # elements between which configurations depend on the size
configuration = Configurations(__file__, "vector_add", heuristic, candidates)


def plan(x: Tensor, y: Tensor) -> Plan:
    """The launch that adds x and y of one shape into ``torch.empty_like(x)``.

    Raises:
        Declined: strides that do not collapse into rows, for which a copy would be needed.
    """
    if flat(x, y):
        config = configuration(x.device, x.dtype, min(max(bucket(x.numel()), SMALL), LARGE))
        n, block = x.numel(), config["BLOCK"]
        return Plan(add_flat, (triton.cdiv(n, block),), (n,), {"BLOCK": block}, config["num_warps"])
    (m, n, *x_strides), (_, _, *y_strides), (_, _, *out_strides) = views(x, y, torch.empty_like(x, device="meta"))
    block = min(1024, bucket(n, 16))
    grid = (m * triton.cdiv(n, block),)
    return Plan(add_rows, grid, (n, *x_strides, *y_strides, *out_strides), {"BLOCK": block})


def flat(x: Tensor, y: Tensor) -> bool:
    return x.stride() == y.stride() and dense(x)


def why_not(x: Tensor, y: Tensor) -> str:
    """Why our kernel does not take these strides (an empty string when it does)."""
    if flat(x, y) or x.numel() == 0:
        return ""
    views = [rows_of(t) for t in (x, y, torch.empty_like(x, device="meta"))]
    if None in views:
        return "the strides of 'x' or 'y' do not collapse into rows, so a copy would be needed"
    return ""


plans = Plans(plan)

# ---- functions -------------------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::vector_add", mutates_args=())
def add_op(x: Tensor, y: Tensor) -> Tensor:
    if not on_gpu(x):
        return x + y
    out = torch.empty_like(x)
    if out.numel():
        plans.of((x, y))(x, y, out)
    return out


add_op.register_autograd(lambda ctx, grad: (grad, grad))


def check(x: Tensor, y: Tensor) -> None:
    check_tensor("vector_add", "x", x)
    check_tensor("vector_add", "y", y)
    check_same("vector_add", "y", y, "x", x)
    if x.shape != y.shape:
        raise ValueError(
            f"vector_add: argument 'y' has shape {tuple(y.shape)} and 'x' has {tuple(x.shape)}; expected the same shape"
        )


def add_triton(x: Tensor, y: Tensor) -> Tensor:
    if eager(x, y) and x.numel():
        out = torch.empty_like(x)
        plans.of((x, y))(x, y, out)
        return out
    return torch.ops.weft.vector_add(x, y)


def reference(x: Tensor, y: Tensor) -> Tensor:
    return x + y


vector_add = Operator(
    name="vector_add",
    axes={"N": "elements"},
    inputs=lambda w, g, device: {
        name: random_tensor(g, shape(w), w.dtype, device, layout=layout, values=w.option("values", "normal"))
        for name, layout in zip(("x", "y"), w.option("layout", "contiguous").split("+") * 2, strict=False)
    },
    reference=reference,
    cost=lambda w, direction: Cost(
        reads=2 * w["N"] * w.bytes_per_element, writes=w["N"] * w.bytes_per_element, vector_flops=w["N"]
    ),
    options={
        "layout": (*LAYOUTS, *(f"{x}+{y}" for x in LAYOUTS for y in LAYOUTS)),  # of both, or of x and of y
        "values": VALUES,
        "rows": range(1, 2**31),
    },
    tolerance=Tolerance(exact=True),
    workloads={
        "verify": [
            *(workload(N=n) for n in (1, 2, 1023, 1025, 4096)),
            workload(N=0),
            *(workload(N=1002, layout=layout) for layout in ("unaligned", "contiguous+unaligned", "strided")),
            *(
                workload(N=21 * 50, rows=21, layout=layout)
                for layout in ("sliced", "transposed", "sliced+transposed", "expanded+contiguous", "strided")
            ),
            workload(N=2000, values="nonfinite"),
            workload(N=2000, values="large"),
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


def shape(w: Workload) -> tuple[int, ...]:
    rows = w.option("rows", 0)
    if rows and w["N"] % rows:
        raise ValueError(f"workload '{w}' of 'vector_add': rows is {rows}; expected a divisor of N")
    return (rows, w["N"] // rows) if rows else (w["N"],)


vector_add.implementation("triton", arch=">=sm_80")(add_triton)
vector_add.implementation("torch")(reference)
vector_add.implementation("torch.compile", devices=("cuda",))(peers.Compiled(reference))


@vector_add.choice
@guarded
def choose(x: Tensor, y: Tensor) -> Choice:
    check(x, y)
    if not on_gpu(x):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if not x.numel():
        return Choice("torch", "empty tensors: nothing to launch")
    if reason := why_not(x, y):
        return Choice("torch", reason)
    return Choice("triton", "dense or row-strided tensors", plans)


public_plans = Plans(lambda x, y: choose(x, y).plan_for(x, y))


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
    if eager(x, y) and (plan := public_plans.of((x, y))) is not None:
        out = torch.empty_like(x)
        plan(x, y, out)
        return out
    return reference(x, y) if choose(x, y).implementation == "torch" else torch.ops.weft.vector_add(x, y)
