"""Gradients against numerical ones in float64, and gradients of gradients against the reference's."""

import pytest
import torch
from every_operator import by_name, drawn, small

from weft import registry
from weft.bench import cases

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]

FAMILIES = ("attention", "dropout", "elementwise", "embedding", "loss", "low_precision", "matmul", "mixture_of_experts",
            "normalization", "quantization", "reduction", "rotary", "scan", "softmax", "transpose")  # fmt: skip
# have no gradient, or only of a bias
NONE = (
    "append_and_attend", "append_to_cache", "argmax", "dequantize", "draw_tokens", "quantize", "scaled_attention",
    "scaled_matmul", "cross_entropy_with_gradient", "linear_cross_entropy_with_gradient",
)  # fmt: skip
OPERATORS = [
    op for op in registry.select() if registry.family(op.name) in FAMILIES and op.name not in NONE and op.public
]


def differentiated(op, dtype: torch.dtype):
    """A function of leaves, with its reference and the leaves, at a small point."""
    arguments = drawn(op, (small(op) or small(op, options=True))[:2][-1])
    names = op.differentiable or [n for n, a in arguments.items() if torch.is_tensor(a) and a.is_floating_point()]
    leaves = [arguments[n].to(dtype).requires_grad_() for n in names if torch.is_tensor(arguments[n])]
    names = [n for n in names if torch.is_tensor(arguments[n])]

    def of(function):
        def called(*leaves):
            out = function(**{**arguments, **dict(zip(names, leaves, strict=True))})
            return tuple(t for t in cases.tensors(out) if t.requires_grad)

        return called

    return of(op.public), of(op.reference), leaves


@by_name(OPERATORS)
def test_gradients_in_float64_are_numerical_ones(op):
    function, _, leaves = differentiated(op, torch.float64)
    assert all(t.dtype == torch.float64 for t in function(*leaves))
    torch.autograd.gradcheck(function, leaves, fast_mode=sum(t.numel() for t in leaves) > 300)


@by_name(OPERATORS)
def test_gradients_of_gradients_are_the_references(op):
    """By our kernels in float32."""

    def second(function, leaves):
        outs = function(*leaves)
        firsts = torch.autograd.grad([t.square().sum() for t in outs], leaves, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in firsts), leaves)

    function, reference, leaves = differentiated(op, torch.float32)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    for got, want in zip(second(function, leaves), second(reference, wide), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
