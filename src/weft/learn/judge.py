"""Runs one exercise's stages on the learner's file: parse, run, right, safe, predict, fast."""

import importlib.util
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.learn import checks, process, rules
from weft.learn.checks import Rejected
from weft.learn.course import Exercise
from weft.learn.language import Text
from weft.learn.machine import has_gpu

NOTHING = Text("", "")


@dataclass
class Verdict:
    """What a check found.

    Attributes:
        failed: The stage that failed; None when all tests pass.
        done: Whether the marker is removed as well. Only then is the exercise passed.
    """

    exercise: Exercise
    failed: str | None = None
    why: Text = NOTHING
    more: list[Text] = field(default_factory=list)
    notes: list[Text] = field(default_factory=list)
    printed: str = ""
    done: bool = False
    seconds: float = 0.0
    reached: set[str] = field(default_factory=set)  # the stages that were checked
    launches: list[dict[str, Any]] = field(default_factory=list)  # what kernels did: see interpreter.Launch

    @property
    def passed(self) -> bool:
        return self.failed is None and self.done


class Servers:
    """One warm process for each kind of exercise, started when first used."""

    def __init__(self) -> None:
        self.by_kind: dict[str, process.Server] = {}

    def of(self, exercise: Exercise) -> process.Server:
        """The process that imported what the exercise needs."""
        imported = exercise.requires if exercise.requires in ("torch", "training") else "python"
        return self._started("triton" if exercise.kind == "triton" else imported)

    def gpu(self, exercise: Exercise) -> process.Server | None:
        """The process that runs Triton's kernels on this machine's GPU; None without one, or where there is nothing to run."""
        return self._started("gpu") if exercise.kind == "triton" and has_gpu() else None

    def _started(self, kind: str) -> process.Server:
        if kind not in self.by_kind:
            self.by_kind[kind] = process.Server(kind)
        return self.by_kind[kind]

    def close(self) -> None:
        for server in self.by_kind.values():
            server.close()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def judge(
    exercise: Exercise,
    files: dict[str, Path],
    server: process.Server,
    seed: int | None = None,
    options: dict[str, Any] | None = None,
    gpu: process.Server | None = None,
    machine: dict[str, Any] | None = None,
) -> Verdict:
    """The verdict on the learner's files, given by suffix (``.py``, ``.cu``).

    Args:
        options: How kernels are interpreted: see ``interpreter.recording``.
        gpu: A server of the kind ``gpu``: what passes is then run and timed there.
        machine: This machine's rates: see ``machine.numbers``.
    """
    began = time.monotonic()
    _installed(exercise)
    verdict = Verdict(exercise)
    sources = {}
    try:
        for suffix, path in files.items():
            try:
                sources[suffix] = path.read_text(encoding="utf-8-sig")  # with CRLF as with LF
            except UnicodeDecodeError as error:
                raise Rejected(
                    "parse",
                    Text(
                        f"{path.name} is not UTF-8: byte {error.start}",
                        f"{path.name} 不是 UTF-8 编码：第 {error.start} 字节",
                    ),
                ) from None
        verdict.done = not any(rules.has_marker(s) if k == ".py" else rules.MARKER in s for k, s in sources.items())
        _stages(exercise, files, sources, server, verdict, seed, options, gpu, machine)
    except Rejected as rejected:
        verdict.failed, verdict.why, verdict.more = rejected.stage, rejected.why, list(rejected.more)
    verdict.seconds = time.monotonic() - began
    return verdict


def _installed(exercise: Exercise) -> None:
    """Says how to install what an exercise needs, before anything fails for the lack of it."""
    needed = ["torch", "triton"] if exercise.kind == "triton" else ["torch"] if exercise.requires != "nothing" else []
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{exercise.id} needs {name}: run `make setup`, or pip install 'weft[gpu,train]'")


