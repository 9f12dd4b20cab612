"""Reading a trace or cluster file: gzip and tar understood, text of any usual encoding, errors that name file and line."""

import codecs
import difflib
import gzip
import io
import json
import tarfile
import zlib
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A trace or cluster file that cannot be read; the message has the file, the line and what would be right."""


def bytes_of(path: Path) -> bytes:
    """The file's content: decompressed where it is gzip'd, the only member of a tar archive.

    Raises:
        FileNotFoundError: there is none; with the nearest name in its folder.
        TraceError: it is a folder, not whole, or an archive of several.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(missing(path)) from None
    except IsADirectoryError:
        raise TraceError(f"{path} is a folder; expected a file") from None
    try:
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        if raw[257:262] != b"ustar":
            return raw
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            members = [member for member in archive if member.isfile()]
            if len(members) == 1:
                content = archive.extractfile(members[0])
                return content.read() if content else b""
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise TraceError(f"{path}: it is not whole: {error}") from None
    names = ", ".join(member.name for member in members[:5])
    raise TraceError(f"{path}: an archive of {len(members)} files ({names}); expected one: unpack it first")


def missing(path: Path) -> str:
    """The message for a file that does not exist, with the nearest name in its folder."""
    if not path.parent.is_dir():
        return f"there is no file {path}, nor a folder {path.parent}"
    near = difflib.get_close_matches(path.name, sorted(other.name for other in path.parent.iterdir()), n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"nothing in {path.parent} has a name like it"
    return f"there is no file {path}; {hint}"


class Text(io.StringIO):
    """A file's text. ``guessed``: the code page that was taken for one that the bytes do not tell, or ""."""

    guessed = ""


def text_of(path: Path) -> Text:
    """The file as text: gzip understood, UTF-8 with or without a mark, UTF-16 with one, else what Windows writes (cp1252).

    Raises:
        TraceError: a zero byte, which no text has.
    """
    raw = bytes_of(path)
    marked = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    guessed = ""
    try:
        text = raw.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError:
        guessed = "cp1252"
        text = raw.decode(guessed, errors="replace")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise TraceError(
            f"{path}:{line}: a zero byte, as in a binary file or UTF-16 without a mark; expected text in UTF-8"
        )
    made = Text(text, newline="")
    made.guessed = guessed
    return made


def json_of(path: Path) -> Any:
    """The file as JSON.

    Raises:
        TraceError: it is none; with line and column.
    """
    try:
        return json.loads(text_of(path).read())
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{error.lineno}: no JSON at column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists within lists
        raise TraceError(f"{path}: no JSON that can be read: {error}") from None


def list_of(path: Path, key: str, command: str) -> list[Any]:
    """The list under a key of a file that a command has written as JSON.

    Raises:
        TraceError: there is none.
    """
    found = json_of(path)
    entries = found.get(key) if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise TraceError(f"{path}: no list under '{key}'; expected what '{command} --json' writes")
    return entries


def beside(path: Path, name: str) -> Path:
    """A file or folder that a trace needs, by its usual name: in the trace's folder or one of the three above it.

    Raises:
        TraceError: it is in none of them.
    """
    for folder in path.absolute().parents[:4]:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.exists():
                return candidate
    raise TraceError(f"{path}: it needs {name}, which is neither in its folder nor in the three above; name its path")
