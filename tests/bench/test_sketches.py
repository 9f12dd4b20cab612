"""The sketches of docs/architecture.md, executed: the definition holds operators that are nothing like a softmax.

Each is defined in full; a right implementation must pass the verifier, wrong ones must not. Implementations are plain PyTorch
on the back end ``triton``, so that they count as ours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from where import DEVICE

from weft.bench import cases, compare, verify
from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.hardware.ceilings import Ceilings
from weft.operators.random_inputs import random_tensor

pytestmark = pytest.mark.device


def verdicts(op: Operator, function: Callable[..., Any], direction: str = "forward") -> list[verify.Result]:
    """What the verifier says of an implementation at each workload."""
    return [verify.run(verify.Check(op, "one", direction, w, function), DEVICE) for w in op.cases("verify")]


def assert_right(op: Operator, function: Callable[..., Any], direction: str = "forward") -> None:
    assert [r.reason for r in verdicts(op, function, direction) if r.status != "pass"] == []


def assert_wrong(op: Operator, function: Callable[..., Any], words: str = "", direction: str = "forward") -> None:
    """On some workload, and for what it computes, not because it raises."""
    failed = [r.reason for r in verdicts(op, function, direction) if r.status == "fail"]
    assert any(words in reason for reason in failed if "Error: " not in reason), failed


def vectors(**more: Any) -> Operator:
    """An operator of a vector of 100 elements, unless more is given."""
    return Operator(
        **{
            "name": "vectors",
            "axes": {"N": "elements"},
            "inputs": lambda w, g, device: {"x": random_tensor(g, (w["N"],), w.dtype, device)},
            "cost": lambda w, d: Cost(4 * w["N"], 4 * w["N"]),
            "dtypes": ("fp32",),
            "workloads": {"verify": [workload(N=100)]},
            **more,
        }
    )


# ---- AdamW over many tensors: in place, stateful, no output ----------------------------------------------------------

BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01


def adamw_inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    def tensors() -> list[torch.Tensor]:
        return [random_tensor(g, (w["P"] + i,), w.dtype, device) for i in range(w["T"])]

    squares = [t.square_() for t in tensors()]
    return {"params": tensors(), "grads": tensors(), "exp_avg": tensors(), "exp_avg_sq": squares, "step": 3, "lr": 0.1}


def adamw_reference(params, grads, exp_avg, exp_avg_sq, step, lr) -> None:
    for p, g, m, v in zip(params, grads, exp_avg, exp_avg_sq, strict=True):
        m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        update = m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        p.mul_(1 - lr * DECAY).sub_(update, alpha=lr)


def adamw_foreach(params, grads, exp_avg, exp_avg_sq, step, lr) -> None:
    """Another order of operations than the reference's, over all tensors at once."""
    torch._foreach_lerp_(exp_avg, grads, 1 - BETAS[0])
    torch._foreach_mul_(exp_avg_sq, BETAS[1])
    torch._foreach_addcmul_(exp_avg_sq, grads, grads, 1 - BETAS[1])
    denominator = torch._foreach_sqrt(exp_avg_sq)
    torch._foreach_div_(denominator, math.sqrt(1 - BETAS[1] ** step))
    torch._foreach_add_(denominator, EPS)
    torch._foreach_mul_(params, 1 - lr * DECAY)
    torch._foreach_addcdiv_(params, exp_avg, denominator, -lr / (1 - BETAS[0] ** step))


def adamw_operator(*dtypes: str) -> Operator:
    return Operator(
        name="adamw",
        axes={"T": "tensors", "P": "parameters in each"},
        inputs=adamw_inputs,
        reference=adamw_reference,
        mutates=("params", "exp_avg", "exp_avg_sq"),
        cost=lambda w, d: Cost(reads=16 * w["T"] * w["P"], writes=12 * w["T"] * w["P"]),
        tolerance=Tolerance(scale="tensor", ulps=8.0),
        dtypes=dtypes,
        workloads={"verify": [workload(T=1, P=1), workload(T=3, P=100), workload(T=4, P=1000)]},
    )


adamw = adamw_operator("fp32")


def adamw_with(**changes: Callable[[Any], Any]) -> Callable[..., None]:
    """AdamW with some of its arguments replaced."""

    def wrong(**arguments: Any) -> None:
        adamw_foreach(**{**arguments, **{name: f(arguments[name]) for name, f in changes.items()}})

    return wrong


def copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def test_in_place_operators_hold_in_float64_too():
    """The reference's own type: it must not be run on the arguments that the implementation is then given."""
    assert_right(adamw, adamw_foreach)
    assert_right(adamw, adamw_reference)
    assert_right(adamw_operator("fp64"), adamw_foreach)


@pytest.mark.parametrize("name", ["params", "exp_avg", "exp_avg_sq"])
def test_adamw_that_does_not_update_one_of_its_arguments_fails(name):
    assert_wrong(adamw, adamw_with(**{name: copied}), "allowed")


@pytest.mark.parametrize("name", ["params", "exp_avg", "exp_avg_sq", "grads"])
def test_adamw_that_leaves_out_the_last_tensor_fails(name):
    assert_wrong(adamw, adamw_with(**{name: lambda tensors: [*tensors[:-1], torch.zeros_like(tensors[-1])]}), "allowed")


def test_adamw_without_bias_correction_fails():
    assert_wrong(adamw, adamw_with(step=lambda step: 10**9), "allowed")


def test_an_argument_that_is_changed_undeclared_fails():
    def consumes_gradients(grads, **arguments):
        adamw_foreach(grads=grads, **arguments)
        grads[-1][-1] += 1

    assert_wrong(adamw, consumes_gradients, "argument 'grads' was changed")


def test_a_result_that_nobody_asked_for_fails():
    def chatty(**arguments):
        adamw_foreach(**arguments)
        return arguments["params"][0].sum()

    assert_wrong(adamw, chatty, "results; expected")


def test_integers_may_be_mutated():
    """A step counter on the device, as capturable optimizers keep it."""

    def inputs(w, g, device):
        return {"x": random_tensor(g, (w["N"],), w.dtype, device), "step": torch.tensor([w["N"]], device=device)}

    def reference(x, step):
        step += 1
        x /= step

    def forgetful(x, step):
        x /= step + 1

    counted = vectors(inputs=inputs, reference=reference, mutates=("x", "step"))
    assert_right(counted, reference)
    assert_wrong(counted, forgetful)


def test_in_place_operators_are_judged_fairly_in_a_bench():
    """Every implementation of a comparison is judged on the arguments that it was given."""
    timed = adamw_operator("fp32")
    timed.implementation("foreach")(adamw_foreach)
    timed.implementation("torch")(adamw_reference)
    timed.implementation("wrong")(adamw_with(exp_avg=copied))
    said: list[str] = []
    bench = compare.Bench(DEVICE, Ceilings(DEVICE), budget_s=0.0, say=said.append)
    measured = bench.compare(timed, timed.parse("T=3,P=100", "fp32"), "forward", timed.implementations.values())
    assert [m.implementation for m in measured] == ["foreach", "torch", "wrong"]
    assert len(said) == 1 and said[0].startswith("adamw/wrong")
    assert all(m.error <= 1 for m in measured[:2]) and measured[2].error > 1


# ---- paged attention: a callable argument, integer tables, uneven lengths --------------------------------------------


@dataclass(frozen=True)
class ScoreFunction:
    """A change of the scores."""

    name: str
    plain: Callable[..., Any]


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


def paged_gathered(q, k_pages, v_pages, page_table, lengths, score) -> torch.Tensor:
    """All sequences at once in fp32, the padding masked."""
    head, at = torch.arange(q.shape[1], device=q.device)[:, None], page_table.long()
    k, v = (pages[at].flatten(1, 2).float() for pages in (k_pages, v_pages))  # [B, L, H, D]
    scores = torch.einsum("bhd,blhd->bhl", q.float(), k) / math.sqrt(q.shape[-1])
    position = torch.arange(k.shape[1], device=q.device)
    length = lengths[:, None, None]
    scores = score.plain(scores, head, position, length).masked_fill(position >= length, -torch.inf)
    return torch.einsum("bhl,blhd->bhd", torch.softmax(scores, -1), v).to(q.dtype)


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
        return paged_gathered(**{**arguments, **{name: f(arguments[name]) for name, f in changes.items()}})

    return wrong


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_paged_attention_passes(direction):
    assert_right(paged_attention, paged_gathered, direction)


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
        out = paged_gathered(page_table=page_table, **arguments)
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
    op = vectors(reference=lambda x: x.clone())

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

    result = verdicts(spmv, raises)[0]
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
