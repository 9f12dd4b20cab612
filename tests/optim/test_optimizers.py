"""The optimizers of ``weft.optim`` against those of ``torch.optim``, on the GPU where there is one, else interpreted."""

import importlib
import re
import runpy

import pytest
import torch
import turns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optimizer_samples import PAIRS, SHAPES, assert_close, assert_same_steps, both, random_step, set_gradients, weights
from where import DEVICE, ROOT, path_with, printed, python

from weft import optim

pytestmark = pytest.mark.device


@pytest.mark.parametrize("name", PAIRS)
def test_forty_steps_equal_pytorchs(name):
    assert_same_steps(*both(name, ((3, 5), (1,), (70,))), steps=40)


OPTIONS = st.floats(1e-4, 1e-1), st.floats(0, 0.5), st.booleans(), st.booleans()
LISTS = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)
GROUPS = st.lists(st.tuples(LISTS, st.sampled_from((torch.float32, torch.float16)), *OPTIONS), min_size=1, max_size=3)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(groups=GROUPS, absent=st.integers(0, 8))
def test_any_groups_equal_pytorchs(groups, absent):
    """Shapes, dtypes and options mixed; one parameter has no gradient at the second step."""

    def made(kind):
        own = []
        for i, (shapes, dtype, lr, decay, amsgrad, maximize) in enumerate(groups):
            options = {"lr": lr, "weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
            own.append({"params": weights(shapes, dtype, seed=i), **options})
        return kind(own), [p for group in own for p in group["params"]]

    (a, mine), (b, theirs) = made(optim.AdamW), made(torch.optim.AdamW)
    wide = [torch.nn.Parameter(p.detach().double()) for p in theirs]
    c = torch.optim.AdamW([{**g, "params": [wide.pop(0) for _ in g["params"]]} for g in b.param_groups])
    exact = [p for g in c.param_groups for p in g["params"]]
    for step in range(3):
        set_gradients(mine, theirs, exact, seed=step)
        if step == 1 and absent < len(mine):
            mine[absent].grad = theirs[absent].grad = exact[absent].grad = None
        for optimizer in (a, b, c):
            optimizer.step()
    for ours, torchs, right in zip(mine, theirs, exact, strict=True):
        if right.numel():
            error, usual = ((t.detach().double() - right.detach()).abs().max() for t in (ours, torchs))
            floor = 4 * torch.finfo(ours.dtype).eps * max(float(right.detach().abs().max()), 1.0)
            # in fp16 PyTorch's own may be NaN, where its second moment is 0; then the floor alone counts
            assert float(error) <= (floor if usual.isnan() else max(2 * float(usual), floor))


def test_lion_equals_its_formula():
    mine, theirs = weights(), weights()
    a = optim.Lion(mine, lr=1e-2, weight_decay=0.1)
    moments = [torch.zeros_like(p) for p in theirs]
    for step in range(4):
        set_gradients(mine, theirs, seed=step)
        a.step()
        with torch.no_grad():
            for p, m in zip(theirs, moments, strict=True):
                p.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * torch.sign(0.9 * m + 0.1 * p.grad))
                m.mul_(0.99).add_(p.grad, alpha=0.01)
    assert_close(mine, theirs, 4)


def test_options_may_change_between_steps():
    mine, theirs, a, b = both("AdamW")

    def change(step):
        for optimizer in (a, b):
            optimizer.param_groups[0].update(lr=1e-2 / (step + 1), maximize=step % 2 == 1)

    assert_same_steps(mine, theirs, a, b, 6, change)


def test_a_learning_rate_may_become_a_tensor_that_changes_and_a_number_again():
    mine, theirs, a, b = both("AdamW")
    tensor = torch.tensor(3e-2, device=DEVICE)

    def change(step):
        if step == 2:
            tensor.fill_(1.5e-2)
        else:
            a.param_groups[0]["lr"] = (1e-2, tensor, None, 5e-3)[step]
        b.param_groups[0]["lr"] = float(a.param_groups[0]["lr"])

    assert_same_steps(mine, theirs, a, b, 4, change)


def laid_out(layout):
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    if layout == "unaligned":
        return torch.nn.Parameter(torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x))
    if layout == "transposed":
        return torch.nn.Parameter(x.transpose(0, 2).contiguous().transpose(0, 2))
    if layout == "gaps":
        return torch.nn.Parameter(torch.stack([x, x], -1)[..., 0])
    return torch.nn.Parameter(x.clone())


@pytest.mark.parametrize("weight", ["contiguous", "unaligned", "transposed", "gaps"])
@pytest.mark.parametrize("gradient", ["contiguous", "unaligned", "transposed", "gaps", "expanded"])
def test_any_layout_of_weight_and_gradient(weight, gradient):
    p, q = laid_out(weight), laid_out("contiguous")
    a, b = optim.AdamW([p], lr=1e-1, zero_grads=True), torch.optim.AdamW([q], lr=1e-1)
    for _ in range(2):
        g = q.new_ones(6, 4, 1).expand(6, 4, 5) if gradient == "expanded" else laid_out(gradient).detach()
        p.grad, q.grad = g, g.clone(memory_format=torch.contiguous_format)
        a.step()
        b.step()
        assert not g.any()
    assert_close([p], [q], 2)
    assert p.stride() == laid_out(weight).stride()


def test_states_that_are_replaced_are_found_again():
    """As they are when somebody parks them in other memory between steps."""
    mine, theirs, a, b = both("AdamW")
    for step in range(4):
        random_step(a, b, seed=step)
        for state in a.state.values():
            for name, value in state.items():
                state[name] = value.clone()
        if step == 1:
            a.state = {p: dict(state) for p, state in a.state.items()}
        if step == 2:
            a.state[mine[4]] = {name: value.clone() for name, value in a.state[mine[4]].items()}
    assert_close(mine, theirs, 4)
    assert {float(s["step"]) for s in a.state.values()} == {4.0}


