"""Hugging Face's models with weft's attention against their own: small random ones, made from configurations."""

import functools
import os
import runpy
import sys

import pytest
import torch
from where import DEVICE, ROOT

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import masking_utils  # noqa: E402

from weft.nn import GroupedQueryAttention, huggingface  # noqa: E402
from weft.nn.visible import Visible  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]  # transformers' own
close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=2e-4)
huggingface.register()

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
CUT = {"sliding_window": 4}
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": CUT,
    "Gemma2": {**CUT, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    "GptOss": {
        **CUT, "num_local_experts": 2, "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "GPT2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 128, "vocab_size": 64, "initializer_range": 0.3},
}  # fmt: skip
HEADS = {"GPT2": "GPT2LMHeadModel"}


@functools.cache
def model(name):
    torch.manual_seed(0)
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None} if name == "GPT2" else SMALL
    config = getattr(transformers, f"{name}Config")(**{**known, **MODELS[name]})
    made = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config).to(DEVICE).eval()
    for parameter_name, p in made.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(p)
    return made


def tokens(batch=2, length=11):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def padded(side):
    """Token ids of which the first row has 4 that are none, and the mask that says so."""
    seen = torch.ones_like(tokens())
    seen[0, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    return tokens() * seen, seen


def by(name, call):
    """What a call gives with transformers' eager attention and with ours."""
    found = []
    for implementation in ("eager", "weft"):
        model(name).set_attn_implementation(implementation)
        found.append(call(model(name)))
    return found


@pytest.fixture
def masks(monkeypatch):
    """The masks that attention gets."""
    got = []
    ours = huggingface.attention

    def noted(module, q, k, v, attention_mask, **more):
        got.append(attention_mask)
        return ours(module, q, k, v, attention_mask, **more)

    transformers.AttentionInterface.register("weft", noted)
    yield got
    transformers.AttentionInterface.register("weft", ours)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager_attention_and_no_mask_is_stored(name, masks):
    def train(m):
        m.zero_grad()
        out = m(tokens(), labels=tokens(), use_cache=False)
        out.loss.backward()
        return out.logits.detach(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}

    (wanted, gradients), (found, ours) = by(name, train)
    close(found, wanted)
    assert ours.keys() == gradients.keys() and len(ours) > 10
    for parameter, gradient in gradients.items():
        close(ours[parameter], gradient, atol=2e-4 * float(gradient.abs().max() + 1))
    assert masks and all(isinstance(m, Visible) and m.causal and m.padding is None for m in masks)
    assert any(m.window is not None for m in masks) == ("sliding_window" in MODELS[name])


@pytest.mark.parametrize(
    ("name", "side"), [("Llama", "right"), *((name, "left") for name in ("Llama", "Gemma2", "GptOss", "GPT2"))]
)
def test_padding_is_hidden(name, side, masks):
    ids, seen = padded(side)
    wanted, found = by(name, lambda m: m(ids, attention_mask=seen, use_cache=False).logits.detach())
    close(found[seen.bool()], wanted[seen.bool()])
    assert all(m.padding.shape == (2, 1, 1, 11) for m in masks)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("name", "cache"), [(name, "dynamic") for name in MODELS] + [("Mistral", "static"), ("GptOss", "static")]
)
def test_greedy_text_is_that_of_eager_attention(name, cache):
    ids, seen = padded("left")
    more = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    wanted, found = by(name, lambda m: m.generate(ids, attention_mask=seen, **more))
    assert found.equal(wanted) and found.shape == (2, 15)


@pytest.mark.parametrize(
    ("name", "cache"),
    [(name, "dynamic") for name in ("Llama", "GptOss", "Gemma2")] + [("Llama", "static"), ("Qwen3", "static")],
)
def test_a_token_at_a_time_is_decoded(name, cache, monkeypatch):
    """By the operator that splits keys, where no key is padding."""
    asked, ours = [], huggingface.ops.decode_attention
    monkeypatch.setattr(
        huggingface.ops, "decode_attention", lambda q, *a, **n: asked.append(q.shape[2]) or ours(q, *a, **n)
    )
    more = {"cache_implementation": cache, "disable_compile": True, "max_new_tokens": 4, "do_sample": False}
    wanted, found = by(name, lambda m: m.generate(tokens(), **more))
    assert found.equal(wanted) and asked == [1] * 6  # three tokens, two layers


def test_text_continues_from_a_cache(masks):
    """A prompt in two parts, the second of several tokens: queries at the end of the keys."""

    def parts(m):
        cache = transformers.DynamicCache(config=m.config)
        m(tokens()[:, :4], cache=cache)
        return m(tokens()[:, 4:], cache=cache).logits.detach()

    for name in ("Llama", "Mistral"):
        wanted, found = by(name, parts)
        close(found, wanted)
        assert isinstance(masks[-1], Visible)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences_do_not_see_each_other(name, masks):
    at = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]], device=DEVICE)
    wanted, found = by(name, lambda m: m(tokens(), position_ids=at, use_cache=False).logits.detach())
    close(found, wanted)
    assert all(m.sequences.tolist() == [0, 3, 11, 20, 22] for m in masks)
    model(name).set_attn_implementation("weft")
    close(found[:1, :3], model(name)(tokens()[:1, :3], use_cache=False).logits.detach())


