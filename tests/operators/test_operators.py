"""Every operator of the registry, on the GPU where there is one, else interpreted. A new operator is tested without an edit
here: what is asked of all of them is asked of whatever the registry finds."""

import dataclasses
import re

import opchecks
import pytest
import torch
import turns
from every_operator import OPERATORS, by_name, drawn, middling, small
from where import DEVICE, DTYPES, ROOT, on_hopper, printed

from weft import ops, registry
from weft.bench import cases, host, verify
from weft.definition import Declined, Mutant

pytestmark = pytest.mark.device

MOVES_ONLY = {"memory_access", "transpose", "embedding"}  # families that compute nothing, at least forward
AN_EXCEPTION = re.compile(r"^\w*(Error|Exception|Interrupt): ")


CHECKS: dict[tuple[str, str, str, str], list[verify.Check]] = {}
for _check in verify.checks(OPERATORS, DEVICE, dtypes=DTYPES):
    # interpreted, the public function takes the very kernels of "triton": in one dtype it is enough
    twice = DEVICE == "cpu" and isinstance(_check, verify.Check) and _check.implementation == verify.PUBLIC
    if isinstance(_check, verify.Check) and not (twice and _check.workload.dtype != "fp32"):
        key = (_check.operator.name, _check.implementation, _check.direction, _check.workload.dtype)
        CHECKS.setdefault(key, []).append(_check)


def test_each_operator_is_checked_once_before_any_is_twice():
    """Time may be over soon; what cannot be checked takes none, and no turn."""
    names = [c.operator.name for c in verify.checks(OPERATORS, "cpu") if isinstance(c, verify.Check)]
    once = list(dict.fromkeys(names))
    assert names[: len(once)] == once and len(once) == len(OPERATORS)


# What an implementation declines in one direction and dtype alone, which its registration cannot say, and in which words.
LATER = "a gradient in float16, which waits for the loss's"
LEFT_TO_OTHERS = {("cross_entropy", "single-program", "backward", "fp16"): LATER}
if on_hopper():
    LEFT_TO_OTHERS["newton_schulz", "triton-gram", "forward", "bf16"] = "on sm_90 cuda-gram takes these sizes"


def is_the_public_functions(check):
    """Whether the public function takes this very implementation at this point, and so its own check runs it: interpreted, and
    in the dtype that it is checked in, once is enough here, too."""
    op, w = check.operator, check.workload
    if DEVICE != "cpu" or w.dtype != "fp32" or check.implementation == verify.PUBLIC or op.chooser is None:
        return False
    arguments = drawn(op, w)
    if check.direction == "backward":
        for tensor in cases.tensors([arguments[name] for name in op.differentiable]):
            tensor.requires_grad_()
    return ops.explain(op.name, **arguments).implementation == check.implementation


def in_turn(checks):
    """The checks of this run, and the others. Interpreted, a run has one workload in 12, in fp16 in 24 and of one
    implementation in two, at each commit in continuous integration other ones; with WEFT_LONG=all, and on a GPU, it has
    all."""
    if DEVICE == "cuda" or turns.WANTED == "all":
        return checks, []
    of = checks[0]
    step = min(12 if of.workload.dtype == "fp32" else 24, len(checks))
    first = turns.turn(f"{of.operator.name} {of.implementation} {of.direction}", step)
    return checks[first::step], [c for i, c in enumerate(checks) if i % step != first]


