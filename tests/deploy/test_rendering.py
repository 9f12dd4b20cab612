"""Rendered folders: deterministic, quick, and never over another's files."""

import errno
import time
from pathlib import Path

import big_cluster
import pytest
from where import ROOT, printed

from weft import records
from weft.deploy import rendering

TARGETS = sorted(rendering.targets())


@pytest.mark.parametrize("target", TARGETS)
def test_a_thousand_nodes_and_200_teams_in_two_seconds_and_the_same_twice(tmp_path, target):
    path = tmp_path / "cluster.yaml"
    path.write_text(big_cluster.text())
    took, texts = [], []
    for _ in range(2):
        began = time.process_time()
        texts.append(rendering.render(rendering.load(path), target))
        rendering.write(texts[-1], tmp_path / "out", target)
        took.append(time.process_time() - began)
    assert texts[0] == texts[1] and min(took) < 2.0
    assert all((tmp_path / "out" / name).read_text() == text for name, text in texts[0].items())


def test_another_python_renders_the_same_bytes(tmp_path):
    """Whatever the seed of its hashes."""
    script = (
        "import sys, hashlib, pathlib; from weft.deploy import rendering as r; m = r.load(pathlib.Path(sys.argv[1]))\n"
    )
    script += "print(hashlib.sha256(repr([r.render(m, t) for t in sorted(r.targets())]).encode()).hexdigest())"
    seen = {printed("-c", script, str(ROOT / "examples/cluster.yaml"), PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert len(seen) == 1


def test_a_folder_holds_what_was_rendered_last_and_nothing_else_is_touched(tmp_path):
    out = tmp_path / "out"
    assert rendering.write({"a/b.yaml": "1", "run.sh": "2"}, out, "t") == ["a/b.yaml", "run.sh"]
    assert (out / "run.sh").stat().st_mode & 0o111
    (out / "mine.yaml").write_text("kept")
    assert rendering.write({"a/b.yaml": "1", "c.yaml": "3"}, out, "t") == ["run.sh", "c.yaml"]
    assert not (out / "run.sh").exists() and (out / "mine.yaml").read_text() == "kept"
    with pytest.raises(ValueError, match="was not rendered by weft"):
        rendering.write({"c.yaml": "4", "mine.yaml": "5"}, out, "t")
    assert (out / "c.yaml").read_text() == "3"


@pytest.mark.parametrize("first", [{}, {"a.yaml": "1", "old.yaml": "2"}])
def test_a_full_disk_leaves_a_folder_that_can_be_rendered_again(tmp_path, monkeypatch, first):
    """At whichever write; the error names the file."""
    new = {"a.yaml": "é", "b/c.yaml": "3", "run.sh": "4"}
    real, ended = records.os.fsync, 0
    for room in range(6):
        out, left = tmp_path / str(room), [100]
        rendering.write(first, out, "t")

        def full(handle, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(handle)

        monkeypatch.setattr(records.os, "fsync", full)
        left[0] = room
        try:
            rendering.write(new, out, "t")
        except OSError as error:
            ended += 1
            assert Path(error.filename).is_relative_to(out) and Path(error.filename).name.strip(".") in {
                "a.yaml", "c.yaml", "run.sh", "rendered-t"
            }  # fmt: skip
        left[0] = 100
        rendering.write(new, out, "t")
        there = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
        assert there == new | {".rendered-t": "a.yaml\nb/c.yaml\nrun.sh\n"}
    assert ended >= 4


def test_a_folder_of_an_older_weft_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("1")
    (tmp_path / ".rendered").write_text("a.yaml\n")
    with pytest.raises(ValueError, match=r"remove it and what an older weft wrote, which .*/\.rendered lists"):
        rendering.write({"a.yaml": "1"}, tmp_path, "t")


def test_targets_share_a_folder(tmp_path):
    """Each removes its own files alone, and replaces no other's."""
    made, out = rendering.load(ROOT / "examples/cluster.yaml"), tmp_path / "out"
    texts = {target: rendering.render(made, target) for target in TARGETS}
    for target in [*TARGETS, *TARGETS]:
        rendering.write(texts[target], out, target)
    assert all((out / name).read_text() == text for files in texts.values() for name, text in files.items())
    with pytest.raises(ValueError, match=r"slurm\.conf exists and was not rendered by weft for compose"):
        rendering.write({"slurm.conf": "mine"}, out, "compose")
    rendering.write({}, out, "slurm")
    assert not (out / "slurm.conf").exists() and (out / "kustomization.yaml").exists()


def test_a_list_of_files_from_elsewhere_removes_nothing_outside(tmp_path):
    (tmp_path / "precious").write_text("x")
    out = tmp_path / "out"
    out.mkdir()
    rendering.list_of("t", out).write_text(f"../precious\n{tmp_path / 'precious'}\n")
    rendering.write({"a": "1"}, out, "t")
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("name", [".rendered-t", "a"])
def test_a_link_is_not_followed_out_of_the_folder(tmp_path, name):
    (tmp_path / "precious").write_text("a\n")
    out = tmp_path / "out"
    out.mkdir()
    rendering.list_of("t", out).write_text("a\n")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="is a symbolic link"):
        rendering.write({"a": "1"}, out, "t")
    assert (tmp_path / "precious").read_text() == "a\n"


@pytest.mark.parametrize(("old", "new", "words"), [
    ("name: h100", "name: Big_One", "name is 'Big_One'; expected lower-case letters"),
    ("name: h100", "name: '$(reboot)'", "expected lower-case letters"),
    ("name: h100", 'name: h100, rack: "a\\nSlurmUser=root"', "rack is 'a\\nSlurmUser=root'; expected letters"),
])  # fmt: skip
def test_names_that_kubernetes_refuses_are_refused(tmp_path, old, new, words):
    text = "nodes: [{count: 2, name: h100}]"
    (tmp_path / "c.yaml").write_text(text.replace(old, new))
    with pytest.raises(ValueError) as raised:
        rendering.load(tmp_path / "c.yaml")
    assert words in str(raised.value) and "c.yaml:1:" in str(raised.value)
