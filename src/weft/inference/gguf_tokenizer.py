"""The tokenizer of a GGUF file's metadata, as ``tokenizers`` runs it: byte-level BPE by the name of its pre-tokenizer, and
SentencePiece's BPE, whose merges follow from the scores of its pieces.
"""

from collections.abc import Iterator
from typing import Any

from weft.inference.tokenizer import INSTALL, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

# The patterns of the models' own tokenizer.json: GPT-2's words, Llama 3's, and those with other numbers.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PRETOKENIZERS = {  # tokenizer.ggml.pre: whether single digits are cut off first, the pattern
    "gpt-2": (False, GPT2), "default": (False, GPT2), "smollm": (True, GPT2),
    "llama-bpe": (False, LLAMA3), "llama3": (False, LLAMA3), "llama-v3": (False, LLAMA3),
    "qwen2": (False, QWEN2), "deepseek-r1-qwen": (False, QWEN2),
}  # fmt: skip
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token is not merged from parts


def tokenizer_of(fields: dict[str, Any], where: str) -> Tokenizer:
    """Of the metadata, by name.

    Raises:
        ValueError: another kind of tokenizer or pre-tokenizer, broken metadata.
    """
    kind, tokens = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"{where} has no tokenizer.ggml.tokens; expected a file with its tokenizer")
    try:
        import tokenizers  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(INSTALL, name=missing.name) from missing
    if kind == "gpt2":
        backend = _byte_level(fields, tokens, where)
    elif kind == "llama":
        backend = _sentencepiece(fields, tokens, where)
    else:
        raise ValueError(
            f"{where}: tokenizer.ggml.model is {kind!r}; expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)"
        )
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            special[f"{name}_token"] = tokens[token]
    _begin(
        backend, fields, special.get("bos_token"), kind == "llama" or fields.get("tokenizer.ggml.pre") in WHOLE_WORDS
    )
    return Tokenizer(backend, special, fields.get("tokenizer.chat_template"))


def _byte_level(fields: dict[str, Any], tokens: list[str], where: str) -> Any:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pre, merges = fields.get("tokenizer.ggml.pre", "default"), fields.get("tokenizer.ggml.merges")
    if pre not in PRETOKENIZERS:
        raise ValueError(f"{where}: tokenizer.ggml.pre is {pre!r}; expected one of {', '.join(PRETOKENIZERS)}")
    if merges is None:
        raise ValueError(f"{where} has no tokenizer.ggml.merges, which byte-level BPE needs")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]
        backend = Backend(models.BPE(vocabulary, pairs, ignore_merges=pre in WHOLE_WORDS))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{where}: broken tokenizer.ggml.merges: {error}") from None
    digits, pattern = PRETOKENIZERS[pre]
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        *([pre_tokenizers.Digits(individual_digits=True)] if digits else []),
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    _add(backend, fields, tokens)
    return backend


def _sentencepiece(fields: dict[str, Any], tokens: list[str], where: str) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = fields.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"{where} has no tokenizer.ggml.scores of its {len(tokens)} tokens, which SentencePiece needs")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = sorted(_pairs(fields, tokens, vocabulary), key=lambda pair: -scores[vocabulary["".join(pair)]])
    backend = Backend(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if fields.get("tokenizer.ggml.add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    _add(backend, fields, tokens)
    return backend


def _pairs(fields: dict[str, Any], tokens: list[str], vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that are a piece together."""
    kinds = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == NORMAL:
            for cut in range(1, len(token)):
                if token[:cut] in vocabulary and token[cut:] in vocabulary:
                    yield token[:cut], token[cut:]


def _add(backend: Any, fields: dict[str, Any], tokens: list[str]) -> None:
    """Tokens that are found in a text before it is cut up."""
    from tokenizers import AddedToken

    kinds = fields.get("tokenizer.ggml.token_type") or []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])


def _begin(backend: Any, fields: dict[str, Any], bos: str | None, usual: bool) -> None:
    """Puts the first token before a text where the model wants one."""
    from tokenizers import processors

    if not fields.get("tokenizer.ggml.add_bos_token", usual) or bos is None:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, backend.token_to_id(bos))]
    )
