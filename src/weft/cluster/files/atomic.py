"""A new file that is there whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check(path: str | Path) -> None:
    """Raises what :func:`written` would, before the work for it is done.

    Raises:
        ValueError: it already exists; nothing is overwritten.
        OSError: its folder is missing or cannot be written.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} already exists; name another file, or remove it first")
    with _beside(path):
        pass


@contextlib.contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """Yields another file's name to write to, which becomes ``path`` when all went well.

    Raises:
        ValueError, OSError: as :func:`check`; a full disk.
    """
    path = Path(path)
    check(path)
    with _beside(path) as folder:
        other = folder / path.name
        yield other
        with open(other, "rb") as file:
            os.fsync(file.fileno())
        os.replace(other, path)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A folder on the same disk, for a while."""
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".weft-") as folder:
            yield Path(folder)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from None
