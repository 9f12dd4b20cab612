"""What must hold whatever the numbers: properties of our Triton kernels on arbitrary small inputs."""

import pytest
import torch
from where import DEVICE, DTYPES

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from weft import registry  # noqa: E402
from weft.definition import torch_dtype  # noqa: E402
from weft.operators.random_inputs import LAYOUTS, random_tensor  # noqa: E402

pytestmark = pytest.mark.device

NAMES = "vector_add", "softmax", "rms_norm", "matmul"
add, softmax, rms_norm, matmul = (registry.get(name).find("triton").function for name in NAMES)
sizes = st.integers(1, 70)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)
layouts = st.sampled_from(LAYOUTS)


def few(**drawn):
    """A test of a few examples of what is drawn."""
    return lambda test: settings(max_examples=20, deadline=None, derandomize=True, database=None)(given(**drawn)(test))


def draw(seed: int, shape: tuple[int, ...], dtype: str, layout: str = "contiguous") -> torch.Tensor:
    return random_tensor(torch.Generator(DEVICE).manual_seed(seed), shape, dtype, DEVICE, layout=layout)


def eps(dtype: str) -> float:
    return torch.finfo(torch_dtype(dtype)).eps


def near(got: torch.Tensor, want: torch.Tensor, dtype: str, ulps: float = 4.0) -> None:
    """Within some units of last place of the largest value."""
    scale = float(want.double().abs().max()) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=ulps * eps(dtype) * max(scale, 1e-30))


@few(m=sizes, n=sizes, dtype=dtypes, seed=seeds, layout=layouts)
def test_softmax_rows_are_distributions(m, n, dtype, seed, layout):
    y = softmax(draw(seed, (m, n), dtype, layout))
    assert bool((y >= 0).all()) and bool((y <= 1).all())
    near(y.double().sum(-1), torch.ones(m, device=DEVICE), dtype, ulps=2.0)


@few(m=sizes, n=sizes, dtype=dtypes, seed=seeds, shift=st.integers(-8, 8))
def test_softmax_of_shifted_rows_is_the_same(m, n, dtype, seed, shift):
    """The inputs are multiples of 1/16, so that the shift itself rounds nothing."""
    x = (draw(seed, (m, n), dtype) * 16).round() / 16
    torch.testing.assert_close(softmax(x + shift), softmax(x), rtol=4 * eps(dtype), atol=0)


@few(m=sizes, n=sizes, dtype=dtypes, seed=seeds)
def test_softmax_follows_a_permutation_of_columns(m, n, dtype, seed):
    x = draw(seed, (m, n), dtype)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    torch.testing.assert_close(softmax(x[:, order]), softmax(x)[:, order], rtol=4 * eps(dtype), atol=0)


@few(m=sizes, n=st.integers(2, 70), dtype=dtypes, seed=seeds)
def test_softmax_keeps_the_order_of_a_row(m, n, dtype, seed):
    x = draw(seed, (m, n), dtype)
    assert bool((softmax(x).gather(-1, x.argsort(-1)).diff(dim=-1) >= 0).all())


