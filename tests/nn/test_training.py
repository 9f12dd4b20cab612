"""A small GPT learns alike with weft's attention and with PyTorch's."""

import runpy
import sys

import pytest
from where import DEVICE, ROOT

pytestmark = pytest.mark.device


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    made = runpy.run_path(str(ROOT / "examples/gpt_against_sdpa.py"))
    if DEVICE == "cpu":
        made["train"].__globals__.update(WIDTH=32, HEADS=2, KV_HEADS=1, LAYERS=2, CONTEXT=24, BATCH=2)
    return made


def test_a_small_gpt_learns_as_with_pytorchs_attention(example):
    """200 steps in bf16 on a GPU: the curves differ as those of PyTorch's own back ends do. Few in fp32 elsewhere."""
    steps, text = 200 if DEVICE == "cuda" else 4, example["Text"]().known
    ours, theirs, plain = (
        example["train"](example[by], text, steps) for by in ("by_weft", "by_torch", "by_torch_math")
    )
    noise = example["apart"](theirs, plain)
    assert theirs[-1] < theirs[0]
    assert example["apart"](ours, theirs) < max(2 * noise, 1e-5)
    wrong = example["train"](lambda q, k, v: example["by_torch"](q, k, v.roll(1, 2)), text, steps)
    assert example["apart"](wrong, theirs) > max(2 * noise, 1e-5)


def test_the_example_says_how_far_they_are_apart_and_draws_it(example, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["gpt_against_sdpa.py", "1", str(tmp_path / "picture.svg")])
    example["main"]()
    assert "weft and PyTorch differ by" in capsys.readouterr().out and "weft" in (tmp_path / "picture.svg").read_text()
