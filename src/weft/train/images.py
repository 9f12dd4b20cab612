"""Labelled images: scikit-learn's digits, MNIST or CIFAR-10 from a folder, and the batches of a training run."""

import gzip
import hashlib
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.definition import UnknownName
from weft.train.digits import digits

MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
CIFAR = "https://www.cs.toronto.edu/~kriz/"
FILES = {  # file → its address and MD5, as its publishers give it
    "mnist": {
        "train-images-idx3-ubyte.gz": (MNIST, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        "train-labels-idx1-ubyte.gz": (MNIST, "d53e105ee54ea40749a09fcbcd1e9432"),
        "t10k-images-idx3-ubyte.gz": (MNIST, "9fb629c4189551a2d022fa330f9573f3"),
        "t10k-labels-idx1-ubyte.gz": (MNIST, "ec29112dd5afa0611ce80d1b7f02629c"),
    },
    "cifar10": {"cifar-10-binary.tar.gz": (CIFAR, "c32a1d4ab5d03f1284b67883e8d87530")},
}
Split = tuple[Tensor, Tensor]  # images [N, C, H, W] in 0 … 1, labels [N]


def read(name: str, folder: str, download: bool, seed: int) -> tuple[Split, Split]:
    """Images for training and for validation.

    Raises:
        UnknownName: no such data.
        FileNotFoundError: a file is not there; it is named.
        ValueError: no folder, or a file whose checksum is not its publishers'.
        OSError: a download failed.
    """
    if name == "digits":
        train_x, train_y, test_x, test_y = digits(seed)
        return (train_x, train_y), (test_x, test_y)
    if name not in FILES:
        raise UnknownName("data", name, ["digits", *FILES])
    if not folder:
        raise ValueError(f"data={name} needs a folder: --folder PATH (with --download its files are fetched into it)")
    paths = [_checked(Path(folder), file, *where, download) for file, where in FILES[name].items()]
    try:
        return _mnist(paths) if name == "mnist" else _cifar(paths[0])
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError, KeyError, ValueError) as error:
        raise ValueError(f"{name} in '{folder}': a file is damaged: {error}") from None


def _checked(folder: Path, file: str, address: str, md5: str, download: bool) -> Path:
    path = folder / file
    if not path.is_file():
        if not download:
            raise FileNotFoundError(f"'{path}' is not there; --download fetches it from {address}{file}")
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            with urllib.request.urlopen(address + file, timeout=60) as answer, open(part, "wb") as out:
                shutil.copyfileobj(answer, out)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OSError(f"'{file}' could not be fetched from {address}: {error}") from None
        part.replace(path)
    with open(path, "rb") as data:
        found = hashlib.md5(data.read(), usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(f"'{path}' is damaged: its MD5 is {found}, expected {md5}; delete it and fetch it again")
    return path


def _mnist(paths: list[Path]) -> tuple[Split, Split]:
    raw = []
    for path in paths:
        with gzip.open(path) as file:
            raw.append(file.read())
    images = [np.frombuffer(raw[i], np.uint8, offset=16).reshape(-1, 1, 28, 28) for i in (0, 2)]
    labels = [np.frombuffer(raw[i], np.uint8, offset=8) for i in (1, 3)]
    train, test = (_tensors(*pair) for pair in zip(images, labels, strict=True))
    return train, test


def _cifar(path: Path) -> tuple[Split, Split]:
    parts: dict[str, np.ndarray] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.endswith(".bin") and (data := archive.extractfile(member)):
                parts[Path(member.name).name] = np.frombuffer(data.read(), np.uint8).reshape(-1, 3073)
    train = np.concatenate([parts[f"data_batch_{i}.bin"] for i in range(1, 6)])
    test = parts["test_batch.bin"]
    one, two = (_tensors(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]) for rows in (train, test))
    return one, two


def _tensors(images: np.ndarray, labels: np.ndarray) -> Split:
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels")
    return torch.from_numpy(images.astype(np.float32) / 255), torch.from_numpy(labels.astype(np.int64))


class ImageData:
    """Batches of ``batch`` images, shifted by up to an eighth of their size, all of a batch alike; each a function of its step.

    An epoch's order is drawn from the seed; images that fill no whole batch wait for another epoch's.
    """

    unit = "images"

    def __init__(self, name: str, folder: str, download: bool, batch: int, seed: int) -> None:
        self.train, self.validation = read(name, folder, download, seed)
        self.batch_size, self.seed = batch, seed
        _, self.channels, self.size, _ = self.train[0].shape
        self.classes = 10
        self.steps_per_epoch = len(self.train[1]) // batch
        if not self.steps_per_epoch:
            raise ValueError(
                f"batch is {batch}, but there are {len(self.train[1])} training images; take a smaller one"
            )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The whole batch of a step: images ``[batch, C, H, W]``, labels ``[batch]``, on the CPU."""
        epoch, number = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train[1]), generator=generator)
        chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
        moved = max(1, self.size // 8)
        generator.manual_seed((self.seed << 32) + step)
        down, right = torch.randint(0, 2 * moved + 1, (2,), generator=generator).tolist()
        images = pad(self.train[0][chosen], (moved,) * 4)
        return images[:, :, down : down + self.size, right : right + self.size].contiguous(), self.train[1][chosen]

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*(part.split(1024) for part in self.validation), strict=True)
