"""Muon and MuonW: the steps of PyTorch's Muon, on one process and on several, saved and resumed."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
from where import DEVICE, python

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
from saved_states import resumed  # noqa: E402
from torch.optim._muon import _zeropower_via_newtonschulz  # noqa: E402

from weft import ops  # noqa: E402
from weft.operators import call  # noqa: E402
from weft.operators.optimizer import fastest  # noqa: E402
from weft.optim import muon_matrices  # noqa: E402
from weft.optim.adam import AdamW  # noqa: E402
from weft.optim.muon import Muon, MuonW  # noqa: E402

# ---- PyTorch's Muon --------------------------------------------------------------------------------------------------

OPTIONS = [
    {"lr": 0.02, "nesterov": n, "adjust_lr_fn": a, "weight_decay": w, "momentum": m}
    for (n, a, w), m in zip(
        itertools.product((True, False), (None, "original", "match_rms_adamw"), (0.0, 0.1)),
        itertools.cycle((0.95, 0.5)),
    )
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


def test_muon_is_muonw_without_decay():
    ours, theirs = parameters(), parameters()
    train(Muon(ours, 0.02), ours, 3)
    train(MuonW(theirs, 0.02, 0.0), theirs, 3)
    assert same_bits(ours, theirs)


def test_state_dicts_go_both_ways():
    options = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = parameters(), parameters()
    mine, pytorchs = MuonW(ours, **options), torch.optim.Muon(theirs, **options)
    train(pytorchs, theirs, 3)
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.data)
    other = MuonW(ours, lr=1.0, split_rows=1)
    other.load_state_dict(copy.deepcopy(pytorchs.state_dict()))
    group = other.param_groups[0]
    assert (
        {k: group[k] for k in options} == options and group["split_rows"] == 1 and group["ns_dtype"] == torch.bfloat16
    )
    assert all(
        other.state[p]["momentum_buffer"].equal(pytorchs.state[q]["momentum_buffer"])
        for p, q in zip(ours, theirs, strict=True)
    )
    mine.load_state_dict(copy.deepcopy(pytorchs.state_dict()))  # which otherwise would share momenta
    start = [p.detach().clone() for p in ours]
    train(mine, ours, 2, first=3)
    train(pytorchs, theirs, 2, first=3)
    assert moved_apart(ours, theirs, start) < BF16

    back = parameters()
    for p, q in zip(back, ours, strict=True):
        p.data.copy_(q.data)
    again = torch.optim.Muon(back, lr=1.0)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert {k: again.param_groups[0][k] for k in options} == options
    start = [p.detach().clone() for p in ours]
    train(mine, ours, 2, first=5)
    train(again, back, 2, first=5)
    assert moved_apart(ours, back, start) < BF16


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


# ---- what is a matrix ------------------------------------------------------------------------------------------------


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
    train(Muon(params), params, 1)
    assert sorted(seen) == [(1, 12, 8), (3, 8, 12)]
    seen.clear()
    monkeypatch.setattr(muon_matrices, "STACKED", 200)
    train(Muon(params), params, 1)
    assert sorted(seen) == [(1, 8, 12), (1, 12, 8), (2, 8, 12)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the engine's, PyTorch's
def test_what_is_no_matrix_takes_adamw(dtype):
    ours, theirs = parameters(((24,), (8, 12), (), (5, 6)), dtype), parameters(((24,), (8, 12), (), (5, 6)), dtype)
    groups = [{"params": ours[:3]}, {"params": ours[3:], "use_muon": False, "lr": 0.003, "weight_decay": 0.2}]
    optimizer = MuonW(groups, 0.01, betas=(0.8, 0.95), adamw_eps=1e-6)
    kept = {"betas": (0.8, 0.95), "eps": 1e-6}
    reference = AdamW(
        [
            {"params": [theirs[0], theirs[2]], "lr": 0.01, "weight_decay": 0.1, **kept},
            {"params": [theirs[3]], "lr": 0.003, "weight_decay": 0.2, **kept},
        ]
    )
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
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_adamws_table_is_made_once(monkeypatch):
    real, made = fastest.table, []
    monkeypatch.setattr(fastest, "table", lambda *arguments: made.append(1) or real(*arguments))
    params = [torch.nn.Parameter(p.detach().to(DEVICE)) for p in parameters(((4, 6), (6,)))]
    optimizer = MuonW(params)
    for step in range(4):
        for p in params:
            p.grad = torch.full_like(p, step + 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            made.clear()  # the first step makes momenta too, which it may be told of
    assert len(made) <= 1
    state = optimizer.state_dict()["state"][1]
    assert state["step"].device.type == "cpu" and float(state["step"]) == 4


def test_convolutions_are_flattened_and_experts_are_batches():
    conv, flat = parameters(((8, 3, 2, 2),)), parameters(((8, 12),))
    for params in (conv, flat):
        train(Muon(params, adjust_lr_fn="match_rms_adamw"), params, 3)
    assert conv[0].flatten(1).equal(flat[0])

    last = [torch.nn.Parameter(parameters(((8, 3, 2, 2),))[0].detach().to(memory_format=torch.channels_last))]
    train(Muon(last, adjust_lr_fn="match_rms_adamw"), last, 3)
    torch.testing.assert_close(last[0], conv[0], rtol=1e-2, atol=1e-4)

    (experts,) = parameters(((3, 8, 12),))
    alone = [torch.nn.Parameter(m.detach().clone()) for m in experts]
    optimizers = Muon([experts], higher_dims="batch"), Muon(alone)
    for step in range(3):
        set_gradients([experts], step)
        for p, g in zip(alone, experts.grad, strict=True):
            p.grad = g.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert experts.equal(torch.stack([p.detach() for p in alone]))


@pytest.mark.parametrize(("split", "sizes"), [(3, (8, 8, 8)), ((16, 4, 4), (16, 4, 4))])
@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw"}, {"update_rms": 0.2}])
def test_a_fused_projection_is_orthogonalised_in_parts(split, sizes, options):
    (fused,) = parameters(((24, 10),))
    parts = [torch.nn.Parameter(t.detach().clone()) for t in fused.split(sizes)]
    optimizers = Muon([fused], split_rows=split, **options), Muon(parts, **options)
    start = fused.detach().clone()
    for step in range(3):
        set_gradients([fused], step)
        for p, g in zip(parts, fused.grad.split(sizes), strict=True):
            p.grad = g.clone()
        for optimizer in optimizers:
            optimizer.step()
    whole = torch.cat([p.detach() for p in parts])
    assert moved_apart([fused], [whole], [start]) < 1e-5  # unequal parts are scaled before they are added, not while


@pytest.mark.parametrize("rms", [0.2, 1.0])
def test_updates_have_the_root_mean_square_asked_for(rms):
    params = parameters()
    before = [p.detach().clone() for p in params]
    train(Muon(params, lr=0.5, update_rms=rms), params, 1)
    for p, b in zip(params, before, strict=True):
        assert float((p.detach() - b).square().mean().sqrt()) == pytest.approx(0.5 * rms, rel=1e-4)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(64, 16), (16, 64)])
def test_factors_are_those_of_the_rules(rule, shape):
    (p,) = parameters((shape,))
    before = p.detach().clone()
    train(Muon([p], lr=1.0, adjust_lr_fn=rule, ns_coefficients="polar-express", ns_steps=8), [p], 1)
    m, n = shape
    factor = max(1, m / n) ** 0.5 if rule == "original" else 0.2 * max(m, n) ** 0.5
    values = torch.linalg.svdvals((p - before).detach())
    torch.testing.assert_close(values, torch.full_like(values, factor), rtol=0.05, atol=0)  # orthogonal up to bf16


def test_a_small_network_learns():
    torch.manual_seed(0)
    x = torch.randn(128, 20)
    y = torch.sin(x @ torch.randn(20, 5))
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5))
    optimizer = MuonW(model.parameters(), 0.02, adjust_lr_fn="match_rms_adamw")

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(100)]
    assert losses[-1] < 0.3 * losses[0]


# ---- our kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("nesterov", [True, False])
def test_kernels_of_ours_make_the_same_steps(nesterov, monkeypatch):
    monkeypatch.setattr(call, "INTERPRETING", DEVICE == "cpu")
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    ours = [torch.nn.Parameter(p.detach().to(DEVICE)) for p in parameters()]
    assert ops.explain("newton_schulz", ours[0].detach()).implementation == "triton"
    optimizer = Muon(ours, 0.02, nesterov=nesterov, ns_dtype=dtype)
    theirs, start = parameters(), parameters()
    reference = torch.optim.Muon(theirs, 0.02, weight_decay=0.0, nesterov=nesterov)
    for step in range(2):
        set_gradients(theirs, step)
        for p, q in zip(ours, theirs, strict=True):
            p.grad = q.grad.to(DEVICE)
        optimizer.step()
        reference.step()
    assert moved_apart([p.cpu() for p in ours], theirs, start) < BF16


def test_the_example_compares_both():
    done = python("-W", "error", "examples/muon_against_adamw.py", "20")
    assert done.returncode == 0, done.stderr
    assert "AdamW at 0.0" in done.stdout and "MuonW at 0.0" in done.stdout


# ---- several processes -----------------------------------------------------------------------------------------------


def test_work_is_shared_evenly():
    costs = [5.0, 1.0, 1.0, 4.0, 3.0, 3.0, 3.0]
    taken = muon_matrices.shares(costs, 3)
    assert sorted(i for share in taken for i in share) == list(range(len(costs)))
    assert max(sum(costs[i] for i in share) for share in taken) <= 4 / 3 * 7
    assert muon_matrices.shares([1.0], 3) == [[0], [], []]


SHARED = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, "tests/optim")
from weft import ops
from weft.optim.muon import MuonW
from muon_samples import call, parameters, train

def run(rank, path):
    call.INTERPRETING = False  # which importing the tests has switched on
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    real, done = ops.newton_schulz, []
    def counted(stack, *arguments, **options):
        done.append(stack.numel())
        return real(stack, *arguments, **options)
    for options in ({}, {"update_rms": 0.2}, {"split_rows": 2}):
        shapes = ((24, 40), (40, 24), (32, 32), (24, 40), (24, 40), (6,))
        alone, shared = parameters(shapes), parameters(shapes)
        train(MuonW(alone, 0.02, **options), alone, 3)
        ops.newton_schulz, total = counted, sum(p.numel() for p in shared[:5]) * 3
        done.clear()
        train(MuonW(shared, 0.02, process_group=dist.group.WORLD, **options), shared, 3)
        ops.newton_schulz = real
        assert 0.3 * total < sum(done) < 0.7 * total, (sum(done), total)
        for a, b, s in zip(alone, shared, parameters(shapes)):
            assert float((a - b).norm()) < 1e-2 * float((a - s).norm())
        flat = torch.cat([p.detach().flatten() for p in shared])
        both = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(both, flat)
        assert both[0].equal(both[1])
    (one,) = parameters(((5, 4),))
    train(MuonW([one], process_group=dist.group.WORLD), [one], 1)  # a process with nothing to do
    dist.barrier()  # a process that leaves while another still receives breaks its connection
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
"""


def test_two_processes_share_the_work_and_have_the_same_weights(tmp_path):
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    done = python(str(script), str(tmp_path / "meeting"))
    assert done.returncode == 0, done.stderr
