"""Quantised weights: rounding, folders of every format that is read, and what they cost in perplexity."""

import json
import re
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_gguf import logits_of, written
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.inference.gguf import GgufFile
from weft.inference.model import Decoder
from weft.inference.perplexity import perplexity
from weft.inference.quantize_model import write
from weft.inference.quantized import Codes, Quantise, Quantized, Scheme, quantised
from weft.inference.quantized_folder import AWQ_ORDER, layer_of
from weft.inference.sources import open_model
from weft.inference.weights import Loader
from weft.operators.low_precision.quantized_weight import dequantize_weight, prepare_weight, quantize_weight

TOKENS = [5, 280, 7, 7, 100, 3, 250, 11, 0, 42, 9, 199]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SCHEMES = ("int8", "int8:64", "fp8", "fp8:128", "int4", "int4:32", "int4:64:asymmetric", "int4:32:asymmetric")


def values(codes):
    return dequantize_weight(prepare_weight(*codes), torch.float32)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(name, dtype):
    """No worse than the nearest codes of the largest magnitude's scale; zeros stay zeros; a row alone gives the same."""
    torch.manual_seed(0)
    w = (torch.randn(6, 256) * torch.logspace(-6, 2, 6)[:, None]).to(dtype)
    w[0], w[1, :128] = 0, 0
    scheme = Scheme.of(name)
    assert str(scheme) == name
    codes = quantised(w, scheme)
    error = (values(codes) - w.float()).square().sum(1)
    plain = quantize_weight(w, scheme.format, scheme.group, zero_points=scheme.asymmetric)
    assert (error <= (dequantize_weight(plain, torch.float32) - w.float()).square().sum(1) * 1.0001).all()
    assert (error <= {"int8": 2e-4, "fp8": 2e-3, "int4": 0.03}[scheme.format] * w.float().square().sum(1)).all()
    for whole, alone in zip(codes, quantised(w[3:4], scheme), strict=True):
        assert whole is None or torch.equal(whole[3:4], alone)


def test_symmetric_int4_uses_all_sixteen_codes():
    w = torch.full((1, 32), 7.0)
    w[0, 0] = -8.0
    assert torch.equal(values(quantised(w, Scheme("int4", 32))), w)
    assert torch.equal(values(quantised(-w, Scheme("int4", 32))), -w)


@pytest.mark.parametrize(
    ("text", "said"),
    [("int3", "format 'int3'; expected one of int4, int8, fp8"), ("int4:48", "in groups of 48; expected 32, 64, 128"),
     ("fp8:asymmetric", "fp8 weights are symmetric"), ("int4:64:odd", "expected FORMAT"), ("", "format ''"),
     ("int8:1", "groups of 1; expected 0, 32")],
)  # fmt: skip
def test_schemes_that_are_none(text, said):
    with pytest.raises(ValueError, match=said):
        Scheme.of(text)


def test_columns_that_groups_do_not_divide():
    assert Scheme.of("int4").group_of(192) == 64
    for scheme, columns in (("int4", 48), ("int4:128", 192), ("int8:128", 64)):
        with pytest.raises(ValueError, match=rf"a weight of {columns} columns"):
            quantised(torch.ones(2, columns), Scheme.of(scheme))


# ---- folders -----------------------------------------------------------------------------------------------------------------


