"""The family's products on Hopper's main loop, without a GPU: what is launched, with the launches emulated by PyTorch."""

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import meta

pytest.importorskip("cuda.bindings")

from weft import ops, registry
from weft.definition import Declined
from weft.operators.hopper.gemm import HopperPlan
from weft.operators.hopper.tile_sizes import SHARED, shared_bytes
from weft.operators.launch import INTERPRETING, compiling_for
from weft.operators.orthogonalization import coefficients, dispatch, iteration

BF16, FP16 = torch.bfloat16, torch.float16
ODD = [(61, 157), (2, 47, 33)] * INTERPRETING  # are copied by a kernel


class Emulated(HopperPlan):
    """A plan, made as for a GPU, whose launches are fp64 products rounded once; of symmetric ones the lower half says all."""

    launches: list["Emulated"]

    def __init__(self, a, b, out_dtype=None, **parts):
        with compiling_for(90, lambda *kernel: None):
            super().__init__(a, b, out_dtype, **parts)
        self.symmetric = parts.get("symmetric") is not None
        self.forms = [(t.shape, t.stride()) for t in (a, b)]
        self.added = [(t.stride(), t.dtype) for t in (parts.get("residual"), parts.get("second")) if t is not None]

    def __call__(self, a, b, c, *, residual=None, second=None, alpha=1.0, beta=1.0, gamma=1.0):
        assert self.forms == [(t.shape, t.stride()) for t in (a, b)] and c.is_contiguous()
        added = [t for t in (residual, second) if t is not None]
        assert self.added == [(t.stride(), t.dtype) for t in added] and (added or alpha == 1.0)
        assert not any(t.data_ptr() == c.data_ptr() for t in (a, b, *added)), "other tiles still read it"
        made = alpha * (a.double() @ b.double())
        for factor, t in zip((beta, gamma), added, strict=False):
            made += factor * t.double()
        if self.symmetric:
            assert (made - made.mT).abs().max() < 0.02 * made.abs().max(), "the product is not symmetric"
            made = made.tril() + made.tril(-1).mT
        c.copy_(made)
        Emulated.launches.append(self)


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setattr(dispatch, "HopperPlan", Emulated)
    monkeypatch.setattr(Emulated, "launches", [], raising=False)
    return Emulated


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    return bool((got.double() - want.double()).norm() <= tolerance * want.double().norm())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(40, 64), (3, 72, 24), (2, 2, 16, 136)])
def test_gram_matrices_are_one_launch(launches, dtype, shape):
    x = random(*shape, dtype=dtype)
    wide = x.view(-1, *shape[-2:])
    for view in (wide, wide.mT):
        c = torch.empty(*view.shape[:-1], view.shape[-2], dtype=dtype)
        dispatch.symmetric_on_hopper(view, view.mT, c, 1.0)
        assert close(c, view.double() @ view.double().mT, 2**-8) and c.equal(c.mT)
    ends = f"true, false, {'bf16' if dtype is BF16 else 'fp16'}>"
    assert [made.launch.expression.endswith(ends) for made in launches.launches] == [True] * 2


@pytest.mark.parametrize("factors", [(2.0, -1.5, 0.0), (0.5, 0.0, 3.0), (1.0, 0.75, -2.0), (2.0, 0.0, 0.0)])
def test_factors_reach_their_operands(launches, factors):
    beta, of_a, of_b = factors
    x = random(2, 48, 48).double()
    a = (x @ x.mT / 48).to(BF16)
    b = (a.double() @ a.double() / 48).to(BF16)  # they commute, so far as bf16 lets them
    a, b = (t.tril() + t.tril(-1).mT for t in (a, b))
    c = torch.empty_like(a)
    dispatch.symmetric_on_hopper(a, b, c, beta, of_a, of_b)
    assert close(c, beta * a.double() @ b.double() + of_a * a.double() + of_b * b.double(), 2**-7)


@pytest.mark.parametrize("form", ["symmetric", "gram"])
@pytest.mark.parametrize("name", coefficients.NAMES)
@pytest.mark.parametrize("shape", [(64, 160), (160, 64), (3, 48, 48), (2, 2, 96, 40), *ODD])
def test_the_iteration_is_the_direct_one(launches, shape, name, form):
    x, steps = random(*shape), coefficients.schedule(name, 5)
    got = iteration.launched(x, steps, coefficients.margin(name), 1e-7, form, BF16, dispatch.ON_HOPPER)
    want = iteration.by_pytorch(x.double(), steps, coefficients.margin(name), 1e-7, torch.float64)
    assert got.dtype == BF16 and got.shape == x.shape and got.is_contiguous()
    assert close(got, want, 0.03)
    assert len(launches.launches) == (15 if form == "symmetric" else 18)
    assert sum(made.symmetric for made in launches.launches) == (10 if form == "symmetric" else 16)
    assert len({made.shape.matrices for made in launches.launches}) == 1  # a batch is one launch


