"""Which grouped products Hopper's main loop computes: what is launched with what, gradients, what goes to Triton instead.
PyTorch emulates the loop's launches here, the Triton kernels around them run; test_hopper_grouped.py emulates the kernel."""

import itertools

import pytest
import torch

pytest.importorskip("cuda.bindings")

from where import DEVICE

from weft.bench.tune import forget_plans
from weft.definition import Declined
from weft.operators.launch import compiling_for
from weft.operators.mixture_of_experts import dispatch, grouped_matmul
from weft.operators.mixture_of_experts.grouped_matmul import grouped_matmul_hopper
from weft.operators.mixture_of_experts.reference import grouped_product as reference
from weft.operators.mixture_of_experts.reference import random_places

OFFSETS = torch.tensor([0, 4, 4, 18], dtype=torch.int32, device=DEVICE)
FP16 = torch.float16


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, FP16)


@pytest.fixture
def launched(monkeypatch):
    """The names of products that were launched on Hopper's loop, in their order; a wrong order of groups shows as zeros."""
    names = []
    rows_of, terms_of = dispatch.hopper_rows, dispatch.hopper_terms

    def rows(x, w, biased, gated, device=None):
        rows_of(x, w, biased, gated, device)

        def plan(x, gate, up, y, offsets, bias=None):
            names.append("gated rows" if gated else "rows")
            assert y.is_contiguous() and (bias is not None) == biased
            w = torch.cat([gate, up], 1) if gated else gate
            y.copy_(reference(x, w, offsets, bias=bias, activation="swiglu" if gated else None))

        return plan

    def terms(a, b, e, device):
        terms_of(a, b, e, device)

        def plan(a, b, up, c, offsets, order):
            names.append("terms")
            sizes = offsets.diff()[order].tolist()
            assert sizes == sorted(sizes, reverse=True)
            for i in order.tolist():
                c[i] = a[offsets[i] : offsets[i + 1]].t() @ b[offsets[i] : offsets[i + 1]]

        return plan

    monkeypatch.setattr(dispatch, "hopper_rows", rows)
    monkeypatch.setattr(dispatch, "hopper_terms", terms)
    monkeypatch.setattr("weft.operators.dispatch.target_sm", lambda device: 90)
    forget_plans()  # a GPU keeps plans: those of real launches before, the emulated ones after
    yield names
    forget_plans()


def gradients(function, x, w, weigh=True, **named):
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, w)]
    if "bias" in named:
        leaves.append(named["bias"].detach().clone().requires_grad_())
        named["bias"] = leaves[2]
    y = function(leaves[0], leaves[1], OFFSETS, **named)
    dy = random(*y.shape, seed=9) / 8 if weigh else torch.ones((), dtype=FP16, device=DEVICE).expand(y.shape)
    return y, *torch.autograd.grad(y, leaves, dy)


def compare(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-2)


@pytest.mark.device
def test_it_has_the_gradients_of_the_reference_all_by_its_own_loop(launched):
    x, w = random(20, 16), random(3, 24, 16, seed=1)
    compare(gradients(grouped_matmul_hopper, x, w), gradients(reference, x, w))
    assert launched == ["rows", "rows", "terms"]


@pytest.mark.device
def test_a_gate_is_kept_for_its_gradient(launched):
    x, w, bias = random(20, 16), random(3, 32, 16, seed=1), random(3, 32, seed=2)
    named = {"bias": bias, "activation": "swiglu"}
    compare(gradients(grouped_matmul_hopper, x, w, **named), gradients(reference, x, w, **named))
    # of both halves, the tokens' gradient, the weights'; the bias's is Triton's
    assert launched == ["rows", "rows", "terms"]
    with torch.no_grad():
        grouped_matmul_hopper(x, w, OFFSETS, **named)
    assert launched[3:] == ["gated rows"], "where no gradient is wanted gate and up are not written"


