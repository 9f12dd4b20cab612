"""Folders, prompts and files that are wrong say so, by name; nothing in a folder is executed."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import weft
from weft.inference.config import config_of, read_config
from weft.inference.tokenizer import Tokenizer

BASE = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("change, why", [
    ({"model_type": "gpt2"}, "'gpt2'.*not supported; expected one of llama"),
    ({"model_type": None}, "not supported"),
    ({"logit_scale": 2.0}, "unknown key 'logit_scale'"),
    ({"vocab_size": None}, "'vocab_size' is missing"),
    ({"hidden_size": "64"}, "hidden_size is '64'"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"num_attention_heads": 5}, "hidden_size 64 over 5 heads"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"rms_norm_eps": -1}, "rms_norm_eps"),
    ({"eos_token_id": "end"}, "eos_token_id"),
    ({"torch_dtype": "int8"}, "dtype is 'int8'"),
    ({"rope_scaling": {"type": "su"}}, "rope_type is 'su'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor of rotary scaling 'linear'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "sauce": 1}}, "unknown key 'sauce'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for each kind of layer"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"rms_norm_eps": [1]}, r"rms_norm_eps is \[1\]"),
    ({"rope_theta": float("nan")}, "rope_theta is nan"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type is"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "32"}}, "beta_fast is '32'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta is 1.0"),
    ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "low_freq_factor is 4"),
    ({"original_max_position_embeddings": "64"}, "original_max_position_embeddings is '64'"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
    ({"quantization_config": "awq"}, "quantization_config is 'awq'"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list"),
])  # fmt: skip
def test_configurations(change, why):
    assert config_of(BASE).layers == 2
    with pytest.raises(ValueError, match=why):
        config_of({**BASE, **change})


def test_keys_that_say_nothing_are_ignored():
    assert config_of({**BASE, "some_new_switch": False, "another": None, "use_cache": True}) == config_of(BASE)


def broken(path, how):
    tiny.folder(path)
    weights = path / "model.safetensors"
    if how == "no config":
        (path / "config.json").unlink()
    elif how == "config":
        (path / "config.json").write_text("{")
    elif how == "no weights":
        weights.unlink()
    elif how == "pickled":
        weights.unlink()
        torch.save({}, path / "pytorch_model.bin")
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no tokenizer":
        (path / "tokenizer.json").unlink()
    elif how == "tokenizer":
        (path / "tokenizer.json").write_text("{}")
    elif how in ("missing shard", "shard elsewhere", "index"):
        shard = {"missing shard": "model-00002-of-00002.safetensors", "shard elsewhere": "../other.safetensors"}.get(
            how
        )
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard} if shard else 3}))
    else:
        tensors = load_file(weights)
        name = "model.layers.1.mlp.up_proj.weight"
        if how == "missing tensor":
            del tensors[name]
        elif how == "shape":
            tensors[name] = tensors[name][:-1].contiguous()
        elif how == "not finite":
            tensors[name][3, 4] = torch.nan
        elif how == "integers":
            tensors[name] = tensors[name].int()
        elif how == "another tensor":
            tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        elif how == "no head":
            del tensors["lm_head.weight"]
        save_file(tensors, weights)


@pytest.mark.parametrize("how, error, why", [
    ("no config", FileNotFoundError, "no config.json"), ("config", ValueError, "no JSON"),
    ("no weights", FileNotFoundError, "no model.safetensors"), ("pickled", FileNotFoundError, "pytorch_model.bin is pickled"),
    ("truncated", ValueError, "no whole safetensors file"), ("no tokenizer", FileNotFoundError, "no tokenizer.json"),
    ("tokenizer", ValueError, "no tokenizer"), ("missing shard", FileNotFoundError, "lacks the shard model-00002"),
    ("shard elsewhere", ValueError, "expected a file in this folder"), ("index", ValueError, "weight_map"),
    ("missing tensor", ValueError, r"no tensor 'model.layers.1.mlp.up_proj.weight'; expected one of shape \(96, 64\)"),
    ("shape", ValueError, r"up_proj.weight' has shape \(95, 64\); expected \(96, 64\)"),
    ("not finite", ValueError, "up_proj.weight' holds NaN"), ("integers", ValueError, "is torch.int32"),
    ("another tensor", ValueError, "q_proj.bias' is no part of the model"),
    ("no head", ValueError, "no tensor 'lm_head.weight'"),
])  # fmt: skip
def test_folders(tmp_path, how, error, why):
    broken(tmp_path, how)
    with pytest.raises(error, match=why):
        weft.LLM(tmp_path, device="cpu")


@pytest.mark.parametrize("name, content, why", [
    ("config.json", b"[" * 100_000, "is no JSON"), ("tokenizer_config.json", b"\xff", "tokenizer_config.json is no JSON"),
    ("tokenizer_config.json", b"null", "expected an object"), ("chat_template.jinja", b"\xff", "no text in UTF-8"),
    ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is 3"),
])  # fmt: skip
def test_damaged_texts(tmp_path, name, content, why):
    tiny.folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=why):
        weft.LLM(tmp_path, device="cpu")


def test_torchs_default_device_and_dtype_change_nothing(tmp_path):
    tiny.folder(tmp_path)
    parameters = [weft.SamplingParameters(max_tokens=4, seed=1, repetition_penalty=r, logprobs=1) for r in (1.0, 1.5)]

    def tokens():
        return [c.token_ids for c in weft.LLM(tmp_path, device="cpu").generate(["ab", "cd"], parameters)]

    expected = tokens()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        assert tokens() == expected
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_prompts_and_arguments(tmp_path):
    tiny.folder(tmp_path)
    llm = weft.LLM(tmp_path, device="cpu", max_length=64)
    with pytest.raises(ValueError, match="64 tokens; expected at most 63"):
        llm.generate(["ok", "x" * 64])
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        llm.generate("ab\ud800c")
    with pytest.raises(ValueError, match="at least one"):
        llm.generate("")
    with pytest.raises(ValueError, match="2 entries; expected one for each of 1"):
        llm.generate(["a"], [weft.SamplingParameters()] * 2)
    assert not llm.engine.busy() or llm.engine.step() is not None
    assert llm.generate([]) == []
    assert llm.generate("still alive", weft.SamplingParameters(max_tokens=2))[0].finish_reason == "length"
    for argument, value in (
        ("max_length", 999),
        ("cache_tokens", 5),
        ("dtype", "int3"),
        ("device", "tpu"),
        ("device", "meta"),
        ("draft", tmp_path / "none"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=argument if argument != "draft" else "none"):
            weft.LLM(tmp_path, **{"device": "cpu", argument: value})


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("template", [
    "{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{% if %}", "{{ messages[0].content + 3 }}",
    "{% include '/etc/passwd' %}", "{{ range(10 ** 9) | list }}",
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
])  # fmt: skip
def test_templates_cannot_reach_python(template):
    with pytest.raises(ValueError, match="template"):
        Tokenizer(tiny.tokenizer(), {}, template).chat_text(MESSAGES)


def test_templates_have_what_models_use():
    template = (
        "{{ bos_token }}{%- for m in messages -%}{%- if loop.index0 > 4 -%}{%- break -%}{%- endif -%}[{{ m['role'] }}]"
        "{{ m['content'] | trim }}{% endfor %}{{ tools | tojson }}{{ strftime_now('%Y') | length }}"
    )
    t = Tokenizer(tiny.tokenizer(), {"bos_token": "<s>"}, template)
    assert t.chat_text([{"role": "user", "content": " é "}], tools=[{"a": "ü"}]) == '<s>[user]é[{"a": "ü"}]4'
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tiny.tokenizer()).chat(MESSAGES)


def test_chat(tmp_path):
    tiny.folder(tmp_path)
    llm = weft.LLM(tmp_path, device="cpu")
    p = weft.SamplingParameters(max_tokens=4, temperature=0)
    assert llm.chat(MESSAGES, p) == llm.generate("<user>hi\n<assistant>", p)[0]
    assert read_config(tmp_path).eos == ()


def test_a_schema_file_that_is_no_object(tmp_path):
    from typer.testing import CliRunner

    from weft.cli import app

    tiny.folder(tmp_path)
    (tmp_path / "schema.json").write_text("[]")
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "hi", "--schema", str(tmp_path / "schema.json")])
    assert "schema.json holds list; expected an object" in str(done.exception)
