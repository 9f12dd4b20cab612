"""The sketches of docs/architecture.md, executed: the definition holds operators that are nothing like a softmax.

Each is defined in full; a right implementation must pass the verifier, wrong ones must not. Implementations are plain PyTorch
on the back end ``triton``, so that they count as ours. The first, in place, is in ``test_sketches_in_place.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")

from verdicts import assert_right, assert_wrong, verdicts  # noqa: E402

from weft.bench import cases, verify  # noqa: E402
from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, torch_dtype, workload  # noqa: E402
from weft.operators.random_inputs import random_tensor  # noqa: E402

pytestmark = pytest.mark.device

# ---- paged attention: a callable argument, integer tables, uneven lengths --------------------------------------------


@dataclass(frozen=True)
class ScoreFunction:
    """A change of the scores, for PyTorch (``plain``) and for a kernel."""

    name: str
    plain: Callable[..., Any]
    kernel: Any = None


def alibi(score: torch.Tensor, head: torch.Tensor, position: torch.Tensor, length: int) -> torch.Tensor:
    return score - 2.0 ** -(head + 1.0) * (length - 1 - position)


def paged_inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    pages = -(-w["L"] // w["P"])
    lengths = [max(1, w["L"] - 3 * b) for b in range(w["B"])]
    order = torch.randperm(w["B"] * pages, generator=torch.Generator().manual_seed(1)).view(w["B"], pages)
    shape = (w["B"] * pages, w["P"], w["H"], w["D"])
    return {
        "q": random_tensor(g, (w["B"], w["H"], w["D"]), w.dtype, device),
        "k_pages": random_tensor(g, shape, w.dtype, device),
        "v_pages": random_tensor(g, shape, w.dtype, device),
        "page_table": order.to(device, torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
        "score": ScoreFunction("alibi", alibi),
    }


def paged_reference(q, k_pages, v_pages, page_table, lengths, score) -> torch.Tensor:
    out = []
    head = torch.arange(q.shape[1], device=q.device)[:, None]
    for b, length in enumerate(lengths.tolist()):
        pages = page_table[b].long()
        k, v = (t[pages].flatten(0, 1)[:length] for t in (k_pages, v_pages))  # [L, H, D]
        scores = torch.einsum("hd,lhd->hl", q[b], k) / math.sqrt(q.shape[-1])
        scores = score.plain(scores, head, torch.arange(length, device=q.device), length)
        out.append(torch.einsum("hl,lhd->hd", torch.softmax(scores.to(q.dtype), -1), v))
    return torch.stack(out)


def paged_online(q, k_pages, v_pages, page_table, lengths, score) -> torch.Tensor:
    """One pass over the pages with a running maximum, in fp32: what a kernel does."""
    size, head = k_pages.shape[1], torch.arange(q.shape[1], device=q.device)[:, None]
    rows = []
    for b, length in enumerate(lengths.tolist()):
        top = torch.full((q.shape[1], 1), -torch.inf, device=q.device)
        total, row = torch.zeros_like(top), torch.zeros(q.shape[1:], device=q.device)
        for start in range(0, length, size):
            page = int(page_table[b, start // size])
            n = min(size, length - start)
            k, v = k_pages[page, :n].float(), v_pages[page, :n].float()
            s = torch.einsum("hd,lhd->hl", q[b].float(), k) / math.sqrt(q.shape[-1])
            s = score.plain(s, head, torch.arange(start, start + n, device=q.device), length)
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            p, shrink = (s - new).exp(), (top - new).exp()
            total = total * shrink + p.sum(-1, keepdim=True)
            row = row * shrink + torch.einsum("hl,lhd->hd", p, v)
            top = new
        rows.append(row / total)
    return torch.stack(rows).to(q.dtype)


def paged_cost(w: Workload, direction: str) -> Cost:
    tokens = sum(max(1, w["L"] - 3 * b) for b in range(w["B"]))
    rows = w["B"] * w["H"] * w["D"] * w.bytes_per_element
    cached = 2 * tokens * w["H"] * w["D"] * w.bytes_per_element
    return Cost(reads=rows + cached, writes=rows, vector_flops=4 * tokens * w["H"] * w["D"])


paged_attention = Operator(
    name="paged_attention",
    axes={"B": "sequences", "H": "heads", "D": "head dim", "L": "longest sequence", "P": "page size"},
    inputs=paged_inputs,
    reference=paged_reference,
    cost=paged_cost,
    directions=("forward", "backward"),
    differentiable=("q", "v_pages"),
    dtypes=("fp32", "fp16"),
    tolerance=Tolerance(scale="tensor", ulps=4.0),
    workloads={
        "verify": [
            workload(B=1, H=1, D=8, L=1, P=4),
            workload(B=3, H=2, D=16, L=37, P=8),
            workload(B=2, H=4, D=8, L=16, P=16),
        ]
    },
)


def changed(**changes: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """Paged attention with some of its arguments replaced."""

    def wrong(**arguments: Any) -> torch.Tensor:
        return paged_online(**{**arguments, **{name: f(arguments[name]) for name, f in changes.items()}})

    return wrong


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_paged_attention_passes(direction):
    assert_right(paged_attention, paged_online, direction)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            changed(page_table=lambda t: torch.arange(t.numel(), device=t.device).view_as(t)), id="table-ignored"
        ),
        pytest.param(changed(lengths=lambda t: (t - 1).clamp_min(1)), id="last-token-left-out"),
        pytest.param(changed(lengths=lambda t: t.max().expand_as(t)), id="padding-attended"),
        pytest.param(changed(score=lambda f: ScoreFunction("none", lambda s, *_: s)), id="score-ignored"),
        pytest.param(changed(v_pages=lambda t: t.roll(1, 2) if t.shape[2] > 1 else t), id="heads-swapped"),
    ],
)
def test_paged_attention_that_ignores_an_argument_fails(wrong):
    assert_wrong(paged_attention, wrong, "allowed")
    assert_wrong(paged_attention, wrong, "allowed", "backward")


def test_integer_tables_must_stay_as_they_are():
    def sorts_the_table(page_table, **arguments):
        out = paged_online(page_table=page_table, **arguments)
        page_table.copy_(page_table.sort(-1).values)
        return out

    assert_wrong(paged_attention, sorts_the_table, "argument 'page_table' was changed")


# ---- SpMV over CSR: a sparse container, a cost that depends on the data ----------------------------------------------


@dataclass(frozen=True)
class CSR:
    indptr: torch.Tensor
    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, int]


class Triplets(NamedTuple):
    indptr: torch.Tensor
    indices: torch.Tensor
    values: torch.Tensor


def csr_inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Z elements dealt out over the rows unevenly; some rows are empty."""
    at = torch.Generator().manual_seed(2)
    row = torch.randint(0, max(w["M"], 1), (w["Z"],), generator=at).sort().values
    counts = torch.bincount(row, minlength=w["M"])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    indices = torch.randint(0, w["N"], (w["Z"],), generator=at, dtype=torch.int32)
    values = random_tensor(g, (w["Z"],), w.dtype, device)
    matrix = CSR(indptr.to(device), indices.to(device), values, (w["M"], w["N"]))
    return {"matrix": matrix, "x": random_tensor(g, (w["N"],), w.dtype, device)}


