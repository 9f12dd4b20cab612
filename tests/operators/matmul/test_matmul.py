"""Products of matrices and of batches where the tests of every operator do not reach: which matrices become rows, what is
broadcast and what its gradient costs, batches beyond a grid's second dimension, which kernel a call takes."""

import pytest
import torch
from tensors import meta, random
from torch.utils._python_dispatch import TorchDispatchMode
from where import DEVICE

from weft import ops, registry
from weft.definition import Declined
from weft.operators.launch import compiling_for
from weft.operators.matmul import dispatch, kernels
from weft.operators.matmul.dispatch import forms
from weft.operators.partial_sums import SplitPlan

pytestmark = pytest.mark.device


def kernel(a, b, precision="ieee"):
    return registry.get("batched_matmul").find("triton").function(a, b, precision)


FORMS = {
    "a batch": (meta(6, 4, 8), meta(6, 8, 5), (6, 4, 8), (6, 8, 5)),
    "two batch dimensions": (meta(2, 3, 4, 8), meta(2, 3, 8, 5), (6, 4, 8), (6, 8, 5)),
    "dimensions of one": (meta(1, 6, 1, 4, 8), meta(6, 1, 8, 5), (6, 4, 8), (6, 8, 5)),
    "one b for all": (meta(2, 3, 4, 8), meta(8, 5), (24, 8), (8, 5)),
    "one b, expanded": (meta(6, 4, 8), meta(8, 5).expand(6, 8, 5), (24, 8), (8, 5)),
    "one b for inner ones": (meta(2, 3, 4, 8), meta(2, 1, 8, 5), (2, 12, 8), (2, 8, 5)),
    "one b, rows that do not follow": (meta(6, 5, 8)[:, :4], meta(8, 5), (6, 4, 8), (6, 8, 5)),
    "one b, a transposed": (meta(6, 8, 4).mT, meta(8, 5), (6, 4, 8), (6, 8, 5)),
    "one b, matrices of one row far apart": (meta(6, 3, 8)[:, :1], meta(8, 5), (6, 8), (8, 5)),
    "one a for all": (meta(4, 8), meta(6, 8, 5), (6, 4, 8), (6, 8, 5)),
    "each of both": (meta(2, 1, 4, 8), meta(3, 8, 5), (2, 3, 4, 8), (2, 3, 8, 5)),
    "heads": (meta(2, 4, 3, 8).transpose(1, 2), meta(2, 3, 8, 5), (2, 3, 4, 8), (2, 3, 8, 5)),
    "matrices": (meta(4, 8), meta(8, 5), (4, 8), (8, 5)),
}


@pytest.mark.parametrize("a, b, of_a, of_b", FORMS.values(), ids=FORMS)
def test_forms_are_as_few_dimensions_as_strides_allow_and_the_same_elements(a, b, of_a, of_b):
    found = forms(a, b)
    assert (found[0].shape, found[1].shape) == (of_a, of_b)
    sizes = (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (a, b))
    a, b = (torch.as_strided(random(size), t.shape, t.stride()) for size, t in zip(sizes, (a, b), strict=True))
    want = torch.matmul(a, b)
    torch.testing.assert_close(torch.matmul(*forms(a, b)).reshape(want.shape), want)
    torch.testing.assert_close(kernel(a, b), want)


