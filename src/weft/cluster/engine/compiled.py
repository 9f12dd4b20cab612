"""``@compiled``: Numba's ``njit`` with a disk cache that is invalidated by every change of the engine.

Numba's own cache checks only the file of the cached function, so an edit of a function that it calls is missed. Here the
cache is in a folder named by a hash of all sources that are compiled: the engine, orders and placements, and the modules
with their constants. ``WEFT_CACHE`` names another folder than ``~/.cache/weft``.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from weft import disk_cache

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

try:
    import numba
    from numba.core import config as numba_config
except ImportError as error:
    raise ModuleNotFoundError(
        f"the simulator's engine needs Numba: pip install 'weft[cluster]' ({error})", name="numba"
    ) from None


@cache
def cache_folder() -> str:
    cluster = Path(__file__).parent.parent
    sources = [cluster / f"{name}.py" for name in ("model", "order", "placement")]
    for package in ("engine", "orders", "placements"):
        sources += sorted((cluster / package).glob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return str(disk_cache.folder("numba") / digest.hexdigest()[:16])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without Numba's reference counting, which took most of the time: each call counts every array that it passes on, with
    an atomic instruction each. Such a function cannot create arrays; its arguments outlive it."""
    return _jit(function, counting=False)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """``@compiled`` for a small function that is called often with a tuple of arrays: a call would copy all of them."""
    return _jit(function, counting=False, inline=True)


def allocating(function: Callable[..., Any]) -> Callable[..., Any]:
    """``@compiled`` for a function that creates arrays, or that gets a new array from such a function."""
    return _jit(function, counting=True)


def _jit(function: Callable[..., Any], counting: bool, inline: bool = False) -> Callable[..., Any]:
    config: Any = numba_config
    options: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": counting, "forceinline": inline}
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_folder()
    try:
        made: Any = numba.njit(**options)(function)
    finally:
        config.CACHE_DIR = before
    if not config.DISABLE_JIT:
        _save_alone(made._cache)
    return made


def _save_alone(kept: Any) -> None:
    """Only one process at a time saves compiled code. Numba numbers a function's files by an index that it reads first
    and writes later: two processes that save two signatures at once take the same number, and one signature then has
    the other's code."""
    save = kept.save_overload

    def save_alone(signature: Any, result: Any) -> None:
        os.makedirs(kept.cache_path, exist_ok=True)
        with open(os.path.join(kept.cache_path, "lock"), "w") as lock:
            if sys.platform == "win32":
                msvcrt.locking(lock.fileno(), msvcrt.LK_LOCK, 1)  # closing the file gives it back
            else:
                fcntl.flock(lock, fcntl.LOCK_EX)
            save(signature, result)

    kept.save_overload = save_alone


def dispatcher(functions: Sequence[tuple[Callable[..., Any], bool]]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two compiled functions, ``score(code, piece, node, context)`` and ``gpu(…)``, that call the code-th of the given
    ones: unlike a function passed as an argument, they leave the engine that calls them cacheable on disk. A given
    function takes ``(piece, node)`` or ``(piece, node, context)``; those marked True return a score and a GPU."""
    names: dict[str, Any] = {}
    score, gpu = ["def score(code, piece, node, context):"], ["def gpu(code, piece, node, context):"]
    for i, (function, chooses) in enumerate(functions):
        names[f"f{i}"] = numba.njit(function)
        call = f"f{i}({', '.join(('piece', 'node', 'context')[: len(inspect.signature(function).parameters)])})"
        score.append(f"    if code == {i}: return float({call}{'[0]' if chooses else ''})")
        if chooses:
            gpu.append(f"    if code == {i}: return int({call}[1])")
    exec("\n".join([*score, "    return 0.0", *gpu, "    return 0"]), names)
    return numba.njit(names["score"]), numba.njit(names["gpu"])


def switch(name: str, parameters: Sequence[str], functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """A compiled function ``name(code, *parameters)`` that calls the code-th of the given ones, as :func:`dispatcher`'s
    do. A given one may take only the first of the parameters."""
    names: dict[str, Any] = {f"f{i}": numba.njit(function) for i, function in enumerate(functions)}
    lines = [f"def {name}(code, {', '.join(parameters)}):"]
    for i, function in enumerate(functions):
        given = parameters[: len(inspect.signature(function).parameters)]
        lines.append(f"    if code == {i}: return float(f{i}({', '.join(given)}))")
    exec("\n".join([*lines, "    return 0.0"]), names)
    compiled_one: Callable[..., Any] = numba.njit(names[name])
    return compiled_one
