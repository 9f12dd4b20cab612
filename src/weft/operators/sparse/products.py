"""What sparse products share: the check of their arguments; and of ``spmv`` and ``spmm``, A·b with a CSR A [M, N] and b [N] or
[N, K], the reference, kernels under autograd, random matrices and the definition."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import BYTES, Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype
from weft.operators import mutants
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, cast_for_products
from weft.operators.checks import check_same, check_shape, check_tensor
from weft.operators.configs import bucket
from weft.operators.dispatch import Route
from weft.operators.launch import Plan, Plans
from weft.operators.random_inputs import random_tensor
from weft.operators.sparse.balance import statistics
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.dispatch import KERNELS, SPMV_AND_SPMM, MatrixCall
from weft.operators.sparse.pattern import rows_of_elements


def check_product(
    operator: str, matrix: Any, kinds: Any, hint: str, b: Tensor, expected: str, *, left: str = "matrix",
    right: str = "b", ndim: int = 2, gradient: bool = False,
) -> None:  # fmt: skip
    """Raises unless ``matrix`` is of one of the kinds (``hint``: their names, with how to make one) and b fits it, and where a
    gradient is wanted that the product does not have. ``expected``: the shape of b, ``{}`` being the matrix's columns."""
    if not isinstance(matrix, kinds):
        raise TypeError(
            f"{operator}: argument '{left}' is a {type(matrix).__name__}; expected a weft.operators.sparse.{hint}"
        )
    check_tensor(operator, f"{left}.values", matrix.values, sharded=False)
    check_tensor(operator, right, b, sharded=False)
    check_same(operator, right, b, f"{left}.values", matrix.values)
    fits = b.ndim == ndim and b.shape[0] == matrix.shape[1]
    check_shape(operator, right, b, fits, expected.format(matrix.shape[1]))
    if not gradient and torch.is_grad_enabled() and (b.requires_grad or matrix.values.requires_grad):
        raise NotImplementedError(f"{operator}: it has no gradients; expected a call under torch.no_grad()")


TRACED_DENSE = Route("torch", lambda c: c.traced, "traced: PyTorch's own operators, of a dense matrix")


def cast(matrix: Any, b: Tensor) -> tuple[Any, Tensor]:
    """Both as autocast casts the operands of ``torch.mm``."""
    values, b = cast_for_products(matrix.values, b)
    return (matrix if values is matrix.values else matrix.with_values(values)), b


