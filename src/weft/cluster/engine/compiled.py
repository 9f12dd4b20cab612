"""``@compiled``: Numba's ``njit`` with a disk cache that is invalidated by every change of the engine.

Numba's own cache checks only the file of the cached function, so an edit of a function that it calls is missed. Here the
cache is in a folder named by a hash of all sources that are compiled: the engine, orders and placements, and the modules
with their constants. ``WEFT_CACHE`` names another folder than ``~/.cache/weft``.
"""

import contextlib
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from weft import disk_cache

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

try:
    import numba
    from numba.core import cgutils
    from numba.core import config as numba_config
    from numba.extending import intrinsic
except ImportError as error:
    raise ModuleNotFoundError(
        f"the simulator's engine needs Numba: pip install 'weft[cluster]' ({error})", name="numba"
    ) from None


@cache
def cache_folder() -> str:
    return str(disk_cache.folder("numba") / key_of(Path(__file__).parent.parent))


def key_of(cluster: Path) -> str:
    """A hash of the sources, in the package's folder, that compiled code is made of."""
    sources = [cluster / f"{name}.py" for name in ("model", "order", "placement")]
    for package in ("engine", "orders", "placements"):
        sources += sorted((cluster / package).glob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that other compiled functions call; from Python it raises TypeError. Without Numba's reference
    counting, which took most of the time: each call counts every array that it passes on, with an atomic instruction
    each. Such a function cannot create arrays; its arguments outlive it."""
    return _jit(function, counting=False)


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """``@compiled`` for a function that Python calls: with what converts its arguments, which takes as long to compile as
    the function itself."""
    return _jit(function, counting=False, python=True)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """``@compiled`` for a small function that is called often with a tuple of arrays: a call would copy all of them."""
    return _jit(function, counting=False, inline=True)


def allocating(function: Callable[..., Any]) -> Callable[..., Any]:
    """``@compiled`` for a function that creates arrays, or that gets a new array from such a function."""
    return _jit(function, counting=True)


def _jit(
    function: Callable[..., Any], counting: bool, inline: bool = False, python: bool = False
) -> Callable[..., Any]:
    config: Any = numba_config
    options: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": counting, "forceinline": inline}
    options |= {"no_cpython_wrapper": not python, "no_cfunc_wrapper": True}
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_folder()
    made: Any = None
    try:
        made = numba.njit(**options)(function)
    except RuntimeError:  # no folder of those that Numba tries can be written
        pass
    finally:
        config.CACHE_DIR = before
    if config.DISABLE_JIT:
        return made
    if made is None or not made._cache.cache_path.startswith(cache_folder()):
        # Numba's other folders, such as __pycache__, know nothing of the sources that a function calls.
        made = numba.njit(**options | {"cache": False})(function)
    else:
        _save_alone(made._cache)
    _call_widened(made)
    if not python:
        _refuse_python(made)
    return made


def _call_widened(made: Any) -> None:
    """Compiled callers convert integers to int64 first. Otherwise Numba compiles a function once more for each constant
    and each int32 among its arguments, with everything that it calls. Constants of type bool stay: a preemptive order
    with racks runs a third slower without."""
    template = made.get_call_template

    def wide(kind: Any) -> Any:
        return numba.types.int64 if numba.types.unliteral(kind) in numba.types.signed_domain else kind

    def get_call_template(args: Any, kws: Any) -> Any:
        return template([wide(each) for each in args], {name: wide(each) for name, each in kws.items()})

    made.get_call_template = get_call_template


def _refuse_python(made: Any) -> None:
    """Its machine code has no form that Python could call."""

    def refuse(*arguments: Any, **named: Any) -> None:
        raise TypeError(f"{made.__name__} is called from Python; expected a call from compiled code, or @entry")

    made._insert = lambda *overload: None  # where Numba looks first
    made._compile_for_args = refuse


def _save_alone(kept: Any) -> None:
    """Only one process at a time saves compiled code. Numba numbers a function's files by an index that it reads first
    and writes later: two processes that save two signatures at once take the same number, and one signature then has
    the other's code. If nothing can be written (no space), nothing is cached."""
    save = kept.save_overload

    def save_alone(signature: Any, result: Any) -> None:
        with contextlib.suppress(OSError):
            os.makedirs(kept.cache_path, exist_ok=True)
            locked(signature, result)

    def locked(signature: Any, result: Any) -> None:
        with open(os.path.join(kept.cache_path, "lock"), "w") as lock:
            if sys.platform == "win32":
                msvcrt.locking(lock.fileno(), msvcrt.LK_LOCK, 1)  # closing the file gives it back
            else:
                fcntl.flock(lock, fcntl.LOCK_EX)
            save(signature, result)

    kept.save_overload = save_alone


# ---- functions of orders and placements ------------------------------------------------------------------------------

# Unlike functions passed as arguments, these leave the engine that calls them cacheable on disk: those of the package are
# numbered, and compiled into it; a user's is called at its address in memory, which is its number.
FIRST_ADDRESS = 1 << 12
LINE = re.compile(r'File "[^<].*, line [0-9]+:')  # of Numba's message; "<string>" is what calls the function


def _call(*types: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        convention, result = context.call_conv, numba.types.float64
        function = convention.get_function_type(result, types)
        pointer = builder.inttoptr(values[0], function.as_pointer())
        status, found = convention.call_function(builder, pointer, result, types, values[1:])
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return found

    return numba.types.float64(numba.types.int64, *types), generate


@intrinsic
def call_2(typing, address, a, b):
    return _call(a, b)


@intrinsic
def call_3(typing, address, a, b, c):
    return _call(a, b, c)


@intrinsic
def call_4(typing, address, a, b, c, d):
    return _call(a, b, c, d)


CALLS = {2: call_2, 3: call_3, 4: call_4}
NO_SCORE, NO_KEY = "nan or infinite; expected a finite number", "nan; expected a number"
_KEPT: dict[tuple[Any, ...], tuple[Any, int]] = {}  # what has an address must not be collected


def address_of(function: Callable[..., Any], part: str, *arguments: Any, finite: bool = False) -> int:
    """Compiles a user's function for arguments of these types (dtypes of records, arrays, numbers), of which it may take
    only the first. It raises ValueError where the result is not a number.

    Args:
        part: of its result, ``[0]``, or all.
        finite: it raises for infinity too.

    Raises:
        ValueError: Numba cannot compile it.
    """
    types = tuple(numba.from_dtype(each) if isinstance(each, np.dtype) else numba.typeof(each) for each in arguments)
    known = function, part, types, finite
    if known in _KEPT:
        return _KEPT[known][1]
    config: Any = numba_config
    if config.DISABLE_JIT:
        raise ValueError("NUMBA_DISABLE_JIT is set, and a user's function must be compiled; expected it unset")
    what = f"{function.__name__}{inspect.signature(function)}" if inspect.isfunction(function) else repr(function)
    if not inspect.isfunction(function) or len(inspect.signature(function).parameters) > len(types):
        raise ValueError(f"Numba cannot compile it: {what}; expected a function of at most {len(types)} arguments")
    names: dict[str, Any] = {"f": numba.njit(function)}
    given = ", ".join("abcd"[: len(inspect.signature(function).parameters)])
    exec(
        f"def call({', '.join('abcd'[: len(types)])}):\n"
        f"    found = float(f({given}){part})\n"
        f"    if {'found - found != 0.0' if finite else 'found != found'}:\n"
        f"        raise ValueError('its result is {NO_SCORE if finite else NO_KEY}')\n"
        "    return found",
        names,
    )
    try:
        made = numba.njit(names["call"])
        made.compile(types)
    except KeyError as error:  # of Numba's own table of a record's fields
        raise ValueError(f"Numba cannot compile it: a record without the field {error}") from error
    except numba.core.errors.NumbaError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if not line.startswith("Failed in")), lines[0])
        where = next((f", line {line.rpartition('line ')[2].rstrip(':')}" for line in lines if LINE.match(line)), "")
        raise ValueError(f"Numba cannot compile it: {why}{where}") from error
    (found,) = made.overloads.values()
    address = int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))
    _KEPT[known] = made, address
    return address


