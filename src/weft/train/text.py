"""Text as tokens in a memory-mapped file, and the batches of a training run, each a function of its step alone."""

import errno
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft import disk_cache
from weft.train.decoder import IGNORE

END = 256  # of a document, after the 256 bytes
VALIDATION = 20  # one document in so many is held out
SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".cu",
    ".cuh",
    ".js",
    ".ts",
    ".java",
    ".go",
    ".rs",
    ".json",
    ".html",
)


def documents(source: str) -> list[Path]:
    """The text files of a folder in the order of their names, or one file; by default the standard library's source.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a folder without a text file.
    """
    root = Path(source or sysconfig.get_path("stdlib"))
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"text '{root}': no such file or folder")
    suffixes = SUFFIXES if source else (".py",)
    found = sorted(p for p in root.rglob("*") if p.suffix in suffixes and p.is_file())
    found = [p for p in found if not {"site-packages", "dist-packages"} & set(p.relative_to(root).parts)]
    if not found:
        raise ValueError(f"text '{root}': holds no text file (endings read: {' '.join(suffixes)})")
    return found


class Bytes:
    name, vocabulary, end = "bytes", 257, END

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)


class Tokenizer:
    """A ``tokenizer.json``; a document's end is one more token than it has."""

    def __init__(self, file: str) -> None:
        try:
            from tokenizers import Tokenizer as Reader
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                "a tokenizer file needs tokenizers: pip install 'weft[tokenizers]'", name="tokenizers"
            ) from missing
        data = Path(file).read_bytes()
        try:
            self.reader = Reader.from_buffer(data)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"tokenizer '{file}': not a tokenizer.json of tokenizers: {error}") from None
        self.name = hashlib.sha256(data).hexdigest()[:16]
        self.end = self.reader.get_vocab_size()
        self.vocabulary = self.end + 1

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self.reader.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False).ids)


def tokenized(source: str, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens, memory-mapped from files in the cache folder, which are made where they are not there.

    Every twentieth document is for validation; of a single one its last tenth.

    Raises:
        ValueError: there is no text in the files.
    """
    files = documents(source)
    dtype = np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32
    state = "".join(f"{p.resolve()} {p.stat().st_size} {p.stat().st_mtime_ns}\n" for p in files)
    key = hashlib.sha256(f"{tokenizer.name} {state}".encode()).hexdigest()[:24]
    folder = disk_cache.folder("tokens")
    paths = [folder / f"{key}-{part}.bin" for part in ("train", "validation")]
    if not all(p.is_file() for p in paths):
        folder.mkdir(parents=True, exist_ok=True)
        parts: list[list[np.ndarray]] = [[], []]
        for number, file in enumerate(files):
            tokens = tokenizer.encode(file.read_bytes())
            if len(tokens):
                ended = np.full(len(tokens) + 1, tokenizer.end, dtype)
                ended[:-1] = tokens
                parts[number % VALIDATION == VALIDATION // 2].append(ended)
        if not any(parts):
            raise ValueError(f"text '{source}': {len(files)} file(s), all of them empty")
        whole = [np.concatenate(p) if p else np.zeros(0, dtype) for p in parts]
        if not len(whole[1]) or not len(whole[0]):
            whole = np.split(np.concatenate(whole), [sum(map(len, whole)) * 9 // 10])
        for path, tokens in zip(paths, whole, strict=True):
            write_tokens(path, tokens)
    train, validation = (np.memmap(p, dtype=dtype, mode="r") for p in paths)
    return train, validation


def write_tokens(path: Path, tokens: np.ndarray) -> None:
    """Replaces the file at once; ranks that make the same file do not meet."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            tokens.tofile(file)
        os.replace(name, path)
    except OSError as error:
        os.unlink(name)
        number = error.errno or errno.ENOSPC  # NumPy gives none where it could not write all
        raise OSError(number, f"tokens cannot be written: {error.strerror or error}", str(path)) from None


class TextData:
    """Batches of ``[batch, length]`` tokens and the tokens after them.

    Windows lie side by side and come in an order drawn for each epoch from the seed; the token after a document's end is
    no target. A batch is a function of its step, so a run goes on anywhere, on any number of ranks.
    """

    unit = "tokens"

    def __init__(self, source: str, tokenizer: str, batch: int, length: int, seed: int) -> None:
        reader: Any = Tokenizer(tokenizer) if tokenizer else Bytes()
        self.vocabulary, self.end = reader.vocabulary, reader.end
        self.train, self.validation = tokenized(source, reader)
        self.batch_size, self.length, self.seed = batch, length, seed
        self.windows = (len(self.train) - 1) // length
        self.steps_per_epoch = self.windows // batch
        if not self.steps_per_epoch:
            raise ValueError(
                f"text '{source or 'standard library'}' has {len(self.train)} tokens for training; a batch of {batch} x "
                f"{length} needs {batch * length + 1}: take more text, or a smaller batch or length"
            )
        self._order: tuple[int, Tensor] = (-1, torch.zeros(0))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The whole batch of a step, ``[batch, length]`` twice, int64, on the CPU."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(self.windows, generator=generator)
        chosen = self._order[1][number * self.batch_size : (number + 1) * self.batch_size]
        return self._windows(self.train, chosen.tolist())

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Up to 16 batches of the validation tokens, the same ones every time."""
        windows = (len(self.validation) - 1) // self.length
        size = min(self.batch_size, windows)
        for first in range(0, min(windows, 16 * size) - size + 1, size) if size else ():
            yield self._windows(self.validation, range(first, first + size))

    def _windows(self, tokens: np.ndarray, numbers: Any) -> tuple[Tensor, Tensor]:
        rows = np.stack([tokens[i * self.length : (i + 1) * self.length + 1] for i in numbers]).astype(np.int64)
        x, y = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        y[x == self.end] = IGNORE
        return x, y
