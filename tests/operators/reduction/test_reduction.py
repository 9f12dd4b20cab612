"""Of reductions, what the tests of every operator leave out: gradients that are views, orders, bad arguments; extrema that save
a mask of the elements that equal the result, or the extrema of spans; ``argmax`` where the index is in doubt."""

import json
import math

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random
from where import DEVICE, printed

from weft import ops, registry
from weft.operators.axis_view import axis_views
from weft.operators.reduction import extremum_mask
from weft.operators.reduction.kernels import vector_tiling

pytestmark = pytest.mark.device


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_the_gradient_of_a_sum_is_a_view(name, dim, keepdim):
    x = random(3, 5, 4).requires_grad_()
    got = getattr(ops, name)(x, dim, keepdim)
    want = getattr(torch, name)(x, dim, keepdim)
    dy = torch.randn_like(want)
    (dx,) = torch.autograd.grad(got, x, dy)
    torch.testing.assert_close(dx, torch.autograd.grad(want, x, dy)[0])
    assert dx.untyped_storage().nbytes() <= dy.nbytes


@pytest.mark.parametrize("name", ["max", "min", "norm"])
def test_a_gradient_of_any_strides_is_taken(name):
    """The gradient of a sum of the result is expanded."""
    x = random(4, 6, 5).requires_grad_()
    got = getattr(ops, name)(x, dim=1).sum()
    want = (torch.linalg.vector_norm(x, dim=1) if name == "norm" else getattr(torch, f"a{name}")(x, 1)).sum()
    torch.testing.assert_close(*(torch.autograd.grad(y, x)[0] for y in (got, want)))


