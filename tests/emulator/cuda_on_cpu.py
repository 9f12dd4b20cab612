"""CUDA C++ kernels emulated on a CPU (``ptx_on_cpu.hpp``): compiled as they stand and with each of some mistakes in them, and
given jobs, launches that Python computes with the bytes that they find in memory."""

import contextlib
import fcntl
import hashlib
import itertools
import os
import struct
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuda_as_cpp
import pytest
import torch
from where import ROOT

from weft.operators.launch import compiling_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HERE = ROOT / "tests/emulator"
# Fibers jump between stacks, which some distributions' default _FORTIFY_SOURCE takes for an error.
FLAGS = ("-std=c++17", "-O1", "-w", "-Wno-psabi", "-U_FORTIFY_SOURCE", f"-I{HERE}")
BUFFERS, MAPS_BYTES = 11, 6 * 17 * 8  # of ``Job`` in ptx_on_cpu.hpp
FRAME = 64  # bytes before and behind a result that must stay as they were
TOGETHER = 8  # kernels with mistakes in a program, the first with the right ones: each program costs a second besides


# ---- programs --------------------------------------------------------------------------------------------------------


def _machine(beside: Path) -> Path:
    """A folder with the emulator itself, compiled once for all programs: its header, and what no kernel needs to see."""
    made, partial = beside / "machine", beside / "machine.partial"
    with open(beside / "machine.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            partial.mkdir(exist_ok=True)
            parts = (
                ("-x", "c++-header", HERE / "ptx_on_cpu.hpp", "-o", partial / "ptx_on_cpu.hpp.gch"),
                ("-O2", "-c", HERE / "ptx_on_cpu.cpp", "-o", partial / "ptx_on_cpu.o"),
            )
            running = [subprocess.Popen([cuda_as_cpp.compiler(), *FLAGS, *words]) for words in parts]
            assert [compiler.wait() for compiler in running] == [0, 0], "the emulator does not compile"
            partial.rename(made)
    return made


def compiled(folder: Path, texts: Mapping[str, str]) -> dict[str, Path]:
    """Programs by name, compiled side by side from C++: each once, also where processes of pytest-xdist ask for the same.

    Args:
        folder: of this process alone; theirs lie beside it.
    """
    beside = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    machine = _machine(beside)
    programs = {name: beside / hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    started = []
    with contextlib.ExitStack() as until_compiled:
        for name, program in programs.items():
            lock = until_compiled.enter_context(open(f"{program}.lock", "w"))
            with contextlib.suppress(BlockingIOError):  # whoever has it compiles the program
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not program.exists():
                    (folder / f"{name}.cpp").write_text(texts[name])
                    files = ("-o", folder / name, folder / f"{name}.cpp", machine / "ptx_on_cpu.o")
                    command = [cuda_as_cpp.compiler(), f"-I{machine}", *FLAGS, *files]
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
    parts = ['#include "ptx_on_cpu.hpp"', '#pragma GCC optimize ("O0")', f"constexpr int FRAME = {FRAME};"]
    runs = []
    for name, (text, bodies) in spaces.items():
        functions = [f"void run{i}(Job &job) {{\n{body}\n}}" for i, body in enumerate(bodies)]
        parts += [f"namespace {name} {{", text, *functions, "}"]
        runs += [f"{name}::run{i}" for i in range(len(functions))]
    parts.append(f"void (*const RUNS[])(Job &) = {{{', '.join(runs)}}};")
    return "\n".join([*parts, "int main() {\n  Job job;\n  job.read();\n  RUNS[job.kernel](job);\n}\n"])


@dataclass(frozen=True)
class Suite:
    """The kernels of a file, the cases that they are run on, and mistakes that must be noticed.

    Args:
        text: of the kernels, the headers that lie beside their file included (``cuda_as_cpp.whole``).
        made: a :class:`Launched`, or like one.
        mistakes: of each name a case or its name, what stands in the text, what is written instead, and so on in pairs.
        others: mistakes that are right as far as ``what_is_wrong`` sees, for tests of their own.
        long: names of cases that are left to ``make test-all``.
        seeds: of other operands and other orders of threads, also left to it.
        share: a run has one case in so many, at each commit others.
        always: names of cases that tests of their own launch.
    """

    text: str
    made: Callable[..., Any]
    cases: Mapping[str, Any]
    mistakes: Mapping[str, tuple]
    others: Mapping[str, tuple] = field(default_factory=dict)
    long: Collection[str] = ()
    seeds: Collection[int] = (1, 2)
    share: int = 2
    always: Collection[str] = ()

    def of_mistake(self, name: str) -> Any:
        """The case that shows a mistake."""
        of = {**self.mistakes, **self.others}[name][0]
        return self.cases[of] if isinstance(of, str) else of


class Emulated:
    """A suite's kernels, compiled: right as the cases that ``runs`` wants launch them, other launches when they are first run,
    and with each mistake in them that ``in_turn`` wants."""

    def __init__(
        self,
        folder: Path,
        suite: Suite,
        in_turn: Callable[[str], bool],
        runs: Callable[[str], bool] = lambda case: True,
    ):
        self.folder, self.suite = folder, suite
        wrong = {name: self._wrong(name) for name in (*suite.mistakes, *suite.others)}
        wrong = {name: text for name, text in wrong.items() if name in suite.others or in_turn(name)}
        launch_of = {
            id(case): suite.made(case).launch for name, case in suite.cases.items() if runs(name)
        }  # the result is computed with it
        launches = list(dict.fromkeys(launch_of.values()))
        self.right = cuda_as_cpp.as_cpp(cuda_as_cpp.preprocessed(suite.text))
        programs = [{"right": (self.right, launches)}]
        self.places = {body: ("0", number) for number, body in enumerate(launches)}
        for number, name in enumerate(wrong):
            if number % TOGETHER == TOGETHER - 1:
                programs.append({})
            text = cuda_as_cpp.as_cpp(cuda_as_cpp.preprocessed(wrong[name]))
            case = suite.of_mistake(name)
            before = sum(len(bodies) for _, bodies in programs[-1].values())
            programs[-1][f"wrong{number}"] = (text, [launch_of.get(id(case)) or suite.made(case).launch])
            self.places[name] = (str(len(programs) - 1), before)
        self.programs = compiled(folder, {str(i): _program(spaces) for i, spaces in enumerate(programs)})

    def _wrong(self, name: str) -> str:
        text, changes = self.suite.text, {**self.suite.mistakes, **self.suite.others}[name][1:]
        for good, bad in zip(changes[::2], changes[1::2], strict=True):
            assert text.count(good) == 1, f"{name}: the kernels have no single '{good}'"
            text = text.replace(good, bad)
        return text

    def run(self, made: Any, mistake: str = "") -> bytes | str:
        """What a job leaves in buffers 4, 8 and 10, or in words what failed. With a mistake the launch is that of its case."""
        if not mistake and made.launch not in self.places:
            name = f"launch{len(self.programs)}"
            self.programs |= compiled(self.folder, {name: _program({"right": (self.right, [made.launch])})})
            self.places[made.launch] = (name, 0)
        program, number = self.places[mistake or made.launch]
        given = struct.pack("<q", number) + made.job()
        done = subprocess.run([self.programs[program]], input=given, capture_output=True, timeout=60)
        if done.returncode:
            assert done.stdout.startswith(b"failed: ") or done.returncode == -11, done
            return done.stdout.decode() or "an access outside memory"
        return done.stdout

    def what_is_wrong(self, case: Any, seed: int = 0, mistake: str = "") -> str:
        """With the result of a case, or of the one that shows a mistake; an empty string if nothing is."""
        made = self.suite.made(case, seed)
        found = self.run(made, mistake)
        return found if isinstance(found, str) else made.what_is_wrong(found)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def job(
    plan,
    seed: int,
    buffers: Mapping[int, torch.Tensor | bytes],
    *,
    maps: bytes = b"",
    shape: Iterable[int] | None = None,
    scales: Iterable[int] = (),
    factors: Iterable[float] | None = None,
    static: bool = False,
) -> bytes:
    """What ``Job`` of ptx_on_cpu.hpp reads behind the kernel's number; what is not given is zero or empty.

    Args:
        plan: the ``CudaPlan`` of the launch, whose whole numbers are the shape and whose floats the factors, if not given.
        seed: of the turns that threads take.
        static: whether the kernel has static shared memory.
    """
    numbers = [s.value for s in plan.scalars] if shape is None or factors is None else []
    shape = [n for n in numbers if isinstance(n, int)] if shape is None else shape
    factors = [n for n in numbers if isinstance(n, float)] if factors is None else factors
    held = [buffers.get(i, b"") for i in range(BUFFERS)]
    held = [bytes_of(t) if isinstance(t, torch.Tensor) else t for t in held]
    shared_bytes = plan.shared_bytes + static * cuda_as_cpp.STATIC
    head = (plan.grid[0], plan.block, plan.cluster, shared_bytes, seed, *map(len, held))
    groups = (12, "q", [*shape]), (2, "q", [*scales]), (3, "d", [*factors])
    packed = [struct.pack(f"<{count}{kind}", *given, *[0] * (count - len(given))) for count, kind, given in groups]
    return b"".join([struct.pack(f"<{len(head)}q", *head), maps.ljust(MAPS_BYTES, b"\0"), *packed, *held])


class Launched:
    """A case's tensors, and the launch that a call computes.

    Attributes:
        cpp: the C++ that launches ``KERNEL`` on ``Job &job``, with the plan's ``SCALARS`` out of its shape and factors.
    """

    cpp: str

    def __init__(self, case: Any, seed: int = 0):
        self.case, self.seed = case, seed
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            self.plan = self.planned(case, torch.Generator().manual_seed(seed), patch)

    def planned(self, case: Any, g: torch.Generator, patch: pytest.MonkeyPatch) -> Any:
        """Draws the tensors, and plans a call of them on sm_90."""
        raise NotImplementedError

    @property
    def launch(self) -> str:
        numbers = {"shape": itertools.count(), "factors": itertools.count()}
        arrays = ("factors" if isinstance(s.value, float) else "shape" for s in self.plan.scalars)
        scalars = ", ".join(f"job.{array}[{next(numbers[array])}]" for array in arrays)
        return self.cpp.replace("KERNEL", self.plan.expression).replace("SCALARS", scalars)

    def job(self) -> bytes:
        """What the launch finds in memory."""
        raise NotImplementedError

    def what_is_wrong(self, found: bytes) -> str:
        """With what it leaves, in words; an empty string if nothing is."""
        raise NotImplementedError


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


def difference(name: str, got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor | float = 0.0) -> str:
    """An empty string, or where a result is further off than is allowed; a NaN may be any NaN."""
    near = want.isfinite() & ((got.double() - want.double()).abs() <= allowed)
    same = near | (got == want) | (got.isnan() & want.isnan())
    if same.all():
        return ""
    at = tuple((~same).nonzero()[0].tolist())
    return f"{name}{list(at)} is {got[at].item()}, not {want[at].item()} ({int((~same).sum())} of {same.numel()} are wrong)"


def first_difference(
    parts: Iterable[tuple[str, torch.Tensor, torch.Tensor, float]], sums: float, least: float = 1.0
) -> str:
    """An empty string, or the first difference of (name, got, want, rounding of each element); ``sums`` is the share of the
    largest element, and of ``least``, that a sum may be off."""
    found = (
        difference(name, got, want, near * want.abs() + sums * (least + want.abs().amax()))
        for name, got, want, near in parts
    )
    return next(filter(None, found), "")


def further_off_than_rounding(name: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """An empty string, or where a product is further off than one rounding and a sum in fp32 may be."""
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(got.dtype, 2.0**-24)
    return difference(name, got, want, 1.001 * rounding * want.abs() + 2e-6 * want.abs().max() + 2.0**-25)
