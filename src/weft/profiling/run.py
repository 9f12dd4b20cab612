"""``python -m weft.profiling.run --out trace.json.gz train.py …``: runs a Python program and profiles a few of its steps.

A step ends where the program's first optimizer has stepped, or where its outermost ``torch.nn.Module`` returns
(``--step forward``). ``weft profile -- python train.py`` calls this; under torchrun call it yourself: each rank writes its
trace.
"""

import argparse
import os
import runpy
import sys
import weakref
from pathlib import Path
from typing import Any

NOTHING = 97  # exit status where nothing was recorded


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m weft.profiling.run", description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--wait", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--active", type=int, default=3)
    parser.add_argument("--most-mib", type=int, default=64)
    parser.add_argument("--step", choices=("optimizer", "forward"), default="optimizer")
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="module …, in place of train.py …")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="train.py …")
    given = parser.parse_args(arguments)
    program = ["-m", *given.module] if given.module else given.program
    program = program[1:] if program[:1] == ["--"] else program
    if not program or program == ["-m"]:
        parser.error("no program; expected train.py … or -m module …")

    from weft.profiling.session import profile

    try:
        session = profile(
            _of_rank(Path(given.out).absolute()),  # the program may change its folder
            wait=given.wait,
            warm_up=given.warm_up,
            active=given.active,
            stacks=given.stacks,
            most_mib=given.most_mib,
        )
    except ModuleNotFoundError as error:
        sys.stderr.write(f"weft: {error} (of {sys.executable})\n")
        return 2
    session.__enter__()
    hooks = _forward_steps(session) if given.step == "forward" else _optimizer_steps(session)
    try:
        _run(program)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        for hook in hooks:
            hook.remove()
        session.stop()
    if not session.done:
        other = "forward" if given.step == "optimizer" else "optimizer"
        sys.stderr.write(
            f"weft: the program ended after {session.steps} steps ({given.step}), before anything was recorded; expected at "
            f"least {session.needed} (wait + warm-up + 1); a step may also be counted with --step {other}\n"
        )
        return NOTHING
    if session.left_out:
        sys.stderr.write(
            f"weft: left out of the trace to keep it within {given.most_mib} MiB: {', '.join(session.left_out)}\n"
        )
    return 0


def _of_rank(out: Path) -> Path:
    """``trace.json.gz`` → ``trace.rank3.json.gz`` under a launcher."""
    rank = os.environ.get("RANK")
    if rank is None or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return out
    name, dot, suffix = out.name.partition(".")
    return out.with_name(f"{name}.rank{rank}{dot}{suffix}")


def _optimizer_steps(session: Any) -> list[Any]:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[Any] = []  # of several optimizers the first one ends a step

    def stepped(optimizer: Any, *rest: Any) -> None:
        if not first:
            first.append(weakref.ref(optimizer))
        if first[0]() is optimizer:
            session.step()
            if session.done:
                hook.remove()
        elif first[0]() is None:
            first.clear()

    hook = register_optimizer_step_post_hook(stepped)
    return [hook]


def _forward_steps(session: Any) -> list[Any]:
    from torch.nn.modules import module

    depth = 0

    def entered(*rest: Any) -> None:
        nonlocal depth
        depth += 1

    def left(*rest: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            session.step()
            if session.done:
                for hook in hooks:
                    hook.remove()

    hooks = [
        module.register_module_forward_pre_hook(entered),
        module.register_module_forward_hook(left, always_call=True),
    ]
    return hooks


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        if not os.path.isfile(program[0]):
            raise SystemExit(f"weft: no such program: {program[0]}")
        sys.argv = program
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
