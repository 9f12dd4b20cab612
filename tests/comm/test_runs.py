"""``weft comm`` end to end on CPU ranks: right results, mutants rejected, ranks that die or hang named, no process left."""

import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest
from where import plain_environment

from weft.comm.collectives import COLLECTIVES
from weft.comm.settings import sizes

MPI = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed: pip install 'weft[mpi]'")

WRONG = """
import dataclasses, os, signal, time
import torch
from weft.comm import COLLECTIVES

def made(name, call, of="all_reduce"):
    return dataclasses.replace(COLLECTIVES[of], name=name, call=call)

def skips_last(g, b, **how):
    last = b.out[-1].clone()
    g.all_reduce(b.out, b.inp, **how)
    b.out[-1] = last

def as_neighbour(g, b, **how):
    g.all_gather(b.out, b.inp, **how)
    b.out.copy_(b.out.roll(b.part))

def other_shape(g, b, **how):
    return g.all_reduce(torch.zeros(7) if g.rank == 1 else b.out, **how)

def killed(g, b, **how):
    if g.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return g.all_reduce(b.out, b.inp, **how)

def hangs(g, b, **how):  # unchecked: the others are in the collective
    with g.control.region("all_reduce of all"):
        if g.rank == 1:
            time.sleep(1000)
        g.transport.all_reduce(b.out, b.inp, "sum", True)
"""
CALLS = {
    "wrong": "a = made('nothing', lambda g, b, **how: None)\nb = made('last', skips_last)\n"
    "c = made('neighbour', as_neighbour, 'all_gather')\nd = made('shape', other_shape)\n",
    "killed": "a = made('killed', killed)\n",
    "hangs": "a = made('hangs', hangs)\n",
}


@pytest.fixture
def comm(tmp_path):
    """Runs a command; afterwards no process that it started is left. Status, standard output, standard error."""
    mark = uuid.uuid4().hex

    def run(*words, launcher=(), **variables):
        env = plain_environment() | {"WEFT_TEST_MARK": mark, "WEFT_RESULTS": str(tmp_path / "results"), **variables}
        command = [*launcher, *([] if launcher else [sys.executable]), "-m", "weft", "comm", *map(str, words)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    run.mark = mark
    yield run
    until = time.monotonic() + 5
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.1)
    assert not marked(mark)


def marked(mark: str) -> list[str]:
    """Processes that have the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


@pytest.fixture
def wrong(tmp_path):
    def file(which: str) -> Path:
        path = tmp_path / f"{which}.py"
        path.write_text(WRONG + CALLS[which])
        return path

    return file


FEW = ("--min", "1K", "-e", "64K", "--factor", "8", "--iterations", "5")


def records(out: str) -> list[dict]:
    found = json.loads(out)
    assert list(found) == ["records"]
    return found["records"]


def check(found: list[dict], ranks: int, backend: str) -> None:
    """nccl-tests' relations, and that nothing is wrong."""
    for r in found:
        name = r["collective"]
        assert r["wrong"] == 0, name
        assert (r["ranks"], r["backend"], r["dtype"]) == (ranks, backend, "fp32")
        assert r["time_us"] > 0 and r["p50_us"] <= r["p99_us"] <= r["max_us"]
        assert r["algbw"] == pytest.approx(r["bytes"] / r["time_us"] / 1e3, rel=1e-12)
        factor = {
            "all_reduce": 2 * (ranks - 1) / ranks,
            **dict.fromkeys(("broadcast", "reduce", "send_recv", "ring_shift"), 1),
            "all_to_all_uneven": (ranks - 0.75) / ranks,
        }.get(name, (ranks - 1) / ranks)
        assert r["busbw"] == pytest.approx(r["algbw"] * factor, rel=1e-12)


BACKENDS = ["gloo", pytest.param("mpi", marks=MPI)]


