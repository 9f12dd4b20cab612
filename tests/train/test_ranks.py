"""Several ranks over Gloo: the same losses as on one, checkpoints for any number of ranks, a rank that is killed."""

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from where import plain_environment

from weft.definition import UnknownName
from weft.train.launch import JobFile, RankFailed, launch, read
from weft.train.loop import Run, train
from weft.train.settings import GptSettings

SIZES = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "length": 32,
    "batch": 12,
    "steps": 6,
    "checkpoint_every": 3,
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
PYTORCH = {"operators": "torch", "optimizer": "adamw", "device": "cpu"}

# PyTorch's agent leaves the log files of the processes it started open
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(25):
        (tmp_path / "text" / f"{i}.txt").write_text(
            f"document {i}: " + "a quick brown fox jumps over a dog. " * (9 + i)
        )
    return tmp_path / "text"


def job(tmp_path, text, processes, out, *flags, command=None):
    """A training job of that many processes that is what a user starts: nothing interpreted."""
    words = ["weft", "train", "gpt", f"--text={text}", f"--out={tmp_path / out}", *FLAGS, *flags]
    env = {
        **{name: plain_environment()[name] for name in ("PYTHONPATH",)},
        "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WEFT_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    return JobFile(command or words, processes, env, logs=str(tmp_path / f"logs-{out}"))


def losses(tmp_path, out):
    return [float(row["loss"]) for row in csv.DictReader((tmp_path / out / "log.csv").read_text().splitlines())]


def half_done(folder: Path):
    """A run as it was after its third step."""
    shutil.rmtree(folder / "checkpoints" / "step-00000006")


@pytest.fixture
def one(tmp_path, text, monkeypatch):
    """The run on one rank, and its settings."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    settings = GptSettings(text=str(text), out=str(tmp_path / "one"), **SIZES, **PYTORCH)
    return train(settings), settings


def held(settings, folder):
    """Model and moments of the newest checkpoint in ``folder``, gathered on one rank."""
    settings = GptSettings(**{**vars(settings), "out": str(folder)})
    run = Run(settings, torch.device("cpu"), False, None)
    step = run.resumed()
    return step, [*run.model.state_dict().values(), *(v for s in run.optimizer.state.values() for v in s.values())]


PARALLEL = {
    "ddp": ["--parallel=ddp"], "fsdp": ["--parallel=fsdp"], "tensor": ["--tensor-parallel=2"],
    "fsdp-tensor": ["--parallel=fsdp", "--tensor-parallel=2"],
}  # fmt: skip
LONG = [("ddp", 2), ("ddp", 4), ("fsdp", 4), ("fsdp-tensor", 4)]
SHORT = [("fsdp", 2), ("tensor", 2)]  # each rank imports for some seconds
CASES = [pytest.param(*case, marks=pytest.mark.share(4)) for case in SHORT]
CASES += [pytest.param(*case, marks=pytest.mark.long) for case in LONG]


@pytest.mark.parametrize(("parallel", "processes"), CASES)
def test_ranks_train_as_one_and_resume_on_another_number(tmp_path, text, one, parallel, processes):
    """257 rows of the vocabulary divide unevenly; parts of a batch hold unequal numbers of targets."""
    result, settings = one
    plain = [f"--{name}={value}" for name, value in PYTORCH.items()]
    out = tmp_path / parallel
    launch(job(tmp_path, text, processes, parallel, *PARALLEL[parallel], "--accumulate=2", *plain))
    assert np.allclose(losses(tmp_path, parallel), result.loss, rtol=0, atol=1e-5)
    half_done(out)

    step, before = held(settings, out)
    assert step == 3
    resumed = GptSettings(**{**vars(settings), "out": str(out), "resume": True, "steps": 3})
    train(resumed)  # nothing is left to do but what a checkpoint holds
    assert all(torch.equal(a, b) for a, b in zip(before, held(settings, out)[1], strict=True))
    other = tmp_path / "other"
    shutil.copytree(out, other)
    if processes == 2:
        rest = train(GptSettings(**{**vars(settings), "out": str(other), "resume": True})).loss
    else:
        launch(job(tmp_path, text, 2, "other", "--parallel=fsdp", "--resume", *plain))
        rest = losses(tmp_path, "other")[3:]
    assert np.allclose(rest, result.loss[3:], rtol=0, atol=1e-5)


COMPRESSED = [
    pytest.param("fsdp", "fp8", marks=pytest.mark.share(4)),
    *(pytest.param(*c, marks=pytest.mark.long) for c in (("ddp", "powersgd"), ("fsdp", "bf16"))),
]


@pytest.mark.parametrize(("parallel", "compress"), COMPRESSED)
def test_compressed_gradients_train_as_whole_ones(tmp_path, text, one, parallel, compress):
    result, _ = one
    plain = [f"--{name}={value}" for name, value in PYTORCH.items()]
    launch(job(tmp_path, text, 2, "few", f"--parallel={parallel}", f"--compress={compress}", *plain))
    found = losses(tmp_path, "few")
    assert np.allclose(found, result.loss, rtol=0, atol=5e-3)
    if compress != "powersgd":  # its first steps are sent as they are
        assert not np.allclose(found, result.loss, rtol=0, atol=1e-6)


@pytest.mark.long
def test_four_ranks_share_each_layer(tmp_path, text, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    sizes = {**SIZES, "kv_heads": 4}
    expected = train(GptSettings(text=str(text), out=str(tmp_path / "one"), **sizes, **PYTORCH)).loss
    plain = [f"--{name}={value}" for name, value in PYTORCH.items()]
    launch(job(tmp_path, text, 4, "four", "--tensor-parallel=4", "--kv-heads=4", *plain))
    assert np.allclose(losses(tmp_path, "four"), expected, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["fsdp", "tensor"])
@pytest.mark.parametrize("optimizer", ["weft-adamw", "weft-muon"])
def test_our_operators_and_optimizers_on_shards(tmp_path, text, optimizer, parallel):
    launch(job(tmp_path, text, 2, "two", *PARALLEL[parallel], f"--optimizer={optimizer}", "--amp=bf16"))
    launch(job(tmp_path, text, 1, "one", "--parallel=fsdp", f"--optimizer={optimizer}", "--amp=bf16"))
    assert np.allclose(losses(tmp_path, "two"), losses(tmp_path, "one"), rtol=1e-2)


@pytest.mark.long
def test_two_nodes_are_one_job(tmp_path, text, one):
    """Both are this machine; a third one would be too many, and one alone says what it waits for."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    plain = [f"--{name}={value}" for name, value in PYTORCH.items()]
    node = job(tmp_path, text, 1, "nodes", "--parallel=ddp", *plain)
    node.nodes, node.rendezvous, node.wait_s = 2, f"localhost:{port}", 60
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({name: value for name, value in vars(node).items() if value not in ("", 0, -1)}))
    other = subprocess.Popen([sys.executable, "-m", "weft", "launch", str(file)], env=plain_environment())
    launch(node)
    assert other.wait(30) == 0
    assert np.allclose(losses(tmp_path, "nodes"), one[0].loss, rtol=0, atol=1e-5)
    node.wait_s = 2
    with pytest.raises(ConnectionError, match=f"2 nodes did not meet at localhost:{port}"):
        launch(node)


