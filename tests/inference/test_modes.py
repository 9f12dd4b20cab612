"""What a program has set in PyTorch, around the model's construction or around its use, does not change results."""

import contextlib

import pytest
import tiny
import torch

import weft
from weft.inference.parameters import SamplingParameters

PROMPTS = [[1, 2, 3], [4] * 20, [5, 6]]
EACH = [
    SamplingParameters(max_tokens=8, temperature=0, repetition_penalty=1.3),
    SamplingParameters(max_tokens=8, temperature=0.8, seed=1, top_p=0.9, logprobs=2),
    SamplingParameters(max_tokens=8, temperature=0.7, seed=2, top_k=5, min_p=0.01),
]


@contextlib.contextmanager
def setting(get, change, value):
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "float64": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "float16": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float16),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "precision": lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("modes") / "tiny"
    tiny.folder(path)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    return weft.LLM(folder, device="cpu")


def results(llm):
    return llm.generate(PROMPTS, EACH), [output.token_ids for output in llm.stream(PROMPTS[0], EACH[0])]


@pytest.mark.parametrize("mode", MODES)
def test_results_do_not_depend_on_the_programs_modes(folder, llm, mode):
    expected = results(llm)
    with MODES[mode]():
        assert results(llm) == expected
        made = weft.LLM(folder, device="cpu")
        assert results(made) == expected
    assert results(made) == expected
