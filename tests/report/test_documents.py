"""Generated tables and stubs are made from what is there, stay as they are when nothing changed, and say when they are
not today's; what the documents tell a reader to type works."""

import ast
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from report_samples import measurement

from weft import registry
from weft.cli import app
from weft.records import Store
from weft.report import documents, measured, stubs

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = documents.markdown_files(ROOT)
TABLE = "# Title\n\n<!-- weft:table operator=softmax gpu=nvidia-h200 -->\n<!-- weft:end -->\n\nprose\n"


def silent(text):
    pass


@pytest.fixture
def project(tmp_path):
    for name in ("README.md", "docs/deep/guide.md", "src/weft/operators/softmax/README.md", "other/notes.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TABLE, encoding="utf-8")
    (tmp_path / "docs" / "plain.md").write_text("no table\n")
    return tmp_path


def add_record(project, time_us=260.0):
    record = measurement("triton", time_us, 250.0, gpu="NVIDIA H200")
    Store(project / "results").append(record.gpu, "softmax", record)


def test_tables_are_written_once_and_then_left_alone(project):
    add_record(project)
    said = []
    assert documents.refresh_all(project, check=False, say=said.append) == 0
    tables = "README.md", "docs/deep/guide.md", "docs/measured/README.md", "docs/measured/softmax.md"
    written = [f"wrote {name}" for name in (*tables, "src/weft/operators/softmax/README.md")]
    assert said == [*written, "6 Markdown files, 5 changed"]
    text = (project / "README.md").read_text(encoding="utf-8")
    assert "| triton (µs) |" in text
    assert text.startswith("# Title\n") and text.endswith("\n\nprose\n")
    assert (project / "other" / "notes.md").read_text() == TABLE

    before = {path: path.stat().st_mtime_ns for path in documents.markdown_files(project)}
    assert documents.refresh_all(project, check=False, say=silent) == 0
    assert {path: path.stat().st_mtime_ns for path in documents.markdown_files(project)} == before
    assert documents.refresh_all(project, check=True, say=silent) == 0


def test_check_names_the_file_and_the_fix_and_writes_nothing(project):
    add_record(project)
    documents.refresh_all(project, check=False, say=silent)
    add_record(project, 300.0)
    before, said = (project / "README.md").read_text(encoding="utf-8"), []
    assert documents.refresh_all(project, check=True, say=said.append) == 1
    assert said[0] == "README.md: a table is out of date; fix: weft tables"
    assert (project / "README.md").read_text(encoding="utf-8") == before
    documents.refresh_all(project, check=False, say=silent)
    assert "| 300 |" in (project / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_disk_that_is_full_leaves_the_document_as_it_was(project, monkeypatch, failing):
    add_record(project)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"os.{failing}", full)
    with pytest.raises(OSError, match="No space left"):
        documents.refresh_all(project, check=False, say=silent)
    monkeypatch.undo()
    assert (project / "README.md").read_text(encoding="utf-8") == TABLE and not list(project.glob(".README*"))


def test_without_records_no_table_is_blanked(project):
    with pytest.raises(ValueError, match=r"unknown gpu of 'weft:table' 'nvidia-h200' \(there are: none\)"):
        documents.refresh_all(project, check=False, say=silent)


def test_wrong_markers_name_the_file(project):
    add_record(project, 300.0)
    table, gpu = TABLE.replace("softmax", "sofmax"), TABLE.replace("gpu", "card")
    for wrong, told in ((table, "did you mean 'softmax'"), (gpu, "card")):
        (project / "docs" / "plain.md").write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=told) as caught:
            documents.refresh_all(project, check=True, say=silent)
        assert "plain.md" in str(caught.value)


