"""Sparse containers: what is validated, converted, padded, pruned and compressed."""

from __future__ import annotations

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_samples import drawn, floats, ints, vector  # noqa: E402

from weft import ops  # noqa: E402
from weft.operators.sparse import BSR, CSR, SELL, Sparse24, prune_2_4, spmv  # noqa: E402
from weft.operators.sparse.pattern import rows_of_elements  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


# ---- the container ---------------------------------------------------------------------------------------------------

GOOD = {
    "row_offsets": lambda: ints(0, 2, 2, 3),
    "columns": lambda: ints(3, 0, 3),
    "values": lambda: floats(1, 2, 3),
    "shape": lambda: (3, 4),
}

REFUSED = [
    ({"row_offsets": lambda: [0, 2, 2, 3]}, TypeError, ["'row_offsets'", "list", "torch.Tensor"]),
    ({"row_offsets": lambda: floats(0, 2, 2, 3)}, TypeError, ["'row_offsets'", "float32", "int32 or int64"]),
    ({"columns": lambda: ints(3, 0, 3, dtype=torch.int16)}, TypeError, ["'columns'", "int16", "int32 or int64"]),
    ({"values": lambda: ints(1, 2, 3)}, TypeError, ["'values'", "int32", "float32"]),
    ({"values": lambda: floats(1, 2, 3).to_sparse()}, TypeError, ["'values'", "torch.sparse_coo", "dense"]),
    ({"values": lambda: floats(1, 2, 3)[:, None]}, ValueError, ["'values'", "(3, 1)", "1 dimension"]),
    ({"values": lambda: floats(1, 2, 3, 4, 5, 6)[::2]}, ValueError, ["'values'", "(2,)", "contiguous"]),
    ({"values": lambda: floats(1, 2)}, ValueError, ["'values'", "2", "'columns' 3", "same number"]),
    ({"row_offsets": lambda: ints(0, 2, 3)}, ValueError, ["'row_offsets'", "3 elements", "expected 4"]),
    ({"row_offsets": lambda: ints(1, 2, 2, 3)}, ValueError, ["'row_offsets'", "begins with 1", "expected 0"]),
    ({"row_offsets": lambda: ints(0, 2, 1, 3)}, ValueError, ["falls from 2 to 1", "row 1"]),
    ({"row_offsets": lambda: ints(0, 2**31 - 1, -(2**31), 3)}, ValueError, ["falls from 2147483647", "row 1"]),
    ({"row_offsets": lambda: ints(0, 2, 2, 4)}, ValueError, ["ends with 4", "expected 3"]),
    ({"columns": lambda: ints(3, 0, 4)}, ValueError, ["'columns'", "4 at position 2", "row 2", "0 … 3"]),
    ({"columns": lambda: ints(3, -1, 3)}, ValueError, ["'columns'", "-1 at position 1", "row 0", "0 … 3"]),
    ({"shape": lambda: 3}, TypeError, ["'shape'", "3", "two whole numbers"]),
    ({"shape": lambda: (3, 4.0)}, TypeError, ["'shape'", "4.0", "two whole numbers"]),
    ({"shape": lambda: (-3, 4)}, ValueError, ["'shape'", "(-3, 4)", "negative"]),
    (
        {"columns": lambda: torch.zeros(3, dtype=torch.int32, device="meta")},
        ValueError,
        ["'columns'", "meta", "device"],
    ),
]


@pytest.mark.parametrize(("changed", "kind", "words"), REFUSED, ids=[" ".join(w) for _, _, w in REFUSED])
def test_a_matrix_that_is_none_is_refused(changed, kind, words):
    with pytest.raises(kind) as caught:
        CSR(**{name: make() for name, make in {**GOOD, **changed}.items()})
    for word in words:
        assert word in str(caught.value)


def test_the_indices_are_looked_at_unless_told_otherwise():
    given = {name: make() for name, make in GOOD.items()}
    given["columns"] = ints(3, 0, 4)
    assert CSR(**given, check=False).stored == 3
    assert repr(CSR(**{name: make() for name, make in GOOD.items()})) == f"CSR(3 × 4, 3 stored, float32, {DEVICE}" + (
        ":0)" if DEVICE == "cuda" else ")"
    )


