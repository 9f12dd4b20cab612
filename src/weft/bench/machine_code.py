"""``weft carry``: records of an earlier source count for today's, where both compile to the same machine code.

A table made from records of other code is marked stale, and code is text: a function that moves makes records stale. This
compiles the measured points from the sources that the records name and from today's, and compares what would be launched
(kernels as machine code, grids, arguments, shared memory, the PyTorch operators between them) and the bytes and FLOPs that it
is held against. The points where all of it is equal become a line of ``results/<gpu>/same_code.jsonl``, and the records keep
their commit.

It is run by file as well, by the interpreter of an earlier tree, so it keeps to what has long been there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Point = tuple[str, str, str, str]  # workload, dtype, direction, implementation


class NotSameMethod(ValueError):
    """Records that were timed in another way than today's."""


class DoesNotRun(RuntimeError):
    """Sources that cannot say what they compile to."""


# ---- in either tree --------------------------------------------------------------------------------------------------


def describe(operator: str, points: Iterable[Point], sm: int) -> dict[str, Any]:
    """What an operator launches at some points, as digests.

    Args:
        operator: its name.
        points: workload, dtype, direction and implementation of each.
        sm: architecture, such as 90.

    Returns:
        ``source``, ``timing`` (hashes) and ``code``: for each point, in their order, a digest or why there is none.
    """
    import weft
    from weft import registry
    from weft.source import source_hash

    op = registry.get(operator)
    timing = (Path(weft.__file__).parent / "timing.py").read_bytes()
    return {
        "source": source_hash(op.module),
        "timing": hashlib.sha256(timing).hexdigest(),
        "code": [_digest(op, *point, sm) for point in points],
    }


def _digest(op: Any, workload: str, dtype: str, direction: str, implementation: str, sm: int) -> str:
    import torch

    from weft.bench import cases
    from weft.operators.launch import compiling_for

    torch.manual_seed(0)  # a seed that the call draws is an argument of its kernel
    seen: list[Any] = []
    try:
        made, w = op.find(implementation), op.parse(workload, dtype)
        seen.append((op.cost(w, direction),))  # what the times were held against
        with compiling_for(sm, lambda *kernel: seen.append(kernel)), _launches(seen), _operators(seen):
            call, _ = cases.bind(op, made.function, direction, op.inputs(w, None, "meta"))
            if direction == "backward":
                del seen[1:]  # the forward's
            call()
    except Exception as error:  # a name that was not there yet, a point that was declined: no code to be the same
        return f"{type(error).__name__}: {error}"
    parts = [hashlib.sha256(x).hexdigest() if isinstance(x, bytes) else str(x) for item in seen for x in item]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@contextlib.contextmanager
def _launches(seen: list[Any]) -> Iterator[None]:
    """Notes what every plan would launch with, besides its kernel, which compile-time constants are part of."""
    from weft.operators import cuda, launch

    def noting(inner: Callable[..., None]) -> Callable[..., None]:
        def call(plan: Any, *tensors: Any) -> None:
            names = ("grid", "block", "scalars", "num_warps", "num_stages", "cluster", "shared_bytes")
            fields = [(name, getattr(plan, name)) for name in names if hasattr(plan, name)]
            seen.append((fields, [(t.shape, t.stride(), t.dtype) for t in tensors if hasattr(t, "stride")]))
            inner(plan, *tensors)

        return call

    kinds: tuple[Any, ...] = (launch.Plan, cuda.CudaPlan)
    before = [kind.__call__ for kind in kinds]
    for kind in kinds:
        kind.__call__ = noting(kind.__call__)
    try:
        yield
    finally:
        for kind, inner in zip(kinds, before, strict=True):
            kind.__call__ = inner


