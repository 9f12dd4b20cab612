"""``weft compile-check``: compiles every kernel for each architecture it declares, without a GPU.

Implementations are run on tensors of the device ``meta`` while launches compile instead of running, so what is compiled
is what would be launched: no kernel is listed anywhere by hand.
"""

import functools
import hashlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench import cases
from weft.definition import ARCHITECTURES, SHARED_LIMIT, Declined, Implementation, Operator, UnknownName, Workload

REGISTERS_PER_BLOCK = 65536


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture. ``spills`` are bytes of stack a thread (spilled registers and local arrays)."""

    operator: str
    implementation: str
    direction: str
    workload: str
    dtype: str
    kernel: str
    arch: str
    ok: bool
    registers: int = 0
    shared_bytes: int = 0
    shared_limit: int = 0
    spills: int = 0
    reason: str = ""


def jobs(
    operators: Iterable[Operator], archs: Iterable[int] = (), implementation: str = "", dtypes: Iterable[str] = ()
) -> Iterator[tuple[Operator, Implementation, str, Workload, int]]:
    """Everything to be compiled: the workloads ``compile`` (or ``quick``) in every dtype (or, where a workload leaves it open,
    in those given) and direction."""
    wanted, dtypes = tuple(archs), tuple(dtypes)
    for sm in wanted:
        if sm not in ARCHITECTURES:
            raise UnknownName("architecture", f"sm_{sm}", [f"sm_{a}" for a in ARCHITECTURES])
    operators = list(operators)
    known = {made.name for op in operators for made in op.implementations.values() if made.ours}
    if implementation and implementation not in known:
        raise UnknownName("implementation of ours", implementation, known)
    for op in operators:
        for made in op.implementations.values():
            if not made.ours or (implementation and made.name != implementation):
                continue
            for sm in made.architectures:
                if wanted and sm not in wanted:
                    continue
                for w in _points(op, dtypes):
                    if made.dtypes and w.dtype not in made.dtypes:
                        continue
                    for direction in made.directions or op.directions:
                        yield op, made, direction, w, sm


def _points(op: Operator, dtypes: tuple[str, ...]) -> Iterator[Workload]:
    for item in op.workloads["compile" if "compile" in op.workloads else "quick"]:
        for dtype in (item.dtype,) if item.dtype else op.dtypes:
            if item.dtype or not dtypes or dtype in dtypes:
                yield item.at(dtype)


def check(op: Operator, made: Implementation, direction: str, w: Workload, sm: int) -> list[Compiled]:
    """Compiles what one implementation launches for one workload."""
    from weft.operators.launch import compiling_for

    named = (op.name, made.name, direction, str(w), w.dtype)
    kernels: list[tuple[str, bytes, int, int, str]] = []
    try:
        with compiling_for(sm, lambda *kernel: kernels.append(kernel)):
            arguments = op.inputs(w, None, "meta")
            call, _ = cases.bind(op, made.function, direction, arguments)
            if direction == "backward":
                kernels.clear()  # the forward's, compiled under that direction
            call()
    except Declined:
        return []
    except Exception as error:  # whatever a compiler raises is this kernel's result
        reason = f"{type(error).__name__}: {error}".strip()
        return [Compiled(*named, made.name, f"sm_{sm}", False, reason=reason[:2000])]
    language = "cuda" if made.backend == "cuda" else "triton"  # Gluon's are Triton's
    # a gradient may have products of a library and no kernel of its own language, of few rows say
    if direction == "forward" and kernels and language not in {kernel[-1] for kernel in kernels}:
        reason = f"it launched no {language} kernel, but {', '.join(kernel[0] for kernel in kernels)}"
        return [Compiled(*named, made.name, f"sm_{sm}", False, reason=reason)]
    return [_examine(named, *kernel[:-1], sm) for kernel in kernels]


def _examine(
    named: tuple[str, str, str, str, str], kernel: str, cubin: bytes, shared: int, threads: int, sm: int
) -> Compiled:
    usage = resource_usage(cubin, kernel)
    shared = max(shared, usage["SHARED"])
    limit = SHARED_LIMIT[sm]
    reason = ""
    if shared > limit:
        reason = f"{shared} bytes of shared memory a block; sm_{sm} has {limit}"
    elif usage["REG"] * threads > REGISTERS_PER_BLOCK:
        reason = f"{usage['REG']} registers × {threads} threads; a block has {REGISTERS_PER_BLOCK}"
    return Compiled(*named, kernel, f"sm_{sm}", not reason, usage["REG"], shared, limit, usage["STACK"], reason)


def tool(name: str) -> Path:
    """A CUDA binary utility out of Triton's package."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


@functools.lru_cache(256)  # many workloads launch the same kernel
def resource_usage(cubin: bytes, kernel: str = "") -> dict[str, int]:
    """Registers (REG), stack (STACK) and static shared memory (SHARED) of a kernel in a cubin, which may hold several."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True).stdout
    out = out.partition(f" Function {kernel}:")[2].partition(" Function ")[0] or out
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", out)}
    return {"REG": 0, "STACK": 0, "SHARED": 0, **found}


def _check_job(job: tuple[str, str, str, Workload, int]) -> list[Compiled]:
    from weft import registry

    op = registry.get(job[0])
    return check(op, op.find(job[1]), *job[2:])


def compile_check(
    operators: Iterable[Operator],
    *,
    archs: Iterable[int] = (),
    implementation: str = "",
    dtypes: Iterable[str] = (),
    share: int = 1,
    seed: str = "",
    processes: int = 2,
    on_result: Callable[[list[Compiled]], None] = lambda compiled: None,
) -> list[Compiled]:
    """Compiles the kernels in several processes: all of them, or the share of one in ``share`` that ``seed`` selects."""
    import multiprocessing

    work = [(op.name, made.name, d, w, sm) for op, made, d, w, sm in jobs(operators, archs, implementation, dtypes)]
    work = [job for job in work if int(hashlib.sha256(f"{seed} {job}".encode()).hexdigest(), 16) % share == 0]
    found: list[Compiled] = []
    if processes < 2 or len(work) < 4:
        for job in work:
            found += _check_job(job)
            on_result(found)
        return found
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for compiled in pool.imap_unordered(_check_job, work, chunksize=4):
            found += compiled
            on_result(compiled)
    return sorted(found, key=lambda c: (c.operator, c.implementation, c.direction, c.workload, c.dtype, c.arch))


def summary(found: Iterable[Compiled], seconds: float) -> dict[str, Any]:
    """What ``weft compile-check --json`` prints."""
    from dataclasses import asdict

    found = list(found)
    return {
        "compiled": len(found),
        "failed": sum(not c.ok for c in found),
        "with_spills": sum(c.spills > 0 for c in found),
        "seconds": round(seconds, 1),
        "results": [asdict(c) for c in found],
    }


def timed(operators: Iterable[Operator], **options: Any) -> dict[str, Any]:
    start = time.perf_counter()
    found = compile_check(operators, **options)
    return summary(found, time.perf_counter() - start)
