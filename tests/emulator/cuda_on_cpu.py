"""CUDA C++ kernels emulated on a CPU (``ptx_on_cpu.hpp``): compiled as they stand and with each of some mistakes in them, and
given jobs, launches that Python computes with the bytes that they find in memory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cuda_as_cpp
import pytest
from where import ROOT

torch = pytest.importorskip("torch")

# Fibers jump between stacks, which some distributions' default _FORTIFY_SOURCE takes for an error.
FLAGS = ("-std=c++17", "-O1", "-w", "-Wno-psabi", "-U_FORTIFY_SOURCE", f"-I{ROOT / 'tests/emulator'}")
BUFFERS, MAPS_BYTES = 11, 5 * 17 * 8  # of ``Job`` in ptx_on_cpu.hpp
FRAME = 64  # bytes before and behind a result that must stay as they were
Case = TypeVar("Case")
Run = Callable[[str, bytes, str], "bytes | str"]


# ---- programs --------------------------------------------------------------------------------------------------------


def compiled(folder: Path, texts: Mapping[str, str]) -> dict[str, Path]:
    """Programs by name, compiled side by side from C++: each once, also where processes of pytest-xdist ask for the same.

    Args:
        folder: of this process alone; theirs lie beside it.
    """
    beside = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    programs = {name: beside / hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    started = []
    with contextlib.ExitStack() as until_compiled:
        for name, program in programs.items():
            lock = until_compiled.enter_context(open(f"{program}.lock", "w"))
            with contextlib.suppress(BlockingIOError):  # whoever has it compiles the program
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not program.exists():
                    (folder / f"{name}.cpp").write_text(texts[name])
                    command = [cuda_as_cpp.compiler(), *FLAGS, "-o", folder / name, folder / f"{name}.cpp"]
                    started.append((name, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        for name, compiler in started:
            errors = compiler.communicate()[1]
            assert compiler.returncode == 0, errors
            (folder / name).rename(programs[name])
    for program in programs.values():
        with open(f"{program}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert program.exists(), "it did not compile in another process, which says why"
    return programs


def _program(spaces: Mapping[str, tuple[str, Iterable[str]]]) -> str:
    """A program that runs jobs: of each namespace the kernels and bodies of functions that launch them on ``Job &job``."""
    # the kernels take longer to compile than to run
    parts, runs = ['#include "ptx_on_cpu.hpp"', '#pragma GCC optimize ("O0")'], []
    for name, (text, bodies) in spaces.items():
        functions = [f"void run{i}(Job &job) {{\n{body}\n}}" for i, body in enumerate(bodies)]
        parts += [f"namespace {name} {{", text, *functions, "}"]
        runs += [f"{name}::run{i}" for i in range(len(functions))]
    parts.append(f"void (*const RUNS[])(Job &) = {{{', '.join(runs)}}};")
    return "\n".join([*parts, "int main() {\n  Job job;\n  job.read();\n  RUNS[job.kernel](job);\n}\n"])


def emulator(
    folder: Path,
    text: str,
    launch: Callable[[Case], str],
    cases: Iterable[Case],
    mistakes: Mapping[str, tuple],
) -> Run:
    """What runs the kernels of a file, right or with a mistake in them.

    Args:
        text: of the kernels, the headers that lie beside their file included (``cuda_as_cpp.whole``).
        launch: the C++ that launches a case's kernel on ``Job &job``.
        mistakes: of each name a case, what stands in the text, what is written instead, and so on in pairs.

    Returns:
        A function of a launch, the bytes of a :func:`job` and a mistake's name (then the launch is that of its case) or
        "". It returns what the job leaves in buffers 4, 8 and 10, or in words what failed.
    """

    def wrong(name: str) -> str:
        made, changes = text, mistakes[name][1:]
        for good, bad in zip(changes[::2], changes[1::2], strict=True):
            assert made.count(good) == 1, f"{name}: the kernels have no single '{good}'"
            made = made.replace(good, bad)
        return cuda_as_cpp.as_cpp(cuda_as_cpp.preprocessed(made))

    launches = list(dict.fromkeys(map(launch, cases)))
    programs = {"right": {"right": (cuda_as_cpp.as_cpp(cuda_as_cpp.preprocessed(text)), launches)}}
    places = {body: ("right", number) for number, body in enumerate(launches)}
    for half in range(2):  # compiled side by side
        spaces = programs[f"wrong{half}"] = {}
        for number, name in enumerate(list(mistakes)[half::2]):
            spaces[f"wrong{number}"] = (wrong(name), [launch(mistakes[name][0])])
            places[name] = (f"wrong{half}", number)
    made = compiled(folder, {name: _program(spaces) for name, spaces in programs.items()})

    def run(body: str, given: bytes, mistake: str = "") -> bytes | str:
        program, number = places[mistake or body]
        done = subprocess.run([made[program]], input=struct.pack("<q", number) + given, capture_output=True, timeout=60)
        if done.returncode:
            assert done.stdout.startswith(b"failed: ") or done.returncode == -11, done
            return done.stdout.decode() or "an access outside memory"
        return done.stdout

    return run


def emulator_of_rows(
    folder: Path, text: str, made: Callable[..., Any], kernels: Sequence[tuple], mistakes: Mapping[str, tuple]
) -> Callable[..., str]:
    """What runs a kernel of ``kernels``, or one of the mistakes, on some rows, and returns what is wrong with its result.

    Args:
        made: ``made(*kernel, rows, seed)`` has a launch, a job, and says what is wrong with what the job leaves.
    """
    run_kernel = emulator(folder, text, lambda i: made(*kernels[i], 1).launch, range(len(kernels)), mistakes)

    def run(kernel: int, rows: int, mistake: str = "", seed: int = 0) -> str:
        case = made(*kernels[kernel], rows, seed)
        found = run_kernel(case.launch, case.job(), mistake)
        return found if isinstance(found, str) else case.what_is_wrong(found)

    return run


def emulator_of_cases(
    folder: Path, text: str, made: Callable[..., Any], cases: Mapping[str, Any], mistakes: Mapping[str, tuple]
) -> Callable[..., str]:
    """What runs a case, or one of the mistakes, and returns what is wrong with its result.

    Args:
        made: ``made(case, seed)`` has a launch, a job, and says what is wrong with what the job leaves.
        mistakes: of each name the name of a case, then as for :func:`emulator`.
    """
    wrong = {name: (cases[of], *change) for name, (of, *change) in mistakes.items()}
    run_kernel = emulator(folder, text, lambda case: made(case).launch, cases.values(), wrong)

    def run(name: str, mistake: str = "", seed: int = 0) -> str:
        case = made(cases[name], seed)
        found = run_kernel(case.launch, case.job(), mistake)
        return found if isinstance(found, str) else case.what_is_wrong(found)

    return run


# ---- jobs ------------------------------------------------------------------------------------------------------------


def job(
    plan,
    seed: int,
    buffers: Mapping[int, bytes],
    *,
    maps: bytes = b"",
    shape: Iterable[int] = (),
    scales: Iterable[int] = (),
    factors: Iterable[float] = (),
) -> bytes:
    """What ``Job`` of ptx_on_cpu.hpp reads behind the kernel's number; what is not given is zero or empty.

    Args:
        plan: the ``CudaPlan`` of the launch.
        seed: of the turns that threads take.
    """
    held = [buffers.get(i, b"") for i in range(BUFFERS)]
    head = (plan.grid[0], plan.block, plan.cluster, plan.shared_bytes, seed, *map(len, held))
    numbers = [
        struct.pack(f"<{count}{kind}", *given, *[0] * (count - len(given)))
        for count, kind, given in ((12, "q", [*shape]), (2, "q", [*scales]), (3, "d", [*factors]))
    ]
    return b"".join([struct.pack(f"<{len(head)}q", *head), maps.ljust(MAPS_BYTES, b"\0"), *numbers, *held])


def bytes_of(t: torch.Tensor) -> bytes:
    """All that its storage holds."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes()


# ---- results ---------------------------------------------------------------------------------------------------------


def framed(nbytes: int) -> bytes:
    """Memory for a result in the midst of bytes that must stay as they were."""
    return bytes([0xA5]) * (nbytes + 2 * FRAME)


def frame_is_whole(found: bytes, begin: int = FRAME, end: int = -FRAME) -> bool:
    return set(found[:begin] + found[end:]) == {0xA5}


def tensor_of(found: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(found), dtype=dtype)


def further_off_than_rounding(name: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """An empty string, or where a product is further off than one rounding and a sum in fp32 may be."""
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(got.dtype, 2.0**-24)
    allowed = 1.001 * rounding * want.abs() + 2e-6 * want.abs().max() + 2.0**-25
    far = ~((got.double() - want).abs() <= allowed)
    if not far.any():
        return ""
    at = tuple(far.nonzero()[0].tolist())
    return f"{name}{list(at)} is {got[at].item()}, not {want[at].item()} ({int(far.sum())} of {far.numel()} are wrong)"
