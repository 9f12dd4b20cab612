"""Model folders with tiny random weights, and a tokenizer whose tokens are bytes."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CLASSES = {  # family: its configuration and model in transformers
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model(family: str, seed: int = 0, **changes):
    """A model of Transformers, float32, with norms and biases that are not all alike."""
    torch.manual_seed(seed)
    config = getattr(transformers, CLASSES[family] + "Config")(**{**SIZES, **changes})
    made = getattr(transformers, CLASSES[family] + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(0, 0.2 if p.ndim > 1 else 0.3)
            if "norm" in name:
                p.add_(1)
    return made


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def folder(path: Path, family: str = "llama", edit=None, **changes):
    """Saves such a model; ``edit`` may change the contents of ``config.json``. Returns the model of Transformers."""
    made = model(family, **changes)
    made.save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    if edit is not None:
        config = json.loads((path / "config.json").read_text())
        edit(config)
        (path / "config.json").write_text(json.dumps(config))
    return made


def greedy(made, prompt: list[int], count: int) -> list[int]:
    """Transformers' greedy tokens behind a prompt."""
    tokens = torch.tensor([prompt])
    mask = torch.ones_like(tokens)
    out = made.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()
