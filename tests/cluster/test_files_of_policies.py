"""Users' own orders and placements in files: compiled as the package's are, named where Numba cannot, and the key of the
cache of compiled code."""

import inspect
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.caching import NullCache
from random_traces import random_case
from schedules import both, jobs_of

import weft.cluster
from weft.cluster import Cluster, Simulator, compare, simulate
from weft.cluster.engine import compiled
from weft.cluster.engine.compiled import cache_folder, key_of
from weft.cluster.metrics import summary
from weft.cluster.orders import ORDERS
from weft.cluster.placements import PLACEMENTS


def copied(folder: Path, plugin) -> str:
    """The module of one of the package's policies as a user's file."""
    (module,) = (each for name, each in list(sys.modules.items()) if re.match(r"weft\.cluster\.(orders|placements)\.", name)
                 and plugin in (vars(each).get("ORDER"), vars(each).get("PLACEMENT")))  # fmt: skip
    (folder / "mine.py").write_text(inspect.getsource(module))
    return str(folder / "mine.py")


def check_alike(file, own) -> None:
    for name in ("start", "end", "stops", "lost", "waited"):
        np.testing.assert_array_equal(getattr(file, name), getattr(own, name))
    np.testing.assert_array_equal(file.stretches.where, own.stretches.where)
    np.testing.assert_array_equal(file.stretches.on, own.stretches.on)


@pytest.mark.parametrize("name", ["best", "first", "consolidate", "fgd", "dot-product", "gpu-packing"])
@pytest.mark.share(2)
def test_a_placement_in_a_file_is_compiled_as_the_packages_own(tmp_path, name):
    mine, tried = copied(tmp_path, PLACEMENTS[name]), 0
    for seed in range(6):
        jobs, cluster, policy = random_case(seed)
        if policy["order"].endswith("-conservative") and PLACEMENTS[name].detailed:
            continue
        own = simulate(jobs, cluster, **policy | {"placement": name})
        check_alike(both(jobs, cluster, **policy | {"placement": mine}), own)
        tried += 1
    assert tried > 3


@pytest.mark.parametrize("name", ["srtf", "las", "2d-gittins", "priority-preemptive", "fair-share", "drf"])
def test_an_order_in_a_file_is_compiled_as_the_packages_own(tmp_path, name):
    order = ORDERS[name]
    mine = copied(tmp_path, order)
    for seed in (2, 5, 8) if order.preemption else (1, 4, 7):
        jobs, cluster, policy = random_case(seed)
        policy.pop("weights", None)
        own = simulate(jobs, cluster, **policy | {"order": name})
        check_alike(both(jobs, cluster, **policy | {"order": mine}), own)


MINE = """
from weft.cluster.placement import Placement

def score(piece, node{more}):
    return {score}

PLACEMENT = Placement("mine", score, "of a test")
"""
JOBS, NODES = jobs_of(("a", 0, 10, 2), ("a", 1, 10, 2), ("b", 2, 10, 4)), Cluster.parse("2x4")


def test_a_file_is_a_placement_everywhere(tmp_path, weft, on_nodes):
    path = tmp_path / "mine.py"
    path.write_text(MINE.format(more="", score="node.free_gpus"))
    worst = simulate(JOBS, NODES, placement="worst")
    check_alike(simulate(JOBS, NODES, placement=str(path)), worst)
    check_alike(simulate(JOBS, NODES, placement=str(path), plain=True), worst)
    assert summary(simulate(JOBS, NODES, placement=str(path)))["validated"]["placement"] == ""
    assert [each.value("jct.mean") for each in compare(JOBS, NODES, [f"fifo:{path}", "fifo:worst"], processes=2)] == [
        summary(worst)["jct"]["mean"]
    ] * 2
    assert Simulator(placement=str(path)).placement.name == "mine"
    words = on_nodes("submit,duration,gpus\n0,10,2\n1,10,2\n2,10,4\n", "2x4")
    page = tmp_path / "p.html"
    code, out, _ = weft(
        "compare", *words, "--policy", f"fifo:{path}", "--policy", "fifo:worst", "--processes", 1, "--pictures", page
    )
    assert code == 0 and "\nfifo:mine.py  " in out and str(tmp_path) not in out and "fifo, mine.py" in page.read_text()
    code, out, _ = weft(*words, "--placement", path)
    assert code == 0 and out.startswith("fifo, mine.py (ties: lowest)") and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("text", "words"), [
    (MINE.format(more="", score="node.nothing"), "placement 'mine': score: Numba cannot compile it: .*'nothing'"),
    (MINE.format(more="", score="{}['x']"), "placement 'mine': score: Numba cannot compile it: .*--plain runs it"),
    (MINE.format(more="", score="1 // (node.free_gpus - 2)"), "raised ZeroDivisionError: integer division by zero"),
    (MINE.format(more="", score="node.free_gpus // (node.cpu - node.cpu)"), "raised ZeroDivisionError: .*--plain"),
    (MINE.format(more="", score="float('nan')"), "raised ValueError: its result is nan or infinite; expected a finite"),
    (MINE.format(more="", score="node.free_gpus - float('inf')"), "its result is nan or infinite; expected a finite"),
    (MINE.format(more=", context, more", score="1"), r"score\(piece, node, context, more\); .* at most 3 arguments"),
    ("1 / 0", "placement '.*mine.py': ZeroDivisionError: division by zero"),
    ("", "PLACEMENT is None; expected a weft.cluster.placement.Placement"),
])  # fmt: skip
def test_a_placement_that_cannot_be_compiled_or_fails_is_named(tmp_path, text, words):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        simulate(JOBS, NODES, placement=str(path))


