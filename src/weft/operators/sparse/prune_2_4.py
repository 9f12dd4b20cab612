"""``prune_2_4(x)``: the two largest magnitudes of every four consecutive elements, zeros for the others.

One read, one write, twelve comparisons for four elements: bandwidth is the limit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants
from weft.operators.call import Choice, check_tensor, guarded
from weft.operators.random_inputs import random_tensor
from weft.operators.sparse.dispatch import PRUNE_2_4
from weft.operators.sparse.semi_structured import kept_of_four


def reference(x: Tensor) -> Tensor:
    """The same numbers in any dtype: kept ones as they are."""
    groups = x.reshape(x.shape[0], x.shape[1] // 4, 4)
    kept = torch.zeros(groups.shape, dtype=torch.bool, device=x.device).scatter(-1, kept_of_four(x), True)
    return torch.where(kept, groups, 0).view(x.shape)


def prune_triton(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        PRUNE_2_4.kernel("triton").of((x,))(x, y)
    return y


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [M, K]; ``levels=few``: of five values, so that ties abound."""
    x = random_tensor(
        g,
        (w["M"], w["K"]),
        w.dtype,
        device,
        layout=w.option("layout", "contiguous"),
        values=w.option("values", "normal"),
    )
    if w.option("levels") == "few" and device != "meta":
        x.copy_(x.clamp(-2, 2).round())
    return {"x": x}


def cost(w: Workload, direction: str) -> Cost:
    n = w["M"] * w["K"]
    return Cost(reads=n * w.bytes_per_element, writes=n * w.bytes_per_element, vector_flops=3 * n)


def _ties_to_the_last(x: Tensor) -> Tensor:
    return reference(x.flip(1)).flip(1)


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
    options={
        "layout": ("contiguous", "unaligned", "sliced", "strided", "transposed"),
        "values": ("normal", "nonfinite", "large", "tiny"),
        "levels": ("few",),
    },
    tolerance=Tolerance(exact=True),
    workloads={
        "verify": [
            *(workload(M=m, K=k) for m, k in ((1, 4), (7, 36), (33, 128), (3, 1000), (0, 8), (5, 0))),
            *(workload(M=9, K=40, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
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
        Mutant("ties to the last", _ties_to_the_last),
        Mutant("half of all instead of two of four", _two_of_the_row),
        Mutant("largest values instead of magnitudes", _signed),
    ],
)

prune_2_4.implementation("triton", arch=">=sm_80")(prune_triton)
prune_2_4.implementation("torch")(reference)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(x: Tensor) -> None:
    check_tensor("prune_2_4", "x", x)
    if x.ndim != 2 or x.shape[1] % 4:
        raise ValueError(
            f"prune_2_4: argument 'x' has shape {tuple(x.shape)}; expected a matrix with a multiple of 4 columns"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError("prune_2_4: it has no gradient; expected a call under torch.no_grad()")


@prune_2_4.choice
@guarded
def choose(x: Tensor) -> Choice:
    check(x)
    return PRUNE_2_4.choose(x)


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
