"""CUDA C++ of an exercise: compiled by NVRTC and run by the interpreter of PTX, without a GPU; timed where there is one."""

import functools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.learn import ptx
from weft.learn.checks import Checks, Rejected
from weft.learn.cuda_on_gpu import FAULT
from weft.learn.language import Text
from weft.learn.ptx.values import TYPES

ARCHITECTURE = "compute_80"
OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "-lineinfo", "--std=c++17", "-default-device")


@dataclass
class Kernel:
    """A compiled kernel of the learner's file."""

    source: str
    module: ptx.Module
    entry: str
    name: str
    parameters: tuple[str, ...]
    problems: list[Text]
    t: Checks

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        *args: Any,
        shared_bytes: int = 0,
        seed: int = 0,
        time_limit_s: float = 8.0,
    ) -> ptx.Counts:
        """Runs it on NumPy arrays and numbers; problems found are kept in ``problems``.

        Raises:
            Rejected: The kernel does not end, or has instructions that cannot be interpreted (stage run).
        """
        try:
            done = ptx.launch(
                self.module,
                self.entry,
                grid,
                block,
                args,
                self.parameters,
                shared_bytes,
                seed,
                time_limit_s,
                self.t.traced,
            )
        except ptx.Stopped as stopped:
            raise Rejected(
                "run",
                Text(
                    f"{self.name} did not end within {time_limit_s:g} s; it was at line {stopped.line}",
                    f"{self.name} 在 {time_limit_s:g} 秒内没有结束；停在第 {stopped.line} 行",
                ),
            ) from None
        except ptx.Unsupported as error:
            raise Rejected("run", Text(f"cannot be interpreted here: {error}", f"这里无法解释执行：{error}")) from None
        self.problems += done.problems
        self.t.printed.append(done.printed)
        counts = {**asdict(done.counts), "programs": math.prod(grid) * -(-math.prod(block) // 32)}
        problems = [[problem.en, problem.zh] for problem in done.problems]
        shown = {"kernel": self.name, "grid": list(grid), "unit": "warp", "counts": counts, "problems": problems}
        self.t.kernels.append({**shown, "trace": done.trace})
        return done.counts

    def set_constant(self, name: str, values: Any) -> None:
        """Fills a ``__constant__`` array, as the host does by cudaMemcpyToSymbol.

        Raises:
            Rejected: The file has none of that name and size (stage run).
        """
        address, content = self.module.constants.get(name, (0, b""))
        if len(content) != values.nbytes:
            kind = f"`__constant__ float {name}[{len(values)}]`"
            raise Rejected(
                "run", Text(f"the file has no {kind}, or reads none of it", f"文件里没有 {kind}，或没有读取它")
            )
        self.module.constants[name] = address, values.tobytes()

    def timed(
        self,
        t: Checks,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        expected: dict[int, Any],
        at_least: float,
        shared_bytes: int = 0,
        rtol: float = 1e-4,
        atol: float = 1e-5,
        **shape: int,
    ) -> None:
        """On a GPU: the share of the limit that the kernel reaches, cold; the stage *fast*. For a check's ``fast(learner, t)``.

        Args:
            expected: What arguments must be after the launch, by their number.
            at_least: The share of the limit (the exercise's bytes at this machine's measured rates) that passes.
            shape: The names in the exercise's ``limit``.
        """
        try:
            after, us = self._on_gpu(grid, block, args, shared_bytes)
        except OSError as error:
            t.note(f"not timed on the GPU: {error}", f"未能在 GPU 上计时：{error}")
            return
        for number, value in expected.items():
            t.close(after[number], value, f"{self.parameters[number]} after {self.name} on the GPU", rtol, atol)
        t.share(us, f"{self.name} on the GPU", at_least, "fp32", **shape)

    def _on_gpu(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_bytes: int
    ) -> tuple[list[Any], float]:
        kinds = [kind for _, kind in self.module.entries[self.entry].params]
        values = [a if isinstance(a, np.ndarray) else np.array(a, TYPES[k]) for a, k in zip(args, kinds, strict=True)]
        with tempfile.TemporaryDirectory(prefix="weft-learn-") as folder:
            Path(folder, "kernel.cu").write_text(self.source, encoding="utf-8")
            named: dict[str, Any] = {f"arg{n}": v for n, v in enumerate(values)}
            sizes = [(*of, 1, 1)[:3] for of in (grid, block)]
            np.savez(
                Path(folder, "job.npz"), name=self.name, grid=sizes[0], block=sizes[1], shared=shared_bytes, **named
            )
            words = [sys.executable, "-m", "weft.learn.cuda_on_gpu", folder]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            try:
                done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
            except subprocess.TimeoutExpired:
                en, zh = f"{self.name} did not end on the GPU within 120 s", f"{self.name} 在 GPU 上 120 秒内没有结束"
                raise Rejected("run", Text(en, zh)) from None
            said = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
            if done.returncode == FAULT:
                raise Rejected(
                    "run", Text(f"{self.name} failed on the GPU: {said}", f"{self.name} 在 GPU 上失败：{said}")
                )
            if done.returncode:
                raise OSError(said)
            found = np.load(Path(folder, "done.npz"))
            return [found[f"arg{n}"] for n in range(len(args))], float(found["us"])

    def right(self, t: Checks, got: Any, expected: Any, what: str) -> None:
        """``t.equal``; where it fails, the first problem of the launches is told too, since it may be why."""
        try:
            t.equal(got, expected, what)
        except Rejected as rejected:
            raise Rejected(rejected.stage, rejected.why, *self.problems[:1]) from None

    def safe(self) -> None:
        """Fails the stage *safe* with the first problem of all launches."""
        for problem in self.problems:
            raise Rejected("safe", problem)


def kernel(t: Checks, name: str) -> Kernel:
    """The kernel ``name`` of the learner's ``.cu`` file.

    Raises:
        Rejected: It does not compile (parse), or has no kernel of that name (run).
    """
    source = t.source(".cu")
    found = re.search(rf"\b{name}\s*\(([^)]*)\)\s*\{{", _code(source))
    if not re.search(rf"__global__[^;{{]*\b{name}\s*\(", _code(source)) or not found:
        head = f"`__global__ void {name}(…)`"
        raise Rejected("run", Text(f"the file has no kernel {name}: {head}", f"文件里没有核函数 {name}：{head}"))
    module, entry = _compiled(source, name)
    parameters = tuple(re.findall(r"(\w+)\s*(?:\[\s*\])?\s*(?:,|$)", found[1].strip()))
    return Kernel(source, module, entry, name, parameters, [], t)


def _code(source: str) -> str:
    """Without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)


@functools.lru_cache(16)
def _compiled(source: str, name: str) -> tuple[ptx.Module, str]:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise Rejected(
            "run",
            Text(
                "CUDA C++ exercises need NVRTC: pip install 'weft[gpu,nvrtc]'",
                "CUDA C++ 练习需要 NVRTC：pip install 'weft[gpu,nvrtc]'",
            ),
        ) from None

    def ok(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise OSError(f"NVRTC: {result[0].name}")
        return result[1] if len(result) > 1 else None

    program = ok(nvrtc.nvrtcCreateProgram(source.encode(), b"exercise.cu", 0, None, None))
    try:
        ok(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        options = [o.encode() for o in OPTIONS]
        if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]):
            said = b" " * ok(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, said)
            text = said.decode(errors="replace").strip("\0\n ").replace("exercise.cu", "line ")
            text = re.sub(r"line \((\d+)\)", r"line \1", text)
            raise Rejected("parse", Text(f"does not compile:\n{text[:1500]}", f"无法编译：\n{text[:1500]}"))
        entry = ok(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode()
        text = b" " * ok(nvrtc.nvrtcGetPTXSize(program))
        ok(nvrtc.nvrtcGetPTX(program, text))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx.parse(text.decode().strip("\0")), entry