def loaded(path, **more):
    config, source, _ = open_model(path)
    return Decoder(config, source, torch.device("cpu"), torch.float32, **more)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_written_folder_computes_what_quantising_at_load_computes(tmp_path, name):
    tiny.folder(tmp_path / "model", "qwen2", **SIZES)
    write(tmp_path / "model", tmp_path / "out", Scheme.of(name))
    at_load = Quantise(Scheme.of(name))
    at_load.head = None  # a folder's logits stay as they are
    with torch.no_grad():
        wanted = logits_of(loaded(tmp_path / "model", quantise=at_load), TOKENS)
        plain = logits_of(loaded(tmp_path / "model"), TOKENS)
    decoder = loaded(tmp_path / "out")
    assert isinstance(decoder.layers[0][1].qkv, Quantized)
    got = logits_of(decoder, TOKENS)
    torch.testing.assert_close(got, wanted)
    assert not torch.allclose(got, plain, atol=1e-4)
    for ours, theirs in zip(decoder.linears(), loaded(tmp_path / "model").linears(), strict=True):
        assert ours.weight.nbytes < theirs.weight.nbytes == ours.bytes  # dequantised on a CPU
    with pytest.raises(FileExistsError, match="is not empty"):
        write(tmp_path / "model", tmp_path / "out", Scheme.of(name))
    with pytest.raises(ValueError, match="is quantised already"):
        write(tmp_path / "out", tmp_path / "again", Scheme.of(name))
    with pytest.raises(ValueError, match="is quantised already"):
        weft.LLM(tmp_path / "out", device="cpu", quantize="int8")


def test_logits_of_a_model_that_is_quantised_at_load_are_of_int8_rows(tmp_path):
    tiny.folder(tmp_path, "llama", **SIZES, tie_word_embeddings=True)
    decoder = loaded(tmp_path, quantise=Quantise(Scheme.of("int4")))
    assert decoder.head.weight.format == "int8" and decoder.embedding.dtype == torch.float32
    torch.testing.assert_close(
        decoder.head.dense, decoder.embedding, atol=float(decoder.embedding.abs().max()) / 127, rtol=0
    )


def foreign(path, settings, layer):
    """A folder whose layers are stored as ``layer(codes)`` says, and the model of Transformers with the codes' values."""
    made = tiny.model("llama", **SIZES)
    made.save_pretrained(path)
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        stored, exact = layer(tensors.pop(name))
        made.state_dict()[name].copy_(exact)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": t.contiguous() for part, t in stored.items()}
    save_file(tensors, path / "model.safetensors")
    return made


def words(nibbles, order=range(8)):
    """uint8 [R, 8 · C] → int32 [R, C]; ``order[i]``: where the nibble of column i lies."""
    shifted = nibbles.long().view(len(nibbles), -1, 8) << torch.tensor([4 * i for i in order])
    return shifted.sum(2).to(torch.uint32).view(torch.int32)


def of_columns(order, along_k, less):
    """AWQ's layout, or GPTQ's: matrices are [K, N]."""

    def layer(w):
        codes = quantised(w, Scheme.of("int4:64:asymmetric"))
        codes = codes._replace(zero=codes.zero.clamp(min=1), scale=codes.scale.half().float())  # GPTQ's are 1 … 16
        u = torch.stack((codes.codes & 15, codes.codes >> 4), 2).flatten(1).t()
        qweight = words(u.t()).t() if along_k else words(u, order)
        stored = {"qweight": qweight, "qzeros": words(codes.zero.t() - less, order), "scales": codes.scale.t().half()}
        if along_k:
            stored["g_idx"] = torch.arange(len(u), dtype=torch.int32) // 64
        return stored, values(codes)

    return layer


def blocks_of_fp8(w):
    scale = torch.rand(-(-len(w) // 128), w.shape[1] // 128) + 0.5
    wide = scale.repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)
    codes = (w / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide


def one_scale(w):
    codes = (w * 64).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": torch.tensor(1 / 64), "input_scale": torch.tensor(1.0)}, codes.float() / 64


FOREIGN = {
    "awq": ({"quant_method": "awq", "bits": 4, "version": "GEMM", "zero_point": True}, of_columns(AWQ_ORDER, False, 0)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}, of_columns(range(8), True, 1)),
    "gptq_v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, of_columns(range(8), True, 0)),
    "fp8-blocks": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, blocks_of_fp8),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, one_scale),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_folders_of_other_quantisers(tmp_path, name):
    made = foreign(tmp_path, *FOREIGN[name])
    with torch.no_grad():
        wanted = made(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(loaded(tmp_path), TOKENS), wanted, atol=1e-4, rtol=1e-4)


