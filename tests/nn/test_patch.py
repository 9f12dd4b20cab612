"""Models of Hugging Face patched against their own copies: small random ones, made from configurations."""

import copy
import functools
import os

import pytest
import torch
from where import DEVICE, printed

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", minversion="5.0")

import weft  # noqa: E402
from weft.definition import UnknownName  # noqa: E402
from weft.nn.patching import BY  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]  # transformers' own
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)

SMALL = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "Llama": {"mlp_bias": True}, "Qwen2": {}, "Qwen3": {}, "Mistral": {"sliding_window": 4}, "Gemma": {},
    "Gemma2": {"sliding_window": 4, "final_logit_softcapping": 3.0}, "Gemma3Text": {"sliding_window": 4},
    "Phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}  # fmt: skip


def model(name, **options):
    torch.manual_seed(0)
    options = {"attn_implementation": "eager", **options}  # transformers 5.17's SDPA knows no soft cap
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **FAMILIES.get(name, {}), **options})
    made = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).to(DEVICE)
    for parameter_name, p in made.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return made


def tokens(batch=2, length=7):
    return torch.randint(3, 67, (batch, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def trained(m, **call):
    """The loss of a step and every gradient."""
    m.train().zero_grad()
    ids = tokens()
    out = m(input_ids=ids, labels=call.pop("labels", ids), use_cache=False, **call)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


def alike(ours, theirs, **call):
    (found, gradients), (wanted, expected) = trained(ours, **call), trained(theirs, **call)
    close(found.loss, wanted.loss)
    assert gradients.keys() == expected.keys() and len(expected) > 3
    for name, gradient in expected.items():
        close(gradients[name], gradient, atol=1e-4 * float(gradient.abs().max() + 1))
    return found, wanted


def patched(name, **options):
    theirs = model(name, **options)
    ours = copy.deepcopy(theirs)
    return ours, theirs, weft.patch(ours)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_gradients_logits_and_text_are_those_of_the_model(name):
    ours, theirs, done = patched(name)
    assert {line.part for line in done.replaced} == set(BY) and not done.left
    labels = tokens().clone()
    labels[0, :4] = labels[1, -1] = -100
    found, wanted = alike(ours, theirs, labels=labels)
    assert found.logits is None and wanted.logits is not None
    ours.eval(), theirs.eval()
    text = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found, wanted = ours.generate(tokens(), **text), theirs.generate(tokens(), **text)
    assert found.sequences.equal(wanted.sequences)
    close(found.logits, wanted.logits)


@pytest.mark.parametrize("call", [
    {"num_items_in_batch": 7, "ignore_index": 5, "labels": tokens() % 7, "output_hidden_states": True},
    {"num_items_in_batch": torch.tensor(9), "shift_labels": tokens().roll(-1, 1)},
    {"skip_logits": False}, {"logits_to_keep": 5, "labels": tokens()[:, -5:]},
], ids=range(4))  # fmt: skip
def test_the_loss_takes_what_transformers_takes(call):
    ours, theirs, _ = patched("Llama")
    told = dict(call)
    asked = told.pop("skip_logits", None)
    if asked is not None:
        ours.forward = functools.partial(ours.forward, skip_logits=asked)
    found, _ = alike(ours, theirs, **told)
    assert (found.logits is None) == (asked is None and "logits_to_keep" not in call)
    assert (found.hidden_states is None) == ("output_hidden_states" not in call)
    assert isinstance(ours(tokens(), labels=tokens(), return_dict=False), tuple)


def state(m):
    """Every attribute of every module."""
    config = {key: value for key, value in vars(m.config).items()}
    return {name: dict(vars(module)) for name, module in m.named_modules()}, config


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_unpatch_leaves_every_attribute_and_bit_as_before(name):
    m = model(name).eval()
    before, config = state(m)
    logits = m(tokens()).logits
    done = weft.patch(m)
    weft.patch(m)  # again: anew, not on top
    assert "forward" in vars(m.lm_head) and not state(m)[0].keys() ^ before.keys()
    done.undo()
    after, config_after = state(m)
    assert config_after == config and m(tokens()).logits.equal(logits)
    for path, attributes in before.items():
        assert attributes.keys() == after[path].keys()
        assert all(after[path][key] is value or after[path][key] == value for key, value in attributes.items())
    weft.unpatch(m)  # of a model that is not patched: nothing


def test_a_copy_is_patched_and_undone_by_itself():
    ours, theirs, _ = patched("Llama")
    other = copy.deepcopy(ours)
    weft.unpatch(ours)
    assert "forward" not in vars(ours) and other.lm_head.forward.__self__ is other.lm_head
    alike(other, theirs)


def test_only_what_is_known_and_wanted_is_replaced():
    other = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL))
    done = weft.patch(other)
    assert not done.replaced and not any("forward" in vars(m) for m in other.modules())
    assert {line.part for line in done.left} == {"rotary", "rms_norm", "mlp", "residual", "loss"}
    assert "left alone" in str(done) and "5 Olmo2RMSNorm" in str(done) and "llama, qwen2" in str(done)
    assert "nothing" in str(weft.patch(torch.nn.Linear(2, 2)))

    m = model("Llama", hidden_act="gelu_new")
    before = m.config._attn_implementation
    done = weft.patch(m, skip=("attention", "rotary"))
    assert {line.part for line in done.replaced} == {
        "rms_norm",
        "residual",
        "loss",
    } and m.config._attn_implementation == before
    assert {(line.part, line.note) for line in done.left} == {
        ("attention", "skipped"), ("rotary", "skipped"), ("mlp", "no gated kernel for the activation 'gelu_new'")
    }  # fmt: skip
    with pytest.raises(UnknownName, match="rotation"):
        weft.patch(m, skip=("rotation",))
    with pytest.raises(TypeError, match=r"argument 'model' is str; expected a torch\.nn\.Module"):
        weft.patch("llama")


