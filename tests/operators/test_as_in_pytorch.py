"""Calls as PyTorch's own functions take them: values, dtypes and gradients are PyTorch's."""

import functools

import pytest
import torch
import torch.nn.functional as F
from refused import refused
from where import DEVICE

from weft import ops
from weft.operators.call import promoted

pytestmark = pytest.mark.device

F16, F32, F64 = torch.float16, torch.float32, torch.float64
SUMS = {"sum": torch.sum, "mean": torch.mean, "norm": functools.partial(torch.linalg.vector_norm, ord=2)}
REDUCTIONS = {**SUMS, "max": torch.amax, "min": torch.amin}
ALONG = {"cumsum": torch.cumsum, "cumprod": torch.cumprod, "softmax": torch.softmax, "log_softmax": torch.log_softmax}


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def assert_alike(got, want, *leaves):
    """Results, and gradients of the leaves."""
    assert got.shape == want.shape
    tolerance = 4 * max(torch.finfo(t.dtype).eps for t in (want, *leaves))
    torch.testing.assert_close(got, want, rtol=4 * tolerance, atol=4 * tolerance)
    if leaves:
        weights = torch.randn_like(want)
        both = (torch.autograd.grad(out, leaves, weights) for out in (got, want))
        for of_got, of_want in zip(*both, strict=True):
            torch.testing.assert_close(of_got, of_want, rtol=4 * tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dim", [(0, 2), (1, 2), [-1, 0], (2, 1), (0, 1, 2, 3), (), (3,), (-1, -2, -3)], ids=str)
def test_several_dimensions(name, dim):
    contiguous = random(2, 3, 4, 5).requires_grad_()
    for x in (contiguous, contiguous.transpose(1, 2)):
        for keepdim in (False, True):
            want = REDUCTIONS[name](x, dim=dim, keepdim=keepdim)
            assert_alike(getattr(ops, name)(x, dim=dim, keepdim=keepdim), want, contiguous)


def test_neighbouring_dimensions_take_the_kernel():
    x = random(2, 3, 4, 5)
    for name in REDUCTIONS:
        chosen = [ops.explain(name, x, dim=dim).implementation for dim in ((1, 2), (3, 2), (0, 1), (0, 2), (1, 2, 3))]
        assert chosen == ["triton", "triton", "triton", "torch", "triton"]
    assert ops.explain("sum", x.transpose(1, 2), dim=(1, 2)).implementation == "torch"


@pytest.mark.parametrize("name", [*SUMS, *ALONG])
@pytest.mark.parametrize(("given", "dtype"), [(F16, F32), (F16, F64), (F32, F32), (F32, F16), (F64, F32)], ids=str)
def test_the_dtype_of_the_result(name, given, dtype):
    if name == "norm" and dtype.itemsize < given.itemsize:
        with pytest.raises(RuntimeError, match="narrowing"):  # PyTorch's
            ops.norm(random(3, 4, dtype=given), dtype=dtype)
        return
    x = random(3, 5, 4, dtype=given).requires_grad_()
    assert_alike(getattr(ops, name)(x, dim=1, dtype=dtype), {**SUMS, **ALONG}[name](x, dim=1, dtype=dtype), x)
    if (given, dtype) == (F16, F32):
        assert ops.explain(name, x[0], dim=-1, dtype=dtype).implementation == "triton"


@pytest.mark.parametrize("name", [*REDUCTIONS, *ALONG, "logcumsumexp"])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_dtypes_under_autocast(name, dtype):
    x = random(3, 4, dtype=dtype)
    plain = {**REDUCTIONS, **ALONG, "logcumsumexp": torch.logcumsumexp}[name]
    with torch.autocast(DEVICE, torch.bfloat16):
        assert getattr(ops, name)(x, dim=1).dtype == plain(x, dim=1).dtype
        if name in ALONG:
            assert getattr(ops, name)(x, dim=1, dtype=torch.bfloat16).dtype == torch.bfloat16
        softmax = torch.softmax(x, -1).dtype
        assert ops.causal_softmax(x).dtype == ops.masked_softmax(x, x > 0).dtype == softmax


def test_a_mixture_of_experts_under_autocast_casts_as_linear_layers_do():
    x, router, up, down = random(6, 8).bfloat16(), random(3, 8), random(3, 8, 8, seed=1), random(3, 8, 4, seed=2)
    leaves = [t.requires_grad_() for t in (router, up, down)]
    with torch.autocast(DEVICE, torch.bfloat16):
        if DEVICE == "cpu":  # the interpreter computes bf16 wrongly: which dtypes there are
            assert ops.moe_feed_forward(x, *leaves, 2).dtype == torch.bfloat16
            return
        got = ops.moe_feed_forward(x, *leaves, 2)
    assert_alike(got, ops.moe_feed_forward(x, *(t.bfloat16() for t in leaves), 2), *leaves)


SHAPES = [
    ((4,), (4,)), ((4,), (4, 6)), ((5, 4), (4,)), ((4,), (3, 4, 6)), ((3, 5, 4), (4,)), ((0,), (0,)), ((1,), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("precision", [None, "ieee", "tf32x3"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_products_of_vectors(shapes, precision):
    a, b = (random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))
    assert_alike(ops.matmul(a, b, precision), torch.matmul(a.double(), b.double()).float(), a, b)


@pytest.mark.parametrize("alpha", [1, 0.3, -2])
@pytest.mark.parametrize(
    "y", [2.5, 3, random(3, 1), random(4, dtype=F16), torch.tensor(0.1, dtype=F64, device=DEVICE)], ids=repr
)
def test_add(y, alpha):
    for dtype in (F32, F16):
        x = random(3, 4, dtype=dtype, seed=1).requires_grad_()
        assert_alike(ops.add(x, y, alpha=alpha), torch.add(x, y, alpha=alpha), x)
        assert ops.explain("add", x, y, alpha=alpha).implementation in ("torch", "triton")
    if isinstance(y, torch.Tensor):
        assert_alike(ops.add(y, x), torch.add(y, x), x)


@pytest.mark.parametrize("dims", [(0, 1), (-4, -1), (1, 1), (3, 2), (-2, 0)], ids=str)
def test_transposed_dimensions(dims):
    x = random(2, 3, 4, 5).requires_grad_()
    y = ops.transpose(x, *dims)
    assert y.is_contiguous() and y.data_ptr() != x.data_ptr()
    assert_alike(y, x.transpose(*dims), x)


def of_hugging_face(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(2) + torch.cat((-b, a), -1) * sin.unsqueeze(2)


@pytest.mark.parametrize("batch", [3, 1, None])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_rotary_tables_of_one_batch_or_as_wide_as_the_head(batch, dtype):
    q, k = (random(3, 5, heads, 8, dtype=dtype, seed=heads).requires_grad_() for heads in (4, 2))
    half = random(*([] if batch is None else [batch]), 5, 4)
    cos, sin = (torch.cat((t, t), -1) for t in (half.cos(), half.sin()))
    want = [of_hugging_face(t.float(), *(w if batch else w[None] for w in (cos, sin))).to(dtype) for t in (q, k)]
    for tables in ((cos, sin), (half.cos(), half.sin())):
        with torch.autocast(DEVICE, torch.bfloat16):
            got = ops.rotary_embedding(q, k, *tables)
        for each in zip(got, want, (q, k), strict=True):
            assert_alike(*each[:2])
        grads = (torch.autograd.grad(sum(y.sum() for y in pair), (q, k), retain_graph=True) for pair in (got, want))
        for one, other in zip(*grads, strict=True):
            assert_alike(one, other)


X = random(2, 3, 4)


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: ops.sum(X, (0, -3)), ValueError, "sum: 'dim'; (0, -3); each dimension once"),
    (lambda: ops.sum(X, (0, 3)), ValueError, "sum: 'dim'; is 3; -3 … 2"),
    (lambda: ops.max(X[:, :0], (1, 2)), ValueError, "max: 'x'; (2, 0, 4); at least one"),
    (lambda: ops.argmax(X, (0, 1)), TypeError, "argmax: 'dim'; (0, 1); an int"),
    *(
        (functools.partial(getattr(ops, name), X, dtype=torch.int32), TypeError, f"{name}: 'dtype'; int32; float64")
        for name in (*SUMS, *ALONG)
    ),
    (lambda: ops.add(X, "1"), TypeError, "add: 'y'; '1'; a number"),
    (lambda: ops.add(X, 1, alpha=None), TypeError, "add: 'alpha'; None; a number"),
    (lambda: ops.add("1", 1), TypeError, "add: 'x'; str; torch.Tensor"),
    (lambda: ops.transpose(X, 0, 3), ValueError, "transpose: 'dim'; is 3; -3 … 2"),
    (
        lambda: ops.rotary_embedding(X[..., None, :], X[..., None, :], X, X, True), ValueError,
        "rotary_embedding: 'cos'; (2, 3, 4); interleaved=False",
    ),
])  # fmt: skip
def test_refusals(call, error, words):
    name, _, rest = words.partition(": ")
    with refused(error, f"{name}: ; {rest}"):
        call()


# Tensors of different dtypes, as autocast's bf16 branch beside an fp32 residual.

WIDE = random(6, 16)
HALF = random(6, 16, dtype=F16, seed=1)
WEIGHT = random(16, 16, seed=2)
BOTH = {  # ours and PyTorch's, of a tensor of 16 bits and one of 32
    "add": (ops.add, torch.add),
    "swiglu": (ops.swiglu, lambda gate, up: F.silu(gate.float()) * up),
    "geglu": (ops.geglu, lambda gate, up: F.gelu(gate.float()) * up),
    "reglu": (ops.reglu, lambda gate, up: F.relu(gate) * up),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_elementwise_operators_promote(name, swapped):
    ours, theirs = BOTH[name]
    tensors = (WIDE, HALF) if swapped else (HALF, WIDE)
    found = []
    for function in (ours, theirs):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = function(*leaves)
        found.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for got, right in zip(*found, strict=True):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right, rtol=2e-3, atol=2e-3)


def test_a_tensor_without_dimensions_decides_no_dtype():
    number, x = torch.tensor(2.0), torch.ones(3, dtype=torch.bfloat16)
    assert [t.dtype for t in promoted(number, x)] == [torch.bfloat16] * 2 == [(number + x).dtype] * 2
    assert {t.dtype for t in promoted(number, number.double())} == {torch.float64}


@pytest.mark.parametrize("x", [WIDE, HALF])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_linear_layers_residual_of_another_dtype_is_not_rounded(x, autocast):
    residual = WIDE if x is HALF or autocast else HALF
    with torch.autocast(DEVICE, dtype=torch.float16 if DEVICE == "cuda" else torch.bfloat16, enabled=autocast):
        weight = WEIGHT if autocast else WEIGHT.to(x.dtype)
        got, right = ops.linear(x, weight, residual=residual), F.linear(x, weight) + residual
    assert got.dtype == right.dtype == torch.float32
    torch.testing.assert_close(got, right, rtol=1e-2, atol=1e-2)
    assert ops.explain("linear", HALF, WEIGHT.half(), residual=WIDE) == ops.explain("linear", HALF, WEIGHT.half())
    with pytest.raises(ValueError, match=r"'residual' has shape \(6, 1\); expected \(6, 16\), the result's"):
        ops.linear(HALF, WEIGHT.half(), residual=WIDE[:, :1])