def test_torch_and_back():
    matrix = drawn(rows="skewed", columns="few")
    dense = matrix.to_dense()
    assert dense.count_nonzero() < matrix.stored  # duplicates
    back = CSR.from_torch(matrix.to_torch())
    assert back.columns.data_ptr() == matrix.columns.data_ptr() and back.values.data_ptr() == matrix.values.data_ptr()
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        again = CSR.from_torch(dense.to_sparse(layout=layout))
        assert again.to_dense().equal(dense), layout
    blocks = CSR.from_torch(dense.to_sparse_bsr((2, 3)))
    assert blocks.to_dense().equal(dense) and CSR.from_torch(dense).to_dense().equal(dense)
    rows = rows_of_elements(matrix.row_offsets, matrix.stored)
    twice = torch.sparse_coo_tensor(
        torch.stack([rows, matrix.columns.long()]), matrix.values, matrix.shape, check_invariants=True
    )
    assert CSR.from_torch(twice).stored == matrix.stored  # an uncoalesced one stays so


@pytest.mark.parametrize(("wrong", "kind"), [(torch.zeros(3), ValueError), ([1], TypeError)])
def test_what_is_no_matrix_is_not_converted(wrong, kind):
    with pytest.raises(kind, match=r"CSR\.from_torch: argument 'a'"):
        CSR.from_torch(wrong)


def test_scipy_and_back():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = drawn()
    theirs = matrix.to_scipy()
    x = vector(30)
    assert torch.allclose(torch.from_numpy(theirs @ x.cpu().numpy()).to(DEVICE), ops.spmv(matrix, x), atol=1e-5)
    for form in (theirs, sparse.coo_matrix(theirs), sparse.csc_array(theirs)):
        assert torch.allclose(CSR.from_scipy(form, DEVICE).to_dense(), matrix.to_dense())
    with pytest.raises(TypeError, match=r"CSR.from_scipy: argument 'a' is a int; expected a sparse matrix of SciPy"):
        CSR.from_scipy(3)


def test_scipy_in_blocks():
    sparse = pytest.importorskip("scipy.sparse")
    dense = torch.zeros(48, 32)
    dense[17, 3], dense[40, 30] = 2.0, 3.0
    found = BSR.from_scipy(sparse.csr_array(dense.numpy()), 16, DEVICE)
    assert found.block == 16 and len(found.columns) == 2 and torch.equal(found.to_dense().cpu(), dense)
    with pytest.raises(TypeError, match=r"BSR.from_scipy: argument 'a' is a int"):
        BSR.from_scipy(3, 16)
    for block in (5, 32):
        with pytest.raises(ValueError, match=rf"argument 'block' is {block} for a matrix \(48, 32\); expected one of"):
            BSR.from_scipy(sparse.csr_array(dense.numpy()), block)


