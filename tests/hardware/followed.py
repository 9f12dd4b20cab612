"""Whether a daemon follows its log already: what is written before that is not read."""

import contextlib
import sqlite3


def follows(folder) -> bool:
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{folder}/state.db?mode=ro", uri=True)) as db,
    ):
        return db.execute("SELECT 1 FROM meta WHERE key='kernel-log'").fetchone() is not None
    return False
