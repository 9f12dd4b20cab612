"""What was compiled once, kept for the processes that come after: in ``~/.cache/weft``, or where ``WEFT_CACHE`` says."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def folder(kind: str) -> Path:
    """Where things of one kind lie. It may not be there yet."""
    root = os.environ.get("WEFT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "weft"
    )
    return Path(root, kind)


def read(path: Path) -> bytes | None:
    """What was kept, or None: nothing was, it cannot be read, or it is damaged."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, content = kept[:32], kept[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def write(path: Path, content: bytes) -> None:
    """Writes the entry atomically. If nothing can be written (no space, no permission), nothing is cached."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