@pytest.mark.parametrize("matrices, m", [(1, 8), (1, 264), (1, 2048), (1, 4096), (1, 8192), (16, 2048), (32, 4096)])
def test_configurations_fit(matrices, m):
    """And are kernels that compile: the plan's own checks."""
    a = torch.empty(matrices, m, m, dtype=BF16, device="meta")
    key = (90, BF16, "NT", matrices, m, m)
    found = list(dispatch.hopper_candidates(*key))
    assert dispatch.hopper_heuristic(*key) in [{**c, "GROUP": dispatch.hopper_heuristic(*key)["GROUP"]} for c in found]
    for config in (dispatch.hopper_heuristic(*key), *found):
        assert shared_bytes(config, 2, symmetric=True) <= SHARED and config["STAGES"] >= 4
        with compiling_for(90, lambda *kernel: None):
            made = HopperPlan(a, a.mT, symmetric=config).launch
        assert made.grid[0] % config["CLUSTER"] == 0 and 0 < made.grid[0] <= 132


def test_the_shape_of_tiles_is_the_one_that_ends_first():
    """8192 rows are 8 whole waves of clusters that compute 256 x 256; 4096 are 2.06, for which nobody should wait."""
    large, middle = (dispatch.hopper_heuristic(90, BF16, "NT", 1, m, m) for m in (8192, 4096))
    assert (large["COLUMNS"], large["CLUSTER"], large["STREAM"]) == (256, 2, 0)
    assert middle["COLUMNS"] < 256 or middle["STREAM"]


@pytest.mark.parametrize("shape, dtype, want", [
    ((256, 512), BF16, "cuda"), ((256, 512), FP16, "cuda"), ((2, 256, 512), BF16, "cuda"),
    ((256, 512), torch.float32, "strips"),
    ((100, 2048), BF16, "cuda"), ((256, 2045), FP16, "cuda"),
])  # fmt: skip
def test_hopper_takes_what_tma_takes_and_copies_of_the_rest(shape, dtype, want):
    assert ops.explain("gram", torch.ones(256, 512)).implementation != "cuda"
    with compiling_for(90, lambda *kernel: None):
        x = torch.empty(shape, dtype=dtype, device="meta")
        assert ops.explain("gram", x).implementation == want
        square = torch.empty(*shape[:-1], shape[-2], dtype=dtype, device="meta")
        if shape[-2] % 8 == 0:
            assert ops.explain("gram_polynomial", square, -4.775, 2.0).implementation == want
            alone = "triton" if want == "cuda" else want
            assert ops.explain("gram_polynomial", square, 0.0, 2.0).implementation == alone
        if want == "cuda":
            assert ops.explain("gram", x[..., :33, :65]).implementation == "triton"
        form = "-gram" if dtype is BF16 else ""
        assert ops.explain("newton_schulz", x).implementation == want + form
        assert ops.explain("newton_schulz", x, form="symmetric").implementation == want
    with compiling_for(100, lambda *kernel: None):
        assert ops.explain("gram", x).implementation == ("triton" if want == "cuda" else want)


def on_hopper(name: str, *arguments):
    with compiling_for(90, lambda *kernel: None):
        return registry.get(name).find("cuda").function(*arguments)


REFUSED = [
    bad(on_hopper, Declined, "takes bfloat16", "gram", meta(64, 128).float()),
    bad(on_hopper, Declined, "alpha is 0", "gram_polynomial", meta(64, 64), 0.0, 1.0),
    bad(on_hopper, Declined, "takes bfloat16", "newton_schulz", meta(64, 96).float()),
]


@pytest.mark.parametrize("matrices", [1, 4, 16])
def test_a_tile_of_any_size_of_matrix_is_one_that_the_kernel_has(matrices):
    """A slab and its mirror image have rows of 128 bytes: tiles of 160 columns do not compile."""
    sizes = [(m, k) for m in range(64, 8193, 192) for k in (512, 1024, 3000, 8192)]
    tiles = {dispatch.hopper_heuristic(90, "16-bit", "NT", matrices, m, k)["COLUMNS"] for m, k in sizes}
    assert len(tiles) > 1 and not any(columns % 64 for columns in tiles)
    candidates = dispatch.hopper_candidates(90, "16-bit", "NT", matrices, 2048, 1024)
    assert not any(c["COLUMNS"] % 64 for c in candidates)
