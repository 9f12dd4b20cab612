"""What only a GPU shows of every operator: captured graphs, compilation, autocast, repeated bits, memory, streams."""

import dataclasses

import pytest
import torch
from every_operator import OPERATORS, by_name, drawn, small
from tensors import with_memory
from where import DTYPES

from weft import ops
from weft.bench import cases
from weft.definition import Declined, Operator, torch_dtype

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def gpu_points(op: Operator):
    """A few ordinary points, one of them wide enough for the widest kernels."""
    points = small(op) or small(op, options=True)
    return [*(points[2:4] or points), *[w for w in points if max(w.axes.values()) > 20000][:1]]


def same_bits(a, b) -> bool:
    """Also of NaN, as a row has where everything is masked."""
    # a scalar has no bytes
    first, second = (t.reshape(-1).clone(memory_format=torch.contiguous_format) for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and first.view(torch.uint8).equal(second.view(torch.uint8))


def copied(arguments):
    return cases.map_tensors(cases.clone, arguments)


def refill(arguments, new) -> None:
    """Writes other numbers into the memory of the arguments. A sparse matrix keeps its pattern: the host looks at it once."""
    for name, value in arguments.items():
        for t, other in zip(cases.tensors(value), cases.tensors(new[name]), strict=True):
            if t.is_floating_point() or not dataclasses.is_dataclass(value):
                t.copy_(other)


def forward(op: Operator, function, arguments):
    """Results and what a call on a copy of the arguments changed in place."""
    with torch.no_grad():
        return cases.results(op, function, "forward", copied(arguments))


def assert_close(a, b) -> None:
    if a.dtype.itemsize == 1:  # codes; of fp8 PyTorch makes no differences
        assert same_bits(a, b)
    else:
        torch.testing.assert_close(a, b, equal_nan=True)


@by_name(OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_replays_what_eager_computes(op, dtype):
    for w in gpu_points(op):
        arguments = drawn(op, w.at(dtype))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the arguments are being drawn there
        with torch.no_grad(), torch.cuda.stream(stream):
            op.public(**arguments)  # warm up outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = op.public(**arguments)
        for seed in (5, 6):
            refill(arguments, drawn(op, w.at(dtype), seed))
            want = forward(op, op.public, arguments)
            graph.replay()
            torch.cuda.synchronize()
            for a, b in zip(cases.tensors([captured, *(arguments[name] for name in op.mutates)]), want, strict=True):
                assert_close(a, b)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@by_name(OPERATORS)
def test_compiled_without_a_graph_break_equals_eager(op):
    torch._dynamo.reset()
    compiled = torch.compile(op.public, fullgraph=True, dynamic=False)
    for w in gpu_points(op):
        arguments = drawn(op, w.at("fp16"))
        for direction in op.directions:
            eager = cases.results(op, op.public, direction, copied(arguments))
            for a, b in zip(cases.results(op, compiled, direction, copied(arguments)), eager, strict=True):
                if a.dtype.itemsize == 1:
                    assert same_bits(a, b)
                    continue
                scale = float(b.nan_to_num().abs().max())  # rows that see nothing are NaN in both
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * scale, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_takes_changing_shapes():
    torch._dynamo.reset()
    compiled = torch.compile(ops.softmax, fullgraph=True, dynamic=True)
    for m, n in ((3, 100), (5, 1000), (2, 40000), (7, 33)):
        x = torch.randn(m, n, device="cuda")
        torch.testing.assert_close(compiled(x), torch.softmax(x, -1))


@pytest.mark.filterwarnings("ignore")  # export's own
def test_a_module_that_uses_an_operator_is_exported():
    class Attention(torch.nn.Module):
        def forward(self, x):
            return ops.softmax(x @ x.transpose(-1, -2), dim=-1)

    x = torch.randn(2, 16, 32, device="cuda")
    exported = torch.export.export(Attention(), (x,))
    assert any("weft" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), torch.softmax(x @ x.transpose(-1, -2), -1))


@by_name(OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("autocast", ["fp16", "bf16"])
def test_autocast_gives_the_dtype_that_pytorch_gives(op, dtype, autocast):
    arguments = drawn(op, gpu_points(op)[0].at(dtype))
    theirs = op.find("torch").function if "torch" in op.implementations else op.reference
    forward(op, op.public, arguments)  # what is kept from a call without autocast must not serve one with it
    with torch.autocast("cuda", torch_dtype(autocast)):
        got = forward(op, op.public, arguments)
        try:
            want = forward(op, theirs, arguments)
        except Declined:
            want = forward(op, op.reference, arguments)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        if a.dtype.itemsize > 1:
            typical = float(b.float().nan_to_num(0, 0, 0).square().mean().sqrt())  # PyTorch rounds dequantised weights
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * max(typical, 1.0), equal_nan=True)


@by_name(OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(op, dtype):
    for w in gpu_points(op):
        arguments = drawn(op, w.at(dtype))
        ours = [
            (i.function, i.directions or op.directions)
            for i in op.implementations.values()
            if i.ours and i.rung is None
        ]
        for made, directions in ((op.public, op.directions), *ours):
            for direction in directions:
                try:
                    first, second = (cases.results(op, made, direction, copied(arguments)) for _ in range(2))
                except Declined:
                    continue
                assert all(same_bits(a, b) for a, b in zip(first, second, strict=True)), f"{made} {direction} {w}"


QUICK = [(op, dtype) for op in OPERATORS for dtype in DTYPES if any(op.cases("quick", [dtype]))]


@pytest.mark.parametrize(("op", "dtype"), QUICK, ids=[f"{dtype}-{op.name}" for op, dtype in QUICK])
def test_a_contiguous_forward_takes_the_memory_of_its_result(op, dtype):
    """No hidden copy."""
    for w in op.cases("quick", [dtype]):
        arguments = drawn(op, w)
        with torch.no_grad():
            op.public(**arguments)
            out, taken = with_memory(lambda arguments=arguments: op.public(**arguments))
        result = sum(t.nbytes for t in cases.tensors(out))
        assert result <= taken <= result + op.workspace(w) + 2**20


@by_name(OPERATORS)
def test_another_stream_is_waited_for(op):
    """Kernels are launched on the current stream: work queued there before comes first."""
    w = gpu_points(op)[-1]
    arguments, new = drawn(op, w), drawn(op, w, seed=9)
    filled = copied(arguments)
    refill(filled, new)
    want = forward(op, op.public, filled)
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        refill(arguments, new)
        got = cases.results(op, op.public, "forward", arguments)
    torch.cuda.synchronize()
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
