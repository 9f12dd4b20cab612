"""Muon and MuonW: the steps of PyTorch's Muon, on one process and on several, saved and resumed."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from saved_states import check_refused, resumed
from torch.optim._muon import _zeropower_via_newtonschulz
from where import DEVICE

from weft import ops
from weft.operators.optimizer.dispatch import STEP
from weft.operators.orthogonalization.dispatch import IterationCall
from weft.optim import muon, muon_sharding
from weft.optim.adam import AdamW
from weft.optim.muon import MuonW

undecayed = partial(MuonW, weight_decay=0.0)
SHAPES = ((24, 40), (40, 24), (32, 32), (24, 40), (1, 20))


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    """CPU tensors take PyTorch's products, in bf16 too: the interpreter, which other tests switch on, computes bf16 wrongly."""
    monkeypatch.setattr(IterationCall, "on_gpu", property(lambda call: call.x.is_cuda))


def parameters(shapes=SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]


def set_gradients(params, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def train(optimizer, params, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_gradients(params, 100 + step)
        optimizer.step()


def train_parts(optimizers, params, parts, gradients_of, steps: int = 3) -> None:
    """Both optimizers' steps; the gradients of the parts are those of the parameters, as ``gradients_of`` divides them."""
    for step in range(steps):
        set_gradients(params, step)
        for p, g in zip(parts, gradients_of(params), strict=True):
            p.grad = g.to(p.device, copy=True)
        for optimizer in optimizers:
            optimizer.step()


def same_bits(ours, theirs) -> bool:
    return all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def moved_apart(ours, theirs, start) -> float:
    """How far two runs are apart, as a share of the way that the second went."""
    with torch.no_grad():
        return max(float((a - b).norm() / (b - s).norm()) for a, b, s in zip(ours, theirs, start, strict=True))


# Both iterate in bf16, of 8 bits, fifteen products deep, and each errs by 1 to 3 % of a step; PyTorch rounds the momentum too,
# before it takes the norm.
BF16 = 0.05


CHOICES = itertools.product((True, False), (None, "original", "match_rms_adamw"), (0.0, 0.1))
OPTIONS = [
    {"lr": 0.02, "nesterov": n, "adjust_lr_fn": a, "weight_decay": w, "momentum": (0.95, 0.5)[i % 2]}
    for i, (n, a, w) in enumerate(CHOICES)
]


@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_those_of_pytorchs_muon(options, monkeypatch):
    ours, theirs, start = parameters(), parameters(), parameters()
    train(MuonW(ours, **options), ours, 5)
    train(torch.optim.Muon(theirs, **options), theirs, 5)
    assert 0 < moved_apart(ours, theirs, start) < BF16

    def pytorchs(stack, steps, coefficients, *, eps, dtype):
        return torch.stack([_zeropower_via_newtonschulz(m, coefficients, steps, eps) for m in stack])

    monkeypatch.setattr(ops, "newton_schulz", pytorchs)
    exact = parameters()
    train(MuonW(exact, **options), exact, 5)
    assert same_bits(exact, theirs)


def test_state_comes_from_pytorch():
    """That it goes there, PyTorch's own list of what optimizers take has."""
    options = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = parameters(), parameters()
    pytorchs, mine = torch.optim.Muon(theirs, **options), MuonW(ours, lr=1.0, split_rows=1)
    train(pytorchs, theirs, 3)
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.data)
    start = [p.detach().clone() for p in ours]
    mine.load_state_dict(copy.deepcopy(pytorchs.state_dict()))  # a copy: they would share momenta
    group = mine.param_groups[0]
    assert {k: group[k] for k in options} == options
    assert group["split_rows"] == 1 and group["ns_dtype"] == torch.bfloat16
    train(mine, ours, 2, first=3)
    train(pytorchs, theirs, 2, first=3)
    assert moved_apart(ours, theirs, start) < BF16


@pytest.mark.parametrize("name", ["classic", "polar-express"])
def test_training_is_resumed_bit_for_bit(name):
    shapes = (*SHAPES, (24,), ())
    options = {"lr": 0.02, "weight_decay": 0.1, "ns_coefficients": name}
    straight, first = parameters(shapes), parameters(shapes)
    train(MuonW(straight, **options), straight, 6)
    optimizer = MuonW(first, **options)
    train(optimizer, first, 3)
    second, other = resumed(first, optimizer, lambda params: MuonW(params, lr=7.0))
    train(other, second, 3, first=3)
    assert same_bits(second, straight)


def test_optimizers_are_copied_and_pickled():
    params = parameters(((8, 12), (12,)))
    optimizer = MuonW(params, 0.02)
    train(optimizer, params, 2)
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copies = made.param_groups[0]["params"]
        train(made, copies, 1, first=2)
        assert copies[0] is not params[0]
    train(optimizer, params, 1, first=2)
    assert same_bits(copies, params)


def calls_of(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the batched calls that follow."""
    real, seen = ops.newton_schulz, []

    def counted(stack, *arguments, **options):
        seen.append(tuple(stack.shape))
        return real(stack, *arguments, **options)

    monkeypatch.setattr(ops, "newton_schulz", counted)
    return seen


def test_matrices_of_one_shape_are_one_call(monkeypatch):
    seen = calls_of(monkeypatch)
    params = parameters(((8, 12), (12, 8), (8, 12), (8, 3, 2, 2), (5,)))
    train(undecayed(params), params, 1)
    assert sorted(seen) == [(1, 12, 8), (3, 8, 12)]
    seen.clear()
    monkeypatch.setattr(muon, "STACKED", 200)
    train(undecayed(params), params, 1)
    assert sorted(seen) == [(1, 8, 12), (1, 12, 8), (2, 8, 12)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the engine's, PyTorch's
def test_what_is_no_matrix_takes_adamw(dtype):
    ours, theirs = parameters(((24,), (8, 12), (), (5, 6)), dtype), parameters(((24,), (8, 12), (), (5, 6)), dtype)
    groups = [{"params": ours[:3]}, {"params": ours[3:], "use_muon": False, "lr": 0.003, "weight_decay": 0.2}]
    optimizer = MuonW(groups, 0.01, adamw_betas=(0.8, 0.95), adamw_eps=1e-6)
    kept = {"betas": (0.8, 0.95), "eps": 1e-6}
    first = {"params": [theirs[0], theirs[2]], "lr": 0.01, "weight_decay": 0.1, **kept}
    reference = AdamW([first, {"params": [theirs[3]], "lr": 0.003, "weight_decay": 0.2, **kept}])
    for step in range(4):
        for params in (ours, theirs):
            set_gradients(params, step)
        optimizer.step()
        reference.step()
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.01 / (step + 2)  # as a scheduler does
    assert same_bits([ours[0], ours[2], ours[3]], [theirs[0], theirs[2], theirs[3]])
    assert set(optimizer.state[ours[1]]) == {"momentum_buffer"}
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(optimizer.state[ours[3]])


@pytest.mark.device
def test_adamws_table_is_made_once(monkeypatch):
    real, made = STEP.build, []
    monkeypatch.setattr(STEP, "build", lambda *arguments: made.append(1) or real(*arguments))
    params = [torch.nn.Parameter(p.detach().to(DEVICE)) for p in parameters(((4, 6), (6,)))]
    optimizer = MuonW(params)
    for step in range(4):
        for p in params:
            p.grad = torch.full_like(p, step + 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            made.clear()  # the first step makes momenta too, which are changes of the state
    assert len(made) <= 1
    state = optimizer.state_dict()["state"][1]
    assert state["step"].device.type == "cpu" and float(state["step"]) == 4


def test_convolutions_are_flattened_and_experts_are_batches():
    conv, flat = parameters(((8, 3, 2, 2),)), parameters(((8, 12),))
    for params in (conv, flat):
        train(undecayed(params, adjust_lr_fn="match_rms_adamw"), params, 3)
    assert conv[0].flatten(1).equal(flat[0])

    last = [torch.nn.Parameter(parameters(((8, 3, 2, 2),))[0].detach().to(memory_format=torch.channels_last))]
    train(undecayed(last, adjust_lr_fn="match_rms_adamw"), last, 3)
    torch.testing.assert_close(last[0], conv[0], rtol=1e-2, atol=1e-4)

    (experts,) = parameters(((3, 8, 12),))
    alone = [torch.nn.Parameter(m.detach().clone()) for m in experts]
    optimizers = undecayed([experts], higher_dims="batch"), undecayed(alone)
    train_parts(optimizers, [experts], alone, lambda whole: whole[0].grad)
    assert experts.equal(torch.stack([p.detach() for p in alone]))


@pytest.mark.parametrize(("split", "sizes"), [(3, (8, 8, 8)), ((16, 4, 4), (16, 4, 4))])
@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw"}, {"update_rms": 0.2}])
def test_a_fused_projection_is_orthogonalised_in_parts(split, sizes, options):
    (fused,) = parameters(((24, 10),))
    parts = [torch.nn.Parameter(t.detach().clone()) for t in fused.split(sizes)]
    optimizers = undecayed([fused], split_rows=split, **options), undecayed(parts, **options)
    start = fused.detach().clone()
    train_parts(optimizers, [fused], parts, lambda whole: whole[0].grad.split(sizes))
    whole = torch.cat([p.detach() for p in parts])
    assert moved_apart([fused], [whole], [start]) < 1e-5  # unequal parts are scaled before they are added, not while


@pytest.mark.parametrize("rms", [0.2, 1.0])
def test_updates_have_the_root_mean_square_asked_for(rms):
    params = parameters()
    before = [p.detach().clone() for p in params]
    train(undecayed(params, lr=0.5, update_rms=rms), params, 1)
    for p, b in zip(params, before, strict=True):
        assert float((p.detach() - b).square().mean().sqrt()) == pytest.approx(0.5 * rms, rel=1e-4)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(64, 16), (16, 64)])
def test_factors_are_those_of_the_rules(rule, shape):
    (p,) = parameters((shape,))
    before = p.detach().clone()
    train(undecayed([p], lr=1.0, adjust_lr_fn=rule, ns_coefficients="polar-express", ns_steps=8), [p], 1)
    m, n = shape
    factor = max(1, m / n) ** 0.5 if rule == "original" else 0.2 * max(m, n) ** 0.5
    values = torch.linalg.svdvals((p - before).detach())
    torch.testing.assert_close(values, torch.full_like(values, factor), rtol=0.05, atol=0)  # orthogonal up to bf16


def test_a_small_network_learns():
    torch.manual_seed(0)
    x = torch.randn(128, 20)
    y = torch.sin(x @ torch.randn(20, 5))
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5))
    optimizer = MuonW(model.parameters(), 0.06, adjust_lr_fn="match_rms_adamw")

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]


def test_parameters_without_gradients_or_elements_stay():
    params = parameters(((8, 12), (8, 12), (0, 5), (3,)))
    before = [p.detach().clone() for p in params]
    optimizer = MuonW(params, 0.1)
    optimizer.step()
    assert same_bits(params, before) and not optimizer.state
    params[1].grad, params[2].grad = torch.ones(8, 12), torch.zeros(0, 5)
    optimizer.step()
    assert same_bits([params[0], params[2], params[3]], [before[0], before[2], before[3]])
    assert not params[1].equal(before[1]) and set(optimizer.state) == {params[1]}


def test_zero_gradients_only_decay():
    params = parameters()
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    MuonW(params, 0.1, 0.5).step()
    assert same_bits(params, [b * (1 - 0.1 * 0.5) for b in before])


def test_nan_stays_in_its_parameter():
    params = parameters()
    set_gradients(params, 0)
    params[0].grad[1, 2] = torch.nan
    undecayed(params).step()
    # params[3] has its shape
    assert bool(params[0].isnan().all()) and all(bool(p.isfinite().all()) for p in params[1:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 5])  # a matrix, and what takes AdamW
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(value, where):
    shapes = (*SHAPES, (24,), (0, 3))
    ours, theirs = parameters(shapes), parameters(shapes)
    a, b = MuonW(ours, 0.02, skip_nonfinite=True), MuonW(theirs, 0.02)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        if step in (0, 2):
            ours[where].grad[-1] = value
            a.step()
            continue
        a.step()
        b.step()
    assert same_bits(ours, theirs) and a.skipped_steps == 2 and b.skipped_steps == 0
    assert all(state.get("step", 2) == 2 for state in a.state.values())
    made = pickle.loads(pickle.dumps(a))
    assert made.skip_nonfinite and made.skipped_steps == 2


def test_large_gradients_are_not_taken_for_infinite_ones():
    (p,) = parameters(((8, 12),))
    p.grad = torch.full_like(p, 3e38)  # the sum of their squares is
    optimizer = MuonW([p], skip_nonfinite=True)
    optimizer.step()
    assert optimizer.skipped_steps == 0 and bool(optimizer.state[p]["momentum_buffer"].all())


@pytest.mark.gpu
def test_parameters_of_several_devices():
    """And AdamW's among them."""
    on_cpu, mixed = parameters((*SHAPES, (24,))), parameters((*SHAPES, (24,)))
    mixed = [torch.nn.Parameter(p.detach().to("cuda")) if i % 2 else p for i, p in enumerate(mixed)]
    start = [p.detach().clone() for p in on_cpu]
    a, b = MuonW(on_cpu, 0.02, skip_nonfinite=True), MuonW(mixed, 0.02, skip_nonfinite=True)
    train_parts((a, b), on_cpu, mixed, lambda whole: [p.grad for p in whole])
    assert moved_apart([p.cpu() for p in mixed], on_cpu, start) < BF16
    mixed[1].grad[0, 0] = torch.nan
    b.step()
    assert b.skipped_steps == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_a_tensor_learning_rate(dtype):
    ours, theirs, start = parameters(dtype=dtype), parameters(dtype=dtype), parameters(dtype=dtype)
    train(MuonW(ours, torch.tensor(0.02)), ours, 2)
    train(torch.optim.Muon(theirs, torch.tensor(0.02)), theirs, 2)
    if dtype == torch.float64:
        assert moved_apart(ours, theirs, start) < BF16
    for a, b in zip(ours, theirs, strict=True):  # a step may round to the next number
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=0.02 * 2 * BF16)


@pytest.mark.parametrize(("options", "match"), [
    ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
    ({"lr": "1e-3"}, "lr should be a number but is: '1e-3'"),
    ({"momentum": None}, "momentum should be a number but is: None"),
    ({"lr": float("nan")}, "Learning rate should be >= 0 but is: nan"),
    ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
    ({"momentum": -0.1}, "momentum should be >= 0 and <= 1 but is: -0.1"), ({"momentum": 1.5}, "but is: 1.5"),
    ({"momentum": float("nan")}, "but is: nan"), ({"weight_decay": -1}, "weight decay should be >= 0 but is: -1"),
    ({"weight_decay": float("nan")}, "weight decay should be >= 0 but is: nan"),
    ({"adjust_lr_fn": "none"}, "Adjust learning rate function none is not supported; expected original"),
    ({"ns_steps": 100}, "'steps' is 100; expected a whole number, 1 … 99"),
    ({"ns_coefficients": (1.0, 2.0)}, "a tuple of exactly 3 numbers"),
    ({"ns_coefficients": (1.0, float("nan"), 0.0)}, "ns_coefficients should be finite but are"),
    ({"ns_coefficients": "polar"}, "did you mean 'polar-express'"), ({"eps": 0.0}, "eps should be > 0 but is: 0.0"),
    ({"update_rms": 0.0}, "update_rms should be > 0 or None but is: 0.0"),
    ({"update_rms": 0.2, "adjust_lr_fn": "original"}, "expected one of them"),
    ({"ns_dtype": torch.float64}, "ns_dtype should be one of torch.bfloat16"),
    ({"higher_dims": "stack"}, "higher_dims should be one of flatten, batch but is: stack"),
    ({"split_rows": 0}, "split_rows should be a number of parts"),
    ({"split_rows": 5}, "split_rows is 5, which does not divide the 24 rows"),
    ({"split_rows": (8, 8)}, r"split_rows is \(8, 8\), 16 rows together; expected the 24 rows"),
    ({"adamw_betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    ({"adamw_betas": (0.9, float("nan"))}, "Invalid beta parameter at index 1: nan"),
    ({"adamw_eps": -1.0}, "Invalid epsilon value: -1.0"),
])  # fmt: skip
def test_options_out_of_range_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        MuonW(parameters(), **options)
    optimizer = MuonW([{"params": parameters(((2, 3),))}])
    with pytest.raises(ValueError, match=match):
        optimizer.add_param_group({"params": parameters(seed=1), **options})
    assert len(optimizer.param_groups) == 1


def test_groups_that_do_not_fit_are_refused():
    (p, q) = parameters(((4, 6), (4,)))
    with pytest.raises(ValueError, match="more than one parameter group"):
        MuonW([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match="duplicate parameters; expected each once"):
        MuonW([p, q, p])
    with pytest.raises(ValueError, match=r"use_muon is True for a parameter of shape \(4,\)"):
        MuonW([{"params": [p, q], "use_muon": True}])
    with pytest.raises(ValueError, match="'betas'; expected 'adamw_betas'"):
        MuonW([{"params": [p], "betas": (0.9, 0.95)}])


def test_a_group_may_be_empty():
    a = MuonW([{"params": []}], skip_nonfinite=True)
    a.step()
    assert a.skipped_steps == 0


def test_gradients_that_cannot_be_taken_are_refused():
    (p,) = parameters(((4, 6),))
    p.grad = torch.ones(4, 6).to_sparse()
    with pytest.raises(RuntimeError, match="Muon does not support sparse gradients"):
        undecayed([p]).step()
    z = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(RuntimeError, match="not support sparse gradients"):  # AdamW's words
        MuonW([{"params": [p], "use_muon": False}], skip_nonfinite=True).step()
    with pytest.raises(RuntimeError, match="Muon does not support complex parameters"):
        undecayed([z]).step()


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    params, others = parameters(((4, 6), (6, 4))), parameters(((4, 6), (6, 5)))
    saved, optimizer = MuonW(params, lr=0.5), MuonW(others, lr=0.25)
    train(saved, params, 1)
    with pytest.raises(ValueError, match=r"parameter 1: 'momentum_buffer' has the shape \(6, 4\); expected \(6, 5\)"):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25 and not optimizer.state
    optimizer.load_state_dict(MuonW(others, lr=0.25).state_dict())
    train(optimizer, others, 1)
    others[1].data = torch.ones(6, 1)  # whose momentum would be broadcast
    others[1].grad = torch.ones(6, 1)
    with pytest.raises(ValueError, match=r"momentum_buffer has the shape \(6, 5\), its gradient \(6, 1\)"):
        optimizer.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        MuonW([{"params": others[:1]}, {"params": others[1:]}]).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("index", "key", "value", "words"), [
    (0, "momentum_buffer", None, "'momentum_buffer' is missing; there are 'other'"),
    (0, "momentum_buffer", torch.ones(4, 6, dtype=torch.int32), "'momentum_buffer' is a tensor of torch.int32"),
    (1, "step", None, "'step' is missing; there are 'exp_avg', 'exp_avg_sq', 'other'"),
    (1, "exp_avg_sq", [1.0], r"'exp_avg_sq' is \[1.0\]; expected a tensor of floating-point numbers"),
])  # fmt: skip
def test_a_state_dict_that_is_not_whole_is_refused_and_nothing_is_loaded(index, key, value, words):
    params = parameters(((4, 6), (6,)))
    optimizer = MuonW(params, lr=0.5)
    train(optimizer, params, 1)
    check_refused(optimizer, index, {key: value, "other": 1}, words)


@pytest.mark.device
@pytest.mark.parametrize("nesterov", [True, False])
def test_kernels_of_ours_make_the_same_steps(nesterov, monkeypatch):
    monkeypatch.setattr(IterationCall, "on_gpu", True)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    ours = [torch.nn.Parameter(p.detach().to(DEVICE)) for p in parameters()]
    assert ops.explain("newton_schulz", ours[0].detach()).implementation != "torch"
    optimizer = undecayed(ours, 0.02, nesterov=nesterov, ns_dtype=dtype)
    theirs, start = parameters(), parameters()
    reference = torch.optim.Muon(theirs, 0.02, weight_decay=0.0, nesterov=nesterov)
    train_parts((optimizer, reference), theirs, ours, lambda whole: [p.grad for p in whole], steps=2)
    assert moved_apart([p.cpu() for p in ours], theirs, start) < BF16


def test_work_is_shared_evenly():
    costs = [5.0, 1.0, 1.0, 4.0, 3.0, 3.0, 3.0]
    taken = muon_sharding.assign(costs, 3)
    assert sorted(i for share in taken for i in share) == list(range(len(costs)))
    assert max(sum(costs[i] for i in share) for share in taken) <= 4 / 3 * 7
    assert muon_sharding.assign([1.0], 3) == [[0], [], []]
