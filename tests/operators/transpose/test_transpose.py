"""What a transpose must be beyond what is asked of every operator."""

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random
from where import DEVICE

from weft import ops
from weft.bench.cases import PoisonedEmpty
from weft.operators.transpose import dispatch
from weft.operators.transpose.dispatch import FORWARD, fitted, matrices_of
from weft.operators.transpose.transpose import transpose

pytestmark = pytest.mark.device
by_triton = transpose.find("triton").function


def test_twice_is_the_same_and_the_result_is_new_memory():
    for shape in ((37, 70), (3, 20, 33), (2, 3, 9, 5)):
        x = random(*shape)
        y = ops.transpose(x)
        assert y.is_contiguous() and y.equal(x.mT)
        assert ops.transpose(y).equal(x)
    x = random(4, 8).mT  # x.mT is contiguous already: still not a view
    assert ops.transpose(x).data_ptr() != x.data_ptr()


@pytest.mark.parametrize("diagonal", [0, 1])
@pytest.mark.parametrize("group", [1, 2, 3, 16])
@pytest.mark.parametrize(("r", "c"), [(16, 16), (32, 16), (16, 64)])
def test_any_order_of_tiles_moves_each_once(monkeypatch, r, c, group, diagonal):
    config = {"R": r, "C": c, "num_warps": 4, "GROUP": group, "DIAGONAL": diagonal}
    monkeypatch.setattr(dispatch.tiles_configuration, "trial", config)
    for shape in ((80, 97), (2, 33, 48), (16, 130)):
        x = random(*shape)
        with PoisonedEmpty():
            assert FORWARD.kernel("triton").of((x,)).grid
            assert by_triton(x).equal(x.mT)


def test_the_keys_of_attention_are_read_in_place():
    """[batch, head, length, dim] seen in [batch, length, head, dim]: two batch strides that do not collapse."""
    x = random(2, 20, 3, 8).transpose(1, 2)
    m = matrices_of(x)
    assert m is not None and (m.B0, m.B1, m.M, m.N) == (2, 3, 20, 8)
    assert ops.explain("transpose", x).implementation == "triton" or DEVICE == "cuda"
    assert ops.transpose(x).equal(x.mT)


def test_more_batch_strides_than_two_are_handed_over():
    x = random(2, 2, 20, 2, 8).transpose(1, 3)[:, :, ::2]
    assert matrices_of(x) is None
    choice = ops.explain("transpose", x)
    assert choice.implementation == "torch" and "collapse" in choice.reason
    assert ops.transpose(x).equal(x.mT)


def test_tiles_are_fitted_to_thin_matrices():
    assert fitted(64, 64, 1000, 1000) == (64, 64)
    r, c = fitted(64, 64, 10**6, 3)
    assert c == 4 and r * c == dispatch.TILE
    r, c = fitted(64, 64, 3, 10**6)
    assert r == 4 and r * c == dispatch.TILE


def test_candidates_fill_lines():
    for dtype in (torch.float32, torch.bfloat16):
        keys = [(dispatch.tiles_configuration, access) for access in ("vectors", "elements")]
        keys += [(dispatch.vectors_configuration,), (dispatch.windows_configuration,)]
        for configuration, *access in keys:
            heuristic = configuration.heuristic(90, dtype, 2**28, *access)
            found = list(configuration.candidates(90, dtype, 2**28, *access))
            assert len(found) > 20
            for c in (heuristic, *found):
                assert min(c["R"], c["C"]) * dtype.itemsize >= 128, "half a line costs nearly the whole"


def test_gradients_of_expanded_and_of_strided_gradients():
    x = random(33, 40).requires_grad_()
    for made in (ops.transpose, by_triton):
        (dx,) = torch.autograd.grad(made(x).sum(), x)  # an expanded gradient
        assert dx.equal(torch.ones_like(x))
        (dx,) = torch.autograd.grad(made(x)[::2, ::3].sum(), x)
        want = torch.zeros_like(x)
        want[::3, ::2] = 1
        assert dx.equal(want)


REFUSED = [
    bad(call, *row)
    for call in ("transpose", by_triton, transpose.find("cuda").function)
    for row in (
        (ValueError, "at least 2 dimensions", torch.ones(3)),
        (ValueError, "dim", torch.ones(2, 3), 0, 2),
        (TypeError, "expected an int", torch.ones(2, 3), 0, 1.0),
        (TypeError, "float32", torch.ones(2, 3, dtype=torch.int32)),
        (TypeError, "expected a torch.Tensor", [[1.0]]),
    )
]


def test_either_order_of_the_last_two_axes():
    x = random(2, 5, 7)
    for dims in ((1, 2), (2, 1), (-1, -2), (-2, 2)):
        assert ops.transpose(x, *dims).equal(x.mT)


def test_explain_says_which_kernel_and_which_for_the_gradient():
    x = random(40, 50)
    for direction in ("forward", "backward"):
        assert ops.explain("transpose", x, direction=direction).implementation == "triton"
    assert "plain copy" in ops.explain("transpose", x.mT, direction="forward").reason
