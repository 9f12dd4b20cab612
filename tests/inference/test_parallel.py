"""Tensor parallelism: two ranks over Gloo, or of two GPUs, generate what one does."""

import json
import os
import subprocess
import types

import pytest
import tiny
import torch
from where import ROOT, python

import weft
from weft.inference.checkpoint import Folder
from weft.inference.config import read_config
from weft.inference.model import Decoder
from weft.inference.quantize_model import write
from weft.inference.quantized import Scheme
from weft.inference.server import team


def ranks(folder, count, device):
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--redirects", "1",
                  "--log-dir", str(folder / "logs"), str(ROOT / "tests/inference/ranks.py"), str(folder), str(count), device,
                  OMP_NUM_THREADS="1")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    logs = sorted((folder / "logs").rglob("stdout.log"))
    return [json.loads(log.read_text()) for log in logs]


@pytest.mark.share(2)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family, changes", [
    ("qwen2", {}),  # biases of q, k and v, a head of its own
    pytest.param("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, marks=pytest.mark.long),
    pytest.param("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
                 marks=pytest.mark.long),
])  # fmt: skip
def test_two_ranks_generate_what_one_does(tmp_path, family, changes, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tiny.folder(tmp_path, family, **changes)
    found = ranks(tmp_path, 2, device)
    assert len(found) == 2 and found[0] == found[1]  # also what is drawn without a seed
    p = weft.SamplingParameters
    llm = weft.LLM(tmp_path, device=device, dtype="fp32", cache_tokens=512, most_sequences=8)
    alone = llm.generate(
        [list(range(40)), list(range(100, 117))], [p(max_tokens=12, temperature=0), p(max_tokens=12, seed=3)]
    )
    assert [list(c.token_ids) for c in alone] == [found[0][0], found[0][2]]


@pytest.mark.long  # another job; shares of codes are compared in test_quantized
def test_two_ranks_read_a_quantised_folder(tmp_path):
    tiny.folder(tmp_path / "model", "qwen2", hidden_size=128, intermediate_size=256)
    write(tmp_path / "model", tmp_path / "out", Scheme.of("int4:64:asymmetric"))
    found = ranks(tmp_path / "out", 2, "cpu")
    llm = weft.LLM(tmp_path / "out", device="cpu", dtype="fp32", cache_tokens=512, most_sequences=8)
    alone = llm.generate([list(range(40))], weft.SamplingParameters(max_tokens=12, temperature=0))
    assert found[0] == found[1] and found[0][0] == list(alone[0].token_ids)


def test_ranks_share_the_cores(monkeypatch):
    """Of a machine on which PyTorch would take seven threads."""
    for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    class Started:
        def __init__(self, _, env, **more):
            started.append(env["OMP_NUM_THREADS"])

    set_to, started = [], []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(team.Team, "watch", lambda self: None)
    monkeypatch.setattr(team.Team, "end", lambda self: [said.close() for _, said in self.started.values()])
    with team.team(3):
        assert set_to == [2] and started == ["2", "2"]


def test_parallelism_that_cannot_be(tmp_path, monkeypatch):
    tiny.folder(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        weft.LLM(tmp_path, device="cpu", tensor_parallel=2)


@pytest.mark.parametrize("family, changes, why", [
    ("llama", {}, "2 key/value heads and 96 hidden units"),
    ("qwen3_moe", {"num_key_value_heads": 4, "moe_intermediate_size": 30, "num_experts": 4, "num_experts_per_tok": 2},
     "4 key/value heads and 96 and 30 hidden units"),
])  # fmt: skip
def test_what_four_ranks_cannot_share_is_named(tmp_path, family, changes, why):
    tiny.folder(tmp_path, family, **changes)
    exchange = types.SimpleNamespace(rank=3, ranks=4)
    with pytest.raises(ValueError, match=f"tensor parallelism of 4: expected a divisor of the model's {why}"):
        Decoder(read_config(tmp_path), Folder(tmp_path), torch.device("cpu"), torch.float32, exchange=exchange)