def share_of(path, rank, ranks=2):
    return loaded(path, exchange=SimpleNamespace(rank=rank, ranks=ranks))


@pytest.mark.parametrize("name", [*FOREIGN, "int8", "int8:64", "fp8", "int4:128", "int4:64:asymmetric", "gguf"])
def test_ranks_share_the_codes(tmp_path, monkeypatch, name):
    """The rows of queries, keys and values, gate and up; the columns of what sums over them, also within a group of 128."""
    path = tmp_path / "out"
    if name == "gguf":
        path = tmp_path / "m.gguf"
        written(path, tiny.model("llama", **SIZES), "Q4_0")
        monkeypatch.setattr(GgufFile, "computes_with_codes", ("cpu",))
    elif name in FOREIGN:
        foreign(path, *FOREIGN[name])
    else:
        tiny.folder(tmp_path / "model", "llama", **SIZES, attention_bias=True)
        write(tmp_path / "model", path, Scheme.of(name))
    d = SIZES["hidden_size"] // 4
    (_, whole, _, feed), *_ = loaded(path).layers
    for rank in range(2):
        (_, part, _, fed), *_ = share_of(path, rank).layers
        for ours, theirs, rows in (
            (part.qkv, whole.qkv, (4 * d, 2 * d, 2 * d)), (fed.gate_up, feed.gate_up, (SIZES["intermediate_size"],) * 2),
        ):  # fmt: skip
            assert ours.dense.equal(torch.cat([t.chunk(2)[rank] for t in theirs.dense.split(rows)]))
            if theirs.bias is not None:
                assert ours.bias.equal(torch.cat([t.chunk(2)[rank] for t in theirs.bias.split(rows)]))
        for ours, theirs in ((part.out, whole.out), (fed.down, feed.down)):
            assert isinstance(ours, Quantized) and ours.dense.equal(theirs.dense.chunk(2, 1)[rank])
            assert theirs.bias is None or ours.bias.equal(theirs.bias * (rank == 0))


def test_groups_that_ranks_cannot_share(tmp_path):
    tiny.folder(tmp_path / "model", "llama", **{**SIZES, "intermediate_size": 96})
    write(tmp_path / "model", tmp_path / "out", Scheme.of("int4:32"))
    with pytest.raises(
        ValueError, match=r"of 2: .*down_proj has 96 columns in groups of 32, and a share of 48; expected"
    ):
        share_of(tmp_path / "out", 0)


@pytest.mark.parametrize("ranks, said", [(1, "tensor"), (2, "a share of tensor")])
def test_columns_that_groups_do_not_divide_are_named(tmp_path, ranks, said):
    tiny.folder(tmp_path, "llama", **{**SIZES, "intermediate_size": 48 * ranks})
    why = rf"^{said} 'model\.layers\.0\.mlp\.down_proj\.weight': a weight of 48 columns; int4 needs a multiple of 32"
    with pytest.raises(ValueError, match=why):
        loaded(tmp_path, quantise=Quantise(Scheme.of("int4")), exchange=SimpleNamespace(rank=0, ranks=ranks))


@pytest.mark.parametrize("name, changed, is_, asked", [
    ("int4:32", {"group_size": 64}, r"\(128, 4\)", r"\(128, 2\): 'group' of 64 columns"),
    ("int4:32", {"strategy": "channel"}, r"\(128, 4\)", r"\(128, 1\): 'channel'"),
    ("int8", {"strategy": "group", "group_size": 64}, r"\(128, 1\)", r"\(128, 2\): 'group'"),
    ("fp8", {"strategy": "tensor"}, r"\(128, 1\)", r"\(1, 1\): 'tensor'"),
    ("fp8", {"strategy": "block"}, r"\(128, 1\)", r"\(1, 1\): 'block'"),
    ("fp8:64", {"strategy": "channel"}, r"\(128, 2\)", r"\(128, 1\): 'channel'"),
])  # fmt: skip
def test_scales_that_are_not_as_asked_are_refused(tmp_path, name, changed, is_, asked):
    tiny.folder(tmp_path / "model", "llama", **SIZES)
    write(tmp_path / "model", tmp_path / "out", Scheme.of(name))
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changed)
    path.write_text(json.dumps(config))
    why = rf"q_proj\.weight_scale' has shape {is_}, of a weight \(128, 128\); config.json asks for {asked}"
    with pytest.raises(ValueError, match=why):
        loaded(tmp_path / "out")


