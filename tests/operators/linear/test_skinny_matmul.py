"""Products of few rows where the tests of every operator do not reach: splits, configurations, which kernel is taken,
gradients, wrong arguments."""

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random
from where import DEVICE

from weft import ops, registry
from weft.bench.tune import forget_plans
from weft.definition import SHARED_LIMIT, Declined
from weft.operators.launch import compiling_for
from weft.operators.linear import gemv
from weft.operators.partial_sums import parts_of

pytestmark = pytest.mark.device


def test_parts_are_whole_and_none_is_empty():
    for steps in range(40):
        for wanted in range(1, 20):
            parts = parts_of(wanted, steps)
            each = -(-steps // parts)
            assert 1 <= parts <= max(min(wanted, steps), 1) and each * (parts - 1) < max(steps, 1)


@pytest.mark.parametrize("sm", SHARED_LIMIT)
def test_configurations_fit_shared_memory(sm):
    for m in (1, 2):
        for dtype in (torch.bfloat16, torch.float32):
            found = list(gemv.candidates(sm, dtype, m, 8192, 8192))
            assert 10 < len(found) < 200
            for c in found:
                shared = (c["ROWS"] + m) * c["num_warps"] * 512 * c["num_stages"]
                assert shared <= SHARED_LIMIT[sm] or c["num_stages"] == 1


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_a_split_sum_adds_the_bias_once(parts, monkeypatch):
    x, w, bias = random(1, 700), random(9, 700, seed=1), random(9, seed=2)
    key = (torch.float32, 1, 16, 1024)
    forget_plans()  # a GPU keeps those of the parts tried before
    monkeypatch.setattr(gemv.configuration, "trial", {**gemv.configuration.heuristic(90, *key), "SPLIT": parts})
    got = registry.get("skinny_matmul").find("triton").function(x, w, bias)
    want = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(("rows", "at_once", "parts"), [(1, 4, 1), (2, 2, 1), (4, 2, 2), (1, 8, 3)])
def test_threads_ask_for_several_vectors_at_once(m, rows, at_once, parts, monkeypatch):
    """Rows that end within a step, within a vector, and with one; rows of w that the last program has too few of."""
    config = {"ROWS": rows, "SPLIT": parts, "AT_ONCE": at_once, "num_warps": 1, "num_stages": 1}
    for k in (512, 1700, 1027, 3):
        forget_plans()
        monkeypatch.setattr(gemv.configuration, "trial", config)
        x, w, bias = random(m, k), random(7, k, seed=1), random(7, seed=2)
        got = registry.get("skinny_matmul").find("triton").function(x, w, bias)
        want = torch.nn.functional.linear(x.double(), w.double(), bias.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def test_one_row_is_shared_out_over_many_programs():
    for dtype in (torch.bfloat16, torch.float32):
        found = list(gemv.candidates(90, dtype, 1, 8192, 8192))
        chosen = gemv._config(1, 1, 4, 1, 2)
        assert chosen in found and sum(c.get("AT_ONCE", 1) > 1 for c in found) >= 10
        assert all((c["ROWS"] + 1) * c["AT_ONCE"] <= 16 for c in found if c.get("AT_ONCE", 1) > 1)
        if DEVICE == "cuda":  # the interpreter has a choice of its own
            assert gemv.heuristic(90, dtype, 1, 8192, 8192) == chosen


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_a_row_or_two_in_fp32_are_ours(sm):
    def chosen(m, dtype=torch.bfloat16, direction="forward", k=512):
        x, w = (torch.empty(rows, k, dtype=dtype, device="meta") for rows in (m, 24))
        return ops.explain("skinny_matmul", x, w, direction=direction).implementation

    with compiling_for(sm, lambda *kernel: None):
        for direction in ("forward", "backward"):
            assert [chosen(m, direction=direction) for m in (1, 2, 16, 65)] == ["triton", *["torch"] * 3]
            assert [chosen(m, torch.float32, direction) for m in (1, 2, 3)] == ["triton", "triton", "torch"]
        assert chosen(1, k=513) == "triton"


def test_more_rows_and_columns_that_are_no_rows_go_to_pytorch():
    x, w = random(65, 128), random(8, 128)
    assert "more rows" in ops.explain("skinny_matmul", x, w).reason or DEVICE == "cpu"
    assert "not contiguous along K" in ops.explain("skinny_matmul", x[:1], random(128, 8).t()).reason
    with pytest.raises(Declined, match="3 rows of x"):
        registry.get("skinny_matmul").find("triton").function(x[:3], w)
    for rows in (x, x[:64], x[:2]):
        torch.testing.assert_close(ops.skinny_matmul(rows, w), rows @ w.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [128, 136, 132, 131])
def test_rows_of_any_length_and_alignment(k):
    """Multiples of 16, 8 and 4 elements, and an odd number; x as a slice of wider rows, and one element off."""
    wide, w = random(2 * (k + 8) + 1, dtype=torch.float16), random(9, k, dtype=torch.float16, seed=1)
    kernel = registry.get("skinny_matmul").find("triton").function
    for x in (wide[:-1].view(2, k + 8)[:, :k], wide[1:].view(2, k + 8)[:, 3 : 3 + k], wide[: 2 * k].view(k, 2).t()):
        torch.testing.assert_close(kernel(x, w).double(), x.double() @ w.double().t(), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("m", [1, 2])
def test_the_gradient_of_the_weight_is_written_by_our_kernel(m):
    x, w, bias = (t.requires_grad_() for t in (random(m, 64), random(5, 64, seed=1), random(5, seed=2)))
    y, want = ops.skinny_matmul(x, w, bias), torch.nn.functional.linear(x, w, bias)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    dy = random(m, 5, seed=3)
    found, right = (torch.autograd.grad(t, (x, w, bias), dy) for t in (y, want))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("m", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
@pytest.mark.parametrize("off", [0, 1])
def test_a_layer_is_compiled_with_its_gradients(m, dtype, off):
    """Also where x begins off 16 bytes, which is not seen while tracing."""
    x = random(m * 512 + off, dtype=dtype)[off:].view(m, 512).requires_grad_()
    w, bias = (random(*shape, dtype=dtype).requires_grad_() for shape in ((64, 512), (64,)))
    dy = random(m, 64, dtype=dtype, seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(ops.skinny_matmul, fullgraph=True, dynamic=False)
    want = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    right = torch.autograd.grad(want, (x, w, bias), dy.double())
    for function in (compiled, ops.skinny_matmul):
        y = function(x, w, bias)
        torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=1e-4 * float(want.abs().max()))
        for got, exact in zip(torch.autograd.grad(y, (x, w, bias), dy), right, strict=True):
            torch.testing.assert_close(got, exact, rtol=2.0**-7, atol=2e-2 * float(exact.abs().max()))


@pytest.mark.skipif(DEVICE == "cuda", reason="autocast of a CPU")
def test_operands_are_cast_as_autocast_casts_those_of_a_linear_layer():
    x, w, bias = random(3, 128), random(7, 128), random(7)
    with torch.autocast("cpu", torch.bfloat16):
        want = torch.nn.functional.linear(x.bfloat16(), w, bias)
        got = ops.skinny_matmul(x.bfloat16(), w, bias)
        ops.explain("skinny_matmul", x, w.bfloat16(), bias)
    torch.testing.assert_close(got, want)


X, W = random(3, 128), random(7, 128)
REFUSED = [
    bad("skinny_matmul", ValueError, "'x' has shape (128,); expected a matrix", X[0], W),
    bad("skinny_matmul", ValueError, "expected w with 128 columns", X, W[:, :5]),
    bad("skinny_matmul", TypeError, "'w' has dtype float16", X, W.half()),
    bad("skinny_matmul", ValueError, "'bias' has shape (128,); expected (7,)", X, W, W[0]),
    bad("skinny_matmul", TypeError, "'bias' is a float", X, W, 1.0),
]
