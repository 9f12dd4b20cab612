"""What ``weft health`` has decided for this node: from its state on disk, which is read and never changed."""

import contextlib
import math
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Quarantines:
    """``begun``: how many so far. ``opened``: when the one that holds began, in seconds since 1970; None without one.
    ``drained``: whether the node is empty. ``incidents``: how many are open, by PCI address (``0000:9b:00``), fault, action.
    """

    begun: int = 0
    opened: float | None = None
    drained: bool = False
    incidents: dict[tuple[str, str, str], int] = field(default_factory=dict)


def read(folder: Path) -> Quarantines:
    """Raises OSError: there is no state in the folder, it cannot be read, or a row has what ``weft health`` never writes."""
    path = folder / "state.db"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; weft health run writes it")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as db:
            db.execute("BEGIN")  # all of one moment
            (begun,) = db.execute("SELECT count(*) FROM quarantines").fetchone()
            active = db.execute("SELECT opened, drained FROM quarantines WHERE ended IS NULL").fetchone()
            counted = "SELECT gpu, kind, action, count(*) FROM incidents WHERE state='open' GROUP BY gpu, kind, action"
            incidents = {row[:3]: row[3] for row in db.execute(counted)}
    except sqlite3.Error as error:
        raise OSError(f"{path} cannot be read: {error}") from None
    opened, drained = active or (None, False)
    if active and not (isinstance(opened, float) and math.isfinite(opened)):  # SQLite stores any type in any column
        raise OSError(f"{path} is damaged: a quarantine holds since {opened!r:.40}; expected seconds since 1970")
    for row in incidents:
        if not all(isinstance(part, str) for part in row):
            raise OSError(f"{path} is damaged: an open incident has {row!r:.120}; expected address, fault and action")
    return Quarantines(begun, opened, bool(drained), incidents)