def test_pages_of_all_records_are_generated_and_removed_with_their_family(project):
    add_record(project)
    for made in (
        measurement("torch", 300.0, 250.0, gpu="NVIDIA H200", dtype="fp32"),
        measurement("ladder-1-naive", 900.0, 250.0, gpu="NVIDIA H200", ours=True),
        measurement("triton", 500.0, 250.0, ("torch", 550.0), gpu="Another GPU", direction="backward"),
        measurement("weft.ops", 12.0, 5.0, gpu="NVIDIA H200", metric="host time", cache="warm"),
        measurement("numpy", 77.0, 5.0, gpu="NVIDIA H200", metric="wall time", cache="warm"),
    ):
        Store(project / "results").append(made.gpu, "softmax", made)
    folder = project / "docs" / "measured"
    folder.mkdir()
    (folder / "gone.md").write_text(f"# Measured: gone\n{measured.GENERATED}\n")
    (folder / "own.md").write_text("written by hand\n")
    said = []
    documents.refresh_all(project, check=False, say=said.append)
    assert "removed docs/measured/gone.md" in said and (folder / "own.md").exists()
    page, index = ((folder / name).read_text(encoding="utf-8") for name in ("softmax.md", "README.md"))
    assert re.findall("^##+ .*", page, re.M) == [
        "## Kernels", "## softmax", "### softmax forward", "### softmax forward, wall time on the host, warm cache",
        "### softmax forward, steps of the ladder", "### softmax backward",
    ]  # fmt: skip
    assert "| a cluster of blocks holds a row |" in page  # the table of kernels
    assert "| 260 | – |" in page and "| ladder-1-naive | 900 |" in page and "| 77.0 |" in page and "550" not in page
    assert "| [softmax](softmax.md#softmax) | backward | bf16 | 1 |" in index and "| softmax | 12.0 |" in index
    assert documents.refresh_all(project, check=True, say=silent) == 0


def test_a_folder_without_documents_is_a_mistake(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `weft tables` in the project's folder"):
        documents.refresh_all(tmp_path, check=False, say=silent)


def test_every_operators_module_is_found_without_importing_it():
    for name, module in registry.modules().items():
        registry.get(name)
        assert stubs.module_file(module) == Path(sys.modules[module].__file__)


MODULE = '''
from collections.abc import Sequence
from torch import Tensor

EPS = 1e-5
TABLE = make()

@other.function
def wrong(x: Tensor) -> Tensor: ...

@thing.function
def thing_function(
    x: Tensor, sizes_of_each_part: Sequence[int], /, dim: int = -1, *rest_of_them: int, eps: float = EPS, how=TABLE
) -> Tensor:
    """Does it.

    More.
    """
'''
OPS = 'def explain(operator: str, /):\n    """Which."""\n'


def test_stub_has_signature_and_summary():
    text = stubs.stub({"thing": MODULE}, OPS)
    assert text.startswith("# generated by `weft stubs`\n")
    assert "from collections.abc import Sequence\n\nfrom torch import Tensor\n\nfrom weft." in text
    assert (
        "def thing(\n    x: Tensor,\n    sizes_of_each_part: Sequence[int],\n    /,\n    dim: int = -1,\n"
        '    *rest_of_them: int,\n    eps: float = 1e-05,\n    how=...,\n) -> Tensor:\n    """Does it."""\n'
    ) in text
    assert 'def explain(operator: str, /) -> Choice:\n    """Which."""\n' in text
    ast.parse(text)


@pytest.mark.parametrize(("old", "new", "told"), [
    ("@thing.function\n", "", "decorate one with @thing.function"),
    ("Sequence[int]", "Unknown", "'thing': annotation Unknown"),
])  # fmt: skip
def test_stub_says_what_is_missing(old, new, told):
    with pytest.raises(ValueError, match=told):
        stubs.stub({"thing": MODULE.replace(old, new)}, OPS)


def test_stub_is_written_once_and_checked(tmp_path):
    path = tmp_path / "ops.pyi"
    path.with_suffix(".py").write_text(OPS)
    said = []
    assert stubs.refresh_stub(True, said.append, path) == 1 and not path.exists()
    assert stubs.refresh_stub(False, said.append, path) == 0 and stubs.refresh_stub(True, said.append, path) == 0
    assert said == ["ops.pyi is out of date; fix: weft stubs", "wrote ops.pyi", "ops.pyi is up to date"]
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    assert {node.name for node in nodes if isinstance(node, ast.FunctionDef)} == {*registry.names(), "explain"}


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.S | re.M)