def test_a_group_that_is_added_later():
    mine, theirs, a, b = both("AdamW")
    more = weights(((7,),), seed=5), weights(((7,),), seed=5)
    for step in range(3):
        if step == 1:
            for optimizer, extra in zip((a, b), more, strict=True):
                optimizer.add_param_group({"params": extra, "lr": 1e-3, "amsgrad": True})
        set_gradients([*mine, *more[0]], [*theirs, *more[1]], seed=step)
        a.step()
        b.step()
    assert_close([*mine, *more[0]], [*theirs, *more[1]], 3)


ON_CPU = """
import copy, torch
from weft import optim
for name in ("Adam", "AdamW", "SGD"):
    for options in ({}, {"maximize": True, "weight_decay": 0.1}, {"fused": True}):
        mine, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 50)] for _ in range(2))
        extra = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
        a = getattr(optim, name)(mine, lr=0.1, **options, **extra)
        b = getattr(torch.optim, name)(theirs, lr=0.1, **options, **extra)
        for step in range(4):
            for p, q in zip(mine, theirs):
                p.grad = torch.cos(p.detach() * (step + 1)); q.grad = p.grad.clone()
            a.step(); b.step()
            if step == 1:
                saved = copy.deepcopy((a.state_dict(), b.state_dict()))
                a.load_state_dict(saved[1]); b.load_state_dict(saved[0])
        assert all(p.equal(q) for p, q in zip(mine, theirs)), (name, options)
optim.Lion(mine).step()
for options in ({}, {"state_format": "fp8"}, {"code_rounding": "stochastic"}, {"amsgrad": True}):
    for dtype in (torch.float32, torch.bfloat16):
        mine, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n).to(dtype)) for n in (50, 5000)] for _ in range(2))
        a = optim.AdamW8bit(mine, lr=0.01, **options)
        b = torch.optim.AdamW(theirs, lr=0.01, amsgrad=options.get("amsgrad", False))
        for step in range(4):
            for p, q in zip(mine, theirs):
                p.grad = torch.cos(p.detach() * (step + 1)); q.grad = p.grad.clone()
            a.step(); b.step()
        for p, q in zip(mine, theirs):
            assert (p - q).abs().max() < 0.02, (options, dtype)
        b.load_state_dict(a.torch_state_dict())
wide = [torch.nn.Parameter(torch.ones(5000, dtype=torch.float64))]
wide[0].grad = torch.ones_like(wide[0])
c = optim.AdamW8bit(wide); c.step()
assert c.state[wide[0]]["exp_avg"].dtype == torch.float64
"""


@pytest.mark.share(2)
def test_what_pytorchs_own_list_has_them_take_and_refuse():
    """Interpreted, a run has one in twelve of what they take, at another commit other ones."""
    step = 1 if DEVICE == "cuda" or turns.WANTED == "all" else 12
    words = map(str, (turns.turn("PyTorch's own list", step), step))
    interpreting = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}
    done = python(str(ROOT / "tests/optim/pytorchs_optimizer_checks.py"), *words, **interpreting)
    assert done.returncode == 0 and done.stdout.split()[1:] == ["cases"], done.stdout + done.stderr


EXAMPLES = """
import sys, muon_against_adamw, optimizer_against_torch, optimizer_in_8_bits
optimizer_against_torch.main()
sys.argv[1:] = ["30"]
optimizer_in_8_bits.main()
muon_against_adamw.EVERY = 5
sys.argv[1:] = ["5"]
muon_against_adamw.main()
"""


@pytest.mark.share(3)
def test_the_examples_run():
    """And training with moments in 8 bits ends within a per cent of the loss with 32 bits."""
    said = printed("-W", "error", "-c", EXAMPLES, PYTHONPATH=path_with(ROOT / "src", ROOT / "examples"))
    assert "after 10 steps the weights are" in said and "AdamW at 0.0" in said and "MuonW at 0.0" in said
    wide, narrow = map(float, re.search(r"^ +30 +(\S+) +(\S+)$", said, re.M).groups())
    assert wide < 4 and abs(narrow / wide - 1) < 0.01


@pytest.mark.share(2)
def test_a_contender_that_fails_leaves_the_examples_others(capsys, monkeypatch):
    compare = runpy.run_path(str(ROOT / "examples" / "optimizer_against_torch.py"))["compare"]
    if DEVICE != "cuda":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    steps = []

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken():
        raise ValueError("another version")

    contenders = {
        "weft": lambda: (lambda: None, lambda: steps.append("weft")), "large": lambda: (lambda: None, out_of_memory),
        "absent": lambda: importlib.import_module("a_peer_that_nobody_has"), "broken": broken,
        "torch": lambda: (lambda: None, lambda: steps.append("torch")),
    }  # fmt: skip
    compare("a title", contenders, 0.0)
    printed = capsys.readouterr().out
    assert steps.count("weft") == steps.count("torch") > 2
    assert "out of memory beside weft" in printed and "No module named 'a_peer_that_nobody_has'" in printed
    assert "ValueError: another version" in printed
    assert [line.split()[0] for line in printed.splitlines() if " us" in line] == ["weft", "torch"]


@pytest.mark.share(2)
def test_parameters_on_the_cpu_are_stepped_by_pytorch():
    printed("-W", "error", "-c", ON_CPU)


def test_a_differentiable_step_is_pytorchs():
    p = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    q = p.clone()
    a = optim.SGD([q], lr=0.1, differentiable=True)
    q.grad = p * 2
    a.step()
    q.sum().backward()
    torch.testing.assert_close(p.grad, torch.full_like(p, 0.8))