def dispatcher(functions: Sequence[tuple[Callable[..., Any], bool]]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two compiled functions, ``score(code, piece, node, context)`` and ``gpu(…)``, that call the code-th of the given
    ones, or a user's by its address. A given function takes ``(piece, node)`` or ``(piece, node, context)``; those marked
    True return a score and a GPU."""
    names: dict[str, Any] = {}
    score, gpu = ["def score(code, piece, node, context):"], ["def gpu(code, piece, node, context):"]
    for i, (function, chooses) in enumerate(functions):
        names[f"f{i}"] = numba.njit(function)
        call = f"f{i}({', '.join(('piece', 'node', 'context')[: len(inspect.signature(function).parameters)])})"
        score.append(f"    if code == {i}: return float({call}{'[0]' if chooses else ''})")
        if chooses:
            gpu.append(f"    if code == {i}: return int({call}[1])")
    names |= {"call_3": call_3, "FIRST_ADDRESS": FIRST_ADDRESS}
    by_address = "    if code >= FIRST_ADDRESS: return {}(call_3(code, piece, node, context))"
    score.append(by_address.format("float"))
    gpu.append(by_address.format("int"))
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
    names |= {"call": CALLS[len(parameters)], "FIRST_ADDRESS": FIRST_ADDRESS}
    lines.append(f"    if code >= FIRST_ADDRESS: return call(code, {', '.join(parameters)})")
    exec("\n".join([*lines, "    return 0.0"]), names)
    compiled_one: Callable[..., Any] = numba.njit(names[name])
    return compiled_one
