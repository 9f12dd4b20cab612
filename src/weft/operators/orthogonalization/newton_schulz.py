"""``newton_schulz(x)``: nearly the orthogonal polar factor U·Vᵀ of x = U·S·Vᵀ, by matrix products alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants
from weft.operators.call import eager, guarded, on_gpu
from weft.operators.orthogonalization.calls import implement, matrices, pytorch_operators
from weft.operators.orthogonalization.coefficients import NAMES, Coefficients, Step, margin, schedule
from weft.operators.orthogonalization.dispatch import BY_CUBLAS, BY_TRITON, NEWTON_SCHULZ, ON_HOPPER
from weft.operators.orthogonalization.iteration import by_pytorch, flops, gradient, launched, normalized
from weft.operators.random_inputs import LAYOUTS, VALUES

EPS = 1e-7  # the least norm


def reference(
    x: Tensor, steps: int = 5, coefficients: Coefficients = "classic", *, eps: float = EPS, dtype: torch.dtype | None = None
) -> Tensor:  # fmt: skip
    return by_pytorch(x, schedule(coefficients, steps), margin(coefficients), eps, dtype or x.dtype)


def _triples(flat: Sequence[float]) -> tuple[Step, ...]:
    values = iter(flat)
    return tuple(zip(values, values, values, strict=True))


def by(backend: str) -> Callable[..., Tensor]:
    def newton_schulz(
        x: Tensor, coefficients: list[float], margin: float, eps: float, form: str, dtype: torch.dtype
    ) -> Tensor:
        steps = _triples(coefficients)
        if backend == "cuda":
            return launched(x, steps, margin, eps, form, dtype, ON_HOPPER)
        if not on_gpu(x):
            return by_pytorch(x, steps, margin, eps, dtype)
        by_strips = backend == "strips"
        return launched(x, steps, margin, eps, form, dtype, BY_CUBLAS if by_strips else BY_TRITON, traced=not by_strips)

    return newton_schulz


def fake(x: Tensor, coefficients: list[float], margin: float, eps: float, form: str, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def backward(dy: Tensor, x: Tensor, flat: list[float], margin: float, eps: float, form: str, dtype: Any) -> Tensor:
    return gradient(dy, x, _triples(flat), margin, eps, dtype)


OPERATORS = pytorch_operators("newton_schulz", by, fake, backward)


def _through_op(
    name: str, x: Tensor, steps: int, coefficients: Coefficients, eps: float, dtype: torch.dtype | None
) -> Tensor:
    """The kernel of this name where autograd or a compiler is to see the call."""
    flat = [value for triple in schedule(coefficients, steps) for value in triple]
    backend, _, form = name.partition("-")
    return OPERATORS[backend](x, flat, margin(coefficients), eps, form or "symmetric", dtype or x.dtype)


def kernel(name: str) -> Callable[..., Tensor]:
    def implementation(x: Tensor, steps: int = 5, coefficients: Coefficients = "classic", eps: float = EPS) -> Tensor:
        plan = NEWTON_SCHULZ.kernel(name).of((x,), steps, coefficients, eps)  # declines what it does not support
        return plan(x) if eager(x, autocast=True) else _through_op(name, x, steps, coefficients, eps, None)

    return implementation


def quack(x: Tensor, steps: int = 5, coefficients: Coefficients = "classic") -> Tensor:
    from quack.gemm_interface import gemm_add, gemm_symmetric

    if x.ndim > 3:
        raise Declined("QuACK's GEMMs take one batch dimension")
    y = normalized(x, margin(coefficients), EPS, x.dtype)
    if tall := y.shape[-2] > y.shape[-1]:
        y = y.mT
    for a, b, c in schedule(coefficients, steps):
        g = gemm_symmetric(y, y.mT)
        y = gemm_add(gemm_symmetric(g, g, g, alpha=c, beta=b), y, y, beta=a, tuned=False)
    return (y.mT if tall else y).contiguous()


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    steps, coefficients = w.option("steps", 5), w.option("coefficients", "classic")
    return {"x": matrices(w, g, device), "steps": steps, "coefficients": coefficients}


def cost(w: Workload, direction: str) -> Cost:
    """Operations of the form that has the fewest for the shape: what can be left out is not compulsory."""
    b, m, n, size = w["B"], w["M"], w["N"], w.bytes_per_element
    fewest = min(flops(form, m, n, w.option("steps", 5)) for form in ("symmetric", "gram"))
    return Cost(b * m * n * size, b * m * n * size, {w.dtype: 1.0 * b * fewest}, vector_flops=3.0 * b * m * n)


def _one_step_less(x: Tensor, steps: int = 5, coefficients: Coefficients = "classic") -> Tensor:
    return by_pytorch(x, schedule(coefficients, steps)[:-1], margin(coefficients), EPS, x.dtype)


def _normalised_together(x: Tensor, steps: int = 5, coefficients: Coefficients = "classic") -> Tensor:
    norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).clamp_min(EPS) * 4
    return by_pytorch((x / norm).to(x.dtype), schedule(coefficients, steps), 1.0, 1.0, x.dtype)


def _sum_kept_in_bf16(x: Tensor, steps: int = 5, coefficients: Coefficients = "classic") -> Tensor:
    return by_pytorch(x, schedule(coefficients, steps), margin(coefficients), EPS, torch.bfloat16).to(x.dtype)


def _terms(w: Workload) -> int:
    return w.option("steps", 5) * (2 * min(w["M"], w["N"]) + max(w["M"], w["N"]))


def _workspace(w: Workload) -> int:
    """A second X, and five matrices of the smaller side (two in the symmetric form)."""
    small = min(w["M"], w["N"])
    return w["B"] * (w["M"] * w["N"] + 5 * small * small) * w.bytes_per_element


SHAPES = (*((1, m, n) for m, n in ((2048, 2048), (2048, 8192), (4096, 4096), (8192, 8192))), (16, 2048, 2048))
BENCH = tuple(workload("bf16", B=b, M=m, N=n) for b, m, n in SHAPES)

newton_schulz = Operator(
    name="newton_schulz",
    axes={"B": "matrices", "M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": LAYOUTS, "values": VALUES, "steps": range(1, 100), "coefficients": NAMES},
    # every step rounds three results, after the quotient
    tolerance=Tolerance(scale="tensor", ulps=8.0, terms=_terms),
    workspace=_workspace,
    workloads={
        "verify": [
            *workloads("BMN", (1, 1, 1), (1, 1, 40), (1, 40, 1), (1, 16, 16), (1, 33, 65), (1, 65, 33), (1, 17, 100)),
            *workloads("BMN", (3, 5, 7), (3, 20, 32), (1, 0, 5), (1, 5, 0), (0, 3, 4)),
            *(workload(B=1, M=40, N=64, coefficients="polar-express", steps=steps) for steps in (1, 5, 9)),
            *(workload(B=1, M=20, N=32, layout=at) for at in LAYOUTS[1:-1]),
            *(workload(B=2, M=33, N=16, layout=at) for at in ("transposed", "expanded")),
            workload(B=1, M=24, N=40, values="nonfinite"),
        ],
        "full": [workload(B=2, M=100, N=200), workload(B=1, M=256, N=256)],
        "bench": BENCH,
        "quick": [workload("bf16", B=1, M=2048, N=2048)],
        "host": [workload(B=1, M=64, N=64)],
        "compile": [
            *workloads("BMN", (1, 2048, 8192), (1, 4096, 1024), dtype="bf16"),
            workload("fp16", B=4, M=500, N=1000),
            workload("fp32", B=1, M=2048, N=2048),
        ],
        "tune": BENCH,
        "model": [workload("bf16", B=32, M=4096, N=n) for n in (4096, 14336)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("one step less", _one_step_less),
        Mutant("the other coefficients", mutants.changed(reference, coefficients=lambda given: (2.0, -1.5, 0.5))),
        Mutant("batch normalised together", _normalised_together),
        Mutant("computed in bf16", _sum_kept_in_bf16),
    ],
)

implement(newton_schulz, kernel, quack, "triton", "triton-gram", "cuda", "cuda-gram", "strips")
choose = newton_schulz.choice(guarded(NEWTON_SCHULZ.choose))


@newton_schulz.function
def newton_schulz_function(
    x: Tensor, steps: int = 5, coefficients: Coefficients = "classic", *, eps: float = EPS, form: str = "auto",
    dtype: dtype | None = None,
) -> Tensor:  # fmt: skip
    """Orthogonalises matrices: nearly U·Vᵀ for x = U·S·Vᵀ, by Newton–Schulz iterations.

    The method is that of Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Bernstein and Newhouse 2024,
    arXiv 2409.20325).

    Args:
        x: [..., M, N], matrices of their own; float32, float16 or bfloat16, any strides. The sum of a matrix's squares must be
            within fp32's range.
        steps: 1 … 99.
        coefficients: ``classic``, ``polar-express``, three numbers (a, b, c) for all steps, or three for each step.
        eps: the least norm that a matrix is divided by, so that zeros stay zeros.
        form: ``symmetric``, ``gram`` (fewer operations on wide or tall matrices, in fp16 where dtype is bfloat16), or ``auto``
            for gram where it has fewer than 90 % of the operations, dtype is bfloat16 and coefficients are named ones.
        dtype: that the products are computed in and the result has; None for x's.

    Returns:
        [..., M, N], contiguous. The norm is taken and divided by in fp32, before any cast; products are accumulated in fp32.
        Autocast changes nothing. A matrix with NaN or infinities becomes NaN.

    Raises:
        TypeError: not a tensor of those dtypes, another dtype.
        ValueError: not a matrix or a batch of them; steps, coefficients, eps or form that are not as above.

    The gradient is that of the iteration, by PyTorch's products; its steps are computed again.
    """
    if eager(x, autocast=True):
        plan = NEWTON_SCHULZ.of((x,), steps, coefficients, eps, form, dtype)
        if plan is not None:
            return plan(x)
    chosen = choose(x, steps, coefficients, eps=eps, form=form, dtype=dtype).implementation
    if chosen == "torch":
        return reference(x, steps, coefficients, eps=eps, dtype=dtype)
    return _through_op(chosen, x, steps, coefficients, eps, dtype)
