"""Exported files compute what PyTorch does at other shapes; what cannot be exported says why."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from weft import cli, export

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "export_models.py"


@pytest.fixture
def run(monkeypatch, capsys):
    def ran(*words: str):
        monkeypatch.setattr(sys, "argv", ["weft", "export", *words])
        return cli.main(), *capsys.readouterr()

    return ran


@pytest.mark.parametrize(
    ("model", "dynamic"),
    [pytest.param("cnn", {0: "batch"}, marks=pytest.mark.long), ("transformer", {0: "batch", 1: "length"})],
)
def test_the_models_of_the_examples_at_two_sizes(model, dynamic, run, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.operators.call.INTERPRETING", False)  # on a CPU a user's operators are PyTorch's
    status, out, err = run(f"{EXAMPLE}:{model}", "--out", str(tmp_path / "m.onnx"), "--json")
    assert status == 0, err
    found = json.loads(out)
    (shape,) = found["inputs"].values()
    assert {i: n for i, n in enumerate(shape) if isinstance(n, str)} == dynamic
    assert [c["error"] <= 1e-4 for c in found["checks"]] == [True, True] and found["mib"] > 0.1
    import onnx

    onnx.checker.check_model(str(tmp_path / "m.onnx"))


@pytest.mark.share(2)
def test_a_trained_run_answers_as_its_checkpoint_does(run, tmp_path):
    from weft.export import trained
    from weft.train.loop import train
    from weft.train.settings import GptSettings

    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    sizes = {"steps": 2, "batch": 2, "length": 16, "layers": 1, "width": 32, "heads": 2, "kv_heads": 1}
    train(
        GptSettings(
            out=str(tmp_path / "run"), text=str(tmp_path), device="cpu", operators="torch", optimizer="adamw", **sizes
        )
    )
    model, first, second = trained.load(tmp_path / "run")
    assert model(second).shape == (3, 17, 257)
    y = torch.randint(257, first.shape)
    loss = nn.functional.cross_entropy(model(first).flatten(0, 1), y.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(model.network(first, y)[0].item(), rel=1e-6)
    status, out, err = run(str(tmp_path / "run"), "--out", str(tmp_path / "m.onnx"))
    assert status == 0, err
    assert out.count("equal to PyTorch") == 2
    (next((tmp_path / "run" / "checkpoints").iterdir()) / "weft.json").write_text("{}")
    assert "cannot be read" in run(str(tmp_path / "run"))[2]
    assert "holds no checkpoint" in run(str(tmp_path / "run" / "checkpoints"))[2]


class Fixed(nn.Module):
    """Depends on the size of the batch."""

    def forward(self, x):
        return x * 2 if x.shape[0] == 2 else x


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x, *rest):
        return {"sum": self.dropout(self.linear(x)) + rest[0], "of": [rest[0] * 2]}


def test_several_inputs_and_outputs_more_examples_and_the_training_mode(tmp_path):
    model, path = Two().train(), tmp_path / "m.onnx"
    model.dropout.eval()
    first, second, third = ([torch.rand(n, 4), torch.rand(n, 4)] for n in (2, 3, 9))
    found = export.to_onnx(model, first, second, path, check_at=[third])
    assert [c.shapes for c in found.checks] == [[[n, 4], [n, 4]] for n in (2, 3, 9)] and len(found.inputs) == 2
    assert model.training and not model.dropout.training and model.linear.training
    times = export.latency(model, first, path, compiled=False)
    assert times["eager"] > 0 and times["onnxruntime CPU"] > 0
    times = export.latency(model, first, tmp_path / "none.onnx", compiled=False)
    assert isinstance(times["onnxruntime CPU"], str)  # no such file: a row, not an error


def test_dimensions_have_names_that_are_the_same_where_sizes_must_be(tmp_path):
    class Pairs(nn.Module):
        def forward(self, x, y, z):
            return x[:, :, None] * y[:, None], torch.cat((z, z)).flatten()

    first, second = (
        [torch.rand(b, n), torch.rand(b, m), torch.rand(k, n, 2, 2)] for b, n, m, k in ((2, 3, 4, 5), (3, 5, 6, 7))
    )
    found = export.to_onnx(Pairs(), first, second, tmp_path / "m.onnx")
    assert found.inputs == {"x": ["batch", "length"], "y": ["batch", "y_1"], "z": ["z_0", "channels", 2, 2]}
    import onnxruntime

    outputs = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"]).get_outputs()
    assert outputs[0].shape == ["batch", "length", "y_1"] and "z_0" in str(outputs[1].shape)


@pytest.mark.parametrize(
    ("model", "inputs", "others", "says"),
    [
        (Fixed(), torch.ones(2, 6), torch.ones(3, 6), "cannot be exported"),
        (Random(), torch.ones(2, 6), torch.ones(3, 6), "differs from PyTorch's"),
        (nn.ReLU(), torch.ones(2), torch.ones(2, 3), "expected those of inputs"),
        (nn.ReLU(), 5, torch.ones(2), "expected a tensor on the CPU"),
        (nn.ReLU(), torch.ones(0), torch.ones(2), "with elements"),
    ],
)
def test_what_cannot_be_exported_leaves_no_file(model, inputs, others, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        export.to_onnx(model, [inputs], [others], tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("model", "names no function"),
        ("none.py:f", "no file"),
        (f"{EXAMPLE}:none", "no function 'none'"),
        ("os:getcwd", "returned str"),
    ],
)
def test_what_the_command_line_refuses(model, says, run):
    status, _, err = run(model)
    assert status == 2 and says in " ".join(err.split())
