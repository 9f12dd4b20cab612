"""Optimizers on DTensors, on several processes of Gloo: what ``test_optimizers_sharded.py`` starts.

    python sharded_optimizers.py CASE PROCESSES MEETING_PLACE [cuda]

Every process also steps whole copies of the same parameters alone, with which the shards are compared.
"""

import os
import sys

import torch
import torch.distributed as dist
from saved_states import through_a_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from weft import ops, optim
from weft.optim import AdamW, AdamW8bit, MuonW

DEVICE = sys.argv[4] if len(sys.argv) > 4 else "cpu"  # cuda: NCCL, a GPU for each process
# One has no row for the second of two processes.
SHAPES = ((24, 40), (41, 24), (32, 32), (24, 40), (1, 20), (24, 40), (6,))


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def made(shapes, mesh=None, placements=()):
    whole = [random(shape, i) for i, shape in enumerate(shapes)]
    if mesh is None:
        return [torch.nn.Parameter(w) for w in whole]
    return [torch.nn.Parameter(distribute_tensor(w, mesh, placements)) for w in whole]


def set_gradients(params, seed):
    for i, p in enumerate(params):
        g = random(p.shape, 1000 * (seed + 1) + i)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else g


def train(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()


def whole(params):
    return [p.detach().full_tensor() if hasattr(p, "device_mesh") else p.detach() for p in params]


def assert_same_way(ours, theirs, start, share):
    """As far apart, at most, as this share of the way that the others went."""
    for i, (a, b, s) in enumerate(zip(whole(ours), whole(theirs), whole(start), strict=True)):
        way = float((b - s).norm())
        assert way > 0 and float((a - b).norm()) <= share * way, (i, tuple(a.shape), float((a - b).norm()) / way)


class Counted:
    """How many elements were orthogonalised here, and how many all-to-alls were called, while it is in use."""

    def __enter__(self):
        self.elements = self.exchanges = 0
        self.real = ops.newton_schulz, dist.all_to_all_single

        def orthogonalised(stack, *arguments, **options):
            self.elements += stack.numel()
            return self.real[0](stack, *arguments, **options)

        def exchanged(*arguments, **options):
            self.exchanges += 1
            return self.real[1](*arguments, **options)

        ops.newton_schulz, dist.all_to_all_single = orthogonalised, exchanged
        return self

    def __exit__(self, *_):
        ops.newton_schulz, dist.all_to_all_single = self.real


def compare_muon(shapes, mesh, placements, share_of_work, exchanges=None, group=None, **options):
    """The parameters, after steps as close to those of whole ones as rounding allows. A process group shares whole matrices."""
    alone, ours = made(shapes), made(shapes, mesh, placements)
    options["ns_dtype"] = torch.float32
    train(MuonW(alone, 0.02, **options), alone, 3)
    with Counted() as counted:
        train(MuonW(ours, 0.02, process_group=group, **options), ours, 3)
    # stacks of other sizes are multiplied in another order
    assert_same_way(ours, alone, made(shapes), 1e-5)
    total = 3 * sum(p.numel() for p in alone if p.ndim > 1)
    low, high = share_of_work
    assert low * total <= counted.elements <= high * total, (counted.elements, total)
    assert exchanges in (None, counted.exchanges), counted.exchanges
    return ours


def same_bits(kind, shapes, mesh, placements, **options):
    """The parameters and their optimizer, after steps to the bits of whole parameters."""
    alone, ours = made(shapes), made(shapes, mesh, placements)
    optimizer = kind(ours, **options)
    train(kind(alone, **options), alone, 3)
    train(optimizer, ours, 3)
    assert all(a.equal(b) for a, b in zip(whole(ours), whole(alone), strict=True)), (kind, options)
    return ours, optimizer


def muon(rank, mesh):
    half, twice_a_step = (0.3, 0.7), 6
    compare_muon(SHAPES, mesh, [Shard(0)], half, twice_a_step)
    compare_muon(SHAPES[:-1], mesh, [Shard(1)], half, twice_a_step, nesterov=False)
    compare_muon(SHAPES, mesh, [Replicate()], half, 0)
    for options in ({"update_rms": 0.2}, {"split_rows": 2}, {"split_rows": (8, 12, 4)}):
        compare_muon([SHAPES[0]] * 4, mesh, [Shard(0)], half, twice_a_step, **options)
    compare_muon([(8, 3, 2, 2), (9, 4, 3, 3)], mesh, [Shard(0)], (0.1, 0.9), twice_a_step)
    experts = [(5, 8, 12), (4, 12, 8)]  # whole matrices lie on each process
    compare_muon(experts, mesh, [Shard(0)], half, 0, higher_dims="batch")
    compare_muon(experts, mesh, [Shard(1)], half, twice_a_step, higher_dims="batch")
    compare_muon([(1, 8, 12)], mesh, [Shard(0)], (1.0 - rank, 1.0 - rank), 0, higher_dims="batch")


def muon_of_whole_matrices(rank, mesh):
    """A process group shares the work; every process has the same weights after it."""
    for options in ({}, {"update_rms": 0.2}, {"split_rows": 2}):
        shapes = [(24, 40), (40, 24), (32, 32), (24, 40), (24, 40), (6,)]
        ours = compare_muon(shapes, None, (), (0.3, 0.7), group=dist.group.WORLD, **options)
        flat = torch.cat([p.detach().flatten() for p in ours])
        both = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(both, flat)
        assert both[0].equal(both[1])
    one = made([(5, 4)])
    train(MuonW(one, process_group=dist.group.WORLD, ns_dtype=torch.float32), one, 1)  # a process with nothing to do


def muon_in_bf16(rank, mesh):
    """Results travel in the iteration's dtype, momenta in the gradients'."""
    alone, ours = made(SHAPES), made(SHAPES, mesh, [Shard(0)])
    train(MuonW(alone, 0.02), alone, 3)
    train(MuonW(ours, 0.02), ours, 3)
    assert_same_way(ours, alone, made(SHAPES), 1e-2)

    alone = [torch.nn.Parameter(p.detach().bfloat16()) for p in made(SHAPES[:4])]
    ours = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in alone]
    for params in (alone, ours):
        for p in params:
            p.grad = torch.cos(3 * p.detach())
        optimizer = MuonW(params, 0.02)
        optimizer.step()
        assert all(optimizer.state[p]["momentum_buffer"].dtype == torch.bfloat16 for p in params)
    for a, b in zip(whole(ours), alone, strict=True):  # a step may round to the next number
        torch.testing.assert_close(a, b.detach(), rtol=2**-7, atol=0.02 * 1e-2)


