"""Sparse products where what is asked of every operator does not reach: what is kept with a matrix, the choice of a kernel,
gradients of the values, operands that do not fit."""

from __future__ import annotations

import re

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_samples import drawn, floats, ints, vector  # noqa: E402

from weft import ops  # noqa: E402
from weft.operators.call import on_gpu  # noqa: E402
from weft.operators.sparse import BSR, CSR, Sparse24, balance, prune_2_4, spmm, spmv  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# ---- what is kept with a matrix --------------------------------------------------------------------------------------


def test_what_was_computed_is_kept_for_the_pattern_and_no_longer():
    matrix = drawn()
    made = []

    def make():
        made.append(0)
        return len(made)

    assert matrix.kept("it", make) == matrix.kept("it", make) == 1
    other = matrix.with_values(matrix.values * 2)
    assert other.kept("it", make) == 1
    matrix.values.zero_()
    assert matrix.kept("it", make) == 1
    matrix.columns.flip(0)
    assert matrix.kept("it", make) == 1
    matrix.columns.copy_(matrix.columns.flip(0))
    assert matrix.kept("it", make) == 2
    with pytest.raises(ValueError, match="'values' has 3 elements; expected 100"):
        matrix.with_values(floats(1, 2, 3))


def test_a_pattern_that_changed_in_place_gives_its_own_product():
    x = vector(30)
    for kernel in ("merge", "row_split", "sell"):
        matrix = drawn(rows="skewed")
        spmv.spmv.find(kernel).function(matrix, x)
        matrix.row_offsets[1:-1] = matrix.row_offsets[-1]  # all elements in the first row
        got = spmv.spmv.find(kernel).function(matrix, x)
        torch.testing.assert_close(got, spmv.reference(matrix, x))
        assert int(got.count_nonzero()) <= 1


