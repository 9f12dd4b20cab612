"""How orders, placements and file formats are found: each module of their package holds one."""

import importlib
import pkgutil
from typing import Any


def discover(package: str, attribute: str) -> dict[str, Any]:
    """The value of ``attribute`` in each module of a package, by its ``name``; in a fixed order, whose positions are
    the engine's codes."""
    modules = sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__))
    found = [getattr(importlib.import_module(f"{package}.{module}"), attribute) for module in modules]
    return {plugin.name: plugin for plugin in found}
