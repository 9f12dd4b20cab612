"""``norm_linear`` where the tests of every operator do not reach: configurations, rounding, gradients, early starts."""

import pytest
import torch
import torch.nn.functional as F
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random

from weft import ops, registry
from weft.operators.launch import early_start
from weft.operators.linear import gemv
from weft.operators.linear.activations import of
from weft.operators.linear.reference import composed

pytestmark = pytest.mark.device


def exact(x, w, norm=None, bias=None, residual=None, gated=False):
    """In float64."""
    x, w, norm, bias, residual = (None if t is None else t.double() for t in (x, w, norm, bias, residual))
    y = F.linear(x if norm is None else F.rms_norm(x, x.shape[-1:], norm, 1e-6), w, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual


def normed(x, norm):
    return x if norm is None else F.rms_norm(x.double(), x.shape[-1:], norm.double(), 1e-6)


@pytest.mark.share(5)
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("config", [gemv.groups_of(1, 1, 2, 4), gemv.groups_of(2, 3, 4, 4), gemv.groups_of(4, 1, 1, 8),
                                    gemv._config(1, 1, 4, 1), gemv._config(2, 1, 1, 1)])  # fmt: skip
def test_programs_take_any_rows_and_groups(m, config):
    """Rows of w that the last program has too few of, and columns that do not fill its vectors."""
    for n, k, gated in ((33, 130, True), (9, 700, False), (40, 256, True), (1, 3, False)):
        rows = 2 * n if gated else n
        x, w, norm, bias, residual = (
            random(*size, seed=i) for i, size in enumerate(((m, k), (rows, k), (k,), (rows,), (m, n)))
        )
        y = torch.empty(m, n, device=x.device)
        gemv.plan(x, w, bias, of("swiglu" if gated else None), norm, residual, 1e-6, config)(
            x, w, bias, norm, residual, y
        )
        torch.testing.assert_close(y.double(), exact(x, w, norm, bias, residual, gated), rtol=1e-5, atol=1e-4)


FEW = [
    (1, 33, 136, None), (2, 4096, 14336, None), (3, 1152, 896, None), (5, 4864, 896, "swiglu"), (8, 2050, 8200, None),
    (8, 700, 3584, "geglu"), (11, 64, 4096, None), (16, 1030, 2048, "relu"),
]  # fmt: skip


def test_a_row_is_rounded_once():
    x, w, norm, residual = (
        random(*size, dtype=torch.float16, seed=i) for i, size in enumerate(((1, 512), (64, 512), (512,), (1, 64)))
    )
    got = registry.get("norm_linear").find("triton").function(x, w, norm, None, residual)
    want = exact(x, w, norm, None, residual)
    assert ((got.double() - want).abs() <= 2.0**-11 * 1.01 * want.abs() + 1e-4).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k", "activation"), FEW)
@pytest.mark.parametrize("strided", [False, True])
def test_tensor_cores_have_one_rounding_and_equal_bits(m, n, k, activation, strided, dtype):
    """x's product with the norm's weight is rounded too, at random: less than the one rounding of the sum."""
    rows = 2 * n if of(activation).gated else n
    sizes = ((m, k + 8 * strided), (rows, k + 8 * strided), (k,), (rows,), (m, n + strided))
    x, w, norm, bias, residual = (random(*size, dtype=dtype, seed=i) for i, size in enumerate(sizes))
    x, w, residual = x[:, :k], w[:, :k] * k**-0.5 if not strided else w.mul_(k**-0.5)[:, :k], residual[:, :n]
    cuda = registry.get("norm_linear").find("cuda").function
    for options in ((norm, bias, residual), (None, None, residual), (norm, None, None)):
        got = cuda(x, w, *options, activation=activation)
        others = (None if t is None else t.double() for t in options[1:])
        want = composed(normed(x, options[0]).double(), w.double(), *others, activation)
        assert (got.double() - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max()
        assert all(torch.equal(got, cuda(x, w, *options, activation=activation)) for _ in range(3))


def test_gradients_are_pytorchs():
    x, w, norm = (random(*size, seed=i).requires_grad_() for i, size in enumerate(((1, 40), (8, 40), (40,))))
    got = torch.autograd.grad(ops.norm_linear(x, w, norm, activation="swiglu").sum(), (x, w, norm))
    gate, up = F.linear(F.rms_norm(x, (40,), norm, 1e-6), w).chunk(2, -1)
    torch.testing.assert_close(got, torch.autograd.grad((F.silu(gate) * up).sum(), (x, w, norm)))


# hidden, rows of queries, keys and values, width of the feed-forward layers; of small ones many are in flight
MODELS = [(2048, 3072, 8192, 4), (4096, 6144, 14336, 2), (896, 1152, 4864, 8), (64, 128, 96, 60)]


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 8, 16])
@pytest.mark.parametrize(("hidden", "qkv", "width", "layers"), MODELS)
def test_a_graph_of_early_starts_has_the_bits_of_launches_one_after_another(hidden, qkv, width, layers, m):
    def weight(n, k, seed):
        return random(n, k, dtype=torch.bfloat16, seed=seed) * k**-0.5

    shapes = ((qkv, hidden), (hidden, hidden), (2 * width, hidden), (hidden, width))
    weights = [[weight(*shape, seed=4 * i + j) for j, shape in enumerate(shapes)] for i in range(layers)]
    norm = random(hidden, dtype=torch.bfloat16, seed=1) * 0.1 + 1

    def decode(h):
        for of_qkv, out, gate_up, down in weights:
            q = ops.norm_linear(h, of_qkv, norm)[:, :hidden]
            h = ops.norm_linear(q, out, residual=h)
            h = ops.norm_linear(ops.norm_linear(h, gate_up, norm, activation="swiglu"), down, residual=h)
        return h

    x = random(m, hidden, dtype=torch.bfloat16)
    with torch.inference_mode(), early_start():
        decode(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = decode(x)
    for i in range(100):
        x.copy_(random(m, hidden, dtype=torch.bfloat16, seed=i))
        with torch.inference_mode():
            want = decode(x)
        for _ in range(3):
            graph.replay()
            assert torch.equal(y, want)


X, W = random(1, 128), random(8, 128)
REFUSED = [
    bad("norm_linear", ValueError, "'norm' has shape (8,); expected (128,)", X, W, W[:, 0]),
    bad("norm_linear", TypeError, "'norm' has dtype float16", X, W, W[0].half()),
    bad("norm_linear", ValueError, "'eps' is -1; expected a number that is not negative", X, W, W[0], eps=-1),
    bad("norm_linear", ValueError, "'residual' has shape (1, 128)", X, W, residual=X),
    bad("norm_linear", ValueError, "'activation' is 'tanh'; expected", X, W, activation="tanh"),
    bad("norm_linear", ValueError, "expected weight [2N, 128]", X, W[:7], activation="swiglu"),
]