def muon_under_fsdp(rank, mesh):
    """Real gradients; saved halfway and resumed to the same bits; the gradient of one process not finite."""

    def model(sharded):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(10, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7)).to(DEVICE)
        for layer in net if sharded else ():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh) if sharded else net

    def steps(net, optimizer, first, count):
        for step in range(first, first + count):
            optimizer.zero_grad()
            x = random((16, 10), step)  # the same for all: the mean over processes is what one process computes
            (net(x) - x[:, :7].sin()).square().mean().backward()
            optimizer.step()

    options = {"lr": 0.02, "ns_dtype": torch.float32, "skip_nonfinite": True}
    alone, ours, again, start = model(False), model(True), model(True), model(False)
    a, b = MuonW(alone.parameters(), **options), MuonW(ours.parameters(), **options)
    steps(alone, a, 0, 6)
    steps(ours, b, 0, 3)
    weights, states = through_a_file((ours.state_dict(), b.state_dict()), weights_only=False)
    again.load_state_dict(weights)
    c = MuonW(again.parameters(), lr=1.0, skip_nonfinite=True)
    c.load_state_dict(states)
    for net, optimizer in ((ours, b), (again, c)):
        steps(net, optimizer, 3, 3)
    assert_same_way(list(ours.parameters()), list(alone.parameters()), list(start.parameters()), 1e-4)
    assert all(p.to_local().equal(q.to_local()) for p, q in zip(ours.parameters(), again.parameters(), strict=True))

    before = [p.to_local().detach().clone() for p in ours.parameters()]
    if rank == 1:
        next(ours.parameters()).grad.to_local()[0, 0] = torch.nan
    b.step()
    assert b.skipped_steps == 1 and all(p.to_local().equal(x) for p, x in zip(ours.parameters(), before, strict=True))
    steps(ours, b, 6, 1)
    assert b.skipped_steps == 1 and not next(ours.parameters()).to_local().equal(before[0])


def muon_refuses(rank, mesh):
    ours = made(SHAPES[:1], mesh, [Shard(0)])
    optimizer = MuonW(ours)
    ours[0].grad = distribute_tensor(random(SHAPES[0], 0), mesh, [Replicate()])
    assert "placed as" in refusal(RuntimeError, optimizer.step)
    train(optimizer, ours, 1)
    optimizer.state[ours[0]]["momentum_buffer"] = random(SHAPES[0], 0)  # whole, as of a run without shards
    assert "momentum_buffer has the shape (24, 40), its gradient (12, 40)" in refusal(ValueError, optimizer.step)


def refusal(kind, call) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def element_wise(rank, mesh):
    """Optimizers that need no neighbours step each shard where it lies, to the bits of whole parameters."""
    for name in ("Adam", "AdamW", "SGD", "Lion"):
        extra = {"momentum": 0.9} if name == "SGD" else {}
        same_bits(getattr(optim, name), ((24, 40), (41, 24), (1, 20), (6,)), mesh, [Shard(0)], lr=0.01, **extra)


