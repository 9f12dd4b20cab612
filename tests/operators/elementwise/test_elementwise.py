"""Which kernels element-wise calls take, and the gradient of relu from one bit an element."""

import importlib

import pytest
import torch
from where import DEVICE

from weft import ops, registry
from weft.operators.elementwise import dispatch

pytestmark = pytest.mark.device
NAMES = ("add", "geglu", "gelu", "reglu", "relu", "silu", "swiglu", "vector_add")


@pytest.mark.parametrize("name", NAMES)
def test_explain_says_which_kernel_and_which_for_the_gradient(name):
    op = registry.get(name)
    x = torch.ones(4, 6, device=DEVICE)
    more = (x,) if {"y", "up"} & set(op.inputs(op.parse("N=8", "fp32"), None, "meta")) else ()
    for direction in op.directions:
        assert ops.explain(name, x, *more, direction=direction).implementation == "triton"
        scattered = torch.ones(4, 6, 5, 7, device=DEVICE)[::2, ::2, ::2].transpose(0, 1)
        found = ops.explain(name, scattered, *(scattered,) * len(more), direction=direction)
        assert found.implementation == "torch" and "collapse" in found.reason


def test_relu_reads_one_bit_an_element_for_its_gradient():
    assert "bit" in ops.explain("relu", torch.ones(3, device=DEVICE), direction="backward").reason


@pytest.mark.parametrize("shape", [(40,), (5, 18)])
@pytest.mark.parametrize("made", ["dense", "strided", "expanded", "transposed"])
@pytest.mark.parametrize("strided", [False, True])
def test_relu_finds_its_bits_whatever_the_strides_of_the_gradient(shape, made, strided):
    g = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(*shape, 2, generator=g, device=DEVICE)[..., 0]
    x = x if strided else x.contiguous()
    dy = {
        "dense": torch.randn(*shape, generator=g, device=DEVICE),
        "strided": torch.randn(*shape, 3, generator=g, device=DEVICE)[..., 1],
        "expanded": torch.randn((), generator=g, device=DEVICE).expand(shape),
        "transposed": torch.randn(*shape[::-1], generator=g, device=DEVICE).permute(*range(len(shape))[::-1]),
    }[made]
    x.requires_grad_()
    (dx,) = torch.autograd.grad(ops.relu(x), x, dy)
    assert dx.equal(torch.where(x > 0, dy, 0.0))


@pytest.mark.parametrize(("n", "strides", "dtype", "tail"), [
    (4096, (0, 1, 0, 1), torch.float16, False),
    (4104, (0, 1, 0, 1), torch.float16, False),
    (4100, (0, 1, 0, 1), torch.float32, False),
    (4100, (0, 1, 0, 1), torch.float16, True),
    (1001, (1008, 1, 1016, 1), torch.float16, True),
    (1001, (1003, 1, 1000, 1), torch.float16, False),  # rows begin anywhere
    (1001, (2002, 2, 1008, 1), torch.float16, True),  # only what is contiguous has vectors
    (1001, (2002, 2, 2002, 2), torch.float16, False),
])  # fmt: skip
def test_rows_that_begin_at_whole_vectors_and_end_within_one_have_a_tail(n, strides, dtype, tail):
    assert dispatch.has_tail(torch.empty(1, dtype=dtype), n, strides) == tail


@pytest.mark.parametrize("shape", [(2053,), (2056,), (3, 1029), (5, 1032)])
@pytest.mark.parametrize("pad", [0, 3, 16])
def test_sizes_that_end_within_a_vector(shape, pad):
    """Dense, and with rows further apart."""
    x = torch.randn(*shape[:-1], shape[-1] + pad, device=DEVICE).half()[..., : shape[-1]].requires_grad_()
    dy = torch.randn_like(x)
    for ours, theirs in ((ops.silu, torch.nn.functional.silu), (ops.relu, torch.relu)):
        (got,), (right,) = (torch.autograd.grad(f(x), x, dy) for f in (ours, theirs))
        torch.testing.assert_close(ours(x), theirs(x), rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(got, right, rtol=2e-3, atol=1e-3)
    kept = ops.dropout(x, 0.5, seed=3)
    assert torch.equal(kept, torch.where(kept == 0, 0, 2 * x)) and 0.4 < (kept == 0).float().mean() < 0.6


@pytest.mark.parametrize(("shape", "cut"), [((3, 2100), 3), ((70, 90), 0), ((9, 5), 2)])
def test_relu_of_rows_whose_gradient_lies_otherwise(shape, cut):
    """Long rows with a gradient of other strides, and a transposed view."""
    g = torch.Generator(DEVICE).manual_seed(0)
    wide = torch.randn(shape[0], shape[1] + cut, generator=g, device=DEVICE)
    few = min(shape[1], 90)  # a row of the transposed view is a program
    for x, dy in (
        (wide[:, : shape[1]].contiguous(), wide[:, cut:]),
        (wide[:, :few].t(), wide[:, cut : cut + few].t().contiguous()),
    ):
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(ops.relu(x), x, dy)
        assert dx.equal(torch.where(x > 0, dy, 0.0))


@pytest.mark.parametrize(("name", "form"), [("swiglu", None), ("geglu", "none"), ("geglu", "tanh")])
@pytest.mark.parametrize("made", ["dense", "halves", "scattered"])
def test_gradients_and_once_more_the_result(name, form, made):
    g = torch.Generator(DEVICE).manual_seed(0)
    if made == "halves":  # of one packed tensor
        gate, up = torch.randn(5, 74, generator=g, device=DEVICE).chunk(2, -1)
    else:
        gate, up = (torch.randn(6, 6, 5, 37, generator=g, device=DEVICE) for _ in range(2))
    if made == "scattered":  # no rows of one stride
        gate, up = (t[::2, ::2, ::2].transpose(0, 1) for t in (gate, up))
    dy = torch.randn(gate.shape, generator=g, device=DEVICE)
    call = importlib.import_module(f"weft.operators.elementwise.{name}").call
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    y = getattr(ops, name)(*leaves, *(() if form is None else (form,)))
    expected = (*torch.autograd.grad(y, leaves, dy), y)
    for found, wanted in zip(call.again(gate, up, dy, form), expected, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
    by = {"dense": "triton", "halves": "triton", "scattered": "torch"}[made]
    assert dispatch.AGAIN.choose(gate, up, dy, call.formula if form is None else call.of(form)).implementation == by
