"""GGUF files: tiny ones of every architecture against Transformers, broken ones, tokenizers."""

import struct

import gguf
import numpy as np
import pytest
import tiny
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from weft.inference.gguf import gguf_name
from weft.inference.gguf_container import Container
from weft.inference.gguf_tokenizer import tokenizer_of
from weft.inference.model import Batch, Decoder, Pages
from weft.inference.quantize_model import write
from weft.inference.quantized import Quantized, Scheme
from weft.inference.sources import open_model
from weft.operators.low_precision.quantized_weight import dequantize_weight, prepare_weight

TOKENS = [5, 280, 7, 7, 100, 3, 250, 11, 0, 42, 9, 199]
KIND = gguf.GGMLQuantizationType


def logits_of(decoder, tokens):
    """Logits [tokens, V] of one sequence."""
    pages = Pages.empty(decoder.config, 1, 64, decoder.dtype, "cpu")
    decoder.prepare(decoder.config.max_length)
    table, length = torch.zeros((1, 1), dtype=torch.int32), torch.tensor([len(tokens)], dtype=torch.int32)
    return decoder(Batch(torch.tensor(tokens), length, table, len(tokens)), pages)


def permuted(name, t, config, back=False):
    """Llama's queries and keys, as llama.cpp's converter orders their rows; ``back`` is the inverse."""
    if config.model_type not in ("llama", "mistral") or not ("q_proj" in name or "k_proj" in name):
        return t
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    t = t.reshape(heads, -1, 2, *t.shape[1:]) if back else t.reshape(heads, 2, -1, *t.shape[1:])
    return t.transpose(1, 2).reshape(-1, *t.shape[3:])


