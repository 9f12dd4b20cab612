"""Operators that a compiler sees as one: they are in its graphs, forward and backward, and compute what eager mode does."""

import functools
import importlib

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from where import DEVICE

from weft import ops

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]  # PyTorch's compiler warns of its own
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(shape, generator=GENERATOR).to(DEVICE)


TARGET = torch.tensor([3, 0, -100, 36, 7, 7, 2]).to(DEVICE)
Q, K, V = random(2, 4, 5, 16), random(2, 2, 7, 16), random(2, 2, 7, 16)
COS, SIN = random(5, 6).cos(), random(5, 6).sin()
BEGINS, ENDS = torch.tensor([0, 3, 10], dtype=torch.int32, device=DEVICE), torch.tensor([0, 6, 14], dtype=torch.int32)
CALLS = {
    "window": (lambda q, k, v: ops.attention(q, k, v, causal=True, window=(3, None)), (Q, K, V)),
    "bias": (
        lambda q, k, v, s, b: ops.attention(q, k, v, sinks=s, bias=b, softcap=3.0, return_lse=True),
        (Q, K, V, random(4), random(4, 5, 1)),
    ),
    "mask": (
        lambda q, k, v: ops.attention(*(t.transpose(1, 2) for t in (q, k, v)), mask=TARGET > 2),
        (random(1, 5, 4, 16), random(1, 7, 2, 16), random(1, 7, 2, 16)),
    ),
    "packed": (
        lambda q, k, v: ops.attention(q, k, v, causal=True, cu_seqlens_q=BEGINS, cu_seqlens_k=ENDS.to(DEVICE)),
        (random(10, 4, 16), random(14, 2, 16), random(14, 2, 16)),
    ),
    "loss": (
        lambda x, w, b: ops.linear_cross_entropy(x, w, TARGET, bias=b, soft_cap=4.0, reduction="sum", chunk_rows=3) * 2,
        (random(7, 16), random(37, 16), random(37)),
    ),
    "rotary": (
        lambda q, k: ops.rotary_embedding(q * 2, k.transpose(1, 2), COS, SIN, interleaved=True),
        (random(2, 5, 4, 16), random(2, 2, 5, 16)),
    ),
    "mean": (lambda x, w: ops.linear_cross_entropy(x, w, TARGET, label_smoothing=0.1), (random(7, 16), random(37, 16))),
}  # fmt: skip


def with_gradients(function, tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    total = sum((t * torch.arange(t.numel(), device=DEVICE).view(t.shape).cos()).sum() for t in out)
    return [*out, *torch.autograd.grad(total, leaves)]


@pytest.mark.share(4)
@pytest.mark.parametrize("name", CALLS)
def test_a_compiler_keeps_the_operator(name):
    graphs = []

    def kept(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "weft" in str(node.target)])
        return functools.partial(_boxed, graph)

    function, tensors = CALLS[name]
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=kept, bw_compiler=kept), fullgraph=True)
    found, wanted = with_gradients(compiled, tensors), with_gradients(function, tensors)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    expected = {
        "loss": [["linear_cross_entropy"], []], "mean": [["linear_cross_entropy"], []],
        "rotary": [["rotary_embedding"], ["rotary_embedding"]],
    }.get(name, [["attention"], ["attention_backward"]])  # fmt: skip
    assert graphs == [[f"weft.{operator}.default" for operator in operators] for operators in expected]


def _boxed(graph, *inputs):
    return graph(*inputs)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", ["attention", "linear_cross_entropy", "rotary_embedding"])
def test_the_operator_says_what_it_does(name):
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, V))
    x, w = random(7, 16).requires_grad_(), random(37, 16).requires_grad_()
    arguments = {
        "attention": (q, k, v, None, None, None, None, None, None, 3, 0, None, None, False, False),
        "linear_cross_entropy": (x, w, TARGET, None, None, -100, 0.0, 0.0, None, "mean", 4, None, [True, True, False]),
        "rotary_embedding": (q.transpose(1, 2), k[:, :, :5].transpose(1, 2), random(5, 8), random(5, 8), False, False),
    }
    module = {
        "attention": "attention.operator",
        "linear_cross_entropy": "loss.linear_operator",
        "rotary_embedding": "rotary.rotary_embedding",
    }
    importlib.import_module(f"weft.operators.{module[name]}")  # registers it, which the first traced call does else
    torch.library.opcheck(getattr(torch.ops.weft, name).default, arguments[name])


def test_lengths_do_not_compile_anew_and_export_keeps_the_operator():
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    call = CALLS["window"][0]
    compiled = torch.compile(call, backend=counted, dynamic=True)
    for length in (5, 6, 9):
        tensors = random(2, 4, length, 16), random(2, 2, length, 16), random(2, 2, length, 16)
        torch.testing.assert_close(compiled(*tensors), call(*tensors))
    assert len(graphs) == 1

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return call(q, k, v)

    exported = torch.export.export(Layer(), (Q, K, V))
    assert "torch.ops.weft.attention.default" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(Q, K, V), call(Q, K, V))


def test_what_an_operator_lacks_is_pytorchs():
    for call in (
        lambda q, k, v: ops.attention(q, k, v, dropout=0.5, seed=3),
        lambda q, k, v: ops.linear_cross_entropy(q[0, 0], k[0, 0], TARGET[:5] % 3, reduction="none"),
    ):
        targets = []

        def seen(graph, inputs, targets=targets):
            targets.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        assert torch.compile(call, backend=seen)(Q, K, V).isfinite().all()
        assert targets and not any("weft" in target for target in targets)


def test_explain_says_what_a_compiler_sees():
    calls = {
        "attention": ((Q, K, V), {"window": (3, None)}, "triton"),
        "rotary_embedding": ((Q, Q, COS[:4], SIN[:4]), {}, "triton"),
        "linear_cross_entropy": ((random(7, 16), random(37, 16), TARGET), {}, "chunked"),
        "swiglu": ((Q, Q), {}, "torch"), "rms_norm": ((Q,), {}, "torch"), "add_rms_norm": ((Q, Q), {}, "torch"),
    }  # fmt: skip
    for name, (arguments, options, wanted) in calls.items():
        choice = ops.explain(name, *arguments, compiled=True, **options)
        assert choice.implementation == wanted and choice.reason.startswith("traced"), (name, choice)
        assert not ops.explain(name, *arguments).reason.startswith("traced")
    assert ops.explain("rms_norm", random(2, 4100), compiled=True).implementation == "triton"
