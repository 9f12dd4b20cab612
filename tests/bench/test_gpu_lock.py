"""Processes that share a device: while one holds the lock the others are stopped, and none waits for a dead one."""

import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from weft import registry
from weft.bench import compare, gpu_lock, parallel
from weft.hardware.ceilings import Ceilings
from weft.operators import peers

pytestmark = pytest.mark.usefixtures("quick_processes")


def count(counter):
    while True:
        counter.value += 1
        time.sleep(0.001)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@pytest.fixture(scope="module")
def counting(quick_processes):
    """A counter that another process increases without end, and the process."""
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0, lock=False)
    process = context.Process(target=count, args=(counter,), daemon=True)
    process.start()
    while not counter.value:
        time.sleep(0.01)
    yield counter, process
    process.kill()
    process.join()


@pytest.fixture
def beside(counting):
    """(the lock of this process, the counter of the other one that shares it, that process)"""
    counter, process = counting
    shared = gpu_lock.SharedState(multiprocessing.get_context("spawn"), 2, 100.0)
    shared.pids[1] = process.pid
    return gpu_lock.GpuLock(shared, 0), counter, process


def test_the_others_are_stopped_while_the_lock_is_held(beside):
    lock, counter, process = beside
    with lock.timing():
        while state(process.pid) != "T":
            time.sleep(0.001)
        before = counter.value
        with lock.timing():  # reentrant
            pass
        time.sleep(0.1)
        assert counter.value == before
    time.sleep(0.1)
    assert counter.value > before


def test_an_error_releases_the_lock(beside):
    lock, counter, _ = beside
    with pytest.raises(ValueError, match="mine"), lock.timing():
        raise ValueError("mine")
    before = counter.value
    time.sleep(0.1)
    assert counter.value > before
    with lock.timing():
        pass


def test_a_long_measurement_continues_the_others_and_raises(beside, monkeypatch):
    lock, counter, _ = beside
    monkeypatch.setattr(gpu_lock, "LONGEST_S", 0.1)
    with pytest.raises(gpu_lock.LockHeldTooLong, match="measuring took more"), lock.timing():
        before = counter.value
        time.sleep(0.5)
        assert counter.value > before
    with lock.timing(strict=False):
        time.sleep(0.2)


def test_the_holder_waits_for_an_idle_gpu_once_the_others_are_stopped(beside):
    lock, _, process = beside
    seen = []

    def quiet():
        while state(process.pid) != "T":
            time.sleep(0.001)
        seen.append(True)

    lock.wait_for_idle = quiet
    with lock.timing(), lock.timing():
        assert seen == [True]


def test_a_point_begins_when_there_is_memory(beside):
    lock, *_ = beside
    reserved = lock.shared.reserved
    with lock.memory(1000.0, 0.0):  # more than there is, and nobody else who uses any
        assert reserved[0] == 1000.0
    reserved[1] = 50.0
    with lock.memory(30.0, 20.0):
        assert list(reserved) == [30.0, 50.0]
    threading.Timer(0.3, reserved.__setitem__, (1, 40.0)).start()
    start = time.monotonic()
    with lock.memory(30.0, 30.0):
        assert time.monotonic() - start >= 0.25
    assert list(reserved) == [0.0, 40.0]


def test_cached_memory_is_released_before_waiting(beside):
    lock, *_ = beside
    given = []
    lock.release = lambda: given.append(lock.shared.lock.acquire(block=False) and lock.shared.lock.release() is None)
    with lock.timing():
        assert given == [True]  # before it had the lock
    with lock.checking():
        assert given == [True, True]


def test_a_check_holds_the_lock_and_stops_no_process(beside):
    lock, counter, process = beside
    with lock.checking():
        assert not lock.shared.lock.acquire(block=False)
        with lock.timing():  # what a check times anew
            before = counter.value
            time.sleep(0.1)
            assert counter.value > before
    assert lock.shared.lock.acquire(block=False)
    lock.shared.lock.release()
    assert state(process.pid) != "T"


def test_the_summary_says_where_time_went(beside):
    lock, *_ = beside
    lock.wait_for_idle = lambda: time.sleep(0.2)
    start = time.monotonic()
    with lock.timing():
        time.sleep(0.3)
    with lock.checking():
        time.sleep(0.1)
    seconds = time.monotonic() - start
    shares = dict(zip(gpu_lock.KINDS, lock.shared.spent[: len(gpu_lock.KINDS)], strict=True))
    for kind, least in (("waiting for an idle GPU", 0.2), ("timing", 0.3), ("checking", 0.1)):
        assert shares[kind] >= least
    assert sum(shares.values()) <= seconds
    assert f"{shares['timing'] / seconds / 2:.0%} timing" in lock.shared.summary(seconds)


def test_a_process_that_leaves_is_not_stopped(beside):
    lock, *_ = beside
    assert lock.shared.pids[0] == os.getpid()
    lock.leave()
    assert lock.shared.pids[0] == 0


def test_autotuners_hold_the_lock(beside, monkeypatch):
    lock, _, process = beside
    autotuners = (("weft.operators.peers", "Compiled", "seconds"), ("no.such", "A", "b"))
    monkeypatch.setattr(gpu_lock, "AUTOTUNERS", autotuners)
    states = []
    timed = staticmethod(lambda f, args: states.append(state(process.pid)) or 1.0)
    monkeypatch.setattr(peers.Compiled, "seconds", timed)
    lock.wait_for_idle = lambda: time.sleep(0.05)
    lock.wrap_autotuners()
    assert peers.Compiled(None).seconds(None, {}) == 1.0 and states == ["T"]


