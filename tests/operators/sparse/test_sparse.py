"""Sparse containers: what is validated, converted, padded, pruned and compressed. Their products: what is kept with a matrix,
the choice of a kernel, gradients of the values, operands that do not fit."""

import dataclasses

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from waits import no_wait
from where import DEVICE

from weft import ops, registry
from weft.bench import cases
from weft.definition import Declined, workload
from weft.operators.call import on_gpu
from weft.operators.sparse import BSR, CSR, SELL, Sparse24, balance, dispatch, prune_2_4, spmm, spmv
from weft.operators.sparse.pattern import rows_of_elements
from weft.operators.sparse.products import random_csr

pytestmark = pytest.mark.device


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def floats(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def drawn(m=20, n=30, r=5, **options) -> CSR:
    return random_csr(workload("fp32", M=m, N=n, R=r, **options), torch.Generator(DEVICE).manual_seed(1), DEVICE)


def column(n):
    return vector(n).view(n, 1)


def metadata(word):
    return torch.tensor([[word]], dtype=torch.int16)


def pruned():
    return Sparse24.from_dense(torch.zeros(1, 16, device=DEVICE))


def vector(n, seed=2):
    return torch.randn(n, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


GOOD = {"row_offsets": ints(0, 2, 2, 3), "columns": ints(3, 0, 3), "values": floats(1, 2, 3), "shape": (3, 4)}


def test_the_indices_are_looked_at_unless_told_otherwise():
    assert CSR(**GOOD | {"columns": ints(3, 0, 4)}, check=False).stored == 3
    assert repr(CSR(**GOOD)) == f"CSR(3 × 4, 3 stored, float32, {ints(0).device})"


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
    indices = torch.stack([rows, matrix.columns.long()])
    twice = torch.sparse_coo_tensor(indices, matrix.values, matrix.shape, check_invariants=True)
    assert CSR.from_torch(twice).stored == matrix.stored  # an uncoalesced one stays so


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
    made, x = SELL.from_csr(drawn()), vector(30)
    first = ops.spmv(made, x)
    assert made.as_csr() is made.as_csr()  # made once for its values
    made.values.mul_(2)
    torch.testing.assert_close(ops.spmv(made, x), 2 * first)


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
    for kernel in ("merge", "row_split"):
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
    first_element = (torch.arange(len(cut.runs) + 1, device=DEVICE) * items).clamp(max=m + z) - first_row
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


def test_errors_are_measured_by_the_dense_product_where_the_sparse_one_declines(monkeypatch):
    op = registry.get("sparse_2_4_matmul")

    def declines(a, b):
        raise Declined("not these sizes")

    for name, function in (("torch", declines), ("torch dense", lambda a, b: op.reference(a, b) + 1)):
        monkeypatch.setitem(op.implementations, name, dataclasses.replace(op.implementations[name], function=function))
    w = op.parse("M=16,N=16,K=32", "fp32")
    arguments = op.inputs(w, torch.Generator(DEVICE).manual_seed(0), DEVICE)
    assert cases.Baseline.of(op, w, "forward", arguments).torch[0].equal(op.reference(**arguments) + 1)


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


@pytest.mark.parametrize(
    ("rows", "most", "transposed"), [("random", 500, "row_split"), ("random", 400, "merge"), ("even", 400, "row_split")]
)
def test_few_rows_are_split_by_rows_and_uneven_transposed_ones_by_work(monkeypatch, rows, most, transposed):
    """Of more elements than a group of lanes may walk, nothing says that a column does not hold them all."""
    monkeypatch.setattr(dispatch, "LONGEST_ROW", most)
    matrix, b = drawn(60, 40, 8, rows=rows), vector(120).view(40, 3).requires_grad_()
    if DEVICE == "cuda" or on_gpu(b):
        assert ops.explain("spmm", matrix, b).implementation == "row_split"
        assert ops.explain("spmm", matrix, b, direction="backward").implementation == transposed
    (got,) = torch.autograd.grad(ops.spmm(matrix, b).sum(), b)
    torch.testing.assert_close(got, spmm.reference(matrix.transposed(), torch.ones(60, 3, device=DEVICE)))


def test_duplicates_add_up_and_order_does_not_matter():
    matrix = CSR(ints(0, 3, 3, 4), ints(2, 0, 2, 1), floats(1, 2, 4, 8), (3, 3))
    assert ops.spmv(matrix, floats(1, 10, 100)).tolist() == [502, 0, 80]


@pytest.mark.parametrize("kernel", ["row_split", "merge"])
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
    torch.testing.assert_close(got, want)


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
    made = {"spmv": (CSR.from_torch(dense), b[:, 0]), "spmm": (CSR.from_torch(dense), b)}
    made |= {"bsr_matmul": (BSR.from_torch(dense, 16), b), "sparse_2_4_matmul": (Sparse24.from_dense(dense), b)}
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


def test_a_product_in_float64_is_pytorchs():
    wide, x = drawn().with_values(drawn().values.double()), vector(30).double()
    torch.testing.assert_close(ops.spmv(wide, x), wide.to_dense() @ x)


def csr(error, words, **changed):
    return bad(CSR, error, words, **GOOD | changed)


REFUSED = [
    csr(TypeError, "'row_offsets'; list; torch.Tensor", row_offsets=[0, 2, 2, 3]),
    csr(TypeError, "'row_offsets'; float32; int32 or int64", row_offsets=floats(0, 2, 2, 3)),
    csr(TypeError, "'columns'; int16; int32 or int64", columns=ints(3, 0, 3, dtype=torch.int16)),
    csr(TypeError, "'values'; int32; float32", values=ints(1, 2, 3)),
    csr(TypeError, "'values'; torch.sparse_coo; dense", values=floats(1, 2, 3).to_sparse()),
    csr(ValueError, "'values'; (3, 1); 1 dimension", values=floats(1, 2, 3)[:, None]),
    csr(ValueError, "'values'; (2,); contiguous", values=floats(1, 2, 3, 4, 5, 6)[::2]),
    csr(ValueError, "'values'; 2; 'columns' 3; same number", values=floats(1, 2)),
    csr(ValueError, "'row_offsets'; 3 elements; expected 4", row_offsets=ints(0, 2, 3)),
    csr(ValueError, "'row_offsets'; begins with 1; expected 0", row_offsets=ints(1, 2, 2, 3)),
    csr(ValueError, "falls from 2 to 1; row 1", row_offsets=ints(0, 2, 1, 3)),
    csr(ValueError, "falls from 2147483647; row 1", row_offsets=ints(0, 2**31 - 1, -(2**31), 3)),
    csr(ValueError, "ends with 4; expected 3", row_offsets=ints(0, 2, 2, 4)),
    csr(ValueError, "'columns'; 4 at position 2; row 2; 0 … 3", columns=ints(3, 0, 4)),
    csr(ValueError, "'columns'; -1 at position 1; row 0; 0 … 3", columns=ints(3, -1, 3)),
    csr(TypeError, "'shape'; 3; two whole numbers", shape=3),
    csr(TypeError, "'shape'; 4.0; two whole numbers", shape=(3, 4.0)),
    csr(ValueError, "'shape'; (-3, 4); negative", shape=(-3, 4)),
    csr(ValueError, "'columns'; meta; device", columns=torch.zeros(3, dtype=torch.int32, device="meta")),
    *(bad(CSR.from_torch, error, "CSR.from_torch: argument 'a'", wrong)
      for wrong, error in ((torch.zeros(3), ValueError), ([1], TypeError))),
    bad(blocks, ValueError, "blocks of 16 × 32; squares of 16, 32, 64, 128", values=(1, 16, 32)),
    bad(blocks, ValueError, "blocks of 8 × 8", values=(1, 8, 8)),
    bad(blocks, ValueError, "'shape'; (32, 40); multiples of the block size 16", shape=(32, 40)),
    bad(blocks, ValueError, "'row_offsets'; 2 elements; expected 3", offsets=(0, 1)),
    bad(blocks, ValueError, "falls from 2 to 1; block row 1", offsets=(0, 2, 1)),
    bad(blocks, ValueError, "2 at position 0; block row 0; 0 … 1", columns=(2,)),
    bad(blocks, ValueError, "1 blocks; 2 elements", columns=(1, 0)),
    bad(BSR.from_torch, ValueError, "'block' is None; (16, 32, 64, 128)", torch.zeros(16, 16)),
    bad(BSR.from_torch, ValueError, "(20, 16); multiples of 16", torch.zeros(20, 16), 16),
    bad("bsr_matmul", TypeError, "'matrix'; CSR; BSR", drawn(), vector(3)),
    bad("bsr_matmul", ValueError, "'b'; (32,); (32, K)", blocks(), vector(32)),
    bad("bsr_matmul", NotImplementedError, "no gradients; no_grad", blocks(), column(32).requires_grad_()),
    bad(Sparse24.from_dense, ValueError, "more than two; columns 0 … 3 of row 0; 8 such", torch.ones(2, 16)),
    bad(Sparse24.from_dense, ValueError, "(2, 12); multiple of 16", torch.ones(2, 12)),
    bad(Sparse24.from_dense, TypeError, "int32; floating", torch.ones(2, 16).int()),
    bad(Sparse24, ValueError, "'metadata'; (2,)", torch.ones(2, 8), ints(0, 0).short().cpu(), (2, 16)),
    bad(Sparse24, ValueError, "places 0 and 0; group 3 of row 0", torch.ones(1, 8), metadata(0x444), (1, 16)),
    bad(Sparse24, ValueError, "'values'; (1, 9); (1, 8)", torch.ones(1, 9), metadata(0), (1, 16)),
    bad(Sparse24, ValueError, "(1, 18); multiple of 16", torch.ones(1, 9), metadata(0), (1, 18)),
    bad("prune_2_4", ValueError, "'x'; (1, 6); multiple of 4", vector(6).view(1, 6)),
    bad("prune_2_4", NotImplementedError, "no gradient", vector(8).view(1, 8).requires_grad_()),
    bad("sparse_2_4_matmul", TypeError, "'a'; Tensor; Sparse24", vector(3), vector(3)),
    bad("sparse_2_4_matmul", ValueError, "'b'; (16,); (16, N)", pruned(), vector(16)),
    bad("spmv", TypeError, "argument; 'matrix'; Tensor; CSR.from_torch", drawn().to_dense(), vector(30)),
    bad("spmv", ValueError, "argument; 'x'; (20,); (30,)", drawn(), vector(20)),
    bad("spmv", ValueError, "argument; 'x'; (30, 1); (30,)", drawn(), vector(30)[:, None]),
    bad("spmv", TypeError, "argument; 'x'; float16; float32; same dtype", drawn(), vector(30).half()),
    bad("spmv", TypeError, "argument; 'x'; list; torch.Tensor", drawn(), [1.0]),
    bad("spmv", ValueError, "argument; 'x'; meta; one device", drawn(), torch.empty(30, device="meta")),
    bad("spmm", ValueError, "'b'; (30,); (30, K)", drawn(), vector(30)),
    bad("spmm", ValueError, "'b'; (20, 3); (30, K)", drawn(), vector(60).view(20, 3)),
    bad("spmm", TypeError, "'b'; float16; float32; same dtype", drawn(), vector(60).view(30, 2).half()),
    bad("spmm", TypeError, "'b'; CSR; torch.Tensor", drawn(), drawn()),
    bad(ops.spmv, NotImplementedError, "SELL matrix has no gradients; expected a CSR", SELL.from_csr(drawn()),
        vector(30).requires_grad_()),
    bad(SELL.from_csr, ValueError, "'slice_rows' is 0; expected a whole number, 1 or more", drawn(), 0),
    bad(SELL.from_csr, TypeError, "'matrix' is a Tensor; expected a CSR", vector(3)),
]  # fmt: skip


@pytest.mark.parametrize("name", ["spmv", "spmm", "bsr_matmul"])
def test_a_compiler_traces_it_without_a_break(name):
    dense = drawn(32, 32, 2).to_dense()
    matrix = BSR.from_torch(dense, 16) if name == "bsr_matmul" else CSR.from_torch(dense)
    b = vector(32) if name == "spmv" else vector(64).view(32, 2)
    compiled = torch.compile(getattr(ops, name), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(matrix, b), dense @ b)


@pytest.mark.gpu
def test_the_public_product_waits_for_nothing_once_a_matrix_is_known():
    matrix, x = drawn(3000, 3000, 16, rows="skewed"), vector(3000)
    ops.spmv(matrix, x)
    with no_wait():
        ops.spmv(matrix.with_values(matrix.values * 2), x)