@pytest.mark.device
@pytest.mark.parametrize("position", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", None])
def test_rows_to_gather_are_tritons_but_their_gradients_are_not(launched, position, activation):
    source, places = random_places(torch.Generator().manual_seed(1), 9, 2, DEVICE)
    x, w, bias = random(9, 16), random(3, 32, 16, seed=1), random(3, 32, seed=2)
    named = {"source": source, "position": places if position else None, "bias": bias, "activation": activation}
    compare(gradients(grouped_matmul_hopper, x, w, **named), gradients(reference, x, w, **named))
    assert launched == ["rows", "terms"], "the tokens' gradient and the weights'"
    with pytest.raises(Declined, match="gather"):
        grouped_matmul_hopper(x, w, OFFSETS, **named)


@pytest.mark.device
def test_a_weight_stored_transposed_gets_a_gradient_stored_so(launched):
    x, w = random(20, 16), random(3, 16, 24, seed=1).transpose(1, 2)
    found = gradients(grouped_matmul_hopper, x, w)
    compare(found, gradients(reference, x, w))
    assert found[2].stride() == w.stride() and launched == ["rows", "rows", "terms"]


@pytest.mark.device
def test_gradients_that_tma_cannot_take_are_tritons(launched):
    x, w = random(20, 16), random(3, 24, 16, seed=1)
    found = gradients(grouped_matmul_hopper, x, w, weigh=False)
    compare(found, gradients(reference, x, w, weigh=False))
    assert launched == ["rows"], "of a sum dy is one number, expanded"


@pytest.mark.device
def test_operators_have_the_schema_that_they_declare(launched):
    source, places = random_places(torch.Generator().manual_seed(1), 9, 2, DEVICE)
    x, w, rows = random(9, 16), random(3, 32, 16, seed=1), random(18, 24)
    tests = ("test_schema", "test_autograd_registration")
    for keep, gather in itertools.product((False, True), repeat=2):
        call = (x, w, OFFSETS, source, places, None, True, keep, None)
        if not gather:
            call = (random(18, 16), w, OFFSETS, None, None, None, True, keep, None)
        torch.library.opcheck(torch.ops.weft.grouped_matmul.default, call, test_utils=tests)
    call = (rows, x, OFFSETS, None, source, None)
    torch.library.opcheck(torch.ops.weft.grouped_outer.default, call, test_utils=tests)


def test_what_it_does_not_take_is_declined_in_words(launched):
    with pytest.raises(Declined, match="16 bytes"):
        grouped_matmul_hopper(random(20, 12), random(3, 24, 12), OFFSETS)


def test_the_public_function_takes_it_on_hopper():
    tensors = random(20, 16), random(3, 24, 16), OFFSETS
    x, w, offsets = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors)
    for sm, taken in ((90, "cuda"), (80, "triton")):
        with compiling_for(sm, lambda *kernel: None):
            assert grouped_matmul.choose(x, w, offsets).implementation == taken
            assert grouped_matmul.choose(x, w, offsets, direction="backward").implementation == taken
            of = lambda rows, n, k: grouped_matmul.choose(x.new_empty(rows, k), w.new_empty(3, n, k), offsets)  # noqa: E731
            assert of(20, 20, 16).implementation == taken, "rows of results begin anywhere"
            assert of(20, 24, 12).implementation == "triton", "copies of so little do not pay"
            assert of(2000, 1087, 535).implementation == taken
            assert ("copies" in of(2000, 1087, 535).reason) == (sm == 90)


@pytest.mark.device
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("rows, columns", [(12, 12), (13, 13), (16, 13), (13, 16)])
def test_copies_of_rows_that_begin_anywhere(launched, rows, columns, activation):
    """Of x, of w, of both: cut from matrices that have so many columns."""
    x, w, bias = random(20, rows)[:, :12], random(3, 22, columns, seed=1)[..., :12], random(3, 22, seed=2)
    call = (x, w, bias), 20, False, activation is not None, False
    y = torch.full((20, 11 if activation else 22), torch.nan, dtype=FP16, device=DEVICE)
    dispatch.GROUPED.kernel("cuda").of(*call)(x, w, OFFSETS, x, bias, y, y)
    want = reference(x, w, OFFSETS, bias=bias, activation=activation)
    torch.testing.assert_close(y[:18], want[:18], rtol=5e-3, atol=5e-3)
    assert launched == ["gated rows" if activation else "rows"]


@pytest.mark.gpu
def test_a_replayed_launch_follows_the_offsets():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    x, w = (t.cuda() for t in (random(700, 256), random(5, 192, 256, seed=1) / 16))
    offsets = torch.tensor([0, 100, 100, 356, 420, 700], dtype=torch.int32, device="cuda")
    dy = random(700, 192, seed=2).cuda()
    run = grouped_matmul_hopper
    outer = torch.ops.weft.grouped_outer
    run(x, w, offsets), outer(dy, x, offsets, None, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dw = run(x, w, offsets), outer(dy, x, offsets, None, None, None)
    for bounds in ((0, 100, 100, 356, 420, 700), (0, 0, 1, 2, 700, 700), (0, 640, 641, 660, 660, 660)):
        offsets.copy_(torch.tensor(bounds, dtype=torch.int32))
        y.fill_(torch.nan), dw.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(y, reference(x, w, offsets), rtol=1e-2, atol=2e-2)
        want = torch.stack([dy[a:b].t().float() @ x[a:b].float() for a, b in itertools.pairwise(bounds)])
        torch.testing.assert_close(dw.float(), want, rtol=1e-2, atol=1e-1)
