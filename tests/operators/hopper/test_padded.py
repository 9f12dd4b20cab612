"""Products of rows that begin anywhere: what is copied, and which products are worth it."""

import pytest
import torch

from weft import ops
from weft.operators.hopper import padded
from weft.operators.launch import compiling_for
from weft.operators.linear import dispatch, linear_quantized
from weft.operators.linear.reference import reference


def operands(m: int, n: int, k: int, layout: str, **where):
    a = torch.randn(*((m, k) if layout[0] == "N" else (k, m)), **where).half()
    b = torch.randn(*((k, n) if layout[1] == "N" else (n, k)), **where).half()
    return a if layout[0] == "N" else a.t(), b if layout[1] == "N" else b.t()


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("size", [(33, 20, 40), (32, 24, 41), (7, 9, 13), (32, 21, 40), (1, 3, 5)])
def test_the_product_of_copies(size, layout, monkeypatch):
    """cuBLAS is given what it is fast with."""
    m, n, _ = size
    a, b = operands(*size, layout)
    c = torch.full((m, n), torch.nan, dtype=torch.float16)

    def product(a, b, out=None):
        assert padded.whole(a) and padded.whole(b) and padded.whole(b.mT)
        made = a @ b
        return made if out is None else out.copy_(made)

    monkeypatch.setattr(torch, "mm", product)
    padded.PaddedPlan(a, b)(a, b, c)
    torch.testing.assert_close(c, (a.float() @ b.float()).half())


@pytest.mark.parametrize(("size", "layout", "copies"), [
    ((4097, 4099, 4104), "NN", [4104 * 4099, 4097 * 4099]),  # b and the result
    ((4097, 4099, 4104), "NT", [4104 * 4099, 4097 * 4099]),
    ((4096, 4096, 4099), "NT", [4096 * 4099, 4096 * 4099]),
    ((4097, 4096, 4096), "TN", [4096 * 4097]),
])  # fmt: skip
def test_only_what_does_not_fit_is_copied(size, layout, copies):
    a, b = operands(*size, layout, device="meta")
    assert padded.copied(a, b) == copies and padded.pays(a, b)


def test_where_an_epilogue_reads_the_products_rows_the_result_is_not_copied():
    x, weight = operands(4558, 1555, 157, "NT", device="meta")
    assert padded.copied(x, weight, result=False) == padded.copied(x, weight)[:2] == [4558 * 157, 157 * 1555]
    assert padded.pays(x, weight, result=False) and not padded.pays(x, weight)
    with compiling_for(90, lambda *_: None):
        choice = ops.explain(
            "linear_quantized", x, weight.t(), scale=torch.empty(1, device="meta"), activation="gelu_tanh"
        )
    assert choice.implementation == "epilogue" and "copies" in choice.reason


@pytest.mark.parametrize("layout, taken, left", [
    ("NT", [(1001, 1003, 1024), (8, 517, 515, 512), (22, 1397, 3603, 64), (3001, 2050, 1000), (6, 2634, 6885, 435)],
     [(4097, 4099, 4104), (4096, 4096, 4099), (300, 301, 50000), (1024, 1003, 8), (8, 512, 512, 515)]),
    ("NN", [(14, 2022, 2635, 812)], [(7232, 2540, 4190), (1055, 1055, 1499), (16, 288, 2389, 711)]),
    ("TN", [], [(4809, 1374, 5676), (1500, 9003, 1200)]),
])  # fmt: skip
def test_the_main_loop_takes_what_it_was_measured_to_be_ahead_in(layout, taken, left):
    """On an H200, and what is far from that: few tiles, short sums; other architectures never."""
    for sm, wanted in ((90, (True, False)), (100, (False, False))):
        with compiling_for(sm, lambda *_: None):
            for sizes, expected in zip((taken, left), wanted, strict=True):
                for *batch, m, n, k in sizes:
                    a, b = operands(m, n, k, layout, device="meta")
                    if batch:
                        a, b = (
                            torch.empty_strided(
                                (*batch, *t.shape), (t.numel(), *t.stride()), dtype=t.dtype, device="meta"
                            )
                            for t in (a, b)
                        )
                    assert padded.by_loop(a, b) == expected, (batch, m, n, k)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_operands_of_the_main_loop(layout, batch, monkeypatch):
    """Rows that TMA takes, empty ones to plan with, of the same elements, and only copies of what needs one."""
    plans = []

    class Loop:
        def __init__(self, a, b, *, loose, device):
            plans.append([(t.shape, t.stride()) for t in (a, b)])
            assert loose and a.is_meta and b.is_meta

        def __call__(self, a, b, c):
            assert plans == [[(t.shape, t.stride()) for t in (a, b)]] and padded.fits(a) and padded.fits(b)
            c.copy_(a.float() @ b.float())

    monkeypatch.setattr(padded, "HopperPlan", Loop)
    a, b = operands(21, 13, 40, layout)
    a, b = (
        t if not batch else torch.stack([t.mT, -t.mT, 2 * t.mT]).mT if t.stride(-1) > 1 else t.repeat(3, 1, 1)
        for t in (a, b)
    )
    c = torch.full((*batch, 21, 13), torch.nan)
    padded.LoopPlan(a, b)(a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float())
    assert [padded.fitting(t) is t for t in (a, b)] == [layout[0] == "N", layout[1] == "T"]


