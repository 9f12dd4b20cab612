"""The doctor: examines this machine and says what to do about each thing that is not as it should be.

Standard library alone, so it also runs before anything is installed: ``PYTHONPATH=src python3 -m weft doctor``.
The checks themselves are in ``driver``, ``frameworks``, ``machine`` and ``access``; each one degrades to one line.
Why versions must fit: docs/notes/learn/drivers.en.md.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from weft.hardware import access, machine
from weft.hardware.driver import Driver, cuda_driver_finding, driver_findings, read_driver
from weft.hardware.findings import SYMBOLS, Finding, as_json, exit_code, guarded, render
from weft.hardware.frameworks import ask_frameworks, framework_findings, installed
from weft.hardware.probe import ask_module

__all__ = ["LEVELS", "Finding", "as_json", "examine", "exit_code", "main", "render"]

LEVELS = ("quick", "full")
# How long one framework may take to import: short in the quick level, although a cold network disk is slow.
TIMEOUT_S = {"quick": 13.0, "full": 120.0}


def examine(level: str = "quick", timeout_s: float | None = None) -> list[Finding]:
    """Every finding about this machine, in the order in which they are shown.

    ``level`` is ``"quick"`` (nothing is run on the GPU; seconds) or ``"full"`` (also a kernel, a matrix product and a
    copy). ``timeout_s`` is for each probe; by default 13 s and 120 s, or ``WEFT_DOCTOR_TIMEOUT_S``.
    Raises ``ValueError`` for any other level, and nothing else.
    """
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    if timeout_s is None:
        timeout_s = _seconds(os.environ.get("WEFT_DOCTOR_TIMEOUT_S")) or TIMEOUT_S[level]
    with ThreadPoolExecutor(2) as pool:  # the frameworks take longest, so they start first
        frameworks = pool.submit(ask_frameworks, timeout_s)
        driver = read_driver(timeout_s)
        has_gpu = bool(driver.gpus)
        cuda = pool.submit(cuda_driver_finding, driver, timeout_s)
        sections: list[tuple[str, str, Callable[[], list[Finding]]]] = [
            ("nvidia-driver", "GPU", lambda: driver_findings(driver)),
            ("cuda-driver-api", "GPU", lambda: [cuda.result()]),
            ("cuda-toolkit", "GPU", lambda: machine.tool_findings(has_gpu)),
            ("pytorch", "Frameworks", lambda: framework_findings(driver, frameworks.result())),
            ("operating-system", "System", lambda: machine.system_findings(has_gpu)),
            ("container", "Container", lambda: access.container_findings(has_gpu)),
            ("device-files", "Permissions", lambda: access.permission_findings(has_gpu)),
        ]
        findings = [finding for name, group, check in sections for finding in guarded(name, group, check)]
    if level == "full":
        findings += trial_findings(driver, timeout_s)
    return findings


def trial_findings(driver: Driver, timeout_s: float) -> list[Finding]:
    """``triton-kernel``, ``matrix-product`` and ``memory-copy``, one after another so that none disturbs a rate."""
    findings = []
    for part in ("triton-kernel", "matrix-product", "memory-copy"):
        needs = ["torch", "triton"] if part == "triton-kernel" else ["torch"]
        if not all(installed(module) for module in needs):
            found = f"not run: {' and '.join(needs)} not installed"
            findings.append(Finding(part, "warn", found, "make setup", "Trial"))
            continue
        interpret = {} if driver.gpus else {"TRITON_INTERPRET": "1"}
        reply = ask_module("weft.hardware.trial", part, timeout_s=timeout_s, **interpret)
        command = f"{''.join(f'{k}={v} ' for k, v in interpret.items())}python -m weft.hardware.trial {part}"
        if reply.problem:
            findings.append(Finding(part, "fail", reply.problem, f"see the whole error: {command}", "Trial"))
        elif not reply.value["right"]:
            fix = f"{command}; if it is wrong again, check the GPU: nvidia-smi -q -d ECC,ROW_REMAPPER"
            findings.append(Finding(part, "fail", f"WRONG RESULT: {reply.value['found']}", fix, "Trial"))
        else:
            findings.append(Finding(part, "pass", reply.value["found"], "", "Trial"))
    return findings


def _seconds(text: str | None) -> float | None:
    try:
        return max(float(text), 0.1) if text else None
    except ValueError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """The command without typer: ``weft doctor [--json] [--level quick|full]``. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="weft doctor", description="Examine this machine; say what to mend and how.")
    parser.add_argument("--json", action="store_true", help="write one JSON document")
    parser.add_argument("--level", choices=LEVELS, default="quick", help="full also runs and times work")
    options = parser.parse_args(argv)
    return show(examine(options.level), options.json)


def show(findings: list[Finding], as_document: bool) -> int:
    """Prints the findings, or one JSON document of them; returns the exit status."""
    if as_document:
        text = json.dumps(as_json(findings), indent=2) + "\n"
    else:
        text = for_terminal(render(findings, min(shutil.get_terminal_size().columns, 100)), sys.stdout.encoding)
    sys.stdout.write(text)
    return exit_code(findings)


def for_terminal(text: str, encoding: str | None) -> str:
    """The text as it is where the terminal can show it, with ASCII symbols and ``?`` where it cannot."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        text = text.replace(SYMBOLS["pass"], "+").replace(SYMBOLS["fail"], "x").replace("×", "x").replace("…", "...")
        return text.encode("ascii", "replace").decode()
    return text


if __name__ == "__main__":
    sys.exit(main())
