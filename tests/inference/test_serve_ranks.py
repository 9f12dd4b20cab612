"""``weft serve --tensor-parallel 2``: one server over two processes, and the ``openai`` client."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import tiny
import torch
from test_server import KEY, Server
from where import plain_environment, python

import weft


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "tiny"
    tiny.folder(path)
    return path


def others(process):
    """Process ids of the ranks that a server started, the first one first."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.share(2)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_serve_what_one_generates(model, device):
    """Texts, many at once, a client that leaves; then a rank is killed: its requests end with an error, and the server."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    llm = weft.LLM(model, device=device, dtype="fp32", cache_tokens=4096)
    asked = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    prompts = [f"prompt {i}" for i in range(24)]
    p = weft.SamplingParameters(max_tokens=12, temperature=0, ignore_eos=True)
    expected = [c.text for c in llm.generate(prompts, p)]
    server = Server(model, "--device", device, "--dtype", "fp32", "--cache-tokens", "4096", "--tensor-parallel", "2")
    try:
        _, rank = others(server.process)
        with ThreadPoolExecutor(24) as pool:
            found = list(pool.map(lambda text: server.client.completions.create(prompt=text, **asked), prompts))
        assert [f.choices[0].text for f in found] == expected
        pieces = server.client.completions.create(prompt=prompts[0], stream=True, **asked)
        assert "".join(piece.choices[0].text for piece in pieces) == expected[0]
        drawn = [
            server.client.completions.create(model="tiny", prompt="x", n=3, seed=5, max_tokens=8) for _ in range(2)
        ]
        assert [c.text for c in drawn[0].choices] == [c.text for c in drawn[1].choices]
        asked_too = {**asked, "max_tokens": 3, "logit_bias": {"7": 100}}
        assert server.client.completions.create(prompt="x", **asked_too).choices[0].text == "((("
        with pytest.raises(openai.BadRequestError, match="at most 255"):
            server.client.completions.create(model="tiny", prompt=[1] * 300)

        made = server.metric("generation_tokens_total")
        long = {"model": "tiny", "max_tokens": 200, "extra_body": {"ignore_eos": True}, "stream": True}
        for _ in range(3):
            with server.client.completions.create(prompt="leaves", **long) as stream:
                next(iter(stream))
        server.idle()
        assert server.metric("generation_tokens_total") - made < 3 * 200
        again = server.client.completions.create(prompt=prompts[3], **asked)
        assert again.choices[0].text == expected[3]  # the ranks still agree

        stream = iter(server.client.completions.create(prompt="is cut", n=8, **long))
        next(stream)
        subprocess.run(["kill", "-KILL", str(rank)], check=True)
        with pytest.raises(
            openai.APIError, match=r"engine failed: a rank of the server ended or failed, so the server ends$"
        ):
            list(stream)
        _, errors = server.process.communicate(timeout=30)
        assert server.process.returncode == 1, errors
        assert "rank 1 ended by signal SIGKILL; the other ranks end too" in errors and "Traceback" not in errors, errors
    finally:
        server.process.kill()


def gone(pids):
    for _ in range(100):
        if not any(map(alive, pids)):
            return True
        signal.sigtimedwait([], 0.1)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ranks, how", [
    (1, signal.SIGKILL), *(pytest.param(*each, marks=pytest.mark.long) for each in (
        (1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGKILL)
    )),
])  # fmt: skip
def test_no_process_is_left(model, ranks, how):
    server = Server(model, "--tensor-parallel", str(ranks))
    started = others(server.process)
    assert len(started) == ranks
    server.process.send_signal(how)
    _, errors = server.process.communicate(timeout=30)
    assert errors == "" and gone(started)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_engine_that_is_killed_ends_the_server(model, ranks):
    """Its requests end with an error, /health says so, and then the server ends with a word and a status."""
    server = Server(model, "--tensor-parallel", str(ranks))
    long = {"model": "tiny", "max_tokens": 200, "extra_body": {"ignore_eos": True}, "stream": True}
    try:
        started = others(server.process)
        stream = iter(server.client.completions.create(prompt="is cut", n=8, **long))
        next(stream)
        os.kill(started[0], signal.SIGKILL)
        with pytest.raises(openai.APIError, match=r"engine failed: .* ended.*, so the server ends$"):
            list(stream)
        health = server.root("/health")
        assert health.status_code == 503 and "so the server ends" in health.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="so the server ends"):
            server.client.completions.create(model="tiny", prompt="x")
        _, errors = server.process.communicate(timeout=30)
        who = (
            "the engine's process ended by signal SIGKILL; the server ends"
            if ranks == 1
            else "rank 0 ended by signal SIGKILL"
        )
        assert server.process.returncode == 1 and who in errors and "Traceback" not in errors, errors
        assert gone(started)
    finally:
        server.process.kill()
        server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
def test_ctrl_c_ends_the_processes(model):
    """A terminal sends the signal to all of them, while the model loads and later."""
    command = [sys.executable, "-m", "weft", "serve", str(model), "--port", "0", "--device", "cpu"]
    for loaded in (True, False):
        process = subprocess.Popen(
            command,
            env=plain_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # as in a terminal, whatever started the tests
        )
        if loaded:
            assert " at http://" in process.stdout.readline()
        while not (started := others(process)):
            signal.sigtimedwait([], 0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert "Traceback" not in errors and process.returncode in (130, -signal.SIGINT, 0), (
            process.returncode,
            errors,
        )
        assert gone(started)


@pytest.mark.long
def test_torchrun_starts_the_ranks(model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "weft",
        "serve",
    ]
    options = ["--device", "cpu", "--port", str(port), "--api-key", KEY, "--tensor-parallel", "2"]
    settings = plain_environment(OMP_NUM_THREADS="1")
    job = subprocess.Popen(
        [*command, str(model), *options], env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert " at http://" in job.stdout.readline()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, timeout=60)
        found = client.completions.create(model="tiny", prompt="x", max_tokens=5, temperature=0)
        assert found.usage.completion_tokens == 5
    finally:
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)


@pytest.mark.long
def test_generate_starts_its_ranks(model):
    asked = ["generate", str(model), "abc", "--plain", "--device", "cpu", "--max-tokens", "9", "--json"]
    one, two = (json.loads(python("-m", "weft", *asked, *more).stdout) for more in ([], ["--tensor-parallel", "2"]))
    assert one["text"] == two["text"] and one["generated_tokens"] == two["generated_tokens"]


@pytest.mark.long
def test_a_rank_that_cannot_start_is_said(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "weft", "serve", str(tmp_path / "none"), "--device", "cpu", "--tensor-parallel", "2"],
        capture_output=True, text=True, env=plain_environment(), timeout=90,
    )  # fmt: skip
    assert done.returncode == 2 and "no model at" in done.stderr and "Traceback" not in done.stderr, done.stderr
