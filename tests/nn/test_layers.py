"""Layers of ``weft.nn`` against ``torch.nn``'s and Hugging Face's, in whose place they stand, with any arguments."""

import functools
import os

import pytest
import torch
from where import DEVICE

from weft import nn, ops

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]  # transformers' own
close = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=5e-5)
some = settings(max_examples=8, deadline=None, derandomize=True)
booleans, sizes = st.booleans(), st.sampled_from([1, 5, 16, 33])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed + sum(shape)), device=DEVICE)


def alike(ours, theirs, *inputs, close=close):
    """The same parameters, results and gradients, in training."""
    for p in theirs.parameters():
        torch.nn.init.uniform_(p, -1, 1)
    ours.load_state_dict(theirs.state_dict())
    found = []
    for module in (ours, theirs):
        leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
        y = module(*leaves)
        total = (y * random(*y.shape, seed=3)).sum()
        by_name = dict(sorted(module.named_parameters()))
        wanted = [t for t in (*leaves, *by_name.values()) if t.requires_grad]
        found.append([y, *(torch.autograd.grad(total, wanted) if wanted else ())])
    for x, y in zip(*found, strict=True):
        close(x, y)


@some
@given(shape=st.sampled_from([(7,), (3, 5), (16,)]), affine=booleans, bias=booleans, eps=st.sampled_from([1e-5, 0.1]),
       centered=booleans, lead=st.sampled_from([(), (4,), (2, 3)]))  # fmt: skip
def test_norms(shape, affine, bias, eps, centered, lead):
    name, more = ("LayerNorm", {"bias": bias}) if centered else ("RMSNorm", {})
    ours, theirs = (getattr(m, name)(shape, eps, affine, device=DEVICE, **more) for m in (nn, torch.nn))
    alike(ours, theirs, random(*lead, *shape))
    with pytest.raises(ValueError, match=rf"{name}: argument 'x' has shape .*; expected one that ends in"):
        ours(random(2, shape[-1] + 1))


@some
@given(inputs=sizes, outputs=sizes, bias=booleans, lead=st.sampled_from([(3,), (2, 3)]))
def test_linear_and_embedding(inputs, outputs, bias, lead):
    ours, theirs = (m.Linear(inputs, outputs, bias, DEVICE) for m in (nn, torch.nn))
    alike(ours, theirs, random(*lead, inputs))
    padding = 1 if bias and inputs > 1 else None
    ours, theirs = (m.Embedding(inputs, outputs, padding, device=DEVICE) for m in (nn, torch.nn))
    alike(ours, theirs, torch.arange(6, device=DEVICE).view(2, 3) % inputs)
    frequent = {"scale_grad_by_freq": True, "device": DEVICE}
    alike(nn.Embedding(9, 4, **frequent), torch.nn.Embedding(9, 4, **frequent), torch.tensor([1, 1, 2], device=DEVICE))


@pytest.mark.parametrize("bias", [False, True])
def test_fp8_products_are_near_and_the_weights_gradient_is_exact(bias):
    """A row's error is that of 3 bits of mantissa in each term (e5m2: 2), of independent signs."""
    exact = torch.nn.Linear(64, 48, bias, DEVICE)
    fp8 = nn.Linear(64, 48, bias, DEVICE, fp8=True)
    fp8.load_state_dict(exact.state_dict())
    results = []
    for module in (fp8, exact):
        x = random(2, 16, 64).requires_grad_()
        y = module(x)
        results.append([y, *torch.autograd.grad((y * random(2, 16, 48, seed=5)).sum(), [x, *module.parameters()])])
    (y, dx, dw, *db), (y2, dx2, dw2, *db2) = results
    for found, wanted, most in ((y, y2, 0.06), (dx, dx2, 0.1)):
        error = float((found - wanted).norm() / wanted.norm())
        assert 1e-4 < error < most  # not exact either: it is fp8
    close(dw, dw2)
    close(db, db2)
    x = random(2, 16, 64).requires_grad_()
    compiled = torch.compile(fp8, backend="aot_eager", fullgraph=True)(x)
    traced = torch.autograd.grad((compiled * random(2, 16, 48, seed=5)).sum(), [x, *fp8.parameters()])
    for found, wanted in zip((compiled, *traced), results[0], strict=True):
        assert (
            float((found - wanted).norm() / wanted.norm()) < 1e-2
        )  # codes may differ where sums are ordered otherwise
    assert "fp8=True" in repr(fp8) and "fp8" not in repr(nn.Linear(2, 2))


