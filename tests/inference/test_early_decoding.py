"""A decoding step whose kernels start early has the bits of one whose kernels are launched one after another."""

import contextlib

import pytest
import tiny
import torch

from weft.inference import model as decoder
from weft.inference.checkpoint import Folder
from weft.inference.config import read_config
from weft.inference.model import Batch, Decoder, Pages


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("sequences", [1, 2])
def test_early_starts_have_the_bits_of_late_ones(family, sequences, tmp_path, monkeypatch):
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "moe" in family else {}
    tiny.folder(tmp_path, family, num_hidden_layers=12, hidden_size=128, head_dim=32, **more)
    config = read_config(tmp_path)
    made = Decoder(config, Folder(tmp_path), torch.device("cuda"), torch.bfloat16)
    made.prepare(64)
    pages = Pages.empty(config, 4 * sequences, 16, torch.bfloat16, "cuda")
    torch.manual_seed(0)
    for t in (*pages.k, *pages.v):
        t.normal_()
    tables = torch.arange(4 * sequences, dtype=torch.int32, device="cuda").view(sequences, 4)
    lengths = torch.full((sequences,), 40, dtype=torch.int32, device="cuda")
    tokens = torch.zeros(sequences, dtype=torch.int64, device="cuda")
    batch = Batch(tokens, lengths, tables)
    with torch.inference_mode():
        made(batch, pages)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = made(batch, pages)
    monkeypatch.setattr(decoder, "early_start", contextlib.nullcontext)
    for token in range(100):
        tokens.fill_(token)
        want = made(batch, pages)
        for _ in range(3):
            graph.replay()
            assert torch.equal(logits, want)
