"""Bad input is refused before any launch, in words that name the argument, what came in and what is expected; odd input
that is not bad gives the right answer."""

import math

import pytest
import torch
from refused import EITHER, bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE, DTYPES

from weft import ops, registry
from weft.definition import torch_dtype

pytestmark = pytest.mark.device


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


FLOATS = "float32, float16, bfloat16 or float64"
HALF = torch.float16
REFUSED = [
    # not a tensor
    bad("vector_add", TypeError, "'x'; NoneType; torch.Tensor", None, x(3)),
    bad("vector_add", TypeError, "'y'; float; torch.Tensor", x(3), 2.0),
    bad("softmax", TypeError, "'x'; list; torch.Tensor", [1.0, 2.0]),
    bad("rms_norm", TypeError, "'x'; str; torch.Tensor", "x"),
    bad("rms_norm", TypeError, "'weight'; list; torch.Tensor", x(2, 3), [1.0] * 3),
    bad("matmul", TypeError, "'b'; int; torch.Tensor", x(2, 3), 1),
    # dtypes
    *(
        bad(name, TypeError, f"{argument}; {word}; {FLOATS}", *[x(3, 3, dtype=getattr(torch, word))] * count)
        for name, argument, count in (
            ("vector_add", "'x'", 2), ("softmax", "'x'", 1), ("rms_norm", "'x'", 1), ("matmul", "'a'", 2),
        )
        for word in ("int32", "int64", "bool", "complex64")
    ),
    bad("vector_add", TypeError, "'y'; float16; float32; same dtype", x(3), x(3, dtype=HALF)),
    bad("matmul", TypeError, "'b'; float16; float32; same dtype", x(3, 3), x(3, 3, dtype=HALF)),
    bad("batched_matmul", TypeError, "'b'; float16; same dtype", x(2, 3, 4), x(4, 5, dtype=HALF)),
    bad("rms_norm", TypeError, "'weight'; float16; expected float32", x(2, 3), x(3, dtype=HALF)),
    bad("rms_norm", TypeError, "'weight'; bfloat16; float16 or float32", x(2, 3, dtype=HALF), x(3).bfloat16()),
    bad("softmax", TypeError, "'x'; torch.sparse_coo; dense", x(3, 3).to_sparse()),
    # ranks and shapes
    bad("vector_add", ValueError, "'y'; (4,); (3,); same shape", x(3), x(4)),
    bad("vector_add", ValueError, "'y'; (3,); (3, 1); same shape", x(3, 1), x(3)),
    bad("rms_norm", ValueError, "'x'; scalar; at least one dimension", x()),
    bad("rms_norm", ValueError, "'weight'; (2,); (3,); (2, 3)", x(2, 3), x(2)),
    bad("rms_norm", ValueError, "'weight'; (1, 3); (3,)", x(2, 3), x(1, 3)),
    bad("rms_norm", ValueError, "'weight'; (); (3,)", x(2, 3), x()),
    bad("matmul", ValueError, "'a'; (); vector; matrix", x(), x(3, 4)),
    bad("matmul", ValueError, "'b'; (); vector; matrix", x(3, 4), x()),
    bad("matmul", ValueError, "'a'; 'b'; (3,); (4,); 3 rows", x(3), x(4)),
    bad("batched_matmul", ValueError, "'b'; (4,); two dimensions or more", x(2, 3, 4), x(4)),
    bad("matmul", ValueError, "'a'; 'b'; (1, 3, 4); (5, 4); 4 rows", x(1, 3, 4), x(5, 4)),
    bad("matmul", ValueError, "'a'; 'b'; (3, 4); (5, 6); 4 rows", x(3, 4), x(5, 6)),
    *(
        bad(name, ValueError, words, x(2, 3, 4), x(*shape))
        for name in ("matmul", "batched_matmul")
        for shape, words in (
            ((3, 4, 5), "(2, 3, 4); (3, 4, 5); batch dimensions; not 2 and 3"),
            ((2, 3, 5), "(2, 3, 4); (2, 3, 5); 4 rows"),
        )
    ),
    # options
    *(bad("softmax", ValueError, f"'dim'; is {dim}; -2 … 1", x(2, 3), dim=dim) for dim in (2, -3, 10**20)),
    bad("softmax", ValueError, "'dim'; is 1; -1 … 0", x(), dim=1),
    *(bad("softmax", TypeError, f"'dim'; {dim!r}; an int", x(2, 3), dim=dim) for dim in (None, 1.0, "1", (1,), True)),
    *(bad("rms_norm", EITHER, f"'eps'; {e!r}; at least 0", x(2, 3), eps=e) for e in (-1e-6, math.nan, "1e-6", True)),
    *(bad("rms_norm", EITHER, f"'eps'; {e!r}; at least 0", x(2, 3), x(3), eps=e) for e in (-1.0, [1e-6])),
    bad("layer_norm", ValueError, "'eps'; None; at least 0", x(2, 3), eps=None),
    *(
        bad("matmul", EITHER, f"'precision'; {p!r}; tf32x3", x(3, 3), x(3, 3), precision=p)
        for p in ("fp8", "IEEE", 3, ["ieee"])
    ),
    bad("batched_matmul", ValueError, "'precision'; 'fp8'; tf32x3", x(2, 3, 3), x(3, 3), precision="fp8"),
    bad("norm", ValueError, "'p'; is 1000; fits a float", x(3), p=10**400),
    bad("causal_softmax", ValueError, "'scale'; is 1000; fp32 can hold", x(3, 3), 10**400),
    bad("masked_softmax", ValueError, "'scale'; is inf; fp32 can hold", x(3, 3), None, math.inf),
    # devices
    bad("vector_add", ValueError, f"'y'; meta; 'x'; {DEVICE}; one device", x(3), x(3, device="meta")),
    bad("vector_add", ValueError, f"'y'; meta; 'x'; {DEVICE}; one device", x(3, device="meta"), x(3)),
    bad("rms_norm", ValueError, f"'weight'; meta; {DEVICE}; one device", x(2, 3), x(3, device="meta")),
    bad("matmul", ValueError, f"'b'; meta; 'a'; {DEVICE}; one device", x(2, 3), x(3, 4, device="meta")),
    bad("batched_matmul", ValueError, f"'b'; meta; {DEVICE}; one device", x(2, 2, 3), x(3, 4, device="meta")),
]  # fmt: skip


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
    calls = [("vector_add", (x(3), x(3, device="cpu"))), ("rms_norm", (x(2, 3), x(3, device="cpu")))]
    calls += [("matmul", (x(3, 3), x(3, 3, device="cpu"))), ("matmul", (x(3, 3, device="cpu"), x(3, 3)))]
    for name, given in calls:
        with pytest.raises(ValueError, match=r"cpu.*cuda:0|cuda:0.*cpu"):
            getattr(ops, name)(*given)