@pytest.mark.parametrize("checks", [
    pytest.param(checks, id="-".join(key), marks=pytest.mark.share(4) if key[-1] == "fp16" else ())
    for key, checks in CHECKS.items()
])  # fmt: skip
def test_every_workload_is_right(checks):
    left = [check for check in checks if not is_the_public_functions(check)]
    if not left:
        return
    mine, others = in_turn(left)
    results = [verify.run(check, DEVICE) for check in mine]
    while others and all(r.status == "declined" for r in results):
        results.append(verify.run(others.pop(0), DEVICE))
    failed = [f"{r.workload}: {r.reason}\n    {r.reproduce}" for r in results if r.status == "fail"]
    assert not failed, "\n".join(failed)
    of = checks[0]
    reason = LEFT_TO_OTHERS.get((of.operator.name, of.implementation, of.direction, of.workload.dtype))
    if reason is None:
        assert len(left) < len(checks) or any(r.status == "pass" for r in results), "it declined every workload"
    else:
        assert all(r.status == "declined" for r in results), "it takes some; LEFT_TO_OTHERS says that it takes none"
        assert any(reason in r.reason for r in results)


def test_what_is_left_to_others_is_verified_of_others():
    for name, implementation, direction, dtype in LEFT_TO_OTHERS:
        assert (name, implementation, direction, dtype) in CHECKS and (name, "triton", direction, dtype) in CHECKS


@by_name(OPERATORS)
def test_something_of_ours_is_verified_here(op):
    verified = {key[1:3] for key in CHECKS if key[0] == op.name}
    for direction in op.directions:
        assert (verify.PUBLIC, direction) in verified
        assert any(op.implementations[n].ours for n, d in verified if d == direction and n != verify.PUBLIC)


@pytest.mark.share(4)
@by_name(OPERATORS)
def test_every_mutant_is_rejected_for_what_it_computes(op, monkeypatch):
    """And not because it raises: an exception says nothing about the tolerance."""

    def judged(check, device, **more):
        result = real(check, device, **more)
        return dataclasses.replace(result, status="declined") if AN_EXCEPTION.match(result.reason) else result

    real = verify.run
    monkeypatch.setattr(verify, "run", judged)
    assert [f"{m.name} ({m.direction})" for m in verify.surviving_mutants(op, op.mutants, DEVICE)] == []


@by_name(OPERATORS)
def test_a_call_of_host_time_is_small_and_right(op):
    arguments = drawn(op, host.small(op), device="cpu")
    assert sum(t.numel() for t in cases.tensors(arguments)) <= 2**18
    op.reference(**arguments)


@by_name(OPERATORS)
def test_each_direction_has_mutants(op):
    names = [(m.direction, m.name) for m in op.mutants]
    assert len(set(names)) == len(names)
    for direction in op.directions:
        assert sum(d == direction for d, _ in names) >= 4


@by_name([op for op in OPERATORS if turns.has(f"right {op.name}", 6)])
def test_what_is_right_is_no_mutant(op):
    """The harness that rejects mutants accepts the reference, at every workload: mutants die of what is wrong with them."""

    def gradient(*dy, **arguments):
        with torch.enable_grad():
            return tuple(cases.results(op, op.reference, "backward", arguments, list(dy)))

    rights = {"forward": op.reference, "backward": gradient}
    right = [Mutant("right", rights[direction], direction) for direction in op.directions]
    assert verify.surviving_mutants(op, right, DEVICE) == right


@by_name(OPERATORS)
def test_every_workload_is_written_and_read(op):
    assert str(op.parse(op.example)) == op.example
    for which in op.workloads:
        for w in op.cases(which):
            assert op.parse(str(w), w.dtype) == w and set(w.axes) == set(op.axes) and w.dtype in op.dtypes
    assert {"verify", "bench", "quick"} <= set(op.workloads)


@by_name(OPERATORS)
def test_cost_is_compulsory_work(op):
    """No more is read than lies in the arguments, no more written than results hold; nothing is free."""
    for direction in op.directions:
        for w in small(op)[:4]:
            arguments = drawn(op, w)
            gradients = None
            read = list(cases.tensors(arguments))
            if direction == "backward":
                out = op.reference(**arguments)
                gradients = cases.output_gradients(op, w, out, torch.Generator(DEVICE).manual_seed(0))
                read += [*gradients, *cases.tensors(out)]
            results = cases.results(op, op.reference, direction, cases.map_tensors(cases.clone, arguments), gradients)
            cost = op.cost(w, direction)
            assert 0 < cost.reads <= sum(t.nbytes for t in read)
            assert 0 < cost.writes <= sum(t.nbytes for t in results)
            assert cost.flops > 0 or registry.family(op.name) in MOVES_ONLY
    for which in ("bench", "quick"):
        assert all(op.cost(w, d).bytes_moved > 0 for w in op.cases(which) for d in op.directions)


