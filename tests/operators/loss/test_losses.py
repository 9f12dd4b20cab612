"""Losses as users of PyTorch call them: under autocast, of images, with probabilities; a fused loss of 16 bits is fp32."""

import pytest
import torch
import torch.nn.functional as F
from where import DEVICE

from weft import ops
from weft.operators import call
from weft.operators.loss.dispatch import in_rows

pytestmark = pytest.mark.device

HALF = torch.float16


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def labels(*shape, classes):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(5)).to(DEVICE)


def with_gradients(function, *leaves):
    leaves = [t.detach().requires_grad_() for t in leaves]
    loss = function(*leaves)
    return [loss, *torch.autograd.grad((loss * normal(*loss.shape, seed=9)).sum(), leaves)]


def agree(found, wanted, near):
    for got, right in zip(found, wanted, strict=True):
        assert got.dtype == right.dtype and got.shape == right.shape
        torch.testing.assert_close(got, right, rtol=near, atol=near, equal_nan=True)


CHANNELS_LAST = {"memory_format": torch.channels_last}
IMAGES = {  # logits, and whether a view makes rows of them
    "one vector": (lambda: normal(7), True),
    "many images": (lambda: normal(2, 7, 3, 4), False),
    "an image": (lambda: normal(1, 7, 3, 4), True),
    "channels last": (lambda: normal(2, 7, 3, 4).contiguous(**CHANNELS_LAST), True),
    "words": (lambda: normal(2, 5, 7).mT, True),
    "none": (lambda: normal(0, 7, 3), False),
}
OPTIONS = [{}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.1, "weight": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("name", IMAGES)
def test_logits_of_any_rank_and_probabilities_are_pytorchs(name, soft, options):
    logits, is_view = IMAGES[name][0](), IMAGES[name][1]
    options = {**options, "weight": normal(7, seed=3).abs()} if "weight" in options else options
    shape = logits.select(min(1, logits.ndim - 1), 0).shape
    target = logits.softmax(min(1, logits.ndim - 1)).flip(0) if soft else labels(*shape, classes=7)
    if not soft and target.numel() > 1:
        target.view(-1)[1] = -100
    tensors = (logits, target) if soft else (logits,)  # probabilities have gradients as well
    found = with_gradients(lambda x, t=target: ops.cross_entropy(x, t, **options), *tensors)
    wanted = with_gradients(lambda x, t=target: F.cross_entropy(x, t, **options), *tensors)
    agree(found, wanted, 1e-5)
    loss, gradient = ops.cross_entropy_with_gradient(logits, target, **options)
    assert gradient.shape == logits.shape
    torch.testing.assert_close(loss, found[0].detach(), equal_nan=True)
    leaf = logits.detach().requires_grad_()
    wanted = torch.autograd.grad(F.cross_entropy(leaf, target, **options).sum(), leaf)
    agree([gradient], wanted, 1e-5)
    rows, _ = in_rows(logits, target)
    assert (rows.data_ptr() == logits.data_ptr()) and (rows.ndim == 2) is (is_view and not soft)
    for explained in ("cross_entropy", "cross_entropy_with_gradient"):
        chosen = ops.explain(explained, logits, target).implementation
        assert (chosen == "torch") is (soft or not is_view or not logits.numel())


def test_probabilities_with_a_z_loss_and_a_cap():
    logits, target = normal(4, 7), normal(4, 7, seed=1).softmax(1)
    x = 5 * torch.tanh(logits / 5)
    wanted = F.cross_entropy(x, target) + 0.1 * x.logsumexp(1).square().mean()
    torch.testing.assert_close(ops.cross_entropy(logits, target.double(), z_loss=0.1, soft_cap=5.0), wanted)


@pytest.mark.parametrize(("target", "options", "words"), [
    (torch.zeros(2, 4), {}, r"shapes \(2, 7, 3\) and \(2, 4\); expected \[M, V\] and \[M\], or \[N, C, d1, …\]"),
    (torch.zeros(2, dtype=torch.long), {}, r"shapes \(2, 7, 3\) and \(2,\)"),
    (torch.zeros(2, 7, 3), {"ignore_index": 0}, "'ignore_index' is 0; expected labels in 'target', which holds probabilities"),
    (torch.full((2, 3), 7), {"check_labels": True}, r"'target' has 7 at \(0, 0\)"),
    (torch.zeros(2, 3, dtype=torch.long), {"weight": torch.ones(3)}, "'weight' has shape .* one for each class"),
])  # fmt: skip
def test_what_does_not_fit_is_named(target, options, words):
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    for function in (ops.cross_entropy, ops.cross_entropy_with_gradient):
        with pytest.raises(ValueError, match=words):
            function(normal(2, 7, 3), target.to(DEVICE), **options)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_under_autocast_losses_are_fp32(reduction, dtype):
    """Of a linear layer's bf16 or fp16 result beside an fp32 head, with gradients in each argument's dtype."""
    target = labels(9, classes=40)
    x, weight, bias, of_class = normal(9, 16, dtype=dtype), normal(40, 16, seed=1), normal(40, seed=2), normal(40).abs()
    with torch.autocast(DEVICE, HALF):
        wanted = with_gradients(
            lambda x, w, b: F.cross_entropy(F.linear(x, w, b), target, of_class, reduction=reduction), x, weight, bias
        )
        options = {"reduction": reduction, "class_weight": of_class.to(dtype)}
        found = with_gradients(
            lambda x, w, b: ops.linear_cross_entropy(x, w, target, bias=b, **options), x, weight, bias
        )
        agree(found, wanted, 5e-3)
        assert ops.explain("linear_cross_entropy", x, weight, target, bias=bias).implementation == "triton"
        loss, *gradients = ops.linear_cross_entropy_with_gradient(x, weight, target, bias=bias, **options)
        assert loss.dtype == torch.float32 and [g.dtype for g in gradients] == [dtype, torch.float32, torch.float32]
        torch.testing.assert_close(loss, wanted[0].detach(), rtol=5e-3, atol=5e-3)
        logits, options = F.linear(x, weight, bias), {"reduction": reduction, "weight": of_class.to(dtype)}
        agree(with_gradients(lambda x: ops.cross_entropy(x, target, **options), logits),
              with_gradients(lambda x: F.cross_entropy(x, target, **options), logits), 2e-3)  # fmt: skip
        loss, gradient = ops.cross_entropy_with_gradient(logits, target, **options)
        assert loss.dtype == torch.float32 and gradient.dtype == HALF


@pytest.mark.skipif(DEVICE == "cuda", reason="autocast of a CPU")
def test_under_autocast_a_cpu_without_kernels_does_so_too(monkeypatch):
    monkeypatch.setattr(call, "INTERPRETING", False)
    x, w, target = normal(9, 16), normal(40, 16, seed=1), labels(9, classes=40)
    half = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        for logits in (F.linear(x, w), F.linear(x, w).float()):
            wanted = F.cross_entropy(logits, target)
            torch.testing.assert_close(ops.cross_entropy(logits, target), wanted)
            torch.testing.assert_close(ops.cross_entropy_with_gradient(logits, target)[0], wanted)
        torch.testing.assert_close(ops.linear_cross_entropy(half, w, target), wanted)
        torch.testing.assert_close(ops.linear_cross_entropy_with_gradient(x, w, target)[0], wanted)
    wanted = F.cross_entropy(half.float() @ w.bfloat16().float().T, target)
    torch.testing.assert_close(ops.linear_cross_entropy(half, w.bfloat16(), target), wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_fused_loss_of_16_bits_is_not_rounded(reduction):
    x, weight, target = normal(9, 16, dtype=HALF), normal(40, 16, seed=1, dtype=HALF), labels(9, classes=40)
    wanted = F.cross_entropy(x.double() @ weight.double().T, target, reduction=reduction)
    alone = ops.linear_cross_entropy(x, weight, target, reduction=reduction)
    with_gradient = ops.linear_cross_entropy_with_gradient(x, weight, target, reduction=reduction)[0]
    assert alone.dtype == with_gradient.dtype == torch.float32
    torch.testing.assert_close(alone.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(with_gradient.double(), wanted, rtol=1e-3, atol=1e-3)  # of logits of 16 bits
    torch.testing.assert_close(with_gradient.mean().double(), wanted.mean(), rtol=1e-4, atol=0)
