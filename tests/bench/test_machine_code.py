"""Records of an earlier source count for today's where both compile to the same machine code, and only there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import registry
from weft.bench import machine_code
from weft.records import Measurement, Store
from weft.source import source_hash

SOURCES = Path(machine_code.__file__).parents[2]
GPU = "Some GPU"
OTHER = "the same code at 1 of 2 points; other code first at N=1000, fp16, backward"
POINTS = [("N=1000", "fp32", "forward", "triton"), ("N=1000", "fp16", "backward", "triton")]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A function that commits the sources after a change of relu's, and says the commit."""
    folder = tmp_path / "repository"
    shutil.copytree(SOURCES, folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WEFT_RESULTS", str(tmp_path / "results"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # what is compiled is compiled in other processes

    def git(*command):
        options = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *options, *command], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")

    def commit(file, old, new):
        path = folder / "src" / "weft" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        git("add", "src")
        git("commit", "-qm", "another source")
        return git("rev-parse", "HEAD"), source_hash(module(folder / "src" / "weft"), folder / "src" / "weft")

    return commit


def module(root=SOURCES / "weft"):
    return root / Path(registry.get("relu").module).relative_to(SOURCES / "weft")


def recorded(commit, source):
    store = Store()
    for workload, dtype, direction, implementation in POINTS:
        line = Measurement("relu", implementation, direction, workload, dtype, 1.0, ours=True)
        line.gpu, line.commit, line.source = GPU, commit, source
        store.append(GPU, "relu", line)
    return store


def carried(others=()):
    said = []
    return machine_code.carry(["relu"], GPU, 90, said.append, others), said


def test_other_text_of_the_same_code_is_carried(repository):
    commit, source = repository("operators/elementwise/relu.py", '"""``relu', '"""Of ``relu')
    today = source_hash(module())
    store = recorded(commit, source)
    assert source != today and {m.source for m in store.read()} == {source}
    assert carried() == (2, [f"relu at {commit}: the same code at 2 of 2 points"])
    assert {m.source for m in store.read()} == {today} and {m.source for m in store.read(as_measured=True)} == {source}
    assert carried() == (0, [])  # there is nothing left to compare


@pytest.mark.parametrize(
    ("file", "old", "new", "outcome"),
    [
        (
            "operators/elementwise/relu.py",
            "passes != 0, dy, 0.0",
            "passes != 0, dy, 1.0",
            OTHER,
        ),
        ("operators/elementwise/relu.py", "grid = (self.rows", "grid = (2 * self.rows", OTHER),
        ("operators/elementwise/relu.py", "if dx.numel():", "if dx.zero_().numel():", OTHER),
        ("operators/elementwise/relu.py", "backward_bits=1", "backward_bits=0", OTHER),
        ("timing.py", '"""One timer', '"""Another timer', "timing"),
    ],
    ids=["kernel", "grid", "operator", "cost", "timing"],
)
def test_other_code_and_other_timing_are_not(repository, file, old, new, outcome):
    commit, source = repository(file, old, new)
    store = recorded(commit, source)
    found, said = carried()
    if outcome == OTHER:
        assert (found, said) == (1, [f"relu at {commit}: {OTHER}"])
        assert [m.source for m in store.read()] == [source_hash(module()), source]
    else:
        assert (found, said) == (
            0,
            [f"relu, source {source}: cannot be compared: timing.py has changed since {commit}"],
        )
        assert [m.source for m in store.read()] == [source, source]


def test_a_source_is_compared_at_a_commit_that_has_it(repository):
    commit, source = repository("operators/elementwise/relu.py", '"""``relu', '"""Of ``relu')
    other, _ = repository("operators/elementwise/relu.py", '"""Of ``relu', '"""About ``relu')
    recorded(other, "0123456789ab")
    assert carried() == (0, [f"relu, source 0123456789ab: cannot be compared: it is not that of {other}"])
    store = recorded(other, source)  # measured in a tree with changes
    line = Measurement(
        "relu", "triton", "forward", *POINTS[0][:2], 1.0, ours=True, gpu=GPU, commit=commit, source=source
    )
    store.append(GPU, "relu", line)
    assert carried() == (2, [f"relu at {commit}: the same code at 2 of 2 points"])


def test_a_commit_that_git_does_not_know(repository, capfd):
    commit, source = repository("operators/elementwise/relu.py", '"""``relu', '"""Of ``relu')
    recorded("0" * 40, source)
    assert f"it is not that of {'0' * 40} (not a " in carried()[1][0]
    assert capfd.readouterr().err == "", "git's own words are in the outcome alone"
    assert carried([commit]) == (2, [f"relu at {commit}: the same code at 2 of 2 points"])


def test_where_records_were_carried_to_is_asked_next_time(repository):
    """Commits of measured trees are gone once branches are; that at which a line of ``same_code`` was written is asked too."""
    commit, source = repository("operators/elementwise/relu.py", '"""``relu', '"""Of ``relu')
    store = recorded("0" * 40, "0123456789ab")
    points = [list(point[:3]) for point in POINTS]
    line = {"operator": "relu", "source": "0123456789ab", "same_as": source, "at": commit, "points": points}
    store.append(GPU, "same_code", line)
    assert {m.source for m in store.read()} == {source}
    assert carried() == (2, [f"relu at {commit}: the same code at 2 of 2 points"])


def test_records_that_were_carried_are_compared_at_a_commit_that_they_were_carried_to(repository):
    commit, source = repository("operators/elementwise/relu.py", '"""``relu', '"""Of ``relu')
    store, points = recorded("0" * 40, "0123456789ab"), [point[:3] for point in POINTS]
    line = {"operator": "relu", "source": "0123456789ab", "same_as": source, "points": points}
    store.append(GPU, "same_code", line)
    assert carried(["HEAD"]) == (2, [f"relu at {commit}: the same code at 2 of 2 points"])
    assert {m.source for m in store.read()} == {source_hash(module())}


def test_sources_are_followed_to_the_last(tmp_path):
    store, point = Store(tmp_path), ("N=1", "fp32", "forward")
    for source in "abc":
        store.append(GPU, "relu", Measurement("relu", "triton", "forward", "N=1", "fp32", 1.0, gpu=GPU, source=source))
    for source, later in ("ab", "bc"):
        store.append(GPU, "same_code", {"operator": "relu", "source": source, "same_as": later, "points": [point]})
    assert [m.source for m in store.read()] == ["c", "c", "c"]
    store.append(
        GPU, "same_code", {"operator": "relu", "source": "c", "same_as": "a", "points": [point]}
    )  # a change undone
    assert [m.source for m in store.read()] == ["a", "a", "a"]
    store.append(GPU, "same_code", {"operator": "add", "source": "a", "same_as": "d", "points": [point]})
    store.append("Another GPU", "same_code", {"operator": "relu", "source": "a", "same_as": "e", "points": [point]})
    store.append(GPU, "same_code", {"operator": "relu", "source": "a", "same_as": "f", "points": [("N=2", *point[1:])]})
    store.append(GPU, "same_code", {"operator": "relu"})
    assert [m.source for m in store.read()] == ["a", "a", "a"]
