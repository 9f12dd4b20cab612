"""What a run is predicted to need, and the ladder of techniques."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch

from weft.train import ablation, flops, loop, memory
from weft.train.jobs import job
from weft.train.loop import train
from weft.train.settings import GptSettings

PYTORCH = {"operators": "torch", "optimizer": "adamw", "device": "cpu"}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    sizes = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "length": 64, "batch": 8, "steps": 6}
    return GptSettings(text=str(text), out=str(tmp_path / "run"), **sizes, **PYTORCH)


@pytest.mark.long
def test_prediction_by_category_and_what_would_fit(settings):
    found = memory.predict(settings)
    parameters = sum(p.numel() for p in job(settings).build().parameters())
    assert found.categories["Parameter"] == pytest.approx(4 * parameters, rel=0.1)
    assert found.categories["Optstate"] == pytest.approx(8 * parameters, rel=0.1)
    assert found.peak == sum(found.categories.values()) and not found.fits
    tight = memory.predict(settings, limit=found.peak - 1)
    assert set(tight.fits) == {
        "--accumulate 2",
        "--optimizer weft-adamw-8bit",
        "--checkpoint-activations",
        "--amp bf16",
    }
    assert tight.fits["--checkpoint-activations"] < found.peak - 0.4 * found.categories["Activation"]
    assert tight.fits["--optimizer weft-adamw-8bit"] < found.peak - 5 * parameters
    assert all(size <= tight.limit for size in tight.fits.values())


def test_prediction_is_what_a_real_step_holds(settings):
    """The same tracker over real tensors: the fake ones have their sizes."""
    from torch.distributed._tools.mem_tracker import MemTracker

    made = job(settings)
    model = made.build()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = made.data.batch(0)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x, y)
    with tracker:
        for step in range(2):
            if step:
                tracker.reset_mod_stats()
            model(x, y)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    measured = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert memory.predict(settings).peak == pytest.approx(measured, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("changed", [{}, {"amp": "bf16"}, {"amp": "bf16", "checkpoint_activations": True}], ids=str)
def test_prediction_is_what_a_gpu_needs(settings, changed):
    sizes = {"device": "cuda", "layers": 4, "width": 512, "heads": 8, "length": 256, "batch": 16, "steps": 4}
    settings = dataclasses.replace(settings, **sizes, **changed)
    measured = train(settings, save=False).peak_memory_bytes
    assert memory.predict(settings, device=torch.device("cuda")).peak == pytest.approx(measured, rel=0.05)


def test_flops_are_those_of_the_products(settings):
    made = job(settings)
    model = made.build()
    products = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    linear = 6 * products * 8 * 64  # tokens; two products in backward
    attention = 12 * 2 * 8 * 64 * 64 * 64  # 2 layers, 8 x 64 tokens, 64 keys, width 64
    assert flops.of_step(made, 8) == pytest.approx(linear + attention, rel=0.01)


@pytest.mark.long
def test_ladder_has_each_technique_alone(settings, monkeypatch):
    kept = {
        k: ablation.TECHNIQUES[k] for k in ("amp bf16", "TF32", "channels last", "act. checkpointing", "CUDA graph")
    }
    monkeypatch.setattr(ablation, "TECHNIQUES", kept)
    monkeypatch.setattr(ablation, "TOGETHER", ("amp bf16", "TF32"))
    rungs = ablation.ladder(settings, 6)
    by_name = {r.technique: r for r in rungs}
    assert list(by_name) == ["baseline", *(k for k in kept if k != "channels last"), "together"]
    assert by_name["TF32"].why_not == by_name["CUDA graph"].why_not == "needs a GPU"
    base = by_name["baseline"]
    assert base.speedup == 1 and base.loss < 5.6
    assert by_name["act. checkpointing"].memory_bytes < base.memory_bytes
    assert by_name["act. checkpointing"].loss == pytest.approx(base.loss, rel=1e-5)
    assert by_name["amp bf16"].loss == pytest.approx(base.loss, rel=1e-2) and by_name["amp bf16"].loss != base.loss
    data, page = ablation.write(rungs, settings, settings.out)
    assert [r["technique"] for r in json.loads(data.read_text())["rungs"]] == list(by_name)
    html = page.read_text()
    assert "act. checkpointing" in html and not re.search(r"<(script|link)[^>]+(src|href)=", html)
    in_bf16 = {r.technique: r for r in ablation.ladder(dataclasses.replace(settings, amp="bf16"), 6)}
    assert list(in_bf16) == [name for name in by_name if name != "amp bf16"]
    assert in_bf16["baseline"].loss == pytest.approx(by_name["amp bf16"].loss, rel=1e-5)
    with pytest.raises(ValueError, match="at least 5"):
        ablation.ladder(settings, 4)
    with pytest.raises(ValueError, match="one device"):
        ablation.ladder(dataclasses.replace(settings, parallel="ddp"), 6)


def test_commands_print_them(command, settings, monkeypatch):
    flags = [
        f"--{k}={getattr(settings, k)}"
        for k in ("text", "layers", "width", "length", "batch", "operators", "optimizer", "out")
    ]
    status, printed, _ = command("train", "gpt", *flags, "--predict", "--json")
    assert status == 0 and json.loads(printed)["peak"] > 2**20
    found = memory.Prediction(3 * 2**20, {"Activation": 2**21, "Parameter": 2**20}, 2**21, {"--amp bf16": 2**20})
    monkeypatch.setattr(memory, "predict", lambda settings, limit, device: found)
    status, printed, _ = command("train", "gpt", *flags, "--predict", "--limit-gib", 2**-9)
    assert status == 0 and printed.startswith("Predicted memory at the peak of a step\n")
    assert re.search(r"Activation +2\.0 *\n.*Parameter +1\.0 *\n.*total +3\.0 *\n", printed, re.DOTALL)
    assert re.search(r"does not fit into 0\.00 GiB; with one switch it would:\n +--amp bf16 +1\.0 MiB", printed)


@pytest.mark.parametrize(
    ("peak", "fits", "message"),
    [
        (3 * 2**30, {"--amp bf16": 2**30}, "about 3.0 GiB of 2.0; what would fit: --amp bf16 (1.0 GiB)"),
        (3 * 2**30, {}, "what would fit: no single switch"),
        (2**30, {}, "1.0 GiB of 2.0: is another process on this GPU?"),
    ],
)
def test_out_of_memory_says_what_would_fit(command, settings, monkeypatch, peak, fits, message):
    def full(settings, on_step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "train", full)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**31))
    monkeypatch.setattr(memory, "predict", lambda settings, limit, device: memory.Prediction(peak, {}, limit, fits))
    status, _, told = command("train", "gpt", "--device=cpu")
    assert status != 0 and message in " ".join(told.split())
