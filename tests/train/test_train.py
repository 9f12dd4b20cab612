"""The first training job learns, says what it measured, and repeats itself from its seed."""

import math
import sys

import pytest
import torch

from weft.train import train
from weft.train.digits import HELD_OUT, digits


@pytest.fixture(scope="module")
def short():
    return train(epochs=3, seed=1)


def test_loss_falls_and_accuracy_rises(short):
    assert short.train_loss[-1] < 0.5 * short.train_loss[0]
    assert short.test_accuracy[-1] > 0.9
    assert all(math.isfinite(x) for x in short.train_loss + short.test_loss)


def test_run_says_what_it_was(short):
    curves = short.train_loss, short.test_loss, short.test_accuracy, short.seconds
    assert {len(curve) for curve in curves} == {short.epochs}
    assert short.train_images + short.test_images == 1797
    assert short.test_images == round(1797 * HELD_OUT)
    assert short.images_per_second > 0 and short.parameters == 151498
    assert short.device == "cpu" and short.hardware.startswith("CPU")
    assert short.versions["torch"] == torch.__version__ and "scikit-learn" in short.versions
    assert short.to_dict()["test_accuracy"] == short.test_accuracy


def test_seed_decides_everything(short):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    again = train(epochs=3, seed=1)
    assert torch.equal(before, torch.random.get_rng_state()), "training changed the caller's random state"
    for name in ("train_loss", "test_loss", "test_accuracy"):
        assert getattr(again, name) == getattr(short, name)
    assert train(epochs=3, seed=2).train_loss != short.train_loss


def test_full_run_reaches_97_percent():
    steps = []
    run = train(on_step=lambda done, total: steps.append((done, total)))
    assert run.test_accuracy[-1] >= 0.97
    assert steps[0][0] == 1 and steps[-1][0] == steps[-1][1] == len(steps)


def test_split_has_no_image_twice_and_every_digit():
    train_x, train_y, test_x, test_y = digits(seed=0)
    assert train_x.shape == (1438, 1, 8, 8) and test_x.shape == (359, 1, 8, 8)
    assert train_x.min() >= 0 and train_x.max() == 1
    assert set(test_y.tolist()) == set(range(10)) == set(train_y.tolist())
    seen = {image.numpy().tobytes() for image in train_x}
    assert not any(image.numpy().tobytes() in seen for image in test_x)


def test_missing_package_names_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'weft\["):
        digits(seed=0)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"PyTorch: pip install 'weft\["):
        train()


WRONG = [({"device": device}, "expected cpu, cuda") for device in ("tpu", "meta")]
WRONG += [({"device": "cuda:99"}, "PyTorch sees"), ({"epochs": 0}, "epochs=0"), ({"batch_size": 0}, "batch_size=0")]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train(**arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_learns_and_repeats_itself():
    one, two = train(device="cuda", epochs=5), train(device="cuda", epochs=5)
    assert one.test_accuracy[-1] > 0.93 and one.hardware == torch.cuda.get_device_name(0)
    assert one.train_loss == two.train_loss