def test_zero_points_that_are_missing_are_named(tmp_path):
    tiny.folder(tmp_path / "model", "llama", **SIZES)
    write(tmp_path / "model", tmp_path / "out", Scheme.of("int4:32"))
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text().replace('"symmetric": true', '"symmetric": false'))
    with pytest.raises(ValueError, match=r"no tensor '.*q_proj\.weight_zero_point', which asymmetric codes need"):
        loaded(tmp_path / "out")


def test_quantised_experts_are_refused_by_name(tmp_path):
    more = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 32}
    tiny.folder(
        tmp_path, "qwen3_moe", edit=lambda c: c.update(quantization_config={"quant_method": "fp8"}), **SIZES, **more
    )
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"mlp\.experts\.0\.gate_proj is quantised; expected that of attention"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'; expected compressed-tensors"),
     ({"quant_method": "awq", "bits": 8}, "awq with bits = 8; expected 4"),
     ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
     ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act = True; expected False"),
     ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
     ({"quant_method": "compressed-tensors"}, "without config_groups"),
     ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {
         "a": {"weights": {"type": "float", "num_bits": 4}}}}, "num_bits"),
     ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {
         "a": {"weights": {"type": "int", "num_bits": 4, "strategy": "group"}}}}, "format = 'marlin-24'"),
     ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
         "a": {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": -1}}}}, "group_size = -1; exp"),
     ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
         "a": {"weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [64, 64]}}}},
      r"block_structure = \[64, 64\]; expected None or \[128, 128\]")],
)  # fmt: skip
def test_other_formats_are_refused_by_name(tmp_path, settings, said):
    tiny.folder(tmp_path, "llama", edit=lambda config: config.update(quantization_config=settings))
    with pytest.raises(ValueError, match=said):
        open_model(tmp_path)


def test_broken_codes_are_refused(tmp_path):
    foreign(tmp_path, *FOREIGN["gptq"])
    tensors, at = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj"
    index = tensors[f"{at}.g_idx"]
    for name, changed, said in (
        (f"{at}.g_idx", index.flip(0), "act-order"), (f"{at}.scales", None, rf"no tensor '{at}\.scales'"),
        (f"{at}.scales", tensors[f"{at}.scales"] * torch.inf, "NaN or an infinity"),
        (f"{at}.qzeros", tensors[f"{at}.qzeros"][:1], "zero points"),
        (f"{at}.qweight", tensors[f"{at}.qweight"][:8], "expected"), ("more", index.float(), "'more' is no part"),
        (f"{at}.qweight", None, r"no tensor 'model\.layers\.0\.mlp\.down_proj\.weight'"),
    ):  # fmt: skip
        edited = {**tensors, name: changed}
        save_file({n: t.contiguous() for n, t in edited.items() if t is not None}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=said):
            loaded(tmp_path)


