"""The optimizers' state: as PyTorch has it, to PyTorch and back, resumed to the same bits."""

import copy

import pytest
import torch
from optimizer_samples import IN_8_BITS, MATRIX, PAIRS, assert_same_steps, both, random_step, set_gradients, weights
from saved_states import check_refused, resumed
from where import DEVICE

from weft import optim

pytestmark = pytest.mark.device


@pytest.mark.parametrize(("name", "options"), [(n, {}) for n in PAIRS] + MATRIX)
def test_state_goes_to_pytorch_and_back(name, options):
    mine, theirs, a, b = both(name, **options)

    def exchange(step):
        if step == 3:  # each goes on from the other's state
            saved = copy.deepcopy((a.state_dict(), b.state_dict()))
            a.load_state_dict(saved[1])
            b.load_state_dict(saved[0])

    assert_same_steps(mine, theirs, a, b, 6, exchange)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("capturable", [False, True])
def test_a_state_dict_looks_as_pytorchs(name, capturable):
    options = {"capturable": True} if capturable and name != "SGD" else {}
    mine, theirs = weights(), weights()
    a = getattr(optim, name)(mine, **PAIRS[name], **options)
    b = getattr(torch.optim, name)(theirs, **PAIRS[name], **({} if DEVICE == "cpu" else options))
    random_step(a, b)
    ours, torchs = a.state_dict(), b.state_dict()
    assert ours["state"].keys() == torchs["state"].keys()
    assert set(torchs["param_groups"][0]) <= set(ours["param_groups"][0])
    for i, state in torchs["state"].items():
        assert type(ours["state"][i]) is dict and ours["state"][i].keys() == state.keys()
        for key, value in state.items():
            got = ours["state"][i][key]
            assert (got.shape, got.dtype) == (value.shape, value.dtype)
            assert got.device.type == (DEVICE if capturable or key != "step" else "cpu")


@pytest.mark.share(2)
@pytest.mark.parametrize(("name", "options", "dtype"), [
    ("AdamW", {"amsgrad": True}, torch.float32), ("SGD", {"dampening": 0.1}, torch.float32),
    ("AdamW", {"state_dtype": torch.float32}, torch.float16),
    ("AdamW", {"rounding": "stochastic", "state_dtype": torch.float32, "seed": 4}, torch.bfloat16),
    ("AdamW", {"rounding": "split", "state_dtype": torch.float32}, torch.bfloat16),
    ("Lion", {"lr": 1e-2}, torch.float32),
    *(("AdamW8bit", {**options, "min_8bit_size": 0}, torch.float16) for options in IN_8_BITS),
])  # fmt: skip
def test_a_run_that_is_resumed_goes_on_bit_for_bit(name, options, dtype):
    options = {**PAIRS.get(name, {}), **options}
    mine = weights(dtype=dtype)
    a = getattr(optim, name)(mine, **options)
    for step in range(3):
        random_step(a, seed=step)
    again, b = resumed(mine, a, lambda params: getattr(optim, name)(params, **options))
    for step in range(3, 6):
        random_step(a, b, seed=step)
    for p, q in zip(mine, again, strict=True):
        assert p.equal(q) and all(torch.equal(value, b.state[q][name]) for name, value in a.state[p].items())


FLOATS = "expected a tensor of floating-point numbers"


@pytest.mark.parametrize(("name", "key", "value", "words"), [
    ("AdamW", "step", None, "'step' is missing; there are 'exp_avg', 'exp_avg_sq'"),
    ("AdamW", "exp_avg", None, "'exp_avg' is missing"), ("Adam", "exp_avg_sq", None, "'exp_avg_sq' is missing"),
    ("AdamW", "exp_avg", torch.ones(5000, dtype=torch.int64), rf"'exp_avg' is a tensor of torch.int64.*; {FLOATS}"),
    ("AdamW", "exp_avg_sq", [1.0], rf"'exp_avg_sq' is \[1.0\]; {FLOATS}"),
    ("AdamW", "step", "three", "'step' is 'three'; expected a number, or a tensor of one"),
    ("AdamW", "step", torch.ones(2), "'step' is a tensor of torch.float32, shape .2,.; expected a number"),
    ("Lion", "exp_avg", torch.ones(5000, dtype=torch.bool), f".*{FLOATS}"),
    ("SGD", "momentum_buffer", torch.ones(5000, dtype=torch.int32), f".*{FLOATS}"),
    ("AdamW8bit", "exp_avg_codes", None, "'exp_avg_codes' is missing"),
    ("AdamW8bit", "exp_avg_scales", None, "'exp_avg_scales' is missing"),
    ("AdamW8bit", "exp_avg_sq_codes", torch.ones(5000), "'exp_avg_sq_codes' .* expected a tensor of torch.uint8"),
    ("AdamW8bit", "exp_avg_sq_scales", torch.ones(20, dtype=torch.int32), f".*{FLOATS}"),
])  # fmt: skip
def test_a_state_dict_that_is_not_whole_is_refused_and_nothing_is_loaded(name, key, value, words):
    mine = weights(((3,), (5000,)))
    a = getattr(optim, name)(mine, **PAIRS.get(name, {}))
    random_step(a)
    check_refused(a, 1, {key: value}, words)


@pytest.mark.parametrize("name", [*PAIRS, "Lion", "AdamW8bit"])
def test_states_of_parameters_that_have_had_no_gradient_are_loaded(name):
    mine, again = weights(((3,), (5000,))), weights(((3,), (5000,)))
    a, b = (getattr(optim, name)(params, **PAIRS.get(name, {})) for params in (mine, again))
    b.load_state_dict(a.state_dict())  # of none
    set_gradients(mine)
    mine[1].grad = None
    a.step()
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert not b.state.get(again[1])
    for p, q in zip(mine, again, strict=True):
        q.data.copy_(p)
    random_step(a, b, seed=1)
    assert all(p.equal(q) for p, q in zip(mine, again, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_torch_has_saved_of_sgd_without_a_buffer_is_loaded(momentum):
    a = optim.SGD(weights(((3,),)), momentum=momentum)
    saved = torch.optim.SGD(weights(((3,),)), momentum=momentum).state_dict()
    saved["state"][0] = {"momentum_buffer": None}
    a.load_state_dict(saved)
    random_step(a)


def test_a_hook_may_rename_what_is_loaded():
    mine = weights(((3,),))
    a = optim.AdamW(mine)
    random_step(a)
    old = copy.deepcopy(a.state_dict())
    old["state"][0]["m"] = old["state"][0].pop("exp_avg") + 1

    def renamed(optimizer, given):
        return {**given, "state": {0: {**given["state"][0], "exp_avg": given["state"][0]["m"]}}}

    a.register_load_state_dict_pre_hook(renamed)
    a.load_state_dict(old)
    assert a.state[mine[0]]["exp_avg"].equal(old["state"][0]["m"].to(DEVICE))
