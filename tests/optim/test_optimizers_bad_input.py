"""What the optimizers refuse, leave alone and skip."""

import copy
import functools
import math

import pytest
import torch
from optimizer_samples import assert_close, assert_same_steps, both, set_gradients, weights
from where import DEVICE

from weft import ops, optim

pytestmark = pytest.mark.device


@pytest.mark.parametrize(("name", "options", "words"), [
    ("AdamW", {"lr": -1.0}, "Invalid learning rate: -1.0"), ("AdamW", {"lr": math.nan}, "Invalid learning rate: nan"),
    ("AdamW", {"lr": torch.ones(2)}, "1-element"), ("AdamW", {"eps": -1.0}, "Invalid epsilon value: -1.0"),
    ("AdamW", {"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    ("AdamW", {"betas": (0.9, math.nan)}, "Invalid beta parameter at index 1: nan"),
    ("Adam", {"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
    ("SGD", {"momentum": -0.5}, "Invalid momentum value: -0.5"),
    ("SGD", {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
    ("Lion", {"betas": (0.9, 2.0)}, "Invalid beta parameter at index 1: 2.0"),
    *(
        (name, {"adamw_betas" if name == "MuonW" else "betas": betas}, words)
        for name in ("AdamW", "Lion", "AdamW8bit", "MuonW")
        for betas, words in (
            ((0.9, 0.99, 0.999), "Invalid betas: .0.9, 0.99, 0.999.; expected two numbers"),
            (0.9, "Invalid betas: 0.9; expected two numbers"),
            ((0.9,), "Invalid betas: .*expected two numbers"),
            ((0.9, "a"), "Invalid beta parameter at index 1: 'a'; expected a number"),
            ({0.9, 0.99}, "Invalid betas: .*expected two numbers"),
        )
    ),
    *(
        (name, {"seed": seed}, "Invalid seed: .*; expected an int of 64 bits")
        for name in ("AdamW", "SGD", "Lion", "AdamW8bit")
        for seed in ("a", 1.5, 2**70, None)
    ),
    ("SGD", {"momentum": 0.9, "dampening": math.nan}, "Invalid dampening value: nan; expected a finite number"),
    ("SGD", {"dampening": "a"}, "Invalid dampening value: 'a'"),
    ("SGD", {"momentum": "a"}, "Invalid momentum value: 'a'; expected a number"),
    ("AdamW", {"lr": "a"}, "Invalid learning rate: 'a'; expected a number"),
    ("AdamW", {"lr": torch.tensor(True)}, "Invalid learning rate: a tensor of torch.bool; expected a number"),
    ("AdamW", {"lr": torch.tensor(1j)}, "Invalid learning rate: a tensor of torch.complex64; expected a number"),
    *(
        ("AdamW8bit", {"block_size": size}, f"Invalid block_size: {size}; expected 128, 256")
        for size in (256.0, 100, 64)
    ),
    ("AdamW8bit", {"state_format": "int8"}, "expected dynamic, fp8"),
    ("AdamW8bit", {"code_rounding": "up"}, "expected nearest, stochastic"),
    ("AdamW8bit", {"differentiable": True}, "not differentiable"),
    *(
        ("AdamW8bit", {"min_8bit_size": size}, "Invalid min_8bit_size: .*; expected a number of 0 or more")
        for size in ("a", None, True, -1, math.nan)
    ),
    ("AdamW", {"rounding": "up"}, "expected nearest, stochastic, split"),
    ("AdamW", {"rounding": "split"}, r"for torch.bfloat16 weights; a parameter is torch.float32"),
    ("AdamW", {"state_dtype": torch.float16}, "expected None or torch.float32"),
    ("AdamW", {"max_norm": 0.0}, "Invalid max_norm: 0.0"),
    ("AdamW", {"max_norm": "1"}, "Invalid max_norm: '1'; expected a number above 0"),
])  # fmt: skip
def test_options_out_of_range_are_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        getattr(optim, name)(weights(), **options)
    own = {k: v for k, v in options.items() if k != "max_norm"}
    if own:
        with pytest.raises(ValueError, match=words):
            getattr(optim, name)([{"params": weights(), **own}])


@pytest.mark.parametrize(("name", "switches"), [
    ("AdamW", ("maximize", "amsgrad", "capturable", "differentiable", "foreach", "fused")),
    ("AdamW8bit", ("maximize", "amsgrad")), ("Adam", ("decoupled_weight_decay",)), ("SGD", ("maximize", "nesterov")),
    ("Lion", ("maximize",)), ("Muon", ("nesterov", "use_muon")),
    *((name, ("skip_nonfinite", "zero_grads")) for name in ("Adam", "AdamW", "AdamW8bit", "SGD", "Lion")),
    *((name, ("skip_nonfinite",)) for name in ("Muon", "MuonW")),
])  # fmt: skip
def test_switches_are_bools(name, switches):
    for switch in switches:
        words = f"Invalid {switch}: .*; expected True"
        for value in ("no", 1, torch.tensor(True)):
            with pytest.raises(TypeError, match=words):
                getattr(optim, name)(weights(((3, 3),)), **{switch: value})
            if switch not in ("skip_nonfinite", "zero_grads"):
                with pytest.raises(TypeError, match=words):
                    getattr(optim, name)([{"params": weights(((3, 3),)), switch: value}])
        if switch in ("foreach", "fused", "use_muon"):
            getattr(optim, name)(weights(((3, 3),)), **{switch: None})


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"skip_nonfinite": True}, {"zero_grads": True}])
def test_options_of_whole_steps_are_not_taken_for_a_group(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} is given for one group; expected it for the optimizer"):
        optim.AdamW([{"params": weights(((3,),)), **option}])


def test_parameters_are_each_there_once():
    p, q = weights(((3,), (4,)))
    with pytest.raises(ValueError, match="duplicate parameters"):
        optim.AdamW([p, q, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optim.AdamW([{"params": [p]}, {"params": [q, p]}])
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.AdamW([])
    with pytest.raises(TypeError):
        optim.AdamW(p)


def test_the_error_of_an_unknown_option_lists_the_known_ones():
    with pytest.raises(TypeError, match=r"AdamW: unknown option 'max_nrom' \(there are: max_norm, .*rounding.*betas"):
        optim.AdamW(weights(((3,),)), max_nrom=1.0)


def test_states_of_another_shape_are_refused():
    mine, theirs, _, b = both("AdamW", ((3,), (4,)))
    set_gradients(mine, theirs)
    b.step()
    saved = b.state_dict()
    other = optim.AdamW(weights(((3,), (5,))))
    with pytest.raises(ValueError, match=r"parameter 1: 'exp_avg' has the shape \(4,\); expected \(5,\)"):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match="doesn't match the size"):
        optim.AdamW(weights(((3,),))).load_state_dict(saved)


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the engine's, PyTorch's
def test_a_parameter_that_is_given_another_shape_is_refused(name, dtype):
    mine, theirs = weights(((90, 60), (4,)), dtype), weights(((90, 60), (4,)), dtype)
    options = {"momentum": 0.9} if name == "SGD" else {}
    a, b = getattr(optim, name)(mine, **options), getattr(optim, name)(theirs, **options)
    set_gradients(mine)
    b.step()  # without gradients
    a.step()
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    theirs[0].data = torch.zeros(1, 60, dtype=dtype, device=DEVICE)
    set_gradients(theirs)
    with pytest.raises(ValueError, match=r"has the shape \(90, 60\), and its parameter \(1, 60\)"):
        b.step()
    b.state.pop(theirs[0])
    b.step()
    assert bool(theirs[0].any())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_parameters_of_several_devices(name):
    mine, theirs, a, b = both(name)
    for params in (mine, theirs):
        params += [torch.nn.Parameter(p.detach().cpu() + 1) for p in params[:4]]
    for optimizer, params in ((a, mine), (b, theirs)):
        optimizer.add_param_group({"params": params[len(params) - 4 :]})
    assert_same_steps(mine, theirs, a, b)
    clipped, expected = (getattr(optim, name)(p, lr=1e-2, **o) for p, o in ((mine, {"max_norm": 1.0}), (theirs, {})))
    set_gradients(mine, theirs, seed=3)
    norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    clipped.step()
    expected.step()
    torch.testing.assert_close(float(clipped.grad_norm), float(norm), rtol=1e-6, atol=0)
    assert_close(mine, theirs, 4)


def test_a_parameter_without_a_gradient_is_left_alone():
    mine, theirs, a, b = both("AdamW")
    set_gradients(mine, theirs)
    mine[4].grad = theirs[4].grad = None
    before = mine[4].detach().clone()
    a.step()
    b.step()
    assert mine[4].equal(before) and not a.state_dict()["state"].get(4)
    a.zero_grad()
    a.step()  # none at all
    assert_close(mine, theirs, 1)


def test_a_closure_is_called_with_gradients_enabled():
    (p,) = weights(((3,),))
    a = optim.SGD([p], lr=1e-1)

    def closure():
        assert torch.is_grad_enabled()
        a.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    first = a.step(closure)
    assert a.step(closure).item() < first.item()


@pytest.mark.parametrize("seed", ["a", 1.5, 2**70, True])
def test_a_seed_of_the_operator_that_is_no_integer_of_64_bits_is_refused(seed):
    p, step = torch.zeros(300, device=DEVICE), torch.zeros((), device=DEVICE)
    code, scale = p.to(torch.uint8), torch.zeros(2, device=DEVICE)
    given = [p], [p], [code], [scale], [code], [scale], [step]
    with pytest.raises(ValueError, match=r"adamw_8bit: argument 'seed' is .*; expected an int of 64 bits or None"):
        ops.adamw_8bit(*given, seed=seed)
    ops.adamw_8bit([p], [p.clone()], [code], [scale], [code.clone()], [scale.clone()], [step], seed=-(2**63))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_steps_that_the_kernels_would_read_as_fp32_are_refused(name, dtype):
    p, g, m, v = (torch.zeros(3, 5, device=DEVICE) for _ in range(4))
    step = torch.zeros((), device=DEVICE)
    with pytest.raises(TypeError, match=rf"{name}: argument 'steps\[0\]' has dtype {str(dtype)[6:]}; expected float32"):
        getattr(ops, name)([p], [g], [m], [v], [step.to(dtype)])
    getattr(ops, name)([p], [g], [m], [v], [step])
    wide = [[t.double()] for t in (p, g, m, v)]
    getattr(ops, name)(*wide, [step.double()])


@pytest.mark.parametrize("dampening", [math.nan, math.inf, "a", None])
def test_dampening_of_the_operator_that_is_no_number_is_refused(dampening):
    p, g, b = torch.zeros(3, 5, device=DEVICE)
    with pytest.raises(ValueError, match=r"sgd: argument 'dampening' is .*; expected a finite number"):
        ops.sgd([p], [g], [b], momentum=0.9, dampening=dampening)
    ops.sgd([p], [g], [b], momentum=0.9, dampening=-0.5)


LISTS = {"adam": 5, "adamw": 5, "lion": 3, "sgd": 3, "adamw_8bit": 7}
SWITCHES = [*((name, lists, "maximize") for name, lists in LISTS.items()), ("sgd", 3, "nesterov")]


@pytest.mark.parametrize("value", ["no", 1, None])
@pytest.mark.parametrize(("name", "lists", "switch"), SWITCHES)
def test_switches_of_the_operators_are_bools(name, lists, switch, value):
    given = [[torch.zeros((), device=DEVICE)] for _ in range(lists)]
    for function in (getattr(ops, name), functools.partial(ops.explain, name)):
        with pytest.raises(TypeError, match=rf"{name}: argument '{switch}' is .*; expected True or False"):
            function(*given, **{switch: value})
