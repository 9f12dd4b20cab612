"""Runs a query in a separate Python process, so that a crash, a hang or a broken import costs one line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.hardware.findings import one_line

# What libraries print on import goes to the same stdout, so the answer's line is marked.
MARK = "weft-probe:"
SOURCE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Answer:
    """``value`` is what the process answered; when it did not, ``problem`` says why in one line."""

    value: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def ask_code(code: str, timeout_s: float, **environment: str) -> Answer:
    """Runs code that calls ``answer(key=value, …)`` once."""
    preamble = f"import json\ndef answer(**value):\n    print('\\n{MARK}' + json.dumps(value), flush=True)\n"
    return ask([sys.executable, "-c", preamble + code], timeout_s, **environment)


def ask_module(module: str, *arguments: str, timeout_s: float, **environment: str) -> Answer:
    """Runs a module of weft that writes one marked line; works where weft is not installed."""
    path = os.pathsep.join([str(SOURCE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ask([sys.executable, "-m", module, *arguments], timeout_s, **{"PYTHONPATH": path, **environment})


def ask(command: Sequence[str], timeout_s: float, **environment: str) -> Answer:
    """Runs a command for at most ``timeout_s`` seconds, then kills it with all its children. Never raises."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
            start_new_session=True,
        )
    except OSError as error:
        return Answer(problem=f"cannot start {command[0]}: {error}")
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process stuck inside a GPU driver cannot be killed at once; do not wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        return Answer(problem=f"no answer within {timeout_s:g} s")
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):
                return Answer(json.loads(line[len(MARK) :]))
    if process.returncode < 0:
        return Answer(problem=f"killed by signal {signal_name(-process.returncode)}")
    last = [line for line in err.splitlines() if line.strip()]
    return Answer(problem=one_line(last[-1]) if last else f"no answer, exit status {process.returncode}")


def signal_name(number: int) -> str:
    """``11`` → ``"SIGSEGV"``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