@pytest.mark.parametrize("rows", ["random", "even", "skewed", "one"])
@pytest.mark.parametrize(("m", "r"), [(100, 10), (300, 1), (1, 200), (7, 0)])
def test_parts_of_the_merge_path_are_equal_and_cover_everything(rows, m, r):
    matrix, items, z = drawn(m, 50, r, rows=rows), 32, m * r
    cut = balance.partition(matrix, items)
    first_row = cut.rows.long()
    first_element = (torch.arange(cut.parts + 1, device=DEVICE) * items).clamp(max=m + z) - first_row
    assert first_row[0] == 0 and first_row[-1] == m and first_element[-1] == z
    done = first_row.diff() + first_element.diff()
    assert (done[:-1] == items).all() and 0 < done[-1] <= items
    offsets = matrix.row_offsets.long()
    inside = first_row < m
    assert (offsets[first_row[inside]] <= first_element[inside]).all()
    assert (first_element[inside] <= offsets[first_row[inside] + 1]).all()
    begins = {int(o) for o in offsets}
    bits = [int(cut.heads[z // 32]) >> z % 32 & 1 for z in range(z)]
    assert bits == [int(z in begins) for z in range(z)]


@pytest.mark.parametrize(("columns", "implementation"), [(128, "triton"), (129, "torch dense")])
def test_a_2_4_product_of_many_columns_is_a_librarys(columns, implementation):
    a = Sparse24.from_dense(prune_2_4.reference(vector(32 * 32).view(32, 32)))
    b = vector(32 * columns).view(32, columns)
    if DEVICE == "cuda" or on_gpu(b):
        assert ops.explain("sparse_2_4_matmul", a, b).implementation == implementation
    torch.testing.assert_close(ops.sparse_2_4_matmul(a, b), a.to_dense() @ b, rtol=1e-5, atol=1e-5)


def test_even_rows_are_split_by_rows_and_uneven_ones_by_work():
    x = vector(30)
    even = ops.explain("spmv", drawn(64, 30, 16, rows="even"), x)
    skewed = ops.explain("spmv", drawn(640, 30, 8, rows="one"), x)
    if DEVICE == "cuda" or on_gpu(x):
        assert even.implementation == "row_split" and "mean row 16.0, longest 16, 0 empty" in even.reason
        assert skewed.implementation == "merge" and "longest 5120, 639 empty" in skewed.reason
        backward = ops.explain("spmv", drawn(64, 30, 16, rows="even"), x, direction="backward")
        assert backward.implementation == "row_split" and "transposed" in backward.reason
    found = balance.statistics(drawn(64, 30, 16, rows="even"))
    assert (found.mean, found.longest, found.empty, found.padding) == (16.0, 16, 0, 1.0)
    assert balance.statistics(drawn(5, 4, 0)).empty == 5


# ---- products --------------------------------------------------------------------------------------------------------


def test_duplicates_add_up_and_order_does_not_matter():
    matrix = CSR(ints(0, 3, 3, 4), ints(2, 0, 2, 1), floats(1, 2, 4, 8), (3, 3))
    assert ops.spmv(matrix, floats(1, 10, 100)).tolist() == [502, 0, 80]


@pytest.mark.parametrize("kernel", ["row_split", "merge", "sell"])
def test_a_row_is_not_touched_by_its_neighbours_infinities(kernel):
    matrix = drawn(40, 30, 10)
    middle = int(matrix.row_offsets[20])
    values = matrix.values.clone()
    values[middle] = torch.inf
    got = spmv.spmv.find(kernel).function(matrix.with_values(values), vector(30).abs())
    assert got[20].isinf() and got.isfinite().sum() == 39


@pytest.mark.parametrize("columns", [0, 1, 5, 200])
@pytest.mark.parametrize("kernel", ["row_split", "merge", ""])
def test_gradients_of_values_and_of_what_they_are_multiplied_by(kernel, columns):
    module, op = (spmm, spmm.spmm) if columns else (spmv, spmv.spmv)
    matrix = drawn(8, 12, 4, rows="skewed")
    x, dy = ((vector(n * max(columns, 1), n).view((n, columns) if columns else n)) for n in (12, 8))
    function = op.find(kernel).function if kernel else op.public
    leaves = [matrix.values.clone().requires_grad_(), x.clone().requires_grad_()]
    got = torch.autograd.grad(function(matrix.with_values(leaves[0]), leaves[1]), leaves, dy)
    want = torch.autograd.grad(module.reference(matrix.with_values(leaves[0]), leaves[1]), leaves, dy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("changed", ["row_offsets", "columns"])
@pytest.mark.parametrize("name", ["spmv", "spmm"])
def test_a_pattern_that_changes_before_the_gradient_is_refused(name, changed):
    """As a value of a dense matrix would be: the gradient of the new pattern is not this product's."""
    matrix = CSR(ints(0, 1, 2), ints(0, 1), floats(1, 2), (2, 3))
    b = vector(3) if name == "spmv" else vector(6).view(3, 2)
    y = getattr(ops, name)(matrix, b.requires_grad_())
    getattr(matrix, changed)[1] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_casts_as_it_casts_a_dense_product():
    """On a CPU as on a GPU."""
    dense = prune_2_4.reference(vector(32 * 32).view(32, 32))
    b = vector(32 * 4).view(32, 4)
    made = {
        "spmv": (CSR.from_torch(dense), b[:, 0]),
        "spmm": (CSR.from_torch(dense), b),
        "bsr_matmul": (BSR.from_torch(dense, 16), b),
        "sparse_2_4_matmul": (Sparse24.from_dense(dense), b),
    }
    for name, (matrix, right) in made.items():
        with torch.autocast(DEVICE, torch.float16):
            got = getattr(ops, name)(matrix, right)
        assert got.dtype == torch.float16, name
        want = dense.half().float() @ right.half().float()
        torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3, msg=name)


def test_the_gradient_uses_the_values_as_they_are_now():
    """The transposed pattern is kept, its values are not."""
    matrix, x, dy = drawn(), vector(30).requires_grad_(), vector(20, 3)
    (first,) = torch.autograd.grad(ops.spmv(matrix, x), x, dy)
    matrix.values.mul_(2)
    (second,) = torch.autograd.grad(ops.spmv(matrix, x), x, dy)
    torch.testing.assert_close(second, 2 * first)


CALLS = [
    (lambda: (drawn().to_dense(), vector(30)), TypeError, ["'matrix'", "Tensor", "CSR.from_torch"]),
    (lambda: (drawn(), vector(20)), ValueError, ["'x'", "(20,)", "(30,)"]),
    (lambda: (drawn(), vector(30)[:, None]), ValueError, ["'x'", "(30, 1)", "(30,)"]),
    (lambda: (drawn(), vector(30).half()), TypeError, ["'x'", "float16", "float32", "same dtype"]),
    (lambda: (drawn(), [1.0]), TypeError, ["'x'", "list", "torch.Tensor"]),
    (lambda: (drawn(), torch.empty(30, device="meta")), ValueError, ["'x'", "meta", "one device"]),
    (
        lambda: (drawn().with_values(drawn().values.double()), vector(30).double()),
        TypeError,
        ["'matrix.values'", "float64", "float32, float16 or bfloat16"],
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), CALLS, ids=[" ".join(w) for _, _, w in CALLS])
def test_a_product_of_what_does_not_fit_is_refused(call, kind, words):
    with pytest.raises(kind) as caught:
        ops.spmv(*call())
    assert re.match("spmv: argument", str(caught.value))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("b", "kind", "words"),
    [
        (lambda: vector(30), ValueError, ["'b'", "(30,)", "(30, K)"]),
        (lambda: vector(60).view(20, 3), ValueError, ["'b'", "(20, 3)", "(30, K)"]),
        (lambda: vector(60).view(30, 2).half(), TypeError, ["'b'", "float16", "float32", "same dtype"]),
        (lambda: drawn(), TypeError, ["'b'", "CSR", "torch.Tensor"]),
    ],
)
def test_a_dense_matrix_that_does_not_fit_is_refused(b, kind, words):
    with pytest.raises(kind) as caught:
        ops.spmm(drawn(), b())
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", ["spmv", "spmm", "bsr_matmul"])
def test_a_compiler_traces_it_without_a_break(name):
    dense = drawn(32, 32, 2).to_dense()
    matrix = BSR.from_torch(dense, 16) if name == "bsr_matmul" else CSR.from_torch(dense)
    b = vector(32) if name == "spmv" else vector(64).view(32, 2)
    compiled = torch.compile(getattr(ops, name), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(matrix, b), dense @ b)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_public_product_waits_for_nothing_once_a_matrix_is_known():
    matrix, x = drawn(3000, 3000, 16, rows="skewed"), vector(3000)
    ops.spmv(matrix, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.spmv(matrix.with_values(matrix.values * 2), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
