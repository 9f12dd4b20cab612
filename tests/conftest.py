"""Marks: ``gpu`` needs a GPU, ``device`` runs on the GPU where there is one and interpreted elsewhere, ``long`` is a long
property run, ``share(n)`` has many like parameters, one in n of a run. ``-m gpu`` on a GPU machine selects the first two.

WEFT_LONG selects the long runs: unset none, ``all``, or any other text (a commit) a share of them that differs from text to
text, so that continuous integration runs all of them over a few commits."""

import json
import os
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import turns
from chromium import CHROMIUM
from where import DEVICE  # before anything imports a kernel: without a GPU this switches Triton's interpreter on

NEEDS = {  # what the tests in a folder need: without it they are not collected, and the head of the run says so
    **dict.fromkeys(("bench", "course", "nn", "operators", "optim"), ("torch", "triton")),
    "comm": ("torch",),
    "cluster": ("numpy", "numba", "hypothesis"),
    "deploy": ("yaml", "numpy", "kubernetes_validate"),
    "export": ("torch", "onnx", "onnxscript", "onnxruntime"),
    "inference": ("torch", "tokenizers", "safetensors", "transformers", "gguf"),
    "train": ("torch", "sklearn"),
}
MISSING = {folder: [name for name in names if find_spec(name) is None] for folder, names in NEEDS.items()}
LONG_SHARES = 12  # a commit runs one in so many of the long tests


def pytest_ignore_collect(collection_path):
    return any(MISSING.get(folder.name) for folder in collection_path.parents) or None  # None: as other rules say


def pytest_report_header() -> list[str]:
    return [f"tests/{folder} is left out: {', '.join(names)} missing" for folder, names in MISSING.items() if names]


def pytest_configure(config):
    config.addinivalue_line("markers", "device: runs on the GPU where there is one, else in Triton's interpreter")


@pytest.hookimpl(tryfirst=True)  # before -m selects by mark
def pytest_collection_modifyitems(items):
    seen = defaultdict(int)  # of a test's parameters
    for item in items:
        if item.get_closest_marker("device"):  # NumPy's, from the interpreter's arithmetic on NaN and infinities
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
        if DEVICE == "cuda" and item.get_closest_marker("device"):
            item.add_marker(pytest.mark.gpu)
        elif DEVICE != "cuda" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU; PyTorch sees none here"))
        if item.get_closest_marker("long") and not (turns.WANTED and turns.has(item.nodeid, LONG_SHARES)):
            item.add_marker(pytest.mark.skip(reason="a long run: make test-all has it"))
        if (mark := item.get_closest_marker("share")) and DEVICE != "cuda" and turns.WANTED != "all":
            name, (of,) = item.nodeid.partition("[")[0], mark.args
            among, at = divmod(
                seen[name], of
            )  # of each n in a row one, so that it is not always the same of two dtypes
            seen[name] += 1
            if at != turns.turn(f"{name} {among}", of):
                item.add_marker(pytest.mark.skip(reason="not of this run: make test-all has it"))


def pytest_collection_finish():
    if DEVICE == "cpu" and "triton" in sys.modules:
        import quick_interpreter  # noqa: F401


@pytest.fixture
def device() -> str:
    return DEVICE


# ---- pages in a browser ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as tool:
        chromium = tool.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Opens a file; at the end, nothing may have been fetched but such files, and no error have been raised."""
    requests, errors, contexts, pages = [], [], [], []

    def opened(path: Path, width: int = 1280, **options):
        pages.append(path.as_uri())
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
        page.goto(pages[-1])
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith("data:")] == pages


# ---- commands, and files ---------------------------------------------------------------------------------------------

ROWS = "submit,duration,gpus,tenant\n0,10,4,a\n1,20,8,a\n1,5,2,b\n2,5,99,b\n"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs ``weft …`` in this process (PyTorch is imported once): exit status, standard output, standard error."""
    pytest.importorskip("typer")
    from weft import cli

    monkeypatch.setenv("WEFT_RESULTS", str(tmp_path / "results"))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, words)])
        capsys.readouterr()
        try:
            code = cli.main()
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def weft(command, monkeypatch):
    """Runs ``weft simulate …``: exit status, standard output, standard error on one line."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        code, out, err = command("simulate", *words)
        return code, out, " ".join(err.split())

    return run


@pytest.fixture
def broken(monkeypatch):
    """vector_add with an implementation that leaves out the last element."""
    from weft import registry
    from weft.definition import Implementation

    def wrong(x, y):
        out = x + y
        out[..., -1:] = 0
        return out

    op = registry.get("vector_add")
    made = Implementation("vector_add", "broken", wrong, "triton")
    monkeypatch.setitem(op.implementations, "broken", made)
    return op


@pytest.fixture
def file(tmp_path):
    """A trace of four jobs, one of which asks more GPUs than there are."""
    path = tmp_path / "trace.csv"
    path.write_text(ROWS)
    return path


@pytest.fixture
def usual(file):
    """That trace on one node, as words of the command."""
    return file, "--format", "csv", "--nodes", "1x8"


@pytest.fixture
def write(tmp_path):
    """Writes a file: text, bytes, or anything else as JSON."""

    def file(name: str, content) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, str | bytes):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return file


@pytest.fixture
def on_nodes(write):
    """Writes a trace, and gives the words of a command that reads it."""
    return lambda text, nodes="1x8": (write("t.csv", text), "--format", "csv", "--nodes", nodes)


@pytest.fixture
def tools(tmp_path):
    """Makes shell scripts, of which names have _ for -, and returns a PATH that has them first."""

    def path(**scripts: str) -> str:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, script in scripts.items():
            tool = folder / name.replace("_", "-")
            tool.write_text(f"#!/bin/bash\n{script}\n")
            tool.chmod(0o755)
        return f"{folder}{os.pathsep}{os.environ['PATH']}"

    return path