@pytest.mark.parametrize(("name", "text", "dtype", "direction", "reads", "writes"), [
    ("vector_add", "N=1000", "fp32", "forward", 8000, 4000),
    ("vector_add", "N=1000", "bf16", "forward", 4000, 2000),
    ("softmax", "M=10,N=20", "fp32", "forward", 800, 800),
    ("softmax", "M=10,N=20", "fp16", "backward", 800, 400),  # y and dy; dx
    ("softmax", "M=10,N=20,inner=3,dim=1", "fp32", "forward", 2400, 2400),
    ("rms_norm", "M=10,N=20", "fp32", "forward", 880, 800),  # x and the weight; y
    ("rms_norm", "M=10,N=20", "bf16", "backward", 840, 440),  # x, dy and the weight; dx and dw
    ("rms_norm", "M=10,N=20,weight=False", "fp32", "forward", 800, 800),
    ("matmul", "M=2,N=3,K=5", "fp32", "forward", 100, 24),
    ("matmul", "M=2,N=3,K=5", "fp16", "backward", 62, 50),  # a, b and dc; da and db
])  # fmt: skip
def test_bytes_are_those_counted_by_hand(name, text, dtype, direction, reads, writes):
    op = registry.get(name)
    cost = op.cost(op.parse(text, dtype), direction)
    assert (cost.reads, cost.writes) == (reads, writes)


def test_matrix_flops_are_those_counted_by_hand():
    op = registry.get("matmul")
    assert op.cost(op.parse("M=2,N=3,K=5", "bf16"), "forward").matrix_flops == {"bf16": 60}
    assert op.cost(op.parse("M=2,N=3,K=5", "bf16"), "backward").matrix_flops == {"bf16": 120}
    assert set(op.cost(op.parse("M=2,N=3,K=5,precision=tf32", "fp32"), "forward").matrix_flops) == {"tf32"}


@by_name(OPERATORS)
def test_inputs_are_random_and_repeat_from_their_seed(op):
    for w in op.cases("verify", ["fp32"]):
        first, again, other = (drawn(op, w, seed) for seed in (1, 1, 2))
        for same_tensor in zip(*(list(cases.tensors(t)) for t in (first, again, other)), strict=True):
            a, b, c = (t.float() if t.is_floating_point() and t.itemsize == 1 else t for t in same_tensor)
            assert a.equal(b) or bool((a.isnan() & b.isnan() | (a == b)).all()), f"{w}: not repeatable"
            if a.is_floating_point() and a.numel() >= 4:
                assert len(a.unique()) > 1, f"{w}: constant"
                assert not a.equal(c), f"{w}: the same for every seed"


@by_name(OPERATORS)
def test_the_public_function_is_documented_and_found(op):
    assert getattr(ops, op.name) is op.public
    for heading in ("Args:", "Returns:", "Raises:"):
        assert heading in op.public.__doc__
    assert (registry.FOLDER / registry.family(op.name) / "README.md").is_file()


