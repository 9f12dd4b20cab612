"""Muon and MuonW on odd input: no gradients, no elements, NaN, other dtypes and devices; what is refused, in which words."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from muon_samples import (  # noqa: E402
    BF16,
    SHAPES,
    as_users_have_it,  # noqa: F401  (a fixture of every test here)
    moved_apart,
    parameters,
    same_bits,
    set_gradients,
    train,
)

from weft.optim.muon import Muon, MuonW  # noqa: E402


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
    Muon(params).step()
    assert bool(params[0].isnan().all()) and all(
        bool(p.isfinite().all()) for p in params[1:]
    )  # params[3] has its shape


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
    for step in range(3):
        set_gradients(on_cpu, step)
        for p, q in zip(mixed, on_cpu, strict=True):
            p.grad = q.grad.to(p.device)
        a.step()
        b.step()
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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"lr": "1e-3"}, "lr should be a number but is: '1e-3'"),
        ({"momentum": None}, "momentum should be a number but is: None"),
        ({"lr": float("nan")}, "Learning rate should be >= 0 but is: nan"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"momentum": -0.1}, "momentum should be >= 0 and <= 1 but is: -0.1"),
        ({"momentum": 1.5}, "but is: 1.5"),
        ({"momentum": float("nan")}, "but is: nan"),
        ({"weight_decay": -1}, "weight decay should be >= 0 but is: -1"),
        ({"weight_decay": float("nan")}, "weight decay should be >= 0 but is: nan"),
        ({"adjust_lr_fn": "none"}, "Adjust learning rate function none is not supported; expected original"),
        ({"ns_steps": 100}, "'steps' is 100; expected a whole number, 1 … 99"),
        ({"ns_coefficients": (1.0, 2.0)}, "a tuple of exactly 3 numbers"),
        ({"ns_coefficients": (1.0, float("nan"), 0.0)}, "ns_coefficients should be finite but are"),
        ({"ns_coefficients": "polar"}, "did you mean 'polar-express'"),
        ({"eps": 0.0}, "eps should be > 0 but is: 0.0"),
        ({"update_rms": 0.0}, "update_rms should be > 0 or None but is: 0.0"),
        ({"update_rms": 0.2, "adjust_lr_fn": "original"}, "expected one of them"),
        ({"ns_dtype": torch.float64}, "ns_dtype should be one of torch.bfloat16"),
        ({"higher_dims": "stack"}, "higher_dims should be one of flatten, batch but is: stack"),
        ({"split_rows": 0}, "split_rows should be a number of parts"),
        ({"split_rows": 5}, "split_rows is 5, which does not divide the 24 rows"),
        ({"split_rows": (8, 8)}, r"split_rows is \(8, 8\), 16 rows together; expected the 24 rows"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, float("nan"))}, "Invalid beta parameter at index 1: nan"),
        ({"adamw_eps": -1.0}, "Invalid epsilon value: -1.0"),
    ],
)
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
    with pytest.raises(TypeError, match="MuonW does"):
        Muon([p], weight_decay=0.1)
    with pytest.raises(TypeError, match=r"Muon: unknown option 'max_norm' \(there are: update_rms, .*skip_nonfinite\)"):
        Muon([torch.nn.Parameter(torch.ones(3, 3))], max_norm=1.0)
    with pytest.raises(ValueError, match=r"weight_decay is 0.1, and Muon decays no weights: MuonW does"):
        Muon([{"params": [p], "weight_decay": 0.1}])


def test_a_group_may_be_empty():
    a = MuonW([{"params": []}], skip_nonfinite=True)
    a.step()
    assert a.skipped_steps == 0


def test_gradients_that_cannot_be_taken_are_refused():
    (p,) = parameters(((4, 6),))
    p.grad = torch.ones(4, 6).to_sparse()
    with pytest.raises(RuntimeError, match="Muon does not support sparse gradients"):
        Muon([p]).step()
    z = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(RuntimeError, match="not support sparse gradients"):  # AdamW's words
        MuonW([{"params": [p], "use_muon": False}], skip_nonfinite=True).step()
    with pytest.raises(RuntimeError, match="Muon does not support complex parameters"):
        Muon([z]).step()


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
    with pytest.raises(ValueError, match="MuonW does"):
        Muon(parameters(((4, 6), (6, 4)))).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("index", "key", "value", "words"),
    [
        (0, "momentum_buffer", None, "'momentum_buffer' is missing; there are 'other'"),
        (0, "momentum_buffer", torch.ones(4, 6, dtype=torch.int32), "'momentum_buffer' is a tensor of torch.int32"),
        (1, "step", None, "'step' is missing; there are 'exp_avg', 'exp_avg_sq', 'other'"),
        (1, "exp_avg_sq", [1.0], r"'exp_avg_sq' is \[1.0\]; expected a tensor of floating-point numbers"),
    ],
)
def test_a_state_dict_that_is_not_whole_is_refused_and_nothing_is_loaded(index, key, value, words):
    params = parameters(((4, 6), (6,)))
    optimizer = MuonW(params, lr=0.5)
    train(optimizer, params, 1)
    broken, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    broken["param_groups"][0]["lr"] = 7.0
    broken["state"][index] |= {key: value, "other": 1}
    if value is None:
        del broken["state"][index][key]
    with pytest.raises(ValueError, match=f"loaded state dict, parameter {index}: {words}"):
        optimizer.load_state_dict(broken)
    assert optimizer.param_groups[0]["lr"] == 0.5
    for state, kept in zip(optimizer.state_dict()["state"].values(), before["state"].values(), strict=True):
        assert state.keys() == kept.keys() and all(state[k].equal(kept[k]) for k in kept)
