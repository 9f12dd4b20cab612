"""The verifier, on operators that are nothing like a softmax: those in place, with a callable argument, and with containers.

A right implementation must pass, wrong ones must not. Implementations are plain PyTorch on the back end ``triton``, so that
they count as ours.
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
            "name": "vectors", "axes": {"N": "elements"},
            "inputs": lambda w, g, device: {"x": random_tensor(g, (w["N"],), w.dtype, device)},
            "cost": lambda w, d: Cost(4 * w["N"], 4 * w["N"]), "dtypes": ("fp32",),
            "workloads": {"verify": [workload(N=100)]}, **more,
        }
    )  # fmt: skip


# What fails of AdamW over many tensors is among the mutants of operators/optimizer.


def halved_reference(x, factor) -> None:
    x.mul_(factor)


def halved_operator(dtype: str = "fp32") -> Operator:
    return vectors(
        inputs=lambda w, g, device: {n: random_tensor(g, (w["N"],), w.dtype, device) for n in ("x", "factor")},
        reference=halved_reference, mutates=("x",), dtypes=(dtype,),
    )  # fmt: skip


halved = halved_operator()


def test_in_place_operators_hold_in_float64_too():
    """The reference's own type: it must not be run on the arguments that the implementation is then given."""
    assert_right(halved, halved_reference)
    assert_right(halved_operator("fp64"), halved_reference)


def test_an_argument_that_is_not_updated_or_is_changed_undeclared_fails():
    def consumes_the_factor(x, factor):
        halved_reference(x, factor)
        factor[-1] += 1

    assert_wrong(halved, lambda x, factor: halved_reference(x.clone(), factor), "allowed")
    assert_wrong(halved, consumes_the_factor, "argument 'factor' was changed")


def test_a_result_that_nobody_asked_for_fails():
    def chatty(x, factor):
        halved_reference(x, factor)
        return x.sum()

    assert_wrong(halved, chatty, "results; expected")


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
    timed = halved_operator()

    @timed.implementation("other")
    def _(x, factor):
        x.copy_(x * factor)

    timed.implementation("torch")(halved_reference)
    timed.implementation("wrong")(lambda x, factor: halved_reference(x.clone(), factor))
    said: list[str] = []
    bench = compare.Bench(DEVICE, Ceilings(DEVICE), budget_s=0.0, say=said.append)
    measured = bench.compare(timed, timed.parse("N=100", "fp32"), "forward", timed.implementations.values())
    assert [m.implementation for m in measured] == ["other", "torch", "wrong"]
    assert len(said) == 1 and said[0].startswith("vectors/wrong")
    assert all(m.error <= 1 for m in measured[:2]) and measured[2].error > 1


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
        "k_pages": random_tensor(g, shape, w.dtype, device), "v_pages": random_tensor(g, shape, w.dtype, device),
        "page_table": order.to(device, torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device), "score": ScoreFunction("alibi", alibi),
    }  # fmt: skip


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
    inputs=paged_inputs, reference=paged_reference, cost=paged_cost, directions=("forward", "backward"),
    differentiable=("q", "v_pages"), dtypes=("fp32", "fp16"), tolerance=Tolerance(scale="tensor", ulps=4.0),
    workloads={
        "verify": [
            workload(B=1, H=1, D=8, L=1, P=4),
            workload(B=3, H=2, D=16, L=37, P=8),
            workload(B=2, H=4, D=8, L=16, P=16),
        ]
    },
)  # fmt: skip


def changed(**changes: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """Paged attention with some of its arguments replaced."""

    def wrong(**arguments: Any) -> torch.Tensor:
        return paged_gathered(**{**arguments, **{name: f(arguments[name]) for name, f in changes.items()}})

    return wrong


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_paged_attention_passes(direction):
    assert_right(paged_attention, paged_gathered, direction)


@pytest.mark.parametrize("wrong", [
    pytest.param(changed(page_table=lambda t: torch.arange(t.numel()).to(t.device).view_as(t)), id="table-ignored"),
    pytest.param(changed(lengths=lambda t: (t - 1).clamp_min(1)), id="last-token-left-out"),
    pytest.param(changed(lengths=lambda t: t.max().expand_as(t)), id="padding-attended"),
    pytest.param(changed(score=lambda f: ScoreFunction("none", lambda s, *_: s)), id="score-ignored"),
    pytest.param(changed(v_pages=lambda t: t.roll(1, 2) if t.shape[2] > 1 else t), id="heads-swapped"),
])  # fmt: skip
def test_paged_attention_that_ignores_an_argument_fails(wrong):
    assert_wrong(paged_attention, wrong, "allowed")
    assert_wrong(paged_attention, wrong, "allowed", "backward")


def test_integer_tables_must_stay_as_they_are():
    def sorts_the_table(page_table, **arguments):
        out = paged_gathered(page_table=page_table, **arguments)
        page_table.copy_(page_table.sort(-1).values)
        return out

    assert_wrong(paged_attention, sorts_the_table, "argument 'page_table' was changed")


class Pair(NamedTuple):
    values: torch.Tensor
    at: torch.Tensor


@dataclass(frozen=True)
class Permuted:
    """Values with the order in which they are read."""

    values: torch.Tensor
    at: torch.Tensor


def permuted_inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    order = torch.arange(w["N"], device=device).flip(0)
    return {"of": Permuted(random_tensor(g, (w["N"],), w.dtype, device), order)}


def read(of: Permuted) -> torch.Tensor:
    return of.values[of.at]


@pytest.mark.parametrize("field", ["values", "at"])
def test_containers_are_watched_inside(field):
    def overwrites(of):
        out = read(of)
        getattr(of, field).zero_()
        return out

    permuted = vectors(inputs=permuted_inputs, reference=read)
    assert_right(permuted, read)
    assert_wrong(permuted, overwrites, "argument 'of' was changed")


def test_trees_keep_their_form():
    x = torch.ones(2)
    tree = {"a": [x, (x, 3)], "b": Permuted(x, x), "c": Pair(x, x), "d": "word", "e": None}
    doubled = cases.map_tensors(lambda t: t * 2, tree)
    assert isinstance(doubled["c"], Pair) and isinstance(doubled["a"][1], tuple) and doubled["d"] == "word"
    assert len(list(cases.tensors(doubled))) == 6 and all(float(t[0]) == 2 for t in cases.tensors(doubled))
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

    result = verdicts(halved, raises)[0]
    assert result.status == "fail" and result.reason == "RuntimeError: out of luck"
    words = "weft verify vectors --implementation one --direction forward --dtype fp32 --workload N=100"
    assert result.reproduce == words


def test_stale_output_fails_on_the_second_draw():
    kept: dict[Any, torch.Tensor] = {}
    doubled = vectors(reference=lambda x: 2 * x, dtypes=("fp32", "fp16"))
    assert_wrong(doubled, lambda x: kept.setdefault(x.shape, 2 * x), "allowed")
    right = Mutant("right", lambda x: x + x)
    assert verify.surviving_mutants(doubled, [right], DEVICE) == [right]


def test_torch_dtypes_have_the_names_that_workloads_use():
    assert [torch_dtype(n).itemsize for n in ("fp64", "fp32", "fp16", "bf16", "int32")] == [8, 4, 2, 2, 4]
