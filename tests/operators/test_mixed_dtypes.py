"""Tensors of different dtypes, as autocast's bf16 branch beside an fp32 residual: the dtype and the numbers are PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from where import DEVICE

from weft import ops
from weft.operators.call import promoted

pytestmark = pytest.mark.device

WIDE = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
HALF = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
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
    with pytest.raises(ValueError, match=r"'residual' has shape \(6, 1\); expected \(6, 16\), the result's"):
        ops.linear(HALF, WEIGHT.half(), residual=WIDE[:, :1])