@some
@given(bias=booleans, smoothing=st.sampled_from([0.0, 0.1]), ignored=st.sampled_from([-100, 2]),
       reduction=st.sampled_from(["mean", "sum", "none"]))  # fmt: skip
def test_the_head_and_its_loss(bias, smoothing, ignored, reduction):
    options = {"label_smoothing": smoothing, "ignore_index": ignored, "reduction": reduction}
    head = torch.nn.Linear(16, 37, bias, DEVICE)
    ours = nn.LinearCrossEntropy(16, 37, bias, DEVICE, **options)
    x, target = random(2, 5, 16), torch.arange(10, device=DEVICE).view(2, 5) % 4

    class Theirs(torch.nn.Linear):
        def forward(self, x):
            logits = super().forward(x).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, target.flatten(), **options)
            return loss.view(2, 5) if reduction == "none" else loss

    theirs = Theirs(16, 37, bias, DEVICE)
    alike(ours, head, x)  # without labels the logits
    ours.forward = functools.partial(ours.forward, target=target)
    alike(ours, theirs, x)


def llama(**options):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
                                      head_dim=8, num_hidden_layers=1, vocab_size=8, rms_norm_eps=1e-5, **options)  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(DEVICE).model


def test_a_transformer_layer_is_llamas():
    model = llama()
    theirs = model.layers[0]
    ours = nn.TransformerLayer(32, 4, 2, 40, eps=1e-5, head_dim=8, device=DEVICE)
    x, positions = random(2, 6, 32), torch.arange(6, device=DEVICE)[None]
    cos, sin = model.rotary_emb(x, positions)
    theirs.forward = functools.partial(theirs.forward, position_embeddings=(cos, sin))
    model.config._attn_implementation = "sdpa"  # without a mask: causal
    ours.forward = functools.partial(ours.forward, rotary=(cos[0, :, :4], sin[0, :, :4]))
    alike(ours, theirs, x)


@pytest.mark.parametrize("normalise", [True, False])
def test_a_mixture_of_experts_is_qwens(normalise):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=normalise
    )
    config._experts_implementation = "eager"
    ours = nn.MixtureOfExperts(16, 24, 4, 2, normalise=normalise, device=DEVICE)
    alike(ours, Qwen3MoeSparseMoeBlock(config).to(DEVICE), random(2, 5, 16))
    with pytest.raises(ValueError, match=r"argument 'k' is 5; expected 1 … experts = 4"):
        nn.MixtureOfExperts(16, 24, 4, 5)


def test_layers_compose_and_learn():
    torch.manual_seed(0)
    experts = nn.MixtureOfExperts(16, 16, 4, 2, device=DEVICE)
    layers = [nn.TransformerLayer(16, 2, 1, 24, head_dim=16, device=DEVICE, mlp=m) for m in (None, experts)]
    model = torch.nn.Sequential(nn.Embedding(11, 16, device=DEVICE), *layers, nn.RMSNorm(16, device=DEVICE))
    head = nn.LinearCrossEntropy(16, 11, device=DEVICE)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    ids = torch.arange(8, device=DEVICE)[None] % 3
    losses = []
    for _ in range(4):
        loss = head(model(ids), ids)
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in parameters)
        optimizer.step()
    assert losses == sorted(losses, reverse=True) and ops.explain("rms_norm", model(ids)).implementation