@pytest.mark.parametrize(("size", "implementation", "words"), [
    ((4097, 4099, 4104), "padded", "multiples of 8"),
    ((4096, 4096, 4096), "cuda", "TMA and wgmma"),
    ((101, 67, 79), "torch", "cuBLAS"),
])  # fmt: skip
def test_the_table_pads_large_products(size, implementation, words):
    with compiling_for(90, lambda *_: None):
        choice = ops.explain("matmul", *operands(*size, "NN", device="meta"))
    assert choice.implementation == implementation and words in choice.reason


@pytest.mark.parametrize(("a", "b", "forward", "words"), [
    ((16, 2000, 166), (16, 166, 219), "torch", "copies"),  # the sum over 2000 terms has few tiles
    ((72, 64), (64, 7208), "torch", "small products"),
    ((2000, 300), (300, 2001), "padded", "two products"),
])  # fmt: skip
def test_gradients_may_be_products_of_copies_where_the_call_is_not(a, b, forward, words):
    operands = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in (a, b))
    with compiling_for(90, lambda *_: None):
        choice = ops.explain("batched_matmul", *operands, direction="backward")
    assert choice.implementation == forward and words in choice.reason


@pytest.mark.parametrize(("m", "n", "k"), [(5, 12, 16), (9, 13, 21), (7, 8, 11)])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_codes_of_a_product_of_copies(m, n, k, activation, monkeypatch):
    x, w = torch.randn(m, k).half(), torch.randn(2 * n if activation == "swiglu" else n, k).half()
    call = {"scale": torch.tensor([0.05]), "activation": activation}
    monkeypatch.setattr(dispatch, "copies_pay", lambda c: True)
    codes, largest = linear_quantized.by_kernel("epilogue", x, w, **call)
    wanted, of_wanted = linear_quantized.reference(x, w, **call)
    torch.testing.assert_close(codes.float(), wanted.float(), rtol=0.15, atol=0.1)  # a neighbouring code
    torch.testing.assert_close(largest, of_wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("given", ["", "bias", "bias, residual"])
@pytest.mark.parametrize("size", [(70, 20, 40), (72, 24, 41), (66, 13, 19)])
def test_a_linear_layer_of_copies(size, given, activation, monkeypatch):
    """The reference replaces the main loop; its operands have rows that TMA takes, and the right elements."""
    (m, n, k), halves = size, 2 if activation == "swiglu" else 1
    x, weight = torch.randn(m, k).half(), torch.randn(n * halves, k).half()
    bias = torch.randn(n * halves).half() if "bias" in given else None
    residual = torch.randn(m, n).half() if "residual" in given else None

    class Launch(dispatch.HopperLaunch):
        def __init__(self, c):
            assert not dispatch.hopper_unsupported(c) and c.device.type == "cpu"
            self.biased, self.added = c.bias is not None, c.residual is not None

        def __call__(self, x, weight, bias, residual, y, pre):
            given = bias if self.biased else None, residual if self.added else None
            y.copy_(reference(x, weight, *given, activation=activation))

    monkeypatch.setattr(dispatch, "HopperLaunch", Launch)
    monkeypatch.setattr(dispatch, "target_sm", lambda device: 90 if device.type == "cpu" else 80)
    tensors, options = dispatch.arguments(x, weight, bias, residual, activation)
    y = torch.full((m, n), torch.nan, dtype=torch.float16)
    c = dispatch.LinearCall(*tensors, *options)
    assert not dispatch.padded_unsupported(c)
    dispatch.PaddedLaunch(c)(*tensors, y, y)
    torch.testing.assert_close(y, reference(x, weight, bias, residual, activation=activation))


def test_a_copy_into_other_matrices_is_refused():
    """A result of several dimensions, say, that its caller did not make rows."""
    with pytest.raises(ValueError, match="1 matrices into 2"):
        padded.copy(torch.ones(6, 8), torch.empty(2, 3, 5))