# ---- slices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slice_rows", "window"), [(1, 1), (4, 1), (4, 8), (32, 1024), (5, 7)])
@pytest.mark.parametrize("shape", [(20, 30, 5), (70, 30, 2), (6, 4, 0), (0, 4, 1)])
def test_slices_hold_the_matrix(slice_rows, window, shape):
    matrix = drawn(*shape, rows="skewed")
    made = SELL.from_csr(matrix, slice_rows, window)
    back = made.to_csr()
    assert back.row_offsets.equal(matrix.row_offsets) and back.columns.equal(matrix.columns)
    assert back.values.equal(matrix.values)
    rows = made.rows.long()
    assert rows.sort().values.equal(torch.arange(shape[0], device=DEVICE))
    assert (rows // window).equal(torch.arange(shape[0], device=DEVICE) // window)  # sorted within windows only
    for at in range(0, shape[0], window):
        assert (made.lengths[at : at + window].diff() <= 0).all()
    x = vector(shape[1])
    torch.testing.assert_close(ops.spmv(made, x), spmv.reference(matrix, x))


def test_what_pads_is_never_multiplied():
    made, x = SELL.from_csr(drawn(rows="skewed"), 4, 1), vector(30).abs()
    at = made.slice_offsets.long()[torch.arange(20, device=DEVICE) // 4] + torch.arange(20, device=DEVICE) % 4
    width = (made.slice_offsets.diff() // 4)[torch.arange(20, device=DEVICE) // 4]
    padded = made.lengths < width
    assert padded.any()
    made.values[(at + 4 * (width - 1))[padded]] = torch.nan
    assert ops.spmv(made, x).isfinite().all()


def test_slices_follow_values_that_change():
    matrix, x = drawn(), vector(30)
    first = spmv.spmv.find("sell").function(matrix, x)
    matrix.values.mul_(2)
    torch.testing.assert_close(spmv.spmv.find("sell").function(matrix, x), 2 * first)


def test_slices_have_no_gradient_and_say_so():
    with pytest.raises(NotImplementedError, match="SELL matrix has no gradients; expected a CSR"):
        ops.spmv(SELL.from_csr(drawn()), vector(30).requires_grad_())
    with pytest.raises(ValueError, match="'slice_rows' is 0; expected a whole number, 1 or more"):
        SELL.from_csr(drawn(), 0)
    with pytest.raises(TypeError, match="'matrix' is a Tensor; expected a CSR"):
        SELL.from_csr(vector(3))


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 32])
def test_blocks_and_back(block):
    dense = drawn(96, 64, 1).to_dense()
    matrix = BSR.from_torch(dense, block)
    assert matrix.to_dense().equal(dense) and f"blocks of {block} × {block}" in repr(matrix)
    again = BSR.from_torch(matrix.to_torch())
    assert again.values.data_ptr() == matrix.values.data_ptr() and again.to_dense().equal(dense)
    b = vector(64 * 3).view(64, 3)
    torch.testing.assert_close(ops.bsr_matmul(matrix, b), dense @ b)


def test_blocks_that_are_stored_twice_add_up():
    twice = vector(512).view(2, 16, 16)
    matrix, b = BSR(ints(0, 2), ints(0, 0), twice, (16, 16)), vector(64, 3).view(16, 4)
    torch.testing.assert_close(ops.bsr_matmul(matrix, b), twice.sum(0) @ b)


def blocks(offsets=(0, 1, 1), columns=(1,), values=(1, 16, 16), shape=(32, 32)):
    return BSR(ints(*offsets), ints(*columns), torch.zeros(values, device=DEVICE), shape)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: blocks(values=(1, 16, 32)), ValueError, ["blocks of 16 × 32", "squares of 16, 32, 64, 128"]),
        (lambda: blocks(values=(1, 8, 8)), ValueError, ["blocks of 8 × 8"]),
        (lambda: blocks(shape=(32, 40)), ValueError, ["'shape'", "(32, 40)", "multiples of the block size 16"]),
        (lambda: blocks(offsets=(0, 1)), ValueError, ["'row_offsets'", "2 elements", "expected 3"]),
        (lambda: blocks(offsets=(0, 2, 1)), ValueError, ["falls from 2 to 1", "block row 1"]),
        (lambda: blocks(columns=(2,)), ValueError, ["2 at position 0", "block row 0", "0 … 1"]),
        (lambda: blocks(columns=(1, 0)), ValueError, ["1 blocks", "2 elements"]),
        (lambda: BSR.from_torch(torch.zeros(16, 16)), ValueError, ["'block' is None", "(16, 32, 64, 128)"]),
        (lambda: BSR.from_torch(torch.zeros(20, 16), 16), ValueError, ["(20, 16)", "multiples of 16"]),
        (lambda: ops.bsr_matmul(drawn(), vector(3)), TypeError, ["'matrix'", "CSR", "BSR"]),
        (lambda: ops.bsr_matmul(blocks(), vector(32)), ValueError, ["'b'", "(32,)", "(32, K)"]),
        (
            lambda: ops.bsr_matmul(blocks(), vector(32).view(32, 1).requires_grad_()),
            NotImplementedError,
            ["no gradients", "no_grad"],
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused(call, kind, words):
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- 2:4 -------------------------------------------------------------------------------------------------------------


def test_pruning_keeps_two_of_four_and_the_earlier_of_equals():
    x = floats(1, -4, 2, 3, 5, 5, -5, 5, 0, 0, 0, 7, torch.nan, 9, torch.inf, 1).view(1, 16)
    want = floats(0, -4, 0, 3, 5, 5, 0, 0, 0, 0, 0, 7, torch.nan, 0, torch.inf, 0).view(1, 16)
    torch.testing.assert_close(ops.prune_2_4(x), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 16), (32, 64), (40, 208), (0, 16), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compressed_and_back(shape, dtype):
    dense = prune_2_4.reference(vector(shape[0] * shape[1]).view(shape).to(dtype))
    matrix = Sparse24.from_dense(dense)
    assert matrix.to_dense().equal(dense) and matrix.values.numel() * 2 == dense.numel()
    assert Sparse24(matrix.values, matrix.metadata, matrix.shape).to_dense().equal(dense)  # its own checks accept it


def test_groups_with_fewer_than_two_get_rising_places():
    dense = torch.zeros(1, 16, device=DEVICE)
    dense[0, 3] = dense[0, 4] = 1.0
    matrix = Sparse24.from_dense(dense)
    first, second = matrix.places().unbind(-1)
    assert (first < second).all() and matrix.to_dense().equal(dense)


def test_metadata_is_what_cutlass_packs():
    """PyTorch's own converter, which also moves the halves to where CUTLASS's threads read them."""
    from torch.sparse import _semi_structured_conversions as theirs

    dense = prune_2_4.reference(vector(64 * 128).view(64, 128).half())
    values, moved = theirs.sparse_semi_structured_from_dense_cutlass(dense)
    matrix = Sparse24.from_dense(dense)
    to = theirs._calculate_meta_reordering_scatter_offsets(64, 8, torch.int16, dense.device)
    mine = torch.empty_like(moved.view(-1)).scatter_(0, to, matrix.metadata.view(-1))
    assert matrix.values.equal(values) and mine.equal(moved.view(-1))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: Sparse24.from_dense(torch.ones(2, 16)),
            ValueError,
            ["more than two", "columns 0 … 3 of row 0", "8 such"],
        ),
        (lambda: Sparse24.from_dense(torch.ones(2, 12)), ValueError, ["(2, 12)", "multiple of 16"]),
        (lambda: Sparse24.from_dense(torch.ones(2, 16).int()), TypeError, ["int32", "floating"]),
        (lambda: Sparse24(torch.ones(2, 8), ints(0, 0).short().cpu(), (2, 16)), ValueError, ["'metadata'", "(2,)"]),
        (
            lambda: Sparse24(torch.ones(1, 8), torch.tensor([[0x444]], dtype=torch.int16), (1, 16)),
            ValueError,
            ["places 0 and 0", "group 3 of row 0"],
        ),
        (
            lambda: Sparse24(torch.ones(1, 9), torch.zeros(1, 1).short(), (1, 16)),
            ValueError,
            ["'values'", "(1, 9)", "(1, 8)"],
        ),
        (
            lambda: Sparse24(torch.ones(1, 9), torch.zeros(1, 1).short(), (1, 18)),
            ValueError,
            ["(1, 18)", "multiple of 16"],
        ),
        (lambda: ops.prune_2_4(vector(6).view(1, 6)), ValueError, ["'x'", "(1, 6)", "multiple of 4"]),
        (lambda: ops.prune_2_4(vector(8).view(1, 8).requires_grad_()), NotImplementedError, ["no gradient"]),
        (lambda: ops.sparse_2_4_matmul(vector(3), vector(3)), TypeError, ["'a'", "Tensor", "Sparse24"]),
        (
            lambda: ops.sparse_2_4_matmul(Sparse24.from_dense(torch.zeros(1, 16, device=DEVICE)), vector(16)),
            ValueError,
            ["'b'", "(16,)", "(16, N)"],
        ),
    ],
)
def test_semi_structured_matrices_that_are_none_are_refused(call, kind, words):
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