def _operators(seen: list[Any]) -> Any:
    """Notes PyTorch's operators: an output that is cleared first, a sum of parts."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made = out if isinstance(out, (tuple, list)) else [out]
            seen.append((str(func), [(t.shape, t.stride(), t.dtype) for t in made if isinstance(t, torch.Tensor)]))
            return out

    return Noting()


# ---- in today's ------------------------------------------------------------------------------------------------------


def carry(names: Sequence[str], gpu: str, sm: int, say: Callable[[str], None], others: Sequence[str] = ()) -> int:
    """Compares every operator whose records of a machine are of an earlier source, and notes where nothing has changed.

    Args:
        names: operators or families; all when empty.
        gpu: the machine's name in the records.
        sm: its architecture.
        say: told the outcome for each operator and source.
        others: commits to look for a source in where the records' own have another: they were measured in changed files.

    Returns:
        At how many points (workload, dtype, direction) nothing has changed.
    """
    from weft import registry
    from weft.records import SAME_CODE, Store, latest
    from weft.source import source_hash

    store, found = Store(), 0
    carried_at = {  # where records have been carried to: the commit of their own source may be gone by then
        (line.get("operator"), line.get("same_as")): str(line["at"])
        for line in store.lines(gpu, SAME_CODE)
        if line.get("at")
    }
    head = _resolved("HEAD")
    for op in registry.select(names):
        today = source_hash(op.module)
        stale: dict[tuple[str, str], dict[Point, str]] = {}
        measured, counted = latest(store.read(gpu, op.name, as_measured=True)), latest(store.read(gpu, op.name))
        for m, now in zip(measured, counted, strict=True):
            if m.ours and m.metric == "time" and now.source != today:
                point = m.workload, m.dtype, m.direction, m.implementation
                stale.setdefault((m.source, now.source), {})[point] = m.commit
        for (source, carried), commits in stale.items():
            try:
                asked = [*others, *filter(None, [carried_at.get((op.name, carried))])]
                commit, same, differing = _compared(op.name, (source, carried), commits, sm, asked)
            except (NotSameMethod, DoesNotRun) as error:
                say(f"{op.name}, source {source}: cannot be compared: {error}")
                continue
            text = f"{op.name} at {commit}: the same code at {len(same)} of {len(same) + len(differing)} points"
            say(text + (f"; other code first at {', '.join(differing[0])}" if differing else ""))
            if same:
                line = {"operator": op.name, "source": source, "same_as": today, "commit": commit, "at": head}
                store.append(gpu, SAME_CODE, {**line, "arch": f"sm_{sm}", "points": same})
                found += len(same)
    return found


def _compared(
    operator: str, sources: tuple[str, str], commits: dict[Point, str], sm: int, others: Sequence[str]
) -> tuple[str, list[tuple[str, ...]], list[tuple[str, ...]]]:
    """A commit of that source, and the points (workload, dtype, direction) where all of ours is the same, and where it is not.

    Args:
        sources: that of the records, and the latest that they have been carried to: either will do.
        commits: what was measured, and the commit that its record names: that of changed files has another source.

    Raises:
        NotSameMethod: no commit that can be asked is of such a source, or it times in another way.
        DoesNotRun: today's sources.
    """
    points = list(commits)
    now = _described(Path(__file__).parents[2], operator, points, sm)
    asked: list[str] = []
    for commit in dict.fromkeys((*map(_resolved, others), *commits.values())):
        try:
            with _tree(commit) as folder:
                then = _described(folder / "src", operator, points, sm)
        except (DoesNotRun, subprocess.CalledProcessError) as error:  # too old, or of another repository: ask the next
            asked.append(f"{commit} ({error})")
            continue
        if then["source"] in sources:
            break
        asked.append(commit)
    else:
        raise NotSameMethod(f"it is not that of {', '.join(asked)}")
    if then["timing"] != now["timing"]:
        raise NotSameMethod(f"timing.py has changed since {commit}")
    pairs = zip(points, then["code"], now["code"], strict=True)
    other = {point[:3] for point, a, b in pairs if a != b or ":" in a}
    every = dict.fromkeys(point[:3] for point in points)
    return commit, [p for p in every if p not in other], [p for p in every if p in other]


def _resolved(name: str) -> str:
    """A commit's hash where git knows it: what is noted of it is to hold when a branch has gone on."""
    done = subprocess.run(["git", "rev-parse", "--verify", "-q", f"{name}^{{commit}}"], capture_output=True, text=True)
    return done.stdout.strip() or name


def _described(sources: Path, operator: str, points: list[Point], sm: int) -> Any:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(sources), "TRITON_DISABLE_LINE_INFO": "1"}
    job = json.dumps([operator, points, sm])
    done = subprocess.run([sys.executable, __file__], input=job, env=env, capture_output=True, text=True)
    if done.returncode:
        raise DoesNotRun((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def _tree(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        root = subprocess.run(["git", "rev-parse", "--show-toplevel"], stdout=subprocess.PIPE, text=True, check=True)
        archive = subprocess.run(["git", "-C", root.stdout.strip(), "archive", commit, "src"], capture_output=True)
        if archive.returncode:
            said = archive.stderr.decode().strip().splitlines()
            raise DoesNotRun(said[-1].removeprefix("fatal: ") if said else f"git archive: status {archive.returncode}")
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]
    asked = json.load(sys.stdin)
    sys.stdout.write(json.dumps(describe(asked[0], [tuple(p) for p in asked[1]], asked[2])))