def written(path, made, kind="F32", tensors=(), fields=(), embedding="F32"):
    """A model of Transformers as a GGUF file; its matrices are rounded to ``kind``, also in ``made``."""
    c, state = made.config, made.state_dict()
    architecture = "llama" if c.model_type == "mistral" else c.model_type
    w = gguf.GGUFWriter(path, architecture)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    for name, value in {
        "block_count": c.num_hidden_layers, "embedding_length": c.hidden_size, "context_length": c.max_position_embeddings,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.key_length": head_dim,
    }.items():  # fmt: skip
        w.add_uint32(f"{architecture}.{name}", value)
    w.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    w.add_float32(f"{architecture}.rope.freq_base", c.rope_parameters["rope_theta"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([*sorted(tiny.tokenizer().get_vocab()), "ab"])
    w.add_token_merges(["a b"])
    for name, value in fields:
        w.add_uint32(f"{architecture}.{name}", value)
    for name, t in state.items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        of = KIND[kind if "proj.weight" in name else embedding if "embed_tokens" in name else "F32"]
        stored = quantize(permuted(name, t, c).contiguous().numpy(), of)
        w.add_tensor(gguf_name(name), stored, raw_dtype=of)
        rounded = torch.from_numpy(np.array(dequantize(stored, of), dtype=np.float32))
        t.copy_(permuted(name, rounded, c, back=True))
    for name, t in tensors:
        w.add_tensor(name, t)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def check(path, made):
    config, source, _ = open_model(path)
    decoder = Decoder(config, source, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        wanted = made(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(decoder, TOKENS), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [("llama", "F32", {}), ("llama", "Q4_0", {"tie_word_embeddings": True, "head_dim": 32}),
     ("llama", "F16", {"attention_bias": True, "mlp_bias": True}), ("mistral", "Q8_0", {"sliding_window": None}),
     ("qwen2", "Q4_1", {}), ("qwen3", "Q5_0", {"head_dim": 32})],
)  # fmt: skip
def test_logits_are_those_of_transformers(tmp_path, family, kind, changes):
    made = tiny.model(family, **changes)
    written(tmp_path / "model.gguf", made, kind)
    check(tmp_path / "model.gguf", made)


def test_sliding_windows(tmp_path):
    made = tiny.model("mistral", sliding_window=5)
    written(tmp_path / "model.gguf", made, fields=[("attention.sliding_window", 5)])
    check(tmp_path / "model.gguf", made)


def test_llama3_scaling_is_found_by_its_divisors(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    made = tiny.model("llama", rope_parameters={**scaling, "original_max_position_embeddings": 8192})
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2).double() / 16)
    divisors = (plain / made.model.rotary_emb.inv_freq.double()).float().numpy()
    written(tmp_path / "right.gguf", made, tensors=[("rope_freqs.weight", divisors)])
    check(tmp_path / "right.gguf", made)
    assert open_model(tmp_path / "right.gguf")[0].rotary.kind == "llama3"
    divisors[4] *= 1.1
    written(tmp_path / "wrong.gguf", made, tensors=[("rope_freqs.weight", divisors)])
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3\.1's scaling"):
        open_model(tmp_path / "wrong.gguf")


def test_the_container_is_as_the_package_reads_it(tmp_path):
    written(tmp_path / "model.gguf", tiny.model("llama"), "Q8_0")
    ours, theirs = Container(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    assert ours.fields == {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    for t in theirs.tensors:
        assert ours.tensors[t.name].shape == tuple(reversed(t.shape.tolist()))
        assert bytes(ours.bytes_of(t.name, t.n_bytes)) == t.data.tobytes()


def test_broken_files_are_refused(tmp_path):
    path, made = tmp_path / "model.gguf", tiny.model("qwen2")
    written(path, made)
    whole = path.read_bytes()
    for end in (0, 3, 8, 20, 100, 1000, 5000, len(whole) - 200):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"cut off|expected a little-endian"):
            config, source, _ = open_model(path)
            Decoder(config, source, torch.device("cpu"), torch.float32)
    for at, value, said in (
        (0, b"GGML", "expected a little-endian"), (4, struct.pack("<I", 1), "version 1"),
        (8, struct.pack("<Q", 2**63), "cut off"), (16, struct.pack("<Q", 2**63), "cut off|a value of type"),
    ):  # fmt: skip
        path.write_bytes(whole[:at] + value + whole[at + len(value) :])
        with pytest.raises(ValueError, match=said):
            open_model(path)
    at = whole.index(name := b"blk.0.attn_q.weight") + len(name) + 4 + 16 + 4  # of its offset
    path.write_bytes(whole[:at] + struct.pack("<Q", struct.unpack("<Q", whole[at : at + 8])[0] + 1) + whole[at + 8 :])
    with pytest.raises(ValueError, match=r"attn_q.weight' begins at \d+; expected a multiple of the alignment 32"):
        open_model(path)
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere\.gguf"):
        open_model(tmp_path / "nowhere.gguf")


def test_changed_bytes_end_in_words(tmp_path):
    path, random = tmp_path / "model.gguf", np.random.default_rng(0)
    written(path, tiny.model("llama"), "Q8_0")
    whole, read = np.frombuffer(path.read_bytes(), dtype=np.uint8), 0
    for _ in range(150):
        changed = whole.copy()
        at = random.integers(0, 7000)
        changed[at : at + random.integers(1, 9)] = random.choice([0, 255, random.integers(256)])
        path.write_bytes(changed.tobytes())
        try:
            config, source, tokenizer = open_model(path)
            Decoder(config, source, torch.device("cpu"), torch.float32)
            tokenizer.encode("hello")
            read += 1
        except ValueError as error:
            assert str(error)
    assert 10 < read < 140


@pytest.mark.parametrize(
    ("fields", "said"),
    [([("expert_count", 8)], r"unknown key qwen2\.expert_count = 8"),
     ([("attention.value_length", 8)], "keys of 16 columns and values of 8")],
)  # fmt: skip
def test_what_would_change_the_result_is_refused(tmp_path, fields, said):
    written(tmp_path / "model.gguf", tiny.model("qwen2"), fields=fields)
    with pytest.raises(ValueError, match=said):
        open_model(tmp_path / "model.gguf")


def test_tensors_are_refused_by_name(tmp_path):
    path, made = tmp_path / "model.gguf", tiny.model("qwen2")
    written(path, made, tensors=[("blk.0.extra.weight", np.ones(4, np.float32))])
    with pytest.raises(ValueError, match=r"'blk\.0\.extra\.weight' is no part of the model"):
        check(path, made)
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    written(path, made)
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight' holds NaN"):
        check(path, made)
    data = path.read_bytes().replace(b"blk.1.ffn_up", b"blk.7.ffn_up")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"has no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        check(path, made)
    path.write_bytes(data.replace(b"qwen2.block_count", b"qwen9.block_count"))
    with pytest.raises(ValueError, match=r"key qwen2\.block_count is missing"):
        open_model(path)
    value = b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0"
    path.write_bytes(data.replace(value + b"qwen2", value + b"mamba"))
    with pytest.raises(ValueError, match="architecture 'mamba' is not supported; expected llama"):
        open_model(path)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def test_sentencepiece_merges_follow_from_scores():
    """Llama 2's kind: the best pair of pieces is merged first; bytes for what has no piece."""
    pieces = {"<unk>": 0, "<s>": 0, "</s>": 0, **{f"<0x{i:02X}>": 0 for i in range(256)}}
    pieces |= {
        "▁": -9,
        "h": -8,
        "e": -7,
        "l": -6,
        "o": -5,
        "el": -1,
        "lo": -2,
        "hel": -4,
        "▁h": -3,
        "hello": -9,
        "▁hel": -5,
    }
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [*pieces], "tokenizer.ggml.scores": [*pieces.values()],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    tokenizer = tokenizer_of(fields, "test")
    names = [[*pieces][i] for i in tokenizer.encode("hello é</s>")]
    assert names == ["<s>", "▁hel", "lo", "▁", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hello é")) == "hello é"
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores"):
        tokenizer_of({**fields, "tokenizer.ggml.scores": [0.0]}, "test")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("pre", "dbrx", "tokenizer.ggml.pre is 'dbrx'"), ("model", "bert", "model is 'bert'"),
     ("merges", None, "no tokenizer.ggml.merges"),
     ("merges", ["a z"], "broken tokenizer.ggml.merges"), ("merges", ["ab"], "broken tokenizer.ggml.merges"),
     ("tokens", None, "no tokenizer.ggml.tokens")],
)  # fmt: skip
def test_broken_tokenizers_are_refused(key, value, said):
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert tokenizer_of(fields, "test").encode("aba") == [2, 0]
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        tokenizer_of({**fields, f"tokenizer.ggml.{key}": value}, "test")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_blocks_are_codes_of_the_same_values(tmp_path, kind, family):
    """What a GPU computes with: of Llama's queries also in Hugging Face's order of rows."""
    written(tmp_path / "m.gguf", tiny.model(family), kind)
    _, source, _ = open_model(tmp_path / "m.gguf")
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        stored = gguf_name(f"model.layers.1.{name}.weight")
        codes = source.codes(stored)
        assert codes.scale.dtype == torch.float16 and codes.scale.shape[1] * 32 == source.stored[stored].shape[1]
        assert dequantize_weight(prepare_weight(*codes), torch.float32).equal(source.load(stored))


@pytest.mark.parametrize(("embedding", "dtype"), [("F32", torch.float32), ("Q8_0", torch.bfloat16)])
def test_a_quantised_folder_has_the_embedding_in_16_bits_where_the_file_has_no_float32(tmp_path, embedding, dtype):
    written(tmp_path / "m.gguf", tiny.model("llama"), embedding=embedding)
    write(tmp_path / "m.gguf", tmp_path / "out", Scheme.of("int8"), "cpu")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for name, t in stored.items() if "embed" in name or "norm" in name} == {dtype}
    config, source, _ = open_model(tmp_path / "out")
    assert config.dtype == str(dtype).removeprefix("torch.")
    _, file, _ = open_model(tmp_path / "m.gguf")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert source.load(name).equal(file.load(gguf_name(name)).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_gpu_computes_with_the_codes(tmp_path, kind):
    written(tmp_path / "m.gguf", tiny.model("llama"), kind)
    logits = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        config, source, _ = open_model(tmp_path / "m.gguf")
        decoder = Decoder(config, source, torch.device(device), dtype)
        pages = Pages.empty(config, 1, 64, dtype, device)
        decoder.prepare(config.max_length)
        for token in range(len(TOKENS)):
            table = torch.zeros((1, 1), dtype=torch.int32, device=device)
            length = torch.tensor([token + 1], dtype=torch.int32, device=device)
            made = decoder(Batch(torch.tensor(TOKENS[token : token + 1], device=device), length, table), pages)
        logits.append(made.float().cpu())
        assert isinstance(decoder.layers[0][1].qkv, Quantized) == (device == "cuda")
    assert (logits[1] - logits[0]).abs().max() <= 0.02 * logits[0].abs().max()