class Calls(TorchDispatchMode):
    """The operators of weft, and sums, that are called."""

    def __init__(self):
        super().__init__()
        self.names, self.options = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "weft" or func._schema.name == "aten::sum":
            self.names.append(func._schema.name)
            self.options += args[2:3] if func.namespace == "weft" else ()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("of_a, of_b, forward, backward", [
    ((3, 4, 8), (8, 5), ["weft::matmul"], ["weft::matmul"] * 2),
    ((2, 3, 4, 8), (2, 1, 8, 5), ["weft::matmul"], ["weft::matmul"] * 2),
    ((3, 4, 8), (3, 8, 5), ["weft::matmul"], ["weft::matmul"] * 2),
    ((4, 8), (3, 8, 5), ["weft::matmul"], ["weft::matmul"] * 2 + ["aten::sum"]),
])  # fmt: skip
def test_a_sum_over_rows_of_a_batch_is_part_of_the_gradients_product(of_a, of_b, forward, backward):
    a, b = random(*of_a).requires_grad_(), random(*of_b, seed=1).requires_grad_()
    with Calls() as calls:
        c = kernel(a, b, "tf32x3")
    assert calls.names == forward
    dc = random(*c.shape, seed=2)
    with Calls() as calls:
        got = torch.autograd.grad(c, (a, b), dc)
    assert sorted(calls.names) == sorted(backward) and set(calls.options) == {"tf32x3"}
    torch.testing.assert_close(got, torch.autograd.grad(torch.matmul(a, b), (a, b), dc))


@pytest.mark.parametrize("of_a, of_b", [((4, 8), (16, 8, 5)), ((2, 1, 4, 8), (1, 32, 8, 5))])
def test_the_gradient_of_what_is_broadcast_is_rounded_once(of_a, of_b):
    """A product for each matrix in 16 bits, then their sum, would round 17 or 33 times."""
    a, b = (random(*of, seed=i).half().requires_grad_() for i, of in enumerate((of_a, of_b)))
    c = kernel(a, b)
    dc = random(*c.shape, seed=2).half()
    got = torch.autograd.grad(c, (a, b), dc)
    a, b = (t.detach().double().requires_grad_() for t in (a, b))
    for ours, exact in zip(got, torch.autograd.grad(torch.matmul(a, b), (a, b), dc.double()), strict=True):
        assert ((ours.double() - exact).abs() <= 2.0**-11 * exact.abs() + 1e-4).all()


@pytest.mark.parametrize("of_a, of_b", [((2, 1, 3, 8), (4, 8, 5)), ((2, 3, 8), (8, 5)), ((3, 8), (2, 8, 5))])
@pytest.mark.parametrize("function", [kernel, ops.batched_matmul, ops.matmul])
def test_a_gradient_has_a_gradient(function, of_a, of_b):
    a, b = random(*of_a).requires_grad_(), random(*of_b, seed=1).requires_grad_()
    seconds = []
    for each in (function, torch.matmul):
        first = torch.autograd.grad(each(a, b).square().sum(), (a, b), create_graph=True)
        seconds.append(torch.autograd.grad(sum(f.square().sum() for f in first), (a, b)))
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-1)


def test_an_expanded_operand_has_a_gradient_for_each_of_its_places():
    """What a caller expanded is not one matrix to autograd, whatever a launch makes of it."""
    a, b = random(3, 4, 8), random(8, 5, seed=1).expand(3, 8, 5).requires_grad_()
    c = kernel(a, b)
    dc = random(3, 4, 5, seed=2)
    (got,) = torch.autograd.grad(c, b, dc)
    torch.testing.assert_close(got, a.mT @ dc)


