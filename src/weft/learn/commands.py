"""``weft learn``: the course."""

import difflib
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.console import out, print_line
from weft.learn import course, feedback, judge, machine, progress, workspace
from weft.learn.course import Exercise
from weft.learn.feedback import Screen
from weft.learn.judge import Servers
from weft.learn.language import Text, known, of_locale
from weft.learn.workspace import Workspace

PANEL = "Course"
Language = Annotated[str, typer.Option("--lang", help="en or zh; default: the folder's, at first the locale's")]
Folder = Annotated[str, typer.Option("--dir", help="the course folder; default: this one, or ./weft-course")]
Which = Annotated[
    str, typer.Argument(help="an exercise, as day1/strides, strides or its file; default: the one at hand")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    verbs: dict[str, Callable[..., None]] = {
        "learn": learn,
        "learn init": init,
        "learn watch": watch,
        "learn check": check,
        "learn hint": hint,
        "learn solution": solution,
        "learn show": show,
        "learn reset": reset,
        "learn skip": skip,
        "learn test-out": test_out,
        "learn list": list_exercises,
        "learn progress": show_progress,
        "learn certificate": certificate,
        "learn notebooks": notebooks,
    }
    for name, function in verbs.items():
        app.command(name, rich_help_panel=PANEL)(function)
    app.command("learn dev-check", rich_help_panel=PANEL, hidden=True)(dev_check)


class Session:
    """A command's folder, language and progress. The folder is locked while the command changes the progress."""

    def __init__(self, folder: str, language: str) -> None:
        if platform.system() == "Windows":
            raise ValueError("exercises run on Linux, macOS or WSL2 (wsl --install); lessons can be read anywhere")
        asked = known(language) if language else ""
        found = workspace.find(folder)
        if found is None:
            found = workspace.make(Path(workspace.DEFAULT), asked or of_locale())
            _made(found)
        self.workspace: Workspace = found
        self.language = asked or of_locale()
        state = progress.load(found.folder, self._tell)
        if asked and asked != state.language:
            workspace.make(found.folder, asked)
            state.language = asked
        self.language = state.language
        self.screen = Screen(self.language)

    def _tell(self, text: Text) -> None:
        out.print(text[self.language], style="yellow", soft_wrap=True)

    def edit(self) -> Any:
        return progress.edit(self.workspace.folder, self._tell)

    def exercise(self, name: str, state: progress.Progress) -> Exercise:
        """The exercise that is named or at hand; its files are restored where they are missing."""
        if name:
            found = course.find(name)
        else:
            every = {e.id: e for e in course.exercises()}
            at_hand = every.get(state.current) or feedback.following(every.values(), state)
            if at_hand is None:
                raise ValueError("every exercise is done; name one: `weft learn list`")
            found = at_hand
        for path in self.workspace.restore(found, self.language):
            self.screen.say(
                Text(
                    f"{path.name} was missing; it is there again, as shipped", f"{path.name} 不见了，已恢复为初始版本"
                ),
                "yellow",
            )
        return found


def learn(language: Language = "", folder: Folder = "") -> None:
    """The course: the next exercise and where its file is. Also: init, watch, check, hint, solution, show, list …"""
    session = Session(folder, language)
    with session.edit() as state:
        _go_on(session, state, state.current)


def _go_on(session: Session, state: progress.Progress, current: str = "") -> None:
    """Shows the exercise at hand, or the next one where that is done."""
    screen = session.screen
    every = {e.id: e for e in course.exercises()}
    found = every.get(current)
    if found is None or state.of(found.id).settled:
        found = feedback.following(every.values(), state)
    if found is None:
        screen.say(
            Text(
                "All exercises are done. `weft learn certificate` writes the report.",
                "全部练习已完成。`weft learn certificate` 生成报告。",
            ),
            "bold green",
        )
        return
    state.current = found.id
    session.exercise(found.id, state)
    day = feedback.day_of(found)
    screen.day(day, state)
    screen.say(Text(f"  lesson: {session.workspace.lesson(day)}", f"  课文：{session.workspace.lesson(day)}"), "dim")
    screen.say()
    screen.titled(found, session.workspace)
    if state.of(found.id).state == "skipped":
        screen.say(Text("  (skipped before; everything else is done)", "  （之前跳过；其余都已完成）"), "yellow")
    screen.say()
    screen.say(
        Text(
            "Edit the file, then `weft learn check`; or leave `weft learn watch` running, which checks on every save.",
            "编辑该文件，然后 `weft learn check`；或者让 `weft learn watch` 一直运行，每次保存自动检查。",
        ),
        "dim",
    )


def init(
    folder: Annotated[str, typer.Argument(help="a new or empty folder, or one to mend")] = workspace.DEFAULT,
    language: Language = "",
) -> None:
    """Make a course folder: the exercises to edit, and the lessons with this machine's numbers."""
    _made(workspace.make(Path(folder), known(language) if language else of_locale()))


def _made(made: Workspace) -> None:
    screen = Screen(progress.load(made.folder).language)
    count = len(course.exercises())
    screen.say(
        Text(
            f"{made.folder} has {count} exercises in {len(course.days())} days. `weft learn` there shows the first.",
            f"{made.folder} 中有 {len(course.days())} 天共 {count} 个练习。在该目录运行 `weft learn` 从第一个开始。",
        )
    )


def check(which: Which = "", language: Language = "", folder: Folder = "") -> None:
    """Check an exercise, stage by stage: parses, runs, right, safe, predicted, fast."""
    session = Session(folder, language)
    with session.edit() as state:
        exercise = session.exercise(which, state)
        with Servers() as servers:
            verdict = _check(session, state, exercise, servers)
    if not verdict.passed:
        raise typer.Exit(1)


def _check(session: Session, state: progress.Progress, exercise: Exercise, servers: Servers) -> judge.Verdict:
    gpu = servers.gpu(exercise)
    timed = gpu or (exercise.kind == "cuda" and machine.has_gpu())
    numbers = machine.numbers(session.workspace.folder) if timed else None
    verdict = judge.judge(exercise, session.workspace.paths(exercise), servers.of(exercise), gpu=gpu, machine=numbers)
    entry = state.of(exercise.id)
    if state.current != exercise.id and not entry.settled:
        state.current = exercise.id
    session.screen.verdict(verdict, session.workspace)
    if not entry.settled or entry.state == "skipped":
        entry.attempts += 1
    if verdict.passed:
        if entry.state != "passed":
            entry.state, entry.passed_at = "passed", progress.now()
        entry.notes = [[n.en, n.zh] for n in verdict.notes]
        session.screen.say(
            Text(
                f"Passed. `weft learn solution {exercise.id}` compares yours with ours, and says why.",
                f"通过。`weft learn solution {exercise.id}` 对比参考解法并说明理由。",
            ),
            "bold green",
        )
        session.screen.say()
        _go_on(session, state, state.current)
    return verdict


def watch(language: Language = "", folder: Folder = "") -> None:
    """Check the exercise at hand on every save, until Ctrl-C."""
    session = Session(folder, language)
    by_path = {p: e for e in course.exercises() for p in session.workspace.paths(e).values()}
    servers = Servers()

    def checked(exercise: Exercise) -> None:
        with session.edit() as state:
            session.exercise(exercise.id, state)
            _check(session, state, exercise, servers)
        session.screen.say(Text("watching; Ctrl-C ends", "监视中；Ctrl-C 结束"), "dim")

    # Asking each file for its time finds every save, on network drives and WSL as well, also one during a check.
    saved = {path: _saved_at(path) for path in by_path}
    with session.edit() as state:
        _go_on(session, state, state.current)
    session.screen.say(Text("watching; Ctrl-C ends", "监视中；Ctrl-C 结束"), "dim")
    try:
        while True:
            time.sleep(0.2)
            for path, exercise in by_path.items():
                if (at := _saved_at(path)) not in (saved[path], 0.0):
                    saved[path] = at
                    out.rule(style="dim")
                    checked(exercise)
    except KeyboardInterrupt:  # how a watch ends
        session.screen.say()
    finally:
        servers.close()


def _saved_at(path: Path) -> float:
    """When the file was saved; 0 while an editor replaces it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def hint(which: Which = "", language: Language = "", folder: Folder = "") -> None:
    """The next of an exercise's three hints; those seen before are shown again."""
    session = Session(folder, language)
    with session.edit() as state:
        exercise = session.exercise(which, state)
        entry = state.of(exercise.id)
        hints = exercise.hints(session.language)
        entry.hints = min(entry.hints + 1, len(hints))
        session.screen.titled(exercise, session.workspace)
        for number, text in enumerate(hints[: entry.hints], 1):
            session.screen.say()
            session.screen.prose(f"{number}/{len(hints)}  {text}")
        if entry.hints == len(hints):
            session.screen.say()
            session.screen.say(
                Text(
                    "That was the last hint; next is `weft learn solution`.",
                    "这是最后一个提示；再往后是 `weft learn solution`。",
                ),
                "dim",
            )


def solution(which: Which = "", language: Language = "", folder: Folder = "") -> None:
    """Our solution beside yours, and why: after a pass, or when asked for twice."""
    session = Session(folder, language)
    screen = session.screen
    with session.edit() as state:
        exercise = session.exercise(which, state)
        entry = state.of(exercise.id)
        screen.titled(exercise, session.workspace)
        if entry.state not in ("passed", "tested-out"):
            entry.asked += 1
            if entry.asked < 2:
                screen.say(
                    Text(
                        "You have not passed it yet. Ask once more to see the solution; a hint may be the better step: "
                        "`weft learn hint`.",
                        "这个练习还没有通过。再运行一次就会显示解法；也许先看提示更好：`weft learn hint`。",
                    ),
                    "yellow",
                )
                return
        for name, ours in exercise.solution(session.language).items():
            path = session.workspace.folder / name
            yours = path.read_text(encoding="utf-8", errors="replace")
            diff = list(
                difflib.unified_diff(yours.splitlines(), ours.splitlines(), path.name, "solution", lineterm="", n=2)
            )
            for line in diff or [Text("Yours is the same.", "与参考解法完全相同。")[session.language]]:
                style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
                screen.say(line, style)
        screen.say()
        screen.prose(exercise.why(session.language), 0)


def show(
    which: Which = "",
    html: Annotated[str, typer.Option("--html", help="also write the pictures to this page")] = "",
    language: Language = "",
    folder: Folder = "",
) -> None:
    """Draw which elements your kernel's programs load and store, in the terminal and as a page."""
    from weft.learn import pictures

    session = Session(folder, language)
    state = progress.load(session.workspace.folder)
    exercise = session.exercise(which, state)
    if exercise.kind not in ("triton", "cuda"):
        raise ValueError(
            f"{exercise.id} has no kernel; `weft learn show` draws what a kernel's programs or warps access"
        )
    with Servers() as servers:
        options = {"trace": pictures.PROGRAMS}
        verdict = judge.judge(exercise, session.workspace.paths(exercise), servers.of(exercise), options=options)
    if not verdict.launches:
        session.screen.verdict(verdict, session.workspace)
        raise typer.Exit(1)
    session.screen.titled(exercise, session.workspace)
    launch = max(verdict.launches, key=lambda made: (bool(made["problems"]), min(made["counts"]["programs"], 4)))
    for line, style in pictures.terminal(launch, session.language, min(out.width, 100)):
        session.screen.say(line, style)
    for problem in launch["problems"]:
        session.screen.say("  " + Text(*problem)[session.language], "red")
    if html:
        Path(html).write_text(pictures.page(launch, exercise, session.language), encoding="utf-8")
        session.screen.say(Text(f"written: {html}", f"已写入：{html}"), "dim")


def reset(which: Which = "", language: Language = "", folder: Folder = "") -> None:
    """Start an exercise afresh; your version is kept beside it."""
    session = Session(folder, language)
    with session.edit() as state:
        exercise = session.exercise(which, state)
        entry = state.of(exercise.id)
        entry.state, entry.asked = "open", 0
        state.current = exercise.id
        for path, aside in session.workspace.reset(exercise, session.language):
            kept = Text(f"; yours is {aside.name}", f"；你的版本保存为 {aside.name}") if aside else Text("", "")
            session.screen.say(Text(f"{path} is as shipped{kept.en}", f"{path} 已恢复为初始版本{kept.zh}"))


def skip(which: Which = "", language: Language = "", folder: Folder = "") -> None:
    """Go on without an exercise; it stays in the list as skipped, and comes back when all else is done."""
    session = Session(folder, language)
    with session.edit() as state:
        exercise = session.exercise(which, state)
        entry = state.of(exercise.id)
        if not entry.settled:
            entry.state = "skipped"
        session.screen.say(Text(f"{exercise.id}: skipped", f"{exercise.id}：已跳过"), "yellow")
        session.screen.say()
        _go_on(session, state, "" if state.current == exercise.id else state.current)


def test_out(
    day: Annotated[str, typer.Argument(help="a day, as 1 or day1")], language: Language = "", folder: Folder = ""
) -> None:
    """For the experienced: pass a day by its last exercises alone."""
    session = Session(folder, language)
    found = course.find_day(day)
    deciding = found.deciding()
    with session.edit() as state:
        missing = []
        for exercise in deciding:
            session.exercise(exercise.id, state)
            if state.of(exercise.id).state == "passed":
                continue
            with Servers() as servers:
                verdict = judge.judge(exercise, session.workspace.paths(exercise), servers.of(exercise))
            if verdict.passed:
                state.of(exercise.id).state = "passed"
                state.of(exercise.id).passed_at = progress.now()
            else:
                missing.append(exercise)
        if missing:
            session.screen.say(
                Text(
                    f"{found.id} counts as done when these pass; the rest of the day is then not needed:",
                    f"以下练习通过后，{found.id} 即算完成，当天其余练习可以不做：",
                )
            )
            for exercise in missing:
                session.screen.titled(exercise, session.workspace)
            state.current = missing[0].id
        else:
            for exercise in found.exercises:
                if state.of(exercise.id).state != "passed":
                    state.of(exercise.id).state = "tested-out"
            session.screen.day(found, state)
    if missing:
        raise typer.Exit(1)


def list_exercises(language: Language = "", folder: Folder = "") -> None:
    """All exercises and where you are; skipped ones stay in it."""
    session = Session(folder, language)
    state = progress.load(session.workspace.folder)
    for day in course.days():
        session.screen.day(day, state)
        for exercise in day.exercises:
            session.screen.row(exercise, state)


def show_progress(
    export: Annotated[str, typer.Option("--export", help="write progress and your files to this one file")] = "",
    import_: Annotated[str, typer.Option("--import", help="take over such a file from another machine")] = "",
    language: Language = "",
    folder: Folder = "",
) -> None:
    """Each day's checklist and what counts as success; moves your progress between machines."""
    session = Session(folder, language)
    screen = session.screen
    if import_:
        with session.edit() as state:
            found, aside = workspace.imported(session.workspace, Path(import_).read_text(encoding="utf-8"))
            state.current, state.entries = found.current, found.entries
        for path in aside:
            screen.say(
                Text(f"the version that was here is kept as {path.name}", f"本机原有版本保存为 {path.name}"), "yellow"
            )
    state = progress.load(session.workspace.folder)
    if export:
        Path(export).write_text(workspace.exported(session.workspace, state), encoding="utf-8")
        screen.say(Text(f"written: {export}", f"已写入：{export}"), "dim")
        return
    for day in course.days():
        screen.day(day, state)
        screen.say(Text(f"  success: {day.outcome.en}", f"  达标：{day.outcome.zh}"))
        screen.say(Text(f"  to write: {day.written.en}", f"  书面产出：{day.written.zh}"))
        waiting = [e.id for e in day.exercises if state.of(e.id).state == "skipped"]
        if waiting:
            screen.say(Text(f"  skipped: {', '.join(waiting)}", f"  已跳过：{', '.join(waiting)}"), "yellow")


def certificate(
    file: Annotated[str, typer.Argument(help="the page to write")] = "certificate.md",
    name: Annotated[str, typer.Option(help="whose it is")] = "",
    language: Language = "",
    folder: Folder = "",
) -> None:
    """A report of what was done and measured: exercises, hints used, counts, this machine."""
    from weft.learn import report

    session = Session(folder, language)
    state = progress.load(session.workspace.folder)
    Path(file).write_text(report.written(session.workspace, state, name), encoding="utf-8")
    session.screen.say(Text(f"written: {file}", f"已写入：{file}"))


def notebooks(
    folder: Annotated[str, typer.Argument(help="where to write dayN.LANGUAGE.ipynb")],
    day: Annotated[list[str] | None, typer.Option("--day", help="only these")] = None,
) -> None:
    """Write the course as notebooks, one a day and language, for those who read in Jupyter."""
    from weft.learn import notebook

    for path in notebook.write(Path(folder), [course.find_day(d) for d in day or [d.id for d in course.days()]]):
        print_line(str(path))


def dev_check(
    days: Annotated[list[str] | None, typer.Argument(help="days (day1) or exercises (day1/NAME); else all")] = None,
) -> None:
    """For authors: solutions pass, skeletons fail, wrong solutions are rejected, pages exist in both languages."""
    from weft.learn import dev

    count = 0

    def say(name: str, problems: list[str], seconds: float) -> None:
        print_line(f"{'✗' if problems else '✓'} {name} ({seconds:.1f} s)")
        for problem in problems:
            print_line(f"    {problem}")

    with judge.Servers() as servers:
        for name in days or [d.name for d in course.days()]:
            if "/" in name:
                found = list(dev.problems(course.find(name), servers))
                say(name, found, 0.0)
                count += len(found)
            else:
                count += dev.check_day(course.find_day(name), servers, say)
    if count:
        raise typer.Exit(1)
