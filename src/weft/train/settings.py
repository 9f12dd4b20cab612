"""What a training run is asked to do: defaults, then a YAML file, then flags."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from weft.definition import UnknownName

JOB = "WEFT_JOB"  # environment: what tells a job of weft launch from others, however often it is started
AMP = ("none", "bf16", "fp16")
OPERATORS = ("weft", "torch")
OPTIMIZERS = ("adamw", "sgd", "weft-adamw", "weft-adamw-8bit", "weft-lion", "weft-muon", "weft-sgd")
PARALLEL = ("none", "ddp", "fsdp")
COMPRESS = ("none", "bf16", "fp8", "powersgd")
CHOICES = {"amp": AMP, "operators": OPERATORS, "optimizer": OPTIMIZERS, "parallel": PARALLEL, "compress": COMPRESS}


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Settings:
    """What both training jobs have."""

    out: str = option("run", "folder of logs and checkpoints")
    batch: int = option(64, "examples an update, of all ranks and accumulated parts together")
    lr: float = option(
        5e-3, "largest learning rate; it rises over the first twentieth of the steps, then falls as a cosine"
    )
    weight_decay: float = option(0.01, "weight decay, decoupled")
    clip: float = option(1.0, "largest 2-norm of the gradients; 0: not clipped")
    seed: int = option(0, "of weights, order and augmentation")
    device: str = option("", "cpu, cuda or cuda:N; else the GPU where there is one")
    deterministic: bool = option(False, "only deterministic algorithms")
    validate_every: int = option(0, "steps between validations; 0: at the end alone")
    checkpoint_every: int = option(0, "steps between checkpoints; 0: at the end alone")
    resume: bool = option(False, "go on from the newest checkpoint in --out")
    skip_nan: bool = option(False, "leave out updates whose loss or gradient is not finite, instead of stopping")
    tensorboard: bool = option(False, "write TensorBoard's events too")
    # techniques
    amp: str = option("none", "automatic mixed precision: none, bf16, fp16 (with a gradient scaler)")
    tf32: bool = option(False, "fp32 products in TF32")
    cudnn_benchmark: bool = option(False, "cuDNN times its algorithms and takes the fastest")
    accumulate: int = option(1, "parts in which each rank's share of a batch is run, one after another")
    compile: bool = option(False, "torch.compile")
    cuda_graph: bool = option(False, "forward and backward as one CUDA graph")
    operators: str = option("weft", "weft: weft.ops; torch: PyTorch's own")
    optimizer: str = option("weft-adamw", ", ".join(OPTIMIZERS))
    prefetch: bool = option(True, "the next batch is made, and its memory pinned, in a thread")
    parallel: str = option("none", "over torchrun's ranks: none, ddp, fsdp")
    compress: str = option("none", "gradients between ranks: none, bf16, fp8 (with error feedback), powersgd (of ddp)")

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            if getattr(self, name) not in valid:
                raise UnknownName(name, str(getattr(self, name)), valid)
        for name in (
            "batch",
            "accumulate",
            "steps",
            "epochs",
            "length",
            "layers",
            "heads",
            "kv_heads",
            "width",
            "tensor_parallel",
        ):
            if hasattr(self, name) and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("validate_every", "checkpoint_every", "clip", "weight_decay", "lr"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed is {self.seed}; expected 0 to {2**31 - 1}")
        if self.compress != "none" and self.parallel not in (
            ("ddp",) if self.compress == "powersgd" else ("ddp", "fsdp")
        ):
            raise ValueError(
                f"compress is {self.compress} and parallel {self.parallel}; expected parallel=ddp"
                + (" (PowerSGD approximates whole gradients)" if self.compress == "powersgd" else " or fsdp")
            )
        if self.cuda_graph and (self.parallel != "none" or self.compile):
            raise ValueError("cuda_graph goes with parallel=none and without compile (which makes graphs of its own)")


@dataclass
class CnnSettings(Settings):
    data: str = option("digits", "digits (scikit-learn's), mnist or cifar10")
    folder: str = option("", "where the files of mnist or cifar10 are, or are downloaded to")
    download: bool = option(False, "download the files that are not there, and check them")
    epochs: int = option(30, "passes over the training images")
    channels_last: bool = option(False, "images as [B, H, W, C] in memory")


@dataclass
class GptSettings(Settings):
    lr: float = option(
        1e-3, "largest learning rate; it rises over the first twentieth of the steps, then falls as a cosine"
    )
    batch: int = option(16, "sequences an update, of all ranks and accumulated parts together")
    weight_decay: float = option(0.1, "weight decay, decoupled")
    text: str = option("", "folder of text, or one file; else the source of Python's standard library")
    tokenizer: str = option("", "a tokenizer.json of Hugging Face's tokenizers; else bytes")
    steps: int = option(300, "updates")
    length: int = option(256, "tokens in a sequence")
    layers: int = option(4, "transformer layers")
    width: int = option(256, "elements of a token's vector")
    heads: int = option(8, "heads of the queries")
    kv_heads: int = option(4, "heads of keys and values; divides heads")
    checkpoint_activations: bool = option(False, "layers run again in backward instead of saving what they need")
    fp8: bool = option(False, "products of the layers in fp8 (weft.nn.Linear)")
    tensor_parallel: int = option(
        1, "ranks that share each layer's heads; more of torchrun's share batches by parallel=fsdp"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads} and kv_heads {self.kv_heads}; expected kv_heads to divide heads")
        if self.width % (2 * self.heads):
            raise ValueError(f"width is {self.width} and heads {self.heads}; expected a multiple of twice the heads")
        if self.tensor_parallel == 1:
            return
        if self.kv_heads % self.tensor_parallel:
            shared = f"tensor_parallel is {self.tensor_parallel} and kv_heads {self.kv_heads}"
            raise ValueError(f"{shared}; expected tensor_parallel to divide kv_heads")
        if self.parallel == "ddp" or self.fp8 or self.cuda_graph:
            raise ValueError("tensor_parallel goes with parallel=none or fsdp, without fp8 and cuda_graph")


S = TypeVar("S", bound=Settings)


def read(cls: type[S], file: str | None, flags: Mapping[str, Any]) -> S:
    """Settings of a class: its defaults, changed by the YAML file, changed by those flags that are not None.

    Raises:
        ValueError, UnknownName: the file is no mapping; a name or value that is none.
        FileNotFoundError: no such file.
        ModuleNotFoundError: PyYAML is not installed; the message has the install line.
    """
    known = {f.name: f for f in fields(cls)}
    given: dict[str, Any] = {}
    for name, value in (load_yaml(file) if file else {}).items():
        if name not in known:
            raise UnknownName(f"setting in {file}:", str(name), list(known))
        given[name] = _typed(value, known[name], file)
    return cls(**given | {name: value for name, value in flags.items() if value is not None})


def load_yaml(file: str) -> dict[str, Any]:
    """A YAML file that holds a mapping."""
    try:
        import yaml
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("YAML files need PyYAML: pip install 'weft[train]'", name="yaml") from missing
    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: no valid YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: no UTF-8 text: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: holds {type(found).__name__}; expected names with values, such as 'batch: 32'")
    return found


def _typed(value: Any, setting: Any, file: str | None) -> Any:
    expected = type(setting.default)
    if expected is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3, without a point, as text
        except ValueError:
            pass
    elif type(value) is expected:
        return value
    raise ValueError(f"{file}: {setting.name} is {value!r}; expected {expected.__name__}, such as {setting.default!r}")
