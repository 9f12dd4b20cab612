"""Symmetric products and Newton–Schulz iterations: symmetric to the bit, orthogonal as far as the polynomial goes, and no
further off than PyTorch's iteration."""

import math

import pytest
import torch
import triton
import triton.language as tl
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random
from torch.optim._muon import _zeropower_via_newtonschulz
from where import DEVICE, DTYPES, on_hopper

from weft import ops, registry
from weft.definition import torch_dtype
from weft.operators.orthogonalization import coefficients, dispatch, iteration
from weft.operators.orthogonalization.kernels import lower_tile, tiles

pytestmark = pytest.mark.device

FORMS = ("symmetric", "gram")


def with_singular_values(values: torch.Tensor, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A float64 matrix [M, columns] that has them, and its orthogonal polar factor."""
    g = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, len(values), generator=g, dtype=torch.float64))[0].mT
    return ((u * values) @ v).to(DEVICE), (u @ v).to(DEVICE)


def spectra(m: int) -> dict[str, torch.Tensor]:
    """Singular values as a random matrix has them, falling by powers of ten, of a low rank, and one far above the others."""
    wide = torch.float64
    return {
        "random": torch.linalg.svdvals(torch.randn(m, m, generator=torch.Generator().manual_seed(1), dtype=wide)),
        "1 … 1e-4": torch.logspace(0, -4, m, dtype=wide),
        "1 … 1e-8": torch.logspace(0, -8, m, dtype=wide),
        "a quarter": torch.linspace(1, 0.1, m, dtype=wide) * (torch.arange(m) < m // 4),
        "one above": torch.tensor([1.0] + [1e-3] * (m - 1), dtype=wide),
    }


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of two matrices, as a share of the second's norm."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@triton.jit
def places(first, rows, out_ptr, GROUP: tl.constexpr):
    row, column = lower_tile(first + tl.program_id(0), rows, GROUP)
    tl.store(out_ptr + 2 * tl.program_id(0), row)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, column)


def placed(first: int, count: int, rows: int, group: int) -> list[tuple[int, int]]:
    out = torch.empty(count, 2, dtype=torch.int32, device=DEVICE)
    places[(count,)](first, rows, out, GROUP=group)
    return [tuple(pair) for pair in out.tolist()]


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13])
def test_every_tile_of_the_lower_triangle_has_one_program(rows, group):
    found = placed(0, tiles(rows), rows, group)
    assert sorted(found) == [(r, c) for r in range(rows) for c in range(r + 1)]


def test_tiles_that_run_together_are_in_one_band():
    """GROUP tile rows at a time, and in them column by column: consecutive programs share columns."""
    found = placed(0, tiles(12), 12, 4)
    assert [r // 4 for r, _ in found] == sorted(r // 4 for r, _ in found)
    rectangle = found[tiles(8) : tiles(8) + 8 * 4]
    assert rectangle == [(8 + i % 4, i // 4) for i in range(32)]


@pytest.mark.parametrize("rows", [4096, 20000])
def test_tiles_of_large_matrices_are_found_exactly(rows):
    """Where fp32 no longer holds the number of a tile: around the ends of rows."""
    for r in (rows // 3, rows - 2, rows - 1):
        found = placed(tiles(r) - 2, 4, rows, 1)
        assert found == [(r - 1, r - 2), (r - 1, r - 1), (r, 0), (r, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (33, 65), (70, 40), (2, 3, 45, 20)])
def test_results_are_symmetric_to_the_bit(dtype, shape):
    x = random(*shape, dtype=torch_dtype(dtype))
    g = ops.gram(x)
    p = ops.gram_polynomial(g / float(g.abs().max()), -4.775, 2.0315)
    assert g.equal(g.mT) and p.equal(p.mT)
    assert g.shape == p.shape == (*shape[:-1], shape[-2]) and g.is_contiguous()


@pytest.mark.parametrize("shape", [(70, 40), (3, 45, 20)])
def test_strips_of_rows_are_mirrored(monkeypatch, shape):
    monkeypatch.setattr(dispatch, "STRIP", 20)
    x = random(*shape)
    g = ops.gram(x)
    torch.testing.assert_close(g, x @ x.mT, rtol=1e-5, atol=1e-4)
    p = ops.gram_polynomial(g / 50, 1.5, 0.5)
    torch.testing.assert_close(p, 1.5 * g / 50 + 0.5 * g @ g / 2500, rtol=1e-5, atol=1e-4)
    assert g.equal(g.mT) and p.equal(p.mT)


def test_views_are_read_as_they_lie():
    x = random(4, 40, 3, 50)
    first = x[0, :, 1], x[0, :, 1].mT, x[0].transpose(0, 1)
    for view in (*first, x[:, ::2, 0, 5:], x[:1].expand(3, -1, -1, -1)[:, :, 0]):
        torch.testing.assert_close(ops.gram(view), view @ view.mT, rtol=1e-5, atol=1e-4)
        a = view @ view.mT / 50
        spaced = torch.stack([a, a], -1)[..., 0]
        torch.testing.assert_close(ops.gram_polynomial(spaced, 1.5, 0.5), 1.5 * a + 0.5 * a @ a, rtol=1e-5, atol=1e-4)


def test_leading_dimensions_without_a_common_stride_go_to_pytorch():
    x = random(4, 3, 20, 10)[:, ::2]
    assert "copy" in ops.explain("gram", x).reason and ops.explain("gram", x).implementation == "torch"
    torch.testing.assert_close(ops.gram(x), x @ x.mT, rtol=1e-5, atol=1e-4)
    with pytest.raises(NotImplementedError, match="copy"):
        registry.get("gram").find("triton").function(x)


def test_nan_stays_in_its_rows_and_columns():
    x = random(40, 40)
    x[35, 3] = torch.nan
    bad = torch.arange(40, device=DEVICE) == 35
    assert ops.gram(x).isnan().equal(bad[:, None] | bad)


def exactly(x: torch.Tensor, steps: int = 5, name: str = "classic") -> torch.Tensor:
    schedule, margin = coefficients.schedule(name, steps), coefficients.margin(name)
    return iteration.by_pytorch(x.double(), schedule, margin, 1e-7, torch.float64)


@pytest.mark.share(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 65), (80, 40), (1, 50), (2, 3, 20, 48)])
def test_both_forms_are_the_iteration(form, dtype, shape):
    x = random(*shape, dtype=torch_dtype(dtype))
    got = ops.newton_schulz(x, form=form)
    assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
    assert apart(got, exactly(x)) < {"fp32": 1e-5, "fp16": 2e-2, "bf16": 5e-2}[dtype]


@pytest.mark.parametrize("name", coefficients.NAMES)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 7])
def test_the_gram_form_starts_anew_at_any_number_of_steps(steps, name):
    x = random(24, 64)
    assert apart(ops.newton_schulz(x, steps, name, form="gram"), exactly(x, steps, name)) < 1e-5


@pytest.mark.parametrize("columns", [pytest.param(64, marks=pytest.mark.long), 160])
@pytest.mark.parametrize("spectrum", spectra(64))
@pytest.mark.parametrize(
    "name", [coefficients.NAMES[0], *(pytest.param(n, marks=pytest.mark.long) for n in coefficients.NAMES[1:])]
)
def test_orthogonality_is_no_worse_than_that_of_pytorchs_muon(name, spectrum, columns):
    """Against the float64 polar factor; PyTorch's iteration is in bf16. The interpreter has no bf16: ours is in fp16 there."""
    x, polar = with_singular_values(spectra(64)[spectrum], columns)
    triples = coefficients.schedule(name, 5)
    if name == "classic":
        theirs = _zeropower_via_newtonschulz(x.float(), triples[0], 5, 1e-7)
    else:
        theirs = iteration.by_pytorch(x.float(), triples, coefficients.MARGIN, 1e-7, torch.bfloat16)
    exact = exactly(x, 5, name)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    for form in FORMS:
        ours = ops.newton_schulz(x.float(), 5, name, form=form, dtype=dtype)
        assert ours.dtype == dtype
        # rounding may carry a singular value towards 1 by chance, so also no worse than what the polynomial itself leaves;
        # half a bf16 epsilon is the result's own rounding
        assert apart(ours, polar) <= max(apart(theirs, polar), apart(exact, polar)) + 2**-9
        assert apart(ours, exact) <= 1.1 * apart(theirs, exact)


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros(form):
    assert not ops.newton_schulz(torch.zeros(2, 20, 33, device=DEVICE), form=form).any()
    assert not ops.newton_schulz(torch.full((20, 33), 1e-30, device=DEVICE), form=form).isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_a_low_rank_stays_low(form):
    """Directions that are not there get no more than rounding, which steps multiply by 485."""
    x = random(40, 3) @ random(3, 60, seed=1)
    values = torch.linalg.svdvals(ops.newton_schulz(x, form=form).double())
    assert bool((values[:3] > 0.6).all()) and float(values[3:].max()) < 485 * 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinities_stay_in_their_matrix(form):
    x = random(4, 20, 33)
    x[1, 3, 4], x[2, 5, 6] = torch.nan, torch.inf
    y = ops.newton_schulz(x, form=form)
    assert bool(y[1].isnan().all()) and bool(y[2].isnan().all())
    torch.testing.assert_close(y[[0, 3]], ops.newton_schulz(x[[0, 3]], form=form))


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_norm_is_divided_out_before_the_cast(scale):
    """In fp16 such matrices would be zeros or infinite."""
    x = random(20, 40)
    options = {"dtype": torch.float16, "eps": 1e-30}
    assert apart(ops.newton_schulz(x * scale, **options), ops.newton_schulz(x, **options)) < 1e-2


@pytest.mark.parametrize("shape", [(1, 1), (40, 33), (3, 20, 100), (2, 2, 130, 70), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_are_of_each_matrix_whole(shape, dtype):
    g = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(shape, generator=g, device=DEVICE).to(dtype)
    options = torch.float32, 1.01, 1e-7
    assert dispatch.NORMALIZE.choose(x, *options).implementation == "triton"
    assert dispatch.NORMALIZE.choose(x.mT if shape[-1] > 1 else x[:0], *options).implementation == "torch"
    want = x.double() / (1.01 * torch.linalg.vector_norm(x.double(), dim=(-2, -1), keepdim=True))
    torch.testing.assert_close(dispatch.normalized(x, 1.01, 1e-7, torch.float32).double(), want, rtol=1e-6, atol=0)
    some = x.clone()
    some.view(-1, *shape[-2:])[0] = 0
    some.view(-1)[-1] = math.nan
    got = dispatch.normalized(some, 1.0, 1e-7, torch.float16).view(-1, *shape[-2:])
    assert got[-1].isnan().all() and (len(got) == 1 or not got[0].any())


@pytest.mark.parametrize("form", FORMS)
def test_a_tall_matrix_is_a_wide_one_lying(form):
    x = random(70, 33)
    wide = ops.newton_schulz(x.mT.contiguous(), form=form)
    for tall in (x, x.mT.contiguous().mT):
        torch.testing.assert_close(ops.newton_schulz(tall, form=form), wide.mT, rtol=1e-5, atol=1e-6)
    spaced = torch.stack([x, x], -1)[..., 1]
    torch.testing.assert_close(ops.newton_schulz(spaced, form=form), wide.mT, rtol=1e-5, atol=1e-6)


def test_coefficients_may_be_given():
    x = random(20, 33)
    classic = ops.newton_schulz(x)
    assert ops.newton_schulz(x, coefficients=coefficients.CLASSIC).equal(classic)
    assert ops.newton_schulz(x, coefficients=[list(coefficients.CLASSIC)] * 5).equal(classic)
    cubic = ops.newton_schulz(x, 30, (1.5, -0.5, 0))  # Björck and Bowie's, which converges
    torch.testing.assert_close(cubic @ cubic.mT, torch.eye(20, device=DEVICE), rtol=0, atol=1e-4)


def test_gradients_are_those_of_the_formulas():
    def formula(x, name, steps):
        y = x / torch.linalg.matrix_norm(x, keepdim=True) / coefficients.margin(name)
        for a, b, c in coefficients.schedule(name, steps):
            g = y @ y.mT
            y = a * y + (b * g + c * g @ g) @ y
        return y

    x, dy = random(2, 12, 20, seed=3), random(2, 12, 20, seed=4)
    for tensor, weights in ((x, dy), (x.mT, dy.mT)):
        for name in coefficients.NAMES:
            leaf, wide = tensor.detach().requires_grad_(), tensor.double().detach().requires_grad_()
            (got,) = torch.autograd.grad(ops.newton_schulz(leaf, 3, name), leaf, weights)
            lying = wide.mT if wide.shape[1] > wide.shape[2] else wide
            want = torch.autograd.grad((formula(lying, name, 3) * dy).sum(), wide)[0]
            assert apart(got, want) < 1e-5
    small = (x * 1e-12).requires_grad_()  # its norm is below eps, which then is a constant
    (got,) = torch.autograd.grad(ops.newton_schulz(small, 1), small, dy)
    assert apart(got, 3.4445 / 1e-7 * dy) < 1e-5
    leaf = x.clone().requires_grad_()
    weights = random(2, 12, 12, seed=5)
    (got,) = torch.autograd.grad(ops.gram(leaf), leaf, weights)
    assert apart(got, (weights + weights.mT) @ x) < 1e-6
    a = (x @ x.mT).requires_grad_()
    (got,) = torch.autograd.grad(ops.gram_polynomial(a, 1.5, 0.5), a, weights)
    assert apart(got, 1.5 * weights + 0.5 * (weights @ a + a @ weights)) < 1e-6


def test_operations_are_those_of_the_readme():
    """In M³, of 5 steps at N = M, 2 M, 4 M and 16 M."""
    m = 2**20  # so large that the diagonal does not count
    for form, want in (("direct", (30, 50, 90, 330)), ("symmetric", (20, 35, 65, 245)), ("gram", (20, 26, 38, 110))):
        counts = [iteration.flops(form, m, ratio * m, 5) / m**3 for ratio in (1, 2, 4, 16)]
        assert counts == pytest.approx(want, rel=1e-4)
        assert iteration.flops(form, 3 * m, m, 5) == iteration.flops(form, m, 3 * m, 5)


@pytest.mark.parametrize(("shape", "dtype", "options", "want"), [
    ((64, 64), torch.bfloat16, {}, "triton"),
    ((64, 96), torch.bfloat16, {}, "triton-gram"),
    ((256, 64), torch.bfloat16, {}, "triton-gram"),
    ((64, 256), torch.float32, {}, "strips"),
    ((64, 256), torch.float32, {"dtype": torch.bfloat16}, "triton-gram"),
    ((64, 256), torch.bfloat16, {"coefficients": (1.5, -0.5, 0.0)}, "triton"),
    ((64, 256), torch.bfloat16, {"form": "symmetric"}, "triton"),
    ((64, 64), torch.float32, {"form": "gram"}, "triton-gram"),
    ((64, 0), torch.float32, {}, "torch"),
])  # fmt: skip
def test_the_form_is_chosen_by_operations(shape, dtype, options, want):
    x = torch.zeros(shape, dtype=dtype, device=DEVICE)
    if on_hopper() and options.get("dtype", dtype).itemsize == 2:  # its main loop takes them, in the same form
        want = want.replace("triton", "cuda")
    assert ops.explain("newton_schulz", x, **options).implementation == want


def closest_quintic(low: float, high: float) -> tuple[float, float, float]:
    """The odd quintic nearest to 1 on [low, high] in the maximum, by Remez' exchange: its error is the same at four points with
    alternating signs, two of them the ends and two where the derivative is 0."""
    inner = [low + (high - low) / 3, low + (high - low) * 2 / 3]
    for _ in range(100):
        points = torch.tensor([low, *inner, high], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        matrix = torch.stack([points, points**3, points**5, signs], 1)
        a, b, c, _ = torch.linalg.solve(matrix, torch.ones(4, dtype=torch.float64)).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return a, b, c


def test_the_polar_express_table_is_what_the_papers_algorithm_gives():
    """From [10⁻³, 1], each step the closest quintic on the interval that the last one leaves; where the interval's lower end is
    below 0.02407 of its upper, that of the narrower interval, scaled to be centred on 1 over all of it (section 4.4)."""
    low, high = 1e-3, 1.0
    for want in coefficients.POLAR_EXPRESS[:6]:
        a, b, c = closest_quintic(max(low, 0.02407327424182761 * high), high)
        at_low, at_high = (a * t + b * t**3 + c * t**5 for t in (low, high))
        scale = 2 / (at_low + at_high)
        assert (a * scale, b * scale, c * scale) == pytest.approx(want, rel=1e-6)
        low = at_low * scale
        high = 2 - low


def test_steps_of_a_schedule():
    classic, express = (coefficients.schedule(name, 10) for name in coefficients.NAMES)
    assert set(classic) == {(3.4445, -4.7750, 2.0315)} and len(classic) == len(express) == 10
    assert express[7:] == (coefficients.POLAR_EXPRESS[-1],) * 3
    for shrunk, (a, b, c) in zip(express[:7], coefficients.POLAR_EXPRESS, strict=False):
        t = 0.3
        found, wanted = ([x * u, y * u**3, z * u**5] for (x, y, z), u in ((shrunk[:3], t), ((a, b, c), t / 1.01)))
        assert sum(found) == pytest.approx(sum(wanted))


X = random(4, 6)
REFUSED = [
    bad("gram", ValueError, "'x' has shape (6,); expected [..., M, N]", X[0]),
    bad("gram", TypeError, "'x' has dtype int32", X.int()),
    bad("gram", TypeError, "'x' is a list", [1.0]),
    bad("gram_polynomial", ValueError, "'a' has shape (4, 6); expected [..., M, M]", X, 1, 2),
    bad("gram_polynomial", TypeError, "'alpha' is '1'; expected a number", X[:, :4], "1", 2),
    bad("gram_polynomial", TypeError, "'beta' is None", X[:, :4], 1, None),
    bad("newton_schulz", ValueError, "'x' has shape (6,)", X[0]),
    bad("newton_schulz", ValueError, "'steps' is 0; expected a whole number, 1 … 99", X, 0),
    bad("newton_schulz", ValueError, "'steps' is 100", X, 100),
    bad("newton_schulz", ValueError, "'steps' is True", X, True),
    bad(ops.newton_schulz, ValueError, "did you mean 'classic'", X, coefficients="clasic"),
    bad("newton_schulz", ValueError, "a tuple of exactly 3 numbers", X, coefficients=(1.0, 2.0)),
    bad("newton_schulz", ValueError, "or 2 of them, one for each step", X, 2, [(1, 2, 3)] * 3),
    bad("newton_schulz", ValueError, "'eps' is 0.0; expected a number above 0", X, eps=0.0),
    bad("newton_schulz", ValueError, "'eps' is nan", X, eps=math.nan),
    bad("newton_schulz", ValueError, "'form' is 'own'; expected auto, symmetric, gram", X, form="own"),
    bad("newton_schulz", TypeError, "'dtype' is torch.float64; expected float32", X, dtype=torch.float64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 1000), (512, 2048), (2048, 512), (3, 300, 700)])
def test_bf16_errs_no_more_than_pytorch(shape):
    x = random(*shape, dtype=torch.bfloat16)
    want = exactly(x)
    usual = apart(iteration.by_pytorch(x, coefficients.schedule("classic", 5), 1.0, 1e-7, torch.bfloat16), want)
    for form in FORMS:
        got = ops.newton_schulz(x, form=form)
        assert apart(got, want) <= 1.2 * usual


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2048, 1024), (1000, 3000), (16, 640, 640)])
def test_large_tiles_are_symmetric_to_the_bit(dtype, shape):
    x = random(*shape, dtype=torch_dtype(dtype))
    g = ops.gram(x)
    p = ops.gram_polynomial(g / float(g.abs().max()), -4.775, 2.0315)
    assert g.equal(g.mT) and p.equal(p.mT)