def _stages(
    exercise: Exercise,
    files: dict[str, Path],
    sources: dict[str, str],
    server: process.Server,
    verdict: Verdict,
    seed: int | None,
    options: dict[str, Any] | None,
    gpu: process.Server | None,
    machine: dict[str, Any] | None,
) -> None:
    source = sources.get(".py")
    if source is not None:
        if wrong := rules.syntax_error(source):
            raise Rejected("parse", wrong[1])
        if wrong := rules.not_allowed(source, exercise.allow, exercise.forbid):
            raise Rejected("parse", wrong[1])
    verdict.reached.add("parse")
    running = None
    t = checks.Checks(sources=sources, seed=seed)
    t.reached = verdict.reached
    t.traced = (options or {}).get("trace", 0)
    try:
        learner = None
        if source is not None:
            probe = exercise.folder / "probe.py"
            running = server.start(files[".py"], exercise.time_limit_s, probe if probe.exists() else None)
            t.running = running
            running.options = options or {}
            running.request(do="load")
            t.reached.add("run")
            learner = process.Remote(running, None, ())
        functions = checks.load(exercise.folder / "check.py")
        functions["check"](learner, t)
        if running is not None and running.computed and not exercise.torch:
            names = ", ".join(f"`{name}`" for name in dict.fromkeys(running.computed))
            raise Rejected(
                "right",
                Text(
                    f"{names} of PyTorch computed outside of your kernels; there tensors are only made, viewed and copied",
                    f"PyTorch 的 {names} 在核函数之外做了计算；在那里只能创建、查看和复制张量",
                ),
            )
        t.safe()
        if gpu is not None and running is not None and "fast" in functions:
            verdict.launches, verdict.printed = running.all_launches, running.printed()
            running.close()
            running = t.running = gpu.start(files[".py"], exercise.time_limit_s + 60)
            running.request(do="load")
            t.limit, t.machine = exercise.limit, machine or {}
            functions["fast"](process.Remote(running, None, ()), t)
        elif exercise.kind == "cuda" and machine and has_gpu() and "fast" in functions:
            t.limit, t.machine = exercise.limit, machine
            functions["fast"](None, t)
        verdict.notes = t.notes
    except Rejected as rejected:
        if rejected.stage == "right" and running is not None:  # a wrong result often is an access that is not safe
            problems = [Text(*p) for launch in running.all_launches for p in launch["problems"]]
            raise Rejected("right", rejected.why, *rejected.more, *problems[:1]) from None
        raise
    except process.Failed as failed:
        if failed.reason == "changed":
            name, number = failed.error["message"].rsplit(", ", 1)
            raise Rejected(
                "right",
                Text(
                    f"{name} changed its argument number {int(number) + 1}, which it may only read",
                    f"{name} 修改了它的第 {int(number) + 1} 个参数，而该参数只可读取",
                ),
            ) from None
        raise Rejected("run", _how(failed, source or "", exercise), *_commented(source or "", failed)) from None
    finally:
        verdict.printed = verdict.printed or "".join(t.printed)
        verdict.launches = verdict.launches or t.kernels
        if running is not None:
            verdict.printed = verdict.printed or running.printed()
            verdict.launches = verdict.launches or running.all_launches
            running.close()


def _how(failed: process.Failed, source: str, exercise: Exercise) -> Text:
    """Where and why the learner's code did not return."""
    error = failed.error
    lines = source.splitlines()
    where = where_zh = shown = ""
    if error["lines"]:
        number, function = error["lines"][-1]
        at = "" if function == "<module>" else f" in {function}"
        where, where_zh = f"line {number}{at}", f"第 {number} 行{at and f'({function})'}"
        if 0 < number <= len(lines):
            shown = f"\n    {lines[number - 1].strip()}"
    if error["type"] == "Missing":
        return Text(f"the file defines no `{error['message']}`", f"文件里没有定义 `{error['message']}`")
    if failed.reason == "time":
        limit = f"{exercise.time_limit_s:g}"
        return Text(
            f"stopped after {limit} s" + (f" at {where}{shown}" if where else ""),
            f"运行超过 {limit} 秒，已停止" + (f"，停在{where_zh}{shown}" if where else ""),
        )
    if failed.reason == "crash":
        what = error["message"] or "it ended without a result"
        what_zh = error["message"] or "未返回结果就结束了"
        return Text(
            f"the process crashed: {what}" + (f", at {where}{shown}" if where else ""),
            f"进程崩溃：{what_zh}" + (f"，位于{where_zh}{shown}" if where else ""),
        )
    what = error["type"] + (f": {error['message']}" if error["message"] else "")
    return Text(f"{where}: {what}{shown}" if where else what, f"{where_zh}：{what}{shown}" if where else what)


def _commented(source: str, failed: process.Failed) -> list[Text]:
    if failed.error["type"] not in ("Missing", "AttributeError", "NameError"):
        return []
    if not (found := rules.commented_out(source)):
        return []
    return [
        Text(
            f"line {found[0]} has code in a comment: is that what is missing?",
            f"第 {found[0]} 行的注释里有代码：缺的是它吗？",
        )
    ]