def test_a_forward_of_another_library_is_respected():
    m = model("Llama")
    mlp = m.model.layers[0].mlp
    mlp.forward = theirs = mlp.forward
    done = weft.patch(m)
    assert mlp.forward is theirs and any("another library" in line.note for line in done.left)
    m.forward = functools.partial(m.forward)  # as accelerate does
    with pytest.raises(RuntimeError, match=r"forward of 'LlamaForCausalLM' was replaced after weft\.patch"):
        weft.unpatch(m)
    assert "forward" in vars(m.model.norm)
    m.forward = m.forward.func
    weft.unpatch(m)
    assert [n for n, module in m.named_modules() if "forward" in vars(module)] == ["model.layers.0.mlp"]


def test_a_patched_model_is_saved_as_the_model_is(tmp_path):
    ours, theirs, _ = patched("Qwen3")
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").to(DEVICE)
    weft.patch(again)
    alike(again, theirs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    ours, theirs, _ = patched("Llama")
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert alike(ours, theirs)[0].logits is None


@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text"])
def test_padding_and_packed_sequences_are_seen_and_plain_positions_make_no_mask(name, monkeypatch):
    ours, theirs, _ = patched(name, num_hidden_layers=2)
    masks = []
    attention = transformers.AttentionInterface()["weft"]
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, "weft",
        lambda *args, **named: masks.append(args[4]) or attention(*args, **named),
    )  # fmt: skip
    padding = (torch.arange(7) < torch.tensor([[5], [7]])).long().to(DEVICE)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4]]).to(DEVICE)
    for call in ({}, {"attention_mask": padding}, {"position_ids": packed}):
        masks.clear()
        losses = [m.train()(input_ids=tokens(), labels=tokens(), use_cache=False, **call).loss for m in (ours, theirs)]
        close(*losses)
        assert len(masks) == 2 and [m.numel() == 0 for m in masks] == [not call] * 2


@pytest.mark.parametrize("modules", [["q_proj", "down_proj"], ["q_proj", "lm_head"]], ids=str)
def test_adapters(modules):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    ours, theirs, _ = patched("Llama")
    ours, theirs = (torch.manual_seed(2) and peft.get_peft_model(m, config) for m in (ours, theirs))
    found, _ = alike(ours, theirs)
    assert (found.logits is None) == ("lm_head" not in modules)  # an adapted head makes its own logits
    weft.unpatch(ours)
    assert not any("forward" in vars(m) for m in ours.modules())


COMPILED = """
import os, sys, where
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, "tests/nn")
from test_patch import patched, tokens, trained, close, torch
ours, theirs, _ = patched("Llama")
found, gradients = trained(torch.compile(ours, backend="aot_eager", fullgraph=True))
wanted, expected = trained(theirs)
close(found.loss, wanted.loss)
assert found.logits is None
for name, gradient in expected.items():
    close(gradients["_orig_mod." + name], gradient)
counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
torch._dynamo.reset()
compiled = torch.compile(ours, backend=counter)
for length in (7, 9, 12, 16):  # once for the first length, once for any
    ids = tokens(length=length)
    close(compiled(input_ids=ids, labels=ids, use_cache=False).loss, theirs(input_ids=ids, labels=ids, use_cache=False).loss)
assert counter.frame_count == 2, counter.frame_count
"""


@pytest.mark.long  # without the interpreter: a process of its own
def test_under_a_compiler():
    printed("-W", "ignore", "-c", COMPILED)


SHARDED = """
import copy, sys, torch
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, "tests/nn")
from test_patch import close, model, tokens, weft
def main(rank, at):
    torch.distributed.init_process_group("gloo", init_method="file://" + at, rank=rank, world_size=2)
    theirs = model("Llama", tie_word_embeddings=rank > 1).cpu()
    ours = copy.deepcopy(theirs)
    weft.patch(ours)
    for part in (*ours.model.layers, ours.lm_head, ours):
        fully_shard(part)
    for m in (ours, theirs):
        loss = m(input_ids=tokens().cpu(), labels=tokens().cpu()).loss
        loss.backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad)
    if rank == 0:
        weft.unpatch(ours)
        print("sharded", loss.item())
if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), 2)
"""


@pytest.mark.long
def test_sharded_by_two_ranks(tmp_path):
    program = tmp_path / "sharded.py"
    program.write_text(SHARDED)
    assert "sharded" in printed(str(program), str(tmp_path / "meet"), CUDA_VISIBLE_DEVICES="")
