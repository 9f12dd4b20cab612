"""``weft learn`` as a learner uses it: next, check, hint, solution, skip, reset, test out, move to another machine; and what
happens to a folder when files are deleted, damaged, or edited by two runners."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from weft import console
from weft.learn import course, machine, progress, workspace

FIRST = course.exercises()[0]
DONE = FIRST.solution("en")[FIRST.paths()["exercise.py"]]


@pytest.fixture
def learn(command, monkeypatch, tmp_path):
    """Runs ``weft learn …`` in a course folder of its own: exit status and all that was printed."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setattr(
        machine, "_measured", lambda: {"device": "a test", "dram_gb_s": 10.0, "fp32_gflop_s": 20, "balance": 2.0}
    )
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weft-course"
    monkeypatch.setenv("WEFT_LEARN", "")

    def run(*words):
        code, out, err = command("learn", *words)
        return code, out + err

    run.folder = folder
    run.file = folder / FIRST.paths()["exercise.py"]
    return run


def test_from_the_first_command_to_the_second_exercise(learn):
    code, said = learn()
    assert code == 0 and f"{learn.file}:" in said and FIRST.title.en in said
    assert "I AM NOT DONE" in learn.file.read_text()
    assert "a test" not in said
    lesson = learn.folder / FIRST.day / "lesson.md"
    assert "{{" not in lesson.read_text()

    code, said = learn("check")
    assert code == 1 and "✓ runs" in said and "✗ right" in said and "expected is" in said

    learn.file.write_text("# I AM NOT DONE\n" + DONE)
    code, said = learn("check")
    assert code == 1 and "Remove the line" in said

    learn.file.write_text(DONE)
    code, said = learn("check")
    second = course.exercises()[1]
    assert (
        code == 0
        and "Passed" in said
        and second.id in said
        and str(learn.folder / second.paths()["exercise.py"]) in said
    )
    code, said = learn("list")
    assert f"✓ {FIRST.id}" in said and f"{second.title.en} ◀" in said
    code, said = learn("solution", FIRST.id)
    assert "Yours is the same" in said and FIRST.why("en").split()[0] in said


def test_hints_come_one_by_one_and_the_solution_when_asked_for_twice(learn):
    hints = [h.split()[0] + " " + h.split()[1] for h in FIRST.hints("en")]
    for number in (1, 2, 3, 3):
        _, said = learn("hint")
        assert [h in said for h in hints] == [i < number for i in range(3)]
    assert "not passed it yet" in learn("solution")[1]
    _, said = learn("solution")
    assert "-# I AM NOT DONE" in said and "+    return" in said
    assert "(solution seen first)" in certificate(learn)


def certificate(learn):
    assert learn("certificate", "page.md", "--name", "Ada")[0] == 0
    return (learn.folder.parent / "page.md").read_text()


def test_skipped_exercises_stay_listed_and_come_back(learn):
    for exercise in course.exercises():
        code, said = learn("skip")
        assert code == 0 and f"{exercise.id}: skipped" in said
    assert "(skipped before; everything else is done)" in learn()[1]
    _, said = learn("list")
    assert said.count("(skipped)") == len(course.exercises())
    assert "skipped:" in learn("progress")[1]


def test_chinese_by_option_and_by_locale(learn, monkeypatch):
    _, said = learn("--lang", "zh")
    assert FIRST.title.zh in said
    assert "TODO: " in (text := learn.file.read_text()) and FIRST.skeleton("zh")[FIRST.paths()["exercise.py"]] == text
    assert "应为" in learn("check")[1]
    assert FIRST.title.en in learn("--lang", "en")[1]
    assert learn.file.read_text() == FIRST.skeleton("en")[FIRST.paths()["exercise.py"]]  # it was untouched
    assert learn("--lang", "fr")[0] == 2
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "个练习" in learn("init", "other")[1]