def test_a_file_that_was_edited_is_read_anew_and_what_it_prints_is_apart(tmp_path, weft, on_nodes):
    path, found = tmp_path / "mine.py", []
    for sign in "+-+":
        path.write_text("print(1)\n" + MINE.format(more="", score=f"{sign}node.free_gpus"))
        os.utime(path, (1, 1))  # as Python's own cache of bytecode would not notice
        found += [simulate(JOBS, NODES, placement=str(path), plain=plain).stretches.where.tolist() for plain in (0, 1)]
    best, worst = (simulate(JOBS, NODES, placement=name).stretches.where.tolist() for name in ("best", "worst"))
    assert found == [worst, worst, best, best, worst, worst] and best != worst
    path.write_text(MINE.format(more="", score="1").replace("return", "print(node.free_gpus)\n    return"))
    words = on_nodes("submit,duration,gpus\n0,10,2\n", "2x4")
    for more in ("--placement", path), ("--placement", path, "--plain"):
        assert json.loads(weft(*words, *more, "--json")[1])["completed"] == 1
    path.unlink()
    with pytest.raises(FileNotFoundError):
        simulate(JOBS, NODES, placement=str(path))


def test_an_order_that_cannot_be_compiled_runs_in_plain_python_where_that_is_asked(tmp_path, weft, on_nodes):
    path = tmp_path / "mine.py"
    text = inspect.getsource(sys.modules["weft.cluster.orders.srtf"])
    path.write_text(
        re.sub(r"return remaining", "return {0: remaining}.get(0, len('x' * int(job.gpus)))", text, count=1)
    )
    words = on_nodes("submit,duration,gpus\n0,10,8\n1,2,8\n", "1x8")
    code, _, err = weft(*words, "--order", path)
    assert code == 2 and "key of an order: Numba cannot compile it" in err and "--plain runs it as it is" in err
    code, out, _ = weft(*words, "--order", path, "--plain")
    assert code == 0 and "jobs were preempted 1 time" in out
    with pytest.raises(FileNotFoundError, match=r"placement: there is no file .*min\.py; did you mean 'mine\.py'\?"):
        simulate(JOBS, NODES, placement=str(tmp_path / "min.py"))


@pytest.mark.parametrize("order", ["fifo", "fifo-easy", "sjf-conservative", "drf-skip", "2d-las"])
def test_the_plain_engine_gives_the_same_result(order):
    jobs, cluster, policy = random_case(8)
    policy = {"order": order, "placement": "counted"}
    jobs.milli[:] = 1000
    own, plain = simulate(jobs, cluster, **policy), simulate(jobs, cluster, **policy, plain=True)
    for name in ("start", "end", "stops", "lost"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(own, name))
    np.testing.assert_allclose(plain.waited, own.waited, atol=1e-9)
    np.testing.assert_array_equal(plain.stretches.where, own.stretches.where)


def test_compiled_code_is_known_by_what_it_is_made_of(tmp_path):
    package = Path(weft.cluster.__file__).parent
    shutil.copytree(package, tmp_path / "cluster")
    key = key_of(tmp_path / "cluster")
    assert cache_folder().endswith(key)
    for name in (
        "pictures/gantt.py",
        "pictures/gantt.js.j2",
        "metrics.py",
        "traces/csv.py",
        "quota.py",
        "reference/rounds.py",
    ):
        with (tmp_path / "cluster" / name).open("a") as file:
            file.write("\n")
    assert key_of(tmp_path / "cluster") == key
    for name in ("engine/node.py", "placements/best.py", "orders/las.py", "model.py"):
        with (tmp_path / "cluster" / name).open("a") as file:
            file.write("\n")
        key, before = key_of(tmp_path / "cluster"), key
        assert key != before, name


def one_more(x):
    return x + 1


def test_without_a_folder_or_space_for_it_compiled_code_is_not_cached(tmp_path, monkeypatch):
    """Numba would take ``__pycache__``, where code that a function calls may be old."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled, "cache_folder", lambda: str(tmp_path / "file" / "folder"))
    made = compiled.entry(one_more)
    assert made(1) == 2 and isinstance(made._cache, NullCache)
    monkeypatch.setattr(compiled, "cache_folder", lambda: str(tmp_path / "folder"))
    made = compiled.entry(one_more)
    Path(made._cache.cache_path, "lock").mkdir(parents=True)  # cannot be written, as on a full disk
    assert made(1) == 2 and not list(tmp_path.rglob("*.nbi"))
    Path(made._cache.cache_path, "lock").rmdir()
    assert compiled.entry(one_more)(1) == 2 and len(list(tmp_path.rglob("*.nbi"))) == 1
