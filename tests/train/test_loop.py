"""Training on one device: what is learned, what a checkpoint holds, and what happens when something goes wrong."""

import csv
import errno
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from where import printed

from weft.definition import UnknownName
from weft.train import checkpoint, images
from weft.train.decoder import IGNORE
from weft.train.jobs import job
from weft.train.log import Log
from weft.train.loop import NotFinite, Run, learning_rate, train
from weft.train.settings import CnnSettings, GptSettings, read

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "length": 32, "batch": 8, "steps": 6}
PYTORCH = {"operators": "torch", "optimizer": "adamw", "device": "cpu"}  # in the tests' process ours are interpreted


@pytest.fixture(autouse=True)
def one_thread():
    """Small products on several threads wait for each other where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpt(tmp_path, monkeypatch):
    """Settings of a small decoder on a text of several short documents."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for i in range(25):
        (text / f"{i:02}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * (5 + i))

    def settings(**changed):
        return GptSettings(**{"text": str(text), "out": str(tmp_path / "run"), **PYTORCH, **SMALL, **changed})

    return settings


def cnn(tmp_path, **changed):
    return CnnSettings(**{"out": str(tmp_path / "run"), "epochs": 1, **PYTORCH, **changed})


def weights(settings):
    """All that the newest checkpoint of a run holds."""
    run = Run(settings, torch.device("cpu"), True, None)
    run.resumed()
    model = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    state = run.optimizer.state_dict()["state"]
    return model | {f"{i}.{name}": value for i, of in state.items() for name, value in of.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


def test_log_has_every_step(tmp_path):
    result = train(cnn(tmp_path))
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, result.steps + 1)) and result.steps == 22
    assert float(rows[-1]["accuracy"]) == result.accuracy and float(rows[3]["loss"]) == result.loss[3]


def test_loss_falls_on_text(gpt):
    result = train(gpt(steps=40, lr=5e-3))
    assert result.loss[0] == pytest.approx(np.log(257), rel=0.02)  # nothing is known at first
    assert result.loss[-1] < 2.8 and result.validation_loss < 3
    assert result.rate > 0 and result.mfu is None


def test_resume_is_bit_for_bit(gpt, tmp_path):
    whole = train(gpt(out=str(tmp_path / "whole")))
    settings = gpt(checkpoint_every=3)
    train(settings)
    (last,) = (tmp_path / "run" / "checkpoints").glob("*6")
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    settings.resume = True
    rest = train(settings)
    assert rest.loss == whole.loss[3:] and rest.validation_loss == whole.validation_loss
    assert_same(weights(gpt(out=str(tmp_path / "whole"))), weights(settings))
    assert len(list(csv.DictReader((tmp_path / "run" / "log.csv").read_text().splitlines()))) == 6


def test_a_run_that_is_killed_lacks_no_row_of_its_log(gpt, monkeypatch):
    """As a checkpoint is written, its row is there; a row that was cut is not taken for that of another step."""
    settings = gpt(checkpoint_every=3)
    log = Path(settings.out, "log.csv")
    save, there = checkpoint.save, []
    monkeypatch.setattr(checkpoint, "save", lambda *a: there.append(log.read_text().count("\n") - 1) or save(*a))
    whole = train(settings).loss
    assert there == [3, 6]
    shutil.rmtree(Path(settings.out, "checkpoints", "step-00000006"))
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]) + "1,5.5")  # of 1x, say
    train(gpt(checkpoint_every=3, resume=True))
    assert [float(row["loss"]) for row in csv.DictReader(log.read_text().splitlines())] == whole


def test_an_earlier_longer_run_in_the_folder_is_not_gone_on_with(gpt, tmp_path, monkeypatch):
    train(gpt(steps=5, checkpoint_every=4))
    whole = train(gpt(seed=3, out=str(tmp_path / "other"))).loss
    train(
        gpt(seed=3, checkpoint_every=1),
        on_step=lambda done, of, figures: done == 2 and os.kill(os.getpid(), signal.SIGINT),
    )
    found = checkpoint.newest(str(tmp_path / "run"))
    assert found.name == "step-00000003"
    assert train(gpt(seed=3, resume=True)).loss == whole[3:]


