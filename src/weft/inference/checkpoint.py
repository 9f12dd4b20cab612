"""A folder of safetensors as named tensors. Nothing in the folder is executed; pickled weights are refused."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

UNREAD = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.masked_bias")


class Source(Protocol):
    """Where a model's tensors come from: a folder, a GGUF file, a dictionary."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name and shape, on the CPU or on the device it was made on.

        Raises:
            ValueError: no such tensor, another shape; the message names it.
        """
        ...

    def linear(
        self, load: Any, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool, split: int | None
    ) -> Any:
        """The layer of matrices [rows, columns], one below the other, as a ``weights.Linear`` of the codes that are stored;
        None where they are stored as floats. ``load`` is the ``weights.Loader`` that asks, ``split`` as for its ``linear``."""
        return None

    def skip(self, name: str) -> None:
        """Marks a tensor as read that is redundant."""

    def finish(self) -> None:
        """Raises ValueError if the source has a tensor that was not asked for and that may change what is computed."""
        ...


class Tensors(Source):
    """Over a dictionary of tensors."""

    def __init__(self, tensors: dict[str, Tensor], where: str = "the weights"):
        self.where, self.tensors = where, tensors
        self.read: set[str] = set()

    def names(self) -> Iterable[str]:
        return self.tensors

    def load(self, name: str) -> Tensor:
        return self.tensors[name]

    def _find(self, name: str) -> str | None:
        """The name as it is stored: some checkpoints leave out the leading ``model.``."""
        if name in self.names():
            return name
        short = name.removeprefix("model.")
        return short if short in self.names() else None

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._find(name)
        if found is None:
            raise ValueError(f"{self.where} has no tensor {name!r}; expected one of shape {shape}")
        self.read.add(found)
        t = self.load(found)
        if tuple(t.shape) != shape:
            raise ValueError(f"{self.where}: tensor {found!r} has shape {tuple(t.shape)}; expected {shape}")
        if not t.is_floating_point():
            raise ValueError(f"{self.where}: tensor {found!r} is {t.dtype}; expected a floating-point one")
        return t

    def skip(self, name: str) -> None:
        """Marks a tensor as read that is redundant."""
        if (found := self._find(name)) is not None:
            self.read.add(found)

    def finish(self) -> None:
        more = [name for name in self.names() if name not in self.read and not name.endswith(UNREAD)]
        if more:
            raise ValueError(
                f"{self.where}: tensor {more[0]!r} is no part of the model that config.json describes ({len(more)} such)"
            )


class Folder(Tensors):
    """A :class:`Source` over ``model.safetensors``, or the shards of ``model.safetensors.index.json``.

    Raises:
        FileNotFoundError: no safetensors, a missing shard.
        ValueError: a broken file, a shard outside the folder, a tensor that is in two of them.
    """

    def __init__(self, folder: str | Path):
        from safetensors import SafetensorError, safe_open

        self.where, self.read = str(folder), set()
        self.at: dict[str, Any] = {}  # the open file of each tensor
        for path in _files(Path(folder)):
            try:
                file: Any = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is no whole safetensors file: {error}") from None
            for name in file.keys():  # noqa: SIM118
                if name in self.at:
                    raise ValueError(
                        f"{folder}: {path.name} and another shard have a tensor {name!r}; expected it once"
                    )
                self.at[name] = file

    def names(self) -> Iterable[str]:
        return self.at

    def load(self, name: str) -> Tensor:
        found: Tensor = self.at[name].get_tensor(name)
        return found


def _files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} has no weight_map of names to files ({error!r:.80})") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{index} names the shard {name!r:.80}; expected a file in this folder")
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} lacks the shard {name}, which {index.name} names")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    pickled = [path.name for path in folder.glob("*.bin")] + [path.name for path in folder.glob("*.pth")]
    why = f"; {pickled[0]} is pickled, which can run code: convert it to safetensors" if pickled else ""
    raise FileNotFoundError(f"{folder} has no model.safetensors{why}")


@contextmanager
def naming(name: str, ranks: int) -> Iterator[None]:
    """Errors in what is made of a tensor, or of a rank's share of it, say which one it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{'a share of ' * (ranks > 1)}tensor {name!r}: {error}") from None


def finite(t: Tensor, name: str) -> Tensor:
    """The tensor. Raises ValueError where it holds NaN or an infinity."""
    if not bool(torch.isfinite(t).all()):
        raise ValueError(f"tensor {name!r} holds NaN or an infinity; expected finite weights")
    return t
