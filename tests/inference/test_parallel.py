"""Tensor parallelism: two ranks over Gloo generate what one does."""

import json

import pytest
import tiny
from where import ROOT, python

import weft


def ranks(folder, count):
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--redirects", "1",
                  "--log-dir", str(folder / "logs"), str(ROOT / "tests/inference/ranks.py"), str(folder), str(count),
                  OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    logs = sorted((folder / "logs").rglob("stdout.log"))
    return [json.loads(log.read_text()) for log in logs]


@pytest.mark.parametrize("family, changes", [
    ("qwen2", {}),  # biases of q, k and v, a head of its own
    pytest.param("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, marks=pytest.mark.long),
    pytest.param("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
                 marks=pytest.mark.long),
])  # fmt: skip
def test_two_ranks_generate_what_one_does(tmp_path, family, changes):
    tiny.folder(tmp_path, family, **changes)
    found = ranks(tmp_path, 2)
    assert len(found) == 2 and found[0] == found[1]  # also what is drawn without a seed
    p = weft.SamplingParameters
    llm = weft.LLM(tmp_path, device="cpu")
    alone = llm.generate(
        [list(range(40)), list(range(100, 117))], [p(max_tokens=12, temperature=0), p(max_tokens=12, seed=3)]
    )
    assert [list(c.token_ids) for c in alone] == [found[0][0], found[0][2]]


def test_parallelism_that_cannot_be(tmp_path, monkeypatch):
    tiny.folder(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        weft.LLM(tmp_path, device="cpu", tensor_parallel=2)