def test_the_lock_is_not_traced_in_compiled_code(beside, monkeypatch):
    lock, *_ = beside
    traced = []

    class Autotuner:
        def run(self):
            traced.append(torch.compiler.is_compiling())

    lock.wait_for_idle = lambda: traced.append(torch.compiler.is_compiling())
    monkeypatch.setattr(Autotuner, "run", lock._with_lock(Autotuner.run))
    one = Autotuner()

    @torch.compile(backend="eager")
    def compiled(x):
        one.run()
        return x + 1

    assert compiled(torch.ones(2)).tolist() == [2, 2] and traced == [False, False]


def test_every_installed_autotuner_is_found():
    for module, owner, method in gpu_lock.AUTOTUNERS:
        if module.partition(".")[0] != "quack":
            assert method in getattr(importlib.import_module(module), owner).__dict__


def points_of(name, dtypes):
    op = registry.get(name)
    return list(compare.points([op], "bench", dtypes=dtypes, workload="M=40,N=24")), {name: [op.find("torch")]}


def test_several_processes_measure_what_one_does():
    said = []
    bench = compare.Bench("cpu", Ceilings("cpu"), budget_s=0.01, say=said.append)
    points, implementations = points_of("softmax", ("fp32", "fp16"))
    implementations["softmax"].append(points[0][0].find("torch.compile"))  # left out, and said to be
    found = list(parallel.compare(bench, points, implementations, 2))
    assert sorted((str(w), w.dtype, d) for (_, w, d), _ in found) == sorted((str(w), w.dtype, d) for _, w, d in points)
    for (op, w, direction), (row,) in found:
        assert (row.operator, row.workload, row.dtype, row.direction) == (op.name, str(w), w.dtype, direction)
        assert (row.run, row.implementation) == (bench.run_id, "torch") and row.time_us > 0 and row.error is not None
    *told, summary = said
    assert told == ["softmax/torch.compile: runs on cuda only"] * len(points)
    assert re.match(r"2 processes spent \d+ s: 0% waiting for memory, .* 0% waiting for an idle GPU, ", summary)


class Endless(compare.Bench):
    """Says that a measurement has begun, which does not end."""

    def compare(self, op, w, direction, implementations):
        self.say("begun")
        time.sleep(1000)


def test_a_process_that_dies_ends_the_measurement_and_leaves_none_behind():
    points, implementations = points_of("softmax", ("fp32",))
    before = set(multiprocessing.active_children())

    def kill_one(_):
        if children := set(multiprocessing.active_children()) - before:
            children.pop().kill()

    bench = Endless("cpu", Ceilings("cpu"), budget_s=1000.0, say=kill_one)
    with pytest.raises(parallel.ProcessDied, match="status -9"):
        list(parallel.compare(bench, points, implementations, 2))
    assert set(multiprocessing.active_children()) == before


class Faulty(compare.Bench):
    """One kernel ends in a fault of the device."""

    def compare(self, op, w, direction, implementations):
        if w.dtype == "fp16":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")
        return super().compare(op, w, direction, implementations)


def test_a_process_whose_device_is_lost_is_replaced():
    said = []
    bench = Faulty("cpu", Ceilings("cpu"), budget_s=0.01, say=said.append)
    points, implementations = points_of("softmax", ("fp16", "fp32"))
    found = {(w.dtype, d): rows for (_, w, d), rows in parallel.compare(bench, points, implementations, 1)}
    assert {dtype for (dtype, _), rows in found.items() if rows} == {"fp32"} and len(found) == len(points)
    text = "softmax {} at M=40,N=24 fp16 is left out: CUDA error: an illegal memory access was encountered"
    assert said[:-1] == [text.format(d) for d in ("forward", "backward")]


def lose_the_device(*arguments, **named):
    raise RuntimeError("a kernel of a peer")


class Lost(compare.Bench):
    """A peer fails, and the device with it."""

    def compare(self, op, w, direction, implementations):
        self.lost = any(made.name == "numpy" for made in implementations)
        given = [dataclasses.replace(i, function=lose_the_device) if i.name == "numpy" else i for i in implementations]
        return super().compare(op, w, direction, given)

    def _finish(self):
        if self.lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")


def test_a_point_is_measured_without_the_peer_that_lost_the_device():
    said = []
    bench = Lost("cpu", Ceilings("cpu"), budget_s=0.01, say=said.append)
    points, implementations = points_of("softmax", ("fp32",))
    points = [p for p in points if p[2] == "forward"]
    implementations["softmax"].insert(0, points[0][0].find("numpy"))
    ((_, rows),) = parallel.compare(bench, points, implementations, 1)
    assert [row.implementation for row in rows] == ["torch"]
    failed, anew, _ = said
    assert failed == "softmax/numpy at M=40,N=24 fp32 failed: RuntimeError: a kernel of a peer"
    begins = "softmax forward at M=40,N=24 fp32 begins anew without numpy"
    assert anew == f"{begins}: CUDA error: an illegal memory access was encountered"


def test_the_command_line_takes_jobs(command, monkeypatch):
    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda device, **options: Ceilings(device))
    words = ["bench", "softmax", "--workload", "M=40,N=24", "--direction", "forward", "--implementation", "torch"]
    words += ["--dtype", "fp32", "--dtype", "fp16", "--budget", "0.01", "--jobs", "2", "--json"]
    code, out, err = command(*words)
    assert code == 0, err
    rows = [r for r in json.loads(out)["records"] if r["operator"] == "softmax"]
    assert sorted(r["dtype"] for r in rows) == ["fp16", "fp32"] and "2 processes spent" in err
