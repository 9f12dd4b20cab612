"""``prune_2_4(x)``: the two largest magnitudes of every four consecutive elements, zeros for the others."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants
from weft.operators.call import guarded
from weft.operators.checks import check_shape, check_tensor
from weft.operators.configs import Configurations, tiles
from weft.operators.dispatch import ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING, Plan
from weft.operators.random_inputs import LAYOUTS, drawn
from weft.operators.sparse.semi_structured import kept_of_four


@triton.jit
def magnitude(x):
    size = tl.abs(x.to(tl.float32))
    return tl.where(size == size, size, float("inf"))


@triton.jit
def keep_two_of_four(x_ptr, y_ptr, N, in_row, row_stride, col_stride, FLAT: tl.constexpr, TILE: tl.constexpr):
    """A tile of groups: of equal magnitudes the earlier stays; NaN counts as infinite. FLAT: x is contiguous."""
    base = tl.program_id(0).to(tl.int64) * TILE * 4
    at = base + tl.arange(0, TILE * 4)
    inside = at < N
    if FLAT:
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
    else:
        row, col = at // in_row, at % in_row
        x = tl.load(x_ptr + row * row_stride + col * col_stride, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x, [TILE, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    m0, m1, m2, m3 = magnitude(x0), magnitude(x1), magnitude(x2), magnitude(x3)
    b0 = (m1 > m0).to(tl.int32) + (m2 > m0).to(tl.int32) + (m3 > m0).to(tl.int32)
    b1 = (m0 >= m1).to(tl.int32) + (m2 > m1).to(tl.int32) + (m3 > m1).to(tl.int32)
    b2 = (m0 >= m2).to(tl.int32) + (m1 >= m2).to(tl.int32) + (m3 > m2).to(tl.int32)
    b3 = (m0 >= m3).to(tl.int32) + (m1 >= m3).to(tl.int32) + (m2 >= m3).to(tl.int32)
    zero = tl.zeros_like(x0)
    y0, y1 = tl.where(b0 < 2, x0, zero), tl.where(b1 < 2, x1, zero)
    y2, y3 = tl.where(b2 < 2, x2, zero), tl.where(b3 < 2, x3, zero)
    y = tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), [TILE * 4])
    tl.store(y_ptr + at, y, mask=inside)


groups_of_four = tiles({"TILE": (256, 512, 1024, 2048), "num_warps": (2, 4, 8)}, 2, 8)
configuration = Configurations(__file__, "prune_2_4", {"TILE": 512, "num_warps": 4}, groups_of_four)


@dataclass
class PruneCall(Call):
    """A plan is called with ``(x, y)``, y contiguous."""

    x: Tensor

    def __post_init__(self) -> None:
        x = self.x
        check_tensor("prune_2_4", "x", x, sharded=False)
        check_shape("prune_2_4", "x", x, x.ndim == 2 and x.shape[1] % 4 == 0, "a matrix with a multiple of 4 columns")
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError("prune_2_4: it has no gradient; expected a call under torch.no_grad()")


def prune_plan(c: PruneCall) -> Plan:
    x = c.x
    config = configuration(x.device, x.dtype)
    groups, tile = x.numel() // 4, 64 if INTERPRETING else config["TILE"]
    scalars = (x.numel(), x.shape[1], *x.stride())
    constants = {"FLAT": x.is_contiguous(), "TILE": tile}
    return Plan(keep_two_of_four, (triton.cdiv(groups, tile),), scalars, constants, config["num_warps"])


FORWARD = Dispatch(
    PruneCall, ON_CPU, TRACED,
    Route("triton", lambda c: True, "groups of four as they lie, one read and one write", prune_plan),
)  # fmt: skip


def reference(x: Tensor) -> Tensor:
    """The same numbers in any dtype: kept ones as they are."""
    groups = x.reshape(x.shape[0], x.shape[1] // 4, 4)
    kept = torch.zeros(groups.shape, dtype=torch.bool, device=x.device).scatter(-1, kept_of_four(x), True)
    return torch.where(kept, groups, 0).view(x.shape)


def prune_triton(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        FORWARD.kernel("triton").of((x,))(x, y)
    return y


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [M, K]; ``levels=few``: of five values, so that ties abound."""
    if w["K"] % 4:
        raise ValueError(f"prune_2_4: K is {w['K']}; expected a multiple of 4")
    x = drawn(w, g, device, w["M"], w["K"])
    if w.option("levels") == "few" and device != "meta":
        x.copy_(x.clamp(-2, 2).round())
    return {"x": x}


def cost(w: Workload, direction: str) -> Cost:
    n = w["M"] * w["K"]
    return Cost(reads=n * w.bytes_per_element, writes=n * w.bytes_per_element, vector_flops=3 * n)


def _two_of_the_row(x: Tensor) -> Tensor:
    """The larger half of all, not two of each four."""
    middle = x.float().abs().nan_to_num(torch.inf).flatten().sort().values[x.numel() // 2]
    return torch.where(x.abs() >= middle, x, 0)


def _signed(x: Tensor) -> Tensor:
    """The two largest values, not magnitudes."""
    groups = x.reshape(x.shape[0], -1, 4)
    top = groups.float().nan_to_num(torch.inf).topk(2).indices
    return torch.where(torch.zeros_like(groups, dtype=torch.bool).scatter(-1, top, True), groups, 0).view(x.shape)


prune_2_4 = Operator(
    name="prune_2_4",
    axes={"M": "rows", "K": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": LAYOUTS[:-1], "values": ("normal", "nonfinite", "large", "tiny"), "levels": ("few",)},
    tolerance=Tolerance(exact=True),
    workloads={
        "verify": [
            *(workload(M=m, K=k) for m, k in ((1, 4), (7, 36), (33, 128), (3, 1000), (0, 8), (5, 0))),
            *(workload(M=9, K=40, layout=at) for at in LAYOUTS[1:-1]),
            *(workload(M=9, K=40, values=v) for v in ("nonfinite", "large", "tiny")),
            workload(M=20, K=64, levels="few"),
        ],
        "huge": [workload("bf16", M=2**16 + 1, K=2**15)],
        "bench": [workload(t, M=8192, K=8192) for t in ("fp32", "bf16")],
        "quick": [workload("bf16", M=8192, K=8192)],
        "compile": [workload(M=64, K=512), workload(M=64, K=500, layout="sliced")],
        "tune": [workload(t, M=8192, K=8192) for t in ("fp32", "bf16")],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("ties to the last", lambda x: reference(x.flip(1)).flip(1)),
        Mutant("half of all instead of two of four", _two_of_the_row),
        Mutant("largest values instead of magnitudes", _signed),
    ],
)

prune_2_4.implementation("triton", arch=">=sm_80")(prune_triton)
prune_2_4.implementation("torch")(reference)


choose = prune_2_4.choice(guarded(FORWARD.choose))


@prune_2_4.function
def prune_2_4_function(x: Tensor) -> Tensor:
    """The two largest magnitudes of every four consecutive elements of a row; zeros for the others.

    Args:
        x: [M, K], K a multiple of 4; float32, float16 or bfloat16, any strides.

    Returns:
        [M, K] of x's dtype, contiguous. Of equal magnitudes the earlier element stays; NaN counts as infinite.

    Raises:
        TypeError: not a tensor of those dtypes.
        ValueError: not a matrix with a multiple of 4 columns.
        NotImplementedError: a gradient is wanted.

    Magnitude pruning to 2:4: Mishra et al., "Accelerating sparse deep neural networks", 2021 (arXiv 2104.08378).
    """
    return reference(x) if choose(x).implementation == "torch" else prune_triton(x)