@by_name(OPERATORS)
def test_the_choice_of_an_implementation_is_explained(op):
    for w in small(op, options=True):
        choice = ops.explain(op.name, **drawn(op, w))
        assert choice.implementation in op.implementations and len(choice.reason) > 10


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are interpreted only without a GPU; there opcheck runs on it")
def test_every_operator_runs_on_cpu_tensors_and_passes_opcheck():
    """In a process of its own: here, without a GPU, CPU tensors are interpreted. Of the operators' forms (which arguments
    are None) a sixth, at another commit another one."""
    step = 1 if turns.WANTED == "all" else 6
    words = map(str, (turns.turn("opcheck", step), step))
    said = printed("-W", "error", str(ROOT / "tests/operators/opchecks.py"), *words)
    softmaxes = [f"{name}_cluster{of}" for name in ("softmax", "log_softmax") for of in ("", "_backward")]
    hopper = [f"{name}_hopper" for name in ("gram", "gram_polynomial", "newton_schulz")]
    on_cuda_only = {f"weft::{name}" for name in (*softmaxes, *hopper, "weight_only_matmul")}
    assert opchecks.registered() - on_cuda_only - opchecks.BY_COMPILERS == set(said.split())


ON_CPU = """
import sys, torch
from weft import ops, registry
from weft.bench import verify
first, step = map(int, sys.argv[1:])
for op in registry.select():
    points = list(op.cases("verify"))
    for w in points[first % len(points) :: step]:
        for d in op.directions:
            r = verify.run(verify.Check(op, verify.PUBLIC, d, w, op.public), "cpu", draws=1)
            assert r.status == "pass", r
    w = next(op.cases("verify"))
    choice = ops.explain(op.name, **op.inputs(w, torch.Generator(), "cpu"))
    assert choice.implementation == "torch" and "CPU" in choice.reason, choice
"""


def test_public_functions_run_the_reference_on_the_cpu_in_every_dtype():
    step = 1 if turns.WANTED == "all" else 16
    printed("-W", "error", "-c", ON_CPU, str(turns.turn("on a CPU", step)), str(step))


@pytest.mark.gpu
def test_every_operator_passes_opcheck_on_the_gpu():
    found = opchecks.samples("cuda")
    assert {sample[0].name() for sample in found} == opchecks.registered() - opchecks.BY_COMPILERS
    for sample in found:
        opchecks.opcheck(sample)


@pytest.mark.share(4)
@by_name([op for op in OPERATORS if "backward" in op.directions])
def test_second_gradients_are_right_or_refused(op):
    """What has no formula for a second gradient says so; silence would be a wrong answer."""
    w = middling(op)

    def second(function, arguments):
        names = [n for n in op.differentiable if arguments[n] is not None]
        leaves = [t.detach().requires_grad_() for t in cases.tensors([arguments[n] for n in names])]
        call = {**arguments, **dict(zip(names, leaves, strict=True))}
        out = sum(t.square().sum() for t in cases.tensors(function(**call)))
        first = torch.autograd.grad(out, leaves, create_graph=True)
        return torch.autograd.grad(sum(f.square().sum() for f in first), leaves)

    arguments = drawn(op, w)
    want = second(op.reference, cases.map_tensors(cases.to_float64, arguments))
    of_triton = [i for i in op.implementations.values() if i.backend == "triton"]
    ours = [i for i in of_triton if "backward" in (i.directions or op.directions)]
    assert ours
    for made in (op.public, *(i.function for i in ours)):
        try:
            got = second(made, arguments)
        except Declined:
            assert made is not op.public
            continue
        except RuntimeError as error:
            assert re.search(r"no autograd formula|does not require grad|not implemented", str(error)), error
            continue
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


@pytest.mark.share(4)
@by_name([op for op in OPERATORS if "backward" in op.directions])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_taken_for_the_arguments_that_want_them(op, dtype):
    """Of every single differentiable argument, the others constant."""
    w = middling(op, dtype)
    for wanted in op.differentiable:
        arguments = drawn(op, w)
        if arguments[wanted] is None:
            continue
        got, want = [], []
        for function, into in ((op.public, got), (op.reference, want)):
            leaf = arguments[wanted].detach().clone().requires_grad_()
            total = 0
            for out in cases.tensors(function(**{**arguments, wanted: leaf})):
                weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
                total = total + (out.float() * weights).sum()
            into += torch.autograd.grad(total, leaf)
        torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=2e-2 * float(want[0].abs().max()))
