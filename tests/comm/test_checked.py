"""Checked mode, with threads as ranks: what ranks disagree about is found before the call, within a second, and named."""

import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from weft.comm import ranks
from weft.comm.checked import CollectiveFailed, Control, Mismatch, Missing
from weft.comm.group import Group


class NoTransport:
    """Calls that return at once: what is tested comes before them."""

    backend, operators = "none", ("sum", "max")

    def __getattr__(self, name):
        return lambda *given: NoTransport() if name == "subgroups" else None


@pytest.fixture
def together():
    """Runs one function a rank, as ``f(group)``; what each raised (None: nothing), and the seconds of all."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(*functions, deadline_s=20.0):
        raised = [None] * len(functions)

        def one(rank):
            store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
            store = dist.PrefixStore(str(id(functions)), store)
            control = Control(store, rank, len(functions), deadline_s)
            try:
                functions[rank](Group(NoTransport(), range(len(functions)), control))
            except CollectiveFailed as error:
                raised[rank] = error
            finally:
                control.close()

        threads = [threading.Thread(target=one, args=(r,)) for r in range(len(functions))]
        begin = time.monotonic()
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        return raised, time.monotonic() - begin

    return run


def reduce(n, dtype=torch.float32, op="sum"):
    return lambda g: g.all_reduce(torch.zeros(n, dtype=dtype), op=op)


def exchange(sends, receives):
    return lambda g: g.exchange([(torch.zeros(n), r) for n, r in sends], [(torch.zeros(n), r) for n, r in receives])


DIFFERENT = [
    (
        reduce(1025),
        reduce(1024),
        ("rank 1 calls all_reduce of shape (1025,)", "rank 0 calls all_reduce of shape (1024,)"),
    ),
    (reduce(8, torch.float64), reduce(8), ("rank 1", "(8,) float64", "(8,) float32")),
    (reduce(8, op="max"), reduce(8), ("op max", "op sum")),
    (lambda g: g.broadcast(torch.zeros(8)), reduce(8), ("rank 1 calls broadcast", "rank 0 calls all_reduce")),
    (
        lambda g: g.broadcast(torch.zeros(8), root=1),
        lambda g: g.broadcast(torch.zeros(8)),
        ("rank 1", "root 1", "root 0"),
    ),
    (
        lambda g: g.all_gather(torch.zeros(9), torch.zeros(3)),
        lambda g: g.all_gather(torch.zeros(6), torch.zeros(2)),
        ("(3,)",),
    ),
]


@pytest.mark.parametrize(("odd", "usual", "words"), DIFFERENT)
def test_different_calls_are_named_on_every_rank(together, odd, usual, words):
    raised, seconds = together(usual, odd, usual)
    assert all(isinstance(e, Mismatch) for e in raised) and seconds < 2
    assert len({str(e) for e in raised}) == 1
    assert all(word in str(raised[0]) for word in words)


def test_counts_between_two_ranks_are_compared(together):
    raised, _ = together(exchange([(5, 1)], []), exchange([], [(4, 0)]), exchange([], []))
    assert all("rank 0 sends 5 elements to rank 1, which receives 4" in str(e) for e in raised)
    fits, _ = together(exchange([(5, 1)], []), exchange([], [(5, 0)]), exchange([], []))
    assert fits == [None] * 3


def test_order_between_groups(together):
    """Each of two ranks waits for the other in another group: found at once, not after the deadline."""

    def calls(first):
        def run(g):
            sub = g.subgroups([[0, 1], [2]])
            if g.rank < 2:
                (g if (g.rank == 0) == first else sub).barrier()

        return run

    raised, seconds = together(calls(True), calls(True), lambda g: g.subgroups([[0, 1], [2]]))
    assert any(isinstance(e, Mismatch) and "each waits for the other" in str(e) for e in raised) and seconds < 5


def test_same_calls_pass_and_leave_nothing_behind(together):
    def many(g):
        for i in range(20):
            g.all_reduce(torch.zeros(i + 1))
        g.checked = False
        g.all_reduce(torch.zeros(g.rank + 1))  # not compared

    assert together(many, many)[0] == [None, None]


def test_rank_that_does_not_come_is_named(together):
    def leaves(g):
        g.barrier()

    def comes(g):
        g.barrier()
        g.all_reduce(torch.zeros(4))

    raised, seconds = together(comes, leaves, comes, deadline_s=1.0)
    assert isinstance(raised[0], Missing) and isinstance(raised[2], Missing) and raised[1] is None
    assert "rank 1 did not come to all_reduce of shape (4,) float32 op sum (call 2) within 1 s" in str(raised[0])
    assert "rank 1 has left barrier" in str(raised[0]) and seconds < 10


def test_failure_of_one_rank_reaches_the_others(together):
    def fails(g):
        g.control.fail("rank 1: its disk is full")

    raised, seconds = together(reduce(4), fails)
    assert "its disk is full" in str(raised[0]) and seconds < 5


# ---- who this process is, and the rendezvous


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, ranks.Ranks(3, 8, 1, "torchrun")),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, ranks.Ranks(2, 4, 2, "mpirun")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ranks.Ranks(0, 2, 0, "mpirun")),
        (
            {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"},
            ranks.Ranks(5, 8, 1, "srun"),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # the shell of an allocation
        ({}, None),
    ],
)
def test_what_started_this_process(env, expected):
    assert ranks.started(env) == expected


@pytest.fixture
def address(monkeypatch):
    def given(port):
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))

    return given


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_variables_that_are_no_numbers(monkeypatch):
    with pytest.raises(ValueError, match="the variable RANK is 'x'; expected a number"):
        ranks.started({"RANK": "x", "WORLD_SIZE": "2"})
    monkeypatch.setenv("MASTER_PORT", "abc")
    with pytest.raises(ValueError, match="the variable MASTER_PORT is 'abc'"):
        ranks.rendezvous(ranks.Ranks(0, 2, 0, "torchrun"), 1.0)


def test_rendezvous_that_nobody_serves(address):
    address(port := free_port())
    with pytest.raises(CollectiveFailed, match=rf"rank 1 cannot reach the rendezvous at 127.0.0.1:{port}.*refused"):
        ranks.rendezvous(ranks.Ranks(1, 2, 1, "torchrun"), 1.0)


def test_port_that_is_taken(address):
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        address(port := s.getsockname()[1])
        with pytest.raises(CollectiveFailed, match=rf"port {port} of the rendezvous is taken"):
            ranks.rendezvous(ranks.Ranks(0, 2, 0, "torchrun"), 1.0)


def test_rank_that_does_not_come_to_the_rendezvous(address):
    address(free_port())
    with pytest.raises(CollectiveFailed, match=r"rank\(s\) 1, 2 of 3 did not come .* within 1 s"):
        ranks.rendezvous(ranks.Ranks(0, 3, 0, "torchrun"), 1.0)