@pytest.mark.parametrize("name", registry.names())
def test_whatever_comes_in_is_refused_with_the_argument_named(name):
    """For operators yet to come: nothing at all instead of the first argument."""
    operator = registry.get(name)
    given = operator.inputs(next(operator.cases("verify", ["fp32"])), torch.Generator(DEVICE).manual_seed(0), DEVICE)
    first = next(iter(given))
    for wrong in (None, 3, "three"):
        with pytest.raises((TypeError, ValueError), match=f"{name}: .*{first}"):
            operator.public(**{**given, first: wrong})


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
    torch.testing.assert_close(arguments, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (2, 3, 0)])
def test_empty_tensors_of_other_ranks(shape):
    a = torch.empty(shape, device=DEVICE, requires_grad=True)
    for out in (ops.softmax(a, 0), ops.softmax(a), ops.vector_add(a, a), ops.rms_norm(a)):
        assert out.shape == shape
        out.sum().backward()
    assert a.grad.shape == shape


def test_scalars():
    s = torch.tensor(2.5, device=DEVICE)
    assert ops.vector_add(s, s).equal(s + s) and ops.softmax(s, 0).equal(torch.softmax(s, 0))


@pytest.mark.parametrize("name", ["vector_add", "softmax", "rms_norm"])
@pytest.mark.parametrize("view", [
    lambda t: t.permute(2, 0, 1),
    lambda t: t.permute(1, 2, 0),
    lambda t: t[:, ::2, 1:],
    lambda t: t[1:, 1:, 1:],
    lambda t: t[:, :1].expand(-1, 6, -1),
    lambda t: t[..., :1].expand(-1, -1, 7),
    lambda t: t.as_strided((3, 5, 4), (1, 1, 1)),  # elements overlap
], ids=["permuted", "permuted-back", "stepped", "cut", "expanded-middle", "expanded-last", "overlapping"])  # fmt: skip
def test_views_of_three_dimensions(name, view):
    """Those that our kernels decline go to PyTorch; the answer is the same."""
    assert_plain(name, "public", view(torch.randn(4, 6, 8, device=DEVICE)))


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_softmax_along_every_dimension_of_a_view(dim):
    a = torch.randn(4, 6, 8, device=DEVICE).permute(1, 2, 0)
    torch.testing.assert_close(ops.softmax(a, dim), torch.softmax(a, dim))


@pytest.mark.parametrize(("name", "which"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [
    [1.0, math.nan, 2.0], [1.0, math.inf, 2.0], [1.0, -math.inf, 2.0], [-math.inf] * 3,
    [math.inf, math.inf, -math.inf], [math.nan] * 3, [0.0, -0.0, 0.0],
], ids=["nan", "inf", "-inf", "only--inf", "infs", "only-nan", "zeros"])  # fmt: skip
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