def test_a_compiler_gets_what_eager_mode_gives():
    def compiled(m):
        whole = torch.compile(lambda ids: m(ids, use_cache=False).logits, backend="eager", fullgraph=True)
        return whole(tokens()).detach()

    wanted, found = by("Mistral", compiled)
    close(found, wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("how", [{}, {"window": (3, None)}, {"padding": True}, {"sequences": True}])
def test_a_mask_that_is_not_stored_is_made_when_it_is_asked_for(causal, how):
    more = dict(how)
    if "padding" in how:
        more["padding"] = torch.arange(7, device=DEVICE).ge(torch.tensor([[2], [0]], device=DEVICE))[:, None, None]
    if "sequences" in how:
        more["sequences"] = torch.tensor([0, 3, 7, 12, 14], dtype=torch.int32, device=DEVICE)
    mask = Visible((2, 1, 7, 7), DEVICE, causal=causal, **more)
    for b in range(2):
        for i in range(7):
            for j in range(7):
                seen = (j <= i or not causal) and ("window" not in how or i - j <= 3)
                seen = seen and ("padding" not in how or b == 1 or j >= 2)
                seen = seen and ("sequences" not in how or (i < (3, 5)[b]) == (j < (3, 5)[b]))
                assert bool(mask[b, 0, i, j]) == seen
    assert not isinstance(mask & True, Visible) and mask.dtype == torch.bool and "causal" in repr(mask)


@pytest.mark.parametrize("more", ["padding", "position_bias"])
def test_packed_sequences_with_more_to_hide_or_add(more):
    q, bias = torch.randn(2, 2, 7, 16, device=DEVICE), torch.randn(1, 2, 7, 7, device=DEVICE)
    padding = torch.arange(7, device=DEVICE).ge(1).expand(2, 1, 1, 7) if more == "padding" else None
    sequences = torch.tensor([0, 3, 7, 12, 14], dtype=torch.int32, device=DEVICE)
    mask = Visible((2, 1, 7, 7), DEVICE, causal=True, padding=padding, sequences=sequences)
    call = {} if more == "padding" else {"position_bias": bias}
    found, wanted = (huggingface.attention(torch.nn.Module(), q, q, q, m, **call)[0] for m in (mask, mask.dense()))
    close(found, wanted)


def test_patterns_are_known_by_what_they_are():
    mu = masking_utils
    assert huggingface.same(mu.sliding_window_causal_mask_function(4), mu.sliding_window_causal_mask_function(4))
    for other in (mu.sliding_window_causal_mask_function(5), mu.causal_mask_function, mu.sliding_window_overlay(4),
                  mu.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
                  mu.or_masks(mu.sliding_window_overlay(4), mu.causal_mask_function)):  # fmt: skip
        assert not huggingface.same(other, mu.sliding_window_causal_mask_function(4))
    chunks = mu.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    call = {"batch_size": 2, "q_length": 7, "kv_length": 7, "mask_function": chunks, "local_size": 3}
    stored = huggingface.mask(masking_utils, **call)
    assert not isinstance(stored, Visible) and stored.equal(mu.sdpa_mask(**call, allow_is_causal_skip=False))
    ahead = huggingface.mask(masking_utils, batch_size=1, q_length=2, kv_length=9, q_offset=3)  # a static cache
    assert isinstance(ahead, Visible) and ahead.length == 5 and ahead[0, 0].sum(-1).tolist() == [4, 5]


def test_weights_are_refused():
    q = torch.zeros(1, 2, 3, 16, device=DEVICE)
    with pytest.raises(ValueError, match="output_attentions is True; expected False"):
        huggingface.attention(torch.nn.Module(), q, q, q, None, output_attentions=True)


def test_an_encoder_sees_everything():
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    bert = transformers.BertModel(config).to(DEVICE).eval()
    found = []
    for implementation in ("eager", "weft"):
        bert.set_attn_implementation(implementation)
        found.append(
            [bert(tokens()).last_hidden_state, bert(tokens(), attention_mask=padded("right")[1]).last_hidden_state]
        )
    close(found[1][0], found[0][0])
    seen = padded("right")[1].bool()
    close(found[1][1][seen], found[0][1][seen])


def test_the_example_writes_the_same_text(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["hugging_face_attention.py"])
    example = runpy.run_path(str(ROOT / "examples/hugging_face_attention.py"))
    example["made"].__globals__.update(STEPS=1, TOKENS=4)
    example["main"]()
    assert "the same text: yes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options"),
    [("Llama", {}), ("Qwen3", {"qk_norm": 1e-6}), ("GptOss", {"bias": True, "sinks": True, "window": (3, None)})],
)
def test_grouped_query_attention_takes_a_layers_parameters(name, options):
    whole = model(name)
    whole.set_attn_implementation("eager")
    theirs = whole.model.layers[0].self_attn
    ours = GroupedQueryAttention(32, 4, 2, head_dim=16, **options).to(DEVICE)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tables = whole.model.rotary_emb(x, torch.arange(9, device=DEVICE)[None])
    mask = torch.full((9, 9), -torch.inf, device=DEVICE).triu(1)
    if "window" in options:
        mask += torch.full((9, 9), -torch.inf, device=DEVICE).tril(-4)
    wanted = theirs(hidden_states=x, position_embeddings=tables, attention_mask=mask[None, None])[0]
    cos, sin = (t[..., :8] for t in tables)  # Hugging Face repeats its tables in halves
    close(ours(x, (cos, sin)), wanted)
