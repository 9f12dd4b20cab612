"""The registry: operators found by where they lie, and names that are unknown."""

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import ops, registry
from weft.definition import UnknownName


def test_unknown_names_list_what_exists_and_the_nearest():
    op = registry.get("softmax")
    attempts = [
        (lambda: registry.get("softmx"), "unknown operator 'softmx'; did you mean 'softmax'?", "log_softmax"),
        (lambda: registry.select(["matmul", "sofmax"]), "'sofmax'; did you mean 'softmax'?", "log_softmax"),
        (lambda: op.find("tritn"), "implementation of 'softmax' 'tritn'; did you mean 'triton'?", "torch.compile"),
        (lambda: list(op.cases("benhc")), "workload set of 'softmax' 'benhc'; did you mean 'bench'?", "verify"),
        (lambda: list(op.cases("verify", ["bf61"])), "unknown dtype of 'softmax' 'bf61'; did you mean 'bf16'?", "fp32"),
        (lambda: op.parse("M=1,K=2"), "unknown axis of 'softmax' 'K'", "M, N"),
    ]
    for attempt, words, known in attempts:
        with pytest.raises(UnknownName, match=re.escape(words)) as caught:
            attempt()
        assert known in str(caught.value).partition("there are:")[2] and "\n" not in str(caught.value)


def test_a_name_unlike_any_other_gets_no_hint():
    with pytest.raises(UnknownName) as caught:
        registry.get("zzzzzzzz")
    assert "did you mean" not in str(caught.value) and all(name in str(caught.value) for name in registry.names())


def test_a_family_is_its_operators():
    patterns = [op.name for op in registry.select(["memory_access"])]
    assert "strided_access" in patterns and {registry.family(name) for name in patterns} == {"memory_access"}
    assert [op.name for op in registry.select(["softmax", "memory_access", "strided_access"])] == ["softmax", *patterns]
    with pytest.raises(UnknownName, match="did you mean 'memory_access'"):
        registry.select(["memory_acces"])


def test_ops_says_what_operators_there_are():
    words = r"unknown operator 'softmx'; did you mean 'softmax'\? \(there are: .*softmax"
    with pytest.raises(AttributeError, match=words):
        _ = ops.softmx
    with pytest.raises(UnknownName, match="did you mean 'softmax'"):
        ops.explain("softmx")
    assert set(registry.names()) <= set(dir(ops))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty operators folder in place of weft's."""
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    registry.modules.cache_clear()
    yield tmp_path
    registry.modules.cache_clear()


def test_an_operator_is_found_by_where_it_lies(folder, write):
    write("toys/double.py", "double = Operator(name='double')\n")
    write("toys/triple/__init__.py", "triple: Operator = Operator(\n    name='triple')\n")
    write("toys/kernels.py", "double = Operator(name='double')\n")  # not of its file's name
    write("toys/notes.py", "# notes = Operator(\n")
    write("halve.py", "halve = Operator(name='halve')\n")  # in no family
    assert registry.modules() == {"double": "weft.operators.toys.double", "triple": "weft.operators.toys.triple"}
    assert registry.family("triple") == "toys"


def test_an_operator_defined_twice_is_an_error_that_names_both(folder, write):
    write("a/double.py", "double = Operator(name='double')\n")
    write("b/double.py", "double = Operator(name='double')\n")
    words = r"'double' is defined twice: in weft\.operators\.a\.double and in .*b/double"
    with pytest.raises(ImportError, match=words):
        registry.names()


def test_a_missing_triton_is_an_error_with_the_install_line(folder, write, monkeypatch):
    import weft.operators

    write("toys/double.py", "import triton_of_another_world\ndouble = Operator()\n")
    write("toys/triple.py", "raise ModuleNotFoundError('no', name='triton.language')\ntriple = Operator()\n")
    monkeypatch.setattr(weft.operators, "__path__", [str(folder)])
    words = r"need triton.language, which is not installed: pip install 'weft\[gpu\]'"
    with pytest.raises(ModuleNotFoundError, match=words):
        registry.get("triple")
    with pytest.raises(ModuleNotFoundError, match="triton_of_another_world"):  # not PyTorch's absence: as it is
        registry.get("double")


def test_the_ladder_is_left_out_unless_it_is_asked_for():
    softmax = registry.get("softmax")
    usual, all_of_them = registry.implementations(softmax), registry.implementations(softmax, ladder=True)
    assert all(i.rung is None for i in usual) and len(all_of_them) - len(usual) == 8
    assert [i.name for i in registry.implementations(softmax, ["torch"])] == ["torch"]