@triton.jit
def sampled_dots(
    rows_ptr, columns_ptr, dy_ptr, b_ptr, out_ptr, Z, K, dy_row, dy_col, b_row, b_col,
    ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[z] = dy[row of z, :] · b[column of z, :], of ELEMENTS side by side (a sampled dense-dense product, SDDMM)."""
    z = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    row = tl.load(rows_ptr + z, mask=z < Z, other=0).to(tl.int64)[:, None]
    column = tl.load(columns_ptr + z, mask=z < Z, other=0).to(tl.int64)[:, None]
    total = tl.zeros([ELEMENTS, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        k = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        inside = (z[:, None] < Z) & (k < K)
        dy = tl.load(dy_ptr + row * dy_row + k * dy_col, mask=inside, other=0.0).to(tl.float32)
        total += dy * tl.load(b_ptr + column * b_row + k * b_col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + z, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=z < Z)


@Plans
def sampled_plans(rows: Tensor, columns: Tensor, dy: Tensor, b: Tensor) -> Plan:
    """Of ``(rows, columns, dy, b, out)``: dy [M, K], b [N, K]."""
    z, k = len(columns), b.shape[1]
    tile = {"ELEMENTS": max(1024 // bucket(k), 8), "BLOCK": min(bucket(k), 128)}
    return Plan(sampled_dots, (triton.cdiv(z, tile["ELEMENTS"]),), (z, k, *dy.stride(), *b.stride()), tile, num_warps=4)


def gradient_of_values(matrix: CSR, dy: Tensor, b: Tensor) -> Tensor:
    """[Z], of dy [M] and b [N], or dy [M, K] and b [N, K]."""
    out = torch.empty_like(matrix.values)
    if matrix.stored and dy.numel():
        dy, b = (t[:, None] if t.ndim == 1 else t for t in (dy, b))
        rows = rows_of_elements(matrix.row_offsets, matrix.stored)
        sampled_plans.of((rows, matrix.columns, dy, b))(rows, matrix.columns, dy, b, out)
        return out
    return out.zero_()


class _Product(KernelFunction):
    @staticmethod
    def forward(ctx: Any, values: Tensor, b: Tensor, matrix: CSR, kernel: str, transposed: str) -> Tensor:
        # the pattern only so that autograd sees it changed in place before backward
        ctx.save_for_backward(values, b, matrix.row_offsets, matrix.columns)
        ctx.matrix, ctx.kernel = matrix, transposed
        return launch(matrix, b, kernel)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, b, *_ = ctx.saved_tensors
        matrix = ctx.matrix.with_values(values)
        if torch.is_grad_enabled():

            def product(values: Tensor, b: Tensor) -> Tensor:
                return reference(matrix.with_values(values), b)

            return *reference_gradients(product, (values, b), ctx.needs_input_grad[:2], (dy,)), *[None] * 3
        dvalues = gradient_of_values(matrix, dy, b) if ctx.needs_input_grad[0] else None
        db = launch(matrix.transposed(), dy, ctx.kernel) if ctx.needs_input_grad[1] else None
        return dvalues, db, *[None] * 3


# ---- A·b -------------------------------------------------------------------------------------------------------------


def reference(matrix: CSR, b: Tensor) -> Tensor:
    """Products and sums in fp32 or wider; 64 columns at a time, since every product of a stored element is written out."""
    wide = torch.promote_types(matrix.values.dtype, torch.float32)
    values, columns = matrix.values.to(wide), matrix.columns.long()
    rows = rows_of_elements(matrix.row_offsets, matrix.stored)

    def product(part: Tensor) -> Tensor:
        factors = values if part.ndim == 1 else values[:, None]
        out = torch.zeros((matrix.shape[0], *part.shape[1:]), dtype=wide, device=b.device)
        return out.index_add(0, rows, factors * part.to(wide)[columns])

    y = product(b) if b.ndim == 1 else torch.cat([product(part) for part in b.split(64, 1)], 1)
    return y.to(b.dtype)


def in_torch(matrix: CSR, b: Tensor) -> Tensor:
    """cuSPARSE on a GPU, through a ``sparse_csr`` tensor of the same memory."""
    if not matrix.stored or not b.numel() or (not b.is_cuda and b.dtype != torch.float32):
        return reference(matrix, b)  # PyTorch's sparse product on a CPU has no 16-bit kernel
    if b.is_cuda and matrix.stored > matrix.shape[0] * matrix.shape[1]:
        raise Declined("cuSPARSE takes no more elements than the matrix has places")
    make = matrix.to_torch  # once for its values, where they have no history: a user would have it so
    a = make() if matrix.values.requires_grad else matrix.kept_with_values("torch", make)
    return (torch.mv if b.ndim == 1 else torch.mm)(a, b)


def launch(matrix: CSR, b: Tensor, kernel: str) -> Tensor:
    """A·b by one of ``KERNELS``. One column is a vector."""
    shape = (matrix.shape[0], *b.shape[1:])
    if not matrix.stored or not b.shape[1:].numel():
        return b.new_zeros(shape)
    y = b.new_empty(shape)
    if b.ndim == 2 and b.shape[1] == 1:
        KERNELS[kernel](matrix, b[:, 0], y[:, 0])
    else:
        KERNELS[kernel](matrix, b, y)
    return y


def product(matrix: CSR, b: Tensor, kernel: str, transposed: str = "") -> Tensor:
    """A·b under autograd, by one of ``KERNELS`` or by ``torch``, the reference; gradients by that or ``transposed``."""
    if kernel == "torch":
        return reference(matrix, b)
    return differentiable(_Product, matrix.values, b, matrix, kernel, transposed or kernel)


def choice(matrix: CSR, b: Tensor, direction: str) -> Choice:
    """Which kernel a product takes, with the row statistics that it was chosen by."""
    found = SPMV_AND_SPMM.choose(matrix, b)
    if found.implementation == "torch":
        return found
    reason = f"{found.reason} ({statistics(matrix)})"
    if direction != "backward":
        return dataclasses.replace(found, reason=reason)
    kernel = MatrixCall(matrix, b).transposed(found.implementation)
    if kernel != found.implementation:
        return Choice(kernel, f"the transposed matrix, whose rows may be long, in equal parts ({statistics(matrix)})")
    return Choice(kernel, f"the transposed matrix by the kernel of forward: {reason}")


# ---- random matrices: even, random and skewed rows -------------------------------------------------------------------

ZIPF = 1.1  # exponent of skewed rows: the longest of 2^20 has an eighth of all elements, two in five are empty

# Options of a workload of any operator over CSR.
OPTIONS = {
    "rows": ("random", "even", "skewed", "one"),  # where elements fall; `one`: all in the middle row
    "columns": ("random", "sorted", "few"),  # `few`: only 3 columns, so that duplicates abound
    "indices": ("int32", "int64"),
}


def stored(w: Workload) -> int:
    """How many elements a workload's matrix has: R a row, none where there are no columns."""
    return w["M"] * w["R"] if w["N"] else 0


def random_csr(w: Workload, g: Any, device: str) -> CSR:
    """[M, N] with M·R elements. Values are drawn from ``g``."""
    values = random_tensor(g, (stored(w),), w.dtype, device, values=w.option("values", "normal"))
    offsets, columns = random_pattern(w, w["M"], w["N"], stored(w), device)
    return CSR(offsets, columns, values, (w["M"], w["N"]), check=False)


def random_pattern(w: Workload, m: int, n: int, z: int, device: str) -> tuple[Tensor, Tensor]:
    """Row offsets and columns of z elements (or blocks) in m rows and n columns, of the workload's own: the same for every
    draw."""
    index = torch_dtype(w.option("indices", "int32"))
    if device == "meta":
        return torch.empty(m + 1, dtype=index, device=device), torch.empty(z, dtype=index, device=device)
    at = torch.Generator(device).manual_seed(m + 3 * n + 7 * z)
    offsets = torch.zeros(m + 1, dtype=torch.int64, device=device)
    torch.cumsum(_lengths(w, m, z, at, device), 0, out=offsets[1:])
    width = min(n, 3) if w.option("columns") == "few" else n
    columns = torch.randint(0, max(width, 1), (z,), generator=at, device=device)
    if w.option("columns") == "sorted":
        rows = torch.repeat_interleave(torch.arange(m, device=device), offsets.diff())
        columns = torch.sort(rows * n + columns).values % n
    return offsets.to(index), columns.to(index)


def _lengths(w: Workload, m: int, z: int, at: torch.Generator, device: str) -> Tensor:
    """How many of z elements each of m rows has."""
    rows = w.option("rows", "random")
    if not z:
        return torch.zeros(m, dtype=torch.int64, device=device)
    if rows == "even":
        return torch.full((m,), w["R"], device=device)
    if rows == "one":
        return torch.where(torch.arange(m, device=device) == m // 2, z, 0)
    if rows == "random":
        return torch.bincount(torch.randint(0, m, (z,), generator=at, device=device), minlength=m)
    share = torch.arange(1, m + 1, dtype=torch.float64, device=device).pow(-ZIPF).cumsum(0)
    drawn = torch.rand(z, generator=at, dtype=torch.float64, device=device) * share[-1]
    rank = torch.searchsorted(share, drawn).clamp_(max=m - 1)
    place = torch.randperm(m, generator=at, device=device)
    return torch.bincount(place[rank], minlength=m)


def distinct(n: int, z: int) -> int:
    """Of n columns, how many z random elements name: what must be read of the other factor (the expected number)."""
    return int(n * (1 - (1 - 1 / n) ** z)) if n else 0


def squares(matrix: CSR) -> CSR:
    return matrix.with_values(matrix.values.square())


def loses_a_part(matrix: CSR, b: Tensor) -> Tensor:
    """The first 50 elements of a longer row are another part's, and forgotten."""
    rows = rows_of_elements(matrix.row_offsets, matrix.stored)
    place = torch.arange(matrix.stored, device=rows.device) - matrix.row_offsets.long()[rows]
    lost = (place < 50) & (matrix.row_offsets.diff()[rows] > 50)
    return reference(matrix.with_values(matrix.values.masked_fill(lost, 0)), b)


def of_arguments(right: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``(…, matrix, b)`` as one of an operator's arguments, of which b is called ``right``."""
    return lambda *args, **named: function(*args, *(named[n] for n in ("matrix", right) if n in named))


def define(
    name: str, right: str, *, axes: dict[str, str], layouts: Sequence[str], wrong: dict[str, Callable[..., Tensor]],
    workloads: dict[str, Sequence[Workload]],
) -> dict[str, Any]:  # fmt: skip
    """The fields of the ``Operator`` that is ``spmv`` or ``spmm``, whose b is called ``right``. ``axes`` is K if b has columns;
    ``wrong``: mutants of this operator's own, ``(matrix, b) -> wrong result``."""

    def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
        """A matrix with M·R elements and b [N] or [N, K]."""
        shape = (w["N"], *(w[axis] for axis in axes))
        b = random_tensor(g, shape, w.dtype, device, layout=w.option("layout", "contiguous"))
        return {"matrix": random_csr(w, g, device), right: b}

    def cost(w: Workload, direction: str) -> Cost:
        """The rows of b are read where an element needs them, once."""
        m, n, k, z = w["M"], w["N"], w["K"] if axes else 1, stored(w)
        index, size = BYTES[w.option("indices", "int32")], w.bytes_per_element
        matrix = z * (size + index) + (m + 1) * index
        if direction == "backward":
            m, n = n, m
        return Cost(reads=matrix + distinct(n, z) * k * size, writes=m * k * size, vector_flops=2 * z * k + 1)

    def forward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        """How large a row's terms are: sums of random signs cancel."""
        return [reference(squares(arguments["matrix"]), arguments[right].square()).sqrt()]

    def backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        return [reference(squares(arguments["matrix"]).transposed(), gradients[0].square()).sqrt()]

    def gradient(dy: Tensor, matrix: CSR, b: Tensor) -> tuple[Tensor]:
        return (reference(matrix.transposed(), dy),)

    def values_unpermuted(dy: Tensor, matrix: CSR, b: Tensor) -> tuple[Tensor]:
        """The transposed pattern with the values in their old order."""
        return (reference(matrix.transposed().with_values(matrix.values), dy),)

    right_one = of_arguments(right, reference)
    return {
        "name": name,
        "axes": {"M": "rows", "N": "columns", "R": "stored elements in a row, in the mean", **axes},
        "inputs": inputs,
        "reference": right_one,
        "cost": cost,
        "options": {**OPTIONS, "layout": layouts, "values": ("normal", "nonfinite")},
        "differentiable": (right,),
        "tolerance": {
            "forward": Tolerance(scale=forward_scale, ulps=2.0, terms=lambda w: 32),
            "backward": Tolerance(scale=backward_scale, ulps=2.0, terms=lambda w: 32),
        },
        "workloads": workloads,
        "mutants": [
            *mutants.usual(right_one),
            *(Mutant(what, of_arguments(right, function)) for what, function in wrong.items()),
            *mutants.usual(of_arguments(right, gradient), "backward"),
            Mutant("values in their old order", of_arguments(right, values_unpermuted), "backward"),
        ],
    }


def implement(operator: Operator, *kernels: str) -> None:
    """Registers the implementations of ``spmv`` or ``spmm``."""
    (right,) = operator.differentiable
    for name in kernels:
        by_kernel = functools.partial(product, kernel=name)
        operator.implementation(name, backend="triton", arch=">=sm_80")(of_arguments(right, by_kernel))
    operator.implementation("torch")(of_arguments(right, in_torch))
