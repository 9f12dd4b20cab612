"""Bad input is refused before any launch, in words that name the argument, what came in and what is expected; odd input
that is not bad gives the right answer."""

from __future__ import annotations

import math
import re

import pytest
from where import DEVICE, DTYPES

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import ops, registry  # noqa: E402
from weft.definition import torch_dtype  # noqa: E402
from weft.operators.random_inputs import LAYOUTS, random_tensor  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


ROW = {"device": DEVICE}
REFUSED = [
    # not a tensor
    ("vector_add", lambda: ((None, x(3)), {}), TypeError, ["'x'", "NoneType", "torch.Tensor"]),
    ("vector_add", lambda: ((x(3), 2.0), {}), TypeError, ["'y'", "float", "torch.Tensor"]),
    ("softmax", lambda: (([1.0, 2.0],), {}), TypeError, ["'x'", "list", "torch.Tensor"]),
    ("rms_norm", lambda: (("x",), {}), TypeError, ["'x'", "str", "torch.Tensor"]),
    ("rms_norm", lambda: ((x(2, 3), [1.0] * 3), {}), TypeError, ["'weight'", "list", "torch.Tensor"]),
    ("matmul", lambda: ((x(2, 3), 1), {}), TypeError, ["'b'", "int", "torch.Tensor"]),
    # dtypes
    *(
        (
            name,
            lambda d=d, k=k: (tuple(x(3, 3, dtype=d) for _ in range(k)), {}),
            TypeError,
            [arg, word, "float32, float16 or bfloat16"],
        )
        for name, arg, k in (
            ("vector_add", "'x'", 2),
            ("softmax", "'x'", 1),
            ("rms_norm", "'x'", 1),
            ("matmul", "'a'", 2),
        )
        for d, word in (
            (torch.int32, "int32"),
            (torch.int64, "int64"),
            (torch.bool, "bool"),
            (torch.float64, "float64"),
            (torch.complex64, "complex64"),
        )
    ),
    (
        "vector_add",
        lambda: ((x(3), x(3, dtype=torch.float16)), {}),
        TypeError,
        ["'y'", "float16", "float32", "same dtype"],
    ),
    (
        "matmul",
        lambda: ((x(3, 3), x(3, 3, dtype=torch.float16)), {}),
        TypeError,
        ["'b'", "float16", "float32", "same dtype"],
    ),
    (
        "rms_norm",
        lambda: ((x(2, 3), x(3, dtype=torch.float16)), {}),
        TypeError,
        ["'weight'", "float16", "expected float32"],
    ),
    (
        "rms_norm",
        lambda: ((x(2, 3, dtype=torch.float16), x(3, dtype=torch.bfloat16)), {}),
        TypeError,
        ["'weight'", "bfloat16", "expected float16 or float32"],
    ),
    ("softmax", lambda: ((x(3, 3).to_sparse(),), {}), TypeError, ["'x'", "torch.sparse_coo", "dense"]),
    # ranks and shapes
    ("vector_add", lambda: ((x(3), x(4)), {}), ValueError, ["'y'", "(4,)", "(3,)", "same shape"]),
    ("vector_add", lambda: ((x(3, 1), x(3)), {}), ValueError, ["'y'", "(3,)", "(3, 1)", "same shape"]),
    ("rms_norm", lambda: ((x(),), {}), ValueError, ["'x'", "scalar", "at least one dimension"]),
    ("rms_norm", lambda: ((x(2, 3), x(2)), {}), ValueError, ["'weight'", "(2,)", "(3,)", "(2, 3)"]),
    ("rms_norm", lambda: ((x(2, 3), x(1, 3)), {}), ValueError, ["'weight'", "(1, 3)", "(3,)"]),
    ("rms_norm", lambda: ((x(2, 3), x()), {}), ValueError, ["'weight'", "()", "(3,)"]),
    ("matmul", lambda: ((x(3), x(3, 4)), {}), ValueError, ["'a'", "(3,)", "matrix"]),
    ("matmul", lambda: ((x(3, 4), x(4)), {}), ValueError, ["'b'", "(4,)", "matrix"]),
    ("matmul", lambda: ((x(1, 3, 4), x(5, 4)), {}), ValueError, ["'a'", "'b'", "(1, 3, 4)", "(5, 4)", "4 rows"]),
    *(
        (name, lambda a=a, b=b: ((x(*a), x(*b)), {}), ValueError, words)
        for name in ("matmul", "batched_matmul")
        for a, b, words in (
            ((2, 3, 4), (4,), ["'b'", "(4,)", "two dimensions or more"]),
            ((2, 3, 4), (3, 4, 5), ["(2, 3, 4)", "(3, 4, 5)", "batch dimensions", "not 2 and 3"]),
            ((2, 3, 4), (2, 3, 5), ["(2, 3, 4)", "(2, 3, 5)", "4 rows"]),
        )
    ),
    (
        "batched_matmul",
        lambda: ((x(2, 3, 4), x(4, 5, dtype=torch.float16)), {}),
        TypeError,
        ["'b'", "float16", "same dtype"],
    ),
    (
        "batched_matmul",
        lambda: ((x(2, 3, 3), x(3, 3)), {"precision": "fp8"}),
        ValueError,
        ["'precision'", "'fp8'", "tf32x3"],
    ),
    (
        "batched_matmul",
        lambda: ((x(2, 2, 3), x(3, 4, device="meta")), {}),
        ValueError,
        ["'b'", "meta", DEVICE, "one device"],
    ),
    ("matmul", lambda: ((x(3, 4), x(5, 6)), {}), ValueError, ["'a'", "'b'", "(3, 4)", "(5, 6)", "4 rows"]),
    # options
    *(
        ("softmax", lambda d=dim: ((x(2, 3),), {"dim": d}), ValueError, ["'dim'", f"is {dim}", "-2 … 1"])
        for dim in (2, -3, 10**20)
    ),
    ("softmax", lambda: ((x(),), {"dim": 1}), ValueError, ["'dim'", "is 1", "-1 … 0"]),
    *(
        ("softmax", lambda d=dim: ((x(2, 3),), {"dim": d}), TypeError, ["'dim'", repr(dim), "an int"])
        for dim in (None, 1.0, "1", (1,), True)
    ),
    *(
        (
            "rms_norm",
            lambda e=eps: ((x(2, 3),), {"eps": e}),
            (TypeError, ValueError),
            ["'eps'", repr(eps), "at least 0"],
        )
        for eps in (-1e-6, math.nan, "1e-6", None, True)
    ),
    *(
        (
            "rms_norm",
            lambda e=eps: ((x(2, 3), x(3)), {"eps": e}),
            (TypeError, ValueError),
            ["'eps'", repr(eps), "at least 0"],
        )
        for eps in (-1.0, [1e-6])
    ),
    *(
        (
            "matmul",
            lambda p=p: ((x(3, 3), x(3, 3)), {"precision": p}),
            (TypeError, ValueError),
            ["'precision'", repr(p), "tf32x3"],
        )
        for p in ("fp8", "IEEE", 3, ["ieee"])
    ),
    *(
        (name, call, ValueError, words)
        for name, call, words in (
            ("norm", lambda: ((x(3),), {"p": 10**400}), ["'p'", "is 1000", "fits a float"]),
            ("causal_softmax", lambda: ((x(3, 3), 10**400), {}), ["'scale'", "is 1000", "fp32 can hold"]),
            ("masked_softmax", lambda: ((x(3, 3), None, math.inf), {}), ["'scale'", "is inf", "fp32 can hold"]),
        )
    ),
    # devices
    ("vector_add", lambda: ((x(3), x(3, device="meta")), {}), ValueError, ["'y'", "meta", "'x'", DEVICE, "one device"]),
    ("vector_add", lambda: ((x(3, device="meta"), x(3)), {}), ValueError, ["'y'", "meta", "'x'", DEVICE, "one device"]),
    ("rms_norm", lambda: ((x(2, 3), x(3, device="meta")), {}), ValueError, ["'weight'", "meta", DEVICE, "one device"]),
    (
        "matmul",
        lambda: ((x(2, 3), x(3, 4, device="meta")), {}),
        ValueError,
        ["'b'", "meta", "'a'", DEVICE, "one device"],
    ),
]


