"""The two training jobs: what each builds from its settings."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.train.classifier import Classifier
from weft.train.decoder import Decoder
from weft.train.images import ImageData
from weft.train.settings import CnnSettings, GptSettings, Settings
from weft.train.text import TextData


@dataclass
class Job:
    """``model`` holds the arguments of the network: a checkpoint with others is another model's."""

    name: str
    network: type[nn.Module]
    model: dict[str, Any]
    data: Any
    options: dict[str, Any]  # arguments that change how the network computes, not what

    def build(self, **changed: Any) -> Any:
        return self.network(**self.model, **self.options | changed)

    def plain(self, recompute: bool = False, operators: str = "torch") -> Any:
        """The network for fake and meta tensors: of PyTorch's own operators, without fp8."""
        changed = {"operators": operators, "recompute": recompute, "fp8": False}
        return self.build(**{name: value for name, value in changed.items() if name in self.options})

    def example(self, examples: int) -> tuple[Tensor, Tensor]:
        """A batch of zeros in the shapes of the training data."""
        if self.name == "cnn":
            images = torch.zeros(examples, self.data.channels, self.data.size, self.data.size)
            return images, torch.zeros(examples, dtype=torch.int64)
        tokens = torch.zeros(examples, self.data.length, dtype=torch.int64)
        return tokens, tokens.clone()

    def count(self, y: Tensor) -> int:
        """How many targets count."""
        return int((y >= 0).sum())


def job(settings: Settings) -> Job:
    """The job that belongs to the class of the settings, its data read."""
    if isinstance(settings, CnnSettings):
        images = ImageData(settings.data, settings.folder, settings.download, settings.batch, settings.seed)
        model = {"channels": images.channels, "size": images.size, "classes": images.classes}
        return Job("cnn", Classifier, model, images, {"operators": settings.operators})
    if not isinstance(settings, GptSettings):
        raise TypeError(f"settings are {type(settings).__name__}; expected CnnSettings or GptSettings")
    text = TextData(settings.text, settings.tokenizer, settings.batch, settings.length, settings.seed)
    sizes = {name: getattr(settings, name) for name in ("length", "layers", "width", "heads", "kv_heads")}
    options = {
        "operators": settings.operators,
        "recompute": settings.checkpoint_activations,
        "deterministic": settings.deterministic,
        "fp8": settings.fp8,
    }
    return Job("gpt", Decoder, {"vocabulary": text.vocabulary, **sizes}, text, options)


def steps_of(settings: Settings, made: Job) -> int:
    """Updates of the whole run."""
    if isinstance(settings, CnnSettings):
        return settings.epochs * made.data.steps_per_epoch
    return settings.steps  # type: ignore[attr-defined]