def test_tensors_of_other_shapes_are_refused_by_name(tmp_path):
    tiny.folder(tmp_path / "model", "llama", **SIZES)
    write(tmp_path / "model", tmp_path / "out", Scheme.of("int4:32:asymmetric"))
    path, at = tmp_path / "out" / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(path)
    scale, packed = tensors[f"{at}.weight_scale"], tensors[f"{at}.weight_packed"]
    shape, zero = tensors[f"{at}.weight_shape"], tensors[f"{at}.weight_zero_point"]
    for part, changed in (
        ("scale", scale[:, 0]), ("scale", scale[:, :1]), ("scale", scale.int()), ("scale", scale.double()),
        ("scale", scale[1:]), ("packed", packed[0]), ("packed", packed[:, 1:]), ("packed", packed.float()),
        ("shape", shape[:1]), ("shape", shape.float()), ("shape", shape - 1), ("shape", shape * 0),
        ("zero_point", zero[0]), ("zero_point", zero[:, 1:]),
    ):  # fmt: skip
        save_file({**tensors, f"{at}.weight_{part}": changed.contiguous()}, path)
        with pytest.raises(ValueError, match=rf"out: '{at}\.weight_(scale|packed|shape|zero_point)' (is|has)"):
            loaded(tmp_path / "out")
    for name, part in (("gptq", "qweight"), ("awq", "scales"), ("fp8-blocks", "weight_scale_inv")):
        foreign(tmp_path / name, *FOREIGN[name])
        tensors = load_file(tmp_path / name / "model.safetensors")
        tensors[f"{at}.{part}"] = tensors[f"{at}.{part}"].flatten().double()
        save_file(tensors, tmp_path / name / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{name}: '{at}\.{part}' is torch.float64"):
            loaded(tmp_path / name)


@pytest.mark.parametrize("changed, has", [
    ({"zero": None}, r"uint8 codes, scales \[N, 2\] and no zero points"),
    ({"scale": torch.ones(4)}, r"uint8 codes, scales \[N\] and zero points"),
    ({"scale": torch.ones(4, 1), "zero": torch.zeros(4, 1, dtype=torch.uint8)}, r"uint8 codes, scales \[N, 1\] and zero"),
    ({"codes": torch.zeros(4, 64, dtype=torch.int8), "zero": None}, r"int8 codes, scales \[N, 2\] and no zero points"),
])  # fmt: skip
def test_matrices_of_one_layer_have_codes_of_one_kind(changed, has):
    codes = Codes(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.uint8))
    load = Loader(None, torch.device("cpu"), torch.float32)
    given = [codes, codes._replace(**changed)]
    for names, stored in ((("a", "b"), given), (("b", "a"), given[::-1])):
        with pytest.raises(ValueError, match=f"out: {names[1]} has .*{names[0]}, which is computed with it") as error:
            layer_of(load, "out", stored, names, [4, 4], 64, False, None)
        assert re.search(has, str(error.value)), error.value


def in_shards(path, count=3):
    """Spreads a folder's tensors over files, so that a layer's are in several."""
    tensors, where = load_file(path / "model.safetensors"), {}
    (path / "model.safetensors").unlink()
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        save_file(part, path / file)
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


@pytest.mark.parametrize("name", FOREIGN)
def test_shards_of_other_quantisers(tmp_path, name):
    foreign(tmp_path, *FOREIGN[name])
    whole = logits_of(loaded(tmp_path), TOKENS)
    in_shards(tmp_path)
    assert torch.equal(logits_of(loaded(tmp_path), TOKENS), whole)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4:32:asymmetric"])
def test_a_folder_is_written_in_shards(tmp_path, monkeypatch, name):
    tiny.folder(tmp_path / "model", "llama", **SIZES)
    write(tmp_path / "model", tmp_path / "whole", Scheme.of(name))
    monkeypatch.setattr("weft.inference.quantized_folder.SHARD", 100_000)
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    write(tmp_path / "model", tmp_path / "out", Scheme.of(name))
    assert open_model(tmp_path / "out")[2].tool_template == "tools"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 2 and not [*(tmp_path / "out").glob("part*")]
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}) == 1
    assert torch.equal(*(logits_of(loaded(tmp_path / at), TOKENS) for at in ("whole", "out")))


