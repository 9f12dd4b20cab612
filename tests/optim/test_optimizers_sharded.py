"""Optimizers on DTensors: each shard where it lies, and Muon's matrices brought together; on several processes of Gloo."""

import pytest
import torch
from optimizer_samples import assert_close
from where import DEVICE, ROOT, printed

from weft import optim
from weft.optim.muon_sharding import rows_at


def run(case, processes, place, device="cpu", **variables):
    script = str(ROOT / "tests/optim/sharded_optimizers.py")
    variables["OMP_NUM_THREADS"] = "1"  # Python warns about a process with threads that is forked
    printed("-W", "error", script, case, str(processes), str(place / "meeting"), device, timeout=480, **variables)


OURS = {"TRITON_INTERPRET": "1"}  # kernels of ours step the shards


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("case", "processes", "variables"), [("two_processes", 2, {}), ("element_wise", 2, OURS), ("two_dimensions", 4, {})]
)
def test_several_processes_make_ones_steps(case, processes, variables, tmp_path):
    run(case, processes, tmp_path, **variables)


@pytest.mark.gpu
def test_two_gpus_make_ones_steps(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run("two_processes", 2, tmp_path, "cuda")


@pytest.mark.parametrize(("rows", "processes"), [(0, 2), (1, 2), (7, 3), (8, 4), (5, 4), (41, 8)])
def test_rows_are_those_of_torch_chunk(rows, processes):
    chunks = [len(c) for c in torch.arange(rows).chunk(processes)] if rows else []
    assert rows_at(rows, processes) == chunks + [0] * (processes - len(chunks))


@pytest.mark.device
def test_shards_of_a_dtensor_are_stepped_where_they_lie(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        whole = torch.randn(6, 4, device=DEVICE)
        p = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
        q = torch.nn.Parameter(whole.clone())
        a, b = optim.AdamW([p], lr=1e-2), torch.optim.AdamW([q], lr=1e-2)
        for step in range(3):
            q.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            p.grad = distribute_tensor(q.grad.clone(), mesh, [Shard(0)])
            a.step()
            b.step()
        assert isinstance(a.state[p]["exp_avg"], DTensor)
        with pytest.raises(RuntimeError, match="a parameter is sharded"):
            optim.AdamW([p], max_norm=1.0).step()
        assert_close([p.to_local()], [q], 3)
    finally:
        dist.destroy_process_group()
