"""Logits and greedy tokens are Transformers', for every family and spelling of its configuration."""

import copy
import json

import numpy as np
import pytest
import tiny
import torch
from transformers import LlamaConfig

import weft
from weft.inference.checkpoint import Folder
from weft.inference.config import config_of, read_config
from weft.inference.model import Decoder, Pages
from weft.inference.runner import Runner
from weft.inference.scheduler import Sequence, Work

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def rope(**scaling):
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


MODELS = {  # name: family, changes of the configuration
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {**rope(**LLAMA3), "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-yarn": ("llama", rope(**YARN)),
    "llama-yarn-mscale": ("llama", rope(**YARN, mscale=1.0, mscale_all_dim=0.5, beta_fast=16.0, truncate=False)),
    "llama-linear": ("llama", rope(rope_type="linear", factor=2.0)),
    "llama-dynamic": ("llama", {**rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 64}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen2-moe": ("qwen2_moe", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48}),
    "qwen3-moe": ("qwen3_moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16, "norm_topk_prob": True,
        "mlp_only_layers": [1]}),
}  # fmt: skip


def runner_of(path, dtype=torch.float32, tokens=256):
    config = read_config(path)
    decoder = Decoder(config, Folder(path), torch.device("cpu"), dtype)
    return Runner(decoder, Pages.empty(config, tokens // 16, 16, dtype, "cpu"), 2, tokens, 16)


def logits_of(runner, tokens, chunks=()):
    """Logits [V] behind each chunk's end and behind the last token."""
    s = Sequence(
        "a",
        len(tokens),
        tokens,
        weft.SamplingParameters(),
        999,
        0,
        blocks=list(range(-(-len(tokens) // 16)))[::-1],
        slot=1,
    )
    ends = [*chunks, len(tokens)]
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        work = Work(s, start, end, True)
        found.append(runner.decode([work])[0] if work.decodes and start else runner.mixed([], [work]))
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    family, changes = MODELS[name]
    theirs = tiny.folder(tmp_path, family, **changes)
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 300, 100 if "dynamic" not in name else 60).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    chunks = [17, 48, len(prompt) - 1]  # prefill, prefill behind a cached part, twice, and decoding
    found = logits_of(runner_of(tmp_path), prompt, chunks)
    at = [n - 1 for n in [*chunks, len(prompt)]]
    torch.testing.assert_close(found, expected[at], rtol=1e-4, atol=1e-4)
    prompts = [prompt, prompt[7:23]]
    got = weft.LLM(tmp_path, device="cpu").generate(prompts, weft.SamplingParameters(max_tokens=8, temperature=0))
    assert [list(c.token_ids) for c in got] == [tiny.greedy(theirs, p, 8) for p in prompts]


def test_dynamic_scaling_beyond_the_original_length(tmp_path):
    theirs = tiny.folder(tmp_path, **MODELS["llama-dynamic"][1])
    prompt = np.random.default_rng(1).integers(0, 300, 100).tolist()
    llm = weft.LLM(tmp_path, device="cpu")
    for p in (prompt, prompt[:70], prompt[:50]):  # a prefix that another length has cached would have other angles
        got = llm.generate([p], weft.SamplingParameters(max_tokens=24, temperature=0))[0]
        assert list(got.token_ids) == tiny.greedy(copy.deepcopy(theirs), p, 24)  # theirs remembers the longest sequence


def test_bf16_is_as_near_to_fp32_as_transformers_bf16(tmp_path):
    theirs = tiny.folder(tmp_path)
    prompt = np.random.default_rng(0).integers(0, 300, 64).tolist()
    with torch.no_grad():
        exact = theirs(torch.tensor([prompt])).logits[0, -1]
        error = (theirs.bfloat16()(torch.tensor([prompt])).logits[0, -1].float() - exact).norm()
    found = logits_of(runner_of(tmp_path, torch.bfloat16), prompt)[-1].float()
    assert (found - exact).norm() < 1.5 * error


SPELLINGS = {  # how Transformers 4 and others write what Transformers 5 does
    "rope_scaling": lambda c: c.update(rope_scaling={**LLAMA3}, rope_theta=20000.0, rope_parameters=None),
    "type": lambda c: c.update(
        rope_scaling={"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}, rope_theta=20000.0,
        rope_parameters=None,
    ),
    "torch_dtype": lambda c: c.update(torch_dtype="bfloat16", dtype=None),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_older_spellings_mean_the_same(name):
    changes = {"rope_parameters": {"rope_theta": 20000.0, **LLAMA3}, "dtype": "bfloat16", "eos_token_id": [3, 4]}
    raw = LlamaConfig(**{**tiny.SIZES, **changes}).to_dict()
    expected = config_of(raw)
    assert expected.rotary.kind == "llama3" and expected.rotary.theta == 20000
    assert (expected.dtype, expected.eos) == ("bfloat16", (3, 4))
    SPELLINGS[name](raw)
    assert config_of(raw) == expected


def test_end_tokens_of_both_files(tmp_path):
    tiny.folder(tmp_path, eos_token_id=3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    assert read_config(tmp_path).eos == (3, 5)


def test_redundant_head_and_names_without_prefix(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = tiny.folder(tmp_path, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    flat = {name.removeprefix("model."): t for name, t in weights.items()}
    save_file({**flat, "lm_head.weight": flat["embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    got = weft.LLM(tmp_path, device="cpu").generate([[1, 2, 3]], weft.SamplingParameters(max_tokens=8, temperature=0))[
        0
    ]
    assert list(got.token_ids) == tiny.greedy(theirs, [1, 2, 3], 8)
