"""Programs recorded on this machine, from code and from the command line, and the page."""

import contextlib
import json
import sys
import time

import chromium
import pytest
from made_traces import ELEMENTWISE, PAGEABLE, MadeTrace

import weft
from weft.profiling import comparison, page
from weft.profiling import run as profiled

torch = pytest.importorskip("torch")

TRAIN = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
other = torch.optim.SGD(model.parameters(), lr=0.0)  # a second one: no step ends at it
data = torch.utils.data.TensorDataset(torch.randn(80, 64), torch.randint(0, 10, (80,)))
for x, y in torch.utils.data.DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    other.step()
print("arguments", sys.argv[1:], __name__)
"""


def loop(p, steps: int) -> None:
    model = torch.nn.Linear(64, 64)
    for _ in range(steps):
        model(torch.randn(32, 64)).square().mean().backward()
        p.step()


def test_a_loop_in_code_is_recorded_with_its_steps_and_the_trace_is_kept(tmp_path):
    with weft.profile(tmp_path / "t.json.gz", wait=1, warm_up=1, active=2) as p:
        with pytest.raises(ValueError, match="nothing is recorded before step 3"):
            _ = p.result
        loop(p, 6)
    found = p.result
    assert len(found.steps) == 2 and found.device == "cpu"
    rows = {(r.operator, r.phase): r for r in found.rows}
    assert rows["aten::addmm", "forward"].calls == 2
    assert rows["aten::mm", "backward"].flops_per_s
    assert found.memory and found.memory.peak >= 64 * 64 * 4
    assert 0 < found.busy_us <= found.window_us
    again = weft.profiling.analyse(weft.profiling.read(tmp_path / "t.json.gz"))
    assert [r.time_us for r in again.rows] == [r.time_us for r in found.rows]


def test_stacks_give_modules_and_lines(tmp_path):
    with weft.profile(stacks=True, warm_up=0, active=2) as p:
        loop(p, 2)
    found = p.result
    assert {r.module for r in found.rows if r.operator in ("aten::addmm", "aten::mm")} == {"Linear"}
    assert any("test_record.py" in frame for top in found.memory.top for frame in top["stack"])


def test_a_whole_block_and_one_that_raised():
    with weft.profile(active=None) as p:
        torch.randn(8, 8) @ torch.randn(8, 8)
    assert any(r.operator == "aten::mm" for r in p.result.rows) and not p.result.steps
    with contextlib.suppress(KeyError), weft.profile(warm_up=0, active=5) as p:
        loop(p, 2)
        raise KeyError
    assert len(p.result.steps) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"active": 0}, "active=0"),
        ({"wait": -1}, "wait=-1"),
        ({"out": "t.html"}, "ends in .json"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        weft.profile(**options)


def test_a_block_that_ended_too_early_says_how_many_steps_it_needs():
    with pytest.raises(ValueError, match=r"after 1 calls of step\(\).*at least 4"), weft.profile(wait=2) as p:
        loop(p, 1)


def test_outside_of_its_active_steps_a_step_costs_microseconds():
    with pytest.raises(ValueError, match="before anything"), weft.profile(wait=100_000) as p:
        began = time.perf_counter()
        for _ in range(10_000):
            p.step()
        assert time.perf_counter() - began < 0.1
    with weft.profile(warm_up=0, active=1) as p:
        loop(p, 1)
        began = time.perf_counter()
        for _ in range(10_000):
            p.step()
        assert time.perf_counter() - began < 0.1


def test_a_command_is_profiled_and_its_page_written(tmp_path, monkeypatch, capfd):
    from weft import cli

    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weft", "profile", "--json", "--", sys.executable, "-u", "train.py", "--lr", "1"])
    status = cli.main()
    out, err = capfd.readouterr()
    assert status == 0, err
    assert "arguments ['--lr', '1'] __main__" in err
    (found,) = json.loads(out)["profiles"]
    assert len(found["steps"]) == 3
    assert {r["phase"] for r in found["rows"]} >= {"forward", "backward", "optimizer"}
    assert sum(r["calls"] for r in found["rows"] if r["operator"] == "aten::addmm" and r["phase"] == "forward") == 6
    assert (tmp_path / "profile.html").stat().st_size and (tmp_path / "profile.json.gz").stat().st_size


def test_a_program_that_has_too_few_steps_or_counts_forwards(tmp_path, monkeypatch, capsys):
    (tmp_path / "none.py").write_text(
        "import torch, sys\nfor _ in range(4): torch.nn.Linear(2, 2)(torch.ones(2))\nsys.exit(0)\n"
    )
    out, program = str(tmp_path / "t.json"), str(tmp_path / "none.py")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert profiled.main(["--out", out, "--", program]) == profiled.NOTHING
    told = capsys.readouterr().err
    assert "after 0 steps" in told and "--step forward" in told and "at least 4" in told
    for rank, world, name in (("0", "1", "t.json"), ("1", "2", "t.rank1.json")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        command = [program] if rank == "0" else ["-m", "none", "--out", "of the program"]
        monkeypatch.chdir(tmp_path)
        assert profiled.main(["--out", out, "--step", "forward", "--active", "1", *command]) == 0
        found = weft.profiling.analyse(weft.profiling.read(tmp_path / name))
        assert (len(found.steps), found.rank) == (1, int(rank))
    with pytest.raises(SystemExit, match="no such program"):
        profiled.main(["--out", out, "missing.py"])
    monkeypatch.setitem(sys.modules, "torch", None)
    assert profiled.main(["--out", out, program]) == 2 and "pip install 'weft[gpu]'" in capsys.readouterr().err


@pytest.mark.share(2)
def test_the_status_of_a_command_that_fails(tmp_path, monkeypatch, capfd):
    from weft import cli

    (tmp_path / "fails.py").write_text("raise SystemExit(5)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weft", "profile", "--", "fails.py"])
    assert cli.main() == 5
    (tmp_path / "fails.py").write_text("import os; os._exit(0)")
    assert cli.main() == 1 and "left no trace in profile.json.gz" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "torchrun", "train.py"], "-m weft.profiling.run"),
        (["--", "sleep", "1"], "no Python program"),
        (["missing.json"], "missing.json"),
        (["--compare", "a.json"], "two traces"),
        (["--step", "epoch", "a.json"], "optimizer or forward"),
    ],
)
def test_what_the_command_line_refuses(words, says, tmp_path, capsys, monkeypatch):
    from weft import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weft", "profile", *words])
    assert cli.main() == 2
    assert says in " ".join(capsys.readouterr().err.split())


def made(mm: float = 300) -> MadeTrace:
    t = MadeTrace()
    for i in range(3):
        t.step(i, 2000 * i, 2000)
        t.op("aten::mm", 2000 * i, 20, [(512, 512), (512, 512)])
        t.kernel(2000 * i + 2, 2000 * i + 10, mm)
        t.copy(2000 * i + 30, 2000 * i + 500, 200, PAGEABLE)
        for k in range(4):
            t.kernel(2000 * i + 900 + 30 * k, 2000 * i + 910 + 30 * k, 20, ELEMENTWISE)
        t.memory(2000 * i + 20, 1 << 20, i, (i + 1) << 20)
    return t


def run(monkeypatch, capsys, *words: str) -> str:
    from weft import cli

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["weft", "profile", *words])
    assert cli.main() == 0
    return capsys.readouterr().out


def test_traces_in_the_terminal_fit_80_columns(tmp_path, monkeypatch, capsys):
    before, after = made().write(tmp_path / "rank0.json"), made(100).write(tmp_path / "rank1.json")
    shown = run(monkeypatch, capsys, str(before), str(after))
    assert max(map(len, shown.splitlines())) <= 80
    for text in (
        "rank0.json",
        "rank1.json",
        "mm fp32",
        "forward",
        "pageable",
        "Do this first",
        "Copy from pinned memory",
    ):
        assert text in shown
    assert "-" not in "".join(
        shown.split("Do this first")[0].split("rank0.json: ")[1].split("\n")[3:6]
    )  # no negative time
    shown = run(monkeypatch, capsys, "--compare", str(before), str(after))
    assert "faster" in shown and "−0.200" in shown
    found = json.loads(run(monkeypatch, capsys, "--compare", "--json", str(before), str(after)))
    assert found["changes"][0]["verdict"] == "faster"


def test_the_page_in_chromium(browser, visit, tmp_path):
    t = made()
    t.op("<script>alert(1)</script>", 5900, 10)
    t.kernel(5901, 5950, 10, "<b>kernel</b>")
    (tmp_path / "p.html").write_text(page.page([t.profile(), made(100).profile()]))
    with visit(tmp_path / "p.html") as tab:
        plots = tab.locator(".plot")
        assert plots.count() == 3  # operators, idle, memory
        chromium.draw(tab, plots)
        assert chromium.fits(tab)
        text = tab.locator("main").inner_text()
        assert "Copy from pinned memory" in text and "<script>alert(1)</script>" in text
    (tmp_path / "c.html").write_text(page.comparison(comparison.compare(made().profile(), made(100).profile())))
    with visit(tmp_path / "c.html") as tab:
        assert "faster" in tab.locator("main").inner_text() and chromium.fits(tab)
