"""How orders, placements and trace formats are found: every module of their folder names one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any


def discover(package: str, path: Iterable[str], attribute: str) -> dict[str, Any]:
    """What the modules of a package have under ``attribute``, by its name; in a fixed order, of which the engine's codes are
    positions."""
    modules = sorted(m.name for m in pkgutil.iter_modules(path))
    found = [getattr(importlib.import_module(f"{package}.{module}"), attribute) for module in modules]
    return {plugin.name: plugin for plugin in found}
