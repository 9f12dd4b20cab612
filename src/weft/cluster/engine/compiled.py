"""``@compiled``: Numba's ``njit`` with a disk cache that notices every change of the engine.

Numba's own cache looks at the file of the cached function only, so an edit of a function that it calls is not noticed. Here
the cache lies in a folder named by a hash of all sources of ``weft.cluster``, plug-ins included. ``WEFT_CACHE`` names
another place than ``~/.cache/weft``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

try:
    import numba
    from numba.core import config as numba_config
except ImportError as error:
    raise ModuleNotFoundError(
        f"the simulator's engine needs Numba: pip install 'weft[cluster]' ({error})", name="numba"
    ) from None


@cache
def cache_folder() -> str:
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    root = os.environ.get("WEFT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "weft"
    )
    return os.path.join(root, "numba", digest.hexdigest()[:16])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    config: Any = numba_config
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_folder()
    try:
        return numba.njit(cache=True, nogil=True)(function)
    finally:
        config.CACHE_DIR = before


def dispatcher(functions: Sequence[Callable[..., float]]) -> Callable[..., float]:
    """One compiled function ``score(code, piece, node)`` that calls the code-th of them: unlike a function passed as an
    argument, it leaves the engine that calls it cacheable on disk."""
    names: dict[str, Any] = {f"f{i}": numba.njit(inline="always")(f) for i, f in enumerate(functions)}
    lines = [f"    if code == {i}: return float(f{i}(piece, node))" for i in range(len(functions))]
    exec("\n".join(["def score(code, piece, node):", *lines, "    return 0.0"]), names)
    return numba.njit(names["score"])