def test_each_job_has_threads_of_its_own(tmp_path, text, monkeypatch):
    from torch.distributed.launcher import api

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given, before, seen = job(tmp_path, text, 1, "threads"), dict(os.environ), []
    del given.env["OMP_NUM_THREADS"]
    monkeypatch.setattr(api, "elastic_launch", lambda *a: lambda *b: seen.append(os.environ["OMP_NUM_THREADS"]))
    for given.processes in (1, os.cpu_count()):
        launch(given)
    assert seen == [str(os.cpu_count()), "1"] and os.environ == before


def test_killed_rank_ends_the_others_with_its_log(tmp_path, text):
    program = tmp_path / "killed.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'was here', os.environ['WORD'], flush=True)\n"
        "if os.environ['RANK'] == '1': time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(300)\n"
    )
    given = job(tmp_path, text, 2, "killed", command=["python", str(program)])
    given.env["WORD"] = "twice"
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 1 was ended by signal 9.*rank 1 of 2 was here twice"):
        launch(given)
    assert time.monotonic() - started < 60


@pytest.mark.share(2)
def test_each_start_has_a_store_of_its_own(tmp_path, text):
    """In PyTorch's, shared by all, a rank could read the address of one that the last start had."""
    program = tmp_path / "again.py"
    program.write_text(
        "import os, sys\n"
        "from torch.distributed import rendezvous\n"
        "store, *_ = next(rendezvous('env://'))\n"
        "known, first = store.check(['address']), os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "store.set('address', 'here')\n"
        "sys.exit(first or known)\n"
    )
    again = job(tmp_path, text, 1, "again", command=["python", str(program)])
    again.retries = 1
    launch(again)


@pytest.mark.long
def test_a_retry_goes_on_from_the_checkpoint(tmp_path, text, one):
    result, settings = one
    given = json.dumps({**vars(settings), "out": str(tmp_path / "again"), "parallel": "fsdp"})
    program = tmp_path / "killed.py"
    program.write_text(
        "import json, os, sys\n"
        "from weft.train.loop import train\n"
        "from weft.train.settings import GptSettings\n"
        "def stepped(done, steps, figures):\n"
        "    print('step', done, flush=True)\n"
        "    if done == 5 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)\n"
        "train(GptSettings(**json.loads(sys.argv[1])), on_step=stepped)\n"
    )
    again = job(tmp_path, text, 2, "again", command=["python", str(program), given])
    again.retries = 1
    logs = launch(again)
    second = next(logs.glob("weft_*/attempt_1/0/stdout.log")).read_text()
    assert second.split("\n")[0] == "step 4"
    assert np.allclose(losses(tmp_path, "again"), result.loss, rtol=0, atol=1e-5)


def test_job_file(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("command: weft train gpt --parallel ddp\nprocesses: 2\nenv: {A: 1}\n")
    found = read(str(file))
    assert (
        found.command == ["weft", "train", "gpt", "--parallel", "ddp"]
        and found.env == {"A": "1"}
        and found.processes == 2
    )
    file.write_text("command: weft train gpt --text 'my texts'\n")
    assert read(str(file)).command[-1] == "my texts"
    wrong = [
        ("processes: 2", "command is None"),
        ("command: a\nprocesses: 0", "at least 1"),
        ("command: a\nproceses: 2", "processes"),
        ("command: a\nenv: 3", "names with values"),
        ("command: a\nnodes: 2", "host:port"),
        ("command: a 'b", "No closing quotation"),
        ("command: a\nlogs: 5", "logs is 5; expected text"),
        ("command: a\nnodes: 2\nrendezvous: node0", "host:port"),
    ]
    for content, message in wrong:
        file.write_text(content)
        with pytest.raises((ValueError, UnknownName), match=message):
            read(str(file))
    with pytest.raises(FileNotFoundError, match="not on the PATH"):
        launch(JobFile(["no-such-program"]))