@pytest.mark.share(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_on_four_ranks(comm, backend):
    code, out, err = comm("--ranks", 4, "--backend", backend, "--json", *FEW)
    assert code == 0, err
    found = records(out)
    check(found, 4, backend)
    assert {r["collective"] for r in found} == set(COLLECTIVES)
    for name in COLLECTIVES:
        of_name = [r["bytes"] for r in found if r["collective"] == name]
        assert of_name == ([0] if name == "barrier" else sizes(1 << 10, 64 << 10, 8))


@pytest.mark.share(4)
def test_three_ranks_reject_mutants_and_name_another_shape(comm, wrong):
    """The measurements before the failure are printed; sizes are what three ranks can share."""
    code, out, err = comm("all_gather", wrong("wrong"), "--ranks", 3, "--backend", "gloo", "--json", *FEW[2:])
    assert code == 1
    found = records(out)
    assert [r["bytes"] for r in found if r["collective"] == "all_gather"] == [1020, 8184, 65532]
    bad = {r["collective"]: r["wrong"] for r in found if r["bytes"] > 60_000}
    assert bad["all_gather"] == 0
    assert bad["nothing"] > 3 * 2 * 16_000 and bad["neighbour"] > 3 * 2 * 10_000
    assert bad["last"] == 3 * 2  # one element a rank, before and after timing
    assert "shape" not in bad
    assert "rank 1 calls all_reduce of shape (7,) float32" in err and "rank 0 calls all_reduce of shape (256,)" in err


@pytest.mark.share(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_rank_is_named_with_its_collective(comm, wrong, backend):
    started = time.monotonic()
    words = ("barrier", wrong("killed"), "--ranks", 3, "--backend", backend, "--json", "--deadline", 30, *FEW)
    code, out, err = comm(*words)
    assert code == 1 and [r["collective"] for r in records(out)] == ["barrier"]
    assert "rank 2 was ended by signal 9" in err and "in checking killed 1024 B fp32" in err
    assert time.monotonic() - started < 60


@pytest.mark.share(4)
def test_hanging_rank_is_named_after_the_deadline(comm, wrong):
    code, out, err = comm("barrier", wrong("hangs"), "--ranks", 3, "--backend", "gloo", "--deadline", 3, *FEW)
    assert code == 1 and "# barrier" in out
    assert "rank 1 is in all_reduce of all since 3 s, at hangs.py" in err


@pytest.mark.share(3)
def test_joins_torchrun_with_dtypes_modes_and_subgroups(comm):
    words = ("all_reduce", "all_gather", "--backend", "gloo", "--dtype", "bf16", "--op", "max", "--mode", "async")
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    )
    launcher = (*torchrun, "--rdzv-backend", "c10d")
    code, out, err = comm(*words, "--subgroups", 2, "--json", *FEW, launcher=launcher, GLOO_SOCKET_IFNAME="lo")
    assert code == 0, err
    found = records(out)
    assert len(found) == 2 * 3 and all(r["wrong"] == 0 and r["subgroups"] == 2 and r["ranks"] == 4 for r in found)
    assert all(r["busbw"] == pytest.approx(r["algbw"] * (1 if r["collective"] == "all_reduce" else 0.5)) for r in found)


@MPI
@pytest.mark.share(3)
def test_joins_mpirun_in_place_and_saves(comm, tmp_path):
    mpirun = str(Path(sys.executable).parent / "mpirun")
    if not os.access(mpirun, os.X_OK):
        pytest.skip("no mpirun beside this Python")
    launcher = (mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable)
    words = ("all_reduce", "reduce_scatter", "--backend", "mpi", "--place", "in", "--save", "--json", *FEW)
    code, out, err = comm(*words, launcher=launcher, OMPI_MCA_mpi_yield_when_idle="1")
    assert code == 0, err
    found = records(out)
    assert len(found) == 2 * 3 and all(r["wrong"] == 0 and r["in_place"] for r in found)
    (saved,) = (tmp_path / "results").glob("*/comm.jsonl")
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert lines[0]["about"]["peak"]["gb_s"] > 0 and "shm_free_bytes" in lines[0]["about"]
    assert [line["time_us"] for line in lines[1:]] == [r["time_us"] for r in found]


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_end_with_the_process_that_started_them(comm, wrong, tmp_path, backend):
    env = plain_environment() | {"WEFT_TEST_MARK": comm.mark}
    words = [sys.executable, "-m", "weft", "comm", str(wrong("hangs")), "--ranks", "3", "--backend", backend, *FEW]
    parent = subprocess.Popen(words, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(marked(comm.mark)) < 4 and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()


def test_something_else_at_the_rendezvous_is_one_line(comm):
    """PyTorch's own pages of frames are kept off."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{server.server_address[1]}"}
        code, out, err = comm(
            "all_reduce", "--backend", "gloo", "--deadline", 1, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", **where
        )
        server.shutdown()
    assert (
        (code, out) == (1, "")
        and len(err.splitlines()) == 1
        and "rank 1 cannot open the rendezvous at 127.0.0.1" in err
    )


class Other(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