def test_a_job_that_is_started_again_goes_on(gpt, monkeypatch):
    monkeypatch.setenv("WEFT_JOB", "a")
    settings = gpt(checkpoint_every=3)
    whole = train(settings).loss
    (Path(settings.out) / "checkpoints" / "step-00000006" / "weft.json").unlink()
    assert train(settings, save=False).loss == whole[3:]
    assert train(gpt(checkpoint_every=3, lr=0.0), save=False).loss[0] == whole[0]  # the job's next command
    for other in ("b", ""):
        monkeypatch.setenv("WEFT_JOB", other)
        assert train(settings, save=False).loss == whole


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_clocks_of_machines_may_differ(gpt, monkeypatch, ahead):
    """A job that has the folder of an older one goes on with its own checkpoints, and keeps them."""
    settings, now = gpt(checkpoint_every=2), time.time
    monkeypatch.setenv("WEFT_JOB", "old")
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + ahead)
        whole = train(settings).loss
    monkeypatch.setenv("WEFT_JOB", "new")
    stop = lambda done, of, figures: done == 1 and os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    assert train(settings, on_step=stop).checkpoint.endswith("step-00000002")
    assert checkpoint.newest(settings.out).name == "step-00000002"
    assert train(settings).loss == whole[2:]


@pytest.mark.share(2)
def test_resume_of_a_cnn_has_its_statistics(tmp_path):
    whole = train(cnn(tmp_path, out=str(tmp_path / "whole"), amp="bf16"))
    train(cnn(tmp_path, checkpoint_every=11, amp="bf16"))
    for file in (tmp_path / "run" / "checkpoints").glob("*22/weft.json"):
        file.unlink()  # incomplete: not the newest
    rest = train(cnn(tmp_path, resume=True, amp="bf16"))
    assert rest.loss == whole.loss[11:] and rest.accuracy == whole.accuracy


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What plain_process.py found."""
    program = Path(__file__).with_name("plain_process.py")
    return json.loads(printed(str(program), str(tmp_path_factory.mktemp("plain")), CUDA_VISIBLE_DEVICES=""))


@pytest.mark.parametrize(
    ("seed", "amp", "rtol"), [(0, "none", 1e-4), (1, "none", 1e-4), (2, "none", 1e-4), (0, "bf16", 1e-2)]
)
@pytest.mark.share(2)
def test_operators_learn_as_pytorchs_do(plain, seed, amp, rtol):
    ours, theirs = plain[f"operators {seed} {amp}"]
    assert np.allclose(ours, theirs, rtol=rtol) and ours[-1] < 0.9 * ours[0]
    assert not np.allclose(ours, plain[f"operators {(seed + 1) % 3} none"][0], rtol=rtol / 10)


def test_fp8_learns_as_bf16_does(plain):
    ours, bf16 = plain["fp8"]
    assert np.allclose(ours, bf16, rtol=2e-2) and ours != bf16 and ours[-1] < 0.8 * ours[0]


@pytest.mark.parametrize("optimizer", ["weft-adamw", "weft-adamw-8bit"])
def test_resume_of_our_optimizers_is_bit_for_bit(plain, optimizer):
    losses, state, tensors = plain[f"resume {optimizer}"]
    assert losses and state and tensors > 15


def test_digits_reach_98_percent(plain):
    accuracy, seconds = plain["digits"]
    assert accuracy >= 0.98 and seconds < 60 and plain["interpreted"] == [False]


@pytest.mark.parametrize(
    "switch",
    [
        {"accumulate": 3},
        {"checkpoint_activations": True},
        {"prefetch": False},
        pytest.param({"amp": "fp16"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_switch_changes_no_loss(gpt, switch):
    plain, switched = train(gpt(), save=False), train(gpt(**switch), save=False)
    assert np.allclose(plain.loss, switched.loss, rtol=1e-2 if "amp" in switch else 1e-5)


def test_accumulation_weighs_parts_by_their_targets(gpt):
    made = job(gpt())
    x, y = made.data.batch(0)
    y[:5] = IGNORE
    y[5, 3:] = IGNORE
    norms = []
    for parts in (1, 4):
        run = Run(gpt(accumulate=parts), torch.device("cpu"), False, None)
        result = run.update(0, x, y, None)
        norms.append((result["loss"], result["gradient_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_images_channels_last(tmp_path):
    result = train(cnn(tmp_path, channels_last=True, epochs=2), save=False)
    assert result.loss[-1] < 0.5 * result.loss[0]


def test_deterministic_repeats_itself_and_leaves_pytorch_as_it_was(gpt):
    one, two = train(gpt(deterministic=True), save=False), train(gpt(deterministic=True), save=False)
    assert one.loss == two.loss and not torch.are_deterministic_algorithms_enabled()
    assert one.loss != train(gpt(seed=9), save=False).loss


def test_documents_end_is_no_context(gpt):
    data = job(gpt()).data
    x, y = data.batch(0)
    assert x.shape == y.shape == (8, 32)
    assert ((y == IGNORE) == (x == data.end)).all()
    inner = x[:, :-1] != data.end
    assert torch.equal(y[:, :-1][inner], x[:, 1:][inner])
    epoch = [tuple(row.tolist()) for step in range(data.steps_per_epoch) for row in data.batch(step)[0]]
    text = [tuple(int(t) for t in data.train[i * 32 : i * 32 + 32]) for i in range(data.windows)]
    assert len(epoch) == data.steps_per_epoch * 8 and set(epoch) <= set(text)


def poisoned(monkeypatch, at):
    plain = images.ImageData.batch

    def batch(self, step):
        x, y = plain(self, step)
        return (x * float("nan"), y) if step == at else (x, y)

    monkeypatch.setattr(images.ImageData, "batch", batch)


def test_nan_stops_with_step_batch_and_state(tmp_path, monkeypatch):
    clean = train(cnn(tmp_path, checkpoint_every=5, out=str(tmp_path / "clean")))
    poisoned(monkeypatch, 5)
    with pytest.raises(NotFinite, match=r"step 6: loss nan.*batch 6 of epoch 1.*step-00000005.*--skip-nan"):
        train(cnn(tmp_path))
    folder = tmp_path / "run" / "not-finite" / "step-00000005"
    assert torch.load(folder / "batch.pt")["x"].isnan().all()
    run = Run(cnn(tmp_path), torch.device("cpu"), False, None)
    checkpoint.load(folder, run.model, run.optimizer, {"job": "cnn", **run.job.model})
    assert all(value.isfinite().all() for value in run.model.state_dict().values())
    monkeypatch.undo()
    poisoned(monkeypatch, 5)
    rest = train(cnn(tmp_path, skip_nan=True))
    assert rest.skipped == [5] and np.isnan(rest.loss[5]) and np.isfinite(rest.loss[6:]).all()
    assert rest.loss[:5] == clean.loss[:5] and np.isfinite(rest.validation_loss)


def test_interrupt_leaves_a_checkpoint(gpt, tmp_path):
    handler = signal.getsignal(signal.SIGINT)

    def press(done, steps, figures):
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    result = train(gpt(), on_step=press)
    assert result.interrupted and result.steps == 3 and result.checkpoint.endswith("step-00000003")
    assert signal.getsignal(signal.SIGINT) is handler
    assert train(gpt(resume=True)).loss == train(gpt(out=str(tmp_path / "other"))).loss[3:]


def test_full_disk_leaves_the_checkpoint_before(gpt, tmp_path):
    settings = gpt(steps=2, checkpoint_every=1)
    train(settings)
    before = weights(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a larger file cannot be written: EFBIG
    try:
        with pytest.raises(OSError, match="the one before is whole") as caught:
            train(gpt(steps=3, resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and "File too large" in str(caught.value)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    assert_same(before, weights(settings))


def test_full_disk_of_the_log_names_it(tmp_path):
    (tmp_path / "run").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
    try:
        log = Log(str(tmp_path / "run"), 0, False)
        with pytest.raises(OSError, match=r"log cannot be written: File too large.*log\.csv"):
            for step in range(99):
                log.write({"step": step})
        log.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
        with pytest.raises(OSError, match=r"log cannot be written: File too large.*log\.csv"):
            Log(str(tmp_path / "run"), 0, False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_log_that_fails_ends_the_run_with_a_checkpoint(gpt, tmp_path, monkeypatch):
    write = Log.write

    def full(self, figures):
        if figures["step"] == 2:
            raise OSError(errno.ENOSPC, "log cannot be written: No space left on device", "log.csv")
        write(self, figures)

    monkeypatch.setattr(Log, "write", full)
    with pytest.raises(OSError, match=r"No space left.*ended after step 3, its state is in '.*step-00000003'"):
        train(gpt())
    monkeypatch.undo()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    assert train(gpt(resume=True)).loss == train(gpt(out=str(tmp_path / "other"))).loss[3:]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "weft.json"])
def test_a_truncated_checkpoint_is_named(gpt, tmp_path, name):
    train(gpt(steps=1))
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    whole = (folder / name).read_bytes()
    for part in (0, 1, 60, len(whole) // 2, len(whole) - 3):
        (folder / name).write_bytes(whole[:part])
        with pytest.raises(ValueError, match=r"checkpoint '.*step-00000001' cannot be read: ..") as caught:
            train(gpt(steps=2, resume=True))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "dtype"), [("meta", torch.float64), ("cpu", torch.float64), ("meta", torch.float32)]
)
def test_defaults_of_the_caller_change_nothing(gpt, tmp_path, device, dtype):
    images = cnn(tmp_path, batch=512)
    plain, of_images = train(gpt(steps=2), save=False).loss, train(images, save=False).loss
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        train(gpt(steps=1))
        assert train(gpt(steps=2, resume=True)).loss == plain[1:] and torch.empty(0).device.type == device
        assert train(images, save=False).loss == of_images and torch.get_default_dtype() == dtype
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_nan_is_said_where_its_state_cannot_be_saved(tmp_path, monkeypatch):
    poisoned(monkeypatch, 0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "not-finite").touch()
    with pytest.raises(NotFinite, match=r"step 1: loss nan.*could not be saved.*--skip-nan"):
        train(cnn(tmp_path))


def test_a_damaged_log_does_not_hinder_resuming(gpt, tmp_path):
    with torch.no_grad():  # of the caller
        train(gpt(steps=1))
    log = tmp_path / "run" / "log.csv"
    log.write_bytes(log.read_bytes() + b"\xff\x00\n2")
    train(gpt(steps=2, resume=True))
    assert [line.split(",")[0] for line in log.read_text().splitlines()] == ["step", "1", "2"]


def test_checkpoint_of_another_model_is_refused(gpt, tmp_path):
    train(gpt(steps=1))
    with pytest.raises(ValueError, match=r"another model: width 32 there, 64 here"):
        train(gpt(steps=2, width=64, resume=True))
    with pytest.raises(ValueError, match=r"seed=0, this run has 5"):
        train(gpt(steps=2, seed=5, resume=True))
    for file in (tmp_path / "run" / "checkpoints").glob("*/*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        train(gpt(steps=2, resume=True))
    for content, why in (("x", "weft.json: Expecting"), ("{}", "weft.json: lacks model")):
        (tmp_path / "run" / "checkpoints" / "step-00000001" / checkpoint.META).write_text(content)
        with pytest.raises(ValueError, match=f"step-00000001' cannot be read: {why}"):
            train(gpt(steps=2, resume=True))
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        train(gpt(out=str(tmp_path / "nothing"), resume=True))


def test_bad_text_is_named(gpt, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no text file"):
        train(gpt(text=str(empty)))
    (empty / "a.txt").touch()
    with pytest.raises(ValueError, match=r"1 file\(s\), all of them empty"):
        train(gpt(text=str(empty)))
    (empty / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="5 tokens for training; a batch of 8 x 32 needs 257"):
        train(gpt(text=str(empty)))
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        train(gpt(text=str(tmp_path / "absent")))


def idx(path, array, magic):
    import gzip

    shape = b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(gzip.compress(magic.to_bytes(4, "big") + shape + array.tobytes(), mtime=0))


def test_mnist_from_a_folder(tmp_path, monkeypatch):
    import hashlib

    generator = np.random.default_rng(0)
    names = list(images.FILES["mnist"])
    held = {}
    for name, count in zip(names, (40, 40, 20, 20), strict=True):
        size = (count, 28, 28) if "images" in name else (count,)
        held[name] = generator.integers(0, 10, size, dtype=np.uint8)
        idx(tmp_path / name, held[name], 2051 if "images" in name else 2049)
    settings = {"data": "mnist", "folder": str(tmp_path), "batch": 20}
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz' is damaged: its MD5 is"):
        train(cnn(tmp_path, **settings))
    sums = {name: ("", hashlib.md5((tmp_path / name).read_bytes()).hexdigest()) for name in names}
    monkeypatch.setitem(images.FILES, "mnist", sums)
    assert train(cnn(tmp_path, **settings), save=False).steps == 2
    read = [t.numpy() for part in images.read("mnist", str(tmp_path), False, 0) for t in part]
    assert all(
        np.array_equal(np.squeeze(a) * (255 if a.ndim > 1 else 1), b) for a, b in zip(read, held.values(), strict=True)
    )
    (tmp_path / names[2]).unlink()
    with pytest.raises(FileNotFoundError, match=f"{names[2]}' is not there; --download"):
        train(cnn(tmp_path, **settings))
    monkeypatch.setitem(images.FILES["mnist"], names[2], ("file:///nowhere/", "0"))
    with pytest.raises(OSError, match=f"'{names[2]}' could not be fetched"):
        train(cnn(tmp_path, **settings, download=True))
    assert not list(tmp_path.glob("*.part"))


def test_cifar_from_a_folder(tmp_path, monkeypatch):
    import hashlib
    import io
    import tarfile

    rows = np.random.default_rng(0).integers(0, 10, (6, 10, 3073), dtype=np.uint8)
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for i, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = rows[i].size
            archive.addfile(info, io.BytesIO(rows[i].tobytes()))
    found = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setitem(images.FILES, "cifar10", {path.name: ("", found)})
    (x, y), (test_x, _) = images.read("cifar10", str(tmp_path), False, 0)
    assert x.shape == (50, 3, 32, 32) and test_x.shape == (10, 3, 32, 32)
    assert y[10] == rows[1, 0, 0] and x[10, 1, 0, 2] * 255 == rows[1, 0, 1 + 1024 + 2]
    result = train(
        cnn(tmp_path, data="cifar10", folder=str(tmp_path), batch=25, channels_last=True, epochs=2), save=False
    )
    assert result.steps == 4 and np.isfinite(result.loss).all()
    cut = path.read_bytes()[:-200]
    path.write_bytes(cut)
    monkeypatch.setitem(images.FILES, "cifar10", {path.name: ("", hashlib.md5(cut).hexdigest())})
    with pytest.raises(ValueError, match=r"cifar10 in '.*': a file is damaged"):
        images.read("cifar10", str(tmp_path), False, 0)


def test_settings_from_file_and_flags(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("lr: 3e-4\nlayers: 3\ntf32: true\n")
    settings = read(GptSettings, str(file), {"layers": 2, "width": None})
    assert (settings.lr, settings.layers, settings.tf32, settings.width) == (3e-4, 2, True, 256)
    for text, message in (
        ("layer: 3", "layer"),
        ("layers: two", "expected int"),
        ("- 1", "names with values"),
        ("a: [", "YAML"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read(GptSettings, str(file), {})
    file.write_bytes(b"text: \xff")
    with pytest.raises(ValueError, match=r"job.yaml: no UTF-8 text"):
        read(GptSettings, str(file), {})


WRONG = [
    ({"amp": "fp8"}, "bf16, fp16, none"),
    ({"optimizer": "adamv"}, "adamw"),
    ({"batch": 0}, "batch is 0"),
    ({"device": "tpu"}, "cpu, cuda or cuda:N"),
    ({"device": "cuda:99"}, "PyTorch sees"),
    ({"parallel": "ddp"}, "torchrun"),
    ({"batch": 4, "accumulate": 5}, "take a larger one"),
    ({"heads": 3}, "divide heads"),
    ({"width": 30}, "multiple of twice"),
    ({"cuda_graph": True, "device": "cpu"}, "needs a GPU"),
    ({"cuda_graph": True, "compile": True}, "without compile"),
    ({"tensor_parallel": 3}, "divide kv_heads"),
    ({"tensor_parallel": 2, "parallel": "ddp"}, "parallel=none or fsdp"),
    ({"tensor_parallel": 2}, "needs torchrun's ranks"),
    ({"seed": 2**31}, "seed is 2147483648"),
    ({"compress": "fp4"}, "bf16, fp8, none, powersgd"),
    ({"compress": "fp8"}, "expected parallel=ddp or fsdp"),
    ({"compress": "powersgd", "parallel": "fsdp"}, "expected parallel=ddp .PowerSGD"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=str)
def test_wrong_settings_are_refused(gpt, changed, message):
    with pytest.raises((ValueError, UnknownName), match=message):
        train(gpt(**changed), save=False)


def test_learning_rate_rises_and_falls():
    rates = [learning_rate(1.0, step, 100) for step in range(100)]
    assert rates[0] == 0.2 and max(rates) == rates[5] == 1.0 and rates[-1] < 1e-3
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_missing_packages_name_the_install_line(gpt, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'weft\[tokenizers\]'"):
        train(gpt(tokenizer=str(tmp_path / "tokenizer.json")))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'weft\[tensorboard\]'"):
        train(gpt(tensorboard=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_cuda_graph_changes_no_loss(gpt):
    plain, graphed = (train(gpt(device="cuda", cuda_graph=graph), save=False) for graph in (False, True))
    assert np.allclose(plain.loss, graphed.loss, rtol=1e-4)


def test_command_trains_and_says_what_it_reached(command, tmp_path):
    plain = [f"--{name}={value}" for name, value in PYTORCH.items()]
    status, printed, told = command("train", "cnn", "--epochs", "1", "--out", tmp_path / "run", "--json", *plain)
    assert status == 0 and json.loads(printed)["steps"] == 22
    assert "(default: 64)" in " ".join(command("train", "cnn", "--help")[1].replace("│", " ").split())
    status, printed, told = command("train", "cnn", "--amp", "fp8")
    assert status == 2 and "bf16" in told and not printed
