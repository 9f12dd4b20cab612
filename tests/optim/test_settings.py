"""Optimizers under PyTorch's process-wide settings, and under frameworks that look at an optimizer's attributes."""

import copy
import inspect
from functools import partial

import pytest
import torch
from optimizer_samples import random_step, set_gradients, weights
from torch import nn
from where import DEVICE

from weft import optim
from weft.operators.optimizer.multi_tensor import Codes, Entry, check_memory
from weft.optim.muon import Muon

pytestmark = pytest.mark.device
MADE = {
    "Adam": {}, "AdamW": {"amsgrad": True}, "AdamW8bit": {"min_8bit_size": 0}, "Lion": {}, "SGD": {"momentum": 0.9},
    "Muon": {"ns_dtype": torch.float32},
}  # fmt: skip


@pytest.fixture
def restored():
    """PyTorch's settings as they were, after the test."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


SETTINGS = {
    "default dtype bf16": lambda: torch.set_default_dtype(torch.bfloat16),
    "default dtype fp64": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
}


def stepped(name: str, where: str, set_up=lambda: None) -> tuple[list, dict]:
    """Weights and states of three steps, of which the last is of an optimizer that has loaded the state."""
    params = [nn.Parameter(p.detach().to(where)) for p in weights(((17, 40), (300,)))]
    made = partial(getattr(optim, name), params, lr=1e-2, **MADE[name])
    gradients = [(set_gradients(params, seed=i), [p.grad for p in params])[1] for i in range(3)]
    set_up()
    optimizer = made()
    for i, grads in enumerate(gradients):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        if i == 2:
            saved, optimizer = optimizer.state_dict(), made()
            optimizer.load_state_dict(saved)
        optimizer.step()
    return params, optimizer.state_dict()["state"]


@pytest.mark.share(3)
@pytest.mark.parametrize("where", sorted({"cpu", DEVICE}))
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MADE)
def test_a_process_wide_setting_changes_nothing(name, setting, where, restored):
    expected, states = stepped(name, where)
    params, ours = stepped(name, where, SETTINGS[setting])
    assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))
    for i, state in states.items():
        for key, value in state.items():
            assert ours[i][key].dtype == value.dtype and torch.equal(ours[i][key], value), key


def test_steps_are_counted_beyond_256_in_fp32(restored):
    """As PyTorch does; a count in the default dtype, bf16, would stop there."""
    torch.set_default_dtype(torch.bfloat16)
    p = nn.Parameter(torch.zeros(4, dtype=torch.float32))
    optimizer = optim.AdamW([p])
    for step in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
        if step == 0:
            optimizer.state[p]["step"].fill_(255)
    assert float(optimizer.state[p]["step"]) == 258


@pytest.mark.parametrize(
    "change", [{"scales": torch.zeros(3, dtype=torch.bfloat16)}, {"scales": torch.zeros(2)}, {"step": torch.zeros(1).double()},
               {"states": torch.zeros(4, dtype=torch.uint8)}]
)  # fmt: skip
def test_what_a_kernel_takes_by_address_is_checked(change):
    p = nn.Parameter(torch.zeros(700))
    good = {"scales": torch.zeros(3), "step": torch.zeros(1), "states": torch.zeros(700, dtype=torch.uint8)}

    def entry(scales, step, states):
        return Entry(p, (states,), step, {}, codes=Codes((scales,)))

    check_memory(entry(**good))
    with pytest.raises(ValueError, match=r"of a parameter with 700 elements on cpu has .*; expected"):
        check_memory(entry(**good | change))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("name", MADE)
def test_a_scaler_skips_the_step_itself_unless_it_is_fused(name):
    """Accelerate tells a skipped step by whether ``step`` was called; Lightning refuses to clip where the step unscales."""
    params = weights(((6, 5), (5,)))
    optimizer = getattr(optim, name)(params, lr=1e-2, **MADE[name])
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    called = []
    step = optimizer.step
    optimizer.step = lambda *args: (called.append(True), step(*args))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)
    before = [p.detach().clone() for p in params]
    for factor, calls in ((float("inf"), 0), (1.0, 1)):
        optimizer.zero_grad()
        scaler.scale(sum((p * factor).sum() for p in params)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert len(called) == calls
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True)) == (calls == 0)


def test_a_fused_step_and_one_that_zeroes_take_the_scale():
    params = weights(((3,),))
    assert all(optim.AdamW(params, **{option: True})._step_supports_amp_scaling for option in ("fused", "zero_grads"))


@pytest.mark.parametrize("name", MADE)
def test_states_held_before_the_first_step_are_the_optimizers(name):
    params = weights(((6, 5), (5,)))
    optimizer = getattr(optim, name)(params, lr=1e-2, **MADE[name])
    states, held = optimizer.state, optimizer.state[params[1]]
    for _ in range(2):
        random_step(optimizer)
    assert states is optimizer.state and len(states) == 2 and held is states[params[1]] and held
    optimizer.load_state_dict(optimizer.state_dict())
    states = optimizer.state
    optimizer.step()
    assert states is optimizer.state and dict(copy.copy(states)) == dict(states)


@pytest.mark.share(2)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo looks at .grad of inputs
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_the_first_step_may_be_compiled(name):
    nets = [model(), model()]
    nets[1].load_state_dict(nets[0].state_dict())
    x, losses = torch.randn(8, 8), []
    for net, wrap in zip(nets, (lambda f: f, torch.compile(backend="aot_eager")), strict=True):
        optimizer = getattr(optim, name)(net.parameters(), lr=1e-2)

        def train_step(x, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = wrap(train_step)
        losses.append([float(step(x)) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][2] < losses[0][0]


def test_steps_in_backward_refuse_a_scaler():
    params = weights(((6, 5),))
    optimizer, scaler = optim.SGD(params, lr=1e-2), torch.amp.GradScaler(DEVICE)
    overlap = optimizer.overlap_with_backward()
    scaler.scale(params[0].sum()).backward()
    with pytest.raises(RuntimeError, match="it does not go with steps in backward"):
        scaler.step(optimizer)
    overlap.remove()
    assert not optimizer._step_supports_amp_scaling


def test_one_cycle_moves_muons_momentum():
    optimizer = Muon(model().parameters(), momentum=0.95)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10, base_momentum=0.8)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["momentum"] < 0.9 and optimizer.param_groups[0]["adamw_betas"] == (0.9, 0.999)


def test_muons_arguments_are_pytorchs_in_order_and_default():
    ours, theirs = (list(inspect.signature(c).parameters.values()) for c in (Muon, torch.optim.Muon))
    assert [(p.name, p.default) for p in ours[1 : len(theirs)]] == [(p.name, p.default) for p in theirs[1:]]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.block = nn.Embedding(10, 8), nn.ModuleDict({"conv": nn.Conv2d(1, 2, 3), "up": nn.Linear(8, 6)})
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 10, bias=False)
        self.lm_head.weight = self.wte.weight


def test_muon_groups_leave_embeddings_heads_and_vectors_to_adamw():
    muon, adamw = optim.muon_groups(Tied(), lr=3e-4)
    assert [name for name, _ in muon["params"]] == ["block.conv.weight", "block.up.weight"]
    assert [name for name, _ in adamw["params"]] == [
        "wte.weight", "block.conv.bias", "block.up.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    block = nn.ModuleDict({"output": nn.Linear(4, 4), "fc_out": nn.Linear(4, 4)})
    layers = nn.ModuleDict({"h": nn.ModuleList([block]), "head": nn.Linear(4, 9)})
    assert [name for name, _ in optim.muon_groups(layers)[0]["params"]] == ["h.0.output.weight", "h.0.fc_out.weight"]
    optimizer = Muon([muon, adamw], lr=0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    with pytest.raises(ValueError, match="no parameters that require gradients"):
        optim.muon_groups(nn.Tanh())