@few(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=seeds, data=st.data())
def test_softmax_takes_any_dimension(shape, seed, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = draw(seed, tuple(shape), "fp32")
    try:
        y = softmax(x, dim)
    except NotImplementedError as declined:
        assert "copy" in str(declined) and 0 < dim % len(shape) < len(shape) - 1
        return
    torch.testing.assert_close(y, torch.softmax(x, dim))


@few(m=sizes, n=sizes, seed=seeds)
def test_gradients_of_softmax_sum_to_nothing_in_a_row(m, n, seed):
    """A row of softmax sums to one whatever x is."""
    x, dy = draw(seed, (m, n), "fp32").requires_grad_(), draw(seed + 1, (m, n), "fp32")
    (dx,) = torch.autograd.grad(softmax(x), x, dy)
    assert float(dx.sum(-1).abs().max()) <= 16 * eps("fp32") * (1 + float(dy.abs().max()))


@few(m=sizes, n=sizes, dtype=dtypes, seed=seeds, layout=layouts)
def test_rms_norm_gives_rows_of_unit_mean_square(m, n, dtype, seed, layout):
    x = draw(seed, (m, n), dtype, layout) + 0.5
    near(rms_norm(x, None, 0.0).double().square().mean(-1), torch.ones(m, device=DEVICE), dtype)


@few(m=sizes, n=sizes, dtype=dtypes, seed=seeds, power=st.integers(-6, 6))
def test_rms_norm_does_not_see_the_scale_of_a_row(m, n, dtype, seed, power):
    """A power of two rounds nothing, unless an fp16 element falls below the normal numbers."""
    x = draw(seed, (m, n), dtype) + 4
    torch.testing.assert_close(rms_norm(x * 2.0**power, None, 0.0), rms_norm(x, None, 0.0), rtol=2 * eps(dtype), atol=0)


@few(m=sizes, n=sizes, dtype=dtypes, seed=seeds)
def test_rms_norm_is_linear_in_its_weight(m, n, dtype, seed):
    x, weight = draw(seed, (m, n), dtype), draw(seed + 1, (n,), dtype)
    # fp16's subnormals
    torch.testing.assert_close(rms_norm(x, weight * 2), rms_norm(x, weight) * 2, rtol=0, atol=2**-23)
    near(rms_norm(x, weight), rms_norm(x, None) * weight, dtype)
    assert rms_norm(x, torch.ones_like(weight)).equal(rms_norm(x, None))


@few(m=sizes, n=sizes, seed=seeds)
def test_rms_norm_turns_its_sign_with_its_input(m, n, seed):
    x, weight = draw(seed, (m, n), "fp32"), draw(seed + 1, (n,), "fp32")
    assert rms_norm(-x, weight).equal(-rms_norm(x, weight))


@few(m=sizes, n=sizes, seed=seeds)
def test_gradients_of_rms_norm_are_orthogonal_to_x(m, n, seed):
    """Its value does not change along x (without eps)."""
    x, dy = (draw(seed, (m, n), "fp32") + 1).requires_grad_(), draw(seed + 1, (m, n), "fp32")
    (dx,) = torch.autograd.grad(rms_norm(x, None, 0.0), x, dy)
    size = x.detach().norm(dim=-1) * dy.norm(dim=-1) / x.detach().square().mean(-1).sqrt()
    assert bool(((x.detach() * dx).sum(-1).abs() <= 16 * eps("fp32") * size).all())


@few(m=sizes, n=sizes, dtype=dtypes, seed=seeds, layouts=st.tuples(layouts, layouts))
def test_addition_commutes_and_is_pytorchs(m, n, dtype, seed, layouts):
    x, y = (draw(seed + i, (m, n), dtype, layout) for i, layout in enumerate(layouts))
    out = add(x, y)
    assert out.equal(add(y, x)) and out.equal(x + y)
    assert add(x, torch.zeros_like(x)).equal(x) and not bool(add(x, -x).any())


letters = st.sampled_from("NT")


def operand(seed: int, rows: int, columns: int, dtype: str, letter: str) -> torch.Tensor:
    return draw(seed, (rows, columns), dtype) if letter == "N" else draw(seed, (columns, rows), dtype).t()


@few(m=sizes, k=sizes, dtype=dtypes, seed=seeds, letter=letters)
def test_the_identity_changes_nothing(m, k, dtype, seed, letter):
    a = operand(seed, m, k, dtype, letter)
    assert matmul(a, torch.eye(k, dtype=a.dtype, device=DEVICE), "ieee").equal(a)
    assert matmul(torch.eye(m, dtype=a.dtype, device=DEVICE), a, "ieee").equal(a)


@few(m=sizes, n=sizes, k=sizes, dtype=dtypes, seed=seeds, layout=st.tuples(letters, letters))
def test_a_transposed_product_is_the_product_of_the_transposed(m, n, k, dtype, seed, layout):
    a, b = operand(seed, m, k, dtype, layout[0]), operand(seed + 1, k, n, dtype, layout[1])
    near(matmul(a, b, "ieee").t(), matmul(b.t(), a.t(), "ieee"), dtype, ulps=8.0)
    near(matmul(a, b, "ieee"), a.double() @ b.double(), dtype, ulps=8.0)


@few(m=sizes, n=sizes, k=sizes, seed=seeds)
def test_products_of_small_integers_are_exact_in_every_precision(m, n, k, seed):
    a, b = ((draw(seed + i, shape, "fp32") * 3).round() for i, shape in enumerate(((m, k), (k, n))))
    want = (a.double() @ b.double()).float()
    for precision in ("ieee", "tf32", "tf32x3"):
        assert matmul(a, b, precision).equal(want), precision


@few(m=sizes, n=sizes, k=sizes, seed=seeds)
def test_a_product_is_one_of_rows_and_of_columns(m, n, k, seed):
    """Cut anywhere, and put together again: tiles do not reach into each other."""
    a, b = draw(seed, (m, k), "fp32"), draw(seed + 1, (k, n), "fp32")
    cut_m, cut_n = m // 2, n // 3
    whole = matmul(a, b, "ieee")
    near(torch.cat([matmul(a[:cut_m], b, "ieee"), matmul(a[cut_m:], b, "ieee")]), whole, "fp32")
    near(torch.cat([matmul(a, b[:, :cut_n], "ieee"), matmul(a, b[:, cut_n:], "ieee")], 1), whole, "fp32")