def test_an_edited_file_is_never_overwritten(learn):
    learn()
    learn.file.write_text("mine\n")
    learn("--lang", "zh")
    learn("init", str(learn.folder))
    assert learn.file.read_text() == "mine\n"
    _, said = learn("reset")
    assert "I AM NOT DONE" in learn.file.read_text() and f"{learn.file.name}.before-1" in said
    assert learn.file.with_name(f"{learn.file.name}.before-1").read_text() == "mine\n"
    code, _ = learn("reset")
    assert code == 0 and not learn.file.with_name(f"{learn.file.name}.before-2").exists()


def test_a_deleted_file_is_restored(learn):
    learn()
    learn.file.unlink()
    code, said = learn("check")
    assert code == 1 and "was missing; it is there again" in said and learn.file.exists()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": 9, "entries": {}}', b'{"version": 1, "entries": {"a": 1}}']
)
def test_a_damaged_progress_file_is_kept_and_recovered(learn, damage):
    learn()
    learn.file.write_text(DONE)
    learn("check")
    learn("hint")  # one more save: the state before it has the pass
    (learn.folder / progress.FILE).write_bytes(damage)
    code, said = learn("list")
    assert code == 0 and "could not be read" in said and f"✓ {FIRST.id}" in said
    assert (learn.folder / f"{progress.FILE}.damaged-1").read_bytes() == damage
    code, said = learn("hint")
    assert code == 0 and "could not be read" not in said  # told once
    (learn.folder / progress.FILE).write_bytes(b"{")
    (learn.folder / f"{progress.FILE}.before").write_bytes(b"{")
    code, said = learn()
    assert (
        code == 0 and said.count("could not be read") == 1 and "begins anew" in said and learn.file.read_text() == DONE
    )
    assert learn("list")[0] == 0


def test_a_deleted_progress_file_is_recovered(learn):
    learn()
    learn("skip")
    learn("hint")
    (learn.folder / progress.FILE).unlink()
    _, said = learn("list")
    assert "it is gone" in said and "(skipped)" in said


def test_the_progress_file_is_there_at_any_time(learn, monkeypatch):
    learn()
    replace = os.replace

    def watched(source, target):
        assert (learn.folder / progress.FILE).exists()
        replace(source, target)
        assert (learn.folder / progress.FILE).exists()

    monkeypatch.setattr(progress.os, "replace", watched)
    learn("skip")
    assert progress.load(learn.folder).of(FIRST.id).state == "skipped"


def test_what_an_exercise_writes_into_the_progress_file_is_lost(learn):
    learn()
    forged = progress.Progress(entries={e.id: progress.Entry("passed") for e in course.exercises()}).to_json()
    learn.file.write_text(
        "import numpy as np\n\ndef blocks(n, block):\n"
        f"    np.frombuffer({forged.encode()!r}, np.uint8).tofile('../{progress.FILE}')\n    return 0\n"
    )
    assert learn("check")[0] == 1
    assert progress.load(learn.folder).of(FIRST.id).state == "open"