@pytest.mark.parametrize(
    ("name", "call", "error", "words"),
    REFUSED,
    ids=[re.sub(r"[^a-zA-Z0-9_.-]+", "_", f"{name}-{'-'.join(words[:2])}") for name, _, _, words in REFUSED],
)
def test_it_is_refused_in_words_that_help(name, call, error, words):
    arguments, options = call()
    for function in (getattr(ops, name), lambda *a, **k: ops.explain(name, *a, **k)):
        with pytest.raises(error) as caught:
            function(*arguments, **options)
        said = str(caught.value)
        assert said.startswith(f"{name}: "), said
        assert all(word in said for word in words), said
        assert "\n" not in said


def test_a_call_like_an_earlier_one_is_checked_too():
    """True equals 1 and 1.0 equals 1 where a cache looks them up."""
    a, weight = torch.randn(3, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    ops.softmax(a, 1)
    ops.rms_norm(a, weight, 1.0)
    for call in (lambda: ops.softmax(a, True), lambda: ops.softmax(a, 1.0), lambda: ops.rms_norm(a, weight, True)):
        with pytest.raises((TypeError, ValueError)):
            call()


@pytest.mark.gpu
def test_a_cpu_tensor_beside_a_cuda_tensor_is_refused():
    for name, given in (
        ("vector_add", (x(3), x(3, device="cpu"))),
        ("rms_norm", (x(2, 3), x(3, device="cpu"))),
        ("matmul", (x(3, 3), x(3, 3, device="cpu"))),
        ("matmul", (x(3, 3, device="cpu"), x(3, 3))),
    ):
        with pytest.raises(ValueError, match=r"cpu.*cuda:0|cuda:0.*cpu"):
            getattr(ops, name)(*given)


def test_every_public_function_is_tried_here():
    assert {name for name, *_ in REFUSED} >= {"vector_add", "softmax", "rms_norm", "matmul"}


@pytest.mark.parametrize("name", registry.names())
def test_whatever_comes_in_is_refused_with_the_argument_named(name):
    """For operators yet to come: nothing at all instead of the first argument."""
    operator = registry.get(name)
    given = operator.inputs(next(operator.cases("verify", ["fp32"])), torch.Generator(DEVICE).manual_seed(0), DEVICE)
    first = next(iter(given))
    for wrong in (None, 3, "three"):
        with pytest.raises((TypeError, ValueError), match=f"{name}: .*{first}"):
            operator.public(**{**given, first: wrong})


# ---- odd, not bad ----------------------------------------------------------------------------------------------------

# what PyTorch does, and how far a result may be from it (vector_add: not at all)
PLAIN = {
    "vector_add": (lambda a: (a, a.flip(0)), lambda a, b: a + b, 0.0),
    "softmax": (lambda a: (a,), lambda a: torch.softmax(a, -1), 2.0),
    "rms_norm": (
        lambda a: (a, torch.linspace(-1, 1, a.shape[-1], device=a.device).to(a.dtype)),
        lambda a, w: torch.nn.functional.rms_norm(a, a.shape[-1:], w, 1e-6),
        4.0,
    ),
    "matmul": (lambda a: (a, a.t()), lambda a, b: (a.double() @ b.double()).to(a.dtype), 64.0),
}
IMPLEMENTATIONS = [(name, which) for name in PLAIN for which in ("public", "triton")]


def function_of(name: str, which: str):
    operator = registry.get(name)
    return operator.public if which == "public" else operator.find("triton").function


def assert_plain(name: str, which: str, a: torch.Tensor) -> None:
    """What weft gives for ``a`` is what PyTorch gives, and ``a`` stays as it was."""
    arguments_of, plain, ulps = PLAIN[name]
    arguments = arguments_of(a)
    before = [t.clone() for t in arguments]
    got, want = function_of(name, which)(*arguments), plain(*arguments)
    tolerance = ulps * torch.finfo(a.dtype).eps
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    for t, b in zip(arguments, before, strict=True):
        torch.testing.assert_close(t, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "which"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_tensors(name, which, shape):
    a = torch.empty(shape, device=DEVICE)
    arguments_of, plain, _ = PLAIN[name]
    got, want = function_of(name, which)(*arguments_of(a)), plain(*arguments_of(a))
    assert got.equal(want) and got.dtype == want.dtype  # of shape (5, 5) and all zeros for matmul without columns


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (2, 3, 0)])
def test_empty_tensors_of_other_ranks(shape):
    a = torch.empty(shape, device=DEVICE, requires_grad=True)
    for out in (ops.softmax(a, 0), ops.softmax(a), ops.vector_add(a, a), ops.rms_norm(a)):
        assert out.shape == shape
        out.sum().backward()
    assert a.grad.shape == shape


