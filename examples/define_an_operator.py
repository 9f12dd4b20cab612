"""Defines an operator, the sum of each row, and verifies its kernel: right first.

    python examples/define_an_operator.py

The kernel is compared with a float64 reference on every workload, and so are six mutants, which are wrong on purpose:
were one of them to pass, the workloads or the tolerance would be too weak. Without a GPU the kernel runs in Triton's
interpreter.
"""

# ruff: noqa: E402 (the interpreter must be switched on before Triton is imported)

import os
import sys

from weft.hardware.query import has_gpu

DEVICE = "cuda" if has_gpu() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl

from weft.bench import verify
from weft.definition import Cost, Mutant, Operator, Tolerance, workload
from weft.operators import mutants
from weft.operators.launch import Plan
from weft.operators.random_inputs import random_tensor


@triton.jit
def sum_rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """y[m] = sum of x[m, :], in fp32; x is contiguous [M, N], one program a row."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        total += tl.load(x_ptr + row * N + start + col, mask=start + col < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, tl.sum(total, axis=0).to(y_ptr.dtype.element_ty))


def row_sum_triton(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    Plan(sum_rows, grid=(x.shape[0],), scalars=(x.shape[1],), constants={"BLOCK": 256})(x, y)
    return y


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


row_sum = Operator(
    name="row_sum",
    axes={"M": "rows", "N": "columns"},
    inputs=lambda w, g, device: {"x": random_tensor(g, (w["M"], w["N"]), w.dtype, device)},
    reference=reference,
    cost=lambda w, direction: Cost(
        reads=w["M"] * w["N"] * w.bytes_per_element, writes=w["M"] * w.bytes_per_element, vector_flops=w["M"] * w["N"]
    ),
    # The terms cancel, so errors are relative to how large a sum of random signs is, not to the sum itself.
    tolerance=Tolerance(scale=lambda arguments, gradients: [arguments["x"].square().sum(-1).sqrt()]),
    workloads={"verify": [workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (37, 256), (20, 1000), (0, 7), (7, 0))]},
    mutants=[
        *mutants.usual(reference),
        Mutant("last column left out", lambda x: reference(x[:, :-1])),
        Mutant("mean instead of sum", lambda x: reference(x) / max(x.shape[1], 1)),
    ],
)
row_sum.implementation("triton", arch=">=sm_80")(row_sum_triton)


def main() -> int:
    found = verify.verify([row_sum], DEVICE)
    for r in found["results"]:
        error = "" if r["error"] is None else f"error {r['error']:.2f} of what is allowed"
        print(f"{r['status']:13}{r['implementation']:8}{r['workload']:12}{r['dtype']:6}{r['reason'] or error}")
    rejected = found["mutants"] - found["mutants_survived"]
    print(f"{found['checked']} checked, {found['failed']} failed; {rejected} of {found['mutants']} mutants rejected")
    return 1 if found["failed"] or found["mutants_survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
