"""The certificate: what a learner did and measured, as one page of Markdown."""

from weft.learn import machine
from weft.learn.course import days
from weft.learn.language import Text
from weft.learn.progress import Progress, now
from weft.learn.workspace import Workspace


def written(workspace: Workspace, state: Progress, name: str) -> str:
    """The page, in the folder's language. It says what was skipped, and which solutions were looked at first."""
    language = state.language
    found = machine.numbers(workspace.folder)
    title = Text("GPU programming in seven days: what was done", "七天学会 GPU 编程：完成情况")
    lines = [f"# {title[language]}", ""]
    if name:
        lines += [f"**{name}**", ""]
    lines += [f"{now()[:10]} · " + " · ".join(f"{v} {UNITS.get(k, '')}".strip() for k, v in found.items()), ""]
    for day in days():
        done = sum(state.of(e.id).state in ("passed", "tested-out") for e in day.exercises)
        lines += [f"## {day.title[language]} ({done}/{len(day.exercises)})", "", day.outcome[language], ""]
        lines += [HEAD[language], "|---|---|---:|---:|---|"]
        for exercise in day.exercises:
            entry = state.of(exercise.id)
            state_name = STATES[entry.state][language]
            if entry.asked > 1:
                state_name += Text(" (solution seen first)", "（先看了解法）")[language]
            notes = "; ".join(note[language == "zh"] for note in entry.notes)
            lines.append(f"| {exercise.title[language]} | {state_name} | {entry.attempts} | {entry.hints} | {notes} |")
        lines.append("")
    return "\n".join(lines)


UNITS = {"dram_gb_s": "GB/s", "fp32_gflop_s": "GFLOP/s (fp32)", "balance": "FLOP/byte", "cores": "CPU"}
HEAD = Text(
    "| exercise | state | attempts | hints | counted or measured |",
    "| 练习 | 状态 | 尝试次数 | 提示 | 计数或测量 |",
)
STATES = {
    "open": Text("open", "未完成"),
    "passed": Text("passed", "已通过"),
    "skipped": Text("skipped", "已跳过"),
    "tested-out": Text("tested out", "已免修"),
}
