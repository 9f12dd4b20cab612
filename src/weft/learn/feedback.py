"""What a check found, for the terminal: 80 columns or fewer, with or without colours."""

from collections.abc import Iterable

from rich.padding import Padding
from rich.text import Text as Line

from weft.console import out
from weft.learn.checks import STAGES
from weft.learn.course import Day, Exercise, days
from weft.learn.judge import Verdict
from weft.learn.language import Text
from weft.learn.progress import Progress
from weft.learn.workspace import Workspace

NAMES = {
    "parse": Text("parses", "可解析"),
    "run": Text("runs", "可运行"),
    "right": Text("right", "正确"),
    "safe": Text("safe", "安全"),
    "predict": Text("predicted", "预测"),
    "fast": Text("fast", "够快"),
}
STATES = {
    "open": ("·", "", Text("open", "未完成")),
    "passed": ("✓", "green", Text("passed", "已通过")),
    "skipped": ("→", "yellow", Text("skipped", "已跳过")),
    "tested-out": ("✓", "cyan", Text("tested out", "已免修")),
}


class Screen:
    """Prints in one language. Paths and messages are never cut: a terminal breaks them."""

    def __init__(self, language: str) -> None:
        self.language = language

    def say(self, text: Text | str = "", style: str = "") -> None:
        out.print(text[self.language] if isinstance(text, Text) else text, style=style or None, soft_wrap=True)

    def prose(self, text: str, indent: int = 2) -> None:
        """Text whose lines may be broken between words; those that begin with a space are kept, as code is."""
        width = min(out.width, 100)
        code = False
        for line in text.splitlines():
            code ^= line.startswith("```")
            if code or line.startswith((" ", "|", "```")):
                self.say(" " * indent + line)
            else:
                out.print(Padding(Line(line), (0, 0, 0, indent), expand=False), width=width)

    def titled(self, exercise: Exercise, workspace: Workspace) -> None:
        """The exercise's name and its file, as editors and terminals open it: path:line."""
        out.print(Line(f"{exercise.id} · {exercise.title[self.language]}", style="bold"), soft_wrap=True)
        self.say(f"  {workspace.file(exercise)}:{first_task(workspace, exercise)}", "cyan")

    def verdict(self, verdict: Verdict, workspace: Workspace) -> None:
        """The stages, what is wrong with the first that fails, and what to do next."""
        exercise = verdict.exercise
        self.titled(exercise, workspace)
        line = Line("  ")
        for stage in STAGES:
            if stage == verdict.failed:
                line.append(f"✗ {NAMES[stage][self.language]}  ", style="bold red")
                break
            if stage in verdict.reached:
                line.append(f"✓ {NAMES[stage][self.language]}  ", style="green")
        line.append(f"{verdict.seconds:.1f} s", style="dim")
        out.print(line, soft_wrap=True)
        for text in (verdict.why, *verdict.more):
            if text[self.language]:
                self.say()
                self.say(_indented(text[self.language]))
        for note in verdict.notes:
            self.say(_indented(note[self.language]))
        if printed := verdict.printed.rstrip():
            self.say()
            self.say(Text("  printed by your code:", "  你的代码的输出："), "dim")
            lines = printed.splitlines()
            self.say(_indented("\n".join(lines[:20]), "  | "))
            if len(lines) > 20:
                more = len(lines) - 20
                self.say(Text(f"  | … {more} more lines", f"  | … 还有 {more} 行"), "dim")
        self.say()
        if verdict.failed:
            self.say(NEXT[verdict.failed], "dim")
        elif not verdict.done:
            self.say(
                Text(
                    "All tests pass. Remove the line `# I AM NOT DONE` when you are content, and check again.",
                    "测试全部通过。满意后删除 `# I AM NOT DONE` 这一行，再检查一次。",
                ),
                "bold yellow",
            )

    def row(self, exercise: Exercise, progress: Progress) -> None:
        sign, style, name = STATES[progress.of(exercise.id).state]
        here = " ◀" if exercise.id == progress.current else ""
        line = Line(f"  {sign} ", style=style)
        line.append(f"{exercise.id:<24} {exercise.title[self.language]}{here}", style="bold" if here else "")
        if sign == "→":
            line.append(f"  ({name[self.language]})", style=style)
        out.print(line, soft_wrap=True)

    def day(self, day: Day, progress: Progress) -> None:
        settled = [e for e in day.exercises if progress.of(e.id).state in ("passed", "tested-out")]
        self.say(f"{day.id} · {day.title[self.language]}  {bar(len(settled), len(day.exercises))}", "bold")


NEXT = {
    "parse": Text("Mend that line, and check again.", "改好这一行，再检查一次。"),
    "run": Text(
        "Next: look at that line; `weft learn hint` has a hint.", "下一步：看看那一行；`weft learn hint` 有提示。"
    ),
    "right": Text(
        "Next: work out that one element on paper; `weft learn hint` has a hint.",
        "下一步：在纸上算一遍这个元素；`weft learn hint` 有提示。",
    ),
    "safe": Text(
        "Next: which program touches that element, and should it? `weft learn show` draws the accesses.",
        "下一步：哪个实例访问了这个元素，它该访问吗？`weft learn show` 会画出访问。",
    ),
    "predict": Text("Next: count again, by hand; do not guess.", "下一步：动手再数一遍，不要猜。"),
    "fast": Text(
        "Next: which bytes move twice? `weft learn show` draws the accesses.",
        "下一步：哪些字节搬动了两次？`weft learn show` 会画出访问。",
    ),
}


def bar(done: int, total: int) -> str:
    return f"[{'#' * done}{'.' * (total - done)}] {done}/{total}"


def first_task(workspace: Workspace, exercise: Exercise) -> int:
    """The line of the first TODO, else of the first line."""
    try:
        lines = workspace.file(exercise).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 1
    return next((n for n, line in enumerate(lines, 1) if "TODO" in line), 1)


def following(exercises: Iterable[Exercise], progress: Progress) -> Exercise | None:
    """The next exercise that is open, after the one at hand and then from the start; else the next that was skipped."""
    every = list(exercises)
    at = next((i for i, exercise in enumerate(every) if exercise.id == progress.current), 0)
    every = every[at:] + every[:at]
    for state in ("open", "skipped"):
        for exercise in every:
            if progress.of(exercise.id).state == state:
                return exercise
    return None


def day_of(exercise: Exercise) -> Day:
    return next(day for day in days() if day.name == exercise.day)


def _indented(text: str, by: str = "  ") -> str:
    return "\n".join(by + line for line in text.splitlines())
