"""Gloo ranks that are processes, for what needs torch.distributed's process group."""

import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.comm.group import Group
from weft.comm.torch_transport import TorchTransport

DEADLINE_S = 60


class Alone:
    """Instead of ``weft.comm.checked.Control``: nothing is compared."""

    def __init__(self, rank):
        self.rank = rank


def _rank(rank, n, port, work, results):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
        group = Group(
            TorchTransport("gloo", dist.group.WORLD, list(range(n)), torch.device("cpu")), range(n), Alone(rank)
        )
        group.checked = False
        results.put((rank, work(group), ""))
        dist.destroy_process_group()
    except Exception:
        results.put((rank, None, traceback.format_exc()))


def on_gloo(n, work):
    """``work(group)`` on n ranks; what each returns (no tensors), in order of rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")  # a fork server may be another test's, which interprets kernels
    results = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(r, n, port, work, results), daemon=True) for r in range(n)]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "0")  # what users start interprets nothing
            for p in processes:
                p.start()
        for p in processes:
            p.join(DEADLINE_S)
        found = sorted((results.get() for _ in processes if not results.empty()), key=lambda f: f[0])
    finally:
        for p in processes:
            if p.is_alive():
                p.kill()
    assert [f[0] for f in found] == list(range(n)) and not any(f[2] for f in found), "\n".join(f[2] for f in found)
    return [f[1] for f in found]
