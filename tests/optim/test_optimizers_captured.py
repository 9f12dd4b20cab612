"""The optimizers' step compiled for every architecture; captured and compiled on a GPU."""

from __future__ import annotations

import copy

import pytest
from where import DEVICE, ROOT, python

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from optimizer_samples import assert_close, set_gradients, weights  # noqa: E402

from weft import optim  # noqa: E402
from weft.operators.optimizer.entry import Entry  # noqa: E402
from weft.operators.optimizer.table import Table  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def test_every_kind_compiles_for_every_architecture():
    done = python(str(ROOT / "tests/optim/compiled_optimizers.py"), "states")
    assert done.returncode == 0, done.stderr


def test_more_states_than_a_row_holds_are_refused():
    from weft.operators.optimizer.adam_rule import ADAM

    p = torch.zeros(3, device=DEVICE)
    options = {"lr": 1.0, "betas": (0.9, 0.9), "eps": 0.0, "weight_decay": 0.0, "amsgrad": False}
    with pytest.raises(ValueError, match="keeps 6 states of a weight; expected at most 5"):
        Table(ADAM, [Entry(p, (p,) * 6, p, options)])


# ---- what only a GPU shows -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"skip_nonfinite": True, "zero_grads": True}])
def test_a_captured_step_is_replayed(options):
    """Gradients in the graph's memory; between replays an eager step with others, which must not change what is replayed."""
    rate = torch.tensor(1e-2, device="cuda")
    mine, theirs = weights(), weights()
    a, b = optim.AdamW(mine, lr=rate, **options), optim.AdamW(theirs, lr=rate, **options)
    static = [torch.empty_like(p) for p in mine]

    def load(seed):
        set_gradients(theirs, seed=seed)
        for s, q in zip(static, theirs, strict=True):
            s.copy_(q.grad)

    def use_static():
        for p, s in zip(mine, static, strict=True):
            p.grad = s

    load(0)
    use_static()
    a.step()
    b.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for seed in range(1, 6):
        load(seed)
        rate.fill_(1e-2 / seed)
        b.step()
        if seed == 3:
            for p, s in zip(mine, static, strict=True):
                p.grad = s.clone()
            a.step()
            use_static()
        else:
            graph.replay()
    torch.cuda.synchronize()
    for p, q in zip(mine, theirs, strict=True):
        assert p.equal(q)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # it is: the step is refused before anything is launched
def test_a_first_step_cannot_be_captured():
    mine = weights()
    set_gradients(mine)
    a = optim.AdamW(mine)
    with pytest.raises(RuntimeError, match="call it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        a.step()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_training_step():
    model = torch.nn.Linear(8, 8, device="cuda")
    twin = copy.deepcopy(model)
    a, b = optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    x = torch.randn(4, 8, device="cuda")

    @torch.compile
    def train(net, optimizer):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        train(model, a)
        train(twin, b)
    assert_close(list(model.parameters()), list(twin.parameters()), 30)