def eight_bits(rank, mesh):
    """Blocks of a shard that starts on a block's boundary are those of the whole parameter."""
    options = {"lr": 0.01, "min_8bit_size": 2048, "block_size": 128}
    for kept in ({}, {"state_format": "fp8"}, {"amsgrad": True}):
        ours, b = same_bits(AdamW8bit, ((64, 64), (32, 256), (3, 5)), mesh, [Shard(0)], **options, **kept)
        state = b.state[ours[0]]
        assert state["exp_avg_codes"].placements == (Shard(0),) and state["exp_avg_scales"].shape == (16,)

        again = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        c = AdamW8bit(again)
        c.load_state_dict(through_a_file(b.state_dict(), weights_only=False))
        for params, optimizer in ((ours, b), (again, c)):
            train(optimizer, params, 2, first=3)
        assert all(p.to_local().equal(q.to_local()) for p, q in zip(ours, again, strict=True))


def muon_on_two_dimensions(rank, mesh):
    matrices = [*SHAPES[:6], (24, 40), (24, 40)]
    quarter = (0.1, 0.45)
    compare_muon(SHAPES, mesh, [Replicate(), Shard(0)], quarter, 6)  # replicas of shards
    compare_muon(SHAPES, mesh, [Replicate(), Replicate()], quarter, 0)
    compare_muon(matrices, mesh, [Shard(0), Shard(1)], quarter, 12)
    compare_muon([(24, 40)] * 8, mesh, [Shard(0), Shard(0)], quarter, 12, split_rows=(16, 8))
    compare_muon([(8, 8, 12)] * 2, mesh, [Shard(0), Shard(1)], (0.25, 0.25), 6, higher_dims="batch")

    # Tensor parallelism first, then FSDP along the same rows. Rows that are joined in another order change nothing, as their
    # polar factor is in that order too; unless parts are orthogonalised on their own.
    whole_weight = random((24, 10), 5)
    layer = torch.nn.Linear(10, 24, bias=False, device=DEVICE)
    layer.weight = torch.nn.Parameter(distribute_tensor(whole_weight.clone(), mesh["b"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["a"])
    alone = [torch.nn.Parameter(whole_weight.clone())]
    assert hasattr(layer.weight.placements[0], "split_factor")
    options = {"lr": 0.02, "ns_dtype": torch.float32, "split_rows": 2}
    optimizers = MuonW(alone, **options), MuonW(layer.parameters(), **options)

    def rows_here(t):
        return t.chunk(2)[mesh["b"].get_local_rank()].chunk(2)[mesh["a"].get_local_rank()]

    for step in range(3):
        alone[0].grad = random((24, 10), 50 + step)
        layer.weight.grad = torch.zeros_like(layer.weight)
        layer.weight.grad.to_local().copy_(rows_here(alone[0].grad))
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(layer.weight.to_local().detach(), rows_here(alone[0].detach()), rtol=0, atol=1e-6)


def adamw_on_two_dimensions(rank, mesh):
    same_bits(AdamW, ((24, 40), (41, 24)), mesh, [Shard(0), Shard(1)], lr=0.01)


MUON = (muon, muon_of_whole_matrices, muon_in_bf16, muon_refuses, muon_under_fsdp)
CASES = {
    "two_processes": (*MUON, element_wise, eight_bits),
    "element_wise": (element_wise, eight_bits),
    "two_dimensions": (muon_on_two_dimensions, adamw_on_two_dimensions),
}


def process(rank, device, case, processes, place):
    global DEVICE
    DEVICE = device  # not among a spawned process's arguments
    torch.set_num_threads(1)
    backend, options = "gloo", {}
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        backend, options = "nccl", {"device_id": torch.device("cuda", rank)}
    store = dist.FileStore(place, processes)
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes, **options)
    shape, names = ((2,), ("a",)) if processes == 2 else ((2, 2), ("a", "b"))
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    for run in CASES[case]:
        run(rank, mesh)
    leave(store, rank, processes)


def leave(store, rank, processes):
    """When all have received what they were sent, and without taking the interpreter down: meshes keep their groups, whose Gloo
    threads outlive ``destroy_process_group``, and one that then lets go of a Python object ends in ``std::terminate``."""
    store.set(f"done by {rank}", "")
    store.wait([f"done by {r}" for r in range(processes)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    case, processes, place = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if "TRITON_INTERPRET" in os.environ:
        import quick_interpreter  # noqa: F401
    how = "fork" if DEVICE == "cpu" else "spawn"  # forked, they need not import everything again
    torch.multiprocessing.start_processes(process, (DEVICE, case, processes, place), processes, start_method=how)
