"""What a model is given as: a folder in Hugging Face's format, a GGUF file, or the name of a model that a package ships."""

from pathlib import Path

from weft.inference.checkpoint import Folder, Source
from weft.inference.config import ModelConfig, read_config
from weft.inference.gguf import GgufFile, find
from weft.inference.tokenizer import Tokenizer


def open_model(model: str | Path) -> tuple[ModelConfig, Source, Tokenizer]:
    """Configuration, tensors and tokenizer.

    Raises:
        FileNotFoundError, ValueError: no model that is read here; the message says why.
    """
    if (file := find(model)) is not None:
        gguf = GgufFile(file)
        return gguf.config(), gguf, gguf.tokenizer()
    if not Path(model).exists():
        raise FileNotFoundError(f"no model at {model}; expected a folder, a .gguf file, or smollm2")
    config = read_config(model)
    if config.quantization:
        from weft.inference.quantized_folder import QuantizedFolder

        return config, QuantizedFolder(model, config.quantization), Tokenizer.read(model)
    return config, Folder(model), Tokenizer.read(model)