# Importing PyTorch is most of what a script takes, so one process runs several: each as if it had been started alone.
RUN = """
import runpy, sys
for command in sys.argv[1:]:
    sys.argv = command.split()
    try:
        (runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module)(sys.argv[0], run_name="__main__")
    except SystemExit as done:
        assert not done.code, command
"""


def run_python(*arguments, source=ROOT / "src"):
    """Starts a Python on a source folder; ``finish`` waits for it."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(source), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process):
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0, printed
    return printed


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The sources, with the documented operator as one of them."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src" / "weft", copy / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / "examples" / "squared_relu").glob("squared_relu.*"):
        shutil.copy(file, copy / "weft" / "operators" / "elementwise")
    return copy


@pytest.fixture(scope="module")
def started(copy):
    """All that takes seconds, side by side."""
    (usage,) = blocks("README.md", "python")
    without_torch = (
        "import sys; from weft.report import documents, stubs; stubs.refresh_stub(True, print)\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    (copy / "usage.py").write_text(usage, encoding="utf-8")
    examples = ROOT / "examples"
    processes = {
        "without torch": run_python("-c", without_torch, source=copy),
        "measure": run_python("-c", RUN, copy / "usage.py", examples / "softmax_against_the_limit.py"),
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()
        process.stdout.close()


def test_stubs_need_no_pytorch(started):
    assert "ops.pyi is out of date" in finish(started["without torch"])  # the copy has one operator more


@pytest.mark.share(4)
def test_the_documented_operators_verify(copy):
    commands = (ROOT / "examples/define_an_operator.py", "weft verify squared_relu")
    with run_python("-c", RUN, *commands, source=copy) as process:
        printed = finish(process)
    assert "0 failed; 6 of 6 mutants rejected" in printed, "examples/define_an_operator.py"
    assert " 0 failed" in printed and "10 of 10 mutants" in printed, "examples/squared_relu"


@pytest.mark.share(4)
def test_the_documented_cuda_kernel_compiles(copy):
    words = ("squared_relu", "--arch", "sm_90", "--processes", "1")
    with run_python("-m", "weft", "compile-check", *words, source=copy) as process:
        printed = finish(process)
    assert re.search(r"cuda +sm_90 +3 ", printed) and " 0 failed" in printed, printed


def test_readmes_usage_and_example_measure(started):
    printed = finish(started["measure"])
    assert " | " in printed, "README.md"
    assert "% of the limit" in printed and "weft chose " in printed, "examples/softmax_against_the_limit.py"


def commands():
    """Every `weft …` that a document shows, in code spans and shell blocks."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M))
        spans = re.findall(r"`(weft [a-z][^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
        for command in [*spans, *re.findall(r"^weft .*$", shell, re.M)]:
            for part in command.split("&&"):
                yield path.relative_to(ROOT).as_posix(), part.strip()


@functools.cache
def verbs_of_weft():
    return typer.main.get_command(app).commands


@pytest.mark.parametrize(("document", "command"), sorted(set(commands())))
def test_documented_commands_exist(document, command):
    _, verb, *words = shlex.split(command, comments=True)
    words = words[: words.index("--")] if "--" in words else words  # what follows is another program's
    verbs = verbs_of_weft()
    verb = f"{verb} {words[0]}" if words and f"{verb} {words[0]}" in verbs else verb
    assert verb in verbs, f"{document}: {command}"
    options = {name for parameter in verbs[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= options, f"{document}: {command}"


def test_both_readmes_show_the_same_code_and_tables():
    def without_comments(name):
        return [re.sub(r" *# .*", "", code) for code in (*blocks(name, "sh"), *blocks(name, "python"))]

    def markers(name):
        return re.findall(r"<!-- weft:.*?-->", (ROOT / name).read_text(encoding="utf-8"))

    assert without_comments("README.zh-CN.md") == without_comments("README.md")
    assert markers("README.zh-CN.md") == markers("README.md")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    text = re.sub(r"`[^`\n]*`", "", text)  # kernel[grid](x) is no link
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = target.partition("#")
        if "://" in file:
            continue
        to = path.parent / file if file else path
        assert to.exists(), f"{path.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", to.read_text(encoding="utf-8"), re.M)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target