def test_two_runners_at_once_lose_nothing(learn):
    learn()
    names = [e.id for e in course.exercises()[:8]]

    def note(name):
        for _ in range(5):
            with progress.edit(learn.folder) as state:
                state.of(name).attempts += 1

    threads = [threading.Thread(target=note, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = progress.load(learn.folder)
    assert [found.of(name).attempts for name in names] == [5] * 8


def test_progress_moves_to_another_machine_as_one_file(learn, tmp_path):
    learn()
    learn.file.write_text(DONE)
    learn("check")
    learn("skip")
    assert learn("progress", "--export", "moved.json")[0] == 0
    learn("init", "elsewhere")
    other = tmp_path / "elsewhere" / FIRST.paths()["exercise.py"]
    other.write_text("begun here\n")
    code, said = learn("progress", "--import", "moved.json", "--dir", "elsewhere")
    assert code == 0 and other.read_text() == DONE and f"{other.name}.before-1" in said
    assert f"✓ {FIRST.id}" in learn("list", "--dir", "elsewhere")[1]
    (tmp_path / "moved.json").write_text(json.dumps({"progress": {}, "files": {"../../escape.py": "x"}}))
    code, said = learn("progress", "--import", "moved.json", "--dir", "elsewhere")
    assert code == 2 and "no export" in said
    exported = workspace.exported(workspace.Workspace(learn.folder), progress.load(learn.folder))
    table = json.loads(exported)
    table["files"]["../../escape.py"] = "x"
    (tmp_path / "moved.json").write_text(json.dumps(table))
    learn("progress", "--import", "moved.json", "--dir", "elsewhere")
    assert not (tmp_path.parent / "escape.py").exists() and not (tmp_path / "escape.py").exists()


def test_a_day_is_tested_out_by_its_last_exercises(learn):
    learn()
    day = course.find_day("0")
    code, said = learn("test-out", "0")
    assert code == 1 and all(e.id in said for e in day.deciding())
    for exercise in day.deciding():
        for path, text in exercise.solution("en").items():
            (learn.folder / path).write_text(text)
    code, said = learn("test-out", "day0")
    assert code == 0 and f"{len(day.exercises)}/{len(day.exercises)}" in said
    assert course.find_day("1").exercises[0].id in learn()[1]
    assert "tested out" in certificate(learn)


def test_mistakes_are_told_in_a_line(learn, tmp_path):
    (tmp_path / "file").write_text("")
    assert learn("init", "file") == (2, "weft: file is a file; name a folder that is new or empty\n")
    code, said = learn("check", "strydes")
    assert code == 2 and "did you mean" in said
    assert learn("check", "--dir", str(tmp_path))[0] == 2
    assert learn("test-out", "99")[0] == 2
    code, said = learn("show")
    assert code == 2 and "has no kernel" in said
    assert learn("progress", "--import", "missing.json")[0] == 2


def test_accesses_are_drawn_in_the_terminal_and_as_a_page(learn, tmp_path):
    exercise = course.find("vector_add")
    learn()
    for path, text in exercise.solution("en").items():
        (learn.folder / path).write_text(text)
    code, said = learn("show", "vector_add", "--html", "page.html")
    assert code == 0 and "A A A A" in said and "C C C C" in said and "x_ptr[" in said and "bytes read in" in said
    page = (tmp_path / "page.html").read_text()
    assert page.count("<table>") == 3 and "http" not in page and 'title="element 0: program 0"' in page
    for path, text in exercise.solution("en").items():
        (learn.folder / path).write_text(text.replace("* BLOCK +", "* BLOCK + 1 +"))
    _, said = learn("show", "vector_add", "--lang", "zh")
    assert "越界" in said


def test_watch_checks_on_save(learn):
    learn()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", "learn", "watch", "--dir", str(learn.folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a terminal, whatever started the tests
    )  # fmt: skip
    lines = []

    def until(text):
        for line in process.stdout:
            lines.append(line)
            if text in line:
                return
        raise AssertionError("".join(lines))

    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        until("Ctrl-C")
        learn.file.write_text(DONE.replace("block - 1", "block - 2"))
        until("✗ right")
        until("Ctrl-C")
        learn.file.write_text(DONE)
        until("Passed")
        until("Ctrl-C")
        process.send_signal(signal.SIGINT)
        process.wait(20)
    finally:
        watchdog.cancel()
        process.kill()
        process.stdout.close()
        process.wait(20)
    assert "\x1b[" not in "".join(lines)
    assert progress.load(learn.folder).of(FIRST.id).state == "passed"


def test_a_narrow_terminal_without_colours_loses_nothing(learn, monkeypatch):
    monkeypatch.setattr(console.out, "_width", 34)  # COLUMNS counts where the console is made, once
    monkeypatch.setenv("NO_COLOR", "1")
    learn()
    code, said = learn("check")
    assert code == 1 and f"{learn.file}:" in said and "expected is" in said and "\x1b" not in said
    _, said = learn("hint")
    text = " ".join(said.split())
    assert FIRST.hints("en")[0] in text and max(map(len, said.splitlines()[2:])) <= 34