@pytest.mark.parametrize(("name", "which"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element(name, which, dtype):
    assert_plain(name, which, torch.full((1, 1), -3.5, dtype=torch_dtype(dtype), device=DEVICE))


def test_scalars():
    s = torch.tensor(2.5, device=DEVICE)
    assert ops.vector_add(s, s).equal(s + s) and ops.softmax(s, 0).equal(torch.softmax(s, 0))


@pytest.mark.parametrize(("name", "which"), IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(name, which, layout, dtype):
    a = random_tensor(torch.Generator(DEVICE).manual_seed(3), (9, 33), dtype, DEVICE, layout=layout)
    assert_plain(name, which, a)


@pytest.mark.parametrize("name", ["vector_add", "softmax", "rms_norm"])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.permute(2, 0, 1),
        lambda t: t.permute(1, 2, 0),
        lambda t: t[:, ::2, 1:],
        lambda t: t[1:, 1:, 1:],
        lambda t: t[:, :1].expand(-1, 6, -1),
        lambda t: t[..., :1].expand(-1, -1, 7),
        lambda t: t.as_strided((3, 5, 4), (1, 1, 1)),  # elements overlap
    ],
    ids=["permuted", "permuted-back", "stepped", "cut", "expanded-middle", "expanded-last", "overlapping"],
)
def test_views_of_three_dimensions(name, view):
    """Those that our kernels decline go to PyTorch; the answer is the same."""
    assert_plain(name, "public", view(torch.randn(4, 6, 8, device=DEVICE)))


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_softmax_along_every_dimension_of_a_view(dim):
    a = torch.randn(4, 6, 8, device=DEVICE).permute(1, 2, 0)
    torch.testing.assert_close(ops.softmax(a, dim), torch.softmax(a, dim))


@pytest.mark.parametrize(("name", "which"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row",
    [
        [1.0, math.nan, 2.0],
        [1.0, math.inf, 2.0],
        [1.0, -math.inf, 2.0],
        [-math.inf] * 3,
        [math.inf, math.inf, -math.inf],
        [math.nan] * 3,
        [0.0, -0.0, 0.0],
    ],
    ids=["nan", "inf", "-inf", "only--inf", "infs", "only-nan", "zeros"],
)
def test_nan_and_infinities_go_where_pytorch_puts_them(name, which, dtype, row):
    """Four columns: on a GPU PyTorch's RMSNorm has one kernel for multiples of four, which does as its CPU does, and one for
    other widths, which gives NaN for a whole row that holds an infinity."""
    a = torch.tensor([[*row, row[0]], [1.0, 2.0, 3.0, 4.0]], dtype=torch_dtype(dtype), device=DEVICE)
    if name == "matmul":  # row by row: 0·inf in a sum of other rows would be PyTorch's NaN too, wherever it adds
        arguments_of, plain, _ = PLAIN[name]
        got, want = function_of(name, which)(*arguments_of(a)), plain(*arguments_of(a))
        assert got.isnan().equal(want.isnan()) and got.isinf().equal(want.isinf())
    else:
        assert_plain(name, which, a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_overflow_the_dtype_do_not_overflow(dtype):
    """Intermediate sums are taken in fp32."""
    a = torch.full((3, 256), 200.0, dtype=torch_dtype(dtype), device=DEVICE)
    torch.testing.assert_close(ops.rms_norm(a), torch.ones_like(a))  # 200² is over fp16's largest
    torch.testing.assert_close(ops.softmax(a * 100), torch.full_like(a, 1 / 256))


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_parameters_and_subclasses_are_taken(name):
    class Named(torch.Tensor):
        pass

    a = torch.randn(4, 4, device=DEVICE)
    arguments_of, plain, _ = PLAIN[name]
    for made in (torch.nn.Parameter(a), a.as_subclass(Named)):
        got = getattr(ops, name)(*arguments_of(made))
        torch.testing.assert_close(got.detach().as_subclass(torch.Tensor), plain(*arguments_of(a)))


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_meta_tensors_have_a_form_and_nothing_else(name):
    arguments_of, plain, _ = PLAIN[name]
    a = torch.empty(3, 5, device="meta")
    got, want = getattr(ops, name)(*arguments_of(a)), plain(*arguments_of(a))
    assert got.is_meta and (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
