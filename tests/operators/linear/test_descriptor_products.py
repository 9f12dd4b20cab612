"""Products in Triton by descriptors: every layout and ragged edges, and which products go that way."""

from __future__ import annotations

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.operators.launch import Plan, compiling_for  # noqa: E402
from weft.operators.linear import linear_activations, linear_kernels, linear_quantized_kernels  # noqa: E402
from weft.operators.linear.linear_definition import reference  # noqa: E402
from weft.operators.matmul import batched_kernels, descriptor_kernels, kernels  # noqa: E402
from weft.operators.matmul.split_sums import SplitPlan  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def stored(rows: int, columns: int, across: bool, seed: int = 0, pad: int = 0) -> torch.Tensor:
    """A matrix [rows, columns] whose rows run along its columns, or, ``across``, whose columns run along its rows; ``pad``
    elements lie between one and the next."""
    shape = (columns, rows + pad) if across else (rows, columns + pad)
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)
    return t[:, :rows].t() if across else t[:, :columns]


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("m, n, k, pad", [(32, 64, 32, 0), (40, 72, 88, 0), (104, 200, 40, 8), (8, 8, 136, 24)])
def test_every_layout_is_multiplied_to_its_edges(layout, m, n, k, pad):
    a = stored(m, k, layout[0] == "T", pad=pad)
    b = stored(k, n, layout[1] == "T", seed=1, pad=pad)
    c = torch.full((m, n), torch.nan, dtype=a.dtype, device=DEVICE)
    if DEVICE != "cpu" and not descriptor_kernels.fits(a, b):
        pytest.skip("another kernel's GPU")
    descriptor_kernels.plan(a, b)(a, b, c)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2e-3, atol=2e-2)


def meta(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def planned(a: torch.Tensor, b: torch.Tensor, sm: int = 90) -> Plan | SplitPlan:
    with compiling_for(sm, lambda *compiled: None):
        return kernels.plan(a, b, "ieee")


def test_who_goes_by_descriptors():
    a, b = meta(4096, 4096), meta(4096, 4096)
    assert planned(a, b).kernel is descriptor_kernels.matmul_descriptors
    assert planned(a, b.t()).constants["B_ACROSS"] is False
    for sm in (80, 89, 120):
        assert planned(a, b, sm).kernel is kernels.matmul_tiled
    single = [t.float() for t in (a, b)]
    rows_on_eight_bytes = meta(4096, 4100)[:, :4096], b
    odd_result = a, meta(4096, 4097)[:, :4095]
    for others in (
        single,
        rows_on_eight_bytes,
        odd_result,
        (meta(4096, 0), meta(0, 4096)),
        (a, b[:, :1].expand(-1, 4096)),
    ):
        assert planned(*others).kernel is kernels.matmul_tiled
    many = torch.empty(4, 4096, 4096, dtype=a.dtype, device="meta")
    with compiling_for(90, lambda *compiled: None):  # batches whose rows follow one another are one matrix
        assert batched_kernels.plan(many, b, "ieee").kernel is descriptor_kernels.matmul_descriptors
        assert batched_kernels.plan(many, b, "ieee", torch.float32).kernel is kernels.matmul_tiled
    assert isinstance(planned(meta(64, 2**14), meta(2**14, 64)), SplitPlan)


def test_no_part_of_a_split_sum_is_empty():
    """What programs assume."""
    for steps in (1, 8, 65, 1057, 4000):
        for tiles in (1, 2, 5, 40):
            parts = kernels.split_of(tiles, steps, torch.device("cpu"))
            assert (parts - 1) * -(-steps // parts) < steps


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("m, n, k", [(32, 64, 32), (40, 72, 88), (136, 40, 104)])
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_a_linear_layer_by_descriptors_is_the_reference(layout, m, n, k, activation):
    chosen = linear_activations.of(activation)
    rows = 2 * n if chosen.gated else n
    x, weight = stored(m, k, layout[0] == "T"), stored(rows, k, layout[1] == "N", seed=1)
    bias, residual = (stored(1, rows, False, seed=2)[0] for _ in range(2))
    residual = residual[:n].expand(m, n)  # any strides
    if DEVICE != "cpu" and not descriptor_kernels.fits(x, weight.t()):
        pytest.skip("another kernel's GPU")
    for added, keep in ((True, True), (False, False)):
        y = torch.full((m, n), torch.nan, dtype=x.dtype, device=DEVICE)
        pre = torch.full((m, rows), torch.nan, dtype=x.dtype, device=DEVICE)
        others = (bias.stride(0), *(residual.stride() if added else (0, 0)))
        constants = {"F": chosen.forward, "GATED": chosen.gated, "BIAS": True, "RESIDUAL": added, "KEEP": keep}
        plan = linear_kernels.by_descriptors(linear_kernels.linear_descriptors, x, weight, n, others, constants)
        plan(x, weight, bias, residual, y, pre)
        expected = reference(
            *(t.float() for t in (x, weight, bias)), residual.float() if added else None, activation=activation
        )
        torch.testing.assert_close(y.float(), expected, rtol=4e-3, atol=2e-2)
        if keep:
            torch.testing.assert_close(pre.float(), x.float() @ weight.float().t() + bias.float(), rtol=2e-3, atol=2e-2)
        else:
            assert pre.isnan().all()


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_codes_of_a_linear_layer_by_descriptors(activation):
    """Ragged tiles with a bias: what stands past the edge is no value, and the largest one is of those within it."""
    m, n, k = 40, 72, 88
    chosen = linear_activations.of(activation)
    rows = 2 * n if chosen.gated else n
    x, weight = stored(m, k, False) / 64, stored(rows, k, False, seed=1) / 64
    bias = stored(1, rows, False, seed=2)[0]
    if DEVICE != "cpu" and not descriptor_kernels.fits(x, weight.t()):
        pytest.skip("another kernel's GPU")
    scale = torch.full((), 0.05, device=DEVICE)
    q = torch.zeros(m, n, dtype=torch.uint8, device=DEVICE)
    amax = torch.zeros((), dtype=torch.int32, device=DEVICE)
    constants = {"F": chosen.forward, "GATED": chosen.gated, "BIAS": True, "FORMAT": "int8", "HARDWARE": False}
    kernel = linear_quantized_kernels.linear_quantized_descriptors
    linear_kernels.by_descriptors(kernel, x, weight, n, (1,), constants)(x, weight, bias, scale, q, amax)
    y = reference(x.float(), weight.float(), bias.float(), None, activation=activation)
    torch.testing.assert_close(amax.view(torch.float32), y.abs().max(), rtol=2e-3, atol=2e-3)
    expected = (y / 0.05).round().clamp(-127, 127)
    assert (q.view(torch.int8).float() - expected).abs().max() <= 1


def test_which_linear_layers_go_by_descriptors():
    def kernel(x: torch.Tensor, weight: torch.Tensor, sm: int = 90) -> object:
        with compiling_for(sm, lambda *compiled: None):
            return linear_kernels.plan(x, weight, x, x, "gelu", False, False, False, "ieee").kernel

    x, weight = meta(4096, 4096), meta(8192, 4096)
    assert kernel(x, weight) is linear_kernels.linear_descriptors
    for others in (
        (x, weight, 89),
        (x.float(), weight.float()),
        (meta(8, 0), meta(8, 0)),
        (meta(64, 4100)[:, :4096], weight),
    ):
        assert kernel(*others) is linear_kernels.linear_tiled
