"""A Hugging Face model writes the same text with weft's attention as with its own.

    python examples/hugging_face_attention.py [FOLDER] [PROMPT]

FOLDER holds a causal language model in Hugging Face's format. Without one, a Llama of two layers with grouped queries is made
from a configuration and reads bytes of Python's standard library for half a minute. Needs transformers (pip install
'weft[transformers]').
"""

import sys

import torch
from small_language_model import CONTEXT, Text, drawn

from weft.nn import huggingface

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, TOKENS = 300, 64


def made():
    """A small Llama over bytes, trained a little; functions from text to token ids and back."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(DEVICE)
    optimizer, text, g = torch.optim.AdamW(model.parameters(), lr=3e-3), Text(), torch.Generator().manual_seed(0)
    for step in range(STEPS):
        piece = drawn(text.known, 16, g).to(DEVICE)
        loss = model(piece, labels=piece).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: {loss.item():.2f} nats a byte, pieces of {CONTEXT} bytes")
    return model, lambda words: torch.tensor([list(words.encode())]), lambda ids: bytes(ids).decode(errors="replace")


def read(folder: str):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE), AutoTokenizer.from_pretrained(folder)
    return model, lambda words: tokenizer(words, return_tensors="pt").input_ids, tokenizer.decode


@torch.no_grad()
def compare(model, ids_of, text_of, words: str) -> None:
    prompt, written = ids_of(words).to(DEVICE), []
    for attention in (model.config._attn_implementation, "weft"):
        model.eval().set_attn_implementation(attention)
        torch.manual_seed(0)
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=True, top_k=4
        )
        written.append((model(prompt).logits.float(), text_of(ids[0].tolist())))
        print(f"\n{attention}:\n{written[-1][1]}")
    (logits, text), (others, same) = written
    print(
        f"\nlogits differ by {float((logits - others).abs().max()):.1e}; the same text: {'yes' if text == same else 'no'}"
    )


def main() -> None:
    try:
        huggingface.register()
    except ModuleNotFoundError as error:
        sys.exit(f"hugging_face_attention: {error}")
    compare(*(read(sys.argv[1]) if len(sys.argv) > 1 else made()), (sys.argv[2:] or ["def __init__(self"])[0])


if __name__ == "__main__":
    main()
