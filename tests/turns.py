"""Which share of many like tests a run has. WEFT_LONG (``conftest.py``) is part of the choice: at each commit, continuous
integration has another share, and with ``all`` a run has all of them."""

import os
import zlib

WANTED = os.environ.get("WEFT_LONG", "")


def turn(name: str, of: int) -> int:
    """The number, below ``of``, of what a run has where that is named so."""
    return zlib.crc32(f"{WANTED} {name}".encode()) % of


def has(name: str, of: int) -> bool:
    """Whether a run has this one, where it has one in ``of``."""
    return WANTED == "all" or turn(name, of) == 0