def rows_of(indptr: torch.Tensor) -> torch.Tensor:
    counts = (indptr[1:] - indptr[:-1]).long()
    return torch.repeat_interleave(torch.arange(len(counts), device=indptr.device), counts)


def spmv_reference(matrix: CSR, x: torch.Tensor) -> torch.Tensor:
    products = matrix.values * x[matrix.indices.long()]
    wide = products if products.dtype == torch.float64 else products.float()
    out = torch.zeros(matrix.shape[0], dtype=wide.dtype, device=x.device)
    return out.index_add(0, rows_of(matrix.indptr), wide).to(x.dtype)


def spmv_dense(matrix: CSR, x: torch.Tensor) -> torch.Tensor:
    dense = torch.zeros(matrix.shape, device=x.device)
    at = (rows_of(matrix.indptr), matrix.indices.long())
    return (dense.index_put(at, matrix.values.float(), accumulate=True) @ x.float()).to(x.dtype)


def spmv_scale(arguments: dict[str, Any], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """How large a row's terms are: sums of random signs cancel."""
    m, x = arguments["matrix"], arguments["x"]
    return [spmv_reference(CSR(m.indptr, m.indices, m.values.square(), m.shape), x.square()).sqrt()]


def spmv_operator(**changed: Any) -> Operator:
    return Operator(
        **{
            "name": "spmv",
            "axes": {"M": "rows", "N": "columns", "Z": "stored elements"},
            "inputs": csr_inputs,
            "reference": spmv_reference,
            "cost": lambda w, d: Cost(
                reads=w["Z"] * (w.bytes_per_element + 4) + (w["M"] + 1) * 4 + w["N"] * w.bytes_per_element,
                writes=w["M"] * w.bytes_per_element,
                vector_flops=2 * w["Z"],
            ),
            "tolerance": Tolerance(scale=spmv_scale, ulps=2.0),
            "dtypes": ("fp32", "fp16"),
            "workloads": {"verify": [workload(M=m, N=n, Z=z) for m, n, z in ((1, 1, 1), (7, 50, 0), (20, 30, 100))]},
            **changed,
        }
    )


spmv = spmv_operator()


def last_of_each_row_left_out(matrix: CSR, x: torch.Tensor) -> torch.Tensor:
    last = (matrix.indptr[1:] - 1)[matrix.indptr[1:] > matrix.indptr[:-1]].long()
    values = matrix.values.clone()
    values[last] = 0
    return spmv_dense(CSR(matrix.indptr, matrix.indices, values, matrix.shape), x)


def without_the_last_row(matrix: CSR, x: torch.Tensor) -> torch.Tensor:
    out = spmv_dense(matrix, x)
    out[-1:] = 0
    return out


def test_spmv_passes():
    assert_right(spmv, spmv_dense)


@pytest.mark.parametrize(
    "wrong",
    [
        last_of_each_row_left_out,
        without_the_last_row,
        lambda matrix, x: spmv_dense(matrix, x.roll(1)),
        lambda matrix, x: spmv_dense(matrix, x) + 0.5,
    ],
    ids=["last-of-each-row", "last-row", "column-off-by-one", "empty-rows"],
)
def test_a_wrong_spmv_fails(wrong):
    assert_wrong(spmv, wrong, "allowed")


@pytest.mark.parametrize("field", ["values", "indices"])
def test_containers_are_watched_inside(field):
    def overwrites(matrix, x):
        out = spmv_dense(matrix, x)
        getattr(matrix, field).zero_()
        return out

    assert_wrong(spmv, overwrites, "argument 'matrix' was changed")


def test_gradients_reach_the_floating_tensors_of_a_container():
    def scale(arguments, gradients):
        m, x, (dy,) = arguments["matrix"], arguments["x"], gradients
        each = (dy[rows_of(m.indptr)] * m.values).square()
        return [
            torch.ones_like(m.values),
            torch.zeros_like(x).index_add(0, m.indices.long(), each).sqrt() + 1e-3,
        ]

    differentiable = spmv_operator(
        directions=("forward", "backward"),
        differentiable=("matrix", "x"),
        tolerance={"forward": Tolerance(scale=spmv_scale, ulps=2.0), "backward": Tolerance(scale=scale, ulps=4.0)},
        dtypes=("fp32",),
    )
    assert_right(differentiable, spmv_dense, "backward")
    assert_wrong(differentiable, last_of_each_row_left_out, "allowed", "backward")


def test_cost_follows_the_data():
    few, many = (spmv.cost(workload("fp32", M=10, N=10, Z=z), "forward") for z in (10, 1000))
    assert many.reads - few.reads == 990 * 8 and many.writes == few.writes == 40


# ---- trees -----------------------------------------------------------------------------------------------------------


def test_trees_keep_their_form():
    x = torch.ones(2)
    tree = {"a": [x, (x, 3)], "b": CSR(x, x, x, (1, 2)), "c": Triplets(x, x, x), "d": "word", "e": None}
    doubled = cases.map_tensors(lambda t: t * 2, tree)
    assert isinstance(doubled["c"], Triplets) and isinstance(doubled["a"][1], tuple) and doubled["d"] == "word"
    assert len(list(cases.tensors(doubled))) == 8 and all(float(t[0]) == 2 for t in cases.tensors(doubled))
    assert all(float(t[0]) == 1 for t in cases.tensors(tree))


@pytest.mark.parametrize("layout", ["contiguous", "unaligned", "sliced", "strided", "transposed", "expanded"])
def test_a_clone_keeps_strides_and_alignment_and_shares_no_memory(layout):
    x = random_tensor(torch.Generator().manual_seed(0), (4, 6), "fp32", layout=layout)
    copy = cases.clone(x)
    assert copy.equal(x) and copy.stride() == x.stride() and copy.storage_offset() == x.storage_offset()
    copy.untyped_storage().fill_(0)
    assert not copy.equal(x)


def test_memory_that_was_never_written_shows():
    """``torch.empty`` may hold the right answer of the last call; within the verifier it holds NaN."""
    op = Operator(
        name="copy",
        axes={"N": "elements"},
        inputs=lambda w, g, device: {"x": random_tensor(g, (w["N"],), w.dtype, device)},
        reference=lambda x: x.clone(),
        cost=lambda w, d: Cost(4 * w["N"], 4 * w["N"]),
        dtypes=("fp32",),
        workloads={"verify": [workload(N=100)]},
    )

    def forgets_the_tail(x):
        out = torch.empty_like(x)
        out[:-3] = x[:-3]
        return out

    assert_right(op, lambda x: torch.empty_like(x).copy_(x))
    assert_wrong(op, forgets_the_tail, "nan, PyTorch has")
    with cases.PoisonedEmpty():
        assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.int32).eq(2**31 - 1).all()
        assert torch.zeros(2).new_empty(2).isnan().all() and torch.empty_strided((2,), (2,)).isnan().all()


def test_a_raising_implementation_is_a_failure_with_its_reason():
    def raises(**arguments):
        raise RuntimeError("out of luck\nand more")

    result = next(iter(verdicts(spmv, raises).values()))
    assert result.status == "fail" and result.reason == "RuntimeError: out of luck"
    assert result.reproduce.startswith(
        "weft verify spmv --implementation one --direction forward --dtype fp32 --workload M=1,"
    )


def test_stale_output_fails_on_the_second_draw():
    kept: dict[Any, torch.Tensor] = {}

    def caches(matrix, x):
        return kept.setdefault((x.shape, x.dtype), spmv_dense(matrix, x))

    w = spmv.parse("M=20,N=30,Z=100", "fp32")
    assert verify.run(verify.Check(spmv, "stale", "forward", w, caches), DEVICE).status == "fail"
    right = Mutant("right", spmv_dense)
    assert verify.surviving_mutants(spmv, [right], DEVICE) == [right]


def test_torch_dtypes_have_the_names_that_workloads_use():
    assert [torch_dtype(n).itemsize for n in ("fp64", "fp32", "fp16", "bf16", "int32")] == [8, 4, 2, 2, 4]