@pytest.mark.parametrize("layout", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("name", ["sum", "max", "argmax"])
def test_permuted_tensors_are_reduced_in_their_own_order(name, layout):
    """Memory order is enough for a sum, not for an index."""
    x = random(3, 5, 7).permute(layout)
    for dim in (None, 0, 1, 2):
        want = getattr(torch, f"a{name}" if name == "max" else name)(x, *(() if dim is None else (dim,)))
        torch.testing.assert_close(getattr(ops, name)(x, dim), want)


@pytest.mark.parametrize("p", [0.5, 1, 2, 3, math.inf])
def test_the_norm_of_no_elements_is_zero(p):
    for shape, dim in (((0,), None), ((3, 0), 1), ((0, 4), 0), ((0, 4), None)):
        x = torch.zeros(shape, device=DEVICE, requires_grad=True)
        y = ops.norm(x, p, dim)
        assert y.equal(torch.zeros_like(torch.sum(x, dim) if dim is not None else torch.sum(x)))
        assert torch.autograd.grad(y.sum(), x)[0].shape == shape
    assert ops.norm(torch.zeros(0, 4, device=DEVICE), p, 1).shape == (0,)


@pytest.mark.parametrize("p", [0.5, 0, 3, -math.inf])
def test_other_norms_are_handed_over(p):
    x = random(3, 9)
    assert ops.explain("norm", x=x, p=p, dim=1, keepdim=False).implementation == "torch"
    torch.testing.assert_close(ops.norm(x, p, 1), torch.linalg.vector_norm(x, p, 1))


X = random(3, 4)
REFUSED = [
    bad("sum", TypeError, "'x' is a list", [1.0]),
    bad("sum", ValueError, "'dim' is 2", X, 2),
    bad("sum", TypeError, "'dim' is 1.0", X, 1.0),
    bad("sum", TypeError, "'keepdim' is 1", X, 1, 1),
    bad("max", ValueError, "no elements along dim=0", X[:0], 0),
    bad("argmax", ValueError, "no elements", X[:0]),
    bad("norm", TypeError, "'p' is 'two'", X, "two"),
    bad(ops.norm, ValueError, "'p' is -1.0 ; (0, 4), no elements along dim=None", X[:0], -1.0),
    bad("mean", TypeError, "dtype int32", X.int()),
]


OPERATORS = {name: registry.get(name) for name in ("max", "min")}

CALLS = ((37, 5), 1), ((9, 3, 20), 1), ((40, 21), 0), ((4, 100), -1), ((7, 6), None), ((3, 50, 4), 1), ((6, 1), 1)


def leaf(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(2).round().to(DEVICE)  # ties
    return x.requires_grad_()


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dim"), CALLS)
@pytest.mark.parametrize("name", OPERATORS)
def test_x_may_be_overwritten_before_the_gradient(name, shape, dim, keepdim):
    op = OPERATORS[name]
    x = leaf(shape)
    want = op.reference(x, dim, keepdim)
    dy = torch.randn_like(want)
    (dx,) = torch.autograd.grad(want, x, dy)
    values = x.detach().clone().requires_grad_()
    inner = values * 1
    got = op.public(inner, dim, keepdim)
    assert len(got.grad_fn.saved_tensors) == 1
    assert got.grad_fn.saved_tensors[0].dtype == torch.uint8
    assert got.grad_fn.saved_tensors[0].numel() <= -(-x.numel() // 8) + 8 * got.numel()
    with torch.no_grad():
        inner.fill_(7)
        got.detach().fill_(7)
    assert torch.equal(torch.autograd.grad(got, values, dy)[0], dx)


@pytest.mark.parametrize(("shape", "dim"), CALLS)
def test_the_gradient_has_a_gradient(shape, dim):
    x = leaf(shape)
    weight = torch.randn_like(x)
    found = []
    for function in (OPERATORS["max"].public, OPERATORS["max"].reference):
        y = function(x, dim)
        dy = torch.ones_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        found.append((dx.detach(), *torch.autograd.grad((dx * weight).sum(), dy)))
    torch.testing.assert_close(*found)


def test_a_gradient_of_an_extremum_may_have_any_strides():
    """An expanded one comes out of a sum of the result; rows that lie side by side in memory become columns."""
    for shape, dims, dim in (((4, 6, 5), (0, 1, 2), 1), ((9, 6), (1, 0), 1), ((4, 6, 5), (2, 0, 1), 0)):
        x = leaf(shape)
        for weight in (1.0, torch.randn([n for i, n in enumerate(x.permute(dims).shape) if i != dim], device=DEVICE)):
            for turned in (False, True):
                two_axes = isinstance(weight, torch.Tensor) and weight.ndim == 2
                by = weight.t().contiguous().t() if turned and two_axes else weight
                functions = OPERATORS["min"].public, OPERATORS["min"].reference
                found = [torch.autograd.grad((f(x.permute(dims), dim) * by).sum(), x)[0] for f in functions]
                torch.testing.assert_close(*found)


def test_a_mask_is_saved_for_a_gradient_alone():
    x = leaf((5, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extremum_mask.MaskPlan, "save", None)
        with torch.no_grad():
            OPERATORS["max"].public(x, 1)
        OPERATORS["max"].public(x.detach(), 1)
    long = torch.ones(2, 33000, device=DEVICE).requires_grad_()
    assert len(OPERATORS["max"].public(long, 1).grad_fn.saved_tensors) == 3, "x, the result and the extrema of spans"


@pytest.mark.parametrize(("shape", "dim"), [((2, 33000), 1), ((20000, 3), 0), ((1, 40000), None), ((3, 9000, 2), 1)])
@pytest.mark.parametrize("name", OPERATORS)
def test_of_long_extents_x_is_read_where_the_extremum_is(name, shape, dim):
    op = OPERATORS[name]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    along = x.movedim(dim, 0) if dim is not None else x.view(-1)
    along[:3] = 5 if name == "max" else -5  # three ties, all in the first span
    x.requires_grad_()
    want = op.reference(x, dim)
    dy = torch.randn_like(want)
    (dx,) = torch.autograd.grad(want, x, dy)
    got = op.public(x, dim)
    assert torch.equal(got, want)
    late = x.detach().movedim(dim, 0) if dim is not None else x.detach().view(-1)
    late.data[along.shape[0] // 2 :] = torch.nan  # unseen by autograd, and by the gradient
    x_as_saved = got.grad_fn.saved_tensors[0]
    assert x_as_saved.isnan().any()
    assert torch.equal(torch.autograd.grad(got, x, dy)[0], dx)


def test_of_long_extents_an_overwritten_x_is_noticed():
    x = torch.rand(2, 33000, device=DEVICE).requires_grad_()
    inner = x * 1
    y = OPERATORS["max"].public(inner, 1)
    inner.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)


# rows that are one tile, one step, several steps with and without a rest, several parts; columns; rows that begin anywhere
SHAPES = [
    ((5, 3), 1), ((9, 8), 1), ((5, 40), 1), ((7, 136), 1), ((3, 256), 1), ((3, 333), 1), ((2, 1500), 1), ((1, 5000), 1),
    ((1, 2304), None), ((4, 70), 0), ((700, 5), 0), ((1300, 16), 0), ((2, 90, 6), 1), ((3, 7, 8), 1),
]  # fmt: skip


def few_values(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=g).float()


def zeros_of_both_signs(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(shape, generator=g) < 0.5, 0.0, -0.0)


def nothing_but_minus_infinity(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.full(shape, -torch.inf)


def some_nan(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=g)
    return x.masked_fill(torch.rand(shape, generator=g) < 0.02, torch.nan).masked_fill(x > 2, torch.inf)


def one_equal_late(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Two equal largest elements next to each other, at the end of x."""
    x = torch.rand(shape, generator=g)
    x.view(-1)[-2:] = 3
    return x


@pytest.mark.share(6)
@pytest.mark.parametrize(
    "values", [few_values, zeros_of_both_signs, nothing_but_minus_infinity, some_nan, one_equal_late]
)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_first_of_equals_is_found(values, shape, dim, dtype):
    x = values(shape, torch.Generator().manual_seed(3)).to(dtype)
    # PyTorch's choice among equals is not documented: NaN first, then the largest, then the lowest index
    along = x.flatten() if dim is None else x.movedim(dim, -1)
    best = along.amax(-1, keepdim=True)
    hits = (along == best) | (along.isnan() & best.isnan())
    want = torch.where(hits, torch.arange(along.shape[-1]), 2**62).amin(-1)
    assert torch.equal(ops.argmax(x.to(DEVICE), dim).cpu(), want)


@pytest.mark.parametrize(("dtype", "n", "apart", "taken"), [
    (torch.bfloat16, 4095, 4095, False), (torch.bfloat16, 4097, 4097, True), (torch.bfloat16, 4098, 4098, True),
    (torch.bfloat16, 4100, 4100, False), (torch.float16, 4096, 4099, True), (torch.float32, 16383, 16383, False),
    (torch.float32, 16385, 16385, True), (torch.float32, 16386, 16386, True), (torch.float32, 16388, 16388, False),
])  # fmt: skip
def test_long_rows_that_begin_anywhere_are_read_by_vectors(dtype, n, apart, taken):
    """Rows of 16 bits on 8 bytes are as fast without."""
    x = torch.randint(-2, 3, (3, apart)).to(dtype)[:, :n]
    (v,) = axis_views(x, 1)
    assert (vector_tiling(v, x) is not None) == taken
    assert torch.equal(ops.sum(x.to(DEVICE), 1).cpu().float(), x.float().sum(1).to(dtype).float())


# Compiles what a process that interprets cannot: instructions and 16-byte loads between the labels of each kernel.
COUNTED = """
import json, re, sys
from weft import registry
from weft.bench.instructions import _disassemble
from weft.operators.launch import compiling_for

op, found = registry.get("argmax"), []
for workload, dtype in json.loads(sys.argv[1]):
    with compiling_for(90, lambda name, cubin, *_: found.append(_disassemble(cubin))):
        op.implementations["triton"].function(**op.inputs(op.parse(workload, dtype), None, "meta"))
count = lambda words, text: len(re.findall(words, text))
parts = [re.split(r"^\\.L_x_\\d+:", text, flags=re.M) for text in found]
instructions = r"/\\*[0-9a-f]{4,5}\\*/ +(?!NOP)\\S"
wanted = (instructions, r"LDG\\.E\\.128", r"\\b(STL|LDL)\\b")
print(json.dumps([[[count(words, part) for words in wanted] for part in kernel] for kernel in parts]))
"""

# workload, dtype, elements of a thread, the most instructions an element
COSTS = [
    ("M=1048576,N=256", "bf16", 32, 5.2),
    ("M=65536,N=4096", "bf16", 128, 4.2),
    ("M=4096,N=65536", "bf16", 256, 3.6),
    ("M=65536,N=4096", "fp32", 128, 5.7),
]


@pytest.mark.share(3)
def test_an_element_takes_few_instructions():
    """On sm_90, of a thread. Memory leaves time for 12 an element of 16 bits, and most are of units that do half as many."""
    said = printed("-c", COUNTED, json.dumps([cost[:2] for cost in COSTS]))
    for (workload, dtype, elements, most), kernel in zip(COSTS, json.loads(said), strict=True):
        assert not any(spilled for _, _, spilled in kernel)
        vector = 8 if dtype == "bf16" else 4
        if "N=256" in workload:
            count = kernel[0][0]
        else:  # all is done once but for the loop, and for the masked step behind it, which whole rows skip
            loop, masked = [part for part in kernel if part[1] > 1]
            assert loop[1] == masked[1]
            count = loop[0] * elements / vector / loop[1] + sum(part[0] for part in kernel if part[1] <= 1)
        assert count / elements <= most, (workload, dtype)