def test_wrong_shards_are_refused(tmp_path):
    foreign(tmp_path, *FOREIGN["awq"])
    where = in_shards(tmp_path)
    whole = logits_of(loaded(tmp_path), TOKENS)
    index, at = tmp_path / "model.safetensors.index.json", "model.layers.1.mlp.up_proj.qzeros"
    index.write_text(
        json.dumps({"weight_map": {name: where[max(where)] if name == at else f for name, f in where.items()}})
    )
    assert torch.equal(logits_of(loaded(tmp_path), TOKENS), whole)  # an index that is wrong about a file of the folder
    shard = tmp_path / where[at]
    index.write_text(json.dumps({"weight_map": {name: f for name, f in where.items() if f != shard.name}}))
    with pytest.raises(ValueError, match="no tensor"):
        loaded(tmp_path)
    index.write_text(json.dumps({"weight_map": where}))
    tensors = load_file(shard)
    save_file({name: t for name, t in tensors.items() if name != at}, shard)
    with pytest.raises(ValueError, match=rf"no tensor '{at}', which awq needs"):
        loaded(tmp_path)
    other = next(name for name, f in where.items() if f != shard.name)
    save_file({**tensors, other: torch.zeros(1)}, shard)
    with pytest.raises(ValueError, match=f"another shard have a tensor '{other}'; expected it once"):
        loaded(tmp_path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks the shard {shard.name}"):
        loaded(tmp_path)


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path, monkeypatch):
    tiny.folder(tmp_path / "model", "llama", **SIZES)
    monkeypatch.setattr("weft.inference.quantized_folder.SHARD", 100_000)
    calls = []

    def full(tensors, path, metadata):
        calls.append(path)
        if len(calls) > 2:
            path.write_bytes(b"part of it")
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"writing .*out failed: .*No space left"):
        patch.setattr("safetensors.torch.save_file", full)
        write(tmp_path / "model", tmp_path / "a" / "out", Scheme.of("int8"))
    assert len(calls) == 3 and not (tmp_path / "a").exists()
    write(tmp_path / "model", tmp_path / "a" / "out", Scheme.of("int8"))


# ---- perplexity --------------------------------------------------------------------------------------------------------------


def test_perplexity_is_that_of_transformers(tmp_path):
    made = tiny.folder(tmp_path, "qwen3", head_dim=32)
    text = torch.arange(230) * 7 % 300
    with torch.no_grad():
        logits = made(text[:200].view(2, 100)).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:200].view(2, 100)[:, 1:].flatten())
    found = perplexity(loaded(tmp_path), text.tolist(), window=100)
    assert found.tokens == 198
    assert found.nats == pytest.approx(float(wanted), rel=1e-5)
    rough = perplexity(loaded(tmp_path), text.tolist(), window=100, cache_dtype=torch.float8_e4m3fn)
    assert found.nats != rough.nats == pytest.approx(found.nats, rel=0.05)
    with pytest.raises(ValueError, match="the text has 1 tokens"):
        perplexity(loaded(tmp_path), [5])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--tokens", "0"], "no folder is given"),
        (["out", "--text", "none"], "No such file"),
        (["out", *["--quantize", "fp8"] * 2], "2 fo"),
    ],
)
def test_the_command_refuses_before_it_works(tmp_path, monkeypatch, given, why):
    monkeypatch.chdir(tmp_path)
    tiny.folder(tmp_path / "model", "llama", **SIZES)
    done = CliRunner().invoke(app, ["quantize", "model", *given])
    assert why in str(done.exception) and not (tmp_path / "out").exists()


def test_the_command_writes_a_folder_with_perplexity_before_and_after(tmp_path):
    tiny.folder(tmp_path / "model", "llama", **SIZES)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 8)
    model, out, text = (str(tmp_path / name) for name in ("model", "out", "text"))
    call = ["quantize", model, out, "--quantize", "int4:32", "--text", text]
    done = CliRunner().invoke(app, [*call, "--window", "64", "--cache-dtype", "fp8", "--json", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(q["weights"], q["cache"]) for q in found["quality"]] == [
        (weights, cache) for weights in ("as stored", "int4:32") for cache in ("float32", "float8_e4m3fn")
    ]
    bits = [q["bits"] for q in found["quality"]]
    assert bits[:2] == [32, 32]
    assert 5 <= bits[2] == bits[3] < 16  # so short rows are filled up to 512 columns
    assert len({q["perplexity"] for q in found["quality"]}) == 4
    assert weft.LLM(tmp_path / "out", device="cpu").generate("the quick")[0].prompt_tokens == 9
