"""The optimizers' state: as PyTorch has it, to PyTorch and back, resumed to the same bits."""

from __future__ import annotations

import copy

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from optimizer_samples import MATRIX, PAIRS, assert_close, both, set_gradients, weights  # noqa: E402
from saved_states import resumed  # noqa: E402

from weft import optim  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize(("name", "options"), [(n, {}) for n in PAIRS] + MATRIX)
def test_state_goes_to_pytorch_and_back(name, options):
    mine, theirs, a, b = both(name, **options)
    for step in range(6):
        set_gradients(mine, theirs, seed=step)
        a.step()
        b.step()
        if step == 2:  # each goes on from the other's state
            saved = copy.deepcopy((a.state_dict(), b.state_dict()))
            a.load_state_dict(saved[1])
            b.load_state_dict(saved[0])
    assert_close(mine, theirs, 6)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("capturable", [False, True])
def test_a_state_dict_looks_as_pytorchs(name, capturable):
    options = {"capturable": True} if capturable and name != "SGD" else {}
    mine, theirs = weights(), weights()
    a = getattr(optim, name)(mine, **PAIRS[name], **options)
    b = getattr(torch.optim, name)(theirs, **PAIRS[name], **({} if DEVICE == "cpu" else options))
    set_gradients(mine, theirs)
    a.step()
    b.step()
    ours, torchs = a.state_dict(), b.state_dict()
    assert ours["state"].keys() == torchs["state"].keys()
    assert set(torchs["param_groups"][0]) <= set(ours["param_groups"][0])
    for i, state in torchs["state"].items():
        assert type(ours["state"][i]) is dict and ours["state"][i].keys() == state.keys()
        for key, value in state.items():
            got = ours["state"][i][key]
            assert (got.shape, got.dtype) == (value.shape, value.dtype)
            assert got.device.type == (DEVICE if capturable or key != "step" else "cpu")


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("AdamW", {"amsgrad": True}, torch.float32),
        ("SGD", {"dampening": 0.1}, torch.float32),
        ("AdamW", {"state_dtype": torch.float32}, torch.float16),
        ("AdamW", {"rounding": "stochastic", "state_dtype": torch.float32, "seed": 4}, torch.bfloat16),
        ("AdamW", {"rounding": "split", "state_dtype": torch.float32}, torch.bfloat16),
        ("Lion", {"lr": 1e-2}, torch.float32),
    ],
)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(name, options, dtype):
    options = {**PAIRS.get(name, {}), **options}
    mine = weights(dtype=dtype)
    a = getattr(optim, name)(mine, **options)
    for step in range(3):
        set_gradients(mine, seed=step)
        a.step()
    again, b = resumed(mine, a, lambda params: getattr(optim, name)(params, **options))
    for step in range(3, 6):
        set_gradients(mine, again, seed=step)
        a.step()
        b.step()
    for p, q in zip(mine, again, strict=True):
        assert p.equal(q)


def test_a_copied_optimizer_goes_its_own_way():
    mine, theirs, a, b = both("AdamW")
    set_gradients(mine, theirs)
    a.step()
    b.step()
    twin = copy.deepcopy(a)
    copies = twin.param_groups[0]["params"]
    set_gradients(mine, theirs, copies, seed=1)
    twin.step()
    a.step()
    b.step()
    assert_close(mine, theirs, 2)
    assert_close(copies, theirs, 2)
