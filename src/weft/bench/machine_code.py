"""``weft carry``: records of an earlier source count for today's, where both compile to the same machine code.

A table made from records of other code is marked stale, and code is text: a function that moves makes records stale. This
compiles the measured points from the sources that the records name and from today's, and compares what would be launched
(kernels as machine code, grids, arguments, shared memory, the PyTorch operators between them) and the bytes and FLOPs that it
is held against. Where all of it is equal at every measured point of an operator, ``results/<gpu>/same_code.jsonl`` gets a line,
and the records keep their commit.

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
    from weft.bench import cases
    from weft.operators.launch import compiling_for

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
    """Notes what every plan would launch with, besides its kernel."""
    from weft.operators import cuda, launch

    def noting(inner: Callable[..., None]) -> Callable[..., None]:
        def call(plan: Any, *tensors: Any) -> None:
            names = ("grid", "block", "scalars", "constants", "num_warps", "num_stages", "cluster", "shared_bytes")
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


def carry(names: Sequence[str], gpu: str, sm: int, say: Callable[[str], None]) -> int:
    """Compares every operator whose records of a machine are of an earlier source, and notes where nothing has changed.

    Args:
        names: operators or families; all when empty.
        gpu: the machine's name in the records.
        sm: its architecture.
        say: told the outcome for each operator and source.

    Returns:
        How many sources are the same as today's.
    """
    from weft import registry
    from weft.records import SAME_CODE, Store, latest
    from weft.source import source_hash

    store, found = Store(), 0
    for op in registry.select(names):
        today = source_hash(op.module)
        stale: dict[tuple[str, str], list[Point]] = {}
        measured, counted = latest(store.read(gpu, op.name, as_measured=True)), latest(store.read(gpu, op.name))
        for m, now in zip(measured, counted, strict=True):
            if m.ours and m.metric == "time" and now.source != today:
                stale.setdefault((m.commit, m.source), []).append((m.workload, m.dtype, m.direction, m.implementation))
        for (commit, source), points in stale.items():
            try:
                differing = _compare(op.name, commit, source, points, sm)
            except (NotSameMethod, subprocess.CalledProcessError, OSError) as error:
                say(f"{op.name} at {commit}: cannot be compared: {error}")
                continue
            if differing:
                first = ", ".join(differing[0][:4])
                say(f"{op.name} at {commit}: other code at {len(differing)} of {len(points)} points, first {first}")
                continue
            line = {"operator": op.name, "source": source, "same_as": today, "commit": commit, "arch": f"sm_{sm}"}
            store.append(gpu, SAME_CODE, {**line, "points": len(points)})
            say(f"{op.name} at {commit}: the same code at {len(points)} points")
            found += 1
    return found


def _compare(operator: str, commit: str, source: str, points: list[Point], sm: int) -> list[Point]:
    """The points that differ.

    Raises:
        NotSameMethod: the commit's source is not what the records say, or it times in another way.
        CalledProcessError: git does not know the commit, or the sources of it do not run.
    """
    now = _described(Path(__file__).parents[2], operator, points, sm)
    with _tree(commit) as folder:
        then = _described(folder / "src", operator, points, sm)
    if then["source"] != source:
        raise NotSameMethod(f"the records' source {source} is not that commit's, {then['source']}")
    if then["timing"] != now["timing"]:
        raise NotSameMethod("timing.py has changed since")
    return [p for p, a, b in zip(points, then["code"], now["code"], strict=True) if a != b or ":" in a]


def _described(sources: Path, operator: str, points: list[Point], sm: int) -> Any:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(sources), "TRITON_DISABLE_LINE_INFO": "1"}
    job = json.dumps([operator, points, sm])
    done = subprocess.run([sys.executable, __file__], input=job, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def _tree(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        root = subprocess.run(["git", "rev-parse", "--show-toplevel"], stdout=subprocess.PIPE, text=True, check=True)
        archive = subprocess.run(
            ["git", "-C", root.stdout.strip(), "archive", commit, "src"], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]
    asked = json.load(sys.stdin)
    sys.stdout.write(json.dumps(describe(asked[0], [tuple(p) for p in asked[1]], asked[2])))