def test_a_batch_is_part_of_a_grids_first_dimension():
    """Which has 2³¹ - 1 programs; the others have 65,535."""
    with compiling_for(90, lambda *compiled: None):
        made = kernels.plan(meta(70000, 100, 16), meta(70000, 16, 16), "ieee")
        assert made.grid[0] == 70000 * -(-100 // made.constants["BLOCK_M"]) and made.grid[1] == 1
        with pytest.raises(Declined, match="more than a grid"):
            kernels.plan(meta(2**31, 1, 1).expand(-1, -1, 8), meta(2**31, 8, 1), "ieee")


def test_offsets_of_far_matrices_are_of_64_bits():
    """Three matrices 2³⁰ elements apart: the last lies past 2³¹ of an operand."""
    if DEVICE == "cpu":
        pytest.skip("4 GiB, and the interpreter computes offsets in NumPy")
    a = torch.zeros(2 * 2**30 + 64, dtype=torch.bfloat16, device=DEVICE).as_strided((3, 8, 8), (2**30, 8, 1))
    a.normal_()
    b = torch.eye(8, dtype=torch.bfloat16, device=DEVICE)
    assert kernel(a, b).equal(a)


def test_few_matrices_of_long_sums_are_split():
    a, b = random(3, 5, 1000), random(3, 1000, 6, seed=1)
    if DEVICE == "cpu":
        assert isinstance(kernels.plan(a[:1].expand(2, -1, -1), b[:2], "ieee"), SplitPlan)
    torch.testing.assert_close(kernel(a, b), a @ b, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(kernel(a[:2], b[:2]), a[:2] @ b[:2], rtol=1e-4, atol=1e-3)


def test_more_batch_dimensions_than_levels_are_declined_by_the_kernel_and_taken_by_the_function():
    a, b = random(2, 1, 2, 1, 3, 8), random(1, 2, 1, 2, 8, 5, seed=1)
    with pytest.raises(Declined, match="4 batch dimensions"):
        kernel(a, b)
    torch.testing.assert_close(ops.batched_matmul(a, b), a @ b)


@pytest.mark.parametrize("a, b, implementation, words", [
    (meta(1024, 4096), meta(4096, 1024), "cuda", "TMA"),
    (meta(512, 4096), meta(4096, 512), "torch", "small"),
    (meta(2056, 4096), meta(4096, 3072), "cuda", "TMA"),
    (meta(2048, 4096), meta(4096, 3080), "torch", "lines"),  # measured: 78 µs, 94 by our loop
    (meta(2048, 4104), meta(4104, 3072), "torch", "lines"),
    (meta(64, 129), meta(129, 64), "torch", "cuBLAS"),
    (meta(32, 1024, 128), meta(32, 1024, 128).mT, "torch", "cuBLAS"),
    (meta(32, 2048, 2048), meta(32, 2048, 128), "torch", "cuBLAS"),
    (meta(16, 512, 4096), meta(4096, 4096), "torch", "cuBLAS"),
    (meta(4096, 64, 64), meta(4096, 64, 64), "triton", "small matrices"),
    (meta(64, 64, 8, 8), meta(64, 64, 8, 64), "triton", "small matrices"),
    (meta(4096, 64, 64), meta(64, 64), "torch", "cuBLAS"),
    (meta(4, 2048, 8, 128).transpose(1, 2), meta(4, 8, 128, 2048), "torch", "cuBLAS"),
    (meta(8, 256, 256, dtype=torch.float32), meta(8, 256, 256, dtype=torch.float32), "torch", "cuBLAS"),
    (meta(0, 256, 256), meta(0, 256, 256), "torch", "empty"),
])  # fmt: skip
def test_a_call_takes_the_kernel_that_is_for_it(a, b, implementation, words):
    with compiling_for(90, lambda *compiled: None):
        for name in ("batched_matmul", "matmul"):
            choice = ops.explain(name, a, b)
            assert (choice.implementation, words in choice.reason) == (implementation, True), choice
            assert ops.explain(name, a, b, direction="backward").implementation == implementation
    with compiling_for(80, lambda *compiled: None):
        assert ops.explain("batched_matmul", a, b).implementation == "torch"


def test_three_tf32_products_are_tritons():
    a = meta(2, 1, 64, 64, dtype=torch.float32)
    with compiling_for(90, lambda *compiled: None):
        choice = ops.explain("batched_matmul", a, a, precision="tf32x3")
        assert choice.implementation == "triton"
        plan, shape = dispatch.FORWARD.of((a, a), "tf32x3")
        assert plan.constants["PRECISION"] == "tf32x3" and shape == (2, 1, 64, 64)


@pytest.mark.skipif(DEVICE == "cuda", reason="there every call without a gradient is eager")
@pytest.mark.parametrize("of_a, of_b", [((2, 3, 4, 8), (8, 5)), ((2, 1, 4, 8), (3, 8, 5)), ((4, 8), (2, 8, 5))])
def test_an_eager_call_launches_the_plan_on_the_tensors_as_they_came(monkeypatch, of_a, of_b):
    monkeypatch.setattr(dispatch, "eager", lambda *tensors: True)
    a, b = random(*of_a), random(*of_b, seed=1)
    for function in (ops.batched_matmul, ops.matmul):
        with Calls() as calls:
            got = function(a, b, "tf32x3")
        assert calls.names == []
        torch.testing.assert_close(got, a @ b, rtol=1e-4, atol=1e-4)


def test_no_part_of_a_split_sum_is_empty():
    """Programs assume it."""
    for steps in (1, 8, 65, 1057, 4000):
        for tiles in (1, 2, 5, 40):
            with compiling_for(90, lambda *compiled: None):
                plan = kernels.plan(meta(64 * tiles, 64 * steps), meta(64 * steps, 64), "ieee")
            products = plan.products if isinstance(plan, SplitPlan) else plan
            parts, steps_of_tile = products.constants["SPLIT"], -(-64 * steps // products.constants["BLOCK_K"])
            assert (parts - 1) * -(-steps_of_tile // parts) < steps_of_tile


def test_a_gradient_on_hopper_is_two_products_by_the_table(monkeypatch):
    """With its own gradient; the main loop is emulated by PyTorch."""
    calls = []

    def of(tensors, *options):
        calls.append(tensors)
        return (lambda a, b, c: c.copy_(a @ b)), (tensors[0].shape[0], tensors[1].shape[1])

    monkeypatch.setattr(dispatch.FORWARD, "of", of)
    a, b = random(6, 8).requires_grad_(), random(8, 5, seed=1).requires_grad_()
    seconds = []
    for function in (dispatch.product, torch.matmul):
        first = torch.autograd.grad(function(a, b).square().sum(), (a, b), create_graph=True)
        seconds.append((*first, *torch.autograd.grad(sum(f.square().sum() for f in first), (a, b))))
    assert len(calls) >= 7
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-1)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_cublas_at_a_precision_sums_the_gradient_of_what_is_broadcast(precision):
    """Where PyTorch's own switch says otherwise, it is set for the product and those of its gradient."""
    cublas = registry.get("batched_matmul").find("torch").function
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "ieee" else "highest")
    try:
        for of_a, of_b in (((2, 1, 3, 8), (4, 8, 5)), ((3, 8), (8, 5))):
            a, b = random(*of_a).requires_grad_(), random(*of_b, seed=1).requires_grad_()
            c = cublas(a, b, precision)
            dc = random(*c.shape, seed=2)
            got = torch.autograd.grad(c, (a, b), dc)
            want = torch.autograd.grad(torch.matmul(a.double(), b.double()), (a, b), dc.double())
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(DEVICE == "cuda", reason="autocast of a CPU")
def test_autocast_casts_as_pytorch_does():
    a, b = random(2, 3, 8), random(2, 8, 5, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        want = torch.matmul(a, b)
        for function in (ops.batched_matmul, ops.matmul):
            for of_a, of_b in ((a, b), (a.bfloat16(), b), (a, b.bfloat16())):
                torch.testing.assert_close(function(of_a, of_b), want, rtol=0, atol=0)
        torch.testing.assert_close(ops.matmul(a[0].bfloat16(), b[0]), torch.mm(a[0], b[0]), rtol=0, atol=0)
        half = ("batched_matmul", a.half(), b), ("matmul", a.half(), b), ("matmul", a[0], b[0].half())
        for name, of_a, of_b in half:
            assert ops.explain(name, of_a, of_b).implementation == "torch"


def test_a_compiler_sees_pytorchs_product():
    a, b = random(2, 3, 8), random(8, 5, seed=1)
    compiled = torch.compile(lambda a, b: ops.matmul(a, b), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), a @ b)
